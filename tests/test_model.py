"""The backbone: attention, masks, its cache against no cache."""
import random

import pytest
import torch

from conftest import read, tiny
from model import GPTConfig, KVCache, attend
from tree import tree_mask

EXACT = dict(atol=1e-10, rtol=1e-10)                                   # float64


def ids(V, B, T, seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------
# Attention, cache, masks

@pytest.mark.parametrize("G", [4, 2, 1])
def test_attend_is_softmax_attention(G):
    """A grouped query that reads another group's keys, or another row's mask."""
    torch.manual_seed(0)
    B, H, T, S, D = 2, 4, 5, 9, 6
    q, k, v = (torch.randn(B, n, m, D).double() for n, m in ((H, T), (G, S), (G, S)))

    def naive(q, k, v, mask):
        out = torch.empty_like(q)
        for b in range(q.size(0)):
            for h in range(H):
                g = h * G // H
                score = q[b, h] @ k[b, g].T / D**0.5
                if mask is not None:
                    score = score + mask.expand(B, H, *score.shape)[b, h]
                out[b, h] = score.softmax(-1) @ v[b, g]
        return out

    look = torch.rand(B, 1, T, S) < 0.6
    look[..., 0] = True
    additive = torch.zeros(B, 1, T, S).double().masked_fill(~look, float("-inf"))
    for mask in (None, additive[0, 0], additive):
        assert torch.allclose(attend(q, k, v, mask), naive(q, k, v, mask), **EXACT)
    causal, k, v = torch.full((T, T), float("-inf")).double().triu(1), k[:, :, :T], v[:, :, :T]
    assert torch.allclose(attend(q, k, v, causal=True), naive(q, k, v, causal), **EXACT)


SHAPES = [dict(style="gpt2"), dict(n_kv_head=4), dict(n_kv_head=2), dict(n_kv_head=1, head_dim=6),
          dict(n_kv_head=2, qkv_bias=True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_cached_equals_uncached(shape):
    """
    Off by one in positions or in the causal mask, for single tokens,
    for chunks behind cached text, for a batch.
    """
    target, x = tiny(**shape), ids(23, 3, 40)
    whole, _ = target(x)
    for chunks in ([1] * 40, [7, 1, 5, 20, 7], [39, 1], [1, 39], [40]):
        cache, at = target.new_cache(40, 3), 0
        for n in chunks:
            logits, _ = target(x[:, at:at + n], cache=cache)
            assert torch.allclose(logits, whole[:, at:at + n], **EXACT)
            assert cache.length == at                                  # nothing counts before keep
            cache.keep(range(n))
            at += n
        assert cache.length == 40


def test_a_cache_may_be_used_while_gradients_are_recorded():
    """
    A cache whose keys and values are views made without gradients:
    writing to it from a trained layer is an error.
    """
    target, x = tiny().requires_grad_(True), ids(23, 1, 9)
    for made in (torch.no_grad, torch.enable_grad):
        with made():
            cache = target.new_cache(9)
            target(x[:, :4], cache=cache)
            cache.keep(range(4))
        logits, _ = target(x[:, 4:], cache=cache)
        assert torch.allclose(logits, target(x)[0][:, 4:], **EXACT)


def random_parents(rng, N):
    return [-1] + [rng.randrange(i) for i in range(1, N)]


def ancestors(parent, i):
    return ancestors(parent, parent[i]) + [i] if i >= 0 else []


def tree_error(target, parent, S, mask_of=tree_mask, pos_of=None, seed=0):
    """
    Largest difference between the logits at a tree node
    and a plain forward of the text and the node's path.
    """
    N, V = len(parent), target.cfg.vocab_size
    text, nodes = ids(V, 1, S, seed), ids(V, 1, N, seed + 1)
    depth = [len(ancestors(parent, i)) - 1 for i in range(N)]
    cache = target.new_cache(S + N)
    target(text, cache=cache)
    cache.keep(range(S))
    pos = torch.tensor(depth if pos_of is None else pos_of(depth)) + S
    logits, _ = target(nodes, pos, mask_of(parent, S), cache)
    errors = []
    for i in range(N):
        alone, _ = target(torch.cat((text, nodes[:, ancestors(parent, i)]), 1))
        errors.append((logits[0, i] - alone[0, -1]).abs().max().item())
    return max(errors)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_at_every_node_of_a_tree(shape):
    """
    A node that sees a sibling or misses an ancestor, a wrong position,
    a mask row given to another query of its group.
    """
    rng, target = random.Random(0), tiny(**shape)
    for case in range(6):
        parent = random_parents(rng, rng.randint(2, 12))
        assert tree_error(target, parent, rng.randint(1, 20), seed=case) < 1e-9


def test_that_tree_check_can_fail():
    """Planted: a causal mask, a mask without ancestors, positions by node index."""
    target, parent = tiny(), [-1, 0, 0, 1, 1, 2, 5]
    causal = lambda parent, S: torch.ones(len(parent), S + len(parent)).tril(S).bool()
    alone = lambda parent, S: torch.cat((torch.ones(len(parent), S), torch.eye(len(parent))), 1).bool()
    assert tree_error(target, parent, 9) < 1e-9
    assert tree_error(target, parent, 9, mask_of=causal) > 1e-3
    assert tree_error(target, parent, 9, mask_of=alone) > 1e-3
    assert tree_error(target, parent, 9, pos_of=lambda depth: list(range(len(depth)))) > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_arbitrary_mask_without_a_cache(shape):
    """
    A mask that only works on top of cached text;
    positions per sequence that are read from the first one.
    """
    target, x, parent = tiny(**shape), ids(23, 2, 6), [-1, 0, 0, 2, 1, 3]
    pos = torch.tensor([len(ancestors(parent, i)) - 1 for i in range(6)])
    shift = torch.stack((pos, pos + 11))                               # (B, T)
    logits, _ = target(x, shift, tree_mask(parent))
    for b in range(2):
        for i in range(6):
            path = ancestors(parent, i)
            alone, _ = target(x[b:b + 1, path], shift[b, path])
            assert torch.allclose(logits[b, i], alone[0, -1], **EXACT)


def keep_error(path, shape):
    """
    Difference of the next logits after keeping a path of a tree,
    from a plain forward of text, path and next token.
    """
    target, parent = tiny(**shape), [-1, 0, 0, 1, 1, 2, 2, 5, 5]
    text, nodes, more = ids(23, 1, 7), ids(23, 1, 9, 1), ids(23, 1, 4, 2)
    cache = target.new_cache(7 + 9)
    target(text, cache=cache)
    cache.keep(range(7))
    depth = torch.tensor([len(ancestors(parent, i)) - 1 for i in range(9)])
    target(nodes, depth + 7, tree_mask(parent, 7), cache)
    cache.keep(path)
    assert cache.length == 7 + len(path)
    logits, _ = target(more, cache=cache)
    plain, _ = target(torch.cat((text, nodes[:, path], more), 1))
    return (logits - plain[:, -4:]).abs().max().item()


PATHS = [[0], [0, 1], [0, 1, 3], [0, 2, 5], [0, 2, 6], [0, 2, 5, 8], [0, 1, 4]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_next_logits_after_keep(path, shape):
    """Accepted rows that lie scattered but are taken for a dense prefix, or rotated to another position."""
    assert keep_error(path, shape) < 1e-9


def test_that_keep_check_can_fail(monkeypatch):
    """Planted: keep that takes the first rows instead of the path's."""
    monkeypatch.setattr(KVCache, "keep", lambda self, rows: setattr(self, "length", self.length + len(rows)))
    assert [keep_error(path, {}) > 1e-3 for path in PATHS] == [False, False] + [True] * 5


@pytest.mark.parametrize("rows", [
    [0, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [0, 1, 3, 4], [3], [0, 1, 2], [], [2, 3, 7],
], ids=str)
def test_keep_of_overlapping_rows(rows):
    """A copy that overwrites rows which it has yet to read, or that touches the text before."""
    cache = KVCache(GPTConfig(n_layer=2, n_head=2, n_kv_head=2, n_embd=4), 12, B=2)
    for i in range(2):
        cache.k[i].copy_(torch.arange(12.0).view(12, 1) + 100 * i)
        cache.v[i].copy_(-cache.k[i])
    k, v = cache.read(slice(12))
    cache.length = 3
    cache.keep(rows)
    want = [0, 1, 2] + [3 + r for r in rows]
    assert cache.length == len(want)
    for new, old in zip(cache.read(slice(len(want))), (k, v)):
        assert torch.equal(new, old[:, :, :, want])


def test_crop():
    """A roll-back that leaves rows behind, or lengthens the text."""
    target, x = tiny(), ids(23, 1, 20)
    cache = target.new_cache(40)
    target(x, cache=cache)
    cache.keep(range(20))
    cache.crop(11)
    other = ids(23, 1, 6, seed=5)
    logits, _ = target(other, cache=cache)
    assert torch.allclose(logits, target(torch.cat((x[:, :11], other), 1))[0][:, 11:], **EXACT)
    for length in (12, -1):
        with pytest.raises(AssertionError):
            cache.crop(length)
    cache.crop(11)
    cache.crop(0)
    assert torch.allclose(target(x, cache=cache)[0], target(x)[0], **EXACT)


@pytest.mark.parametrize("shape", SHAPES)
def test_write_past_the_end(shape):
    """A cache that wraps, clips or half-writes instead of refusing."""
    target = tiny(**shape)
    cache = target.new_cache(8)
    target(ids(23, 1, 5), cache=cache)
    cache.keep(range(5))
    before = cache.read(slice(8))
    with pytest.raises(ValueError, match="full"):
        target(ids(23, 1, 4), cache=cache)
    assert cache.length == 5 and all(map(torch.equal, cache.read(slice(8)), before))
    target(ids(23, 1, 3), cache=cache)                                 # exactly full is allowed


@pytest.mark.parametrize("shape", SHAPES)
def test_ranges_of_layers(shape):
    """
    A range that repeats or skips a block, norms in between,
    or writes its keys to another layer's cache.
    """
    target, x = tiny(n_layer=4, **shape), ids(23, 2, 9)
    pos = torch.arange(9)
    whole = target.run(target.embed(x, pos), pos)
    logits, hidden = target(x)
    assert torch.allclose(target.norm(whole), hidden, **EXACT)
    assert torch.allclose(read(target, whole), logits, **EXACT)
    for k in range(5):
        part = target.run(target.run(target.embed(x, pos), pos, stop=k), pos, start=k)
        assert torch.allclose(part, whole, **EXACT)
        caches = target.new_cache(9, 2), target.new_cache(9, 2)
        for n in (slice(0, 5), slice(5, 9)):
            e = target.embed(x[:, n], pos[n])
            a = target.run(e, pos[n], None, caches[0])
            b = target.run(target.run(e, pos[n], None, caches[1], 0, k), pos[n], None, caches[1], k, 4)
            assert torch.allclose(a, b, **EXACT) and torch.allclose(a, whole[:, n], **EXACT)
            for cache in caches:
                cache.keep(range(n.stop - n.start))
        assert all(map(torch.equal, *(cache.read(slice(9)) for cache in caches)))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_positions_past_block_size_are_refused(style):
    """A position that wraps around, slides or is clamped: the text would go on with another model."""
    target = tiny(style)
    with pytest.raises((AssertionError, IndexError)):
        target(ids(23, 1, 41))
    with pytest.raises((AssertionError, IndexError)):
        target(ids(23, 1, 1), torch.tensor([40]))
    cache = target.new_cache(60)
    target(ids(23, 1, 40), cache=cache)
    cache.keep(range(40))
    with pytest.raises((AssertionError, IndexError)):
        target(ids(23, 1, 1), cache=cache)


def test_config_refuses_impossible_heads():
    """
    Query heads that cannot share, widths that cannot be rotated:
    an error in the first forward instead of here.
    """
    for wrong in (dict(n_head=4, n_kv_head=3), dict(n_embd=20, n_head=4), dict(head_dim=7),
                  dict(n_embd=2, n_head=4)):
        with pytest.raises(ValueError):
            GPTConfig(**wrong)


def test_layers_share_no_storage():
    """[block] * n: layers that are one and the same."""
    for style in ("llama", "gpt2"):
        target = tiny(style, n_layer=5, tied=False)
        places = [p.data_ptr() for p in target.parameters()]
        assert len(set(places)) == len(places)
