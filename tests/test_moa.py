"""
MoA: attention over layers, the on-policy mask, losses, cached drafting, the dynamic tree.
Tiny random targets in float64.
"""
import functools
import math
import random

import pytest
import torch
import torch.nn.functional as F

import moa
from conftest import Watching, tiny
from model import GPT, GPTConfig, rotate
from moa import Config, Drafter, Net, predictions, loss
from plumbing.budget import calibrate
from tree import Sampler, Tree, complete, grow
from plumbing.shapes import cartesian, chain

ABLATIONS = {
    "default": {},
    "N = 0": dict(tli=0),
    "all layers": dict(tli=3),
    "exact": dict(tli=2, tli_exact=True),
    "no LSA": dict(lsa=False),
    "no LSA, N = 0": dict(lsa=False, tli=0),
    "off-policy": dict(on_policy=False),
    "no staircase": dict(staircase=False),
    "wide": dict(mlp=20, lsa_mlp=0, n_kv_head=1),
}


def make_target(style="llama", seed=0, block_size=64):
    """A random target whose text is not a loop: weights five times the usual ones."""
    torch.manual_seed(seed)
    heads = dict(n_head=4, n_kv_head=2 if style == "llama" else 4)
    target = GPT(GPTConfig(n_layer=3, n_embd=16, n_ffn=24, vocab_size=23, block_size=block_size, style=style,
                           **heads))
    for p in target.parameters():
        p.data.mul_(5 if p.dim() > 1 else 1)
    return target.double().eval().requires_grad_(False)


def make_net(target, shaken=True, seed=1, **options):
    """A net in evaluation mode; shaken = all its parameters random, so that no part hides behind a zero."""
    torch.manual_seed(seed)
    net = Net(Config(**{"lsa_mlp": 12, **options}), target).to(target.wte.weight.dtype)
    net.theta = target.cfg.rope_theta                                  # for the references below
    for p in net.parameters() if shaken else ():
        p.data.add_(0.3 * torch.randn_like(p))
    return net.eval()


def random_text(target, B, T, seed=0):
    return torch.randint(target.cfg.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------
# References, all without a cache

def layers(target, x):
    """
    The inputs of all layers (and the last one's output), k and v (L, B, G, T, D),
    of the tokens x (B, T).
    """
    c, (B, T) = target.cfg, x.shape
    pos = torch.arange(T)
    inputs, ks, vs = [target.embed(x, pos)], [], []
    for block in target.blocks:
        qkv = block.attn.qkv(block.norm1(inputs[-1])).view(B, T, -1, c.head_dim).transpose(1, 2)
        k, v = qkv[:, c.n_head:c.n_head + c.n_kv_head], qkv[:, c.n_head + c.n_kv_head:]
        ks.append(k if target.rope(pos) is None else rotate(k, *target.rope(pos)))
        vs.append(v)
        inputs.append(block(inputs[-1], target.rope(pos), causal=True))
    return inputs, torch.stack(ks), torch.stack(vs)


def attention(q, k, v):
    """One query q (H, D), keys and values (G, S, D), written out -> (H * D,)"""
    out = []
    for h in range(len(q)):
        g = h * len(k) // len(q)
        out.append((k[g] @ q[h] / math.sqrt(q.size(-1))).softmax(0) @ v[g])
    return torch.cat(out)


@functools.cache
@torch.inference_mode(False)  # what is kept may meet a gradient later
def rotation(theta, at, D):
    angle = at * theta ** (-torch.arange(0, D, 2).double() / D)
    return angle.cos().float().double(), angle.sin().float().double()


def turn(net, x, at):
    """
    Rotary positions for x (H, D) at one position, from the definition;
    the net's table is rounded to fp32.
    """
    D = x.size(-1)
    cos, sin = rotation(net.theta, at, D)
    a, b = x[:, :D // 2], x[:, D // 2:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def layer(net, block, x, sees):
    """A Block on x (T, C), row by row; sees[i] = the rows that row i looks at."""
    H, G, D = block.attn.heads
    qkv = [block.attn.qkv(r).view(H + 2 * G, D) for r in block.norm1(x)]
    k = torch.stack([turn(net, r[H:H + G], i) for i, r in enumerate(qkv)], 1)
    v = torch.stack([r[H + G:] for r in qkv], 1)
    out = []
    for i, r in enumerate(qkv):
        y = x[i] + block.attn.out(attention(turn(net, r[:H], i), k[:, sees[i]], v[:, sees[i]]))
        out.append(y + block.mlp(block.norm2(y)))
    return torch.stack(out)


def cross(net, x, at, s):
    """CA for one query x (C,) at a position, over the states s (S, C)."""
    H, G, D = net.ca.heads
    kv = [net.ca.kv(net.ca.norm1(r)).view(2 * G, D) for r in s]
    k = torch.stack([turn(net, r[:G], j) for j, r in enumerate(kv)], 1)
    v = torch.stack([r[G:] for r in kv], 1)
    y = x + net.ca.out(attention(turn(net, net.ca.q(net.ca.norm1(x)).view(H, D), at), k, v))
    return y + net.ca.mlp(net.ca.norm2(y))


def states(net, target, x):
    """s (T, C) of one text x (T,), token by token and layer by layer."""
    inputs, k, v = layers(target, x[None])
    if net.lsa is None:
        return net.ekv2e(target.norm(inputs[-1])[0])
    rows = []
    for t in range(len(x)):
        z = []                                                         # a row for each layer
        for l in range(len(k)):
            z.append(torch.cat([torch.cat((k[l, 0, g, t], v[l, 0, g, t])) for g in range(k.size(2))]))
        z = torch.stack(z)
        rows.append(net.ekv2e(layer(net, net.lsa, z, [range(len(z))] * len(z)).mean(0)))
    return torch.stack(rows)


def tail(net, target, rows):
    """Rows (T, C) into layer L-N -> what lm_head reads at the last of them."""
    N, pos = net.cfg.tli, torch.arange(len(rows))
    if N == 0:
        return rows[-1]
    x = rows[None]
    for block in target.blocks[target.cfg.n_layer - N:]:
        x = block(x, target.rope(pos), causal=True)
    return target.norm(x)[0, -1]


def from_scratch(net, target, text, path, s=None):
    """
    Logits (V,) after the drafted tokens path (root first) behind the verified text:
    the definition, nothing cached. s: states(...) of the text, where many paths are asked for.
    """
    x, S = torch.tensor(text + path), len(text)
    sa = net.sa(target.embed(x[None], torch.arange(len(x))), net.rotary(slice(len(x))), causal=True)[0]
    s = states(net, target, x[:S]) if s is None else s
    f = torch.stack([cross(net, sa[i], i, s) for i in range(S, len(x))])
    deep = layers(target, x[None, :S])[0][target.cfg.n_layer - net.cfg.tli][0]
    return target.lm_head(tail(net, target, torch.cat((deep, f))))


def paths(tree):
    """The tokens from the root down to each node."""
    out = []
    for i, up in enumerate(tree.parent):
        out.append((out[up] if up >= 0 else []) + [tree.tokens[i]])
    return out


class Watch(Watching, Drafter):
    pass


# --------------------------------------------------------------------------------------------------
# Modules

@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_lsa_from_scratch(style):
    """
    Values before keys, layers in another order, a causal mask over layers,
    a missing rotation or the mean in the wrong place.
    """
    target = make_target(style)
    net, x = make_net(target), random_text(target, 1, 6)
    _, k, v = layers(target, x)
    torch.testing.assert_close(net.read(k, v, None)[0], states(net, target, x[0]))
    cache = target.new_cache(6)
    target(x, cache=cache)
    torch.testing.assert_close(cache.read(slice(6)), (k, v))  # and that is what the target's cache holds


def test_lsa_mixes_no_tokens():
    """A reshape that puts tokens where layers should be."""
    target = make_target()
    net, x = make_net(target), random_text(target, 2, 6)
    _, k, v = layers(target, x)
    before = net.read(k, v, None)
    k[1, 1, 0, 3] += 1
    changed = (net.read(k, v, None) - before).abs().amax(-1) > 1e-6
    assert changed.nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize("options", ABLATIONS.values(), ids=ABLATIONS)
def test_parameters(options):
    """
    A target swallowed by the checkpoint, a borrowed weight that trains,
    a buffer that is saved, a dead parameter.
    """
    target = make_target()
    net, x = make_net(target, **options), random_text(target, 4, 24)
    assert set(net.state_dict()) == {name for name, _ in net.named_parameters()}
    assert net.K == net.cfg.depth
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in target.parameters()}
    total, top1 = loss(net, target, x, progress=0.3)
    total.backward()
    assert top1.shape == (net.K,) and all(p.grad is None for p in target.parameters())
    dead = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not dead, dead


def test_untrained_is_identity():
    """
    Residual branches that do not start at zero:
    with N = L an untrained drafter is the target itself, token for token.
    """
    for style in ("llama", "gpt2"):
        target = make_target(style)
        net, x = make_net(target, shaken=False, tli=3), random_text(target, 2, 12)
        assert len(list(predictions(net, target, x))) == net.K
        for logits, _, own in predictions(net, target, x):
            torch.testing.assert_close(logits, own)


# --------------------------------------------------------------------------------------------------
# Loss

@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [dict(tli=0), dict(tli=1), dict(tli=3), dict(tli=0, lsa=False)])
def test_predictions(style, options):
    """
    An anchor that sees one state too many or too few,
    drafts of another anchor in TLI's keys, a shifted truth.
    """
    target = make_target(style)
    net, x = make_net(target, depth=3, **options), random_text(target, 2, 7)
    own = target(x)[0]
    s = [states(net, target, row) for row in x]
    for k, (logits, truth, real) in enumerate(predictions(net, target, x), 1):
        anchors = [(b, t) for b in range(2) for t in range(7 - k - 1)]
        assert truth.tolist() == [x[b, t + 1 + k].item() for b, t in anchors]
        torch.testing.assert_close(real, torch.stack([own[b, t + k] for b, t in anchors]))
        for row, (b, t) in zip(logits, anchors):
            verified, drafted = x[b, :t + 1].tolist(), x[b, t + 1:t + 1 + k].tolist()
            torch.testing.assert_close(row, from_scratch(net, target, verified, drafted, s[b][:t + 1]))


def test_guesses_short():
    """A text too short for the last draft positions, and the counts that train.py takes from predictions."""
    target = make_target()
    net = make_net(target, depth=5)
    short = predictions(net, target, random_text(target, 2, 5))
    assert [len(truth) for _, truth, _ in short] == [6, 4, 2, 0, 0]
    counts = calibrate(moa, net, target, [random_text(target, 2, 20), random_text(target, 1, 20)])
    assert counts["samples"] == [3 * (20 - k - 1) for k in range(1, 6)] and counts["hits"][0][-1] == 0


def draws(cfg, B, T, seed):
    """What loss draws from torch's global generator: verified positions as lists, start(i) for every i."""
    torch.manual_seed(seed)
    every = torch.randint(cfg.every_min, cfg.every_max + 1, (B, 1))
    prompt = torch.randint(2, T // 2 + 1, (B, 1))
    verified = [[j for j in range(T) if j < prompt[b] or j % every[b].item() == 0] for b in range(B)]
    return verified, [[max([j for j in v if j < i], default=0) for i in range(T)] for v in verified]


def watch_loss(net, target, x, seed, **kwargs):
    """-> loss, CA's output and SA's mask of one call."""
    seen = {}
    hooks = [net.ca.register_forward_hook(lambda m, args, out: seen.update(f=out.detach())),
             net.sa.register_forward_hook(lambda m, args, kwargs, out: seen.update(
                 mask=args[2], causal=kwargs["causal"]), with_kwargs=True)]
    torch.manual_seed(seed)
    total, _ = loss(net, target, x, **kwargs)
    for hook in hooks:
        hook.remove()
    assert seen["causal"] == (seen["mask"] is None)                    # a mask says itself what is before
    return total, seen["f"], seen["mask"]


@pytest.mark.parametrize("on_policy", [True, False])
def test_on_policy_mask(monkeypatch, on_policy):
    """
    A query that sees a state past its last verification, its own above all.
    Off, it must see them, so the test can fail.
    """
    target, (B, T) = make_target(), (3, 26)
    net, x = make_net(target, on_policy=on_policy), random_text(target, 3, 26)
    _, start = draws(net.cfg, B, T, 5)
    _, before, _ = watch_loss(net, target, x, 5)
    read = net.read
    for j in range(T):
        def disturbed(k, v, hidden):
            s = read(k, v, hidden).clone()
            s[:, j] += 1
            return s
        monkeypatch.setattr(net, "read", disturbed)
        changed = (watch_loss(net, target, x, 5)[1] - before).abs().amax(-1) > 1e-9
        expect = [[j <= (start[b][i] if on_policy else max(0, i - 1)) for i in range(T)] for b in range(B)]
        assert changed.tolist() == expect, j
    assert any(start[b][i] < i - 1 for b in range(B) for i in range(T))  # there is something to hide


def test_staircase():
    """
    SA that sees verified tokens in a narrow sample,
    a curriculum that never ends or that starts before the first step.
    """
    target = make_target()
    net, x = make_net(target, every_max=7), random_text(target, 40, 16)
    _, start = draws(net.cfg, 40, 16, 3)
    narrow = [[[j == i or start[b][i] < j <= i for j in range(16)] for i in range(16)] for b in range(40)]
    wide = [[j <= i for j in range(16)] for i in range(16)]
    masks = {p: watch_loss(net, target, x, 3, progress=p)[2] for p in (0.0, 0.25, 0.49, 0.5, 1.0)}
    assert masks[0.5] is None and masks[1.0] is None
    assert (masks[0.0] == 0)[:, 0].tolist() == narrow
    count = {}
    for p in (0.25, 0.49):
        look = (masks[p] == 0)[:, 0].tolist()
        assert all(m in (n, wide) for m, n in zip(look, narrow))
        count[p] = sum(m == n for m, n in zip(look, narrow))
    assert 8 <= count[0.25] <= 32 and count[0.49] <= 5
    assert watch_loss(make_net(target, staircase=False), target, x, 3, progress=0.0)[2] is None


@pytest.mark.parametrize("progress", [0.0, 1.0])
@pytest.mark.parametrize("options", [
    dict(tli=0), dict(tli=1), dict(tli=2, tli_exact=True), dict(tli=3, ce=0.7, feature=0.4),
])
def test_loss_by_hand(options, progress):
    """
    Wrong weights, wrong positions averaged, true states in the wrong places,
    a loss that looks at the wrong layer.
    """
    target, (B, T), L = make_target(), (2, 14), 3
    net, x = make_net(target, **options), random_text(target, 2, 14)
    cfg, N = net.cfg, net.cfg.tli
    verified, start = draws(cfg, B, T, 11)
    ce, near, far = [], [], []
    hits, samples = [0] * net.K, [0] * net.K
    for b in range(B):
        inputs, _, _ = layers(target, x[b:b + 1])
        deep, h = inputs[L - N][0], target.norm(inputs[L])[0]
        see = [[j for j in range(i + 1) if progress == 1 or j == i or j > start[b][i]] for i in range(T)]
        sa, s = layer(net, net.sa, inputs[0][0], see), states(net, target, x[b])
        f = torch.stack([cross(net, sa[i], i, s[:start[b][i] + 1]) for i in range(T)])
        for i in range(1, T):
            far.append(F.smooth_l1_loss(f[i], deep[i]))
            if N and not cfg.tli_exact and i in verified[b]:
                continue
            true = [N and (j <= start[b][i] if cfg.tli_exact else j in verified[b]) for j in range(i + 1)]
            guess = tail(net, target, torch.stack([deep[j] if true[j] else f[j] for j in range(i + 1)]))
            p, q = target.lm_head(h[i]).softmax(0), target.lm_head(guess).log_softmax(0)
            ce.append(-(p * q).sum())
            near.append(F.smooth_l1_loss(guess, h[i]))
            k = i - start[b][i]
            if i + 1 < T and k <= net.K:
                samples[k - 1] += 1
                hits[k - 1] += (q.argmax() == x[b, i + 1]).item()
    mean = lambda rows: sum(rows) / len(rows)
    feature = mean(near) if N == 0 else 0.5 * mean(near) + 0.5 * mean(far)
    torch.manual_seed(11)
    total, top1 = loss(net, target, x, progress)
    torch.testing.assert_close(total, cfg.ce * mean(ce) + cfg.feature * feature)
    shares = [n / max(1, m) for n, m in zip(hits, samples)]
    torch.testing.assert_close(top1.double(), torch.tensor(shares).double())


class Run:
    """Stands for plumbing.trainer.Run: one batch, again and again."""

    vocab = None

    def __init__(self, x, steps):
        self.x, self.n, self.i, self.seen, self.asked = x, steps, 0, [], []

    def progress(self):
        self.asked.append(self.i / self.n)
        return self.i / self.n

    def steps(self, net, optimisers, evaluate):
        self.net = net.train()
        for self.i in range(self.n):
            yield self.x
        assert len(evaluate(self.x)[1]) == net.K

    def sync(self, net, total):
        assert net is self.net and math.isfinite(total.item())
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        self.seen.append(total.item())


@pytest.mark.parametrize("options", [dict(tli=0), dict(tli=1), dict(tli=1, tli_exact=True)])
def test_training_halves_the_loss(options):
    """
    A training loop that does not step, a detached loss, a start from which nothing learns;
    and the staircase is told when.
    """
    target = make_target().float()
    torch.manual_seed(0)
    run = Run(random_text(target, 4, 24), 50)
    before = {k: v.clone() for k, v in target.state_dict().items()}
    net = moa.train(Config(lr=1e-2, ce=0.01, **options), target, run)
    assert run.asked == [i / 50 for i in range(50)]
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())
    assert sum(run.seen[-5:]) / 5 < 0.5 * run.seen[0], (run.seen[0], run.seen[-5:])
    torch.manual_seed(1)
    a = loss(net, target, run.x)[0]
    torch.manual_seed(1)
    assert torch.equal(a, loss(net, target, run.x)[0])  # a function of the global generator alone


# --------------------------------------------------------------------------------------------------
# Draft

def check_drafts(drafter, sampler):
    """Every value in every tree is the product of from-scratch draft probabilities along its path."""
    net, target = drafter.net, drafter.target
    s = states(net, target, torch.tensor(drafter.seen[-1][0]))         # the longest text; others begin it
    for text, tree in drafter.seen:
        path = paths(tree)
        for up in sorted(set(tree.parent[1:])):
            logits = from_scratch(net, target, text, path[up], s[:len(text)])
            scores = sampler.rank(logits[None], [len(text) + len(path[up])])[0]
            q = scores.softmax(0)
            for i in (i for i, parent in enumerate(tree.parent) if parent == up):
                want = tree.value[up] * q[tree.tokens[i]]
                assert math.isclose(tree.value[i], want, rel_tol=1e-6, abs_tol=1e-12)


@pytest.mark.parametrize("style, name", [
    ("llama", "default"), ("llama", "N = 0"), ("llama", "all layers"), ("llama", "wide"),
    ("gpt2", "default"), ("gpt2", "N = 0"), ("gpt2", "all layers"), ("gpt2", "no LSA"),
])
def test_cached_drafts(style, name):
    """
    Stale or missing rows in a cache after 0, 1, .. 4 accepted tokens,
    a wrong position, mask or crop, a sibling's key.
    """
    target = make_target(style)
    net, prompt, sampler = make_net(target, **ABLATIONS[name]), [1, 2, 3], Sampler(0.7, seed=3)
    plain, _ = complete(target, prompt, 17, sampler=sampler)
    for shape in (None, cartesian(2, 2, 1)):
        drafter = Watch(net, target, shape, max_nodes=9, breadth=3)
        drafter.force = plain, len(prompt)
        text, stats = complete(target, prompt, 17, drafter, sampler)
        assert text == plain and set(stats.accepted[1:-1]) == {1, 2, 3, 4, 5}
        with torch.no_grad():
            check_drafts(drafter, sampler)
        S = len(drafter.text)
        assert drafter.sa.length <= S + 1 and drafter.ca.length == S
        assert drafter.last is None or drafter.last.length == S


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_perfect_drafter(style, temperature):
    """
    A draft one position off, noise of the wrong row, a chain that is not as deep as it says:
    all cost acceptance.
    """
    target = make_target(style)
    net = make_net(target, shaken=False, tli=3)                        # untrained, N = L: the target itself
    for depth in (1, 4):
        for drafter in (Drafter(net, target, chain(depth)),
                        Drafter(net, target, max_nodes=depth + 1, depth=depth, breadth=1)):
            n = 1 + 6 * (depth + 1)
            text, stats = complete(target, [5, 6], n, drafter, Sampler(temperature, seed=1))
            assert stats.accepted == [1] + [depth + 1] * 6 and stats.tau == depth + 1


def brute_force(net, target, text, root, depth, breadth, nodes, sampler):
    """EAGLE-2's tree from the definition: {path: value}; nothing pruned, nothing cached."""
    breadth, s = min(breadth, target.cfg.vocab_size), states(net, target, torch.tensor(text))
    pool, level = [], [((root,), 1.0)]
    for d in range(1, depth + 1):
        new = []
        for path, value in level:
            logits = from_scratch(net, target, text, list(path), s)
            q = sampler.rank(logits[None], [len(text) + d])[0].softmax(0)
            for i in q.topk(breadth).indices.tolist():
                if value * q[i] > 0:
                    new.append(((*path, i), value * q[i].item()))
        pool += new
        level = sorted(new, key=lambda node: -node[1])[:breadth]
    return dict([((root,), 1.0)] + sorted(pool, key=lambda node: -node[1])[:nodes - 1])


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8, top_k=6, top_p=0.9, seed=2)],
                         ids=["greedy", "sampled"])
@pytest.mark.parametrize("depth, breadth, nodes", [(3, 3, 8), (4, 2, 50), (2, 40, 12), (3, 4, 2), (1, 3, 16)])
def test_dynamic_tree(sampler, depth, breadth, nodes):
    """
    Pruning that loses a node of the best, a level cut before it is ranked,
    children before parents, a node too many.
    """
    target = make_target()
    net = make_net(target, tli=1)
    drafter = Watch(net, target, max_nodes=nodes, depth=depth, breadth=breadth)
    complete(target, [1, 2, 3], 6, drafter, sampler)
    with torch.no_grad():
        for text, tree in drafter.seen[:2]:
            assert len(tree) <= nodes == drafter.cache_rows
            assert all(up < i for i, up in enumerate(tree.parent))
            left = 3 + 6 - len(text) - 2  # a deeper node would never be emitted
            expect = brute_force(net, target, text, tree.tokens[0], min(depth, left), breadth, nodes, sampler)
            got = {tuple(path): v for path, v in zip(paths(tree), tree.value)}
            assert got.keys() == expect.keys() and len(got) == len(tree)
            assert all(math.isclose(got[path], expect[path], rel_tol=1e-6) for path in got)


def test_floor_and_waits(monkeypatch):
    """
    Nodes below the floor that are drafted or run all the same,
    and more than one wait for the device in a level.
    """
    target = make_target()
    net, calls, lists = make_net(target), [], []
    tolist, forward = torch.Tensor.tolist, Drafter.forward
    full = Watch(net, target)
    complete(target, [1, 2, 3], 9, full)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: lists.append(1) or tolist(t))
    monkeypatch.setattr(Drafter, "forward", lambda self, *args: calls.append(args[4]) or forward(self, *args))
    for floor in (0.0, 0.1, 0.4, 1.0):
        drafter = Watch(net, target, floor=floor)
        drafter.start(target, 40)
        cache = target.new_cache(40)
        with torch.no_grad():
            hidden = target.hidden(torch.tensor([[1, 2, 3]]), cache=cache)
            cache.keep(range(3))
            drafter.observe([1, 2, 3], hidden[0], cache)
            calls.clear(), lists.clear()
            root = full.seen[0][1].tokens[0]
            tree = drafter.draft(root, Sampler())
        assert all(v > floor for v in tree.value[1:]) and len(lists) == len(calls) <= net.K
        assert sum(calls) <= 1 + len(tree)                             # only nodes of the tree so far are run
        assert cache.length == 3 and drafter.sa.length == 4
    assert len(tree) == 1 and calls == [1]


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("sampling", [(0.0,), (0.8,), (0.8, 5, 0.9)])
def test_lossless(style, sampling):
    """A draft that changes the text, whatever the tree and the parts."""
    target, sampler = make_target(style), Sampler(*sampling, seed=7)
    plain, _ = complete(target, [4, 4, 1], 12, sampler=sampler)
    shapes = [None, chain(6), cartesian(3, 2), grow([[0.5, 0.3]] * 3, 7), cartesian(40), chain(0)]
    for n, options in enumerate(ABLATIONS.values()):
        drafter = Drafter(make_net(target, **options), target, shapes[n % len(shapes)], max_nodes=1 + 3 * n)
        assert complete(target, [4, 4, 1], 12, drafter, sampler)[0] == plain


def test_untidy_shape():
    """
    A best-first shape lists nodes out of level order:
    tokens must still go to the node with that parent and rank.
    """
    target = make_target()
    net, shape = make_net(target), grow([[0.9, 0.3], [0.9, 0.5], [0.9, 0.4]], 9)
    assert Tree(shape.parent, shape.parent).depth != sorted(Tree(shape.parent, shape.parent).depth)
    drafter, sampler = Watch(net, target, shape), Sampler(0.5)
    complete(target, [1, 2], 20, drafter, sampler)
    with torch.no_grad():
        check_drafts(drafter, sampler)
        text, tree = drafter.seen[0]
        assert tree.parent == shape.parent and drafter.cache_rows == 9
        for i, path in list(enumerate(paths(tree)))[1:]:
            logits = from_scratch(net, target, text, path[:-1])
            scores = sampler.rank(logits[None], [len(text) + len(path) - 1])[0]
            assert scores.argsort(descending=True)[shape.rank[i]] == tree.tokens[i]


def test_second_prompt():
    """Rows of the first prompt left in a cache."""
    target = make_target()
    for options in (dict(tli=0), dict(tli=2)):
        net, sampler = make_net(target, **options), Sampler(0.6, seed=4)
        used, fresh = Watch(net, target), Watch(net, target)
        complete(target, list(range(20)), 20, used, sampler)
        a, b = (complete(target, [3, 1], 30, d, sampler) for d in (used, fresh))
        assert a[0] == b[0] and a[1].accepted == b[1].accepted
        assert [(t, tree.tokens, tree.parent, tree.value) for t, tree in used.seen] == \
               [(t, tree.tokens, tree.parent, tree.value) for t, tree in fresh.seen]


@torch.no_grad()
def test_draft_twice():
    """A draft that leaves rows behind: asked again, with another root in between, it must answer the same."""
    target = make_target()
    drafter, cache, answers = Drafter(make_net(target, tli=2), target), target.new_cache(40), []
    drafter.start(target, 40)
    hidden = target.hidden(torch.tensor([[1, 2, 3]]), cache=cache)
    cache.keep(range(3))
    drafter.observe([1, 2, 3], hidden[0], cache)
    for root in (5, 9, 5):
        tree = drafter.draft(root, Sampler())
        answers.append((tree.tokens, tree.parent, [round(v, 9) for v in tree.value]))
        assert (drafter.sa.length, drafter.last.length, drafter.ca.length, cache.length) == (4, 3, 3, 3)
    assert answers[0] == answers[2] != answers[1]


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_end_of_context(style, monkeypatch):
    """Drafts past block_size: an index error in wpe, or rows of the rotary table that do not exist."""
    target, positions = make_target(style, block_size=24), []
    embed = GPT.embed

    def watched(self, idx, pos):
        positions.append(int(pos.max()))
        return embed(self, idx, pos)
    monkeypatch.setattr(GPT, "embed", watched)
    rng = random.Random(0)
    for shape in (None, chain(5), cartesian(2, 2, 2, 2)):
        drafter = Drafter(make_net(target, tli=3, shaken=False), target, shape)
        for n in (1, 17, 18, 19, 20, 21, 22, 23):
            prompt = [rng.randrange(23) for _ in range(n)]
            text, stats = complete(target, prompt, 100, drafter, Sampler())
            assert text == complete(target, prompt, 100)[0]
            assert len(text) == 24 - n and stats.stop == "context"
    assert max(positions) < 24


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("tli, lsa", [(0, True), (1, True), (3, True), (1, False)])
def test_alone_is_the_drafters_own_distribution(style, tli, lsa):
    """
    Catches stale rows of SA or of the last layers, wrong positions,
    and an end at the depth of the tree (4).
    """
    target = tiny(style, n_layer=3, block_size=64)
    net = make_net(target, tli=tli, lsa=lsa)
    text, drafter = random_text(target, 1, 30)[0].tolist(), Drafter(net, target)
    with torch.inference_mode():
        cache = target.new_cache(64)
        drafter.start(target, 64)
        for S in (6, 11):  # a second time, after drafts and tokens written alone
            new = text[cache.length:S]
            hidden = target.hidden(torch.tensor([new]), cache=cache)
            cache.keep(range(len(new)))
            drafter.observe(new, hidden[0], cache)
            drafter.draft(text[S], Sampler())
            s = states(net, target, torch.tensor(text[:S]))
            for end in range(S + 1, S + 8):
                want = from_scratch(net, target, text[:S], text[S:end], s)
                assert (drafter.next_logits(text[S:end])[0] - want).abs().max() < 1e-6
