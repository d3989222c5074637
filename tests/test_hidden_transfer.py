"""
Hidden Transfer: maps, parallel pass, loss, pseudo rows in the verifying forward.
Tiny random targets, float64.
"""
import copy
import random

import pytest
import torch
import torch.nn.functional as F

import hidden_transfer
import train
from hidden_transfer import Config, Drafter, Net, by_layer, predictions, loss
from conftest import read
from model import GPT, GPTConfig
from tree import Sampler, Tree, complete, grow, tree_mask
from plumbing.shapes import cartesian, chain

OPTIONS = {
    "default": {},
    "previous": dict(source="previous"),
    "blind": dict(blind=True),
    "embedding": dict(layers="0"),
    "mixed": dict(layers="1,1,2,3"),
    "mixed, previous": dict(layers="0,1,1,3", source="previous"),
    "farther is lower": dict(layers="3,1,2,1"),
    "farther is lower, blind": dict(layers="2,3,0,0", blind=True),
    "one state": dict(n_heads=1),
    "random": dict(init="random", n_heads=3),
}
TOLERANCE = dict(atol=1e-9, rtol=1e-9)


def make_target(style="llama", seed=0, block_size=48):
    """
    A random target whose text is not a loop:
    weights six times the usual ones, and an lm_head of its own.
    """
    torch.manual_seed(seed)
    heads = dict(n_head=4, n_kv_head=2 if style == "llama" else 4)
    target = GPT(GPTConfig(n_layer=4, n_embd=16, n_ffn=24, vocab_size=23, block_size=block_size, style=style,
                           tied=False, **heads))
    for p in target.parameters():
        p.data.mul_(6 if p.dim() > 1 else 1)
    return target.double().eval().requires_grad_(False)


def make_net(target, seed=1, shaken=True, **options):
    """
    A net in evaluation mode; shaken = its maps are not the identity,
    so that none can stand in for another.
    """
    torch.manual_seed(seed)
    net = Net(Config(**options), target).double()
    for p in net.parameters() if shaken else ():
        p.data.add_(0.2 * torch.randn_like(p))
    return net.eval()


def text(target, B, T, seed=0):
    return torch.randint(target.cfg.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def by_hand(net, target, tokens, states=False):
    """
    The definition for one anchor, the last of tokens: no cache, one block after the other,
    every row and every glance by hand.
    Returns the logits (K, V); or, for every k, {block: the pseudo state at its input}.
    """
    cfg, n, L = net.cfg, len(tokens) - 1, target.cfg.n_layer
    x, here = target.embed(torch.tensor([tokens]), torch.arange(n + 1)), []
    seen = {k: {} for k in range(1, net.K + 1)}
    for l in range(L):
        for k in range(1, net.K + 1):
            if net.layers[k - 1] == l:
                source = x[0, n] if cfg.source == "anchor" or k == 1 else x[0, n + 1 + here.index(k - 1)]
                x = torch.cat((x, (net.proj[k - 1].weight @ source)[None, None]), 1)
                here.append(k)
        for i, k in enumerate(here):
            seen[k][l] = x[0, n + 1 + i]
        mask = torch.zeros(n + 1 + len(here), n + 1 + len(here), dtype=torch.bool)
        for i in range(n + 1):
            mask[i, :i + 1] = True
        for i, k in enumerate(here):
            mask[n + 1 + i, :n + 1] = True
            for j, other in enumerate(here):
                mask[n + 1 + i, n + 1 + j] = other == k or other < k and not cfg.blind
        pos = list(range(n + 1)) + [min(n + k, target.cfg.block_size - 1) for k in here]
        x = target.run(x, torch.tensor(pos), mask, None, l, l + 1)
    for i, k in enumerate(here):
        seen[k][L] = x[0, n + 1 + i]
    return seen if states else read(target, torch.stack([seen[k][L] for k in range(1, net.K + 1)]))


class Checked(Drafter):
    """
    A Drafter whose tree is random but knows the continuation,
    so that paths of every length and shape are accepted; each step is held against the definition.
    """

    def __init__(self, *args, plain, prompt, seed=0, valued=True, **kwargs):
        super().__init__(*args, **kwargs)
        self.known, self.committed, self.valued = prompt + plain, [], valued
        self.rng, self.lengths, self.grouped, self.sizes = random.Random(seed), [], [], []

    def target_forward(self, target, idx, pos, mask, cache, tree):
        alone = target.hidden(idx, pos, mask, copy.deepcopy(cache))
        before = cache.length
        hidden = super().target_forward(target, idx, pos, mask, cache, tree)
        assert cache.length == before, "a forward must not move the cache"
        torch.testing.assert_close(hidden, alone, **TOLERANCE)
        return hidden

    def observe(self, tokens, hidden, cache):
        super().observe(tokens, hidden, cache)
        self.committed += tokens
        assert self.committed == self.known[:len(self.committed)]
        assert self.n == len(self.committed) == cache.length
        self.lengths.append(len(tokens))
        self.grouped.append(len(self.ends))
        self.sizes.append(len(self.tree) if self.tree else 1)
        expected = by_hand(self.net, self.target, self.committed)
        torch.testing.assert_close(read(self.target, self.h), expected, **TOLERANCE)
        fresh = self.target.new_cache(self.n)
        self.target.hidden(torch.tensor([self.committed]), cache=fresh)
        torch.testing.assert_close(cache.read(slice(self.n)), fresh.read(slice(self.n)), **TOLERANCE)

    def draft(self, root, sampler, limit=None):
        super().draft(root, sampler, limit)
        rng, N, V = self.rng, self.rng.randint(1, self.max_nodes), self.target.cfg.vocab_size
        known = self.known[self.n:] + [0] * N                          # the root and what follows it
        tokens, parent, value, right = [root], [-1], [1.0], [True]
        for i in range(1, N):
            up = rng.choice([i - 1, i - 1, rng.randrange(i)])
            depth, node = 1, up
            while parent[node] >= 0:
                depth, node = depth + 1, parent[node]
            hit = right[up] and rng.random() < 0.6                     # twins with the same token come up too
            tokens.append(known[depth] if hit else rng.randrange(V))
            right.append(right[up] and tokens[-1] == known[depth])
            parent.append(up)
            value.append(value[up] * rng.random())
        return Tree(tokens, parent, value if self.valued else None)


class Bench:
    """Stands in for plumbing.trainer.Run: the same batch again and again."""

    vocab = None

    def __init__(self, x, n):
        self.x, self.n, self.losses = x, n, []

    def steps(self, net, optimisers, evaluate):
        net.train()
        for _ in range(self.n):
            yield self.x
        self.end = evaluate(self.x)

    def sync(self, net, total):
        self.grads = {name: p.grad for name, p in net.named_parameters()}
        self.losses.append(total.item())


# --------------------------------------------------------------------------------------------------
# Net

def test_start():
    """
    An identity that is not one, a map shared by two positions,
    or the frozen target saved with the maps.
    """
    target = make_target()
    net = Net(Config(), target)
    assert set(net.state_dict()) == {f"proj.{k}.weight" for k in range(4)} and net.K == 4
    assert net.layers == [3] * 4 and net.first == 3, "three quarters of four layers"
    assert all(torch.equal(p, torch.eye(16)) for p in net.parameters())
    assert len({p.data_ptr() for p in net.parameters()}) == 4
    torch.manual_seed(0)
    maps = list(Net(Config(init="random"), target).parameters())
    assert not torch.equal(maps[0], maps[1]) and 0.2 < maps[0].std() < 0.3
    h = torch.randn(1, 5, 16, dtype=torch.float64)
    x = target.run(h, torch.arange(5), None, None, 3, 4)  # one map, identity: the anchor, once more
    net = make_net(target, shaken=False, n_heads=1)
    states = net(target, h[:, :0], lambda l, x: h[:, 4:], *net.positions_and_mask(
        target, [4], torch.ones(1, 5, dtype=torch.bool).numpy()), FullCache(target, h))
    (_, joined), (_, y) = states.items()
    assert torch.equal(joined, h[:, 4:]) and y.shape == (1, 1, 16) and not torch.allclose(y, x[:, 4:])


def FullCache(target, h):
    cache = target.new_cache(16)
    target.run(h, torch.arange(h.size(1)), None, cache, 3, 4)
    cache.keep(range(h.size(1)))
    return cache


@pytest.mark.parametrize("options", [
    dict(layers="4"), dict(layers="-1"), dict(layers="x"), dict(layers="1,2"), dict(layers="1,"),
    dict(layers="3,2,2,2", source="previous"), dict(n_heads=0),
])
def test_bad_layers(options):
    """
    A layer that does not exist,
    or one position too few, must be refused by its name, not end in an index error.
    """
    with pytest.raises(ValueError, match="^--layers"):
        Net(Config(**options), make_target())


def test_bad_layers_end_a_command_with_one_line(trained, text_file, capsys):
    """A refusal of the method's that the command line shows as a traceback."""
    argv = ["--method", "hidden_transfer", "--out", trained, "--data", text_file, "--device", "cpu",
            "--layers", "7"]
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    assert stop.value.code == 2 and capsys.readouterr().err.startswith("error: --layers")


# --------------------------------------------------------------------------------------------------
# Training pass and loss

@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("name", OPTIONS)
def test_parallel_pass(name, style):
    """
    Any wrong glance, position, layer or source in the parallel pass;
    rows mixed up between anchors or sequences.
    """
    target = make_target(style)
    net = make_net(target, **OPTIONS[name])
    x = text(target, 2, 9)
    own, sets = target(x)[0], list(predictions(net, target, x))
    assert len(sets) == net.K
    for k, (logits, truth, theirs) in enumerate(sets, 1):
        n = 9 - k - 1
        assert logits.shape == theirs.shape == (2 * n, 23)
        assert truth.tolist() == [x[b, t + 1 + k] for b in range(2) for t in range(n)]
        expected = torch.stack([own[b, t + k] for b in range(2) for t in range(n)])
        torch.testing.assert_close(theirs, expected, **TOLERANCE)
    for b in range(2):
        for t in range(7):
            expected = by_hand(net, target, x[b, :t + 1].tolist())
            for k in range(1, min(net.K, 7 - t) + 1):
                torch.testing.assert_close(sets[k - 1][0].view(2, -1, 23)[b, t], expected[k - 1], **TOLERANCE)


def test_definition_can_fail():
    """
    A definition that is the same with and without blindness,
    or at any layer, would let every mask pass.
    """
    target = make_target()
    tokens = text(target, 1, 9)[0].tolist()
    base = by_hand(make_net(target), target, tokens)
    for options in (dict(blind=True), dict(source="previous"), dict(layers="2"), dict(layers="3,3,3,2")):
        other = by_hand(make_net(target, **options), target, tokens)
        assert (base - other).abs().max() > 1e-2, options


def test_chunks_and_end_of_context():
    """
    Anchors of a long text go through in parts,
    and the last ones stand at the end of the position table.
    """
    target = make_target(block_size=72)
    net = make_net(target)
    x = text(target, 1, 72)
    sets = list(predictions(net, target, x))
    assert [len(s[0]) for s in sets] == [70, 69, 68, 67]
    for t in (0, 63, 64, 66):
        expected = by_hand(net, target, x[0, :t + 1].tolist())
        for k in range(1, 5):
            torch.testing.assert_close(sets[k - 1][0][t], expected[k - 1], **TOLERANCE)


def test_random_anchors():
    """
    A training step must see as many anchors as asked for, each with its own tokens,
    and others the next time.
    """
    target = make_target()
    net = make_net(target, anchors=20)
    x = text(target, 3, 30)
    everything = [[t.view(3, -1, *t.shape[1:]) for t in s] for s in predictions(net, target, x)]
    net.train()
    torch.manual_seed(0)
    draws = []
    for _ in range(2):
        sets, rows = list(predictions(net, target, x)), []
        for (logits, truth, own), (all_logits, all_truth, all_own) in zip(sets, everything):
            logits = logits.view(3, 20, -1)
            rows.append([(all_logits[0] - logits[0, i]).abs().amax(-1).argmin().item() for i in range(20)])
            torch.testing.assert_close(logits, all_logits[:, rows[-1]], **TOLERANCE)
            torch.testing.assert_close(own.view(3, 20, -1), all_own[:, rows[-1]], **TOLERANCE)
            assert torch.equal(truth.view(3, 20), all_truth[:, rows[-1]])
        assert all(r == rows[0] for r in rows) and len(set(rows[0])) == 20 and max(rows[0]) < 30 - 5
        draws.append(rows[0])
    assert draws[0] != draws[1]
    net.cfg.anchors = 0                                                # all of them, also those near the end
    assert [len(s[0]) for s in predictions(net, target, x)] == [84, 81, 78, 75]
    with pytest.raises(AssertionError, match="too few"):
        next(predictions(net, target, x[:, :5]))


@pytest.mark.parametrize("options", [{}, dict(kl="reverse"), dict(hard=1.0), dict(hard=0.3, decay=0.5),
                                     dict(kl="reverse", hard=0.3, layers="1,3,2,2")])
def test_loss(options):
    """KL the wrong way round, off by one position, decay from the wrong k, or a mean over the wrong rows."""
    target = make_target()
    net = make_net(target, **options)
    x = text(target, 1, 8)
    cfg, own, expected, top1 = net.cfg, target(x)[0][0], 0.0, []
    for k in range(1, 5):
        errors, right = [], []
        for t in range(8 - k - 1):
            q = by_hand(net, target, x[0, :t + 1].tolist())[k - 1].softmax(-1)
            p = own[t + k].softmax(-1)
            soft = -(p * q.log()).sum() if cfg.kl == "forward" else (q * (q.log() - p.log())).sum()
            errors.append((1 - cfg.hard) * soft - cfg.hard * q[x[0, t + 1 + k]].log())
            right.append((q.argmax() == x[0, t + 1 + k]).float())
        expected = expected + cfg.decay**k * sum(errors) / len(errors)
        top1.append(sum(right) / len(right))
    total, accuracy = loss(net, target, x)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(accuracy, torch.stack(top1))


@pytest.mark.parametrize("options", [{}, dict(source="previous"), dict(layers="1,2,2,3"),
                                     dict(kl="reverse", hard=0.2)])
def test_gradients(options):
    """A detached map, a cache that swallows gradients, or a target that learns too."""
    target = make_target("gpt2").float().requires_grad_(True)  # train makes its net itself, in float32
    before = copy.deepcopy(target.state_dict())
    run = Bench(text(target, 2, 20), 2)
    net = hidden_transfer.train(Config(anchors=8, **options), target, run)
    assert set(run.grads) == {f"proj.{k}.weight" for k in range(4)}
    assert all(g is not None and g.abs().max() > 1e-6 for g in run.grads.values())
    assert all(p.grad is None for p in target.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), target.state_dict().values()))
    assert not any(torch.allclose(p, torch.eye(16)) for p in net.parameters())


@pytest.mark.parametrize("options", [{}, dict(source="previous", layers="2")])
def test_gradient_is_the_slope(options):
    """
    A gradient that leaves out the way through the other pseudo states is close,
    but not the slope of the loss.
    """
    target = make_target()
    net = make_net(target, anchors=0, **options)
    x = text(target, 2, 12)
    loss(net, target, x)[0].backward()
    torch.manual_seed(3)
    for p in net.parameters():
        step = 1e-5 * torch.randn_like(p)
        with torch.no_grad():
            p.add_(step)
            up = loss(net, target, x)[0]
            p.sub_(2 * step)
            down = loss(net, target, x)[0]
            p.add_(step)
        torch.testing.assert_close((p.grad * step).sum(), (up - down) / 2, rtol=1e-4, atol=1e-11)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_learns(kl):
    """A training loop that goes the wrong way, or nowhere: one repeated batch, its divergence must halve."""
    target = make_target().float()
    x = text(target, 2, 12)
    floor = 0.0
    if kl == "forward":  # the loss includes the target's own entropy
        for k, (_, _, own) in enumerate(predictions(make_net(target).float(), target, x), 1):
            p = own.log_softmax(-1)
            floor += 0.8**k * -(p.exp() * p).sum(-1).mean().item()
    run = Bench(x, 80)
    hidden_transfer.train(Config(kl=kl, anchors=0, lr=2e-2), target, run)
    assert run.losses[-1] - floor < 0.5 * (run.losses[0] - floor), (run.losses[0], run.losses[-1], floor)
    assert run.end[0].item() < run.losses[0] and run.end[1].shape == (4,)


# --------------------------------------------------------------------------------------------------
# Riding in the verifying forward

CASES = [(style, name, groups, valued) for style, name in (("llama", "default"), ("gpt2", "mixed"))
         for groups in (0, 2, 99) for valued in (True, False)]
CASES += [("llama", name, 3, True) for name in OPTIONS if name != "default"]


@pytest.mark.parametrize("style, name, groups, valued", CASES)
def test_every_step(style, name, groups, valued):
    """
    Real rows that see pseudo rows, the group of a wrong node, an extra pass from stale states,
    twins in the tree, pseudo keys left in the cache, positions past the table: each step of a
    decoding is held against the definition.
    """
    target = make_target(style, block_size=32)
    net, prompt = make_net(target, **OPTIONS[name]), [5, 1, 7]
    plain, _ = complete(target, prompt, 29, sampler=Sampler(1.0))
    assert len(set(plain)) > 8
    drafter = Checked(net, target, max_nodes=9, groups=groups, plain=plain, prompt=prompt, valued=valued)
    tokens, stats = complete(target, prompt, 29, drafter, Sampler(1.0))         # to the end of the context
    assert tokens == plain and stats.stop == "budget"
    assert len(set(drafter.lengths[1:])) >= 3, "this test is about accepted paths of several lengths"
    assert max(drafter.grouped) == min(groups, max(drafter.sizes))


@pytest.mark.parametrize("shape", [None, chain(4), cartesian(3, 2), cartesian(2, 1, 1, 1),
                                   grow([[.5, .3], [.4, .2]], 7)])
@pytest.mark.parametrize("groups", [0, 3, 99])
def test_own_trees(shape, groups):
    """
    The trees that really are drafted: best-first, static with and without values.
    Rows must suffice for them.
    """
    target = make_target(seed=2, block_size=32)
    drafter = Drafter(make_net(target, shaken=False), target, shape, max_nodes=8, groups=groups)
    prompt = [3, 9]
    plain, _ = complete(target, prompt, 30)
    seen, sampler = [], Sampler()
    observe, rank = drafter.observe, sampler.rank

    def checked(tokens, hidden, cache):
        observe(tokens, hidden, cache)
        seen.extend(tokens)
        torch.testing.assert_close(read(target, drafter.h), by_hand(drafter.net, target, seen), **TOLERANCE)

    def at_the_right_place(logits, positions):  # where the target asks for the same noise
        assert list(positions) == [len(seen) + 1 + k for k in range(4)]
        return rank(logits, positions)
    drafter.observe, sampler.rank = checked, at_the_right_place
    assert complete(target, prompt, 30, drafter, sampler)[0] == plain


def test_likely_ends():
    """Groups at the wrong nodes cost time and nothing else, so only a look at the choice itself can tell."""
    target = make_target()
    drafter = Drafter(make_net(target), target, max_nodes=8, groups=2)
    #         0 -> 1 (.6) -> 3 (.5), and 0 -> 2 (.1): ends with .3, .1, .1, .5
    tree = Tree([1, 2, 3, 4], [-1, 0, 0, 1], [1.0, 0.6, 0.1, 0.5])
    assert drafter.likely_ends(tree)[:2] == [3, 0]
    assert drafter.likely_ends(Tree([1, 2, 3, 4], [-1, 0, 1, 0])) == [0, 1, 3, 2], "shallow first"
    assert Drafter(make_net(target), target, max_nodes=8, groups=99).cache_rows == 8 + 8 * 4
    assert Drafter(make_net(target), target, chain(2), groups=2).cache_rows == 3 + 2 * 4
    alone = Drafter(make_net(target), target, max_nodes=8, groups=0)
    assert alone.cache_rows == 8 + 4, "the extra pass needs room too"


def test_as_many_groups_as_cost_least():
    """Groups by a rule of thumb: too many where a row is dear, none where only a forward is."""
    target = make_target()
    drafter = Drafter(make_net(target), target, max_nodes=8)
    assert drafter.n_groups() == 0, "nothing was measured"
    for seconds, groups in (((1.0, 0.0), 4), ((1.0, 1.0), 0), ((1.0, 0.03), 2)):
        target.seconds = seconds
        drafter.ended[:] = [6, 3, 1, 0, 0]
        K, (fixed, row) = 4, seconds
        cost = [g * K * row + (1 - sum([6, 3, 1, 0][:g]) / 10) * (fixed + K * row) for g in range(5)]
        assert drafter.n_groups() == groups == (cost.index(min(cost)) or groups) if row else 4
    assert Drafter(make_net(target), target, max_nodes=1).groups == 1
    target.seconds = (1.0, 0.0)
    drafter, plain = Drafter(make_net(target), target, max_nodes=8), complete(target, [1, 2], 20)[0]
    before = drafter.ended.sum()
    text, stats = complete(target, [1, 2], 20, drafter)
    assert text == plain and drafter.ended.sum() == before + stats.steps - 1, "it learns where paths end"


@pytest.mark.parametrize("name", ["default", "mixed", "farther is lower"])
@pytest.mark.parametrize("groups", [0, 2, 99])
def test_rows_in_each_block(name, groups):
    """
    Pseudo rows in blocks below their layer would be paid for in vain;
    above it each block must run once.
    """
    target = make_target()
    net = make_net(target, **OPTIONS[name])
    drafter, cache = Drafter(net, target, max_nodes=8, groups=groups), target.new_cache(60)
    drafter.start(target, 40)
    rows = []
    for l, block in enumerate(target.blocks):
        block.register_forward_hook(lambda module, args, out, l=l: rows.append((l, out.size(1))))

    def expected(N, M):
        return [(l, N + M * sum(layer <= l for layer in net.layers)) for l in range(4)]
    prompt = [4, 8, 15, 16]
    hidden = drafter.target_forward(target, torch.tensor([prompt]), torch.arange(4), None, cache, None)
    assert rows == expected(4, 0), "a prompt carries none: its group is made behind it"
    cache.keep(range(4))
    rows.clear()
    drafter.observe(prompt, hidden[0], cache)
    extra = [row for row in expected(0, 1) if row[1]]
    assert rows == extra
    tree = Tree([1, 2, 3, 4], [-1, 0, 0, 1], [1.0, 0.6, 0.1, 0.5])
    rows.clear()
    pos, mask = 4 + torch.tensor(tree.depth), tree_mask(tree.parent, 4)
    hidden = drafter.target_forward(target, torch.tensor([tree.tokens]), pos, mask, cache, tree)
    assert rows == expected(4, min(groups, 4))
    cache.keep([0, 1])
    rows.clear()
    drafter.observe([1, 2], hidden[0, :2], cache)                      # ends at node 1, the third choice
    assert rows == ([] if groups == 99 else extra)
    assert cache.length == 6


# --------------------------------------------------------------------------------------------------
# The same text

@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("sampling", [{}, dict(temperature=0.8, top_k=9, top_p=0.9, seed=3)])
def test_same_text(style, sampling):
    """
    Prompts of one token up to block_size - 1, to the last position:
    the draft must never touch what comes out.
    """
    target = make_target(style, block_size=28)
    nets = [make_net(target), make_net(target, shaken=False, layers="1,2,2,3")]
    for length in (1, 18, 26, 27):
        prompt = text(target, 1, length, seed=length)[0].tolist()
        plain, _ = complete(target, prompt, 99, sampler=Sampler(**sampling))
        assert len(plain) == 28 - length
        for i, net in enumerate(nets):
            for groups in (0, 3, 99):
                shape = (None, chain(4), cartesian(2, 2))[(i + groups) % 3]
                drafter = Drafter(net, target, shape, max_nodes=8, groups=groups)
                tokens, stats = complete(target, prompt, 99, drafter, Sampler(**sampling))
                assert tokens == plain and stats.stop == "context" and sum(stats.accepted) == len(plain)


@pytest.mark.parametrize("groups", [0, 2, 99])
def test_eos(groups):
    """
    A cut inside an accepted path, and the next prompt after it:
    nothing of the old text may stay behind.
    """
    target = make_target()
    net, prompt = make_net(target), [5, 1, 7]
    plain, _ = complete(target, prompt, 40, sampler=Sampler(1.0))
    used = Checked(net, target, max_nodes=9, groups=groups, plain=plain, prompt=prompt)
    for eos in sorted(set(plain))[::5]:
        used.committed, used.rng = [], random.Random(eos)
        tokens, stats = complete(target, prompt, 40, used, Sampler(1.0), eos={eos})
        assert tokens == plain[:plain.index(eos) + 1]
        assert stats.stop == "eos" and sum(stats.accepted) == len(tokens)


@pytest.mark.parametrize("groups", [0, 2, 99])
def test_used_again(groups):
    """A drafter that carries anything over from its last text drafts other trees than a fresh one."""
    target = make_target()
    net = make_net(target, shaken=False)
    used = Drafter(net, target, max_nodes=8, groups=groups)
    complete(target, text(target, 1, 20, seed=5)[0].tolist(), 20, used)
    fresh = Drafter(net, target, max_nodes=8, groups=groups)
    for temperature in (0.0, 1.0):
        a = complete(target, [2, 4, 6], 40, used, Sampler(temperature))
        b = complete(target, [2, 4, 6], 40, fresh, Sampler(temperature))
        assert a[0] == b[0] and a[1].accepted == b[1].accepted and a[1].nodes == b[1].nodes


# --------------------------------------------------------------------------------------------------
# Analysis

@pytest.mark.parametrize("name", ["default", "mixed, previous", "farther is lower"])
def test_by_layer(name):
    """
    A state compared with the wrong token,
    or read at the wrong block, would make a smooth and wrong plot.
    """
    target = make_target()
    net = make_net(target, **OPTIONS[name])
    x = text(target, 2, 10)
    cosine, top1 = by_layer(net, target, x)
    net.requires_grad_(False)
    h = [target.embed(x, torch.arange(10))]
    for l in range(4):
        h.append(target.run(h[-1], torch.arange(10), None, None, l, l + 1))
    hand = []
    for b in range(2):
        for t in range(5):
            hand.append((b, t, by_hand(net, target, x[b, :t + 1].tolist(), states=True)))
    for k in range(1, 5):
        for l in range(5):
            if l < net.layers[k - 1]:
                assert cosine[l, k - 1].isnan() and top1[l, k - 1].isnan()
                continue
            close = [F.cosine_similarity(seen[k][l], h[l][b, t + k], dim=0) for b, t, seen in hand]
            right = [read(target, seen[k][l]).argmax() == x[b, t + k + 1] for b, t, seen in hand]
            assert abs(float(cosine[l, k - 1]) - float(sum(close)) / 10) < 1e-6
            assert abs(float(top1[l, k - 1]) - float(sum(right)) / 10) < 1e-6
