r"""
Amphista: draft heads that see the chosen token, read adapted features, and look at each other first.

Paper    Li et al. 2024, arXiv:2406.13170 (NAACL 2025)
Idea     1. As Medusa, but drafting starts from the target's own next token too: the pair (h_t, x[t+1]).
         2. Two causal layers adapt these pairs to guessing far ahead; the far heads read the second.
         3. K residual MLPs and position vectors make K draft positions, which then see each other.
         4. The best guesses of all positions form a tree of candidate continuations.
         5. One target forward with a tree mask scores it; walk it along the target's own choices.

            h_t ----> FC1 --> layer 1 --s1--> FC2 --> layer 2 --s2        causal over pairs 0 .. t, each
            x[t+1] ---^----------|-------------^         |                layer with its own KV cache
                             +---+---+               +---+---+
                           MLP 1   MLP 2           MLP 3   MLP K
                           + p_1   + p_2           + p_3   + p_K
                        [     auto-embedding block: every position sees every other     ]
                             |       |               |       |            K positions of one anchor,
                           x[t+2]  x[t+3]          x[t+4]  x[t+1+K]       nothing of its neighbours

Maths    e    = rmsnorm( E x[t+1] )                                      E the target's embedding, frozen
         s1_t = Layer1( FC1 [h_t ; e] ),   s2_t = Layer2( FC2 [s1_t ; e] )
         z_k  = s + silu(W_k s) + p_k                                    s = s1_t for k <= K/2, else s2_t
         y_1 .. y_K = Block( z_1 .. z_K ),   q_k = softmax( lm_head y_k ),   k = 1..K
         loss = sum_k decay^k [ soft * CE( p(. | x[..t+k]), q_k ) + hard * CE( x[t+1+k], q_k ) ]
         here:  FC = fc  Layer = layers  W = proj  p_k = place[k-1]  Block = block

Shapes   B batch, T tokens, C channels, V vocabulary, K heads, M anchors of a batch in one row
Differs  Only the abstract could be read and there is no public code, so each choice with its source:
         abstract   bidirectional auto-embedding block run once, staged adaptation layers, extends Medusa
         digests    two causal stages fed with hidden state and chosen token; position encoding before
                    the block
         inferred   pairs (h_t, x[t+1]); the block sees one anchor only; caches hold accepted pairs, no drafts
         recalled   (unverified) FC 2C -> C, one layer a stage, who reads which stage, one layer in the block,
                    loss weights 1 and 0.1. Also K = 5 and K output matrices: here 4 and the shared lm_head
         ours       learned position vectors, rmsnorm of the embedding, decay^k (Medusa's), a start at the
                    target's own lm_head reading, feed-forward layers only C wide (at the target's width a
                    draft took 1.53 ms instead of 1.40 and was accepted no further), lr, random anchors in
                    training, exact acceptance, of a prompt the last 256 tokens only: on ones of 450 to 1,030
                    tau 1.43 with 256, with 64 and with all
Run      python train.py --method amphista # 2 cores, 66 s: head 1 right .284 of the time, tau 2.28 at 8 nodes
         python sample.py --method amphista --compare
"""
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, Block, DraftLMHead, GPTConfig, KVCache, Rotary, arg, frequencies
from tree import Sampler, complete, plant


# --------------------------------------------------------------------------------------------------
# Config

@dataclass
class Config:
    """Amphista: adaptation layers and heads that see each other, on a frozen target."""
    n_heads: int = arg(4, "K, number of heads; head k guesses the token k places after the next one",
                       low=1, high=1000)
    stages: int = arg(2, "adaptation layers: 2, 1 (all heads read it) or 0 (heads read the hidden state)",
                      choices=[0, 1, 2])
    token: bool = arg(True, "the stages read the embedding of the chosen token beside the hidden state")
    block: bool = arg(True, "auto-embedding block: the draft positions attend to each other")
    bidirectional: bool = arg(True, "the block looks both ways; off = a position sees only those before it")
    position: bool = arg(True, "learned position vectors before the block")
    n_ffn: int = arg(0, "feed-forward width of stages and block; 0 = C")
    share_head: bool = arg(True, "heads end in the target's frozen lm_head; off = a trained matrix for each")
    soft: float = arg(1.0, "weight of the cross-entropy against the target's own distribution")
    hard: float = arg(0.1, "weight of the cross-entropy against the text")
    decay: float = arg(0.8, "head k weighs decay^k in the loss", high=1)
    anchors: int = arg(64, "random anchors a sequence that a training step puts through the heads; 0 = all")
    steps: int = arg(360, "optimiser steps", low=1)
    batch_size: int = arg(4, "sequences in a step", low=1, high=2**20)
    lr: float = arg(3e-3, "learning rate at its peak")

    @property
    def min_tokens(self):
        """A training sequence has so many, or more."""
        return self.n_heads + 2


# --------------------------------------------------------------------------------------------------
# Modules

class Net(nn.Module):
    """Adaptation stages, K residual MLPs that read them, the auto-embedding block, an output matrix."""
    compiled = ("adapt",)                                              # what --compile compiles

    def __init__(self, cfg, target, vocab=None):
        super().__init__()
        C = target.cfg.n_embd
        self.cfg, self.K = cfg, cfg.n_heads
        self.head = DraftLMHead(target, vocab)        # the frozen lm_head, or its rows for a draft vocabulary
        assert cfg.stages in (0, 1, 2), f"{cfg.stages} adaptation stages, not 0, 1 or 2"
        self.layer_cfg = replace(target.cfg, style="llama", qkv_bias=False, n_ffn=cfg.n_ffn or C,
                                 head_dim=target.cfg.head_dim + target.cfg.head_dim % 2,   # even, to rotate
                                 n_layer=max(1, cfg.stages))        # n_layer sizes the KV cache of the stages
        wide = 2 * C if cfg.token else C
        self.fc = nn.ModuleList(nn.Linear(wide, C, bias=False) for _ in range(cfg.stages))
        self.layers = nn.ModuleList(Block(self.layer_cfg) for _ in range(cfg.stages))
        n_first = self.K // 2 if cfg.stages == 2 else 0      # so many heads read stage 1, the others the last
        self.proj = nn.ModuleList(nn.Linear(C, n * C) for n in (n_first, self.K - n_first) if n)
        self.block = Block(self.layer_cfg) if cfg.block else None
        self.place = nn.Parameter(torch.zeros(self.K, C)) if cfg.block and cfg.position else None
        for fc in self.fc:
            nn.init.eye_(fc.weight)                                   # FC = [1 0] passes s through, not yet e
        for layer in [*self.layers, *filter(None, [self.block])]:
            nn.init.zeros_(layer.attn.out.weight)                      # residual branches add nothing:
            nn.init.zeros_(layer.mlp.down.weight)                      # s1, s2, z and y start as h_t ...
        for proj in self.proj:
            nn.init.zeros_(proj.weight)
            nn.init.zeros_(proj.bias)                                  # ... and every head as the lm_head
        self.out = None
        if not cfg.share_head:
            self.out = nn.Parameter(self.head.matrix(target).repeat(self.K, 1, 1))         # (K, V, C), a copy
        # a gpt2 has no rotary to take after
        like = target.rotary or Rotary(frequencies(self.layer_cfg), target.cfg.block_size)
        self.rotary = Rotary(like.freq, like.most, like.scale)

    def adapt(self, h, x, target, cache=None):  # (B, T, C), (B, T) -> one (B, T, C) for each stage
        """
        The stages. h: hidden states of T tokens in a row, x: the token after each. The cache holds the pairs
        before; the new ones are written behind them and count once the caller says keep.
        """
        T, S = h.size(1), 0 if cache is None else cache.length
        rope = self.rotary(slice(S, S + T))
        mask, causal = target.attention_mask(T, None, cache, h.dtype)  # over the pairs
        if self.cfg.token and self.cfg.stages:
            e = F.rms_norm(target.wte(x), h.shape[-1:])                # root mean square 1, however small E
        stages = []
        for i, (fc, layer) in enumerate(zip(self.fc, self.layers)):
            s = stages[-1] if stages else h
            s = fc(torch.cat((s, e), -1) if self.cfg.token else s)     # FC [s ; e]
            stages.append(layer(s, rope, mask, causal, cache, i))
        return stages or [h]

    def forward(self, stages, target):  # one (M, C) for each stage -> (M, K, V)
        C = stages[0].size(-1)
        read = stages[-len(self.proj):]                    # the first heads read stage 1, the others the last
        parts = [s.unsqueeze(1) + F.silu(proj(s)).unflatten(1, (-1, C)) for s, proj in zip(read, self.proj)]
        z = torch.cat(parts, 1)                                        # (M, K, C)
        if self.place is not None:
            z = z + self.place
        if self.block is not None:                              # the anchors are its batch: none sees another
            z = self.block(z, causal=not self.cfg.bidirectional)       # bidirectional: every row sees all
        if self.out is None:
            return self.head(z, target)
        return (self.out @ z.permute(1, 2, 0)).permute(2, 0, 1)        # (K, V, C) @ (K, C, M)


# --------------------------------------------------------------------------------------------------
# Loss

def predictions(net, target, x):
    """
    What the heads say on the text x (B, T), for every anchor at once. Yields for k = 1..K: logits (M, V)
    of head k, the tokens (M,) it should have guessed, and the target's own logits (M, V) for them, with
    M = B * (T - k - 1); while training, M = B * cfg.anchors at most, drawn anew for every batch.
    """
    with torch.no_grad():
        h = target.hidden(x)                                           # (B, T, C)
        own = net.head(h, target)                                      # (B, T, V)
    B, T, C = h.shape
    stages = net.adapt(h[:, :-1], x[:, 1:], target)                    # (B, T-1, C) each, over the whole text
    at = torch.arange(T - 1, device=x.device).expand(B, -1)            # (B, A) anchors t
    if net.training and 0 < net.cfg.anchors < T - net.K - 1:         # what follows costs more than the stages
        at = torch.rand(B, T - net.K - 1).topk(net.cfg.anchors).indices.to(x.device)
        stages = [s.gather(1, at[..., None].expand(-1, -1, C)) for s in stages]  # (B, A, C) each
    logits = net([s.flatten(0, 1) for s in stages], target).unflatten(0, (B, -1))  # (B, A, K, V)
    row = torch.arange(B, device=x.device)[:, None]
    for k, guess in enumerate(logits.unbind(2), 1):
        n = max(0, T - k - 1)                                          # the last anchors have no x[t+1+k]
        t = at[:, :n]
        truth = net.head.labels(x[row, t + 1 + k]).flatten()
        yield guess[:, :n].flatten(0, 1), truth, own[row, t + k].flatten(0, 1)


def loss(net, target, x):
    """x (B, T) -> the training loss, and how often each head's best guess is right (K,), as a share."""
    cfg, total, top1 = net.cfg, 0.0, []
    for k, (guess, truth, own) in enumerate(predictions(net, target, x), 1):
        error = 0.0
        if cfg.hard > 0:
            error = cfg.hard * F.cross_entropy(guess, truth, reduction="sum") / len(truth)    # -100 counts 0
        if cfg.soft > 0:
            error = error + cfg.soft * F.cross_entropy(guess, own.softmax(-1))
        total = total + cfg.decay**k * error
        top1.append((guess.argmax(-1) == truth).float().mean())
    return total, torch.stack(top1)


# --------------------------------------------------------------------------------------------------
# Draft

WINDOW = 256                                     # rotary positions are relative: the cache may start anywhere


class Drafter:
    """
    Keeps the stages' KV caches of all pairs (h_t, x[t+1]) of the text; nothing that was only drafted
    enters them. Of a long prompt they read the last WINDOW tokens: in training no sequence is longer.
    """

    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0):
        self.net, self.target, self.shape, self.floor = net.eval(), target, shape, floor
        self.max_nodes = self.cache_rows = max_nodes if shape is None else len(shape.parent)

    def start(self, target, max_len):
        """Forget the last text; at most max_len tokens follow."""
        like = target.wte.weight
        self.cache = KVCache(self.net.layer_cfg, max_len, device=like.device, dtype=like.dtype)
        self.tokens, self.h, self.n = [], [], 0

    def observe(self, tokens, hidden, cache):
        """tokens (T,) became text; hidden (T, C) are the target's states for them."""
        self.tokens += tokens[-WINDOW:]                               # since the last draft: these tokens ...
        self.h.append(hidden[-WINDOW:])                                # ... and their hidden states, (T, C)
        self.n += len(tokens)                                          # the root stands at position n

    def draft(self, root, sampler, limit=None):
        """-> a Tree of at most limit nodes of what the heads see after root, the token at position n."""
        h = torch.cat(self.h).unsqueeze(0)                             # (1, T, C)
        # (1, T) the root completes the last pair
        x = torch.tensor([self.tokens[1:] + [root]], device=h.device)
        stages = self.net.adapt(h, x, self.target, self.cache)
        self.cache.keep(range(len(self.tokens)))
        self.tokens, self.h = [], []
        logits = self.net([s[:, -1] for s in stages], self.target)[0]  # (K, V)
        scores = sampler.rank(self.net.head.full_vocab(logits), range(self.n + 1, self.n + 1 + self.net.K))
        return plant(root, scores, self.shape, limit or self.max_nodes, self.floor)


# --------------------------------------------------------------------------------------------------
# Train

def train(cfg, target, run):
    """
    Train stages, heads and block and return them; the target stays frozen. run (train.py) hands out
    batches (B, T), sets the learning rate (warm-up, then cosine), logs, evaluates on held-out text, saves.
    """
    net = Net(cfg, target, run.vocab).to(target.wte.weight.device)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0,
                            fused=target.wte.weight.is_cuda)
    for x in run.steps(net, [opt], lambda x: loss(net, target, x)):
        total, _ = loss(net, target, x)
        opt.zero_grad(set_to_none=True)
        total.backward()
        run.sync(net, total)                                         # mean gradient of all processes, clipped
        opt.step()
    return net


# --------------------------------------------------------------------------------------------------
# Self-check

if __name__ == "__main__":
    torch.manual_seed(0)
    target = GPT(GPTConfig(n_layer=2, n_embd=32, n_ffn=64, vocab_size=50, block_size=128)).double().eval()
    drafter = Drafter(Net(Config(), target).double(), target)
    for T in (0.0, 1.0):
        plain, _ = complete(target, [1, 2, 3], 100, sampler=Sampler(T))
        text, stats = complete(target, [1, 2, 3], 100, drafter, Sampler(T))
        assert text == plain, "the drafter changed the text"
        print(f"amphista, untrained, T = {T:.0f}: {len(text)} tokens in "
              f"{len(stats.accepted)} target forwards, same text as plain decoding")
