"""
Every method and every artificial drafter gives plain decoding's text, token for token.

The reference is written here: one uncached forward a token. check() compares text, statistics, the
cache's length after every step and its rows at the end; planted faults show that it sees wrong
walks, masks, caches, positions and noise.
"""
import functools
import random

import pytest
import torch

import tree
from conftest import tiny
from model import KVCache
from plumbing.checkpoint import fingerprint
from train import METHODS
from tree import Sampler, Shape, Tree, complete, generate, grow
from plumbing.shapes import cartesian, chain

SAMPLING = {
    "greedy": {},
    "T = 1": dict(temperature=1.0, seed=5),
    "T = 0.8, top-k": dict(temperature=0.8, top_k=6, seed=6),
    "T = 1.2, top-p": dict(temperature=1.2, top_p=0.85, seed=7),
    "hidden noise": dict(temperature=1.0, seed=8, share=False),
}
SHAPES = {
    "best-first": (None, 16),
    "small": (None, 3),
    "chain": (chain(4), 16),
    "product": (cartesian(3, 2, 2), 16),
    "wide": (cartesian(6), 16),
    "sparse": (grow([[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.2, 0.1]], 14), 16),
    "one node": (chain(0), 1),
}


# --------------------------------------------------------------------------------------------------
# Drafters

def method_drafter(name, target, shape=None, max_nodes=16, seed=0, config={}, ids=None, **drafting):
    """
    An untrained drafter: as it starts (seed 0), or with all its parameters random.
    ids: of a draft vocabulary.
    """
    torch.manual_seed(seed)
    method = METHODS[name]
    net = method.Net(method.Config(**config), target, ids).to(target.wte.weight.dtype)
    for p in net.parameters() if seed else ():
        p.data.add_(0.2 * torch.randn_like(p))
    shape = shape and shape.cut(net.K, target.cfg.vocab_size if ids is None else len(ids))
    return method.Drafter(net, target, shape=shape, max_nodes=max_nodes, **drafting)


class Artificial:
    """Knows the whole text (prompt and what follows) and what it was told of it."""

    def __init__(self, full, V, seed=0, depth=4, noise=2):
        self.full, self.V, self.rng, self.depth, self.noise = full, V, random.Random(seed), depth, noise
        self.cache_rows = 1 + depth * (1 + 2 * noise) + 12

    def start(self, target, max_len):
        self.text = []

    def observe(self, tokens, hidden, cache):
        self.text += tokens
        assert hidden.shape[0] == len(tokens) and cache.length == len(self.text)
        assert self.text == self.full[:len(self.text)], "told of tokens that are not the text"

    def coming(self, root):
        """The next depth tokens of the text."""
        n = len(self.text)
        assert self.full[n] == root
        return self.full[n + 1:n + 1 + self.depth]

    def wrong(self, token):
        return self.rng.choice([v for v in range(self.V) if v != token])


class Perfect(Artificial):
    """The text's own next tokens at scattered nodes, wrong siblings around them; without noise a chain."""

    def draft(self, root, sampler, limit=None):
        tokens, parent, at = [root], [-1], 0
        for token in self.coming(root):
            place, up = self.rng.randint(0, self.noise), at
            for i in range(self.noise + 1):
                parent.append(up)
                tokens.append(token if i == place else self.wrong(token))
                if i == place:
                    at = len(tokens) - 1
            for _ in range(self.noise):                                # and something below the wrong ones
                below = [i for i in range(1, len(tokens)) if i != at and parent[i] == up]
                if below:
                    parent.append(self.rng.choice(below))
                    tokens.append(self.rng.randrange(self.V))
        return Tree(tokens, parent)


class AlwaysWrong(Artificial):
    """Wrong children only, with right or wrong tokens below them."""

    def draft(self, root, sampler, limit=None):
        truth, tokens, parent = self.coming(root), [root], [-1]
        if truth:
            for _ in range(self.noise + 1):
                up = 0
                for d, token in enumerate(truth):
                    parent.append(up)
                    tokens.append(self.wrong(token) if d == 0 else token)
                    up = len(tokens) - 1
        return Tree(tokens, parent)


class Random(Artificial):
    """
    Any tree with any tokens, duplicates among siblings included;
    half of the tokens are from the text to come.
    """

    def draft(self, root, sampler, limit=None):
        N = self.rng.randint(1, 13)
        parent = [-1] + [self.rng.randrange(i) for i in range(1, N)]
        truth, depth, tokens = self.coming(root), [0], [root]
        for i in range(1, N):
            depth.append(depth[parent[i]] + 1)
            good = depth[i] <= len(truth) and self.rng.random() < 0.5
            tokens.append(truth[depth[i] - 1] if good else self.rng.randrange(self.V))
        return Tree(tokens, parent)


class Guided:
    """
    A method's own tree plus a path of the text to come,
    so that untrained drafters too see long accepted runs.
    """

    def __init__(self, inner, oracle):
        self.inner, self.oracle, self.drafts = inner, oracle, {}
        self.cache_rows = inner.cache_rows + oracle.depth

    def __getattr__(self, name):                                       # ride, if the method has it
        return getattr(self.__dict__["inner"], name)

    def start(self, target, max_len):
        self.oracle.start(target, max_len)
        self.inner.start(target, max_len)

    def observe(self, tokens, hidden, cache):
        self.oracle.observe(tokens, hidden, cache)
        self.inner.observe(tokens, hidden, cache)

    def draft(self, root, sampler, limit=None):
        inner = self.inner.draft(root, sampler)
        self.drafts[len(self.oracle.text)] = inner
        tokens, parent, up = list(inner.tokens), list(inner.parent), 0
        for token in self.oracle.coming(root)[:self.oracle.rng.randint(0, self.oracle.depth)]:
            tokens.append(token)
            parent.append(up)
            up = len(tokens) - 1
        child = {}  # siblings with one token become one node
        new = {-1: -1}
        tokens_, parent_, value = [], [], []
        for i, (up, token) in enumerate(zip(parent, tokens)):
            key = new[up], token
            if key not in child:
                child[key] = len(tokens_)
                tokens_.append(token)
                parent_.append(new[up])
                value.append(inner.value[i] if inner.value and i < len(inner) else 0.0)
            new[i] = child[key]
        return Tree(tokens_, parent_, value if inner.value else None)


ARTIFICIAL = {
    "perfect chain": lambda *a: Perfect(*a, noise=0),
    "perfect": Perfect,
    "wrong": AlwaysWrong,
    "random": Random,
}


# --------------------------------------------------------------------------------------------------
# The check

TEXTS = {}  # (target, prompt, new, sampling) -> what reference returns


def reference(target, prompt, new, sampling):
    """
    The next new tokens by the plainest of loops, and the smallest lead of a choice over the second best;
    each once.
    """
    key = fingerprint(target.state_dict()), str((target.cfg, prompt, new, sampling))
    if key not in TEXTS:
        TEXTS[key] = plainly(target, prompt, new, sampling)
    text, lead = TEXTS[key]
    return list(text), lead


@torch.inference_mode()
def plainly(target, prompt, new, sampling):
    text, lead, s = list(prompt), float("inf"), Sampler(**sampling)
    for t in range(len(prompt), min(len(prompt) + new, target.cfg.block_size)):
        scores = s.scores(target(torch.tensor([text]))[0][0, -1:], [t])[0]
        best = scores.topk(2).values
        lead = min(lead, (best[0] - best[1]).item())
        text.append(scores.argmax().item())
    return text[len(prompt):], lead


def check(target, prompt, new, drafter, sampling, eos=(), truth=None):
    """
    drafter's run equals the reference in every respect.
    truth: the reference's tokens, if known. Returns Stats.
    """
    block = target.cfg.block_size
    truth = reference(target, prompt, new, sampling)[0] if truth is None else truth
    want = truth[:min(new, block - len(prompt))]
    end = next((i + 1 for i, token in enumerate(want) if token in eos), 0)
    want = want[:end] if end else want
    stop = "eos" if end else "budget" if new <= block - len(prompt) else "context"

    caches, new_cache = [], target.new_cache
    target.new_cache = lambda *args: caches.append(new_cache(*args)) or caches[-1]
    try:
        run = generate(target, prompt, new, drafter, Sampler(**sampling), eos)
        text, lengths, given = [], [], list(prompt)
        while True:
            try:
                step = next(run)
            except StopIteration as last:
                stats = last.value
                break
            text += step
            lengths.append(len(step))
            assert step, "a step without a token"
            before = len(text) - len(step)
            assert text == want[:len(text)], f"the text left plain decoding's at token {before} or later"
            assert caches[0].length == len(prompt) + len(text) - 1, "cache and text differ in length"
    finally:
        del target.new_cache
    assert text == want and prompt == given
    assert stats.accepted == lengths and sum(stats.accepted) == len(text), "statistics and text differ"
    assert stats.stop == stop and len(caches) == (1 if want else 0)
    assert 0 <= stats.nodes and stats.steps <= stats.nodes
    if want:
        cache, fresh = caches[0], new_cache(block)
        target(torch.tensor([prompt + text[:-1]]), cache=fresh)
        n, tolerance = cache.length, 1e-9 if cache.k[0].dtype == torch.float64 else 1e-3
        for a, b in zip(cache.read(slice(n)), fresh.read(slice(n))):
            assert (a - b).abs().max() < tolerance, "the cache holds rows that are not the text's"
    return stats


def lively(prompt, new, sampling, **shape):
    """A random target whose text after prompt is no loop, and that text: a loop would hide most faults."""
    target, truth = find_lively(tuple(prompt), new, tuple(sampling.items()), **shape)
    return target, list(truth)


@functools.cache  # one search for all methods; nobody changes the target
def find_lively(prompt, new, sampling, distinct=5, seed=0, **shape):
    prompt, sampling = list(prompt), dict(sampling)
    for seed in range(seed, seed + 50):
        target = tiny(seed=seed, **shape)
        truth, lead = reference(target, prompt, new, sampling)
        if len(set(truth[:20])) >= distinct and lead > 1e-4:  # and no near tie that rounding could flip
            return target, truth
    raise AssertionError("all texts are loops")


TARGETS = {
    "llama": dict(),
    "gpt2": dict(style="gpt2"),
    "one layer": dict(n_layer=1, n_kv_head=1),
    "three layers, untied": dict(n_layer=3, n_kv_head=4, tied=False),
}


# --------------------------------------------------------------------------------------------------
# Methods

def every_tree(sampling, make):
    """
    make(target, shape, nodes, seed) -> a drafter, checked on all targets,
    in turn by itself and guided through long runs.
    """
    turn = list(SAMPLING).index(sampling)
    for i, shape in enumerate(TARGETS.values()):
        target, truth = lively([3, 1, 4], 20, SAMPLING[sampling], **shape)
        for j, name in enumerate(list(SHAPES)[i % 3::3] if i else SHAPES):
            drafter = make(target, *SHAPES[name], j % 3)
            if (turn + i + j) % 2:
                drafter = Guided(drafter, Artificial([3, 1, 4] + truth, 23, seed=j))
            check(target, [3, 1, 4], 14, drafter, SAMPLING[sampling], truth=truth)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("method", METHODS)
def test_untrained_methods_are_lossless(method, sampling):
    """
    A method that changes the text in any way:
    with any tree, both families, as it starts and with random weights.
    """
    def make(target, shape, nodes, seed):
        return method_drafter(method, target, shape, nodes, seed)
    every_tree(sampling, make)


@pytest.mark.parametrize("method", METHODS)
def test_methods_in_single_precision(method):
    """A dtype that a method fixes by itself."""
    for sampling in SAMPLING.values():
        target, truth = lively([5, 6], 25, sampling, dtype=torch.float32)
        drafter = method_drafter(method, target, seed=1)
        check(target, [5, 6], 25, drafter, sampling, truth=truth)
        check(target, [5, 6], 25, Guided(drafter, Artificial([5, 6] + truth, 23)), sampling, truth=truth)


def at_the_ends(style, make):
    """
    make(target, shape, nodes) -> a drafter,
    which is checked where prompts, texts and budgets are as short or long as can be.
    """
    target = tiny(style, block_size=24, seed=4)
    prompt = [random.Random(0).randrange(23) for _ in range(23)]
    for shape, nodes in (SHAPES["best-first"], SHAPES["chain"]):
        drafter = make(target, shape, nodes)
        for sampling in (SAMPLING["greedy"], SAMPLING["T = 1"]):
            for n in (23, 22, 21, 20, 19, 18, 1):
                check(target, prompt[:n], 30, drafter, sampling)
            for new in range(7):
                check(target, prompt[:3], new, drafter, sampling)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_at_the_ends(method, style):
    """
    Prompts of one token and up to the end of the context, every small budget:
    an index out of range, one token too many.
    """
    at_the_ends(style, lambda target, shape, nodes: method_drafter(method, target, shape, nodes, seed=1))


@pytest.mark.parametrize("method", METHODS)
def test_a_vocabulary_of_two(method):
    """More guesses than there are tokens."""
    target = tiny(vocab_size=2, seed=1)
    for shape, nodes in SHAPES.values():
        check(target, [1, 0], 20, method_drafter(method, target, shape, nodes, seed=1), SAMPLING["T = 1"])


@pytest.mark.parametrize("method", METHODS)
def test_a_used_drafter_is_as_good_as_a_new_one(method):
    """State of an earlier text, finished, stopped at its end token or abandoned: other drafts, or a crash."""
    target, sampling = tiny(seed=2), SAMPLING["T = 1"]
    used, new = (method_drafter(method, target, seed=1) for _ in range(2))
    check(target, [9] * 20, 40, used, sampling)
    first, _ = reference(target, [3, 3], 9, sampling)
    check(target, [3, 3], 9, used, sampling, eos=first[4:5])
    next(generate(target, [7, 8], 9, used, Sampler()))                 # the caller goes away after the prompt
    a = check(target, [1, 2, 3], 25, used, sampling)
    b = check(target, [1, 2, 3], 25, new, sampling)
    assert a.accepted == b.accepted and a.nodes == b.nodes


@pytest.mark.parametrize("sampling", ["greedy", "T = 1"])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_do_not_depend_on_how_the_text_came_about(method, sampling):
    """
    Rows of the drafter's own cache that are taken from rejected drafts, doubled,
    or left out after a long accepted run.
    """
    prompt, new, sampling = [3, 1, 4], 24, SAMPLING[sampling]
    for style in ("llama", "gpt2"):
        target, truth = lively(prompt, new, sampling, style=style, n_layer=4)
        inner = method_drafter(method, target, max_nodes=10, seed=1)
        guided = Guided(inner, Artificial(prompt + truth, 23, seed=2))
        stats = check(target, prompt, new, guided, sampling, truth=truth)
        assert max(stats.accepted) >= 4 and len(guided.drafts) > 4
        for n, draft in guided.drafts.items():
            seen = len(truth) - (n - len(prompt))  # a new drafter, given the same text as a prompt
            inner = method_drafter(method, target, max_nodes=10, seed=1)
            fresh = Guided(inner, Artificial(prompt + truth, 23))
            run = generate(target, (prompt + truth)[:n], seen, fresh, Sampler(**sampling))
            next(run), next(run)
            alone = fresh.drafts[n]
            assert (draft.tokens, draft.parent) == (alone.tokens, alone.parent), f"another draft at {n}"


@pytest.mark.parametrize("method", METHODS)
def test_a_broken_drafter_cannot_break_the_text(method):
    """NaN in a drafter's weights: slow is allowed, another text is not."""
    for sampling in (SAMPLING["greedy"], SAMPLING["T = 1"]):
        target = tiny(seed=6)
        drafter = method_drafter(method, target)
        for p in drafter.net.parameters():
            p.data.fill_(float("nan"))
        check(target, [1, 2, 3], 12, drafter, sampling)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_bad_prompts(method):
    """
    An empty prompt, a batch, a tensor, a prompt without room:
    one ValueError, the same for all, before anything runs.
    """
    target = tiny()
    drafter = method and method_drafter(method, target)
    for prompt, word in (([], "non-empty"),
                         ([[1, 2], [3, 4]], "one sequence"), (torch.tensor([[1, 2]]), "one sequence"),
                         (torch.tensor([1, 2]), "list"), ("text", "list"),
                         ([1] * 40, "room"), ([1] * 41, "room")):
        with pytest.raises(ValueError, match=word):
            complete(target, prompt, 5, drafter)
    for new in (0, -1):
        text, stats = complete(target, [1, 2], new, drafter)
        assert text == [] and stats.accepted == [] and stats.stop == "budget" and stats.tau == 0


# --------------------------------------------------------------------------------------------------
# Artificial drafters

@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", ARTIFICIAL)
def test_artificial_drafters_are_lossless(name, sampling):
    """
    Any influence of the drafter on the text:
    random trees, repeated children, right tokens below wrong ones.
    """
    for i, shape in enumerate(TARGETS.values()):
        for dtype in (torch.float64, torch.float32) if i < 2 else (torch.float64,):
            target, truth = lively([7], 35, SAMPLING[sampling], seed=i, dtype=dtype, **shape)
            check(target, [7], 30, ARTIFICIAL[name]([7] + truth, 23, i), SAMPLING[sampling], truth=truth)


@pytest.mark.parametrize("name", ARTIFICIAL)
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_artificial_drafters_at_the_ends(name, style):
    """The look-ahead passes the end of the cache, of the context or of the budget."""
    target = tiny(style, block_size=24, seed=4)
    prompt = [random.Random(1).randrange(23) for _ in range(23)]
    for sampling in (SAMPLING["greedy"], SAMPLING["T = 1"]):
        for n in (23, 22, 21, 20, 19, 18, 17, 1):
            truth, _ = reference(target, prompt[:n], 30, sampling)
            beyond = [0] * 8  # a drafter does not know that the context ends
            drafter = ARTIFICIAL[name](prompt[:n] + truth + beyond, 23)
            check(target, prompt[:n], 30, drafter, sampling, truth=truth)
        truth, _ = reference(target, prompt[:2], 20, sampling)
        for new in range(8):
            check(target, prompt[:2], new, ARTIFICIAL[name](prompt[:2] + truth, 23), sampling, truth=truth)


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
def test_tau_of_perfect_and_wrong_drafters(depth):
    """
    An off-by-one in the cache or the walk that costs accepted tokens;
    a bonus token that is not counted.
    """
    target, V = tiny(seed=3), 23
    for sampling in SAMPLING.values():
        truth, _ = reference(target, [1, 2], 38, sampling)
        for noise in (0, 2):
            perfect = Perfect([1, 2] + truth, V, depth=depth, noise=noise)
            stats = check(target, [1, 2], 30, perfect, sampling, truth=truth)
            full, rest = divmod(29, depth + 1)
            assert stats.accepted == [1] + [depth + 1] * full + [rest] * (rest > 0)
            if not rest:
                assert stats.tau == depth + 1
        stats = check(target, [1, 2], 30, AlwaysWrong([1, 2] + truth, V, depth=depth), sampling, truth=truth)
        assert stats.accepted == [1] * 30 and stats.tau == 1


@pytest.mark.parametrize("sampling", ["greedy", "T = 1"])
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_end_of_text_inside_an_accepted_run(style, sampling):
    """
    Tokens after the end token that are emitted, counted or kept in the cache;
    an end token that is also the bonus or first.
    """
    sampling = SAMPLING[sampling]
    target, truth = lively([1, 2, 3], 37, sampling, style=style)
    firsts = [i for i, token in enumerate(truth) if token not in truth[:i] and i < 30]
    assert len(firsts) > 4 and firsts[0] == 0                          # the token of the prompt's forward too
    for at in firsts:
        for make in ARTIFICIAL.values():
            drafter = make([1, 2, 3] + truth, 23)
            stats = check(target, [1, 2, 3], 37, drafter, sampling, eos={truth[at]}, truth=truth)
            assert stats.stop == "eos" and sum(stats.accepted) == at + 1
        perfect = Perfect([1, 2, 3] + truth, 23)
        check(target, [1, 2, 3], at + 1, perfect, sampling, eos={truth[at]}, truth=truth)
        check(target, [1, 2, 3], 37, None, sampling, eos={truth[at], 99}, truth=truth)


def test_several_end_tokens():
    """Only the first of a list of end tokens is looked for, or the last one in a step wins."""
    target = tiny(seed=8)
    truth, _ = reference(target, [1], 39, SAMPLING["T = 1"])
    for eos in (truth[5:7], truth[6:4:-1], tuple(truth[9:14])):
        check(target, [1], 39, Perfect([1] + truth, 23, depth=7), SAMPLING["T = 1"], eos=eos, truth=truth)


def test_seeds():
    """A seed that is ignored, or state of an earlier text in a sampler that is used again."""
    target = tiny(seed=1)
    text = lambda seed, n: complete(target, [1, 2], n, sampler=Sampler(1.0, seed=seed))[0]
    assert len({tuple(text(seed, 8)) for seed in range(20)}) == 20
    s = Sampler(1.0, seed=1)
    truth = text(1, 30)
    assert text(1, 30) == truth
    for drafter in (None, Perfect([1, 2] + truth, 23), Random([1, 2] + truth, 23), None):
        assert complete(target, [1, 2], 30, drafter, s)[0] == truth    # one sampler for several texts


def test_what_a_drafter_is_told():
    """Hidden states of rejected nodes, of another order, or from before the final norm."""
    target, told = tiny(seed=2), []
    truth, _ = reference(target, [4, 5, 6], 25, {})

    class Listener(Perfect):
        def observe(self, tokens, hidden, cache):
            super().observe(tokens, hidden, cache)
            told.append(hidden)

    check(target, [4, 5, 6], 25, Listener([4, 5, 6] + truth, 23), {}, truth=truth)
    told = torch.cat(told)
    hidden = target.hidden(torch.tensor([[4, 5, 6] + truth]))[0, :len(told)]
    assert len(told) > 20 and torch.allclose(told, hidden, atol=1e-9)


def test_nan_in_the_target_stops_with_a_message():
    """A text of token 0 from a broken model."""
    target = tiny()
    target.norm.weight.data.fill_(float("nan"))
    for sampling in ({}, dict(temperature=1.0, top_p=0.9)):
        with pytest.raises(FloatingPointError, match="NaN"):
            complete(target, [1, 2], 5, sampler=Sampler(**sampling))


# --------------------------------------------------------------------------------------------------
# Random cases

def any_tree(rng):
    """A Shape of up to 14 nodes, siblings of different ranks."""
    parent = [-1] + [rng.randrange(max(0, i - 4), i) for i in range(1, rng.randint(1, 14))]
    ranks = [rng.sample(range(16), 14) for _ in parent]
    return Shape(parent, [0] + [ranks[up].pop() for up in parent[1:]])


def any_drafter(name, target, rng, shape, seed):
    """A drafter of this method, all that can be chosen about it drawn at random."""
    L, yes = target.cfg.n_layer, lambda: rng.random() < 0.5
    K, V = rng.randint(1, 6), target.cfg.vocab_size
    config, drafting = dict(n_heads=K), {}
    if name == "medusa":
        config.update(share_head=yes())
    elif name == "amphista":
        config.update(stages=rng.randint(0, 2), token=yes(), block=yes(), bidirectional=yes(),
                      position=yes(), share_head=yes())
    elif name == "hidden_transfer":
        layers = sorted(rng.randrange(L) for _ in range(K))
        config.update(layers=",".join(map(str, layers)), source=rng.choice(["anchor", "previous"]),
                      blind=yes())
        drafting = dict(groups=rng.randint(0, 5))
    else:
        config = dict(depth=K, breadth=rng.randint(1, 5), tli=rng.randint(0, L), lsa=yes(),
                      n_kv_head=rng.choice([0, 1]))
        drafting = dict(depth=rng.choice([0, 1, 7]), breadth=rng.choice([0, 1, 7]))
    ids = torch.tensor(sorted(rng.sample(range(V), rng.randint(1, V)))) if rng.random() < 0.25 else None
    nodes, floor = rng.randint(1, 20), rng.choice([0.0, 0.0, 0.05])
    return method_drafter(name, target, shape, nodes, seed % 3, config, ids, floor=floor, **drafting)


def random_case(seed):
    """
    One run with everything drawn from seed.
    Returns how many tokens came, or None for a near tie in single precision.
    """
    rng = random.Random(seed)
    H, style = rng.choice([2, 4]), rng.choice(["llama", "gpt2"])
    dtype = torch.float32 if rng.random() < 0.25 else torch.float64
    V, block = rng.choice([2, 3, 5, 23, 60]), rng.randint(6, 40)
    target = tiny(style, seed, dtype, rng.choice([6, 20, 30]), n_layer=rng.randint(1, 4), n_head=H,
                  n_kv_head=H if style == "gpt2" else rng.choice([1, 2, H]), n_embd=rng.choice([8, 16]),
                  vocab_size=V, block_size=block, tied=rng.random() < 0.5, qkv_bias=rng.random() < 0.3,
                  head_dim=rng.choice([0, 0, 2, 6]))
    drawn = dict(temperature=rng.choice([0.3, 1.0, 2.0]), top_k=rng.choice([0, 0, 1, 3, 99]),
                 top_p=rng.choice([1.0, 0.9, 0.5, 0.0]), seed=rng.randrange(2**62), share=rng.random() < 0.8)
    sampling = rng.choice([{}, drawn])
    n_prompt = rng.choice([1, 2, rng.randint(1, block - 1), block - rng.randint(1, 5)])
    prompt = [rng.randrange(V) for _ in range(n_prompt)]
    new = rng.choice([0, 1, 2, 3, rng.randint(0, 45), 45])
    truth, lead = reference(target, prompt, new + 8, sampling)         # a drafter looks ahead, by 6 at most
    if dtype == torch.float32 and lead < 1e-4:
        return None
    eos = set(rng.sample(truth, min(len(truth), rng.choice([0, 0, 1, 2]))))
    full = prompt + truth + [rng.randrange(V) for _ in range(8)]
    kind = rng.choice([*ARTIFICIAL, *METHODS, *(f"guided {m}" for m in METHODS)])
    depth, noise = rng.randint(1, 6), rng.randint(0, 2)
    if kind in ARTIFICIAL:
        drafter = type(ARTIFICIAL[kind](full, V))(full, V, seed, depth, noise)
    else:
        depth_of_chain = rng.randint(0, 5)
        widths = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
        shape = rng.choice([None, None, chain(depth_of_chain), cartesian(*widths), any_tree(rng)])
        drafter = any_drafter(kind.split()[-1], target, rng, shape, seed)
        drafter = Guided(drafter, Artificial(full, V, seed, depth)) if "guided" in kind else drafter
    check(target, prompt, new, drafter, sampling, eos, truth)
    return len(truth)


def run_cases(seeds):
    done = [0, 0]
    for seed in seeds:
        try:
            done[random_case(seed) is None] += 1
        except Exception as e:
            raise AssertionError(f"random_case({seed}) fails: {type(e).__name__}: {e}") from e
    assert done[1] < 0.1 * sum(done), "too many near ties were left out"


@pytest.mark.parametrize("part", range(4))
def test_random_cases(part):
    """Whatever the tests above did not think of. A failure names its seed: random_case(seed) repeats it."""
    run_cases(range(50 * part, 50 * part + 50))


@pytest.mark.long
def test_many_random_cases():
    """The same, ten thousand times."""
    run_cases(range(1000, 11_000))


# --------------------------------------------------------------------------------------------------
# Planted faults

@pytest.fixture(scope="module")
def texts():
    """[(target, truth, sampling)], found before a fault is planted."""
    return [(*lively([7, 8], 38, sampling, style=style), sampling)
            for style in ("llama", "gpt2") for sampling in (SAMPLING["greedy"], SAMPLING["T = 1"])]


def suite(texts):
    """A small part of the tests above; each planted fault must fail in it."""
    for target, truth, sampling in texts:
        for make in ARTIFICIAL.values():
            check(target, [7, 8], 30, make([7, 8] + truth, 23), sampling, truth=truth)


def accepts_one_wrong_token(tokens, parent, choice):
    path, out = real_walk(tokens, parent, choice)
    child = next((i for i in range(1, len(tokens)) if parent[i] == path[-1]), None)
    return (path, out) if child is None else (path + [child], out[:-1] + [tokens[child], choice[child]])


def keeps_the_root_only(tokens, parent, choice):
    path, out = real_walk(tokens, parent, choice)
    return path[:1], out


def forgets_the_bonus_token(tokens, parent, choice):
    path, out = real_walk(tokens, parent, choice)
    return (path[:-1], out[:-1]) if len(out) > 1 else (path, out)


def without_ancestors(parent, S=0):
    return torch.cat((torch.ones(len(parent), S), torch.eye(len(parent))), 1).bool()


def sees_everything_before(parent, S=0):
    return torch.ones(len(parent), S + len(parent)).tril(S).bool()


def first_rows(self, rows):
    self.length += len(rows)


def rows_by_node(self, logits, positions):
    return real_choose(self, logits, [positions[0] + i for i in range(len(logits))])


def one_row_a_step(self, logits, positions):
    return real_choose(self, logits, [positions[0]] * len(logits))


def stateful_noise(self, t, V, like):
    self.calls = getattr(self, "calls", 0) + 1
    return real_noise(self, t + 1000 * self.calls, V, like)


class FlatTree(Tree):
    """All nodes but the root at depth 1."""

    def cut(self, depth):
        out = RealTree.cut(self, depth)
        out.depth = [min(1, d) for d in out.depth]
        return out


class DeepTree(Tree):
    """Depth by node index."""

    def cut(self, depth):
        out = RealTree.cut(self, depth)
        out.depth = list(range(len(out)))
        return out


RealTree, real_walk, real_choose, real_noise = Tree, tree.walk, Sampler.choose, Sampler.noise
FAULTS = {
    "a wrong token is accepted": (tree, "walk", accepts_one_wrong_token),
    "the accepted path is one short of its tokens": (tree, "walk", keeps_the_root_only),
    "no ancestors in the mask": (tree, "tree_mask", without_ancestors),
    "siblings in the mask": (tree, "tree_mask", sees_everything_before),
    "a dense prefix is kept": (KVCache, "keep", first_rows),
    "noise by node": (Sampler, "choose", rows_by_node),
    "noise by step": (Sampler, "choose", one_row_a_step),
    "noise by call": (Sampler, "noise", stateful_noise),
}


def test_the_suite_passes_without_a_fault(texts):
    """Else the test below would prove nothing."""
    suite(texts)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, texts, monkeypatch):
    """A check that lets one of these through is no check."""
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        suite(texts)


@pytest.mark.parametrize("wrong", [FlatTree, DeepTree])
def test_planted_positions_are_caught(wrong, texts, monkeypatch):
    """Nodes at wrong positions."""
    monkeypatch.setitem(globals(), "Tree", wrong)
    with pytest.raises(AssertionError):
        suite(texts)


def test_a_planted_loss_of_tau_is_caught(texts, monkeypatch):
    """A walk that stops early is lossless, and only slow: tau must show it."""
    monkeypatch.setattr(tree, "walk", forgets_the_bonus_token)
    suite(texts)
    with pytest.raises(AssertionError):
        test_tau_of_perfect_and_wrong_drafters(4)


@pytest.mark.parametrize("method", METHODS)
def test_a_planted_drafter_state_is_caught(method, monkeypatch):
    """
    A method that misses some of what became text drafts something else:
    the comparison of drafts must see it.
    """
    Drafter = METHODS[method].Drafter
    observe = Drafter.observe
    monkeypatch.setattr(Drafter, "observe", lambda self, tokens, hidden, cache: observe(
        self, tokens[:1] if hasattr(self, "target_forward") else tokens[::-1], hidden.flip(0), cache))
    with pytest.raises(AssertionError, match="another draft"):
        test_drafts_do_not_depend_on_how_the_text_came_about(method, "T = 1")
