"""
What a method's file must have, so that train.py, sample.py and bench/ can use it: all they rely on.

Config       a dataclass of options (model.arg) that needs no arguments, with steps and batch_size;
             min_tokens, the fewest tokens that a training sequence may have. Two names are taken: recipe
             (2 is Medusa-2) and first_length (the backbone's).
             Raises ValueError("--option ...") for what cannot be.
Net          Net(cfg, target, vocab=None), a torch module: what is trained; the target is only borrowed,
             call by call. Has K, its draft positions. With vocab, ids (N,) of a draft vocabulary, it
             ends in model.DraftLMHead(target, vocab), called head; a Net without that argument has no
             draft vocabularies. compiled (optional): names of its methods that --compile compiles. No
             attribute of it is called target: what has one, and net, is a Medusa-2 with its own backbone.
             Raises ValueError as Config does.
predictions  predictions(net, target, x), x (B, T): for k = 1..K yields logits (M, V), the tokens (M,) that
             should have been guessed, and the target's own logits (M, V) for them. With net.eval()
             M = B (T - k - 1): all anchors t, in the order of x[:, k+1:].flatten(), as calibration
             counts them; while training they may be fewer.
Drafter      Drafter(net, target, shape=None, max_nodes=16, floor=0.0, ..): shape, a tree.Shape, fixes the
             tree (or ValueError, which names --tree); else it has at most max_nodes nodes, each but the root
             of a value above floor. More keyword arguments are options of this method alone. It has

             net                             the Net, as it was handed over
             cache_rows                      most cache rows that one forward writes behind the text: its
                                             largest tree
             start(target, max_len)          forget the last text; at most max_len tokens follow
             observe(tokens, hidden, cache)  these tokens (a list of T) became text: the target's hidden
                                             states (T, C) for them, and its cache, whose last T rows they are
             draft(root, sampler, limit=None) -> Tree   what may follow root, the last emitted token, which is
                                             not yet in the cache; limit: most nodes, None = max_nodes.
                                             Tree.value: how probable the path to a node is, 1 for the root
             target_forward(target, idx, pos, mask, cache, tree) -> hidden (1, N, C)       optional: runs the
                                             target itself (Hidden Transfer); tree None: the prompt
             depth                           optional: most levels of its trees, where that is not K
             node_budget                     given to it (plumbing.budget): says the limit of every draft
OPTIONS      (optional) {keyword argument of Drafter: help}: whole numbers that become command line options.
train        train(cfg, target, run) -> Net. for x in run.steps(net, [optimisers], evaluate): x (B, T)
             tokens; backward; run.sync(net, loss), which clips gradients and keeps the figures; the
             optimisers' steps. evaluate(x) -> (loss, top-1 (K,)) on held-out text; a third part, if
             any, is more figures by name, for the log. run.vocab goes to Net, run.progress() is 0 at the
             start and 1 at the end.

Hidden states and logits of the target are as in model.py: target.hidden(x) (B, T, C), then target.lm_head.
"""
import functools
import inspect
from dataclasses import is_dataclass, replace

import torch

from model import GPT, GPTConfig
from tree import Sampler, Shape, Tree, complete
from plumbing.options import fail


@functools.cache
def check_method(name, module):
    """
    Runs an untrained method on a tiny random target, once a process. Ends with a line that names the
    clause, if it breaks one. Takes a fraction of a second and leaves the random numbers as they were.
    """
    def need(ok, clause):
        if not ok:
            fail(f"{name}.py breaks the contract of a method (plumbing/contract.py): {clause}")

    for part in ("Config", "Net", "predictions", "Drafter", "train"):
        need(hasattr(module, part), f"it has no {part}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = GPT(GPTConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=16, n_ffn=16,
                               vocab_size=40, block_size=64))
        target = target.double().eval().requires_grad_(False)
        for p in target.parameters():
            p.mul_(20 if p.dim() > 1 else 1)                    # so that its text depends on what came before
        cfg = check_config(module, need)
        net = check_net(module, cfg, target, need)
        check_predictions(module, net, target, need)
        check_drafter(module, net, target, need)
        check_train(module, cfg, target, need)


def check_config(module, need):
    need(is_dataclass(module.Config), "Config is no dataclass")
    try:
        cfg = module.Config()
    except TypeError as e:
        return need(False, f"Config() needs no arguments ({e})")
    for field in ("steps", "batch_size", "min_tokens"):
        need(type(getattr(cfg, field, None)) is int, f"Config has no number called {field}")
    return cfg


def check_net(module, cfg, target, need):
    net = module.Net(cfg, target).double().eval()
    need(isinstance(net, torch.nn.Module), "Net is no torch module")
    need(not hasattr(net, "target"), "Net keeps the target: it is only borrowed, call by call")
    need(type(getattr(net, "K", None)) is int and net.K > 0, "Net has no K, its draft positions")
    if "vocab" in inspect.signature(module.Net).parameters:
        ids = getattr(getattr(module.Net(cfg, target, torch.arange(8)), "head", None), "ids", None)
        need(ids is not None and len(ids) == 8,
             "Net(cfg, target, vocab) has no head = DraftLMHead(target, vocab)")
    return net


@torch.no_grad()
def check_predictions(module, net, target, need):
    B, T = 2, net.K + 6
    x = torch.randint(40, (B, T))
    found = list(module.predictions(net, target, x))
    need(len(found) == net.K, f"predictions yields {len(found)} times, and K is {net.K}")
    for k, parts in enumerate(found, 1):
        need(len(parts) == 3, "predictions yields logits, tokens and the target's logits")
        logits, truth, p = parts
        M = B * (T - k - 1)
        need(tuple(logits.shape) == (M, 40) == tuple(p.shape),
             f"predictions yields logits {tuple(logits.shape)} for k = {k}, not B (T - k - 1) rows, "
             f"{(M, 40)}")
        need(torch.equal(truth, x[:, k + 1:].flatten()),
             f"predictions yields other tokens than x[:, k+1:] for k = {k}")


def check_drafter(module, net, target, need):
    for option in getattr(module, "OPTIONS", {}):
        need(option in inspect.signature(module.Drafter).parameters,
             f"OPTIONS names {option}, which Drafter does not take")
    try:
        drafter = module.Drafter(net, target, None, 6, 0.0)
    except TypeError as e:
        return need(False, f"Drafter(net, target, shape, max_nodes, floor) cannot be made ({e})")
    for part in ("net", "cache_rows", "start", "observe", "draft"):
        need(hasattr(drafter, part), f"Drafter has no {part}")
    plain, _ = complete(target, [1, 2, 3], 12, None, Sampler(1.0))
    real, limits = drafter.draft, iter([6, 3, 2] * 4)

    def watched(root, sampler, limit=None):
        limit = next(limits)
        tree = real(root, sampler, limit)
        need(isinstance(tree, Tree) and tree.tokens[0] == root and tree.parent[0] == -1,
             "draft returns no Tree of root")
        need(len(tree) <= limit, f"draft returns {len(tree)} nodes where the limit is {limit}")
        need(len(tree) <= drafter.cache_rows, "Drafter.cache_rows is smaller than its largest tree")
        need(all(0 <= up < i for i, up in enumerate(tree.parent[1:], 1)),
             "draft returns a child before its parent")
        need(tree.value and len(tree.value) == len(tree) and tree.value[0] == 1,
             "draft returns a Tree without the value of every node, 1 for the root")
        return tree
    need(len(inspect.signature(real).parameters) >= 3, "draft takes root, sampler and limit")
    drafter.draft = watched
    text = complete(target, [1, 2, 3], 12, drafter, Sampler(1.0))[0]
    need(text == plain, "the Drafter changes the target's text: does it write to the target's cache?")
    check_tree(module, net, target, need)


def check_tree(module, net, target, need):
    """Does the first draft follow a shape, and a floor?"""
    shape = Shape([-1, 0, 0], [0, 1, 2])                               # the second and the third best guess
    for arguments in ((shape, 6, 0.0), (None, 6, 0.3)):
        try:
            drafter, trees = module.Drafter(net, target, *arguments), []
        except ValueError as e:
            need("--tree" in str(e), f"Drafter refuses a shape or a floor ({e})")
            continue
        real = drafter.draft

        def watched(*args):
            trees.append(real(*args))
            return trees[-1]
        drafter.draft = watched
        complete(target, [1, 2, 3], 8, drafter, Sampler(1.0))
        need(arguments[0] is None or trees[0].parent == shape.parent, "draft does not follow shape")
        need(all(value > arguments[2] for tree in trees for value in tree.value[1:]),
             "draft returns nodes of a value that is not above floor")


class TwoSteps:
    """Stands for a run: two batches, and what was asked of it."""
    vocab, synced = None, 0

    def __init__(self, T):
        self.T = T

    def steps(self, module, optimisers, evaluate):
        module.train()
        for self.step in (1, 2):
            yield torch.randint(40, (2, self.T))
        loss, top1 = evaluate(torch.randint(40, (2, self.T)))[:2]
        self.figures = torch.as_tensor(loss).numel() == 1 and torch.as_tensor(top1).dim() == 1

    def progress(self):
        return self.step / 2

    def sync(self, module, loss):
        self.synced += 1


def check_train(module, cfg, target, need):
    run = TwoSteps(max(cfg.min_tokens, 16))
    net = module.train(replace(cfg, steps=2, batch_size=2), target.float(), run)
    need(run.synced == 2, "train calls run.sync(net, loss) in every step: without it there are no figures")
    need(run.figures, "evaluate(x) returns the loss and top-1 (K,)")
    need(isinstance(net, torch.nn.Module) and hasattr(net, "K"), "train returns the Net")
