r"""
The target: a small GPT in two dialects, its KV cache, and what a drafter ends in.

Idea     One block serves two families, so that one code path decodes them all:
         llama   RMSNorm, rotary positions, SwiGLU, grouped-query attention     (ours; Llama, SmolLM2, ...)
         gpt2    LayerNorm, learned positions, GELU, biases                     (gpt2, gpt2-medium, ...)

             tokens --embed--> x --run(0, L)--> x --norm--> hidden --lm_head--> logits
                                    |    ^
                                    v    |  keys after rotation, values
                                   KVCache: rows [0, length) are the text; a forward writes behind them,
                                            and keep says which of the new rows became text

Exact    One forward of N tokens and N forwards of one token differ in the last bits, since their sums run in
         another order, and in bfloat16 a near tie then goes the other way. Not here: matrix products run over
         a number of rows at which no row depends on its neighbours, and attention adds in an order that does
         not show (attend_exactly). plumbing/exact.py tries at load how many rows it takes, in each dtype;
         in float32 it is left out where it costs a step more than a quarter: ties of 1e-5 may then flip.
Shapes   B batch, T new, S cached tokens, C channels, V vocabulary, H query, G key/value heads of width D
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
    """A dataclass field that is an option: a number from low to high, or one of choices; group: in -h."""
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
        if self.head_dim == 0 or self.style == "llama" and self.head_dim % 2:  # gpt2 rotates nothing
            raise ValueError(f"a head of {self.head_dim} channels cannot be rotated: its width must be even")


# --------------------------------------------------------------------------------------------------
# Positions and attention

def rotate(x, cos, sin):
    """Rotary positions (RoFormer eq. 34, halves paired as in Llama). x (B, H, T, D); cos, sin (.., T, D)."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


class Rotary(nn.Module):
    """
    Cos and signed sin for positions, as rotate takes them. Their table grows with what is asked for. On a
    GPU to look at positions would mean to wait for them: there GPT.positions and new_cache reserve room.
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
            self.table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(self.table)

    def forward(self, at):  # (T,) or (B, T) positions, or a slice of them -> cos and sin (.., T, D)
        if isinstance(at, slice):
            self.reserve(at.stop)
        elif at.device.type == "cpu" and at.numel():
            self.reserve(int(at.max()) + 1)
        return self.table[0][at], self.table[1][at]


def frequencies(cfg):
    """(D/2,) rotary frequencies."""
    return cfg.rope_theta ** (-torch.arange(0, cfg.head_dim, 2).double() / cfg.head_dim)


def additive(mask, dtype):
    """A bool mask, True = may look -> what is added to scores, 0 or -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def per_query(mask, group):
    """(.., T, S) -> (.., group * T, S): a mask's rows, once for each query of a group."""
    return mask.repeat(*[1] * (mask.dim() - 2), group, 1)


def attend(q, k, v, mask=None, causal=False):
    """
    Softmax attention, q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D). causal: row i looks at rows 0
    .. i. Else at all S rows, or where mask (T, S), additive, lets it (it may have gone through per_query).
    Unless causal, the queries of a group are rows side by side: keys and values are read once, not copied.
    """
    B, H, T, D = q.shape
    G = k.size(1)
    if G == H or causal:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=G != H)
    if mask is not None and mask.size(-2) == T:
        mask = per_query(mask, H // G)                                 # (.., H/G * T, S)
    y = F.scaled_dot_product_attention(q.reshape(B, G, H // G * T, D), k, v, attn_mask=mask)
    return y.reshape(B, H, T, D)


PAGE = 256                                                             # positions; see attend_exactly


@dataclass
class Exact:
    """How many rows make a row's result independent of its neighbours: plumbing/exact.py has tried it."""
    product: int                                                    # a product's rows: a multiple of this
    attention: int = 0                                              # attention's; 0 = all of it in float64


def attend_exactly(q, k, v, parts, exact):
    """
    attend for one text, q (1, H, T, D), k and v (1, G, S, D) -> (1, H, T, D), with sums that are the same
    in every tree, in plain decoding and in a prompt read at once. What rows at 516, 517, .. see:

        text    0 .. 255 | 256 .. 511 | 512 .. 515   tree
                whole pages, in q's     their own page,           joined by the weights of both,
                dtype: the same keys,   float64: rounded at       exp(logsumexp)
                in the same order,      the end, the order
                for every such row      does not show

    parts: for each page (rows, paged, end, mask), a slice of rows that look at keys 0 .. paged - 1, and by
    mask (H/G * rows, end - paged), additive, float64, or None at keys paged .. end - 1 of their page.
    """
    B, H, T, D = q.shape
    out = []
    for rows, paged, end, mask in parts:
        x = q[:, :, rows].reshape(B, k.size(1), -1, D)                 # (1, G, H/G * rows, D)
        page = x.double(), k[:, :, paged:end].double(), v[:, :, paged:end].double()
        if not paged:
            y = F.scaled_dot_product_attention(*page, attn_mask=mask)
        else:
            flash, n = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, x.size(2)
            y, weight = flash(*page, attn_mask=mask)
            x = F.pad(x, (0, 0, 0, -n % exact.attention))
            before, weight_before = flash(x, k[:, :, :paged], v[:, :, :paged])
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

    def forward(self, x, rope=None, mask=None, causal=False, cache=None, layer=0, exact=None):
        B, T, C = x.shape                                              # -> (B, T, C)
        H, G, D = self.heads
        qkv = self.qkv(x).view(B, T, H + 2 * G, D).transpose(1, 2)     # (B, H+2G, T, D)
        qk, v = qkv[:, :H + G], qkv[:, H + G:]
        if rope is not None:
            qk = rotate(qk, *rope)
        q, k = qk[:, :H], qk[:, H:]
        real, parts, how = exact or (T, None, None)                    # rows from real on fill up: not kept
        if cache is not None:
            k, v = cache.write(layer, k[:, :, :real], v[:, :, :real])  # (B, G, S+T, D)
        y = attend_exactly(q, k, v, parts, how) if exact else attend(q, k, v, mask, causal)
        return self.out(y.transpose(1, 2).reshape(B, T, H * D))


class MLP(nn.Module):
    """SwiGLU (llama) or GELU (gpt2)."""
    wide = False                                                       # exact: activation in float64

    def __init__(self, cfg):
        super().__init__()
        self.swiglu = cfg.style == "llama"
        width = cfg.n_ffn * (2 if self.swiglu else 1)                  # gate and up in one product
        self.up = nn.Linear(cfg.n_embd, width, bias=not self.swiglu)
        self.down = nn.Linear(cfg.n_ffn, cfg.n_embd, bias=not self.swiglu)

    def forward(self, x):  # (B, T, C) -> (B, T, C)
        x = self.up(x)
        gate, up = x.chunk(2, dim=-1) if self.swiglu else (x, None)
        a = gate.double() if self.wide else gate
        a = (F.silu(a) if self.swiglu else F.gelu(a, approximate="tanh")).to(gate.dtype)
        return self.down(a * up if self.swiglu else a)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):  # under autocast the weight follows x: one fused kernel
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(cfg):
    return RMSNorm(cfg.n_embd, eps=cfg.eps) if cfg.style == "llama" else nn.LayerNorm(cfg.n_embd, eps=cfg.eps)


class Block(nn.Module):
    """One pre-norm transformer layer; it takes what Attention takes."""

    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attn = make_norm(cfg), Attention(cfg)
        self.norm2, self.mlp = make_norm(cfg), MLP(cfg)

    def forward(self, x, *how, **more):  # (B, T, C) -> (B, T, C)
        x = x + self.attn(self.norm1(x), *how, **more)
        return x + self.mlp(self.norm2(x))


class KVCache:
    """
    Keys (after rotation) and values, preallocated: k and v are lists of a tensor (B, G, max_len, D) a
    layer (torch.compile would copy a single one whole for every row written). Rows [0, length) are the
    text. A forward of T tokens writes rows behind them and leaves length; keep moves it, and rejected
    drafts vanish.
    """

    def __init__(self, cfg, max_len, B=1, device=None, dtype=None, n_layer=None):
        new = lambda: torch.zeros(B, cfg.n_kv_head, max_len, cfg.head_dim, device=device, dtype=dtype)
        self.k, self.v = ([new() for _ in range(n_layer or cfg.n_layer)] for _ in range(2))
        self.max_len, self.length = max_len, 0

    def write(self, layer, k, v):
        """Put k, v (B, G, T, D) behind the text -> all, (B, G, length+T, D). ValueError: there is no room."""
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
        """Of the rows last written those of path, say [0, 2, 5], become text; rejected drafts are gone."""
        n = len(path)
        first = next((i for i in range(n) if path[i] != i), n)         # those before lie in their places
        if first < n:
            src = torch.tensor(path[first:], device=self.k[0].device) + self.length
            dst = slice(self.length + first, self.length + n)
            for x in self.k + self.v:
                x[:, :, dst] = x.index_select(2, src)                  # through a copy: they may overlap
        self.length += n

    def crop(self, length):
        """Forget all text from this length on."""
        assert 0 <= length <= self.length, f"cannot crop {self.length} rows to {length}"
        self.length = length


class GPT(nn.Module):
    """Decoder-only transformer. What drafters need has a name: embed, run (some layers), norm, lm_head."""
    compiled = ("layers",)                                             # what --compile compiles
    exact, exactness = None, "not exact"                               # an Exact, and in words
    seconds = None                                                     # (a, b): n rows take a + b n

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.scaled = cfg, False                             # scaled: frequencies are not cfg's
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
            if p.dim() > 1:                                            # residual outputs shrink with depth
                shrink = math.sqrt(2 * cfg.n_layer) if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(p, std=0.02 / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def embed(self, idx, pos):  # (B, T), (T,) or (B, T) -> (B, T, C)
        x = self.wte(idx)
        return x if self.wpe is None else x + self.wpe(pos)

    def rope(self, pos):
        """cos and sin for positions (T,) or (B, T), to rotate (B, H, T, D); None with learned positions."""
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
        end, most = start + T, self.cfg.block_size
        assert end <= most, f"{start} + {T} tokens do not fit a context of {most}"
        self.reserve(end)
        return torch.arange(start, end, device=self.wte.weight.device)

    def attention_mask(self, T, mask, cache, dtype):
        """
        Who may look at whom among T new rows behind S cached ones -> (mask, causal) for attend: a row at
        the cached ones and at new ones up to itself, or as mask (.., T, S+T) bool says, True = may look.
        """
        S = cache.length if cache is not None else 0
        if mask is None and (T == 1 or S == 0):
            return None, T > 1                                         # one row looks at everything
        if mask is None:
            mask = torch.ones(T, S + T, dtype=torch.bool, device=self.wte.weight.device).tril(S)
        return additive(mask, dtype), False

    def run(self, x, pos, mask=None, cache=None, start=0, stop=None):
        """Layers start .. stop-1 on x (B, T, C) -> (B, T, C). pos as in embed; mask as in attention_mask."""
        T, group = x.size(1), self.cfg.n_head // self.cfg.n_kv_head
        stop = self.cfg.n_layer if stop is None else stop
        if self.exact and cache is not None and x.size(0) == 1:
            fill = -T % self.exact.product                             # copies of a row, which nobody reads
            if fill:
                x = torch.cat((x, x[:, -1:].expand(-1, fill, -1)), 1)
                pos = torch.cat((pos, pos[-1:].expand(fill)))
            exact = T, self.parts(T, x.size(1), mask, cache.length, group), self.exact
            return self.layers(x, self.rope(pos), None, False, cache, start, stop, exact)[:, :T]
        mask, causal = self.attention_mask(T, mask, cache, x.dtype)
        if mask is not None and group > 1:
            mask = per_query(mask, group)                               # once, not in every layer
        through = partial(GPT.layers, self) if causal else self.layers  # prompts: not compiled
        return through(x, self.rope(pos), mask, causal, cache, start, stop)

    def layers(self, x, rope, mask, causal, cache, start, stop, exact=None):
        for i in range(start, stop):
            x = self.blocks[i](x, rope, mask, causal, cache, i, exact)
        return x

    def parts(self, T, rows, mask, S, group):
        """parts for attend_exactly: T new rows behind S old ones, filled up to rows; mask as in run. Rows of
        a part share a page: whole pages before it are keys [0, paged), in it lie keys [paged, end)."""
        page = PAGE if self.exact.attention else rows + S              # or one page that holds everything
        if mask is not None:                                           # a tree stays in its page, see reach
            ends, looks = [rows], torch.cat((mask, mask[-1:].expand(rows - T, -1)))
        else:                                                          # a text: each page of it is a part
            ends, looks = [end - S for end in range((S // page + 1) * page, S + T, page)] + [rows], None
            if T > 1:
                looks = torch.ones(rows, S + T, dtype=torch.bool, device=self.wte.weight.device).tril(S)
        out, first = [], 0
        for last in ends:
            paged, end = (S + first) // page * page, S + min(last, T)
            if looks is not None:
                mask = per_query(additive(looks[first:last, paged:end], torch.float64), group)
            out.append((slice(first, last), paged, end, mask))
            first = last
        return out

    def reach(self, S):
        """How deep a tree behind S rows of text may be: exact trees end in the page of their root."""
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
        """Tokens (B, T) -> logits (B, T, V), hidden (B, T, C). pos None: behind the cache; mask as in run."""
        hidden = self.hidden(idx, pos, mask, cache)
        return self.lm_head(hidden), hidden

    def new_cache(self, max_len, B=1):
        """An empty cache for this model, on its device and in its dtype."""
        self.reserve(max_len)
        return KVCache(self.cfg, max_len, B, self.wte.weight.device, self.wte.weight.dtype)


class DraftLMHead(nn.Module):
    """
    What a drafter ends in: the target's frozen lm_head, or its rows for a draft vocabulary ids (N,). The
    target still verifies over all V tokens, so the text stays the same: others are merely never drafted.
    """

    def __init__(self, target, ids=None):
        super().__init__()
        matrix = row_of = None
        if ids is not None:
            w = target.lm_head.weight.detach()                         # a packed matrix is unpacked for this
            row_of = torch.full((len(w),), -100).scatter_(0, ids.cpu(), torch.arange(len(ids))).to(w.device)
            ids = ids.to(w.device)
            matrix = w[ids]                                            # (N, C), a copy
        self.register_buffer("ids", ids)                               # saved with the drafter; None is not
        self.register_buffer("lm_rows", matrix, persistent=False)      # lm_head's for ids, or None
        self.register_buffer("row_of", row_of, persistent=False)       # (V,) token -> its row, or -100

    def forward(self, z, target):  # (.., C) -> (.., V), or (.., N) logits for ids
        if self.ids is None:
            return target.lm_head(z)
        return F.linear(z, self.lm_rows) if torch.is_tensor(self.lm_rows) else self.lm_rows(z)

    def matrix(self, target):
        """(V or N, C), only to be read."""
        return target.lm_head.weight.detach() if self.ids is None else self.lm_rows

    def labels(self, x):
        """Tokens -> their places among the logits; outside -100, which cross_entropy ignores."""
        return x if self.ids is None else self.row_of[x]

    def full_vocab(self, logits):
        """Logits (.., N) for the draft vocabulary -> (.., V) for all tokens, -inf outside."""
        if self.ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], len(self.row_of)), -math.inf)
        return wide.index_copy_(-1, self.ids, logits)
