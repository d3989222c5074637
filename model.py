r"""
The target: a small GPT in two dialects, its KV cache, and what a drafter ends in.

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
import math
import sys
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F


# --------------------------------------------------------------------------------------------------
# Configuration

def arg(default, help, low=0, choices=None, high=None, group=None):
    """A dataclass field that is also an option: a number from low to high (None: what fits), or one of choices. group: in -h."""
    high = high or (2**31 - 1 if isinstance(default, int) else sys.float_info.max)
    return field(default=default, metadata=dict(help=help, low=low, choices=choices, high=high, group=group))


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


# --------------------------------------------------------------------------------------------------
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
