"""What makes forwards fast: packed matrices, compilation. No number may change."""
import pytest
import torch

import model as M
import plumbing.fast
from conftest import tiny
from model import GPT, GPTConfig
from plumbing.fast import for_decoding

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
        head = M.DraftHead(target, torch.arange(0, C + 7, 1 + (C < 384)))
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
        forwards, memory = [], plumbing.fast.StateCache(target, room)
        for order in ([4, 2], [0, 0, 4], [1, 3], *[[i] for i in range(5)], [3, 1, 0, 2, 4], [2, 0, 1], [4, 3]):
            x = texts[order]
            torch.testing.assert_close(memory(x), hidden(x).bfloat16().double(), rtol=0, atol=0)
        assert len(memory.kept) == kept and sum(forwards) == expected
    cache = target.new_cache(12)
    assert torch.equal(memory(texts[:1], cache=cache), hidden(texts[:1], cache=target.new_cache(12)))
