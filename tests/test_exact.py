"""Bit for bit: a node's logits are those of decoding its path token by token, beside any neighbours."""
import functools
import os
import random
import sys

import pytest
import torch

import model
import plumbing.exact
import plumbing.fast
from conftest import tiny
from model import PAGE, Exact
from plumbing.exact import find_exact_rows, fewest, inexact, make_exact
from plumbing.fast import for_decoding, pick_threads
from plumbing.options import pick_dtype
from train import METHODS
from tree import Sampler, Tree, complete, tree_mask

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bench"))
import eagle2  # noqa: E402
import prompt_lookup  # noqa: E402
import self_speculative  # noqa: E402

RIVALS = {"eagle2": eagle2, "self_speculative": self_speculative, "prompt_lookup": prompt_lookup}
FAMILIES = {
    "llama, grouped": {}, "llama, not grouped": dict(n_kv_head=4), "llama, untied": dict(tied=False),
    "llama, one group": dict(n_kv_head=1, n_embd=64, n_ffn=160), "gpt2": dict(style="gpt2"),
    "gpt2, odd widths": dict(style="gpt2", n_embd=36, n_ffn=50, n_head=4), "biases": dict(qkv_bias=True),
}


def exact_target(dtype=torch.bfloat16, **shape):
    """A tiny random target, ready to decode exactly."""
    target = for_decoding(tiny(dtype=dtype, **{"block_size": 2 * PAGE, **shape}))
    target.exact = find_exact_rows(target)
    assert target.exact is not None
    return target


def random_tree(rng, V, most):
    N = rng.randint(1, most)
    parent = [-1] + [rng.randrange(max(0, i - 5), i) for i in range(1, N)]
    return Tree([rng.randrange(V) for _ in range(N)], parent)


def path_to(tree, i):
    path = [i]
    while path[0]:
        path.insert(0, tree.parent[path[0]])
    return path


def feed(target, cache, tokens):
    """Tokens behind the text of a cache, one forward each -> their logits (T, V); they are text now."""
    out = []
    for token in tokens:
        hidden = target.hidden(torch.tensor([[token]]), cache=cache)
        cache.keep([0])
        out.append(target.logits(hidden[0]))
    return torch.cat(out)


@torch.inference_mode()
def differences(target, n_prompt, seed=0, steps=3, most=12):
    """
    A prompt read at once, then trees with rejected nodes; beside it the same text read in two parts, then
    token by token. -> how many rows of logits differ, of how many.
    """
    rng, V = random.Random(seed), target.cfg.vocab_size
    prompt, wrong, all_rows = [rng.randrange(V) for _ in range(n_prompt)], 0, 0
    whole, single = target.new_cache(n_prompt + 5 * most), target.new_cache(n_prompt + 5 * most)
    hidden = target.hidden(torch.tensor([prompt]), cache=whole)
    whole.keep(range(n_prompt))
    cut = rng.randrange(n_prompt)
    for part in (prompt[:cut], prompt[cut:]):
        if part:
            again = target.hidden(torch.tensor([part]), cache=single)
            single.keep(range(len(part)))
    wrong, all_rows = int(not torch.equal(target.logits(hidden[0, -1:]), target.logits(again[0, -1:]))), 1
    for _ in range(steps):
        S = whole.length
        tree = random_tree(rng, V, most).cut(target.reach(S))
        pos, mask = torch.tensor(tree.depth) + S, tree_mask(tree.parent, S)
        logits = target.logits(target.hidden(torch.tensor([tree.tokens]), pos, mask, whole)[0])
        for leaf in rng.sample(range(len(tree)), min(4, len(tree))):
            path = path_to(tree, leaf)
            alone = feed(target, single, [tree.tokens[i] for i in path])
            single.crop(S)
            wrong += sum(not torch.equal(a, logits[i]) for a, i in zip(alone, path))
            all_rows += len(path)
        whole.keep(path)                                               # the last leaf's path is accepted
        feed(target, single, [tree.tokens[i] for i in path])
    return wrong, all_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_nodes_logits_are_those_of_its_path(family, dtype):
    """Any sum that runs in another order beside neighbours, over a page's end, or after another prompt."""
    target = exact_target(dtype, **FAMILIES[family])
    for n in (1, 7, PAGE - 3, PAGE, 300) if family == "llama, grouped" else (1, PAGE - 3, 300):
        wrong, rows = differences(target, n, seed=n)
        assert not wrong, f"{wrong} of {rows} rows differ after a prompt of {n}"


def test_the_check_can_fail():
    """Without what makes it exact the check above must find differences: each part is needed."""
    target = exact_target(torch.float32)
    with inexact(target):
        assert differences(target, 40)[0]
    wide = exact_target(torch.float32, n_embd=64, n_ffn=160)
    wide.exact = Exact(1, wide.exact.attention)                        # a row that is not filled up
    assert wide.exact.product == find_exact_rows(wide).product or differences(wide, 40)[0]


def test_sums_in_the_cheap_dtype_are_noticed(monkeypatch):
    """The page at hand summed in the model's dtype: the order shows."""
    target = exact_target(torch.float32)
    monkeypatch.setattr(torch.Tensor, "double", lambda self: self)
    cheap = lambda mask, dtype: torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    monkeypatch.setattr(model, "additive", cheap)
    assert sum(differences(target, n, seed=n)[0] for n in (40, 100, 300))


def test_a_stranger_in_the_mask_is_noticed(monkeypatch):
    """One node that sees one sibling."""
    target, real = exact_target(), tree_mask

    def leaky(parent, S=0):
        mask = real(parent, S)
        if len(parent) > 2:
            mask[-1, S + 1] = True
        return mask
    monkeypatch.setattr(sys.modules[__name__], "tree_mask", leaky)
    assert sum(differences(target, 40, seed=seed)[0] for seed in range(5))


def drafter_of(name, target, seed=1):
    """An untrained drafter, its parameters shaken."""
    torch.manual_seed(seed)
    module = (METHODS | RIVALS)[name]
    net = module.Net(module.Config(), target).to(target.wte.weight.dtype)
    for p in net.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return module.Drafter(net, target, None, 9)


@functools.cache
def plain_texts(dtype):
    """A target, and what plain decoding writes: (prompt, T, text), the last over the end of a page."""
    target, rng, texts = exact_target(dtype, n_layer=4), random.Random(0), []
    for T, n in ((0.0, 17), (0.8, 1), (1.0, 30), (1.0, PAGE - 20)):
        prompt = [rng.randrange(23) for _ in range(n)]
        texts.append((prompt, T, complete(target, prompt, 40, None, Sampler(T, seed=1))[0]))
    return target, texts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*METHODS, *RIVALS])
def test_texts_are_plain_decodings(name, dtype):
    """A method whose forward has other rows than the loop's, such as pseudo rows that are not filled up."""
    target, texts = plain_texts(dtype)
    drafter = drafter_of(name, target)
    for prompt, T, plain in texts:
        assert complete(target, prompt, 40, drafter, Sampler(T, seed=1))[0] == plain


@pytest.mark.parametrize("groups", [0, 2, 3])
def test_pseudo_rows_count_as_rows(groups):
    """Hidden Transfer's verifying forward with groups riding in it."""
    target = exact_target(n_layer=4)
    module = METHODS["hidden_transfer"]
    drafter = module.Drafter(module.Net(module.Config(), target).bfloat16(), target, None, 8, groups=groups)
    for seed in range(4):
        plain = complete(target, [seed, 1, 2], 50, None, Sampler(1.0, seed=seed))[0]
        assert complete(target, [seed, 1, 2], 50, drafter, Sampler(1.0, seed=seed))[0] == plain


def test_what_holds_is_said(monkeypatch):
    """A promise where none is kept, and none where it is."""
    target = exact_target()
    make_exact(target, 8)
    assert target.exact and target.exactness.startswith("exact")
    make_exact(target, 8, "--no-exact")
    assert target.exact is None and target.exactness == "not exact: --no-exact"
    make_exact(target, 8, "--compile")
    assert target.exact is None and "--compile" in target.exactness
    monkeypatch.setattr(plumbing.exact, "find_exact_rows", lambda target: None)
    make_exact(target, 8)
    assert target.exact is None and "no number of rows" in target.exactness
    monkeypatch.setattr(plumbing.exact, "find_exact_rows", lambda target: Exact(4, 4))
    monkeypatch.setattr(plumbing.exact, "step_seconds", lambda target, nodes: {1: 1.0, 4: 1.8}[nodes])
    make_exact(target, 8)
    assert target.exact == Exact(4, 4), "in bfloat16 it is worth it"
    target = exact_target(torch.float32)
    make_exact(target, 8)
    assert target.exact is None and "4 rows cost 1.8 times one" in target.exactness


def test_fewest_rows():
    """A number at which only some multiples agree."""
    rounds = lambda n: torch.tensor([n % 4 == 0 or n == 0])       # as a kernel that takes four rows at a time
    assert fewest([rounds]) == 4 and fewest([lambda n: torch.tensor([0])]) == 1
    assert fewest([lambda n: torch.tensor([n])]) == 0


@pytest.mark.parametrize("one, all_of_them, wanted, threads", [
    (1.1, 1.0, 0, 1), (1.3, 1.0, 0, 2), (1.3, 1.0, 1, 1)])
def test_as_many_threads_as_pay(one, all_of_them, wanted, threads, monkeypatch):
    """Two threads that bring nothing and wait for each other beside other work; an option that is ignored."""
    now = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: now.__setitem__(0, n))
    monkeypatch.setattr(plumbing.fast, "step_seconds", lambda *a: one if now[0] == 1 else all_of_them)
    pick_threads(tiny(), wanted)
    assert now[0] == threads


def test_the_dtype_follows_the_processor(monkeypatch):
    """float32 where bfloat16 is twice as fast, bfloat16 where it is emulated, a choice that is not said."""
    for name, has in (("_is_avx512_bf16_supported", False), ("_is_amx_tile_supported", False)):
        monkeypatch.setattr(torch.cpu, name, lambda has=has: has, raising=False)
    assert pick_dtype("auto", "cpu")[0] == torch.float32 and "no bfloat16" in pick_dtype("auto", "cpu")[1]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert pick_dtype("auto", "cpu")[0] == pick_dtype("auto", "cuda:0")[0] == torch.bfloat16
    assert pick_dtype("float16", "cpu") == (torch.float16, "as asked for")


@pytest.mark.long
def test_five_thousand_texts():
    """In bfloat16 an inexact text of a hundred tokens had even odds to part; of 5,000 none may."""
    rng, texts = random.Random(0), 0
    for family in FAMILIES:
        target = exact_target(n_layer=3, **FAMILIES[family])
        drafters = [drafter_of(name, target, seed) for seed, name in enumerate([*METHODS, *RIVALS])]
        while texts < 5000 * (list(FAMILIES).index(family) + 1) / len(FAMILIES):
            sampler = dict(temperature=rng.choice([0.0, 0.8, 1.0]), seed=texts)
            prompt = [rng.randrange(23) for _ in range(rng.randint(1, 40))]
            plain = complete(target, prompt, 24, None, Sampler(**sampler))[0]
            for drafter in drafters:
                assert complete(target, prompt, 24, drafter, Sampler(**sampler))[0] == plain, (family, texts)
                texts += 1
