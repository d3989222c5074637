"""Medusa: initial state, loss, gradients, drafted logits. Tiny random targets in float64."""
import copy
import inspect
import json
import math
import os
import random
import shutil

import numpy as np
import pytest
import torch

import plumbing.budget
import plumbing.text
import plumbing.trainer
import medusa
import sample
import train
from conftest import tiny
from medusa import Config, Drafter, Joint, Net, Typical, predictions, joint_loss, loss, walk_typical
from model import GPT, GPTConfig
from safetensors.torch import load_file
from plumbing.checkpoint import fingerprint, load, load_model
from plumbing.text import Tokenizer
from test_tree import ancestors, processed, random_parents, some_logits
from tree import Sampler, Tree, complete, generate, grow, walk
from plumbing.shapes import cartesian, chain

OPTIONS = {
    "default": {},
    "own output": dict(share_head=False),
    "soft": dict(soft=1.0, hard=0.0),
    "both": dict(soft=0.7, hard=0.3),
    "one head": dict(n_heads=1),
    "all anchors": dict(anchors=0),
}


def make_net(target, shaken=True, seed=1, **options):
    """
    A net in evaluation mode;
    shaken = all its parameters random, so that no head can stand in for another.
    """
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


# --------------------------------------------------------------------------------------------------
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
    """
    W2 that shares storage with lm_head (and, tied, with wte), or with another head's:
    training would move the target.
    """
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
    whole = make_net(target, share_head=False)
    assert not places & {p.untyped_storage().data_ptr() for p in whole.parameters()}


# --------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize("options", [
    dict(soft=0.0, hard=1.0), dict(soft=1.0, hard=0.0), dict(soft=0.7, hard=0.3, decay=0.5),
    dict(share_head=False, soft=0.5),
], ids=str)
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
    real = predictions
    if fault == "label":
        monkeypatch.setattr(medusa, "predictions", lambda *a: ((g, t.roll(1), o) for g, t, o in real(*a)))
    if fault == "soft":
        monkeypatch.setattr(medusa, "predictions", lambda *a: ((g, t, o.roll(1, 0)) for g, t, o in real(*a)))
    scale = 1 / net.cfg.decay if fault == "decay" else 1
    assert abs(loss(net, target, x)[0].item() * scale - want.item()) > 1e-3


def test_text_too_short_for_the_last_heads():
    """Heads without a single label: their mean over nothing is NaN and poisons the sum, or an index error."""
    target = tiny()
    net, x = make_net(target), text(target, 2, 5)
    shapes = [(len(g), len(t), len(o)) for g, t, o in predictions(net, target, x)]
    assert shapes == [(6, 6, 6), (4, 4, 4), (2, 2, 2), (0, 0, 0)]      # head 4 needs 6 tokens


def test_random_anchors_are_real_anchors():
    """
    In training: labels that do not belong to the drawn anchors, anchors without a label,
    the same ones in every batch.
    """
    target = tiny(seed=4)
    net, x = make_net(target, anchors=5), text(target, 3, 30)
    every = [[part.view(3, -1, *part.shape[1:]) for part in parts] for parts in predictions(net, target, x)]
    net.train()
    drawn = []
    for _ in range(3):
        for k, (g, t, o) in enumerate(predictions(net, target, x), 1):
            assert len(g) == len(t) == len(o) == 3 * 5
            for i in range(15):
                logits, labels, own = (part[i // 5] for part in every[k - 1])
                same = [a for a in range(30 - 1 - k) if torch.allclose(logits[a], g[i], atol=1e-9)]
                assert len(same) == 1
                assert labels[same[0]] == t[i]
                assert torch.allclose(own[same[0]], o[i], atol=1e-9)
                drawn.append(same[0])
    assert len(set(drawn)) > 15 and min(drawn) < 5 and max(drawn) > 20
    net.cfg.anchors = 0
    assert [len(g) for g, _, _ in predictions(net, target, x)] == [3 * (29 - k) for k in range(1, 5)]


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
    for (a, _, _), (b, _, _) in zip(predictions(net, target, x), predictions(net, target, y)):
        assert torch.allclose(a[:10], b[:10], atol=1e-12)
        assert not torch.allclose(a[10:], b[10:], atol=1e-3)


# --------------------------------------------------------------------------------------------------
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
    shape = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_ffn=32, vocab_size=23, block_size=40)
    target = GPT(GPTConfig(**shape)).eval()
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
    if cfg.soft:  # cross-entropy cannot fall below the target's entropy
        for k, (_, _, own) in enumerate(predictions(net, target, x), 1):
            p = own.softmax(-1)
            floor += cfg.decay**k * -(p * p.clamp(min=1e-30).log()).sum(-1).mean().item()
    assert run.seen[-1] - floor < 0.5 * (run.seen[0] - floor)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())
    assert not any(p.requires_grad for p in target.parameters())


# --------------------------------------------------------------------------------------------------
# Medusa-2

def make_joint(target, **options):
    """
    Heads and a copy of the target, shaken both, in float64;
    anchors=0 so that training mode is deterministic.
    """
    joint = Joint(make_net(target, recipe=2, **{"anchors": 0, **options}), target).train()
    torch.manual_seed(9)
    for p in joint.target.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    return joint


@pytest.mark.parametrize("lm", ["text", "kl"])
@pytest.mark.parametrize("share", [True, False])
def test_the_joint_loss_is_equation_2(lm, share):
    """
    L_LM + lambda_0 L_Medusa1 by hand: a weight on the wrong term, a KL the other way round,
    labels one place off, the heads on the original's hidden states.
    """
    target = tiny(seed=3)
    joint, x = make_joint(target, lm=lm, share_head=share, hard=0.3), text(target, 2, 7)
    total, lm_term, _ = joint_loss(joint, target, x, 0.2)
    errors = []
    for row in x:
        q = (joint.target.hidden(row[None])[0] @ joint.target.lm_head.weight.T).log_softmax(-1)
        p = (target.hidden(row[None])[0] @ target.lm_head.weight.T).softmax(-1)
        for t in range(7):
            if lm == "kl":
                errors.append(sum(p[t, v] * (p[t, v].log() - q[t, v]) for v in range(23)))
            elif t < 6:
                errors.append(-q[t, row[t + 1]])
    heads, _ = loss_by_hand(joint.net, joint.target, x)
    assert lm_term.item() == pytest.approx((sum(errors) / len(errors)).item(), abs=1e-10)
    assert total.item() == pytest.approx((lm_term + 0.2 * heads).item(), abs=1e-10)


def test_kl_is_zero_and_flat_at_the_start():
    """
    A teacher that is not the original, or a cross-entropy in its place:
    the backbone would move from the first step.
    """
    target = tiny()
    joint = Joint(make_net(target, recipe=2, lm="kl"), target)
    total, lm, _ = joint_loss(joint, target, text(target, 2, 9), 0.0)
    total.backward()
    assert lm.item() == pytest.approx(0, abs=1e-12)
    assert all(p.grad is None or p.grad.abs().max() < 1e-9 for p in joint.target.parameters())


@pytest.mark.parametrize("lm", ["text", "kl"])
@pytest.mark.parametrize("share", [True, False])
def test_joint_gradients_reach_both_parts(lm, share):
    """
    Hidden states that are detached (the heads would not shape the backbone), labels that are not;
    a teacher that learns.
    """
    target = tiny(seed=5, tied=False)
    joint, x = make_joint(target, lm=lm, share_head=share, hard=0.5), text(target, 2, 12)
    joint_loss(joint, target, x, 0.2)[0].backward()
    for n, p in joint.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, n
    assert all(p.grad is None for p in target.parameters())
    h = joint.target.hidden(x)  # the heads' loss reaches the backbone through h alone
    joint.zero_grad()
    logits = joint.target.lm_head(h)
    loss(joint.net, joint.target, x, (h, logits.detach()))[0].backward()
    grad = joint.target.blocks[0].attn.qkv.weight.grad
    assert grad.abs().max() > 0
    before = copy.deepcopy(joint)  # ... as a difference quotient with fixed labels says
    w, step = before.target.blocks[0].attn.qkv.weight, 1e-6
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            w[0, 0] += sign * step
            seen = before.target.hidden(x), logits.detach()
            values.append(loss(before.net, before.target, x, seen)[0].item())
            w[0, 0] -= sign * step
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(grad[0, 0].item(), rel=1e-4, abs=1e-7)
    both, grad = [], grad.clone()                                      # and the joint loss has all of it
    for weight in (1.0, 0.0):
        joint.zero_grad()
        joint_loss(joint, target, x, weight)[0].backward()
        both.append(joint.target.blocks[0].attn.qkv.weight.grad.clone())
    assert torch.allclose(both[0] - both[1], grad, atol=1e-10)


@pytest.mark.parametrize("lm", ["text", "kl"])
def test_gradients_survive_autocast(lm):
    """
    As on a GPU: dtypes that do not mix, labels or a KL in half precision,
    a weight whose gradient is lost on the way.
    """
    target = tiny(dtype=torch.float32, tied=False)
    joint = make_joint(target, lm=lm)
    with torch.autocast("cpu", torch.bfloat16):
        joint_loss(joint, target, text(target, 2, 12), 0.2)[0].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in joint.parameters())


def train_both(target, steps=20, cfg=(), watch=lambda run, joint, opt: None):
    """medusa.train of recipe 2 on one repeated batch -> Joint. watch sees every step before it is made."""
    class Watched(Repeat):
        def steps(self, module, optimisers, evaluate):
            self.module, self.peak = module, [g["lr"] for g in optimisers[0].param_groups]
            total, top1, more = evaluate(self.x)
            assert set(more) == {"backbone", "backbone_before"} and len(top1) == module.net.K
            module.train()
            for _ in range(self.n):
                for g, lr in zip(optimisers[0].param_groups, self.peak):
                    g["lr"] = lr  # as train.py's schedule sets it, here a constant
                yield self.x
                watch(self, module, optimisers[0])
            self.evaluate = evaluate
    run = Watched(text(target, 2, 12), steps)
    joint = medusa.train(Config(recipe=2, n_heads=2, anchors=0, lr=1e-2, **dict(cfg)), target, run)
    return joint, run


def test_stages_and_learning_rates():
    """
    A backbone that moves in stage 1, by weight decay or momentum;
    one rate for all; a backbone that never learns.
    """
    target = tiny(seed=4, dtype=torch.float32)
    original, rates, moved, heads = copy.deepcopy(target.state_dict()), [], [], []

    def watch(run, joint, opt):
        assert len(opt.param_groups[0]["params"]) == len(list(joint.net.parameters()))
        moved.append(not all(torch.equal(v, original[k]) for k, v in joint.target.state_dict().items()))
        heads.append(joint.net.proj.weight.detach().abs().max().item())
        rates.append([g["lr"] for g in opt.param_groups])
    joint, run = train_both(target, 20, dict(warmup=0.5), watch)
    # the step after progress 0.5 has a backbone rate of 0,
    # then the rate rises over a tenth of the joint training
    assert moved == [False] * 11 + [True] * 9 and heads[0] > 0
    assert all(r[0] == 1e-2 for r in rates) and [r[1] for r in rates[11:]] == [pytest.approx(2.5e-3)] * 9
    assert all(torch.equal(v, original[k]) for k, v in target.state_dict().items())  # the original stays
    assert not any(p.requires_grad for p in target.parameters())
    assert joint.target.lm_head.weight is joint.target.wte.weight      # still tied
    assert {p.untyped_storage().data_ptr() for p in joint.parameters()}.isdisjoint(
        p.untyped_storage().data_ptr() for p in target.parameters())
    _, _, more = run.evaluate(run.x)
    assert more["backbone"] < more["backbone_before"]                  # it learnt the batch


def test_the_warm_up_is_medusa_1():
    """Stage 1 that weighs or trains the heads otherwise than recipe 1 does."""
    target, cfg = tiny(seed=4, dtype=torch.float32), dict(n_heads=2, anchors=0, lr=1e-2)
    run = Repeat(text(target, 2, 12), 5)
    alone = medusa.train(Config(**cfg), target, run)
    weights = []

    def watch(run, joint, opt):
        weights.append(joint.net.proj.weight.detach().clone())
    train_both(target, 10, dict(warmup=0.5), watch)
    assert torch.equal(weights[4], alone.proj.weight) and not torch.equal(weights[5], weights[4])


@pytest.mark.parametrize("ramp, share", [("none", lambda d: 1.0), ("linear", lambda d: d),
                                         ("sine", lambda d: math.sin(d * math.pi / 2))])
def test_the_ramp_weighs_the_heads(ramp, share, monkeypatch):
    """
    A ramp on the backbone's term (as one sentence of the paper has it), over stage 1 too,
    or that never reaches 1.
    """
    target, weights, real = tiny(seed=4, dtype=torch.float32), [], medusa.joint_loss
    monkeypatch.setattr(medusa, "joint_loss", lambda j, o, x, w: weights.append(w) or real(j, o, x, w))
    train_both(target, 8, dict(warmup=0.25, ramp=ramp, heads_weight=0.3))
    assert weights[0] == 0.3                                           # on held-out text always the whole
    assert weights[1:] == [pytest.approx(0.3 * share(n / 6)) for n in range(6)]


def test_naive_joint_training_can_be_asked_for():
    """
    --warmup 0 --backbone-lr 1 --heads-weight 1: one rate, no stages, plain sum,
    against a loop written here.
    """
    target = tiny(seed=4, dtype=torch.float32)
    joint, run = train_both(target, 6, dict(warmup=0.0, backbone_lr=1.0, heads_weight=1.0))
    mine = Joint(Net(Config(n_heads=2, anchors=0), target).to(run.x.device), target).train()
    opt = torch.optim.AdamW(mine.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for seen in run.seen:
        h = mine.target.hidden(run.x)
        logits = mine.target.lm_head(h)
        total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), run.x[:, 1:].flatten())
        total = total + loss(mine.net, mine.target, run.x, (h, logits.detach()))[0]
        assert total.item() == pytest.approx(seen, abs=1e-5)
        opt.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
        opt.step()
    assert run.seen[-1] < run.seen[0]


@pytest.fixture(scope="module")
def both(trained, text_file, tmp_path_factory):
    """
    -> the arguments of a Medusa-2 training,
    and a folder that holds the backbone, its heads, and what they made.
    """
    out = str(tmp_path_factory.mktemp("both"))
    for name in ("backbone", "medusa", "amphista"):
        shutil.copytree(os.path.join(trained, name), os.path.join(out, name))
    args = ["--method", "medusa", "--recipe", "2", "--out", out, "--data", text_file, "--device", "cpu",
            "--steps", "8", "--batch-size", "2", "--anchors", "8", "--lr", "0.02"]
    before = fingerprint(load_file(os.path.join(out, "backbone", "model.safetensors")))
    train.main(args)
    assert fingerprint(load_file(os.path.join(out, "backbone", "model.safetensors"))) == before  # it stays
    return args, out


def decoded(capsys, out, *argv):
    sample.main(["--out", str(out), "--max-new-tokens", "40", "--prompt", "the cat ", "--device", "cpu",
                 *argv])
    return capsys.readouterr()


def test_medusa_2_round_trip(both, capsys):
    """
    A new backbone that is saved without its heads or after other steps,
    or is not what plain decoding and --compare use.
    """
    args, out = both
    new = os.path.join(out, "medusa2")
    tensors, meta = load(os.path.join(new, "medusa", "model.safetensors"), "", "")
    target, _, backbone = load_model(os.path.join(new, "backbone", "model.safetensors"))
    old, _, original = load_model(os.path.join(out, "backbone", "model.safetensors"))
    assert set(tensors) == {"proj.weight", "proj.bias"} and target.cfg == old.cfg and backbone["finished"]
    assert meta["backbone"] == target.fingerprint != old.fingerprint
    assert meta["original"] == backbone["original"] == old.fingerprint
    sizes = [p.numel() for p in target.parameters()] + [t.numel() for t in tensors.values()]
    assert meta["parameters"] == sum(sizes)
    log = [json.loads(line) for line in open(os.path.join(new, "medusa", "log.jsonl"))]
    texts = plumbing.text.read_texts(args[args.index("--data") + 1])
    corpus = plumbing.text.Corpus(texts).tokenize(Tokenizer.from_dict(original["tokenizer"]))
    x = torch.cat(corpus.val_batches(8, 64, 4))
    for key, model in (("backbone_before", old), ("backbone", target)):
        assert log[-1][key] == meta["metrics"][key] == backbone["metrics"][key]
        assert meta["metrics"][key] == pytest.approx(train.backbone_loss(model, x)[0].item(), abs=2e-3)
    net = Net(Config(), target)
    net.load_state_dict(tensors)
    held_out = corpus.val_batches(8, 64, 16)
    hits, others = (plumbing.budget.calibrate(medusa, net.eval(), m, held_out)["hits"] for m in (target, old))
    assert meta["calibration"]["hits"] == hits != others  # the heads were tried on their own backbone
    assert log[0]["backbone"] == log[0]["backbone_before"] == log[-1]["backbone_before"]         # stage 1
    for T in ("0", "1"):
        plain = decoded(capsys, new, "--method", "plain", "--temperature", T).out
        got = decoded(capsys, new, "--method", "medusa", "--temperature", T, "--compare")
        assert got.out == plain and "text identical" in got.err


def test_medusa_2_and_the_others_refuse_each_other(both, capsys):
    """Heads of one backbone that are used with the other: lossless, and slower for no visible reason."""
    _, out = both
    new = os.path.join(out, "medusa2")
    for folder, method, checkpoint in ((new, "medusa", f"{out}/medusa"), (new, "amphista", f"{out}/amphista"),
                                       (out, "medusa", f"{new}/medusa")):
        with pytest.raises(SystemExit) as e:
            decoded(capsys, folder, "--method", method, "--checkpoint", checkpoint)
        err = capsys.readouterr().err
        assert e.value.code == 2 and "another backbone" in err and err.count("\n") == 1
        assert (f"use --out {new}" in err) == (checkpoint == f"{new}/medusa")


@pytest.mark.parametrize("at", [2, 5])
def test_medusa_2_resumes(both, tmp_path, monkeypatch, capsys, at):
    """Stopped in either stage: a backbone, optimiser state, schedule or stage that starts afresh."""
    args, out = both
    shutil.copytree(os.path.join(out, "backbone"), tmp_path / "backbone")
    args = [str(tmp_path) if a == out else a for a in args]
    sync, count = plumbing.trainer.Run.sync, []

    def interrupt(self, module, total):
        count.append(total.item())
        self.stop = len(count) == at
        return sync(self, module, total)
    monkeypatch.setattr(plumbing.trainer.Run, "sync", interrupt)
    with pytest.raises(SystemExit):
        train.main(args)
    # what an interrupted run leaves can be used
    assert decoded(capsys, tmp_path / "medusa2", "--method", "medusa").out
    train.main(args + ["--resume"])
    assert len(count) == 8
    for part in ("backbone", "medusa"):
        a, b = (load_file(os.path.join(o, "medusa2", part, "model.safetensors")) for o in (out, tmp_path))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    last = []
    for o in (out, tmp_path):
        with open(os.path.join(o, "medusa2/medusa/log.jsonl")) as f:
            last.append(json.loads(f.readlines()[-1]))
    for key in ("val_loss", "top1", "backbone", "backbone_before"):
        assert last[0][key] == last[1][key]
    capsys.readouterr()
    train.main(args + ["--resume"])
    assert "finished already" in capsys.readouterr().out


@pytest.mark.parametrize("argv, says", [
    (["--warmup", "1"], "--warmup"), (["--recipe", "3"], "--recipe"), (["--lm", "x"], "--lm"),
    (["--ramp", "x"], "--ramp"), (["--backbone-lr", "-1"], "--backbone-lr"),
])
def test_mistakes_about_medusa_2_get_one_line(argv, says, tmp_path, capsys):
    """A division by zero, or a traceback, for what a user typed."""
    with pytest.raises(SystemExit) as e:
        train.main(["--method", "medusa", "--out", str(tmp_path), *argv])
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# Draft

class Spy(Sampler):
    """Remembers what is ranked."""

    def rank(self, logits, positions):
        self.ranked = getattr(self, "ranked", []) + [(logits.clone(), list(positions))]
        return super().rank(logits, positions)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("T", [0.0, 1.0])
def test_drafted_logits_are_the_heads_of_the_committed_text(T, share):
    """
    A hidden state of a rejected node, of the token before, or of an earlier text;
    noise of a neighbouring position.
    """
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
            h = target.hidden(torch.tensor([full[:n]]))[:, -1]  # committed: all but the root at position n
            assert positions == list(range(n + 1, n + 5))
            for k in range(1, 5):
                assert torch.allclose(logits[k - 1], by_hand(net, target, h, k)[0], atol=1e-9)
    assert T == 0 or max(stats.accepted) > 1


def test_trees_of_a_draft():
    """More nodes than asked for, another topology than asked for, a root that is not the last token."""
    target = tiny(seed=7)
    for shape, nodes in ((None, 1), (None, 9), (chain(3), 16), (cartesian(4, 3), 16),
                         (grow([[0.5, 0.4], [0.3]], 4), 16)):
        drafter = Drafter(make_net(target), target, shape=shape, max_nodes=nodes)
        drafter.start(target, 40)
        drafter.observe([1, 2, 3], target.hidden(torch.tensor([[1, 2, 3]]))[0], None)
        tree = drafter.draft(17, Sampler())
        size = nodes if shape is None else len(shape.parent)
        assert tree.tokens[0] == 17 and len(tree) == drafter.cache_rows == size
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


# --------------------------------------------------------------------------------------------------
# Typical acceptance: lossy, by the paper's rule

def typical_slowly(tokens, parent, choice, p, epsilon, delta):
    """The rule written once more, one root-to-node path at a time: longest, then likeliest, then first."""
    def limit(row):
        entropy = -sum(q * math.log(q) for q in row if q > 0)
        return min(epsilon, delta * math.exp(-entropy))
    best, key = [0], (1, 0.0)
    for i in range(1, len(tokens)):
        path = ancestors(parent, i)
        if all(p[a][tokens[b]] > limit(p[a]) for a, b in zip(path, path[1:])):
            new = len(path), sum(math.log(p[a][tokens[b]]) for a, b in zip(path, path[1:]))
            if new > key:
                best, key = path, new
    return best, [tokens[i] for i in best[1:]] + [choice[best[-1]]]


def random_tree(rng, g, V=5, scale=1.5):
    N = rng.randint(1, 14)
    z = scale * torch.randn(N, V, generator=g, dtype=torch.float64)
    return [rng.randrange(V) for _ in range(N)], random_parents(rng, N), z


def test_typical_acceptance_is_the_papers_rule():
    """
    An entropy in bits, a >= or a maximum for the >  and the minimum,
    a node accepted without its parent, a shorter path.
    """
    rng, g, seen, lossy = random.Random(0), torch.Generator().manual_seed(0), set(), 0
    for case in range(400):
        tokens, parent, z = random_tree(rng, g)
        epsilon, delta = rng.choice([(0.09, 0.3), (0.25, 0.5), (0.01, 0.1), (0.5, 1.5), (1.0, 0.4)])
        rule = Typical(Sampler(rng.choice([0.5, 1.0])), epsilon, delta)
        p, choice = rule.probabilities(z), rule.greedy.choose(z, range(len(tokens)))
        assert choice == z.argmax(-1).tolist()  # the bonus token is greedy at any temperature
        path, out = rule(Tree(tokens, parent), choice, z)
        assert (path, out) == walk_typical(tokens, parent, choice, p, epsilon, delta)
        assert (path, out) == typical_slowly(tokens, parent, choice, p.tolist(), epsilon, delta)
        assert path[0] == 0 and all(parent[b] == a for a, b in zip(path, path[1:])) and len(out) == len(path)
        seen.add(len(path))
        lossy += out[:-1] != [choice[i] for i in path[:-1]]
    assert {1, 2, 3} <= seen and lossy > 50  # it does accept what the target would not have chosen


def test_typical_acceptance_by_the_numbers():
    """
    p = (.5, .3, .2): H = 1.0297, so delta = .3 puts the limit at .1071 and epsilon = .09 below it;
    strict at the limit.
    """
    p = torch.tensor([[0.5, 0.3, 0.2]] * 4, dtype=torch.float64)
    limit = 0.5**0.5 * 0.3**0.3 * 0.2**0.2                             # exp(-H)
    assert limit == pytest.approx(0.357131, abs=1e-6)

    def accepts(token, epsilon, delta):
        return walk_typical([9, token], [-1, 0], [0, 0, 0, 0], p, epsilon, delta)[0] == [0, 1]
    assert [accepts(v, 0.09, 0.3) for v in range(3)] == [True, True, True]         # the authors' defaults
    assert [accepts(v, 0.25, 0.5) for v in range(3)] == [True, True, True]         # limit .17856
    assert [accepts(v, 0.25, 1.0) for v in range(3)] == [True, True, False]  # .25: epsilon is the smaller
    assert [accepts(v, 1.0, 1.0) for v in range(3)] == [True, False, False]        # .357131: delta exp(-H) is
    assert [accepts(v, 1.0, 1.5) for v in range(3)] == [False, False, False]  # .5357: not even the likeliest
    assert [accepts(v, 0.3, 9.0) for v in range(3)] == [True, False, False]        # .3 > .3 is false
    even = torch.full((2, 4), 0.25).double()  # exp(-H) = 1/4: delta < 1 accepts all, 1 nothing
    assert walk_typical([9, 3], [-1, 0], [0, 0], even, 1.0, 0.99)[0] == [0, 1]
    assert walk_typical([9, 3], [-1, 0], [0, 0], even, 1.0, 1.01)[0] == [0]


def test_typical_takes_the_longest_path_and_of_equals_the_likeliest():
    """
    The first accepted leaf, the likeliest instead of the longest path,
    a path that goes on below a rejected node.
    """
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 6, dtype=torch.float64)  # limit .09: token 3 is rejected
    choice = [0] * 6
    go = lambda tokens, parent: walk_typical([9, *tokens], [-1, *parent], choice, p, 0.09, 9.0)
    assert go([0, 1, 2], [0, 0, 2]) == ([0, 2, 3], [1, 2, 0])          # .3 * .15 is longer than .5
    assert go([1, 0, 2], [0, 0, 0]) == ([0, 2], [0, 0])                # .5 beats .3 and .15
    assert go([1, 2, 0, 1], [0, 1, 0, 3]) == ([0, 3, 4], [0, 1, 0])    # .5 * .3 beats .3 * .15
    assert go([3, 0, 0, 2], [0, 1, 2, 0]) == ([0, 4], [2, 0])          # nothing counts below a rejected node
    assert go([3, 3], [0, 1]) == ([0], [0])                            # all rejected: the greedy token alone
    assert go([2, 2], [0, 0]) == ([0, 1], [2, 0])                      # repeated children: the first


def test_typical_at_temperature_zero_is_the_walk():
    """
    A limit that a certain token does not pass, or that another one does:
    at T = 0 nothing may differ from greedy.
    """
    rng, g, longest = random.Random(1), torch.Generator().manual_seed(1), 0
    for case in range(400):
        tokens, parent, z = random_tree(rng, g, V=3)
        siblings = list(zip(parent, tokens))
        if len(set(siblings)) < len(siblings):  # of repeated children either may be followed
            continue
        for epsilon, delta in ((0.09, 0.3), (0.0, 0.0), (1.0, 0.99), (0.999, 50.0)):
            sampler = Sampler(0.0, top_k=2, top_p=0.5)
            choice = sampler.choose(z, range(len(tokens)))
            p = Typical(sampler).probabilities(z)
            path, out = walk_typical(tokens, parent, choice, p, epsilon, delta)
            assert (path, out) == walk(tokens, parent, choice)
            longest = max(longest, len(path))
    assert longest > 3


def typically(target, prompt, n, drafter, sampler, epsilon, delta, eos=()):
    """A text with typical acceptance, and its Stats."""
    rule = Typical(sampler, epsilon, delta)
    return complete(target, prompt, n, drafter, rule.greedy, eos, rule)


class AnyTree:
    """Random trees, as bad as can be; as good as random at T = 0."""

    cache_rows = 16

    def __init__(self, V, seed=0):
        self.V, self.rng = V, random.Random(seed)

    def start(self, target, max_len):
        pass

    def observe(self, tokens, hidden, cache):
        pass

    def draft(self, root, sampler, limit=None):
        N = self.rng.randint(1, 16)
        return Tree([root] + [self.rng.randrange(self.V) for _ in range(N - 1)], random_parents(self.rng, N))


@pytest.mark.parametrize("epsilon, delta", [(0.09, 0.3), (0.0, 0.0), (1.0, 1.0), (1.0, 50.0)])
def test_typical_texts_at_temperature_zero_are_greedy(epsilon, delta):
    """The whole loop: cache rows of another path than the emitted one, a first token that is no argmax."""
    target = tiny(vocab_size=5)
    for seed in range(3):
        prompt = [1 + seed % 4, 2, 3]
        text, stats = typically(target, prompt, 30, AnyTree(5, seed), Sampler(0.0), epsilon, delta)
        assert text == complete(target, prompt, 30)[0] and sum(stats.accepted) == 30
        assert stats.tau > 1 or delta >= 1


def test_the_first_token_of_a_typical_step_is_greedy_and_unconditional():
    """
    A bonus or first token that is sampled, or that must pass the limit:
    at limit 1 nothing does, and the text is greedy.
    """
    target = tiny(vocab_size=5)
    text, stats = typically(target, [1, 2], 20, AnyTree(5), Sampler(1.0, seed=3), 1.0, 50.0)
    assert stats.tau == 1 and text == complete(target, [1, 2], 20)[0]
    text, stats = typically(target, [1, 2], 30, AnyTree(5), Sampler(1.0), 0.25, 0.5)
    best = target(torch.tensor([[1, 2] + text]))[0][0].argmax(-1).tolist()
    ends = np.cumsum(stats.accepted)
    # every step's last token is greedy
    assert stats.tau > 1.3 and all(text[n - 1] == best[1 + n - 1] for n in ends)
    assert any(a != b for a, b in zip(text, best[1:]))                 # others are not


def test_typical_text_is_lossy_and_knows_no_seed():
    """
    Named lossy for a reason: children that hold token 1 only.
    Exact text has it 3 times of 10, typical text always.
    """
    z = torch.from_numpy(np.log([[0.5, 0.3, 0.2]] * 2))
    first = []
    for seed in range(50):
        rule = Typical(Sampler(1.0, seed=seed))
        s = rule.greedy
        first.append(rule(Tree([0, 1], [-1, 0]), s.choose(z, [4, 5]), z)[1])
        assert torch.equal(s.rank(z, [4, 5]), z.float())               # no noise for the drafter either
    assert first == [[1, 0]] * 50
    target = tiny(vocab_size=5)
    texts = set()
    for seed in range(4):
        sampler = Sampler(1.0, seed=seed)
        texts.add(tuple(typically(target, [1, 2], 30, AnyTree(5), sampler, 0.09, 0.3)[0]))
    assert len(texts) == 1 and texts != {tuple(complete(target, [1, 2], 30)[0])}
    assert inspect.signature(generate).parameters["accept"].default is None        # never the default


def test_typical_stops_at_the_end_of_text():
    """EOS inside an accepted typical run: tokens after it are kept or counted."""
    target = tiny(vocab_size=5)
    whole, _ = typically(target, [1, 2], 30, AnyTree(5), Sampler(1.0), 0.01, 0.1)
    for eos in set(whole):
        text, stats = typically(target, [1, 2], 30, AnyTree(5), Sampler(1.0), 0.01, 0.1, {eos})
        assert text == whole[:whole.index(eos) + 1]
        assert sum(stats.accepted) == len(text) and stats.stop == "eos"


def test_bad_limits_are_refused():
    """An epsilon or a NaN that accepts everything without a word."""
    for wrong, name in (((-0.1, 0.3), "epsilon"), ((1.1, 0.3), "epsilon"), ((0.1, -1), "delta"),
                        ((0.1, math.nan), "delta")):
        with pytest.raises(ValueError, match=name):
            Typical(Sampler(1.0), *wrong)


def test_probabilities():
    """
    What the limit is applied to:
    raw instead of processed probabilities, overflow at a tiny temperature.
    """
    z = some_logits(20)
    for o in (dict(temperature=1.0), dict(temperature=0.6, top_k=5), dict(temperature=1.3, top_p=0.8)):
        for row, p in zip(z, Typical(Sampler(**o)).probabilities(z)):
            assert np.allclose(p, processed(row.numpy(), **o))
    assert torch.equal(Typical(Sampler()).probabilities(z), Typical(Sampler(1e-300)).probabilities(z))
    assert Typical(Sampler()).probabilities(z).argmax(-1).tolist() == z.argmax(-1).tolist()
    assert Typical(Sampler(1e-4)).probabilities(z.half()).isfinite().all()
