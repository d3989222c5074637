"""
bench/: the rivals are as lossless as the methods, with any tree and any text; what each computes is in
a file of its own.
"""
import random

import pytest
import torch

import run as bench
from conftest import tiny
from test_lossless import SAMPLING, SHAPES, Artificial, Guided, any_tree, at_the_ends, check, every_tree
from test_lossless import lively, reference
from tree import Sampler, Tree, generate
from plumbing.shapes import cartesian, chain

CHAINS = {"self_speculative", "prompt_lookup"}


def rival(name, target, shape=None, nodes=16, seed=0):
    """An untrained rival, as it starts (seed 0) or all random. One that drafts chains gets a chain."""
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
    return module.Drafter(net, target, shape=shape, max_nodes=nodes)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", bench.RIVALS)
def test_rivals_are_lossless(name, sampling):
    """
    A rival that changes the text in any way: any tree, both families, as it starts and with random
    weights.
    """
    every_tree(sampling, lambda target, shape, nodes, seed: rival(name, target, shape, nodes, seed))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("name", bench.RIVALS)
def test_rivals_at_the_ends(name, style):
    """
    Prompts of one token and up to the end of the context, small budgets: an index out of range, a token
    too many.
    """
    at_the_ends(style, lambda target, shape, nodes: rival(name, target, shape, nodes, seed=1))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("name", bench.RIVALS)
def test_rivals_in_a_long_run(name, style):
    """
    A fault that takes many steps to show; single precision; the context's end; an end token in an
    accepted run.
    """
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
        shape = chain(4) if name in CHAINS else None                   # a threshold of its own has a history
        make = lambda: rival(name, target, shape, 10, seed=1)
        guided = Guided(make(), Artificial(prompt + truth, 23, seed=2))
        stats = check(target, prompt, new, guided, sampling, truth=truth)
        assert max(stats.accepted) >= 4 and len(guided.drafts) > 4
        for n, draft in guided.drafts.items():
            seen = len(truth) - (n - len(prompt))                      # now all of it is the prompt
            fresh = Guided(make(), Artificial(prompt + truth, 23))
            run = generate(target, (prompt + truth)[:n], seen, fresh, Sampler(**sampling))
            next(run), next(run)
            expect = fresh.drafts[n]
            assert (draft.tokens, draft.parent) == (expect.tokens, expect.parent), f"another draft at {n}"


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
    backwards = lambda self, tokens, hidden, cache: observe(self, tokens[::-1], hidden.flip(0), cache)
    monkeypatch.setattr(Drafter, "observe", backwards)
    with pytest.raises(AssertionError, match="another draft"):
        for sampling in ("greedy", "T = 1"):
            drafts_are_of_the_text(name, sampling)


def random_case(seed):
    """One run of a rival with everything drawn from seed."""
    rng = random.Random(seed)
    style, H = rng.choice(["llama", "gpt2"]), rng.choice([2, 4])
    V, block = rng.choice([2, 3, 23, 60]), rng.randint(6, 40)
    target = tiny(style, seed, scale=rng.choice([6, 20]), n_layer=rng.randint(1, 4), n_head=H,
                  vocab_size=V, block_size=block, n_kv_head=H if style == "gpt2" else rng.choice([1, H]),
                  tied=rng.random() < 0.5, head_dim=rng.choice([0, 6]))
    random_sampling = dict(temperature=rng.choice([0.3, 1.0, 2.0]), top_k=rng.choice([0, 1, 3]),
                           seed=rng.randrange(2**62), top_p=rng.choice([1.0, 0.5, 0.0]),
                           share=rng.random() < 0.8)
    sampling = rng.choice([{}, random_sampling])
    prompt = [rng.randrange(V) for _ in range(rng.choice([1, 2, rng.randint(1, block - 1)]))]
    truth, _ = reference(target, prompt, block, sampling)
    eos = set(rng.sample(truth, min(len(truth), rng.choice([0, 0, 1]))))
    shape = rng.choice([None, None, chain(rng.randint(0, 5)), cartesian(2, 3), any_tree(rng)])
    drafter = rival(rng.choice(list(bench.RIVALS)), target, shape, rng.randint(1, 20), seed % 3)
    if rng.random() < 0.6:
        drafter = Guided(drafter, Artificial(prompt + truth + [0] * 8, V, seed, rng.randint(1, 6)))
    check(target, prompt, rng.choice([1, 3, 45]), drafter, sampling, eos, truth)


MANY = pytest.param(range(1000, 6000), marks=pytest.mark.long)


@pytest.mark.parametrize("seeds", [range(60), MANY], ids=["few", "many"])
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
