"""Medusa: initial state, loss, gradients, drafted logits. Tiny random targets in float64."""
import copy

import pytest
import torch

import medusa
from conftest import tiny
from medusa import Config, Drafter, Net, guesses, loss
from model import GPT, GPTConfig
from tree import Sampler, cartesian, chain, complete, grow

OPTIONS = {
    "default": {},
    "own output": dict(share_head=False),
    "soft": dict(soft=1.0, hard=0.0),
    "both": dict(soft=0.7, hard=0.3),
    "one head": dict(n_heads=1),
    "all anchors": dict(anchors=0),
}


def make_net(target, shaken=True, seed=1, **options):
    """A net in evaluation mode; shaken = all its parameters random, so that no head can stand in for another."""
    torch.manual_seed(seed)
    net = Net(Config(**options), target).to(target.wte.weight.dtype)
    for p in net.parameters() if shaken else ():
        p.data.add_(0.2 * torch.randn_like(p))
    return net.eval()


def text(target, B, T, seed=0):
    return torch.randint(target.cfg.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def by_hand(net, target, h, k):
    """Logits of head k on hidden states h (M, C): the paper's formula, one head at a time."""
    C = h.size(-1)
    W1, b = net.proj.weight[(k - 1) * C:k * C], net.proj.bias[(k - 1) * C:k * C]
    a = h @ W1.T + b
    z = h + a * a.sigmoid()
    return z @ (target.lm_head.weight if net.out is None else net.out[k - 1]).T


# ---------------------------------------------------------------------------------------------------------------------
# Modules

@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_heads_start_as_the_lm_head(share, tied):
    """Random heads at the start, or a residual that is scaled: training begins far from a language model."""
    target = tiny(tied=tied)
    net, h = make_net(target, shaken=False, share_head=share), torch.randn(7, 16).double()
    logits = net(h, target)
    assert logits.shape == (7, 4, 23)
    for k in range(4):
        assert torch.allclose(logits[:, k], target.lm_head(h), atol=1e-12, rtol=0)


@pytest.mark.parametrize("share", [True, False])
def test_heads_compute_the_papers_formula(share):
    """Rows of W1 that go to another head, a missing bias, residual or activation, another head's W2."""
    target = tiny(seed=2)
    net, h = make_net(target, share_head=share), torch.randn(7, 16).double()
    logits = net(h, target)
    for k in range(1, 5):
        assert torch.allclose(logits[:, k - 1], by_hand(net, target, h, k), atol=1e-10)
        assert not torch.allclose(logits[:, k - 1], by_hand(net, target, h, k % 4 + 1), atol=1e-3)


def test_own_output_matrices_are_copies():
    """W2 that shares storage with lm_head (and, tied, with wte), or with another head's: training would move the target."""
    target = tiny(tied=True)
    before = {k: v.clone() for k, v in target.state_dict().items()}
    net = make_net(target, shaken=False, share_head=False)
    assert net.out.untyped_storage().data_ptr() != target.lm_head.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        net.out[1] += 1
    assert torch.equal(net.out[0], target.lm_head.weight) and torch.equal(net.out[2], net.out[0])
    net = make_net(target, shaken=False, share_head=False)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    loss(net, target, text(target, 2, 9))[0].backward()
    opt.step()
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())
    steps = [net.out[k] - before["lm_head.weight"] for k in range(4)]
    assert all(s.abs().max() > 1e-4 for s in steps)                    # each moved, and by itself
    assert all(not torch.allclose(steps[0], s, atol=1e-6) for s in steps[1:])


def test_the_net_owns_nothing_of_the_target():
    """A frozen matrix in the checkpoint, or counted as trained."""
    target = tiny()
    net = make_net(target)
    assert set(net.state_dict()) == {"proj.weight", "proj.bias"}
    assert sum(p.numel() for p in net.parameters()) == 4 * (16 * 16 + 16)
    assert set(make_net(target, share_head=False).state_dict()) == {"proj.weight", "proj.bias", "out"}
    places = {p.untyped_storage().data_ptr() for p in target.parameters()}
    assert not places & {p.untyped_storage().data_ptr() for p in make_net(target, share_head=False).parameters()}


# ---------------------------------------------------------------------------------------------------------------------
# Loss

def loss_by_hand(net, target, x):
    """One sequence, one anchor and one head at a time. Returns the loss and the top-1 of each head."""
    cfg, total, top1 = net.cfg, 0.0, []
    h = torch.stack([target.hidden(row[None])[0] for row in x])
    for k in range(1, net.K + 1):
        errors, right = [], []
        for b in range(x.size(0)):
            for t in range(x.size(1) - 1 - k):                         # x[t+1+k] must be in the text
                q = by_hand(net, target, h[b, t:t + 1], k)[0].log_softmax(-1)
                p = (h[b, t + k] @ target.lm_head.weight.T).softmax(-1)
                errors.append(-cfg.hard * q[x[b, t + 1 + k]] - cfg.soft * (p * q).sum())
                right.append(q.argmax().item() == x[b, t + 1 + k].item())
        total = total + cfg.decay**k * sum(errors) / len(errors)
        top1.append(sum(right) / len(right))
    return total, top1


@pytest.mark.parametrize("options", [dict(soft=0.0, hard=1.0), dict(soft=1.0, hard=0.0), dict(soft=0.7, hard=0.3, decay=0.5),
                                     dict(share_head=False, soft=0.5)], ids=str)
@pytest.mark.parametrize("B, T", [(1, 6), (2, 7), (3, 6)])
def test_loss_is_the_hand_written_sum(options, B, T):
    """A label one place off, an anchor too many, the soft target of another position, a weight forgotten."""
    target = tiny(seed=3)
    net, x = make_net(target, **options), text(target, B, T)
    total, top1 = loss(net, target, x)
    want, right = loss_by_hand(net, target, x)
    assert total.item() == pytest.approx(want.item(), abs=1e-10)
    assert top1.tolist() == pytest.approx(right)


@pytest.mark.parametrize("fault", ["label", "decay", "soft"])
def test_that_the_sum_can_differ(fault, monkeypatch):
    """Planted: labels one place off, decay^(k-1), soft targets of the anchor itself."""
    target = tiny(seed=3)
    net, x = make_net(target, soft=0.5), text(target, 2, 7)
    want, _ = loss_by_hand(net, target, x)
    real = guesses
    if fault == "label":
        monkeypatch.setattr(medusa, "guesses", lambda *a: ((g, t.roll(1), o) for g, t, o in real(*a)))
    if fault == "soft":
        monkeypatch.setattr(medusa, "guesses", lambda *a: ((g, t, o.roll(1, 0)) for g, t, o in real(*a)))
    scale = 1 / net.cfg.decay if fault == "decay" else 1
    assert abs(loss(net, target, x)[0].item() * scale - want.item()) > 1e-3


def test_text_too_short_for_the_last_heads():
    """Heads without a single label: their mean over nothing is NaN and poisons the sum, or an index error."""
    target = tiny()
    net, x = make_net(target), text(target, 2, 5)
    shapes = [(len(g), len(t), len(o)) for g, t, o in guesses(net, target, x)]
    assert shapes == [(6, 6, 6), (4, 4, 4), (2, 2, 2), (0, 0, 0)]      # head 4 needs 6 tokens


def test_random_anchors_are_real_anchors():
    """In training: labels that do not belong to the drawn anchors, anchors without a label, the same ones in every batch."""
    target = tiny(seed=4)
    net, x = make_net(target, anchors=5), text(target, 3, 30)
    every = [[part.view(3, -1, *part.shape[1:]) for part in parts] for parts in guesses(net, target, x)]
    net.train()
    drawn = []
    for _ in range(3):
        for k, (g, t, o) in enumerate(guesses(net, target, x), 1):
            assert len(g) == len(t) == len(o) == 3 * 5
            for i in range(15):
                same = [a for a in range(30 - 1 - k) if torch.allclose(every[k - 1][0][i // 5, a], g[i], atol=1e-9)]
                assert len(same) == 1
                assert every[k - 1][1][i // 5, same[0]] == t[i]
                assert torch.allclose(every[k - 1][2][i // 5, same[0]], o[i], atol=1e-9)
                drawn.append(same[0])
    assert len(set(drawn)) > 15 and min(drawn) < 5 and max(drawn) > 20
    net.cfg.anchors = 0
    assert [len(g) for g, _, _ in guesses(net, target, x)] == [3 * (29 - k) for k in range(1, 5)]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name):
    """A part that is never trained; a target that is."""
    target = tiny(seed=5).requires_grad_(True)                         # even if nobody froze it
    net, x = make_net(target, **OPTIONS[name]).train(), text(target, 2, 12)
    loss(net, target.requires_grad_(False), x)[0].backward()
    for n, p in net.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), n
        for part in p.grad.chunk(net.K):                               # the rows of every head
            assert part.abs().max() > 0, n
    assert all(p.grad is None for p in target.parameters())


def test_a_head_knows_nothing_of_later_tokens():
    """Heads that look ahead: perfect in training, worthless when drafting."""
    target = tiny(seed=6)
    net, x = make_net(target), text(target, 1, 20)
    y = x.clone()
    y[0, 10:] = (y[0, 10:] + 1) % 23
    for (a, _, _), (b, _, _) in zip(guesses(net, target, x), guesses(net, target, y)):
        assert torch.allclose(a[:10], b[:10], atol=1e-12)
        assert not torch.allclose(a[10:], b[10:], atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Training

class Repeat:
    """A run that hands out one batch again and again."""

    vocab = None

    def __init__(self, x, n):
        self.x, self.n, self.seen = x, n, []

    def steps(self, module, optimisers, evaluate):
        module.train()
        assert len(evaluate(self.x)) == 2
        for _ in range(self.n):
            yield self.x

    def sync(self, module, loss):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        self.seen.append(loss.item())

    def progress(self):
        return len(self.seen) / self.n


@pytest.mark.parametrize("options", [dict(), dict(share_head=False), dict(soft=1.0, hard=0.0)], ids=str)
def test_loss_halves_on_one_batch(options):
    """An optimiser that holds no or other parameters, gradients that pile up or are dropped, a sign."""
    torch.manual_seed(0)
    target = GPT(GPTConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_ffn=32, vocab_size=23, block_size=40)).eval()
    with torch.no_grad():
        for p in target.parameters():
            p.mul_(8 if p.dim() > 1 else 1)
    target.requires_grad_(False)
    before = copy.deepcopy(target.state_dict())
    x, cfg = text(target, 2, 12), Config(n_heads=2, anchors=0, lr=3e-2, **options)
    run = Repeat(x, 60)
    net = medusa.train(cfg, target, run)
    assert len(run.seen) == 60
    floor = 0.0
    if cfg.soft:                                                       # cross-entropy cannot fall below the target's entropy
        for k, (_, _, own) in enumerate(guesses(net, target, x), 1):
            p = own.softmax(-1)
            floor += cfg.decay**k * -(p * p.clamp(min=1e-30).log()).sum(-1).mean().item()
    assert run.seen[-1] - floor < 0.5 * (run.seen[0] - floor)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())
    assert not any(p.requires_grad for p in target.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Draft

class Spy(Sampler):
    """Remembers what is ranked."""

    def rank(self, logits, positions):
        self.ranked = getattr(self, "ranked", []) + [(logits.clone(), list(positions))]
        return super().rank(logits, positions)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("T", [0.0, 1.0])
def test_drafted_logits_are_the_heads_of_the_committed_text(T, share):
    """A hidden state of a rejected node, of the token before, or of an earlier text; noise of a neighbouring position."""
    target = tiny(seed=7)
    net = make_net(target, share_head=share)
    drafter = Drafter(net, target)
    for prompt in ([3, 1, 4, 1, 5], [9, 2]):
        spy = Spy(T, seed=3)
        out, stats = complete(target, prompt, 30, drafter, spy)
        full = prompt + out
        assert len(spy.ranked) == stats.steps > 5
        n = len(prompt)
        for (logits, positions), step in zip(spy.ranked, [0] + stats.accepted[1:]):
            n += step
            h = target.hidden(torch.tensor([full[:n]]))[:, -1]         # committed: all but the root at position n
            assert positions == list(range(n + 1, n + 5))
            for k in range(1, 5):
                assert torch.allclose(logits[k - 1], by_hand(net, target, h, k)[0], atol=1e-9)
    assert T == 0 or max(stats.accepted) > 1


def test_trees_of_a_draft():
    """More nodes than asked for, another topology than asked for, a root that is not the last token."""
    target = tiny(seed=7)
    for shape, nodes in ((None, 1), (None, 9), (chain(3), 16), (cartesian(4, 3), 16), (grow([[0.5, 0.4], [0.3]], 4), 16)):
        drafter = Drafter(make_net(target), target, shape=shape, nodes=nodes)
        drafter.start(target, 40)
        drafter.observe([1, 2, 3], target.hidden(torch.tensor([[1, 2, 3]]))[0], None)
        tree = drafter.draft(17, Sampler())
        assert tree.tokens[0] == 17 and len(tree) == drafter.rows == (nodes if shape is None else len(shape.parent))
        assert shape is None or tree.parent == shape.parent


def test_a_tree_deeper_than_the_heads_is_cut():
    """Two heads and a tree of depth four: an index error in the middle of a text."""
    target = tiny(seed=7)
    for shape in (chain(4), cartesian(2, 2, 1, 1)):
        drafter = Drafter(make_net(target, n_heads=2), target, shape=shape)
        out, _ = complete(target, [1, 2, 3], 20, drafter)
        assert out == complete(target, [1, 2, 3], 20)[0]
        drafter.start(target, 40)
        drafter.observe([1], target.hidden(torch.tensor([[1]]))[0], None)
        assert max(drafter.draft(5, Sampler()).depth) == 2


def test_a_tree_wider_than_the_vocabulary_is_cut():
    """Four guesses of three tokens: an index error in the middle of a text."""
    target = tiny(seed=7, vocab_size=3)
    out, _ = complete(target, [1, 2], 20, Drafter(make_net(target), target, shape=cartesian(4, 4)))
    assert out == complete(target, [1, 2], 20)[0]
