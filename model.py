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

Exact    One forward of N tokens and N forwards of one token differ in the last bits, since their sums run in another order, and
         in bfloat16 a near tie then goes the other way. Not here: matrix products run over a number of rows at which a row
         does not depend on its neighbours, and attention adds in an order that does not show (attend_exactly). A target
         without self.exact (plumbing/exact.py sets it) is as fast as can be, and nearly the same.

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
    """A dataclass field that is also an option: a number from low to high (None: what fits), or one of choices; group in -h."""
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
        if self.head_dim == 0 or self.style == "llama" and self.head_dim % 2:          # gpt2 rotates nothing
            raise ValueError(f"a head of {self.head_dim} channels cannot be rotated: its width must be even")


# --------------------------------------------------------------------------------------------------
# Positions and attention

def rotate(x, cos, sin):
    """Rotary positions (RoFormer eq. 34, halves paired as in Llama). x (B, H, T, D); cos, sin (.., T, D), sin signed."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


class Rotary(nn.Module):
    """
    Cos and signed sin for positions, as rotate takes them. Their table is as long as what was asked for; only on a GPU a
    tensor of positions does not make it grow, which would wait for the device: GPT.positions and new_cache reserve room.
    """

    def __init__(self, freq, most, scale=1.0):  # (D/2,) frequencies; positions 0 .. most - 1
        super().__init__()
        self.freq, self.most, self.scale = freq.double(), most, scale  # no buffers: they stay float64
        self.register_buffer("table", torch.empty(2, 0, 2 * len(freq), device=freq.device), persistent=False)

    def reserve(self, n):
        """Room for positions 0 .. n - 1."""
        if n <= self.table.size(1):
            return
        assert n <= self.most, f"position {n - 1} lies beyond a context of {self.most}"
        with torch.inference_mode(False):                              # training may use the table as well
            angle = torch.outer(torch.arange(min(2 * n, self.most), device=self.freq.device), self.freq)
            cos, sin = (self.scale * angle.cos()).float(), (self.scale * angle.sin()).float()
            # see rotate: sin is signed
            table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
            self.table = table.to(self.table)

    def forward(self, at):  # (T,) or (B, T) positions, or a slice of them -> cos and sin (.., T, D)
        if isinstance(at, slice):
            self.reserve(at.stop)
        elif at.device.type == "cpu" and at.numel():
            self.reserve(int(at.max()) + 1)
        return self.table[0][at], self.table[1][at]


def frequencies(cfg, D=None):
    """(D/2,) rotary frequencies for heads of width D (None: the model's)."""
    D = D or cfg.head_dim
    return cfg.rope_theta ** (-torch.arange(0, D, 2).double() / D)


def additive(mask, dtype):
    """A mask says what a row may look at: bool, True = may look -> what is added to scores, 0 or -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def per_query(mask, group):
    """A mask's rows, once for each query of a group."""
    return mask.repeat(*[1] * (mask.dim() - 2), group, 1)


def attend(q, k, v, mask=None, causal=False):
    """
    Softmax attention with grouped queries. q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D).

    mask    (T, S) additive, or (H/G * T, S) if it was repeated already; None = every row may look at everything
    causal  row i may look at rows 0 .. i only (S = T; a mask says so itself)

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


PAGE = 256                                                           # positions of a page, see attend_exactly


@dataclass
class Exact:
    """How many rows make a row's result independent of its neighbours', bit for bit; measured in plumbing/exact.py."""
    product: int                                                 # a matrix product's rows: a multiple of this
    attention: int = 0                                      # attention's over whole pages; 0 = all in float64


@dataclass
class Part:
    """Rows of an exact forward that stand in one page: they look at the text before that page, and at keys text .. end by mask."""
    rows: slice
    text: int
    end: int
    mask: torch.Tensor | None                                    # (H/G * rows, end - text), additive, float64


def attend_exactly(q, k, v, parts, exact):
    """
    attend, one text at a time, with sums that are the same in every tree, in plain decoding and in a prompt read at once:

        text    0 .. 255 | 256 .. 511 | 512 .. 515   tree         rows at positions 516, 517, ... of the third page
                whole pages, in q's     their own page,           joined by the weights of both parts, exp(logsumexp)
                dtype: the same keys,   float64: rounded at
                in the same order,      the end, the order
                for every such row      does not show

    q (1, H, T, D), k and v (1, G, S, D) -> (1, H, T, D).
    """
    B, H, T, D = q.shape
    out = []
    for part in parts:
        x = q[:, :, part.rows].reshape(B, k.size(1), -1, D)                            # (1, G, H/G * rows, D)
        page = x.double(), k[:, :, part.text:part.end].double(), v[:, :, part.text:part.end].double()
        if not part.text:
            y = F.scaled_dot_product_attention(*page, attn_mask=part.mask)
        else:
            flash, n = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, x.size(2)
            y, weight = flash(*page, attn_mask=part.mask)
            x = F.pad(x, (0, 0, 0, -n % exact.attention))
            before, weight_before = flash(x, k[:, :, :part.text], v[:, :, :part.text])
            share = torch.sigmoid(weight - weight_before[:, :, :n]).unsqueeze(-1)
            y = torch.lerp(before[:, :, :n].double(), y, share)
        out.append(y.to(q.dtype).view(B, H, -1, D))
    return out[0] if len(out) == 1 else torch.cat(out, 2)


# --------------------------------------------------------------------------------------------------
# Modules

class Attention(nn.Module):
    """Self-attention; mask and causal as in attend, or parts of an exact forward."""

    def __init__(self, cfg):
        super().__init__()
        H, G, D = self.heads = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        bias = cfg.style == "gpt2"
        self.qkv = nn.Linear(cfg.n_embd, (H + 2 * G) * D, bias=bias or cfg.qkv_bias)
        self.out = nn.Linear(H * D, cfg.n_embd, bias=bias)

    def forward(self, x, rope=None, mask=None, causal=False, cache=None, layer=0, exact=None):  # (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        H, G, D = self.heads
        qkv = self.qkv(x).view(B, T, H + 2 * G, D).transpose(1, 2)                       # (B, H+2G, T, D)
        qk, v = qkv[:, :H + G], qkv[:, H + G:]
        if rope is not None:
            qk = rotate(qk, *rope)
        q, k = qk[:, :H], qk[:, H:]
        if exact is not None:
            real, parts, how = exact                             # rows from real on only fill up the products
            k, v = cache.write(layer, k[:, :, :real], v[:, :, :real])
            y = attend_exactly(q, k, v, parts, how)
        else:
            if cache is not None:
                k, v = cache.write(layer, k, v)                                          # (B, G, S+T, D)
            y = attend(q, k, v, mask, causal)
        return self.out(y.transpose(1, 2).reshape(B, T, H * D))


class MLP(nn.Module):
    """SwiGLU (llama) or GELU (gpt2)."""
    wide = False                                                   # activation in float64, for exact decoding

    def __init__(self, cfg):
        super().__init__()
        self.swiglu = cfg.style == "llama"
        # gate and up in one
        self.up = nn.Linear(cfg.n_embd, cfg.n_ffn * (2 if self.swiglu else 1), bias=not self.swiglu)
        self.down = nn.Linear(cfg.n_ffn, cfg.n_embd, bias=not self.swiglu)

    def forward(self, x):  # (B, T, C) -> (B, T, C)
        x = self.up(x)
        gate, up = x.chunk(2, dim=-1) if self.swiglu else (x, None)
        a = gate.double() if self.wide else gate
        a = F.silu(a) if self.swiglu else F.gelu(a, approximate="tanh")
        a = a.to(gate.dtype)
        return self.down(a * up if self.swiglu else a)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):                              # under autocast the weight follows x: one fused kernel
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(cfg):
    return RMSNorm(cfg.n_embd, eps=cfg.eps) if cfg.style == "llama" else nn.LayerNorm(cfg.n_embd, eps=cfg.eps)


class Block(nn.Module):
    """One pre-norm transformer layer; how is what Attention takes beside x."""

    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attn = make_norm(cfg), Attention(cfg)
        self.norm2, self.mlp = make_norm(cfg), MLP(cfg)

    def forward(self, x, *how, **more):  # (B, T, C) -> (B, T, C)
        x = x + self.attn(self.norm1(x), *how, **more)
        return x + self.mlp(self.norm2(x))


class KVCache:
    """
    Keys (after rotation) and values, preallocated: for every layer a tensor (B, G, max_len, D) of its own, in the lists k
    and v (in one large tensor torch.compile would copy the whole for every row written).

    Rows [0, length) belong to the text. A forward of T tokens writes rows [length, length + T) and does not move
    length: keep(rows) does, so rejected drafts vanish by not being kept.
    """

    def __init__(self, cfg, max_len, B=1, device=None, dtype=None, n_layer=None):
        new = lambda: torch.zeros(B, cfg.n_kv_head, max_len, cfg.head_dim, device=device, dtype=dtype)
        self.k, self.v = ([new() for _ in range(n_layer or cfg.n_layer)] for _ in range(2))
        self.max_len, self.length = max_len, 0

    def write(self, layer, k, v):
        """Put k, v (B, G, T, D) behind the text; return all, (B, G, length+T, D). Raises ValueError if they do not fit."""
        end = self.length + k.size(2)
        if end > self.max_len:
            raise ValueError(f"KV cache is full: {self.length} rows + {k.size(2)} new > {self.max_len}")
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def read(self, at):
        """Keys and values of all layers at a slice of positions, a copy: (n_layer, B, G, T, D) each."""
        return tuple(torch.stack([x[:, :, at] for x in layers]) for layers in (self.k, self.v))

    def keep(self, path):
        """
        Of the rows last written keep these as text, in this order; the others, rejected drafts, are gone. path: ascending
        offsets from length, e.g. the accepted nodes [0, 2, 5] of a tree.
        """
        n, first = len(path), 0
        while first < n and path[first] == first:                      # a prefix lies in its place already
            first += 1
        if first < n:
            src = torch.tensor(path[first:], device=self.k[0].device) + self.length
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
    compiled = ("layers",)                                             # what --compile compiles
    exact, exactness = None, "not exact"                    # an Exact: decode bit for bit alike, and in words
    seconds = None                                 # (fixed, slope): a forward of n rows takes fixed + slope n

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.scaled = cfg, False                    # scaled: rotary frequencies that cfg cannot say
        C, V = cfg.n_embd, cfg.vocab_size
        self.wte = nn.Embedding(V, C)
        self.wpe = nn.Embedding(cfg.block_size, C) if cfg.style == "gpt2" else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = make_norm(cfg)
        self.lm_head = nn.Linear(C, V, bias=False)
        if cfg.tied:
            self.lm_head.weight = self.wte.weight
        self.rotary = Rotary(frequencies(cfg), cfg.block_size) if cfg.style == "llama" else None
        for name, p in self.named_parameters():
            if p.dim() > 1:                                      # GPT-2's: residual outputs shrink with depth
                shrink = math.sqrt(2 * cfg.n_layer) if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(p, std=0.02 / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def embed(self, idx, pos):  # (B, T), (T,) or (B, T) -> (B, T, C)
        x = self.wte(idx)
        return x if self.wpe is None else x + self.wpe(pos)

    def rope(self, pos):
        """cos and sin for positions pos (T,) or (B, T), ready to rotate (B, H, T, D); None with learned positions."""
        if self.rotary is None:
            return None
        cos, sin = self.rotary(pos)
        return (cos, sin) if pos.dim() == 1 else (cos[:, None], sin[:, None])

    def reserve(self, n):
        """Positions below n will be asked for."""
        if self.rotary is not None:
            self.rotary.reserve(min(n, self.cfg.block_size))

    def positions(self, T, cache=None):
        """(T,) the absolute positions of the next T tokens."""
        start = cache.length if cache is not None else 0
        assert start + T <= self.cfg.block_size, f"{start} + {T} tokens do not fit a context of {self.cfg.block_size}"
        self.reserve(start + T)
        return torch.arange(start, start + T, device=self.wte.weight.device)

    def attention_mask(self, T, mask, cache, dtype):
        """
        Who may look at whom among T new rows behind S cached ones -> (mask, causal) as attend takes them. Every row looks at
        the cached ones and at new ones up to itself; mask (.., T, S+T) bool, True = may look, says which of those (None = all).
        """
        S = cache.length if cache is not None else 0
        if mask is not None:
            return additive(mask, dtype), False
        if T == 1:
            return None, False                                       # the only new row may look at everything
        if S == 0:
            return None, True
        return additive(torch.ones(T, S + T, dtype=torch.bool, device=self.wte.weight.device).tril(S), dtype), False

    def run(self, x, pos, mask=None, cache=None, start=0, stop=None):
        """Layers start .. stop-1 on x (B, T, C) -> (B, T, C). pos as in embed; mask as in attention_mask."""
        T, group = x.size(1), self.cfg.n_head // self.cfg.n_kv_head
        layers = range(start, self.cfg.n_layer if stop is None else stop)
        if self.exact and cache is not None and x.size(0) == 1:
            fill = -T % self.exact.product                        # copies of the last row, which nobody reads
            if fill:
                x = torch.cat((x, x[:, -1:].expand(-1, fill, -1)), 1)
                pos = torch.cat((pos, pos[-1:].expand(fill)))
            parts = self.parts(T, x.size(1), mask, cache.length, group)
            how = dict(rope=self.rope(pos), cache=cache, exact=(T, parts, self.exact))
            for i in layers:
                x = self.blocks[i](x, layer=i, **how)
            return x[:, :T]
        mask, causal = self.attention_mask(T, mask, cache, x.dtype)
        if mask is not None and group > 1:
            mask = per_query(mask, group)                              # once, not in every layer
        through = partial(GPT.layers, self) if causal else self.layers   # a prompt is not worth a compilation
        return through(x, self.rope(pos), mask, causal, cache, layers.start, layers.stop)

    def layers(self, x, rope, mask, causal, cache, start, stop):
        for i in range(start, stop):
            x = self.blocks[i](x, rope, mask, causal, cache, i)
        return x

    def parts(self, T, rows, mask, S, group):
        """T new rows behind S cached ones, filled up to rows -> the Parts of an exact forward. mask as in attention_mask."""
        page = PAGE if self.exact.attention else rows + S              # one page holds everything
        if mask is None:                                               # a text: each page of it is a part
            ends = [end - S for end in range((S // page + 1) * page, S + T, page)] + [rows]
            looks = torch.ones(rows, S + T, dtype=torch.bool, device=self.wte.weight.device).tril(S) if T > 1 else None
        else:                                                        # a tree, which stays in its page (reach)
            ends, looks = [rows], torch.cat((mask, mask[-1:].expand(rows - T, -1)))
        out, first = [], 0
        for last in ends:
            text, end = (S + first) // page * page, S + min(last, T)
            part = None if looks is None else per_query(additive(looks[first:last, text:end], torch.float64), group)
            out.append(Part(slice(first, last), text, end, part))
            first = last
        return out

    def reach(self, S):
        """How deep a tree behind S rows of text may be: its nodes stand in one page with its root, at position S."""
        return PAGE - 1 - S % PAGE if self.exact and self.exact.attention else self.cfg.block_size

    def logits(self, hidden):
        """lm_head for decoding, (N, C) -> (N, V): exact as run is."""
        fill = -len(hidden) % self.exact.product if self.exact else 0
        return self.lm_head(F.pad(hidden, (0, 0, 0, fill)))[:len(hidden)] if fill else self.lm_head(hidden)

    def hidden(self, idx, pos=None, mask=None, cache=None):
        """The last hidden state after the final norm, what lm_head reads. (B, T) -> (B, T, C)"""
        pos = self.positions(idx.size(1), cache) if pos is None else pos
        return self.norm(self.run(self.embed(idx, pos), pos, mask, cache))

    def forward(self, idx, pos=None, mask=None, cache=None):
        """
        idx   (B, T) tokens
        pos   (T,) or (B, T) absolute positions; None = they follow the cache
        mask  (T, S+T) bool, True = may look; a row looks at nothing behind itself in any case; None = at all before it
        cache KVCache with S rows of text; the new rows are written behind them, see KVCache.keep

        Returns logits (B, T, V) and hidden (B, T, C).
        """
        hidden = self.hidden(idx, pos, mask, cache)
        return self.lm_head(hidden), hidden

    def new_cache(self, max_len, B=1):
        """An empty cache for this model, on its device and in its dtype."""
        self.reserve(max_len)
        return KVCache(self.cfg, max_len, B, self.wte.weight.device, self.wte.weight.dtype)


class DraftHead(nn.Module):
    """
    What a drafter ends in: the target's frozen lm_head, or only its rows for a draft vocabulary of N tokens, ids (N,). The
    target still verifies over all V tokens, so the text stays the same; a token outside is merely never drafted.
    """

    def __init__(self, target, ids=None):
        super().__init__()
        matrix = row_of = None
        if ids is not None:
            w = target.lm_head.weight.detach()                     # only now: a packed one is unpacked for it
            row_of = torch.full((len(w),), -100).scatter_(0, ids.cpu(), torch.arange(len(ids))).to(w.device)
            ids = ids.to(w.device)
            matrix = w[ids]                                            # (N, C), a copy
        self.register_buffer("ids", ids)                               # saved with the drafter; None is not
        self.register_buffer("lm_rows", matrix, persistent=False)      # lm_head's for ids, or None
        # (V,) token -> its row there, -100 if it has none
        self.register_buffer("row_of", row_of, persistent=False)

    def forward(self, z, target):  # (.., C) -> (.., V), or (.., N) logits for ids
        if self.ids is None:
            return target.lm_head(z)
        return F.linear(z, self.lm_rows) if torch.is_tensor(self.lm_rows) else self.lm_rows(z)

    def matrix(self, target):
        """(V or N, C), not to be written to."""
        return target.lm_head.weight.detach() if self.ids is None else self.lm_rows

    def draft_ids(self, x):
        """Tokens -> what the logits call them; -100, which cross_entropy ignores and no guess equals, outside."""
        return x if self.ids is None else self.row_of[x]

    def all_tokens(self, logits):
        """Logits (.., N) for the draft vocabulary -> (.., V) for all tokens, -inf outside."""
        if self.ids is None:
            return logits
        return logits.new_full((*logits.shape[:-1], len(self.row_of)), -math.inf).index_copy_(-1, self.ids, logits)
