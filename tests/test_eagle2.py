"""bench/eagle2.py: guesses, loss and trees against one position at a time by hand."""
import math

import pytest
import torch
import torch.nn.functional as F

import eagle2
from conftest import Watching
from test_moa import Run, layer, make_target, paths, random_text
from tree import Sampler, complete
from plumbing.shapes import cartesian


def eagle(target, seed=1, **options):
    """All parameters random, so that no part hides behind a zero."""
    torch.manual_seed(seed)
    net = eagle2.Net(eagle2.Config(**options), target).to(target.wte.weight.dtype).eval()
    net.theta = target.cfg.rope_theta                                  # for test_moa's layer
    for p in net.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    return net


def features(net, target, text, path, true=None):
    """
    The guessed features after the drafted tokens path (root first) behind the text, row by row, nothing
    cached.
    """
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
def test_eagle_predictions(style):
    """
    A true feature where only a guess is known, a shifted token, the row of another anchor, a wrong
    position.
    """
    target = make_target(style)
    net, x = eagle(target, depth=3), random_text(target, 2, 7)
    own, seen = target(x)[0], []
    for k, (logits, truth, real) in enumerate(eagle2.predictions(net, target, x), 1):
        anchors = [(b, t) for b in range(2) for t in range(7 - k - 1)]
        assert truth.tolist() == [x[b, t + 1 + k].item() for b, t in anchors]
        torch.testing.assert_close(real, torch.stack([own[b, t + k] for b, t in anchors]))
        for row, (b, t) in zip(logits, anchors):
            last = features(net, target, x[b, :t + 1].tolist(), x[b, t + 1:t + 1 + k].tolist())[-1]
            torch.testing.assert_close(row, target.lm_head(last))
        seen.append(len(truth))
    assert seen == [10, 8, 6]
    short = eagle2.predictions(eagle(target, depth=5), target, random_text(target, 2, 4))
    assert [len(truth) for _, truth, _ in short] == [4, 2, 0, 0, 0]


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_eagle_loss_by_hand(style):
    """
    The parallel training pass against one position at a time: weights, shifts, means, positions that
    count.
    """
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
    """
    Noise on the targets, none or too much on the inputs, in evaluation; a gradient in the target, a
    dead parameter.
    """
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
    """
    Stale or missing rows after 0 to 4 accepted tokens, a wrong position or mask, a feature of the wrong
    parent.
    """
    target = make_target(style)
    net, prompt, sampler = eagle(target), [1, 2, 3], Sampler(0.7, seed=3)
    plain, _ = complete(target, prompt, 17, sampler=sampler)
    for shape in (None, cartesian(2, 2, 1)):
        drafter = Watch(net, target, shape, max_nodes=9, breadth=3)
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
                    value = tree.value[tree.parent[i]] * q[tree.tokens[i]]
                    assert math.isclose(tree.value[i], value, rel_tol=1e-6, abs_tol=1e-12)
        assert drafter.cache.length <= len(drafter.text)


@pytest.mark.parametrize("depth, breadth, nodes", [(3, 3, 8), (3, 2, 50), (2, 40, 12), (1, 3, 16)])
def test_eagle_dynamic_tree(depth, breadth, nodes):
    """
    Re-ranking that loses a best node, a level cut before it is ranked, children before parents, a node
    too many.
    """
    target, sampler = make_target(), Sampler(0.8, seed=2)
    net = eagle(target)
    drafter = Watch(net, target, max_nodes=nodes, depth=depth, breadth=breadth)
    complete(target, [1, 2, 3], 9, drafter, sampler)
    with torch.no_grad():
        for text, tree in drafter.seen[:2]:
            true, pool, level = target.hidden(torch.tensor([text]))[0], [], [((tree.tokens[0],), 1.0)]
            for d in range(1, min(depth, 3 + 9 - len(text) - 2) + 1):
                new = []
                for path, value in level:
                    last = features(net, target, text, list(path), true)[-1]
                    q = sampler.rank(target.lm_head(last)[None], [len(text) + d])[0].softmax(0)
                    for i in q.topk(min(breadth, 23)).indices.tolist():
                        if value * q[i] > 0:
                            new.append(((*path, i), value * q[i].item()))
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
