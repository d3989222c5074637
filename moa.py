r"""
Mixture of Attentions (MoA): a small drafter that reads the target's keys and values of every layer.

Paper    Zimmer et al. 2025 (ICLR), arXiv:2410.03804
Idea     1. LSA: attention over the target's layers makes one state of a verified token's keys and values.
         2. SA: causal self-attention over the tokens, the drafted ones included.
         3. CA: every drafted token (query) looks at the states of the verified tokens (keys, values) only.
         4. TLI: CA's output is the input of layer L-N; the target's last N layers and lm_head finish.
         5. Level by level the best nodes propose children; the best nodes of all become the tree.

            verified x[0..t]                        x[0..t], root x[t+1], drafts x[t+2] ..
                 |                                      |
            target, L layers                        embedding                      tree of depth k:
                 | k, v of every layer                  |                            x[t+1]
            LSA over layers, mean, Ekv2E            SA over tokens                   /    \
                 |                                      |                           a      b        level 1
            s[0..t] ------------ k, v ----------------> CA                          |    / | \
                                                        | f                         c   d  e  f     level 2
            k, v of the last N layers [0..t] ------> layers L-N..L-1, norm, lm_head -> x[t+1+k] at x[t+k]

Maths    s_j     = W mean_l LSA( [k_h ; v_h]_l of token j )_l + b            no mask; rotary by layer
         f_i     = CA( SA(e)_i , s_0 .. s_last(i) ),   h'_i = TLI_N( f )_i     TLI_0(f) = f, in normed space
         q_i     = softmax( lm_head h'_i ),   V(node) = product of q on its path  (EAGLE-2, arXiv:2406.16858)
         last(i) = last verified j < i; in training verified: j < prompt or j % every = 0, every ~ U{6..14}
         loss    = 0.1 CE( p, q ) + SmoothL1( h', h )                           p and h are the target's
                   N > 0: the second term is half that, half SmoothL1( f, input of layer L-N )
         here:  W b = ekv2e   N = tli   e = target.embed   f h' = f guess

Shapes   B batch, T tokens, S verified tokens, C channels, V vocabulary, L layers of the target,
         K draft depth, H query and G key/value heads of width D
Differs  The authors' code is known, not the paper's text ("without LSA" is inferred). Ours (theirs):
         training   a random prefix is the prompt, all positions count (the response's); last(i) < i (<= i)
         TLI        works at inference (does not); positions overwritten in training leave the final loss
         start      norms 1, residual outputs 0: untrained, with N = L, it is the target (all N(0, 0.02))
         blocks     Llama's, rotating a gpt2's wte + wpe too; LSA's MLP is narrower; the target's G (half)
         tree       as many levels as pay, see Drafter (fixed); ranked with the target's noise (greedy)
         network    protocol, retries and writing on alone are ours, in plumbing/client.py (not public)
Run      python train.py --method moa    # 2 cores, 59 s: guess 1 right .277, tau 2.54 at 8 nodes, --depth 2
         python sample.py --method moa --compare
         python moa.py serve && python sample.py --method moa --server http://127.0.0.1:8765
"""
import sys
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import (GPT, MLP, Block, DraftLMHead, GPTConfig, KVCache, Rotary, additive, arg, attend,
                   frequencies, make_norm, rotate)
from tree import LevelRunner, Sampler, Tree, complete, plant_best_levels, plant_shape_levels


# --------------------------------------------------------------------------------------------------
# Config

@dataclass
class Config:
    """Mixture of Attentions on a frozen target."""
    depth: int = arg(4, "K, levels of the tree", low=1, high=1000)
    breadth: int = arg(4, "nodes run in a level, and children that each proposes", low=1, high=1000)
    tli: int = arg(1, "N, last layers of the target that the drafter runs too; 0 = none")
    mlp: int = arg(0, "feed-forward width of SA and CA; 0 = 1.5 C (the authors')")
    lsa_mlp: int = arg(256, "feed-forward width of LSA; 0 = 1.5 x its input (the authors')")
    n_kv_head: int = arg(0, "key/value heads of SA and CA; 0 = as many as the target (the authors': half)")
    lsa: bool = arg(True, "CA reads keys and values of all layers; off = the last hidden state")
    on_policy: bool = arg(True, "training hides states since the last verification; off = only a token's own")
    every_min: int = arg(6, "a verification every U{min..max} tokens in training, T of the paper's bound")
    every_max: int = arg(14, "see every_min")
    staircase: bool = arg(True, "early in training SA often sees only tokens since the last verification")
    tli_exact: bool = arg(False, "N > 0: train on just the states that drafting has; off = as the authors")
    ce: float = arg(0.1, "weight of the cross-entropy against the target's distribution")
    feature: float = arg(1.0, "weight of the SmoothL1 distances of hidden states")
    steps: int = arg(220, "optimiser steps", low=1)
    batch_size: int = arg(4, "sequences in a step", low=1, high=2**20)
    lr: float = arg(3e-3, "learning rate at its peak")

    @property
    def min_tokens(self):  # of a training sequence; a draft may go further
        return 3


# --------------------------------------------------------------------------------------------------
# Modules

class CrossAttention(nn.Module):
    """CA: one pre-norm layer with queries from SA, keys and values from LSA, and one norm for both."""

    def __init__(self, cfg):
        super().__init__()
        H, G, D = self.heads = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.norm1, self.norm2, self.mlp = make_norm(cfg), make_norm(cfg), MLP(cfg)
        self.q = nn.Linear(cfg.n_embd, H * D, bias=False)
        self.kv = nn.Linear(cfg.n_embd, 2 * G * D, bias=False)
        self.out = nn.Linear(H * D, cfg.n_embd, bias=False)

    def keys(self, s, rope):  # (B, S, C) -> keys, values (B, G, S, D): once for a verified token
        H, G, D = self.heads
        k, v = self.kv(self.norm1(s)).view(*s.shape[:2], 2 * G, D).transpose(1, 2).chunk(2, 1)
        return rotate(k, *rope), v

    def forward(self, x, kv, rope, mask=None):  # (B, T, C), mask (.., T, S) additive -> (B, T, C)
        H, G, D = self.heads
        q = rotate(self.q(self.norm1(x)).view(*x.shape[:2], H, D).transpose(1, 2), *rope)
        y = attend(q, *kv, mask)                                       # (B, H, T, D)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """LSA, SA and CA: what is trained. The target's layers and embeddings are only borrowed, call by call."""
    compiled = ("level",)                                              # what --compile compiles

    def __init__(self, cfg, target, vocab=None):
        super().__init__()
        c = target.cfg
        if cfg.tli > c.n_layer or c.n_head % (cfg.n_kv_head or 1) or not 2 <= cfg.every_min <= cfg.every_max:
            raise ValueError(f"--tli may be at most {c.n_layer} here, --n-kv-head a divisor of {c.n_head}; "
                             "2 <= --every-min <= --every-max")
        self.cfg, self.K = cfg, cfg.depth
        self.head = DraftLMHead(target, vocab)        # the frozen lm_head, or its rows for a draft vocabulary
        self.layer = replace(c, style="llama", n_layer=1, n_kv_head=cfg.n_kv_head or c.n_kv_head,
                             head_dim=c.head_dim + c.head_dim % 2,     # even, to be rotated
                             n_ffn=cfg.mlp or c.n_embd * 3 // 2, qkv_bias=False)
        self.sa, self.ca = Block(self.layer), CrossAttention(self.layer)
        E = 2 * c.n_kv_head * c.head_dim if cfg.lsa else c.n_embd      # width of what is read
        over_layers = replace(self.layer, n_embd=E, n_kv_head=c.n_kv_head, n_ffn=cfg.lsa_mlp or E * 3 // 2,
                              head_dim=max(2, c.head_dim // 4 * 2))    # D / 2 as the authors', and even
        self.lsa = Block(over_layers) if cfg.lsa else None
        self.ekv2e = nn.Linear(E, c.n_embd)
        self.rotary = Rotary(frequencies(self.layer), c.block_size)    # of tokens, and of layers
        self.layer_rotary = Rotary(frequencies(over_layers), c.n_layer)
        for name, p in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):          # residual branches add nothing at first
                nn.init.zeros_(p)

    def read(self, k, v, hidden):
        """The target's side: k, v (L, B, G, T, D), last hidden (B, T, C) -> s (B, T, C), token by token."""
        if self.lsa is None:
            return self.ekv2e(hidden)
        L, B, G, T, D = k.shape
        x = torch.cat((k, v), -1)                                      # [k_h ; v_h] (L, B, G, T, 2D)
        x = x.permute(1, 3, 0, 2, 4).reshape(B * T, L, 2 * G * D)
        x = self.lsa(x, self.layer_rotary(slice(L)))                   # no mask: every layer sees every layer
        return self.ekv2e(x.mean(1)).view(B, T, -1)

    def finish(self, f, target, pos, mask=None, causal=False, cache=None):
        """TLI: CA's output (B, T, C) through layers L-N .. L-1 -> what lm_head reads."""
        if self.cfg.tli == 0:
            return f
        rope = target.rope(pos)
        for i in range(-self.cfg.tli, 0):                       # negative: a cache may have only N layers
            f = target.blocks[i](f, rope, mask, causal, cache, i)
        return target.norm(f)

    def level(self, x, rope, pos, mask, causal, sa, kv, target, last, queries):
        """x (1, T, C) -> its last rows (1, queries, C), of one position. Caches: sa, CA's kv, TLI's last."""
        cos, sin = rope
        T = x.size(1)
        x = self.sa(x, rope, mask, causal, sa)[:, -queries:]
        x = self.ca(x, kv, (cos[-1:], sin[-1:]))                       # no mask: all in the cache is verified
        return self.finish(x, target, pos[-1:], mask if T == queries else None, cache=last)


# --------------------------------------------------------------------------------------------------
# Loss

@torch.no_grad()
def predictions(net, target, x):
    """Yields for k = 1..K, all anchors t: logits (M, V), x[t+1+k] (M,), the target's logits (M, V)."""
    B, T = x.shape
    pos, rope = target.positions(T), net.rotary(slice(T))
    cache = target.new_cache((net.K + 1) * T, B)
    h = target.hidden(x, cache=cache)                                  # (B, T, C)
    own = net.head(h, target)                                          # (B, T, V)
    cache.keep(range(T))
    kv = net.ca.keys(net.read(*cache.read(slice(T)), h), rope)
    s = net.sa(target.embed(x, pos), rope, causal=True)                # (B, T, C)
    itself = torch.eye(T, dtype=torch.bool, device=x.device)
    sees = itself.new_ones(T, T).tril()
    # T = 5, k = 2, row t = 1 looks at text 1 1 0 0 0 | drafts of k = 1: 0 1 0 | of k = 2: 0 1, its own two
    look = sees
    for k in range(1, net.K + 1):
        n = max(0, T - k - 1)                                          # anchors t < n, queries at t + k
        look = torch.cat((look[:n], itself[:n, :n]), -1)               # n more rows in the cache, one its own
        f = net.ca(s[:, k:T - 1], kv, net.rotary(slice(k, T - 1)), additive(sees[:n], h.dtype))
        h = net.finish(f, target, pos[k:T - 1], additive(look, h.dtype), cache=cache)    # (B, n, C)
        cache.keep(range(n))                                           # the deeper drafts will look at these
        truth = net.head.labels(x[:, k + 1:]).flatten()
        yield net.head(h, target).flatten(0, 1), truth, own[:, k:-1].flatten(0, 1)


def loss(net, target, x, progress=1.0):
    """x (B, T) -> loss, hits 1..K past the last verified token (K,). progress, 0 to 1, ends the staircase."""
    cfg, (B, T) = net.cfg, x.shape
    t, split = target.positions(T), target.cfg.n_layer - cfg.tli
    rope = net.rotary(slice(T))
    with torch.no_grad():
        cache = target.new_cache(T, B)
        deep = target.run(target.embed(x, t), t, None, cache, 0, split)    # into layer L-N
        h = target.norm(target.run(deep, t, None, cache, split))       # (B, T, C)
    # T-step bound: as in drafting, row i sees states of the target up to the last verification before it
    every = torch.randint(cfg.every_min, cfg.every_max + 1, (B, 1), device=x.device)
    prompt = torch.randint(2, max(3, T // 2 + 1), (B, 1), device=x.device)
    verified = (t < prompt) | (t % every == 0)                         # (B, T)
    # verified 1 1 0 0 1 0 -> cummax of j: 0 1 1 1 4 4 -> last: 0 0 1 1 1 4
    last = F.pad((t * verified).cummax(-1).values[:, :-1], (1, 0))     # the last verified before i
    bound = last if cfg.on_policy else (t - 1).clamp(min=0).expand(B, T)
    before, mask = t <= t[:, None], None
    if cfg.staircase and progress < 0.5:                               # some samples' SA: last+1 .. i only
        wide = torch.rand(B, 1, 1, device=x.device) >= 1 - 2 * progress
        mask = before & (wide | (t > last[..., None]) | (t == t[:, None]))    # and x[0] itself
        mask = additive(mask[:, None], h.dtype)                        # (B, 1, T, T)
    s = net.sa(target.embed(x, t), rope, mask, causal=mask is None)
    sees = t <= bound[..., None]                                       # (B, T, T)  s_j for j <= bound(i)
    kv = net.ca.keys(net.read(*cache.read(slice(T)), h), rope)
    f = net.ca(s, kv, rope, additive(sees[:, None], h.dtype))          # (B, T, C)

    count = (t > 0).expand(B, T)                                       # x[0] has nothing verified before it
    if cfg.tli == 0:
        guess = f
    elif cfg.tli_exact:                                                # true k, v up to last(i), own behind
        look = torch.cat((sees, before & ~sees), -1)                   # (B, T, 2T)
        def write(layer, k, v):                                        # a KVCache would break autograd
            return torch.cat((cache.k[layer], k), 2), torch.cat((cache.v[layer], v), 2)
        guess = net.finish(f, target, t, additive(look[:, None], h.dtype), cache=SimpleNamespace(write=write))
    else:                                                              # true inputs where verified, else own
        guess = net.finish(torch.where(verified[..., None], deep, f), target, t, causal=True)
        count = ~verified
    guess, real = guess[count], h[count]                               # (M, C)
    logits = net.head(guess, target)                                   # (M, V)
    with torch.no_grad():
        p = net.head(real, target).softmax(-1)
    distance = F.smooth_l1_loss(guess, real)
    if cfg.tli:
        distance = 0.5 * distance + 0.5 * F.smooth_l1_loss(f[:, 1:], deep[:, 1:])
    total = cfg.ce * F.cross_entropy(logits, p) + cfg.feature * distance

    right = logits.argmax(-1) == F.pad(net.head.labels(x[:, 1:]), (0, 1), value=-1)[count]
    past = (t - last).masked_fill(t == T - 1, 0)[count]                # what follows the last is not known
    top1 = []
    for k in range(1, net.K + 1):
        top1.append((right & (past == k)).sum() / (past == k).sum().clamp(min=1))
    return total, torch.stack(top1)


# --------------------------------------------------------------------------------------------------
# Draft

OPTIONS = {"depth": "levels of the tree", "breadth": "nodes run in a level, and children that each proposes"}


class Drafter:
    """A level is run, by default, if it likely brings more than it takes here: tree.plant_best_levels."""

    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0, depth=None, breadth=None):
        self.net, self.target, self.floor = net.eval(), target, floor
        self.shape = shape and shape.cut(target.cfg.block_size, target.cfg.vocab_size)
        self.max_nodes, self.depth = max_nodes, depth or net.K
        self.measured = not depth                    # price of a level in forwards: by layers, until measured
        self.price = (2 + net.cfg.tli) / target.cfg.n_layer if self.measured else 0.0
        self.breadth = min(breadth or net.cfg.breadth, target.cfg.vocab_size)
        self.drafts = self.breadth * self.depth                        # room for the rows behind the root
        if shape:
            parent = self.shape.parent
            self.max_nodes = self.drafts = len(parent)
            self.depth = max(Tree(parent, parent).depth)
        self.cache_rows = self.max_nodes

    def start(self, target, max_len):
        """Forget the last text; at most max_len tokens follow."""
        w = target.wte.weight
        new = lambda cfg, n_layer: KVCache(cfg, max_len + self.drafts, 1, w.device, w.dtype, n_layer)
        self.sa, self.ca = new(self.net.layer, 1), new(self.net.layer, 1)
        self.last = new(target.cfg, self.net.cfg.tli) if self.net.cfg.tli else None
        target.reserve(max_len)
        self.pos = torch.arange(max_len, device=w.device)
        self.text, self.max_len = [], max_len

    def observe(self, tokens, hidden, cache):
        """tokens (T,) became text; hidden (T, C): their states; cache: their keys and values."""
        at, N = slice(cache.length - len(tokens), cache.length), self.net.cfg.tli
        k, v = cache.read(at)                                          # (L, 1, G, T, D)
        self.receive(tokens, self.net.read(k, v, hidden[None]), *last_layers(N, k, v))

    def receive(self, tokens, s, k, v):
        """The drafter's side: verified tokens, their s (1, T, C), k and v (N, 1, G, T, D) of N layers."""
        S, n = len(self.text), len(tokens)
        self.text += tokens
        self.kv = self.ca.write(0, *self.net.ca.keys(s, self.net.rotary(slice(S, S + n))))   # (1, G, S+T, D)
        self.ca.length += n
        if self.last:
            self.last.length = S                                       # what was drafted goes
            for i in range(len(k)):
                self.last.write(i, k[i], v[i])
            self.last.length += n

    def forward(self, tokens, at, mask, causal, queries):
        """Tokens at positions at, see Net.level -> logits (queries, V)."""
        net, target, pos = self.net, self.target, self.pos[at]
        x = target.embed(torch.tensor([tokens], device=pos.device), pos)    # (1, T, C)
        x = net.level(x, net.rotary(at), pos, mask, causal, self.sa, self.kv, target, self.last, queries)
        self.sa.length += len(tokens)
        if self.last:
            self.last.length += queries
        return net.head.full_vocab(net.head(x[0], target))

    def catch_up(self, tokens):
        """SA reads what is new in the text and these tokens behind it -> logits (1, V) for what follows."""
        end = len(self.text) + len(tokens)
        self.sa.crop(min(self.sa.length, end - 1))                     # nothing new: the last row once more
        new = (self.text + tokens)[self.sa.length:]
        how = self.target.attention_mask(len(new), None, self.sa, self.sa.k[0].dtype)
        return self.forward(new, slice(self.sa.length, end), *how, 1)

    def next_logits(self, tokens):
        """Logits (1, V) behind the root and what a client wrote since without its server, token by token."""
        before = self.last.length - len(self.text) if self.last else len(tokens) - 1
        assert before == len(tokens) - 1, f"{before} of {len(tokens)} tokens went before"
        return self.catch_up(tokens)

    def draft(self, root, sampler, limit=None):
        """-> a Tree of at most limit nodes of what may follow root, which stands behind the text."""
        S, run = len(self.text), 0                                     # levels that were run
        depth = min(self.depth, self.max_len - S - 2)                  # a deeper node could never be emitted
        if depth < 1 or self.max_nodes < 2:
            return Tree([root], [-1], [1.0])
        logits = self.catch_up([root])
        began = time.perf_counter()

        def step(d, tokens, up, mask):                                 # text and root: seen by all
            nonlocal run
            run += 1
            mask = additive(F.pad(mask, (S + 1, 0), value=True), logits.dtype)
            return self.forward(tokens, slice(S + d, S + d + 1), mask, False, len(tokens))
        levels = LevelRunner(step, logits, sampler, S)
        if self.shape:
            tree = plant_shape_levels(root, levels, depth, self.shape)
        else:
            tree = plant_best_levels(root, levels, depth, self.breadth, limit or self.max_nodes,
                                     self.floor, self.price)
        self.sa.crop(S + 1)                                            # text and root stay, drafts go
        if self.last:
            self.last.crop(S)
        if self.measured and self.target.seconds and run:        # a true clock: a level ends in .tolist()
            share = (time.perf_counter() - began) / run / self.target.seconds[0]
            self.price += 0.1 * (min(share, 1.0) - self.price)
        return tree


def last_layers(N, *layers):
    """Of tensors (L, ..) the last N layers each; none for N = 0, which a negative index could not say."""
    return [x[len(x) - N:] for x in layers]


# --------------------------------------------------------------------------------------------------
# Train

def train(cfg, target, run):
    """Train LSA, SA and CA on the batches (B, T) of run (train.py); the target stays frozen."""
    net = Net(cfg, target, run.vocab).to(target.wte.weight.device)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0,
                            fused=target.wte.weight.is_cuda)
    for x in run.steps(net, [opt], lambda x: loss(net, target, x)):
        total, _ = loss(net, target, x, run.progress())
        opt.zero_grad(set_to_none=True)
        total.backward()
        run.sync(net, total)                                           # mean over processes, clipped
        opt.step()
    return net


# --------------------------------------------------------------------------------------------------
# Self-check

if __name__ == "__main__":
    if sys.argv[1:]:                                                   # serve or split: client and server
        from plumbing.server import main
        raise SystemExit(main(sys.argv[1:], sys.modules[__name__]))
    torch.manual_seed(0)
    target = GPT(GPTConfig(n_layer=2, n_embd=32, n_ffn=64, vocab_size=50, block_size=128)).double().eval()
    drafter = Drafter(Net(Config(), target).double(), target)
    for T in (0.0, 1.0):
        plain, _ = complete(target, [1, 2, 3], 100, sampler=Sampler(T))
        text, stats = complete(target, [1, 2, 3], 100, drafter, Sampler(T))
        assert text == plain, "the drafter changed the text"
        print(f"moa, untrained, T = {T:.0f}: {len(text)} tokens in {len(stats.accepted)} target forwards, "
              "same text as plain decoding")
