"""bench/self_speculative.py: drafts, threshold and search against one token at a time by hand."""
import math

import pytest
import torch

import self_speculative
from conftest import read, tiny
from model import rotate
from test_moa import Run, attention, layers, make_target, random_text
from tree import Sampler, complete


def skipping(target, skip, text, path):
    """
    Logits after the drafted tokens path (root first): the text's keys are the full target's, nothing
    cached.
    """
    H, G, D = target.blocks[0].attn.heads
    _, k, v = layers(target, torch.tensor([text]))
    k, v = [x[0] for x in k], [x[0] for x in v]                        # (G, S, D) of every layer
    for at, token in enumerate(path, len(text)):
        pos = torch.tensor([at])
        x = target.embed(torch.tensor([[token]]), pos)[0]              # (1, C)
        for i, block in enumerate(target.blocks):
            if not skip[0][i]:
                qkv = block.attn.qkv(block.norm1(x)).view(H + 2 * G, 1, D)
                qk = qkv[:H + G]
                if target.rope(pos) is not None:
                    qk = rotate(qk[None], *target.rope(pos))[0]
                k[i], v[i] = torch.cat((k[i], qk[H:]), 1), torch.cat((v[i], qkv[H + G:]), 1)
                x = x + block.attn.out(attention(qk[:H, 0], k[i], v[i]))[None]
            if not skip[1][i]:
                x = x + block.mlp(block.norm2(x))
    return read(target, x)[0]


def skips(target, seed=0, **options):
    net = self_speculative.Net(self_speculative.Config(**options), target)
    net.skip.copy_(torch.rand(2, target.cfg.n_layer, generator=torch.Generator().manual_seed(seed)) < 0.5)
    return net


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_self_speculative_predictions(style):
    """Keys of skipped sub-layers that are read, layers skipped in the text, drafts of another anchor."""
    target = make_target(style)
    for seed in range(3):
        net, x = skips(target, seed, depth=3), random_text(target, 2, 7)
        assert 0 < net.skip.sum() < net.skip.numel()
        for k, (logits, truth, real) in enumerate(self_speculative.predictions(net, target, x), 1):
            anchors = [(b, t) for b in range(2) for t in range(7 - k - 1)]
            assert truth.tolist() == [x[b, t + 1 + k].item() for b, t in anchors]
            torch.testing.assert_close(real, torch.stack([target(x)[0][b, t + k] for b, t in anchors]))
            for row, (b, t) in zip(logits, anchors):
                text, path = x[b, :t + 1].tolist(), x[b, t + 1:t + 1 + k].tolist()
                torch.testing.assert_close(row, skipping(target, net.skip.tolist(), text, path))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_self_speculative_cached_drafts(style):
    """
    A draft from rows that are not the full target's, a cache not cut back before verification, a wrong
    threshold.
    """
    target, sampler = make_target(style), Sampler(0.7, seed=3)

    class Watching(self_speculative.Drafter):
        def draft(self, root, sampler, limit=None):
            n = self.cache.length
            tree = super().draft(root, sampler, limit)
            assert self.cache.length == n == len(text), "the cache was not cut back"
            for i, token in enumerate(tree.tokens[1:], 1):
                scores = sampler.rank(skipping(target, self.skip, text, tree.tokens[:i])[None], [n + i])[0]
                value = tree.value[i - 1] * scores.softmax(0).max()
                assert token == scores.argmax() and math.isclose(tree.value[i], value, rel_tol=1e-6)
                unsure = scores.softmax(0).max() < self.gamma
                assert unsure <= (i == len(tree) - 1)                  # an unsure token is the last
            assert len(tree) - 1 in (self.depth, self.max_len - n - 2) or unsure
            lengths.append(len(tree))
            return tree

        def observe(self, tokens, hidden, cache):
            text.extend(tokens)
            super().observe(tokens, hidden, cache)

    for seed in range(3):
        text, lengths = [], []
        drafter = Watching(skips(target, seed, depth=4), target)
        drafter.net.gamma.fill_(0.5)
        plain, _ = complete(target, [1, 2, 3], 30, sampler=sampler)
        assert complete(target, [1, 2, 3], 30, drafter, sampler)[0] == plain
        assert len(lengths) > 3
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_self_speculative_without_skips(temperature):
    """
    The target drafting for itself: a draft one position off, or noise of the wrong row, costs
    acceptance.
    """
    target = make_target()
    net = self_speculative.Net(self_speculative.Config(depth=4), target)
    net.gamma.fill_(0.0)
    drafter = self_speculative.Drafter(net, target)
    text, stats = complete(target, [5, 6], 31, drafter, Sampler(temperature, seed=1))
    assert stats.accepted == [1] + [5] * 6


def test_threshold_by_hand():
    """The update of gamma: its sign, its memory, and what counts as drafted."""
    target = make_target()
    net = self_speculative.Net(self_speculative.Config(depth=4, alpha=0.6, eps=0.1), target)
    drafter = self_speculative.Drafter(net, target)
    drafter.start(target, 40)
    rate, gamma, seen = 0.0, 0.8, set()
    for drafted, accepted in ((0, 0), (4, 4), (2, 0), (4, 4), (3, 3), (4, 4), (1, 1), (0, 0), (4, 1)):
        drafter.drafted = drafted
        drafter.observe([0] * (1 + accepted), None, None)
        if drafted:
            rate = 0.5 * rate + 0.5 * accepted / drafted
            new = gamma + 0.1 if rate < 0.6 else gamma if drafted == 4 else gamma - 0.1
            gamma = 0.9 * gamma + 0.1 * new
        assert math.isclose(drafter.gamma, gamma, rel_tol=1e-6) and math.isclose(drafter.rate, rate)
        seen.add(round(gamma, 6))
    assert seen == {0.8, 0.81, 0.82}


def test_search_time_by_hand():
    """
    The search's objective, anchor by anchor: a verification and a draft pass for each token, over what
    they bring.
    """
    target = make_target()
    net, x, K, T = skips(target, 1, depth=3), random_text(target, 2, 12), 3, 12
    own, c = target(x)[0], self_speculative.cost(target, net.skip)
    assert 0 < c < 1 and self_speculative.cost(target, torch.zeros(2, 3, dtype=torch.bool)) == 1
    times = []
    for gamma in [g / 10 for g in range(10)]:
        drafted, accepted = [], []
        for b in range(2):
            for t in range(T - K - 1):
                n, a, ok = 0, 0, True
                for k in range(1, K + 1):
                    text, path = x[b, :t + 1].tolist(), x[b, t + 1:t + 1 + k].tolist()
                    q = skipping(target, net.skip.tolist(), text, path).softmax(0)
                    n, ok = n + 1, ok and (q.argmax() == own[b, t + k].argmax()).item()
                    a += ok
                    if q.max() < gamma:
                        break
                drafted.append(n)
                accepted.append(a)
        times.append((1 + c * sum(drafted) / len(drafted)) / (1 + sum(accepted) / len(accepted)))
    time, top1, gamma = self_speculative.loss(net, target, x)
    assert math.isclose(time.item(), min(times), rel_tol=1e-5) and gamma == times.index(min(times)) / 10
    assert top1.shape == (3,)


def test_search_finds_idle_layers():
    """A search that tries nothing or keeps the worse set: an idle layer is the least that it must find."""
    target = tiny(n_layer=3, n_embd=32, scale=30)                      # whose other layers matter
    for p in (target.blocks[1].attn.out.weight, target.blocks[1].mlp.down.weight):
        p.data.zero_()
    torch.manual_seed(0)
    run = Run(random_text(target, 2, 24), 60)
    net = self_speculative.train(self_speculative.Config(depth=3), target, run)
    assert net.skip[:, 1].all() and net.skip.sum() < 6 and run.seen[-1] < run.seen[0]
    assert all(b <= a for a, b in zip(run.seen, run.seen[1:]))
    best, _, _ = self_speculative.loss(net, target, run.x)
    assert math.isclose(best.item(), run.seen[-1], rel_tol=1e-5)
