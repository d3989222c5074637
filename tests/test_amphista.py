"""
Amphista: adaptation stages, auto-embedding block, loss, cached drafting.
Tiny random targets in float64.
"""
import copy
import random

import pytest
import torch

import amphista
from amphista import Config, Drafter, Net, predictions, loss
from model import GPT, GPTConfig
from plumbing.budget import calibrate
from tree import Sampler, Stats, Tree, complete, grow
from plumbing.shapes import cartesian, chain

ABLATIONS = {
    "default": {},
    "no position": dict(position=False),
    "no block": dict(block=False),
    "causal block": dict(bidirectional=False),
    "no adaptation": dict(stages=0),
    "one stage": dict(stages=1),
    "no token": dict(token=False),
    "hard labels": dict(soft=0.0, hard=1.0),
    "soft labels": dict(hard=0.0),
    "own output": dict(share_head=False),
    "narrow": dict(n_ffn=8),
    "odd K": dict(n_heads=5),
    "one head": dict(n_heads=1),
    "all anchors": dict(anchors=0),
    "bare": dict(stages=0, block=False),
}


def make_target(style="llama", seed=0, dtype=torch.float64, block_size=64):
    """A random target whose text is not a loop: weights five times the usual ones."""
    torch.manual_seed(seed)
    heads = dict(n_head=4, n_kv_head=2 if style == "llama" else 4)
    target = GPT(GPTConfig(n_layer=2, n_embd=16, n_ffn=24, vocab_size=23, block_size=block_size, style=style,
                           **heads))
    for p in target.parameters():
        p.data.mul_(5 if p.dim() > 1 else 1)
    return target.to(dtype).eval().requires_grad_(False)


def make_net(target, shaken=True, seed=1, **options):
    """A net in evaluation mode; shaken = all its parameters random, so that no part hides behind a zero."""
    torch.manual_seed(seed)
    net = Net(Config(**options), target).to(target.wte.weight.dtype)
    for p in net.parameters() if shaken else ():
        p.data.add_(0.3 * torch.randn_like(p))
    return net.eval()


def text(target, B, T, seed=0):
    return torch.randint(target.cfg.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def from_scratch(net, target, x, h=None):
    """
    Logits (B, T-1, K, V) at every anchor of x (B, T), without a cache.
    h: the target's hidden states, if not its own.
    """
    h = target.hidden(x) if h is None else h
    stages = net.adapt(h[:, :-1], x[:, 1:], target)
    return net([s.flatten(0, 1) for s in stages], target).unflatten(0, (len(x), -1))


class Run:
    """train.Run's side of the contract: the batches, and what the training loop reports."""

    vocab = None

    def __init__(self, batches):
        self.batches, self.losses, self.without_grad = batches, [], []

    def steps(self, module, optimisers, evaluate):
        module.train()
        self.optimisers = optimisers
        yield from self.batches

    def sync(self, module, loss):
        self.without_grad += [name for name, p in module.named_parameters() if p.grad is None]
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        self.losses.append(loss.item())


class Spy(Sampler):
    """Remembers what the drafter's heads said at each step, and for which positions."""

    def rank(self, logits, positions):
        self.seen = getattr(self, "seen", []) + [(logits.clone(), list(positions))]
        return super().rank(logits, positions)


# --------------------------------------------------------------------------------------------------
# Initial state

@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ABLATIONS)
def test_untrained_heads_read_lm_head(style, name):
    """
    Catches an initialisation that loses the target's reading:
    FC not passing h on, residual branches not silent.
    """
    target = make_target(style)
    net, x = make_net(target, shaken=False, **ABLATIONS[name]), text(target, 2, 12)
    own, _ = target(x)
    seen = list(predictions(net, target, x))
    assert len(seen) == net.K
    for k, (logits, truth, theirs) in enumerate(seen, 1):
        assert logits.shape == (2 * (12 - k - 1), 23)                  # budget.calibrate counts on this M
        torch.testing.assert_close(logits, own[:, :-k - 1].flatten(0, 1))
        assert truth.tolist() == x[:, k + 1:].flatten().tolist()
        torch.testing.assert_close(theirs, own[:, k:-1].flatten(0, 1))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_checkpoint_holds_trained_tensors_only(style):
    """
    Catches the target, or a view of its matrices,
    or rotary tables registered in the net, and so saved or trained.
    """
    target = make_target(style)
    for options in ABLATIONS.values():
        net = make_net(target, **options)
        assert set(net.state_dict()) == {name for name, _ in net.named_parameters()}
        assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in target.parameters()}
        again = make_net(target, seed=7, **options)
        again.load_state_dict(net.state_dict())
        x = text(target, 1, 9)
        assert torch.equal(from_scratch(again, target, x), from_scratch(net, target, x))


# --------------------------------------------------------------------------------------------------
# Loss and gradient

@pytest.mark.parametrize("options", [
    {}, dict(n_heads=5, stages=1), dict(share_head=False, bidirectional=False),
])
def test_loss_equals_hand_written_sum(options):
    """
    Catches an off-by-one between head, truth and the target's distribution, and wrong weights:
    anchor by anchor, each from nothing but its own prefix and the chosen token.
    """
    target = make_target()
    net, x = make_net(target, soft=0.7, hard=0.2, decay=0.5, **options), text(target, 2, 9)
    p = target(x)[0].softmax(-1)
    total, right = 0.0, []
    for k in range(1, net.K + 1):
        errors, hits = [], []
        for b in range(2):
            for t in range(9 - k - 1):                                 # head k at t guesses x[t+1+k]
                prefix = x[b:b + 1, :t + 2]  # the anchor's text and the chosen token
                logq = from_scratch(net, target, prefix)[0, -1, k - 1].log_softmax(-1)
                errors.append(-0.7 * (p[b, t + k] * logq).sum() - 0.2 * logq[x[b, t + 1 + k]])
                hits.append(float(logq.argmax() == x[b, t + 1 + k]))
        total += 0.5**k * torch.stack(errors).mean()
        right.append(sum(hits) / len(hits))
    got, top1 = loss(net, target, x)
    torch.testing.assert_close(got, total, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(top1.double(), torch.tensor(right, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_anchors_are_a_subset_while_training():
    """
    Catches a subset whose guess, truth and target row belong to different anchors, repeated anchors,
    and a subset that is drawn in evaluation too.
    """
    target = make_target()
    net, x = make_net(target, anchors=4), text(target, 3, 20)
    whole = [torch.cat((g, t[:, None], o), -1) for g, t, o in predictions(net, target, x)]
    assert [len(w) for w in whole] == [3 * (20 - k - 1) for k in range(1, 5)]
    net.train()
    for _ in range(2):
        part = [torch.cat((g, t[:, None], o), -1) for g, t, o in predictions(net, target, x)]
        for k, (few, all_) in enumerate(zip(part, whole), 1):
            assert len(few) == 3 * 4
            match = (few[:, None] - all_).abs().amax(-1) < 1e-9
            at = match.float().argmax(-1)
            assert match.any(-1).all() and len(set(at.tolist())) == 12                   # found, each once
            assert (at // (20 - k - 1)).tolist() == [0] * 4 + [1] * 4 + [2] * 4  # four of each sequence
    elsewhere = text(target, 3, 20, seed=1)
    other = [torch.cat((g, t[:, None], o), -1) for g, t, o in predictions(net, target, elsewhere)]
    assert not torch.equal(other[0][:, 23], part[0][:, 23])


def test_gradient_reaches_trained_parameters_only():
    """
    Catches a part cut off from the loss, and a graph through the target's layers.
    (The two matrices that the net reads, embedding and lm_head, are frozen by the caller, train.py;
    the optimiser does not hold them either.)
    """
    for name, options in ABLATIONS.items():
        target = make_target()
        net, x = make_net(target, **options), text(target, 2, 12)
        target.requires_grad_(True)
        loss(net.train(), target, x)[0].backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters()), name
        touched = {n for n, p in target.named_parameters() if p.grad is not None}
        assert touched <= {"wte.weight", "lm_head.weight"}, name


def test_gradient_passes_the_silent_start():
    """
    Catches an initialisation in which two zeros in a row keep a part dead for ever:
    after one step all learn.
    """
    target = make_target(dtype=torch.float32)
    run = Run([text(target, 2, 12)] * 2)
    net = amphista.train(Config(lr=1e-2), target, run)
    assert run.without_grad == []
    assert all(p.grad.abs().sum() > 0 for p in net.parameters())


def test_target_stays_as_it_was():
    """Catches an optimiser that holds the target, even where somebody left it trainable."""
    target = make_target(dtype=torch.float32).requires_grad_(True)
    before = copy.deepcopy(target.state_dict())
    run = Run([text(target, 2, 12)] * 3)
    amphista.train(Config(lr=1e-2), target, run)
    assert all(torch.equal(before[name], p) for name, p in target.state_dict().items())
    held = {id(p) for o in run.optimisers for g in o.param_groups for p in g["params"]}
    assert not held & {id(p) for p in target.parameters()}


def test_loss_halves_on_one_batch():
    """
    Catches a loss that training cannot lower:
    wrong sign, detached parts, an optimiser without parameters.
    """
    target = make_target(dtype=torch.float32)
    run = Run([text(target, 2, 12)] * 40)
    amphista.train(Config(soft=0.0, hard=1.0, lr=1e-2), target, run)
    assert run.losses[-1] < run.losses[0] / 2, run.losses


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # the norms, slower under autocast but right
def test_calibration_and_autocast():
    """
    Catches a number of guesses that is not calibrate's number of samples,
    and a dtype that a GPU's bf16 cannot mix.
    """
    target = make_target(dtype=torch.float32)
    net = make_net(target)
    x = text(target, 2, 12)
    table = calibrate(amphista, net, target, [x, x[:1]])
    assert table["samples"] == [3 * (12 - k - 1) for k in range(1, 5)]
    # 23 ranks = the whole vocabulary
    assert all(sum(hits) == n for hits, n in zip(table["hits"], table["samples"]))
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = loss(net.train(), target, x)
    total.backward()
    assert torch.isfinite(total)


# --------------------------------------------------------------------------------------------------
# Who sees what

def test_draft_positions_see_each_other():
    """
    Catches a block that is causal by mistake, or that mixes anchors:
    a change of the far heads' input must reach the near heads of the same anchor,
    with the causal option it must not, and never another anchor.
    """
    target = make_target()
    for bidirectional in (True, False):
        net = make_net(target, bidirectional=bidirectional)
        s1, s2 = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        changed = s2.clone()
        changed[1] += 1                                                # anchor 1, read by heads 3 and 4 only
        a, b = net([s1, s2], target), net([s1, changed], target)       # (M, K, V)
        assert torch.equal(a[[0, 2]], b[[0, 2]])
        assert not torch.allclose(a[1, 2:], b[1, 2:])
        assert torch.allclose(a[1, :2], b[1, :2], rtol=0, atol=1e-12) != bidirectional
        x1 = s1.clone()
        x1[1] += 1                                                     # earlier positions are seen either way
        assert not torch.allclose(net([x1, s2], target)[1, 2:], a[1, 2:])
    net = make_net(target, block=False)
    assert torch.equal(net([s1, s2], target)[:, :2], net([s1, changed], target)[:, :2])


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("stages", [1, 2])
def test_future_does_not_leak(style, stages, monkeypatch):
    """
    Catches stages that look ahead: training would shine and drafting fail.
    The check can fail: without the causal mask it does.
    """
    target = make_target(style)
    net, t = make_net(target, stages=stages), 5
    x = text(target, 1, 12)
    later, chosen = x.clone(), x.clone()
    later[:, t + 2:] = (later[:, t + 2:] + 1) % 23
    chosen[:, t + 1] = (chosen[:, t + 1] + 1) % 23
    at = lambda x, h=None: from_scratch(net, target, x, h)[0, :t + 1]
    assert torch.allclose(at(x), at(later), rtol=0, atol=1e-12)
    assert not torch.allclose(at(x)[t], at(chosen)[t])  # the chosen token is seen, by anchor t ...
    assert torch.allclose(at(x)[:t], at(chosen)[:t], rtol=0, atol=1e-12)  # ... and by none before it
    blind = make_net(target, stages=stages, token=False)
    assert torch.allclose(from_scratch(blind, target, x)[0, t], from_scratch(blind, target, chosen)[0, t])
    h, h_later = target.hidden(x), target.hidden(later)
    monkeypatch.setattr(target, "attention_mask", lambda *_: (None, False))
    assert not torch.allclose(at(x, h), at(later, h_later))


# --------------------------------------------------------------------------------------------------
# Drafting

class Steered(Drafter):
    """
    Makes a random path of each tree the one that is accepted, so that every kind of acceptance occurs.
    At every step it compares what the heads said with a pass over the whole committed text
    without any cache.
    """

    truth = ()                                                         # prompt and true continuation

    def start(self, target, max_len):
        super().start(target, max_len)
        self.text, self.rng, self.worst = [], random.Random(0), 0.0

    def observe(self, tokens, hidden, cache):
        super().observe(tokens, hidden, cache)
        self.text = self.text + list(tokens)
        assert cache.length == len(self.text)

    def draft(self, root, sampler, limit=None):
        tree = super().draft(root, sampler, limit)
        n = len(self.text)
        assert self.cache.length == n  # one pair for each committed token, no draft
        assert self.text + [root] == self.truth[:n + 1]
        logits, positions = sampler.seen[-1]
        assert positions == list(range(n + 1, n + 1 + self.net.K))     # the root has position n
        whole = from_scratch(self.net, self.target, torch.tensor([self.text + [root]]))[0, -1]
        self.worst = max(self.worst, float((logits - whole).abs().max()))
        depth = len(sampler.seen) % (max(tree.depth) + 1)              # so many tokens are to be accepted ...
        # ... ending here
        node, path = self.rng.choice([i for i, d in enumerate(tree.depth) if d == depth]), set()
        while node > 0:
            path.add(node)
            node = tree.parent[node]
        for i in range(1, len(tree)):
            true = self.truth[n + tree.depth[i]]
            if i in path:
                tree.tokens[i] = true
            elif tree.tokens[i] == true:                               # no other node may be right
                tree.tokens[i] = (true + 1) % 23
        return Tree(tree.tokens, tree.parent, tree.value)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("shape", [None, chain(4), cartesian(3, 2, 2), cartesian(2, 1, 1, 1)],
                         ids=["best", "chain", "wide", "deep"])
@pytest.mark.parametrize("options", [{}, dict(stages=1, token=False), dict(stages=0)],
                         ids=["two", "one", "none"])
def test_cached_draft_equals_from_scratch(style, shape, options):
    """
    Catches pairs that are lost, doubled, mispaired or misplaced in the stages' caches
    after a rejection, after a run of accepted tokens, and after a path that is not the first.
    """
    target, prompt = make_target(style), [3, 1, 4, 1, 5]
    plain, _ = complete(target, prompt, 56, sampler=Sampler(1.0))
    drafter = Steered(make_net(target, **options), target, shape, max_nodes=12)
    drafter.truth = prompt + plain
    out, stats = complete(target, prompt, 48, drafter, Spy(1.0))
    assert out == plain[:48]
    assert drafter.worst < 1e-9
    assert {1, 2, 3} <= set(stats.accepted[1:-1]), stats.accepted


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_of_a_long_prompt_the_end_is_read(style, monkeypatch):
    """
    Catches a window that is cut at the wrong end, shifts a token against its state,
    or makes positions absolute.
    """
    monkeypatch.setattr(amphista, "WINDOW", 5)
    target = make_target(style)
    net, x = make_net(target), text(target, 1, 12)
    prompt = x[0].tolist()
    for T in (0.0, 1.0):
        spy, drafter = Spy(T), Drafter(net, target)
        out, _ = complete(target, prompt, 40, drafter, spy)
        assert out == complete(target, prompt, 40, None, Sampler(T))[0]
        # that of the chosen token is not there yet
        h = torch.nn.functional.pad(target.hidden(x)[:, -5:], (0, 0, 0, 1))
        said = from_scratch(net, target, torch.tensor([prompt[-5:] + out[:1]]), h)[0, -1]
        torch.testing.assert_close(spy.seen[0][0], said)
        assert spy.seen[0][1] == [13, 14, 15, 16] and drafter.cache.length < drafter.n


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_drafter_reused_equals_fresh(style):
    """Catches keys, values or pending pairs left over from an earlier text."""
    target = make_target(style)
    net = make_net(target)
    used, fresh = Drafter(net, target), Drafter(net, target)
    complete(target, [7, 7, 2, 9], 30, used, Sampler(1.0))
    spies = Spy(1.0, seed=3), Spy(1.0, seed=3)
    prompt = [1, 2]
    texts = [complete(target, prompt, 30, d, s)[0] for d, s in zip((used, fresh), spies)]
    assert texts[0] == texts[1] and prompt == [1, 2]  # the caller's list is not ours to extend
    for (a, at), (b, bt) in zip(spies[0].seen, spies[1].seen, strict=True):
        assert at == bt and torch.equal(a, b)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("sampling", [dict(temperature=0.0), dict(temperature=0.8, top_k=9, top_p=0.9)])
def test_text_equals_plain_decoding(style, sampling):
    """Catches any way in which this drafter could change the text."""
    target = make_target(style)
    shapes = (None, chain(2), grow([[.5, .3], [.4, .2]], 6))
    for seed in range(3):
        prompt = text(target, 1, 4, seed)[0].tolist()
        plain, _ = complete(target, prompt, 40, sampler=Sampler(seed=seed, **sampling))
        for shaken in (False, True):                                   # each shape with either
            drafter = Drafter(make_net(target, shaken), target, shapes[(seed + shaken) % 3])
            out, stats = complete(target, prompt, 40, drafter, Sampler(seed=seed, **sampling))
            assert out == plain and isinstance(stats, Stats)


def test_end_of_context():
    """Catches stages that run past their tables or caches where the text reaches block_size."""
    for style in ("llama", "gpt2"):
        target = make_target(style, block_size=24)
        drafter = Drafter(make_net(target), target)
        for n in range(16, 24):
            prompt = text(target, 1, n)[0].tolist()
            plain, _ = complete(target, prompt, 99, sampler=Sampler(1.0))
            out, stats = complete(target, prompt, 99, drafter, Sampler(1.0))
            assert out == plain and len(out) == 24 - n and stats.stop == "context"


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ABLATIONS)
def test_every_switch_trains_and_drafts(style, name):
    """
    Catches an option that is not wired through training, drafting or both,
    or that leaves a parameter without use.
    """
    target = make_target(style, dtype=torch.float32)
    run = Run([text(target, 2, 14, seed) for seed in range(2)])
    net = amphista.train(Config(**{"anchors": 4, **ABLATIONS[name]}), target, run)
    assert len(run.losses) == 2 and run.without_grad == []
    net, target = net.double(), target.double()
    plain, _ = complete(target, [5, 6, 7], 20, sampler=Sampler(0.8))
    out, _ = complete(target, [5, 6, 7], 20, Drafter(net, target), Sampler(0.8))
    assert out == plain


def test_switches_change_what_they_name():
    """Catches a switch that is read nowhere: each names parameters that exist only where it is on."""
    names = lambda **options: set(make_net(make_target(), **options).state_dict())
    part = lambda prefix, **options: any(n.startswith(prefix) for n in names(**options))
    assert part("place") and not part("place", position=False) and not part("place", block=False)
    assert part("block.") and not part("block.", block=False)
    assert part("layers.1.") and not part("layers.1.", stages=1) and not part("layers.", stages=0)
    assert part("out", share_head=False) and not part("out")
    width = lambda **options: make_net(make_target(), **options).fc[0].weight.shape[1]
    assert (width(), width(token=False)) == (32, 16)
    heads = lambda **options: [p.out_features // 16 for p in make_net(make_target(), **options).proj]
    assert heads() == [2, 2] and heads(n_heads=5) == [2, 3]
    assert heads(n_heads=1) == [1] and heads(stages=1) == [4]
    ffn = lambda **options: make_net(make_target(), **options).block.mlp.down.weight.shape[1]
    assert (ffn(), ffn(n_ffn=8)) == (16, 8)
