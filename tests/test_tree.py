"""Trees, masks, the walk and the sampler: against brute force, and against the distribution they promise."""
import math
import random

import numpy as np
import pytest
import torch

import moa
from model import GPT, GPTConfig
from plumbing.shapes import cartesian, chain
from tree import LevelRunner, Sampler, Shape, Stats, Tree, grow, plant, plant_best_levels, tree_mask, walk


def random_parents(rng, N):
    return [-1] + [rng.randrange(i) for i in range(1, N)]


def ancestors(parent, i):
    return ancestors(parent, parent[i]) + [i] if i >= 0 else []


def rank_paths(shape):
    """Of every node the ranks on the way to it, the root's left out."""
    return [tuple(shape.rank[j] for j in ancestors(shape.parent, i)[1:]) for i in range(len(shape.parent))]


# --------------------------------------------------------------------------------------------------
# Masks and trees

@pytest.mark.parametrize("S", [0, 1, 7])
def test_tree_mask_is_the_ancestor_relation(S):
    """A node that sees a sibling, misses an ancestor, or misses cached text."""
    rng = random.Random(S)
    drawn = [random_parents(rng, rng.randint(1, 20)) for _ in range(30)]
    for parent in [[-1], [-1, 0, 1, 2], [-1, 0, 0, 0], *drawn]:
        mask = tree_mask(parent, S)
        assert mask.shape == (len(parent), S + len(parent)) and mask.dtype == torch.bool
        for i in range(len(parent)):
            want = list(range(S)) + [S + j for j in ancestors(parent, i)]
            assert mask[i].nonzero().flatten().tolist() == want


def test_depth_and_cut():
    """
    Depths that count siblings;
    a cut that keeps a node whose parent went, or mixes up tokens and values.
    """
    rng = random.Random(0)
    for _ in range(50):
        N = rng.randint(1, 15)
        parent = random_parents(rng, N)
        tree = Tree(list(range(100, 100 + N)), parent, [rng.random() for _ in range(N)])
        assert tree.depth == [len(ancestors(parent, i)) - 1 for i in range(N)] and len(tree) == N
        for d in range(max(tree.depth) + 2):
            cut = tree.cut(d)
            kept = [i for i in range(N) if tree.depth[i] <= d]
            assert cut.tokens == [tree.tokens[i] for i in kept] and cut.value == [tree.value[i] for i in kept]
            for i, old in enumerate(kept):
                path = [tree.tokens[j] for j in ancestors(parent, old)]
                assert [cut.tokens[j] for j in ancestors(cut.parent, i)] == path
        assert Tree(tree.tokens, parent).cut(0).value is None and len(tree.cut(0)) == 1


def test_limit():
    """A limit that keeps orphans, drops the root, or leaves a rank or depth that has no guess."""
    rng = random.Random(0)
    for _ in range(100):
        N = rng.randint(1, 15)
        parent, K, V = random_parents(rng, N), rng.randint(0, 4), rng.randint(1, 4)
        shape = Shape(parent, [0] + [rng.randrange(5) for _ in range(1, N)], [rng.random() for _ in range(N)])
        out = shape.cut(K, V)
        kept = []
        for i in range(N):
            path = ancestors(parent, i)
            if len(path) - 1 <= K and all(shape.rank[j] < V for j in path):
                kept.append(i)
        assert out.rank == [shape.rank[i] for i in kept] and out.value == [shape.value[i] for i in kept]
        assert out.parent == [-1] + [kept.index(parent[i]) for i in kept[1:]]
    assert Shape([-1], [0]).cut(4, 9).value is None


def brute_force(p, nodes):
    """The largest sum of values over all connected subtrees of at most nodes nodes, the root among them."""
    def best(d, budget):  # a set of siblings at position d with budget nodes
        if d == len(p) or budget == 0:
            return 0.0
        table = [0.0] * (budget + 1)  # over ranks: each is taken with a subtree of n nodes
        for q in p[d]:
            table = [max([table[b]] + [table[b - n] + q * (1 + best(d + 1, n - 1)) for n in range(1, b + 1)])
                     for b in range(budget + 1)]
        return table[budget]
    return 1.0 + best(0, nodes - 1)


def test_grow_is_the_best_subtree():
    """
    A heap that forgets a sibling or a child, or a node before its parent:
    fewer tokens per step than the budget allows.
    """
    rng = random.Random(0)
    for case in range(60):
        K, R, nodes = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 7)
        p = [sorted((rng.random() ** 2 for _ in range(R)), reverse=True) for _ in range(K)]
        if case % 4 == 0:
            p[-1] = p[-1][:1] + [0.0] * (R - 1)
        shape = grow(p, nodes)
        assert len(shape.parent) <= nodes and all(up < i for i, up in enumerate(shape.parent))
        paths = rank_paths(shape)
        assert len(set(paths)) == len(paths)
        for path, value in zip(paths, shape.value):
            assert value == pytest.approx(math.prod(p[d][r] for d, r in enumerate(path)))
        assert sum(shape.value) == pytest.approx(brute_force(p, nodes))
        assert sum(grow(p, nodes - 1).value if nodes > 1 else [0]) <= sum(shape.value)


def test_grow_at_the_edges():
    """No draft positions, a budget of one, probabilities of zero, a vocabulary of one, a floor."""
    assert grow([], 5) == grow([[0.5]], 1) == grow([[0.0, 0.0]], 5) == Shape([-1], [0], [1.0])
    assert grow([[1.0]] * 3, 9).parent == [-1, 0, 1, 2]  # one token: a chain, however large the budget
    assert len(grow([[0.6, 0.4], [0.5, 0.5]], 100).parent) == 7
    floor = grow([[0.6, 0.4], [0.5, 0.5]], 100, floor=0.3)
    assert floor.value == [1.0, 0.6, 0.4]
    assert len(grow([[0.6, 0.4], [0.5, 0.5]], 100, floor=0.2999).parent) == 5


def test_plant():
    """Tokens of another position or rank; more nodes than asked for; impossible tokens in the tree."""
    torch.manual_seed(0)
    scores = torch.randn(3, 8).double() * 2
    order = scores.argsort(-1, descending=True)
    for shape in (chain(3), cartesian(3, 2, 1), cartesian(8), chain(0), cartesian(2, 2).cut(3, 8)):
        tree = plant(7, scores, shape)
        assert tree.tokens[0] == 7 and tree.parent == shape.parent
        for i in range(1, len(tree)):
            assert tree.tokens[i] == order[tree.depth[i] - 1, shape.rank[i]]
            chance = scores[tree.depth[i] - 1].softmax(-1)[tree.tokens[i]].item()
            # the value is this step's, not the shape's
            assert tree.value[i] == pytest.approx(tree.value[tree.parent[i]] * chance)
    for nodes in (1, 2, 5, 16, 60):
        tree = plant(7, scores, limit=nodes)
        want = grow([scores[d].softmax(-1)[order[d]].tolist() for d in range(3)], nodes)
        assert len(tree) == nodes and tree.parent == want.parent and tree.value == pytest.approx(want.value)
        for i in range(1, nodes):
            assert tree.tokens[i] == order[tree.depth[i] - 1, want.rank[i]]
    hidden = scores.masked_fill(scores < scores.topk(2).values[:, -1:], -math.inf)
    tree = plant(7, hidden, limit=60)  # top-k = 2: 2 + 4 + 8 nodes are all there are
    assert len(tree) == 15
    assert all(hidden[tree.depth[i] - 1, tree.tokens[i]] > -math.inf for i in range(1, 15))


@pytest.mark.parametrize("V", [1, 2, 3])
def test_plant_in_a_tiny_vocabulary(V):
    """topk of more tokens than there are; fewer nodes possible than the budget."""
    tree = plant(0, torch.zeros(2, V).double(), limit=16)
    assert len(tree) == min(16, 1 + V + V * V)
    assert all(0 <= t < V for t in tree.tokens)
    wide = plant(0, torch.zeros(2, V), cartesian(5, 5).cut(2, V))
    assert sorted(wide.tokens[1:V + 1]) == list(range(V))


def test_plant_cuts_a_shape_to_what_was_guessed():
    """
    A shape deeper than the draft positions, or wider than the vocabulary:
    an index error in the middle of decoding.
    """
    assert plant(0, torch.randn(2, 8), chain(5)).parent == [-1, 0, 1]
    assert len(plant(0, torch.randn(2, 3), cartesian(4, 4))) == 1 + 3 + 9


# --------------------------------------------------------------------------------------------------
# Walk

def walk_slowly(tokens, parent, choice):
    """All nodes whose whole path consists of the target's choices; the walk must end at the deepest."""
    right = [i for i in range(len(tokens))
             if all(tokens[j] == choice[parent[j]] for j in ancestors(parent, i)[1:])]
    return max(len(ancestors(parent, i)) for i in right), right


def test_walk_keeps_exactly_the_matching_path():
    """A walk that accepts a wrong token, stops early, or returns nodes and tokens of different paths."""
    rng, longest = random.Random(0), 0
    for _ in range(500):
        N, V = rng.randint(1, 14), rng.choice([2, 3, 5])
        parent = random_parents(rng, N)
        tokens, choice = [rng.randrange(V) for _ in range(N)], [rng.randrange(V) for _ in range(N)]
        siblings = [(up, t) for up, t in zip(parent, tokens)]
        path, out = walk(tokens, parent, choice)
        assert path[0] == 0 and all(parent[b] == a for a, b in zip(path, path[1:]))
        assert out == [choice[i] for i in path] and [tokens[i] for i in path[1:]] == out[:-1]
        assert (path[-1], out[-1]) not in siblings                     # it went as far as it could
        if len(set(siblings)) == N:  # without duplicates the deepest right node is unique
            assert len(path) == walk_slowly(tokens, parent, choice)[0]
        longest = max(longest, len(path))
    assert longest > 3


def test_walk_with_repeated_children():
    """Duplicates among the children: whichever is followed, nodes and tokens must fit together."""
    path, out = walk([9, 4, 4, 4, 5], [-1, 0, 0, 0, 1], [4, 7, 7, 7, 7])
    assert len(path) == 2 and path[1] in (1, 2, 3) and out == [4, 7]
    for node in (1, 2, 3):
        path, out = walk([9, 4, 4, 4, 5], [-1, 0, 0, 0, node], [4, 5, 5, 5, 6])
        assert out in ([4, 5, 6], [4, 5]) and len(path) == len(out)


def test_token_zero_is_a_real_token():
    """
    Medusa's padded slots: paths (0,), (1,), (0, 0),
    and the target follows node 2 with token 0, which is no child there.
    """
    tokens, parent = [5, 0, 1, 0], [-1, 0, 0, 1]
    assert walk(tokens, parent, [1, 7, 0, 7]) == ([0, 2], [1, 0])
    assert walk(tokens, parent, [0, 0, 7, 0]) == ([0, 1, 3], [0, 0, 0])
    assert walk([0], [-1], [0]) == ([0], [0])


# --------------------------------------------------------------------------------------------------
# Figures

def test_stats():
    """tau that counts the prompt's token or forward; figures of an empty generation."""
    stats = Stats(accepted=[1, 3, 2, 1], seconds=dict(prompt=9.0, draft=1.0, verify=1.5, rest=0.5))
    assert stats.steps == 3 and stats.tau == 2 and stats.tokens_per_second == 2
    assert Stats(accepted=[1]).tau == 0 and Stats(accepted=[1]).steps == 0
    assert Stats().steps == 0 and Stats().tau == 0


# --------------------------------------------------------------------------------------------------
# Sampler

def row(seed, t, V=5):
    return Sampler(1.0, seed=seed).noise(t, V, torch.zeros(1)).tolist()


def test_noise_is_a_function_of_seed_and_position():
    """A generator with a state: another text for another order of asking, or for a drafter that asks too."""
    a, b = Sampler(1.0, seed=3), Sampler(1.0, seed=3)
    first = {t: a.noise(t, 9, torch.zeros(1)).clone() for t in (5, 6, 7, 5)}
    a.forget(6)
    for t in (7, 6, 5):
        assert torch.equal(a.noise(t, 9, torch.zeros(1)), first[t])
        assert torch.equal(b.noise(t, 9, torch.zeros(1)), first[t])
    assert first[5].dtype == torch.float64 and first[5].isfinite().all()
    assert a.noise(5, 4, torch.zeros(1)).shape == (4,)  # a second vocabulary is another row, not a stale one


def test_every_bit_of_the_seed_matters():
    """
    A seed cut to 32 bits, or rounded to a float: many seeds, one text.
    Positions must not alias seeds either.
    """
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**52, 2**53, 2**53 + 1, 2**62, 2**62 + 1]
    rows = {tuple(row(seed, t)) for seed in seeds for t in (0, 1, 2, 2**20)}
    assert len(rows) == len(seeds) * 4


def test_seeds_above_the_signed_range():
    """
    The upper half of the 64-bit seeds, converted through a float:
    neighbours share one text, the highest seed is seed 0.
    """
    seeds = [0, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
    assert len({tuple(row(seed, 5)) for seed in seeds}) == len(seeds)


def test_forget_frees_memory():
    """Rows of noise that pile up over a long text, or that are dropped while still needed."""
    s = Sampler(1.0)
    for t in range(10):
        s.noise(t, 3, torch.zeros(1))
    s.forget(6)
    assert sorted(t for t, _ in s.drawn) == [7, 8, 9]


@pytest.mark.parametrize("wrong", [
    dict(temperature=-0.1), dict(temperature=math.inf), dict(temperature=math.nan), dict(top_k=-1),
    dict(top_p=-0.1), dict(top_p=1.1), dict(top_p=math.nan), dict(seed=-1), dict(seed=2**64),
], ids=str)
def test_bad_values_are_refused(wrong):
    """
    A negative temperature that ranks backwards, a NaN that switches a filter off,
    a seed that wraps around.
    """
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", "-")):
        Sampler(**wrong)
    Sampler(temperature=0, top_k=0, top_p=0, seed=2**64 - 1)


def some_logits(N=1, V=8, seed=0):
    return 2 * torch.randn(N, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_greedy_and_what_amounts_to_it():
    """
    Noise at temperature 0; top-k 1, top-p 0 or a tiny temperature that still sample;
    a filter of more tokens than there are.
    """
    z = some_logits(50)
    best = z.argmax(-1).tolist()
    for s in (Sampler(), Sampler(0.0, top_k=3, top_p=0.5, seed=7), Sampler(1.0, top_k=1),
              Sampler(1.0, top_p=0.0), Sampler(1e-9), Sampler(1e-300), Sampler(1e9, top_k=1),
              Sampler(1e9, top_p=0.0)):
        assert s.choose(z, range(50)) == best
        assert s.choose(z.float(), range(50)) == z.float().argmax(-1).tolist()
    full = Sampler(1.0, seed=1).choose(z, range(50))
    for top_k in (8, 10**6):
        assert Sampler(1.0, top_k=top_k, seed=1).choose(z, range(50)) == full
    assert full != best


def test_filter():
    """
    One token too many or too few; ties split at random;
    the last token excluded; the input changed in place.
    """
    z = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]).double()
    kept = lambda **o: (Sampler(1.0, **o).filter(z)[0] > -math.inf).nonzero().flatten().tolist()
    before = z.clone()
    assert kept(top_k=1) == [1] and kept(top_k=2) == [1, 2, 3] == kept(top_k=3)
    assert kept(top_k=4) == [0, 1, 2, 3]
    assert kept(top_k=5) == kept() == [0, 1, 2, 3, 4]
    p = z.softmax(-1)[0]
    assert kept(top_p=p[1].item() - 1e-9) == [1] and len(kept(top_p=p[1].item() + 1e-9)) == 2
    assert kept(top_p=1 - p[4].item() + 1e-9) == [0, 1, 2, 3, 4]
    assert kept(top_p=1 - p[4].item() - 1e-9) == [0, 1, 2, 3]
    assert kept(top_k=1, top_p=0.9) == [1] and kept(top_p=0.0) == [1]
    # top-p looks at the tempered distribution
    hot = (Sampler(100.0, top_p=0.5).filter(z)[0] > -math.inf).sum()
    assert hot == 3
    two = Sampler(1.0, top_p=0.7).filter(torch.cat((z, z.flip(-1))))   # every row by itself
    numbers_kept = (two > -math.inf).sum(-1)
    assert torch.equal(two[0], two[1].flip(-1)) or numbers_kept[0] == numbers_kept[1]
    assert torch.equal(z, before)


def test_equal_logits():
    """All logits equal: greedy still answers, and sampling is uniform, not the first token."""
    z = torch.zeros(400, 4)
    assert set(Sampler().choose(z, range(400))) <= {0, 1, 2, 3}
    counts = np.bincount(Sampler(1.0).choose(z, range(400)), minlength=4)
    assert counts.min() > 60
    counts = np.bincount(Sampler(1e6).choose(some_logits(1).expand(4000, 8), range(4000)), minlength=8)
    assert counts.min() > 380                                          # a huge temperature is uniform as well


@pytest.mark.parametrize("options", [
    {}, dict(temperature=1.0), dict(temperature=0.5, top_k=2), dict(temperature=0.5, top_p=0.9),
], ids=str)
def test_infinite_and_missing_logits(options):
    """
    -inf must never be chosen, +inf always; NaN is no token:
    it stops with a message, wherever it stands.
    """
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        z = torch.tensor([[-math.inf, 1.0, -math.inf, 0.5]] * 100, dtype=dtype)
        assert set(Sampler(**options).choose(z, range(100))) <= {1, 3}
        z[:, 2] = math.inf
        assert set(Sampler(**options).choose(z, range(100))) == {2}
        for where in range(4):
            z = torch.tensor([[0.0, 1.0, 2.0, 0.5]] * 3, dtype=dtype)
            z[1, where] = math.nan
            with pytest.raises(FloatingPointError, match="NaN"):
                Sampler(**options).choose(z, range(3))


def test_half_precision_logits():
    """Choices computed in bf16 or fp16: noise rounded to three digits, overflow to infinity."""
    z = some_logits(200).to(torch.bfloat16)
    for s in (Sampler(), Sampler(0.7, seed=2), Sampler(0.7, top_k=5, top_p=0.8)):
        assert s.scores(z, range(200)).dtype != torch.bfloat16
        assert s.choose(z, range(200)) == s.choose(z.float(), range(200)) == s.choose(z.double(), range(200))
    big = torch.full((1, 4), 6e4, dtype=torch.float16)
    assert Sampler(1e5).scores(big, [3]).isfinite().all()


def test_ranking_shares_the_noise_unless_told_not_to():
    """share=False that still hands out noise, share=True that ranks by other noise than the choice's."""
    z = some_logits(30)
    s = Sampler(1.0, seed=4)
    assert s.rank(z, range(30)).argmax(-1).tolist() == s.choose(z, range(30))
    assert torch.equal(Sampler(1.0, seed=4, share=False).rank(z, range(30)), z.float())
    assert torch.equal(Sampler(0.0).rank(z, range(30)), z.float())


# --------------------------------------------------------------------------------------------------
# Distributions

SEEDS = 20_000


def processed(z, temperature, top_k=0, top_p=1.0):
    """The promised distribution, written down once more: numpy, one token at a time."""
    p = np.exp((z - z.max()) / temperature)
    order = sorted(range(len(z)), key=lambda v: -z[v])
    if top_k:
        p[order[top_k:]] = 0
    p, held, keep = p / p.sum(), 0.0, []
    for v in order:
        if held < top_p:
            keep.append(v)
        held += p[v]
    q = np.zeros_like(p)
    q[keep] = p[keep]
    return q / q.sum()


def check_distribution(pairs, p, q=None):
    """
    Samples (n, 2) of two neighbouring tokens:
    the first is distributed like p, the second like q (or p), independently.
    """
    q, pairs = p if q is None else q, np.asarray(pairs)
    joint = np.zeros((len(p), len(q)))
    np.add.at(joint, (pairs[:, 0], pairs[:, 1]), 1 / len(pairs))
    tv = lambda a, b: np.abs(a - b).sum() / 2
    assert tv(joint.sum(1), p) < 0.02, f"first tokens {joint.sum(1)} instead of {p}"
    assert tv(joint.sum(0), q) < 0.02, f"second tokens {joint.sum(0)} instead of {q}"
    assert tv(joint, np.outer(p, q)) < 0.03, "the two tokens depend on each other"


NOISE = {}                                                             # seed -> what its samplers have drawn


def seeded(seed, temperature=1.0, **options):
    """
    A sampler that has what earlier ones of this seed have drawn: the noise is a function of seed and
    position alone, as a test above says, and to draw it again is most of the time that a choice takes.
    """
    sampler = Sampler(temperature, seed=seed, **options)
    sampler.drawn = NOISE.setdefault(seed, sampler.drawn)
    return sampler


def choices(z, **options):
    """(SEEDS, 2) choices at two neighbouring positions, eight pairs of them for a seed; z (2, V)."""
    texts, z = [], z.repeat(8, 1)
    for seed in range(SEEDS // 8):
        first = 17 + seed % 2
        texts.append(seeded(seed, **options).choose(z, range(first, first + 16)))
    return np.reshape(texts, (SEEDS, 2))


@pytest.mark.parametrize("options", [
    dict(temperature=1.0), dict(temperature=0.6, top_k=5), dict(temperature=1.3, top_p=0.8),
    dict(temperature=2.0, top_k=6, top_p=0.9),
], ids=str)
def test_choices_follow_the_distribution(options):
    """
    Filters after the noise, a temperature applied twice,
    rows shared by two positions, seeds that resemble each other.
    """
    z = some_logits(2)
    p, q = (processed(row.numpy(), **options) for row in z)
    check_distribution(choices(z, **options), p, q)


class OneRow(Sampler):
    """Planted: noise that ignores the position."""

    def noise(self, t, V, like):
        return super().noise(0, V, like)


class NodeRows(Sampler):
    """Planted: rows by node index. The root is node 0 in every step."""

    def choose(self, logits, positions):
        return super().choose(logits, range(len(logits)))


@pytest.mark.parametrize("wrong", [OneRow, NodeRows])
def test_that_the_distribution_check_can_fail(wrong):
    """Each single token of these is distributed rightly; only pairs of positions show the fault."""
    def two_steps(seed):                                               # plain decoding: one node a step
        s = wrong(1.0, seed=seed)
        return s.choose(LOG_P[None], [17]) + s.choose(LOG_P[None], [18])
    with pytest.raises(AssertionError, match="depend"):
        check_distribution([two_steps(seed) for seed in range(SEEDS // 4)], P)


def test_that_it_catches_a_filter_that_is_off():
    """The same check fails for raw sampling where top-k was asked for."""
    z = some_logits(2)
    p, q = (processed(row.numpy(), 1.0, 5) for row in z)
    with pytest.raises(AssertionError, match="first"):
        check_distribution(choices(z, top_k=3), p, q)


P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
LOG_P, LOG_Q = torch.from_numpy(np.log(P)), torch.from_numpy(np.log(Q))


def decode_two(sampler, children, rule):
    """
    The first two tokens of a text whose target says P everywhere.
    children(sampler, t) -> guesses for position t.
    """
    text = []
    while len(text) < 2:
        t = 10 + len(text)
        tokens, parent = [0], [-1]
        first, second = children(sampler, t), children(sampler, t + 1)
        for up, below in ((0, first), *((i, second) for i in range(1, 1 + len(first)))):
            for token in below:
                tokens.append(token)
                parent.append(up)
        positions = [t + d for d in Tree(tokens, parent).depth]
        text += rule(sampler, tokens, parent, LOG_P.expand(len(tokens), 3), positions)
    return text[:2]


def ours(sampler, tokens, parent, z, positions):
    return walk(tokens, parent, sampler.choose(z, positions))[1]


def ratio(sampler, tokens, parent, z, positions):
    """
    Planted: deterministic children in draft order,
    accepted with p/q as if they had been sampled from q.
    """
    rng, p = random.Random(sampler.seed * 7 + positions[0]), P.copy()
    for token in tokens[1:3]:
        if rng.random() < p[token] / Q[token]:
            return [token]
        p = np.maximum(p - Q, 0)
        p = p / p.sum()
    return rng.choices(range(3), p)


DRAFTS = {
    "none": lambda s, t: [],
    "top-1 of q": lambda s, t: [1],
    "top-2 of q": lambda s, t: [1, 0],
    "sampled from q": lambda s, t: random.Random(s.seed * 31 + t).choices(range(3), Q, k=2),
    "by the shared noise": lambda s, t: [s.rank(LOG_Q[None], [t]).argmax().item()],
    "all": lambda s, t: [2, 1, 0],
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_walk_emits_the_targets_distribution(draft):
    """Whatever the children and however they were found: tokens of p, independent from each other."""
    check_distribution([decode_two(seeded(seed), DRAFTS[draft], ours) for seed in range(4000)], P)


def test_that_a_wrong_rule_fails_there():
    """
    The p/q rule for sampled drafts, applied to deterministic children, gives (4/7, 3/7, 0):
    the check must see it.
    """
    pairs = [decode_two(seeded(seed), DRAFTS["top-2 of q"], ratio) for seed in range(SEEDS // 4)]
    with pytest.raises(AssertionError, match="first"):
        check_distribution(pairs, P)
    first = np.bincount(np.array(pairs)[:, 0], minlength=3) / len(pairs)
    assert np.abs(first - [4 / 7, 3 / 7, 0]).max() < 0.03              # it is that fault, and no other


def test_a_level_is_run_where_it_is_likely_to_be_reached():
    """
    Catches a level that costs more than it can bring, one too few,
    and a tree that loses nodes which are there already.
    """
    logits = torch.log(torch.tensor([0.7, 0.1, 0.1, 0.1]))
    # levels are reached with .8, .56 (.49 + .07), ..
    for price, run in ((0.0, [1, 2, 3]), (0.5, [1, 2]), (0.75, [1]), (0.9, [])):
        levels = []
        def step(d, tokens, up, mask):
            levels.append(d)
            return logits.expand(len(tokens), -1)
        tree = plant_best_levels(3, LevelRunner(step, logits[None], Sampler(), 5), 4, 2, 30, price=price)
        assert levels == run and max(tree.depth) == len(run) + 1 and len(tree) == 3 + 4 * len(run)
    wide = GPT(GPTConfig(n_layer=6, n_embd=16, n_head=2, n_kv_head=1, n_ffn=16))
    drafter = moa.Drafter(moa.Net(moa.Config(tli=1), wide), wide)
    assert (drafter.depth, drafter.price) == (4, 0.5) and moa.Drafter(drafter.net, wide, depth=2).price == 0
