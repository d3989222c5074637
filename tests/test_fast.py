"""What makes forwards fast: packed matrices, compilation. No number may change."""
import copy

import pytest
import torch

import model as M
import plumbing.fast
import sample
import train
from conftest import tiny
from model import GPT, GPTConfig
from plumbing.drafters import setup
from plumbing.fast import PackedLinear, ShortRMSNorm, for_decoding
from remote import refused
from tree import complete

EXACT = dict(atol=1e-10, rtol=1e-10)                                   # float64


def ids(V, B, T, seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style, tied", [("llama", True), ("gpt2", False)])
def test_for_decoding_changes_no_number(dtype, style, tied):
    """
    Storage that is really a transposition, a lost bias, tie or weight, a gradient left on;
    400 channels are packed, 16 are not.
    """
    packed = []
    for C in (16, 400):
        torch.manual_seed(0)
        shape = dict(n_embd=C, n_ffn=C + 8, vocab_size=C + 7, n_head=4,
                     n_kv_head=2 if style == "llama" else 4)
        target = GPT(GPTConfig(n_layer=2, block_size=40, style=style, tied=tied, **shape)).to(dtype)
        for name, p in target.named_parameters():
            torch.nn.init.normal_(p, std=0.05) if name.endswith("bias") else None
        x, state = ids(23, 1, 20), {k: v.clone() for k, v in target.state_dict().items()}
        head = M.DraftLMHead(target, torch.arange(0, C + 7, 1 + (C < 384)))
        with torch.no_grad():
            before, drafts = target(x)[0], head(target.hidden(x), target)
        after = for_decoding(target)(x)[0]
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
        exact = dict(atol=tolerance, rtol=tolerance)
        assert torch.allclose(before, after, **exact) and not after.requires_grad and not target.training
        assert torch.allclose(drafts, for_decoding(head)(target.hidden(x), target), **exact)
        again = target.state_dict()
        assert again.keys() == state.keys() and all(torch.equal(v, again[k]) for k, v in state.items())
        assert torch.equal(target.lm_head.weight, target.wte.weight) == tied
        packed.append(isinstance(target.blocks[0].attn.qkv, plumbing.fast.PackedLinear))
        with torch.inference_mode():                                   # rows apart in memory, one row, none
            for rows in (before.new_ones(3, 2 * C)[:, ::2], before.new_ones(C), before.new_ones(1, 0, C)):
                qkv = target.blocks[0].attn.qkv
                assert qkv(rows).shape == (*rows.shape[:-1], qkv.weight.size(0))
    if dtype != torch.bfloat16:                                        # there it depends on the machine
        assert packed == [False, dtype == torch.float32 and torch.backends.mkl.is_available()]


@pytest.mark.parametrize("C", [16, 100, 576, 4096])
def test_short_norms(C):
    """A norm that forgets eps or its weight, or whose rows depend on their neighbours."""
    norm = M.RMSNorm(C, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    short = ShortRMSNorm(norm)
    with torch.inference_mode():
        x = torch.randn(1, 300, C) * torch.logspace(-6, 3, 300)[:, None]
        y = short(x)
        assert torch.allclose(y.double(), copy.deepcopy(norm).double()(x.double()), rtol=1e-5, atol=0)
        for first, n in ((0, 1), (7, 1), (3, 2), (10, 7), (50, 100), (0, 299)):
            assert torch.equal(short(x[:, first:first + n]), y[:, first:first + n])


def test_remembered_states_are_the_targets():
    """
    Catches states of another sequence, more in memory than was allowed, a forward for what is there, and
    decoding with them.
    """
    target, g = tiny(), torch.Generator().manual_seed(0)
    texts = torch.randint(23, (5, 12), generator=g)
    hidden, forwards = target.hidden, []
    target.hidden = lambda x, *a, **o: forwards.append(len(x)) or hidden(x, *a, **o)
    for room, kept, expected in ((1e9, 5, 5), (3.5 * 12 * 16 * 2, 3, 3 + 8), (0, 0, 21)):
        forwards, memory = [], plumbing.fast.HiddenStateCache(target, room)
        orders = [[4, 2], [0, 0, 4], [1, 3], *[[i] for i in range(5)], [3, 1, 0, 2, 4], [2, 0, 1], [4, 3]]
        for order in orders:
            x = texts[order]
            torch.testing.assert_close(memory(x), hidden(x).bfloat16().double(), rtol=0, atol=0)
        assert len(memory.kept) == kept and sum(forwards) == expected
    cache = target.new_cache(12)
    assert torch.equal(memory(texts[:1], cache=cache), hidden(texts[:1], cache=target.new_cache(12)))


@pytest.fixture
def graphs():
    """How many graphs torch.compile has made in this test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


LONG = [pytest.param(method, "aot_eager", marks=pytest.mark.long) for method in train.METHODS]


@pytest.mark.parametrize("method, backend", [("plain", "aot_eager"), ("amphista", "eager"), *LONG])
def test_compiled_text_is_the_same(method, backend, trained, graphs, monkeypatch, capsys):
    """
    Catches forwards that torch.compile gets wrong or does not get,
    and graphs that belong to one length of text.
    """
    # What is traced runs as it is, which saves minutes; eager takes the least,
    # aot_eager also has the writes to a cache as a compiler sees them.
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend=backend, **options))
    args = ["--out", trained, "--max-new-tokens", 30, "--temperature", 1, "--method", method, "--nodes", 4]
    prompts = ["the cat ", "a big dog sees the house and "]
    texts = []
    for prompt in prompts:
        sample.main([str(a) for a in [*args, "--prompt", prompt]])
        texts.append(capsys.readouterr().out)
    assert graphs() == 0
    opt = sample.Options(out=trained, method=method, nodes="4", temperature=1.0, compile=True)
    target, tokenizer, drafter, sampler = setup(opt, train.METHODS)
    made = []
    for text, prompt in zip(texts * 2, prompts * 2):
        ids = tokenizer.start + tokenizer.encode(prompt)
        tokens, _ = complete(target, ids, 30, drafter, sampler, tokenizer.stops)
        assert prompt + tokenizer.decode(tokens) + "\n" == text
        made.append(graphs())
    assert made[0] > 0 and made[1] == made[3], f"{made} graphs after each text"


@pytest.mark.long
def test_compiled_by_inductor(graphs):
    """Catches matrices that only the eager mode can multiply: packed ones are opaque to the compiler."""
    shape = dict(n_layer=1, n_embd=384, n_ffn=384, n_head=2, n_kv_head=2, dtype=torch.float32)
    target, plain = (for_decoding(tiny(**shape), compile) for compile in (True, False))
    assert isinstance(target.blocks[0].attn.qkv, PackedLinear) or not torch.backends.mkl.is_available()
    for n in (1, 3, 5):
        idx, caches = torch.arange(n)[None], (target.new_cache(20), plain.new_cache(20))
        for cache, model in zip(caches, (target, plain)):
            model.hidden(torch.arange(8)[None], cache=cache)
            cache.keep(range(8))
        a, b = (m(idx, cache=cache)[0] for cache, m in zip(caches, (target, plain)))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        mine, other = (cache.read(slice(8 + n)) for cache in caches)
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert 1 <= graphs() <= 3


def test_compile_where_nothing_can_be_compiled(trained, monkeypatch, capsys):
    """Catches a traceback of a hundred lines where there is no C++ compiler."""
    def broken(f, **options):
        raise RuntimeError("No working C++ compiler found\nin: g++")
    monkeypatch.setattr(torch, "compile", broken)
    said = refused(capsys, sample.main, "--out", trained, "--method", "plain", "--compile")
    assert "--compile does not work here (RuntimeError: No working C++ compiler found): leave it out" in said
