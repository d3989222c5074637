"""bench/: the rivals are as lossless as the methods and compute what their papers say; the runner counts, compares and resumes."""
import json
import math
import os
import random
import shutil
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bench"))
import eagle2
import figure
import prompt_lookup
import report
import run as bench
import self_speculative
import train
from conftest import Watching, tiny
from model import rotate
from plumbing.drafters import setup
from plumbing.checkpoint import save
from plumbing.text import Tokenizer
from test_lossless import SAMPLING, SHAPES, Artificial, Guided, any_tree, at_the_ends, check, every_tree, lively, reference
from test_moa import Run, attention, layer, layers, make_target, paths, random_text
from tree import Sampler, Tree, cartesian, chain, complete, generate

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CHAINS = {"self_speculative", "prompt_lookup"}


def rival(name, target, shape=None, nodes=16, seed=0):
    """An untrained rival, as it starts (seed 0) or with weights and skip set random. One that drafts chains gets a chain."""
    torch.manual_seed(seed)
    module = bench.RIVALS[name]
    net = module.Net(module.Config(), target).to(target.wte.weight.dtype)
    for p in net.parameters() if seed else ():
        p.data.add_(0.2 * torch.randn_like(p))
    if name == "self_speculative" and seed:
        net.skip.copy_(torch.rand(2, target.cfg.n_layer) < 0.4)
        net.gamma.fill_(0.3)
    if shape and name in CHAINS:
        shape = chain(max(Tree(shape.parent, shape.parent).depth))
    return module.Drafter(net, target, shape=shape, nodes=nodes)


# ---------------------------------------------------------------------------------------------------------------------
# Exactness, as in test_lossless.py

@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", bench.RIVALS)
def test_rivals_are_lossless(name, sampling):
    """A rival that changes the text in any way: any tree, both families, as it starts and with random weights."""
    every_tree(sampling, lambda target, shape, nodes, seed: rival(name, target, shape, nodes, seed))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("name", bench.RIVALS)
def test_rivals_at_the_ends(name, style):
    """Prompts of one token and up to the end of the context, every small budget: an index out of range, one token too many."""
    at_the_ends(style, lambda target, shape, nodes: rival(name, target, shape, nodes, seed=1))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("name", bench.RIVALS)
def test_rivals_in_a_long_run(name, style):
    """A fault that takes many steps to show; single precision; the end of the context; an end token inside an accepted run."""
    for sampling in (SAMPLING["greedy"], SAMPLING["T = 1"]):
        for dtype in (torch.float64, torch.float32)[sampling != {}:]:
            target, truth = lively([5, 6], 68, sampling, style=style, block_size=70, dtype=dtype)
            drafter = rival(name, target, seed=1)
            assert check(target, [5, 6], 500, drafter, sampling, truth=truth).stop == "context"
            for at in (9, 45)[dtype == torch.float32:]:
                guided = Guided(drafter, Artificial([5, 6] + truth, 23, seed=at))
                check(target, [5, 6], 500, guided, sampling, eos={truth[at]}, truth=truth)


@pytest.mark.parametrize("name", bench.RIVALS)
def test_rivals_with_a_vocabulary_of_two(name):
    """More guesses than there are tokens."""
    target = tiny(vocab_size=2, seed=1)
    for shape, nodes in SHAPES.values():
        check(target, [1, 0], 20, rival(name, target, shape, nodes, seed=1), SAMPLING["T = 1"])


@pytest.mark.parametrize("name", bench.RIVALS)
def test_a_used_rival_is_as_good_as_a_new_one(name):
    """State of an earlier text, finished, stopped at its end token or abandoned: other drafts, or a crash."""
    target, sampling = tiny(seed=2), SAMPLING["T = 1"]
    used, new = (rival(name, target, seed=1) for _ in range(2))
    check(target, [9] * 20, 40, used, sampling)
    first, _ = reference(target, [3, 3], 9, sampling)
    check(target, [3, 3], 9, used, sampling, eos=first[4:5])
    next(generate(target, [7, 8], 9, used, Sampler()))                 # the caller goes away after the prompt
    a = check(target, [1, 2, 3], 25, used, sampling)
    b = check(target, [1, 2, 3], 25, new, sampling)
    assert a.accepted == b.accepted and a.nodes == b.nodes


def drafts_are_of_the_text(name, sampling):
    prompt, new, sampling = [3, 1, 4], 24, SAMPLING[sampling]
    for style in ("llama", "gpt2"):
        target, truth = lively(prompt, new, sampling, style=style, n_layer=4)
        make = lambda: rival(name, target, chain(4) if name in CHAINS else None, 10, seed=1)        # its threshold has a history
        guided = Guided(make(), Artificial(prompt + truth, 23, seed=2))
        stats = check(target, prompt, new, guided, sampling, truth=truth)
        assert max(stats.accepted) >= 4 and len(guided.drafts) > 4
        for n, draft in guided.drafts.items():
            seen = len(truth) - (n - len(prompt))                      # a new drafter, given the same text as a prompt
            fresh = Guided(make(), Artificial(prompt + truth, 23))
            run = generate(target, (prompt + truth)[:n], seen, fresh, Sampler(**sampling))
            next(run), next(run)
            assert (draft.tokens, draft.parent) == (fresh.drafts[n].tokens, fresh.drafts[n].parent), f"another draft at {n}"


@pytest.mark.parametrize("sampling", ["greedy", "T = 1"])
@pytest.mark.parametrize("name", bench.RIVALS)
def test_drafts_of_rivals_do_not_depend_on_how_the_text_came_about(name, sampling):
    """Rows of a cache that come from rejected drafts, doubled, or left out after a long accepted run."""
    drafts_are_of_the_text(name, sampling)


@pytest.mark.parametrize("name", ["eagle2", "prompt_lookup"])
def test_a_planted_state_of_a_rival_is_caught(name, monkeypatch):
    """The test above must see a rival that misses some of what became text."""
    Drafter = bench.RIVALS[name].Drafter
    observe = Drafter.observe
    monkeypatch.setattr(Drafter, "observe", lambda self, tokens, hidden, cache: observe(self, tokens[::-1], hidden.flip(0), cache))
    with pytest.raises(AssertionError, match="another draft"):
        for sampling in ("greedy", "T = 1"):
            drafts_are_of_the_text(name, sampling)


def random_case(seed):
    """One run of a rival with everything drawn from seed."""
    rng = random.Random(seed)
    style, H, V, block = rng.choice(["llama", "gpt2"]), rng.choice([2, 4]), rng.choice([2, 3, 23, 60]), rng.randint(6, 40)
    target = tiny(style, seed, scale=rng.choice([6, 20]), n_layer=rng.randint(1, 4), n_head=H, vocab_size=V, block_size=block,
                  n_kv_head=H if style == "gpt2" else rng.choice([1, H]), tied=rng.random() < 0.5, head_dim=rng.choice([0, 6]))
    sampling = rng.choice([{}, dict(temperature=rng.choice([0.3, 1.0, 2.0]), top_k=rng.choice([0, 1, 3]), seed=rng.randrange(2**62),
                                    top_p=rng.choice([1.0, 0.5, 0.0]), share=rng.random() < 0.8)])
    prompt = [rng.randrange(V) for _ in range(rng.choice([1, 2, rng.randint(1, block - 1)]))]
    truth, _ = reference(target, prompt, block, sampling)
    eos = set(rng.sample(truth, min(len(truth), rng.choice([0, 0, 1]))))
    shape = rng.choice([None, None, chain(rng.randint(0, 5)), cartesian(2, 3), any_tree(rng)])
    drafter = rival(rng.choice(list(bench.RIVALS)), target, shape, rng.randint(1, 20), seed % 3)
    if rng.random() < 0.6:
        drafter = Guided(drafter, Artificial(prompt + truth + [0] * 8, V, seed, rng.randint(1, 6)))
    check(target, prompt, rng.choice([1, 3, 45]), drafter, sampling, eos, truth)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 6000), marks=pytest.mark.long)], ids=["few", "many"])
def test_random_cases(seeds):
    """Whatever the tests above did not think of. random_case(seed) repeats a failure."""
    for seed in seeds:
        try:
            random_case(seed)
        except Exception as e:
            raise AssertionError(f"random_case({seed}) fails: {type(e).__name__}: {e}") from e


@pytest.mark.parametrize("name", CHAINS)
def test_chains_refuse_trees(name):
    """A tree option that is silently ignored."""
    target = tiny()
    module = bench.RIVALS[name]
    with pytest.raises(ValueError, match="--tree must be best or chain"):
        module.Drafter(module.Net(module.Config(), target), target, cartesian(2, 2))


# ---------------------------------------------------------------------------------------------------------------------
# EAGLE-2

def eagle(target, seed=1, **options):
    """All parameters random, so that no part hides behind a zero."""
    torch.manual_seed(seed)
    net = eagle2.Net(eagle2.Config(**options), target).to(target.wte.weight.dtype).eval()
    net.theta = target.cfg.rope_theta                                  # for test_moa's layer
    for p in net.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    return net


def features(net, target, text, path, true=None):
    """The guessed features after the drafted tokens path (root first) behind the verified text, row by row, nothing cached."""
    h = target.hidden(torch.tensor([text]))[0] if true is None else true
    rows = [net.fc(torch.cat((target.wte.weight[token], f))) for token, f in zip((text + path)[1:], h)]
    out = []
    for token in [None] + path[1:]:
        if token is not None:
            rows.append(net.fc(torch.cat((target.wte.weight[token], out[-1]))))
        sees = [range(i + 1) for i in range(len(rows))]
        out.append(layer(net, net.layer, torch.stack(rows), sees)[-1])
    return out


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_eagle_guesses(style):
    """A true feature where only a guess is known, a shifted token, the row of another anchor, a wrong position."""
    target = make_target(style)
    net, x = eagle(target, depth=3), random_text(target, 2, 7)
    own, seen = target(x)[0], []
    for k, (logits, truth, real) in enumerate(eagle2.guesses(net, target, x), 1):
        anchors = [(b, t) for b in range(2) for t in range(7 - k - 1)]
        assert truth.tolist() == [x[b, t + 1 + k].item() for b, t in anchors]
        torch.testing.assert_close(real, torch.stack([own[b, t + k] for b, t in anchors]))
        for row, (b, t) in zip(logits, anchors):
            last = features(net, target, x[b, :t + 1].tolist(), x[b, t + 1:t + 1 + k].tolist())[-1]
            torch.testing.assert_close(row, target.lm_head(last))
        seen.append(len(truth))
    assert seen == [10, 8, 6]
    assert [len(truth) for _, truth, _ in eagle2.guesses(eagle(target, depth=5), target, random_text(target, 2, 4))] == [4, 2, 0, 0, 0]


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_eagle_loss_by_hand(style):
    """The parallel training pass against one position at a time: weights, shifts, means, which positions count."""
    target = make_target(style)
    net, x = eagle(target, ce=0.3, feature=0.7), random_text(target, 2, 9)
    near, ce, right = [], [], []
    for b in range(2):
        h = target.hidden(x[b:b + 1])[0]
        for t in range(8):
            guess = features(net, target, x[b, :t + 1].tolist(), [x[b, t + 1].item()])[0]
            near.append(F.smooth_l1_loss(guess, h[t + 1]))
            ce.append(-(target.lm_head(h[t + 1]).softmax(0) * target.lm_head(guess).log_softmax(0)).sum())
            if t < 7:
                right.append((target.lm_head(guess).argmax() == x[b, t + 2]).item())
    total, top1 = eagle2.loss(net, target, x)
    torch.testing.assert_close(total, 0.7 * sum(near) / 16 + 0.3 * sum(ce) / 16)
    assert math.isclose(top1.item(), sum(right) / 14, rel_tol=1e-6)


def test_eagle_noise_and_gradients():
    """Noise on the targets, none or too much on the inputs, noise in evaluation; a gradient in the target, a dead parameter."""
    target = make_target()
    net, x, seen = eagle(target, noise=0.02), random_text(target, 4, 24), []
    h = target.hidden(x)
    net.fc.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().clone()))
    calm = eagle2.loss(net, target, x)[0]
    torch.testing.assert_close(seen[0], torch.cat((target.wte(x[:, 1:]), h[:, :-1]), -1))
    net.train()
    total, _ = eagle2.loss(net, target, x)
    off = (seen[1] - seen[0])[..., 16:]
    size = 0.02 * 512 / 24 * h[:, :-1].square().mean().sqrt()
    assert torch.equal(seen[1][..., :16], seen[0][..., :16]) and total != calm
    assert 0.95 * size < off.abs().max() <= size and off.mean().abs() < 0.05 * size
    total.backward()
    assert all(p.grad is None for p in target.parameters())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters())
    assert set(net.state_dict()) == {name for name, _ in net.named_parameters()}
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in target.parameters()}


def test_eagle_learns():
    """A training loop that does not step, a detached loss; a target that moves."""
    target = make_target().float()
    torch.manual_seed(0)
    run, before = Run(random_text(target, 8, 24), 60), {k: v.clone() for k, v in target.state_dict().items()}
    run.steps = lambda net, optimisers, evaluate: iter([setattr(run, "net", net.train()) or run.x] * run.n)
    eagle2.train(eagle2.Config(lr=1e-2, ce=0.01, noise=0.0), target, run)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())
    assert sum(run.seen[-5:]) / 5 < 0.5 * run.seen[0], (run.seen[0], run.seen[-5:])


class Watch(Watching, eagle2.Drafter):
    pass


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_eagle_cached_drafts(style):
    """Stale or missing rows after 0, 1, .. 4 accepted tokens, a wrong position or mask, a feature of the wrong parent."""
    target = make_target(style)
    net, prompt, sampler = eagle(target), [1, 2, 3], Sampler(0.7, seed=3)
    plain, _ = complete(target, prompt, 17, sampler=sampler)
    for shape in (None, cartesian(2, 2, 1)):
        drafter = Watch(net, target, shape, nodes=9, breadth=3)
        drafter.force = plain, len(prompt)
        text, stats = complete(target, prompt, 17, drafter, sampler)
        assert text == plain and set(stats.accepted[1:-1]) == {1, 2, 3, 4, 5}
        with torch.no_grad():
            for text, tree in drafter.seen:
                true, path = target.hidden(torch.tensor([text]))[0], paths(tree)
                for i in range(1, len(tree)):
                    up = path[tree.parent[i]]
                    last = features(net, target, text, up, true)[-1]
                    q = sampler.rank(target.lm_head(last)[None], [len(text) + len(up)])[0].softmax(0)
                    assert math.isclose(tree.value[i], tree.value[tree.parent[i]] * q[tree.tokens[i]], rel_tol=1e-6, abs_tol=1e-12)
        assert drafter.cache.length <= len(drafter.text)


@pytest.mark.parametrize("depth, breadth, nodes", [(3, 3, 8), (3, 2, 50), (2, 40, 12), (1, 3, 16)])
def test_eagle_dynamic_tree(depth, breadth, nodes):
    """Re-ranking that loses one of the best nodes, a level cut before it is ranked, children before parents, a node too many."""
    target, sampler = make_target(), Sampler(0.8, seed=2)
    net = eagle(target)
    drafter = Watch(net, target, nodes=nodes, depth=depth, breadth=breadth)
    complete(target, [1, 2, 3], 9, drafter, sampler)
    with torch.no_grad():
        for text, tree in drafter.seen[:2]:
            true, pool, level = target.hidden(torch.tensor([text]))[0], [], [((tree.tokens[0],), 1.0)]
            for d in range(1, min(depth, 3 + 9 - len(text) - 2) + 1):
                new = []
                for path, value in level:
                    q = sampler.rank(target.lm_head(features(net, target, text, list(path), true)[-1])[None], [len(text) + d])[0].softmax(0)
                    new += [((*path, i), value * q[i].item()) for i in q.topk(min(breadth, 23)).indices.tolist() if value * q[i] > 0]
                pool += new
                level = sorted(new, key=lambda node: -node[1])[:breadth]
            expect = dict([((tree.tokens[0],), 1.0)] + sorted(pool, key=lambda node: -node[1])[:nodes - 1])
            got = {tuple(path): v for path, v in zip(paths(tree), tree.value)}
            assert got.keys() == expect.keys() and len(got) == len(tree) <= nodes
            assert all(math.isclose(got[path], expect[path], rel_tol=1e-6) for path in got)
            assert all(up < i for i, up in enumerate(tree.parent))


@torch.no_grad()
def test_eagle_draft_twice():
    """A draft that leaves rows behind: asked again, with another root in between, it must answer the same."""
    target = make_target()
    drafter, cache, answers = eagle2.Drafter(eagle(target), target), target.new_cache(40), []
    drafter.start(target, 40)
    hidden = target.hidden(torch.tensor([[1, 2, 3]]), cache=cache)
    cache.keep(range(3))
    drafter.observe([1, 2, 3], hidden[0], cache)
    for root in (5, 9, 5):
        tree = drafter.draft(root, Sampler())
        answers.append((tree.tokens, tree.parent, [round(v, 9) for v in tree.value]))
    assert answers[0] == answers[2] != answers[1] and cache.length == 3


# ---------------------------------------------------------------------------------------------------------------------
# Self-speculative decoding

def skipping(target, skip, text, path):
    """Logits after the drafted tokens path (root first): the text's keys and values are the full target's, nothing cached."""
    H, G, D = target.blocks[0].attn.heads
    _, k, v = layers(target, torch.tensor([text]))
    k, v = [x[0] for x in k], [x[0] for x in v]                        # (G, S, D) of every layer
    for at, token in enumerate(path, len(text)):
        pos = torch.tensor([at])
        x = target.embed(torch.tensor([[token]]), pos)[0]              # (1, C)
        for i, block in enumerate(target.blocks):
            if not skip[0][i]:
                qkv = block.attn.qkv(block.norm1(x)).view(H + 2 * G, 1, D)
                qk = qkv[:H + G] if target.rope(pos) is None else rotate(qkv[None, :H + G], *target.rope(pos))[0]
                k[i], v[i] = torch.cat((k[i], qk[H:]), 1), torch.cat((v[i], qkv[H + G:]), 1)
                x = x + block.attn.out(attention(qk[:H, 0], k[i], v[i]))[None]
            if not skip[1][i]:
                x = x + block.mlp(block.norm2(x))
    return target.head(x)[0]


def skips(target, seed=0, **options):
    net = self_speculative.Net(self_speculative.Config(**options), target)
    net.skip.copy_(torch.rand(2, target.cfg.n_layer, generator=torch.Generator().manual_seed(seed)) < 0.5)
    return net


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_self_speculative_guesses(style):
    """Keys of skipped sub-layers that are read, layers skipped in the text, drafts of another anchor."""
    target = make_target(style)
    for seed in range(3):
        net, x = skips(target, seed, depth=3), random_text(target, 2, 7)
        assert 0 < net.skip.sum() < net.skip.numel()
        for k, (logits, truth, real) in enumerate(self_speculative.guesses(net, target, x), 1):
            anchors = [(b, t) for b in range(2) for t in range(7 - k - 1)]
            assert truth.tolist() == [x[b, t + 1 + k].item() for b, t in anchors]
            torch.testing.assert_close(real, torch.stack([target(x)[0][b, t + k] for b, t in anchors]))
            for row, (b, t) in zip(logits, anchors):
                torch.testing.assert_close(row, skipping(target, net.skip.tolist(), x[b, :t + 1].tolist(), x[b, t + 1:t + 1 + k].tolist()))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_self_speculative_cached_drafts(style):
    """A draft from rows that are not the full target's, a cache not cut back before the verification, a wrong threshold."""
    target, sampler = make_target(style), Sampler(0.7, seed=3)

    class Watching(self_speculative.Drafter):
        def draft(self, root, sampler):
            n = self.cache.length
            tree = super().draft(root, sampler)
            assert self.cache.length == n == len(text), "the cache was not cut back"
            for i, token in enumerate(tree.tokens[1:], 1):
                scores = sampler.rank(skipping(target, self.skip, text, tree.tokens[:i])[None], [n + i])[0]
                assert token == scores.argmax() and math.isclose(tree.value[i], tree.value[i - 1] * scores.softmax(0).max(), rel_tol=1e-6)
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
        assert complete(target, [1, 2, 3], 30, drafter, sampler)[0] == complete(target, [1, 2, 3], 30, sampler=sampler)[0]
        assert len(lengths) > 3
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_self_speculative_without_skips(temperature):
    """The target drafting for itself: a draft one position off, or noise of the wrong row, costs acceptance."""
    target = make_target()
    net = self_speculative.Net(self_speculative.Config(depth=4), target)
    net.gamma.fill_(0.0)
    text, stats = complete(target, [5, 6], 31, self_speculative.Drafter(net, target), Sampler(temperature, seed=1))
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
    """The search's objective, anchor by anchor: one verification and a draft pass for each drafted token, over what they bring."""
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
                    q = skipping(target, net.skip.tolist(), x[b, :t + 1].tolist(), x[b, t + 1:t + 1 + k].tolist()).softmax(0)
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
    """A search that tries nothing or keeps the worse set: of a target with an idle layer it must skip that one at least."""
    target = tiny(n_layer=3, n_embd=32, scale=30)                      # whose other layers matter
    for p in (target.blocks[1].attn.out.weight, target.blocks[1].mlp.down.weight):
        p.data.zero_()
    torch.manual_seed(0)
    run = Run(random_text(target, 2, 24), 60)
    net = self_speculative.train(self_speculative.Config(depth=3), target, run)
    assert net.skip[:, 1].all() and net.skip.sum() < 6 and run.seen[-1] < run.seen[0]
    assert all(b <= a for a, b in zip(run.seen, run.seen[1:]))
    torch.testing.assert_close(self_speculative.loss(net, target, run.x)[0], run.seen[-1])


# ---------------------------------------------------------------------------------------------------------------------
# Prompt lookup

def test_prompt_lookup_is_a_scan():
    """An index that finds another place than a scan of the text does, or the tail itself."""
    target, rng = tiny(), random.Random(0)
    for case in range(200):
        text, root = [rng.randrange(4) for _ in range(rng.randint(1, 30))], rng.randrange(4)
        net = prompt_lookup.Net(prompt_lookup.Config(depth=5, ngram=rng.randint(1, 4)), target)
        drafter = prompt_lookup.Drafter(net, target)
        drafter.start(target, max_len := len(text) + rng.randint(1, 12))
        cut = rng.randint(0, len(text))
        drafter.observe(text[:cut], None, None)
        drafter.observe(text[cut:], None, None)
        expect, full, depth = [], text + [root], min(5, max_len - len(text) - 2)
        for n in range(min(net.cfg.ngram, len(full)), 0, -1):
            at = next((i for i in range(len(full) - n) if full[i:i + n] == full[-n:]), None)
            if at is not None:
                expect = full[at + n:at + n + max(0, depth)]
                break
        tree = drafter.draft(root, Sampler())
        assert tree.tokens == [root] + expect and tree.parent == list(range(-1, len(expect)))


# ---------------------------------------------------------------------------------------------------------------------
# The runner

@pytest.fixture
def no_charts(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)               # they take seconds


SMALL = ["--device", "cpu", "--prompts", "3", "--prompt-tokens", "8", "--new-tokens", "16", "--nodes", "8"]


def run_bench(capsys, *argv):
    """-> what was printed, and its last line as JSON."""
    bench.main([str(a) for a in argv])
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as e:
        bench.main([str(a) for a in argv])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture(scope="module")
def contest(trained, text_file, tmp_path_factory):
    """The trained folder with the rivals trained too, by the runner itself: everything for a fraction of a second each."""
    out = str(tmp_path_factory.mktemp("contest") / "out")
    shutil.copytree(trained, out)
    bench.main(["--out", out, "--data", text_file, *SMALL, "--temperatures", "0", "--train-minutes", "0.005",
                "--methods", "medusa,eagle2,self_speculative,prompt_lookup"])
    return out


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [("writing", ["the cat sees", "and the dog"]), ("writing", ["a big house"]), ("qa", ["the small tree likes"])]
    path.write_text("".join(json.dumps(dict(question_id=81 + i, category=c, turns=t)) + "\n" for i, (c, t) in enumerate(rows)) + "\n")
    return str(path)


def test_own_questions():
    """A question file that cannot be read, with a category or an id twice, or cut off."""
    rows = bench.read_questions(os.path.join(ROOT, "bench", "questions.jsonl"), 0)
    count = {}
    for r in rows:
        count[r["category"]] = count.get(r["category"], 0) + 1
    assert 36 <= len(rows) <= 48 and len({r["question"] for r in rows}) == len(rows) == len({r["turns"][0] for r in rows})
    assert set(count) == {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
                          "translation", "summarization", "qa", "rag"} and set(count.values()) == {3}


def test_training_budget(contest, text_file, capsys):
    """Checkpoints in the wrong place, a budget that is not kept, figures of training that are not those of the checkpoint."""
    out, result = run_bench(capsys, "--out", contest, "--data", text_file, *SMALL, "--temperatures", "0", "--methods", "medusa,eagle2,self_speculative")
    for name in ("medusa", "eagle2", "self_speculative"):
        meta = json.load(open(os.path.join(contest, name, "model.json")))
        assert meta["kind"] == name and meta["finished"] and 0.3 <= meta["metrics"]["seconds"] < 60
        assert meta["metrics"]["tokens"] == meta["metrics"]["step"] * meta["config"]["batch_size"] * 64
        assert result["trained"][name]["training_tokens"] == (meta["metrics"]["tokens"] if meta["parameters"] else None)
        assert result["trained"][name]["parameters"] == meta["parameters"]
    assert result["trained"]["self_speculative"]["parameters"] == 0 < result["trained"]["eagle2"]["parameters"]
    assert out.count("yes\n") == 4


@pytest.mark.parametrize("form", ["text", "chat"])
def test_questions_and_turns(form, contest, questions, capsys, monkeypatch, tmp_path, no_charts):
    """Rows that are missing, categories mixed up, a second turn without the first answer, other prompts for other methods."""
    asked = []
    if form == "chat":
        monkeypatch.setattr(Tokenizer, "chat", lambda self, turns: asked.append(list(turns)) or [7] + self.encode("|".join(turns)), raising=False)
        monkeypatch.setattr(Tokenizer, "has_chat", True)
    seen = []
    real = bench.complete
    monkeypatch.setattr(bench, "complete", lambda target, prompt, *args: seen.append(prompt) or real(target, prompt, *args))
    names = ["plain", "medusa", "eagle2", "self_speculative", "prompt_lookup", "hf", "hf-lookup"]
    out, result = run_bench(capsys, "--out", contest, *SMALL, "--prompts", 0, "--questions", questions, "--methods", ",".join(names[1:]),
                            "--json", tmp_path / "r.json", "--profile")
    assert [(r["method"], r["temperature"]) for r in result["rows"]] == [(n, t) for t in (0, 1) for n in names]
    assert [(r["category"], r["method"]) for r in result["categories"][:14]] == [(c, n) for c in ("writing", "qa") for n in names]
    assert json.load(open(tmp_path / "r.json"))["trained"] == result["trained"]
    for r in result["rows"]:
        assert r["tau"] >= 1 and r["speed"] > 0 and r["prompts"] == 4 and r["speedup"] > 0 and r["interval"][0] <= r["speedup"] <= r["interval"][1]
        assert r["same"] is (None if r["method"].startswith("hf") and r["temperature"] else True), r
    records = [json.loads(line) for line in open(tmp_path / "r.answers.jsonl")][1:]
    assert [(r["temperature"], r["question"], r["turn"]) for r in records] == [
        (t, q, turn) for t in (0, 1) for q, turn in (("81", 0), ("81", 1), ("82", 0), ("83", 0))]
    first, second = records[0]["answers"], records[1]["answers"]
    orders = [list(r["answers"]) for r in records]
    assert all(sorted(o) == sorted(names) for o in orders)
    assert len({o[o.index("medusa") - 1] for o in orders[:4]}) > 1     # not always behind the same other one
    target, tokenizer, _, _ = setup(bench.sample.Options(method="plain", out=contest, device="cpu"), train.METHODS)
    answer = tokenizer.decode(first["plain"]["tokens"])
    text = ["the cat sees", answer, "and the dog"]
    prompt = [7] + tokenizer.encode("|".join(text)) if form == "chat" else [tokenizer.eos] + tokenizer.encode("\n\n".join(text) + "\n\n")
    assert complete(target, prompt[-48:], 16, None, Sampler(), {tokenizer.eos})[0] == second["plain"]["tokens"]
    assert seen[5:10] == [seen[0]] * 5 and seen[10:15] == [prompt[-48:]] * 5                       # a warm-up before
    assert form == "text" or asked[:2] == [["the cat sees"], text]


def test_hf_counts_like_we_do(contest, text_file, capsys):
    """transformers' tokens counted with the prompt, with the first token timed, or its lookup's steps counted as tokens."""
    target, tokenizer, _, _ = setup(bench.sample.Options(method="plain", out=contest, device="cpu"), train.METHODS)
    hf, prompt = bench.to_hf(target), tokenizer.encode("the cat sees the cat sees the")
    plain, stats = complete(target, prompt, 20, None, Sampler(), {tokenizer.eos})
    for name in ("hf", "hf-lookup"):
        a = bench.hf_answer(hf, name, prompt, 20, 0.0, 0, [tokenizer.eos])
        assert a["tokens"] == plain and sum(a["accepted"]) == len(plain)
        assert report.whole(dict(temperature=0, index=0, turn=0, question="", category="", prompt_tokens=1, answers={name: a}), [name])
        assert a["accepted"] == stats.accepted if name == "hf" else len(a["accepted"]) <= len(plain)
        assert a["seconds"]["prompt"] > 0 and a["seconds"]["rest"] > 0


def test_resume(contest, questions, capsys, monkeypatch, tmp_path, no_charts):
    """Answers lost or asked twice after an interruption; a torn or empty answer that is taken for one; another experiment's."""
    args = ["--out", contest, *SMALL, "--prompts", 0, "--questions", questions, "--methods", "medusa,hf", "--json", tmp_path / "r.json"]
    _, whole = run_bench(capsys, *args)
    path = tmp_path / "r.answers.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 8
    calls, real = [], bench.complete
    monkeypatch.setattr(bench, "complete", lambda *args: calls.append(args[4].temperature) or real(*args))

    def again(text):
        path.write_text(text)
        calls.clear()
        _, result = run_bench(capsys, *args, "--resume")
        assert [(r["tau"], r["same"], r["prompts"]) for r in result["rows"]] == [(r["tau"], r["same"], r["prompts"]) for r in whole["rows"]]
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(kept) == 9
        return len(calls)

    assert again("".join(lines)) == 0
    assert again("".join(lines[:6]) + lines[6][:100]) == 2 * (3 + 1)   # three prompts for two methods (hf is not counted), a warm-up
    broken = json.loads(lines[3])
    for change in (dict(tokens=[], accepted=[]), dict(tokens=broken["answers"]["medusa"]["tokens"][:-1]), None):
        answers = {n: a | (change or {}) if n == "medusa" else a for n, a in broken["answers"].items() if change or n != "medusa"}
        assert again("".join([*lines[:3], json.dumps(broken | dict(answers=answers)) + "\n", *lines[4:]])) == 2 * (1 + 1)
    path.write_text("".join(lines))
    assert "another options" in refused(capsys, *args, "--resume", "--new-tokens", "17")
    assert path.read_text() == "".join(lines)                          # and nothing is lost by it
    path.write_text("no header\n")
    assert "start without --resume" in refused(capsys, *args, "--resume")


def test_another_text_is_named(contest, text_file, capsys, monkeypatch):
    """A comparison that says yes whatever it is given."""
    real = bench.complete

    def liar(target, prompt, new, drafter, *args):
        tokens, stats = real(target, prompt, new, drafter, *args)
        if drafter:
            tokens = [t if i != 5 else (t + 1) % 256 for i, t in enumerate(tokens)]
        return tokens, stats
    monkeypatch.setattr(bench, "complete", liar)
    out, result = run_bench(capsys, "--out", contest, "--data", text_file, *SMALL, "--methods", "medusa", "--temperatures", "1")
    plain, medusa = result["rows"]
    assert plain["same"] is True and medusa["same"] is False and {d["token"] for d in medusa["differs"]} == {5}
    assert f"NO, {len(medusa['differs'])}: question 0 from token 5 on" in out


def record(plain, other, category="x", work=(1.0, 0.5)):
    """tokens a forward of both methods, and their seconds after the prompt."""
    answer = lambda accepted, seconds: dict(tokens=list(range(sum(accepted))), accepted=accepted, nodes=4 * (len(accepted) - 1), seconds=dict(
        prompt=9.0, draft=0.25 * seconds, verify=0.5 * seconds, rest=0.25 * seconds))
    return dict(temperature=0.0, index=0, turn=0, question="q", category=category, prompt_tokens=3,
                answers=dict(plain=answer(plain, work[0]), m=answer(other, work[1])))


def test_figures_by_hand():
    """tau with the prompt's forward, a mean of ratios for a median, milliseconds of a prompt, another category's rows."""
    records = [record([1] * 5, [1, 3, 1]), record([1] * 5, [1, 2, 2], "y", (1.0, 0.25)), record([1] * 9, [1, 4, 4], "y", (2.0, 4.0)),
               record([1], [1], "y", (0.0, 0.0))]
    rows, categories = report.summary(records, ["plain", "m"])
    m = rows[1]
    assert m["tau"] == 16 / 6 and m["speedup"] == 2.0 and m["same"] and m["nodes"] == 4 and m["prompts"] == 4
    assert m["accepted"] == {1: 1, 2: 2, 3: 1, 4: 2} and m["positions"] == [5 / 6, 3 / 6, 2 / 6] and m["interval"] == [0.5, 4.0]
    assert math.isclose(m["draft"], 1000 * 0.25 * 4.75 / 6) and math.isclose(m["verify"], 2 * m["draft"]) and m["speed"] == 8.0
    assert [(r["category"], r["method"], r["tau"]) for r in categories] == [("x", "plain", 1), ("x", "m", 2), ("y", "plain", 1), ("y", "m", 3)]
    assert rows[0]["speedup"] == 1 and rows[0]["tau"] == 1


def test_texts_and_intervals():
    """Empty texts that are equal, a prefix that counts as the whole; an interval that is not one, or changes by itself."""
    assert report.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert [report.first_difference(*ab) for ab in (([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 5, 3]), ([], []), ([1], []), (None, [1]))] == [2, 1, 0, 0, 0]
    rng = random.Random(1)
    truth, inside = 1.5, 0
    for _ in range(100):
        low, high = report.interval([truth + rng.gauss(0, 0.2) for _ in range(25)], 200)
        inside += low <= truth <= high
        assert low < high
    assert 85 <= inside <= 100
    assert report.interval([1.0]) is None and report.interval([3, 1, 2] * 3) == report.interval([3, 1, 2] * 3)
    assert report.loops([1, 2] * 20) and not report.loops(list(range(40)))


@pytest.mark.parametrize("argv, says", [
    (["--methods", "nosuch"], "unknown method nosuch"), (["--temperatures", "a"], "numbers with commas"), (["--temperatures", "-1"], "0 or more"),
    (["--prompts", "0"], "--prompts"), (["--resume"], "--json"), (["--questions", "/nonexistent"], "/nonexistent"), (["--new-tokens", "64"], "no room"),
    (["--methods", "prompt_lookup", "--tree", "2,2"], "best or chain"), (["--methods", "self_speculative", "--tree", "2,2"], "best or chain"),
    (["--methods", "eagle2", "--out", "nosuch"], "no backbone"), (["--json", "/proc/nosuch/x.json"], "cannot write"),
])
def test_mistakes_get_one_line(argv, says, contest, text_file, capsys):
    """Tracebacks for what a user typed."""
    assert says in refused(capsys, "--out", contest, "--data", text_file, *SMALL, "--methods", "medusa", "--temperatures", "0", *argv)


def test_bad_question_files(contest, tmp_path, capsys):
    """A file that is half read, or whose fault is not located."""
    good = json.dumps(dict(question_id=1, category="a", turns=["x"]))
    for bad, says in (("{", "line 2"), ('{"question_id": 1, "category": "a"}', "line 2: KeyError"), ("[]", "line 2"),
                      (good.replace('["x"]', "[]"), "turns"), (good.replace('["x"]', '"xy"'), "turns"), (good.replace('"x"', "3"), "turns")):
        path = tmp_path / "q.jsonl"
        path.write_text(f"{good}\n{bad}\n")
        assert says in refused(capsys, "--questions", path, "--out", contest), bad
    path.write_text("\n")
    assert "no question" in refused(capsys, "--questions", path, "--out", contest)


def test_without_a_checkpoint_it_says_which_command_makes_one(trained, text_file, capsys):
    """Advice that names a command which does not exist."""
    err = refused(capsys, "--out", trained, "--data", text_file, *SMALL, "--methods", "eagle2")
    assert f"run python bench/run.py --methods eagle2 --train-minutes 5 --out {trained}" in err


def test_a_result_replaces_no_device(tmp_path, capsys):
    """--json /dev/null, by somebody who may write there: everything that uses it would find a file."""
    os.mkfifo(tmp_path / "null")
    for write in (lambda path: bench.main(["--json", path]), lambda path: save(path, {}, {})):
        with pytest.raises(SystemExit) as e:
            write(str(tmp_path / "null"))
        assert e.value.code == 2 and "no file" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["null"] and not os.path.isfile(tmp_path / "null")


@pytest.mark.parametrize("there", [True, False])
def test_charts(there, monkeypatch, tmp_path, capsys):
    """A chart that cannot be drawn, or a run that ends in a traceback because there is no matplotlib."""
    if there:
        pytest.importorskip("matplotlib", reason="charts need matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    rows, categories = report.summary([record([1] * 5, [1, 3, 1]), record([1], [1])], ["plain", "m"])
    report.write(str(tmp_path / "r.json"), dict(rows=rows, categories=categories))
    assert json.load(open(tmp_path / "r.json"))["rows"][1]["method"] == "m"
    charts = sorted(f for f in os.listdir(tmp_path) if f.endswith(".png"))
    assert charts == (["r-accepted.png", "r-positions.png", "r-speedup.png"] if there else [])
    assert there or "no charts" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# One switch against another; long contexts; training

def test_options_of_one_method(trained, text_file, capsys):
    """A variant that has the options of all, is measured as another, or an option that none can have of its own."""
    opt = bench.Options(nodes="6")
    assert bench.variant("medusa", opt) == ("medusa", opt)
    name, own = bench.variant("medusa:nodes=1:share-noise=False:floor=0.5", opt)
    assert (name, own.nodes, own.share_noise, own.floor, own.tree) == ("medusa", "1", False, 0.5, opt.tree)
    bench.main(["--out", trained, "--data", text_file, *SMALL, "--temperatures", "0", "--methods", "medusa:nodes=1,medusa:nodes=5"])
    rows = {r["method"]: r for r in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert rows["medusa:nodes=1"]["nodes"] == 1 == rows["medusa:nodes=1"]["tau"] and 4 < rows["medusa:nodes=5"]["nodes"] <= 5
    for bad in ("medusa:oak=1", "medusa:nodes", "medusa:nodes=many", "medusa:floor=x", "medusa:share-noise=no", "oak:nodes=3", "medusa:seed=1"):
        assert "--methods" in refused(capsys, "--out", trained, "--methods", bad) or "many" in bad, bad


def test_context(trained, text_file, capsys):
    """A context one token too long, a row for another length; lengths that do not fit end with a line."""
    import context
    args = ["--out", trained, "--data", text_file, "--new-tokens", "4", "--repeats", "1"]
    context.main([*args, "--lengths", "12,64"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [r["context"] for r in rows] == [12, 64] and rows[1]["cache"] / rows[0]["cache"] == 64 / 12
    assert all(r[k] > 0 for r in rows for k in ("plain", "step", "draft", "speedup", "prompt"))
    for lengths in ("4", "65", "x", ""):
        with pytest.raises(SystemExit) as e:
            context.main([*args, "--lengths", lengths])
        assert e.value.code == 2 and "--lengths" in capsys.readouterr().err, lengths


def test_training_speed(capsys):
    """A loop that is left out, or trains nothing."""
    import training
    training.main(["--steps", "3", "--length", "12", "--batch-size", "1", "--device", "cpu"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [r["loop"] for r in rows] == ["plain loop", "backbone", *train.METHODS]
    assert all(r["trained"] > 1000 and r["tokens_per_second"] > 0 for r in rows)


# ---------------------------------------------------------------------------------------------------------------------
# The figure

SVG = "{http://www.w3.org/2000/svg}"


def drawn(path):
    """An SVG of figure.py -> {method: its forwards, each a list of (the token's sign, is it green?)}, after a look at the places."""
    root, rows = ElementTree.parse(path).getroot(), {}
    width, height = float(root.get("width")), float(root.get("height"))
    for row in root.iter(SVG + "g"):
        if row.get("class") != "row":
            continue
        rows[row.get("id")], right = [], {}
        for group in (g for g in row if g.get("class") == "forward"):
            green = {(float(r.get("x")), float(r.get("y"))) for r in group.iter(SVG + "rect")}
            texts = [t for t in group.iter(SVG + "text")]
            rows[row.get("id")].append([("".join(t.itertext()), (float(t.get("x")), float(t.get("y")) - 13) in green) for t in texts])
            for t in texts:
                x, y, length = (float(t.get(k)) for k in ("x", "y", "textLength"))
                assert right.get(y, 0) <= x and x + length < width and y < height      # nothing lies over anything else
                right[y] = x + length
    return rows


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_figure_is_what_was_decoded(temperature, trained, tmp_path, capsys):
    """Text that is lost, doubled or not XML; a draft shown as the target's own; forwards that are counted otherwise than Stats does."""
    argv = ["--out", trained, "--prompt", "the <cat> & \x01é\n ", "--new-tokens", "45", "--temperature", str(temperature), "--nodes", "9"]
    figure.main([*argv, "--svg", str(tmp_path / "a.svg")])
    said, rows = capsys.readouterr().out.splitlines(), drawn(tmp_path / "a.svg")
    target, tokenizer, drafters, _ = setup(bench.sample.Options(method="all", out=trained, device="cpu", nodes=9), train.METHODS)
    prompt = tokenizer.start + tokenizer.encode("the <cat> & \x01é\n ")
    assert list(rows) == ["plain", *train.METHODS] and len(said) == 5
    for (name, forwards), line in zip(rows.items(), said):
        tokens, stats = complete(target, prompt, 45, drafters.get(name), Sampler(temperature), tokenizer.stops)
        assert [len(f) for f in forwards] == stats.accepted and all([g for _, g in f] == [True] * (len(f) - 1) + [False] for f in forwards)
        assert "".join(text for f in forwards for text, _ in f) == figure.visible(tokenizer.decode(tokens))
        counted = f"{len(stats.accepted)} forwards for {len(tokens)} tokens"
        assert line.endswith(f": {counted}") and f">{counted}</text>" in (tmp_path / "a.svg").read_text()
    again = (tmp_path / "a.svg").read_bytes()
    figure.main([*argv, "--svg", str(tmp_path / "a.svg")])
    assert (tmp_path / "a.svg").read_bytes() == again


def test_any_text_can_be_drawn(tmp_path):
    """Signs that are XML's own, that XML cannot hold, or that nobody would see; a token that ends within a character."""
    texts = ["<b>", "&amp;", '"\'', "", "\x00\x1b\x7f", " \t\n", "\u00b7\uffff", "\U0001f600"] * 9
    rows = {"plain": (texts, [1] * 72), "moa": (texts, [1, 70, 1])}
    (tmp_path / "a.svg").write_text(figure.svg(rows, texts, "\x00<&>", "python <&> \x01"), encoding="utf-8")
    for forwards in drawn(tmp_path / "a.svg").values():
        assert "".join(text for f in forwards for text, _ in f) == '<b>&amp;"\'\u2400\u241b\u2421\u00b7\u2409\u23ce\u00b7\ufffd\U0001f600' * 9


def test_figure_mistakes(trained, tmp_path, capsys, monkeypatch):
    """A picture of texts that differ; tracebacks for a folder that is not there and a prompt that is too long."""
    good = ["--out", trained, "--new-tokens", "9", "--prompt", "a", "--svg", str(tmp_path / "a.svg")]
    for wrong, says in ((["--svg", str(tmp_path / "no" / "a.svg")], "cannot write"), (["--prompt", "long " * 400], "leaves no room"),
                        (["--temperature", "-1"], "temperature"), (["--out", str(tmp_path)], "no backbone")):
        with pytest.raises(SystemExit) as e:
            figure.main([*good, *wrong])
        err = capsys.readouterr().err
        assert e.value.code == 2 and says in err and err.count("\n") == 1
    monkeypatch.setattr(figure, "complete", lambda t, p, n, d, *a: (complete(t, p, n, d, *a)[0][::-1 if d else 1], complete(t, p, n, d, *a)[1]))
    with pytest.raises(SystemExit):
        figure.main([*good, "--temperature", "1"])
    assert "another one than plain" in capsys.readouterr().err and not os.listdir(tmp_path)


def test_the_figure_of_the_readme():
    """A picture that is out of step with the options or broken: five rows, one text, the plain one token a forward."""
    rows = drawn(os.path.join(ROOT, "bench", "figure.svg"))
    texts = {name: [text for f in forwards for text, _ in f] for name, forwards in rows.items()}
    assert list(rows) == ["plain", *train.METHODS] and all(text == texts["plain"] for text in texts.values())
    assert len(texts["plain"]) == len(rows["plain"]) == figure.Options.new_tokens > max(len(rows[m]) for m in train.METHODS)
