r"""
EAGLE-2: one decoder layer predicts the target's next hidden state; the tree follows its confidence.
A baseline.

Paper    Li et al. 2024 (EMNLP), arXiv:2406.16858: the dynamic tree
         arXiv:2401.15077 (EAGLE-1): the draft head and its training
Idea     1. The target's feature f_t (what lm_head reads) and the token x[t+1], which was drawn from it, go
            side by side through fc and one causal layer: a guess f'[t+1] of the next feature, and by
            lm_head of x[t+2].
         2. Guesses take the place of features, and drafting goes on from them, one level at a time.
         3. A level's best nodes propose children; the best nodes of all levels become the tree (re-ranking).

            x[1]  x[2]  ..  x[t]     x[t+1] root     a      b        level 1
            f[0]  f[1]  ..  f[t-1]   f[t]            f'     f'       f' = what the layer said at the root
               \_____ fc: 2C -> C _____/                \ / \
                layer (causal; tree mask)                c   d       level 2
                         |
                    f'[t+1], lm_head -> a, b

Maths    f'[t+1] = layer( fc [ e(x[t+1]) ; f_t ] )      at position t; no norm before the layer or behind it
         q       = softmax( lm_head f' ),   V(node) = product of q along its path
         loss    = feature * SmoothL1( f', f ) + ce * CE( softmax(lm_head f), q )            1 and 0.1
         features that go in get uniform noise of +- noise * 512 / T, in units of their root mean square

Shapes   B batch, T tokens, S verified tokens, C channels, V vocabulary, K draft depth
Differs  tree       children are ranked with the target's own noise at T > 0; the walk verifies (same
                    acceptance)
         noise      theirs is absolute, for features of about size 1; a small model's may be far smaller
         start      residual outputs 0, as in moa.py, so that both start alike
         training   run's schedule and clipping by norm, as for all methods here; theirs: 800k steps,
                    clipped by value
         sizes      depth and breadth are moa.py's, so that trees are equal; theirs: 6 levels, 10 wide,
                    59 drafts
         gpt2       the layer is Llama's and rotates; wpe is not read
Run      python bench/run.py --methods medusa,moa,eagle2 --train-minutes 5
"""
import os
import sys
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from model import GPT, Block, GPTConfig, KVCache, Rotary, additive, arg, frequencies
from tree import LevelRunner, Sampler, Tree, complete, plant_best_levels, plant_shape_levels


# --------------------------------------------------------------------------------------------------
# Config

@dataclass
class Config:
    """EAGLE-2 on a frozen target."""
    depth: int = arg(4, "K, levels of the tree", low=1, high=1000)
    breadth: int = arg(4, "nodes that are run in a level, and children that each proposes", low=1, high=1000)
    mlp: int = arg(0, "feed-forward width of the layer; 0 = the target's (the authors')")
    noise: float = arg(0.1, "noise on the features while training, see Maths")
    ce: float = arg(0.1, "weight of the cross-entropy against the target's distribution")
    feature: float = arg(1.0, "weight of the SmoothL1 distance of the features")
    steps: int = arg(400, "optimiser steps", low=1)
    batch_size: int = arg(8, "sequences in a step", low=1, high=2**20)
    lr: float = arg(2e-3, "learning rate at its peak")

    @property
    def min_tokens(self):
        """A training sequence has so many, or more."""
        return self.depth + 2


# --------------------------------------------------------------------------------------------------
# Modules

class Net(nn.Module):
    """fc and one layer: what is trained. Embeddings and lm_head are the target's, borrowed call by call."""
    compiled = ("forward",)                                               # what --compile compiles

    def __init__(self, cfg, target):
        super().__init__()
        c = target.cfg
        self.cfg, self.K = cfg, cfg.depth
        self.layer_cfg = replace(c, style="llama", n_layer=1, n_ffn=cfg.mlp or c.n_ffn, qkv_bias=False,
                                 head_dim=c.head_dim + c.head_dim % 2)     # to be rotated: even
        self.fc = nn.Linear(2 * c.n_embd, c.n_embd, bias=False)
        self.layer = Block(self.layer_cfg)
        self.layer.norm1 = nn.Identity()                               # fc's output goes in as it is
        for name, p in self.layer.named_parameters():
            if name.endswith(("out.weight", "down.weight")):           # residual branches start at 0
                nn.init.zeros_(p)
        self.rotary = Rotary(frequencies(self.layer_cfg), c.block_size)

    def forward(self, e, f, at, mask=None, causal=False, cache=None):
        """
        Embeddings e of tokens and the features f before them (B, T, C), at positions at (a slice) ->
        (B, T, C).
        """
        return self.layer(self.fc(torch.cat((e, f), -1)), self.rotary(at), mask, causal, cache)


# --------------------------------------------------------------------------------------------------
# Loss

@torch.no_grad()
def predictions(net, target, x):
    """
    What the drafter says on the text x (B, T) if x[..t] is verified and x[t+1..t+k] are root and drafts, for
    every anchor t at once. Yields for k = 1..K: logits (M, V), the tokens x[t+1+k] (M,) it should have
    guessed, and the target's own logits (M, V) for them, with M = B * (T - k - 1).
    """
    B, T = x.shape
    h = target.hidden(x)                                               # (B, T, C)
    own, e = target.lm_head(h), target.wte(x)
    cache = KVCache(net.layer_cfg, (net.K + 1) * T, B, x.device, target.wte.weight.dtype)
    f = net(e[:, 1:], h[:, :-1], slice(0, T - 1), causal=True, cache=cache)
    cache.keep(range(T - 1))                                           # row t: x[t+1] and the true f_t
    alone = torch.eye(T - 1, dtype=torch.bool, device=x.device)
    look = alone.new_ones(T - 1, T - 1).tril()                         # true rows up to t, and own drafts
    for k in range(1, net.K + 1):
        n = max(0, T - k - 1)                                          # anchors t = 0 .. n-1
        if k > 1:                                                      # x[t+k] and the last guess, at t+k-1
            look = torch.cat((look[:n], alone[:n, :n]), -1)
            mask = additive(look, h.dtype)
            f = net(e[:, k:k + n], f[:, :n], slice(k - 1, k - 1 + n), mask, cache=cache)
            cache.keep(range(n))                                       # the deeper drafts will look at these
        yield target.lm_head(f[:, :n]).flatten(0, 1), x[:, k + 1:].flatten(), own[:, k:-1].flatten(0, 1)


def loss(net, target, x):
    """x (B, T) -> the training loss, and how often the best guess from a true feature is right (1,)."""
    cfg, T = net.cfg, x.size(1)
    with torch.no_grad():
        h = target.hidden(x)                                           # (B, T, C)
        p, e = target.lm_head(h[:, 1:]).softmax(-1), target.wte(x[:, 1:])
        f = h[:, :-1]
        if net.training:
            f = f + (2 * torch.rand_like(f) - 1) * cfg.noise * 512 / T * f.square().mean().sqrt()
    guess = net(e, f, slice(0, T - 1), causal=True)                         # (B, T-1, C)
    logits = target.lm_head(guess)
    distance = F.smooth_l1_loss(guess, h[:, 1:])
    ce = F.cross_entropy(logits.flatten(0, 1), p.flatten(0, 1))
    return cfg.feature * distance + cfg.ce * ce, (logits[:, :-1].argmax(-1) == x[:, 2:]).float().mean()[None]


# --------------------------------------------------------------------------------------------------
# Draft

OPTIONS = {"depth": "levels of the tree", "breadth": "nodes run in a level, and children that each proposes"}


class Drafter:
    """
    Has a cache for its layer: rows of verified tokens, from true features; drafts are written behind them and
    cut off again. The tree grows level by level, see tree.plant_best_levels.
    """

    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0, depth=None, breadth=None):
        self.net, self.target, self.floor = net.eval(), target, floor
        self.shape = shape and shape.cut(target.cfg.block_size, target.cfg.vocab_size)
        self.max_nodes, self.depth = max_nodes, depth or net.K
        self.breadth = min(breadth or net.cfg.breadth, target.cfg.vocab_size)
        self.drafts = self.breadth * self.depth                        # room for the rows behind the root's
        if shape:
            parent = self.shape.parent
            self.max_nodes = self.drafts = len(parent)
            self.depth = max(Tree(parent, parent).depth)
        self.cache_rows = self.max_nodes

    def start(self, target, max_len):
        """Forget the last text; at most max_len tokens follow."""
        w = target.wte.weight
        self.cache = KVCache(self.net.layer_cfg, max_len + self.drafts, 1, w.device, w.dtype)
        self.text, self.f, self.max_len = [], w.new_empty(0, w.size(1)), max_len

    def observe(self, tokens, hidden, cache):
        """tokens (T,) became text; hidden (T, C) are the target's states for them."""
        self.text += tokens
        self.f = torch.cat((self.f, hidden))                           # draft takes what it needs

    def forward(self, tokens, f, at, mask, causal=False):
        """Tokens and the features before them (T, C) at positions at -> features (T, C); the cache grows."""
        e = self.target.wte(torch.tensor([tokens], device=f.device))
        f = self.net(e, f[None], at, mask, causal, self.cache)[0]
        self.cache.length += len(tokens)
        return f

    def draft(self, root, sampler, limit=None):
        """-> a Tree of at most limit nodes: what may follow root, which stands behind the text."""
        S = len(self.text)                                             # the root's position; its row is S - 1
        depth = min(self.depth, self.max_len - S - 2)                  # a deeper node could never be emitted
        if depth < 1 or self.max_nodes < 2:
            return Tree([root], [-1], [1.0])
        self.cache.crop(min(self.cache.length, S - 1))                 # if asked twice, the other root goes
        n = self.cache.length                                          # rows n .. S-1 are new
        how = self.target.attention_mask(S - n, None, self.cache, self.cache.k[0].dtype)
        f = self.forward(self.text[n + 1:] + [root], self.f[n - S:], slice(n, S), *how)[-1:]
        self.f = self.f[-1:]

        def step(d, tokens, up, mask):                                 # text and root: seen by all
            nonlocal f
            mask = additive(F.pad(mask, (S, 0), value=True), f.dtype)
            f = self.forward(tokens, f[up], slice(S + d - 1, S + d), mask)
            return self.target.lm_head(f)
        logits = self.target.lm_head(f)
        levels = LevelRunner(step, logits, sampler, S)
        if self.shape:
            tree = plant_shape_levels(root, levels, depth, self.shape)
        else:
            tree = plant_best_levels(root, levels, depth, self.breadth, limit or self.max_nodes, self.floor)
        self.cache.crop(S)                                             # text and root stay, drafts go
        return tree


# --------------------------------------------------------------------------------------------------
# Train

def train(cfg, target, run):
    """
    Train fc and the layer and return them; the target stays frozen. run (train.py) hands out batches (B, T),
    sets the learning rate (warm-up, then cosine), logs, evaluates on held-out text and saves.
    """
    net = Net(cfg, target).to(target.wte.weight.device)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0,
                            fused=target.wte.weight.is_cuda)
    for x in run.steps(net, [opt], lambda x: loss(net, target, x)):
        total, _ = loss(net, target, x)
        opt.zero_grad(set_to_none=True)
        total.backward()
        run.sync(net, total)                                           # mean of all processes, clipped
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
        print(f"eagle2, untrained, T = {T:.0f}: {len(text)} tokens in {len(stats.accepted)} target forwards, "
              "same text as plain decoding")
