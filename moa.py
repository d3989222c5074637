r"""
Mixture of Attentions (MoA): a small drafter that reads the target's keys and values of every layer.

Paper    Zimmer et al. 2025 (ICLR), arXiv:2410.03804
Idea     1. LSA: attention over the target's layers makes one state of all keys and values of a verified token.
         2. SA: causal self-attention over the tokens, the drafted ones included.
         3. CA: every drafted token (query) looks at the states of the verified tokens (keys, values) only.
         4. TLI: CA's output stands for the input of layer L-N; the target's last N layers and lm_head finish.
         5. Level by level the best nodes propose children; the best nodes of all become the tree.

            verified x[0..t]                        x[0..t], root x[t+1], drafts x[t+2] ..
                 |                                      |
            target, L layers                        embedding                      tree of depth k:
                 | k, v of every layer                  |                            x[t+1]
            LSA over layers, mean, Ekv2E            SA over tokens                   /    \
                 |                                      |                           a      b        level 1
            s[0..t] ------------ k, v ----------------> CA                          |    / | \
                                                        | f                         c   d  e  f     level 2
            k, v of the last N layers [0..t] ------> layers L-N..L-1, norm --> lm_head --> guess x[t+1+k] at x[t+k]

Maths    s_j     = W mean_l LSA( [k_h ; v_h]_l of token j )_l + b            no mask; rotary by layer
         f_i     = CA( SA(e)_i , s_0 .. s_start(i) ),   h'_i = TLI_N( f )_i        TLI_0(f) = f, in normed space
         q_i     = softmax( lm_head h'_i ),   V(node) = product of q along its path   (EAGLE-2, arXiv:2406.16858)
         start(i) = last verified j < i; in training verified: j < prompt or j % every = 0, every ~ U{6..14}
         loss    = 0.1 CE( p, q ) + SmoothL1( h', h )                                    p and h are the target's
                   N > 0: the second term is half that, half SmoothL1( f, input of layer L-N )
         here:  W b = ekv2e   N = tli   e = target.embed   f h' = f guess

Shapes   B batch, T tokens, S verified tokens, C channels, V vocabulary, L layers of the target, K draft depth,
         H query and G key/value heads of width D
Differs  The authors' code is known to us, the paper's text is not. From the code: modules, masks, staircase,
         losses, tree. Inferred: "without LSA" means that CA reads the last hidden state. Ours:
         start(i)   the last verified position before i; theirs is up to i, so that some queries see the state of
                    their own token, which no draft ever does
         plain text a random prefix is the prompt, every position counts; theirs: those of the response
         TLI        works at inference (theirs does not); positions overwritten in training leave the final loss
         start      norms 1, residual outputs 0: untrained, with N = L, it is the target (theirs: all N(0, 0.02))
         sizes      LSA's MLP is narrower; SA and CA have the target's G heads, theirs half
         T > 0      children are ranked with the target's own noise; their tree is for greedy decoding
         gpt2       SA reads wte + wpe, the input of layer 0, and rotates besides; our blocks are Llama's
         network    the authors' client and server are not public: protocol, retries and writing on alone are ours
"""
import hmac
import http.client
import http.server
import ipaddress
import json
import math
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from urllib.parse import urlsplit

import safetensors.torch
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import (GPT, MLP, Block, GPTConfig, KVCache, arg, attend, fail, load, make_norm, model_tensors,
                   parse, rotate, save)
from tree import Sampler, Stats, Tree, complete, tree_mask, walk


# ---------------------------------------------------------------------------------------------------------------------
# Config

@dataclass
class Config:
    """Mixture of Attentions on a frozen target."""
    depth: int = arg(4, "K, levels of the tree", low=1)
    breadth: int = arg(4, "nodes that are run in a level, and children that each of them proposes", low=1)
    tli: int = arg(1, "N, last layers of the target that the drafter runs too; 0 = none")
    mlp: int = arg(0, "feed-forward width of SA and CA; 0 = 1.5 C (the authors')")
    lsa_mlp: int = arg(256, "feed-forward width of LSA; 0 = 1.5 x its input (the authors')")
    n_kv_head: int = arg(0, "key/value heads of SA and CA; 0 = as many as the target (the authors': half)")
    lsa: bool = arg(True, "CA reads keys and values of all layers; off = the last hidden state")
    on_policy: bool = arg(True, "training hides states since the last verification; off = only a token's own")
    every_min: int = arg(6, "a verification every U{min..max} tokens in training")
    every_max: int = arg(14, "see every_min")
    staircase: bool = arg(True, "early in training SA often sees only tokens since the last verification")
    tli_exact: bool = arg(False, "N > 0: train on just the states that drafting has; off = as the authors")
    ce: float = arg(0.1, "weight of the cross-entropy against the target's distribution")
    feature: float = arg(1.0, "weight of the SmoothL1 distances of hidden states")
    steps: int = arg(110, "optimiser steps", low=1)
    batch_size: int = arg(8, "sequences in a step", low=1)
    lr: float = arg(2e-3, "learning rate at its peak")


# ---------------------------------------------------------------------------------------------------------------------
# Modules

def rotary(n, D, theta):
    """Cos and signed sin for positions 0 .. n-1, as model.rotate takes them: (2, n, D)."""
    angle = torch.outer(torch.arange(n).double(), theta ** (-torch.arange(0, D, 2).double() / D))
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).float()


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

    def forward(self, x, kv, rope, mask):  # (B, T, C), mask (.., T, S) additive -> (B, T, C)
        H, G, D = self.heads
        q = rotate(self.q(self.norm1(x)).view(*x.shape[:2], H, D).transpose(1, 2), *rope)
        y = attend(q, *kv, mask)                                       # (B, H, T, D)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """LSA, SA and CA: what is trained. The target's layers and embeddings are only borrowed, call by call."""

    def __init__(self, cfg, target):
        super().__init__()
        c = target.cfg
        assert 0 <= cfg.tli <= c.n_layer, f"the target has {c.n_layer} layers, tli = {cfg.tli} asks for more"
        assert 2 <= cfg.every_min <= cfg.every_max, f"every_min {cfg.every_min} > every_max {cfg.every_max}, or < 2"
        self.cfg, self.K = cfg, cfg.depth
        self.layer = replace(c, style="llama", n_layer=1, n_kv_head=cfg.n_kv_head or c.n_kv_head,
                             n_ffn=cfg.mlp or c.n_embd * 3 // 2, qkv_bias=False)
        self.sa, self.ca = Block(self.layer), CrossAttention(self.layer)
        E = 2 * c.n_kv_head * c.head_dim if cfg.lsa else c.n_embd      # width of what is read
        over_layers = replace(self.layer, n_embd=E, n_kv_head=c.n_kv_head, n_ffn=cfg.lsa_mlp or E * 3 // 2,
                              head_dim=max(2, c.head_dim // 4 * 2))    # D / 2 as the authors', and even
        self.lsa = Block(over_layers) if cfg.lsa else None
        self.ekv2e = nn.Linear(E, c.n_embd)
        self.register_buffer("rope", rotary(c.block_size, c.head_dim, c.rope_theta), persistent=False)
        self.register_buffer("layer_rope", rotary(c.n_layer, over_layers.head_dim, c.rope_theta), persistent=False)
        for name, p in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):           # residual branches add nothing at first
                nn.init.zeros_(p)

    def read(self, k, v, hidden):
        """The target's side: k, v (L, B, G, T, D), last hidden (B, T, C) -> s (B, T, C), token by token."""
        if self.lsa is None:
            return self.ekv2e(hidden)
        L, B, G, T, D = k.shape
        x = torch.cat((k, v), -1)                                      # [k_h ; v_h] (L, B, G, T, 2D)
        x = x.permute(1, 3, 0, 2, 4).reshape(B * T, L, 2 * G * D)
        x = self.lsa(x, self.layer_rope, None)                         # no mask: every layer sees every layer
        return self.ekv2e(x.mean(1)).view(B, T, -1)

    def finish(self, f, target, pos, mask, cache=None):
        """TLI: CA's output (B, T, C) through the target's last N layers -> what lm_head reads."""
        if self.cfg.tli == 0:
            return f
        rope = target.rope(pos)
        for i in range(-self.cfg.tli, 0):                              # from the end: a cache may have just N
            f = target.blocks[i](f, rope, mask, cache, i)
        return target.norm(f)


# ---------------------------------------------------------------------------------------------------------------------
# Loss

@torch.no_grad()
def guesses(net, target, x):
    """
    What the drafter says on the text x (B, T) if x[..t] is verified and x[t+1..t+k] are root and drafts, for every
    anchor t at once. Yields for k = 1..K: logits (M, V), the tokens x[t+1+k] (M,) it should have guessed, and the
    target's own logits (M, V) for them, with M = B * (T - k - 1).
    """
    B, T = x.shape
    pos, additive = target.positions(T), lambda mask: target.attention_mask(len(mask), mask, None, h.dtype)
    cache = target.new_cache((net.K + 1) * T, B)
    h = target.hidden(x, cache=cache)                                  # (B, T, C)
    own = target.lm_head(h)                                            # (B, T, V)
    cache.keep(range(T))
    kv = net.ca.keys(net.read(cache.k[..., :T, :], cache.v[..., :T, :], h), net.rope[:, :T])
    s = net.sa(target.embed(x, pos), net.rope[:, :T], True)            # (B, T, C)
    alone = torch.eye(T, dtype=torch.bool, device=x.device)
    sees = alone.new_ones(T, T).tril()
    look = sees                                                        # row t: verified j <= t, and own drafts
    for k in range(1, net.K + 1):
        n = max(0, T - k - 1)                                          # anchors t = 0 .. n-1, queries at t + k
        look = torch.cat((look[:n], alone[:n, :n]), -1)
        f = net.ca(s[:, k:T - 1], kv, net.rope[:, k:T - 1], additive(sees[:n]))
        h = net.finish(f, target, pos[k:T - 1], additive(look), cache)                               # (B, n, C)
        cache.keep(range(n))                                           # the deeper drafts will look at these
        yield target.lm_head(h).flatten(0, 1), x[:, k + 1:].flatten(), own[:, k:-1].flatten(0, 1)


def loss(net, target, x, progress=1.0):
    """
    x (B, T) -> the loss, and how often the best guess is right 1..K tokens past the last verified one (K,).
    progress, from 0 to 1, fades the staircase out. Verified positions come from torch's global generator.
    """
    cfg, (B, T) = net.cfg, x.shape
    t, split = target.positions(T), target.cfg.n_layer - cfg.tli
    additive = lambda mask: target.attention_mask(T, mask, None, h.dtype)
    with torch.no_grad():
        cache = target.new_cache(T, B)
        deep = target.run(target.embed(x, t), t, None, cache, 0, split)                      # into layer L-N
        h = target.norm(target.run(deep, t, None, cache, split))                                     # (B, T, C)
    every = torch.randint(cfg.every_min, cfg.every_max + 1, (B, 1), device=x.device)
    prompt = torch.randint(2, max(3, T // 2 + 1), (B, 1), device=x.device)
    verified = (t < prompt) | (t % every == 0)                         # (B, T)
    start = F.pad((t * verified).cummax(-1).values[:, :-1], (1, 0))    # the last verified position before i
    seen = start if cfg.on_policy else (t - 1).clamp(min=0).expand(B, T)
    causal, mask = t <= t[:, None], True
    if cfg.staircase and progress < 0.5:                               # SA of some samples sees start+1 .. i only
        wide = torch.rand(B, 1, 1, device=x.device) >= 1 - 2 * progress
        mask = causal & (wide | (t > start[..., None]) | (t == t[:, None]))        # and x[0] itself
        mask = additive(mask[:, None])                                 # (B, 1, T, T)
    s = net.sa(target.embed(x, t), net.rope[:, :T], mask)
    sees = t <= seen[..., None]                                        # (B, T, T)  query i sees s_j, j <= start(i)
    kv = net.ca.keys(net.read(cache.k, cache.v, h), net.rope[:, :T])
    f = net.ca(s, kv, net.rope[:, :T], additive(sees[:, None]))        # (B, T, C)

    count = (t > 0).expand(B, T)                                       # x[0] has nothing verified before it
    if cfg.tli == 0:
        guess = f
    elif cfg.tli_exact:                                                # true k, v up to start(i), own behind
        look = torch.cat((sees, causal & ~sees), -1)                   # (B, T, 2T)
        def write(layer, k, v):                                        # a KVCache would overwrite what autograd needs
            return torch.cat((cache.k[layer], k), 2), torch.cat((cache.v[layer], v), 2)
        guess = net.finish(f, target, t, additive(look[:, None]), SimpleNamespace(write=write))
    else:                                                              # true inputs where verified, else own
        guess = net.finish(torch.where(verified[..., None], deep, f), target, t, True)
        count = ~verified
    guess, real = guess[count], h[count]                               # (M, C)
    logits = target.lm_head(guess)                                     # (M, V)
    with torch.no_grad():
        p = target.lm_head(real).softmax(-1)
    near = F.smooth_l1_loss(guess, real)
    if cfg.tli:
        near = 0.5 * near + 0.5 * F.smooth_l1_loss(f[:, 1:], deep[:, 1:])
    total = cfg.ce * F.cross_entropy(logits, p) + cfg.feature * near

    right = logits.argmax(-1) == F.pad(x[:, 1:], (0, 1), value=-1)[count]
    distance = (t - start).masked_fill(t == T - 1, 0)[count]           # what follows the last token is not known
    at = distance == torch.arange(1, net.K + 1, device=x.device)[:, None]                            # (K, M)
    return total, (right & at).sum(-1) / at.sum(-1).clamp(min=1)


# ---------------------------------------------------------------------------------------------------------------------
# Draft

class Drafter:
    """
    Has caches for SA, CA and N layers of the target; drafts are written behind the text and cut off again. The tree
    is EAGLE-2's: run the best nodes of a level, let each propose its best children, keep the best of all (V > floor);
    or a shape says which ranks to take.
    """

    def __init__(self, net, target, shape=None, nodes=16, floor=0.0, depth=None, breadth=None):
        self.net, self.target, self.floor = net.eval(), target, floor
        self.shape = shape and shape.limit(target.cfg.block_size, target.cfg.vocab_size)
        self.rows, self.depth = nodes, depth or net.K
        self.breadth = min(breadth or net.cfg.breadth, target.cfg.vocab_size)
        self.drafts = self.breadth * self.depth                        # room for the rows behind the root
        if shape:
            parent = self.shape.parent
            self.rows = self.drafts = len(parent)
            self.depth, self.breadth = max(Tree(parent, parent).depth), max(self.shape.rank) + 1
            self.children = [[i for i, up in enumerate(parent) if up == n] for n in range(len(parent))]

    def start(self, target, max_len):
        w = target.wte.weight
        new = lambda cfg, n_layer: KVCache(cfg, max_len + self.drafts, 1, w.device, w.dtype, n_layer)
        self.sa, self.ca = new(self.net.layer, 1), new(self.net.layer, 1)
        self.last = new(target.cfg, self.net.cfg.tli) if self.net.cfg.tli else None
        self.pos = torch.arange(max_len, device=w.device)
        self.text, self.max_len = [], max_len

    def observe(self, tokens, hidden, cache):
        new, N = slice(cache.length - len(tokens), cache.length), self.net.cfg.tli
        k, v = cache.k[:, :, :, new], cache.v[:, :, :, new]            # (L, 1, G, T, D)
        self.receive(tokens, self.net.read(k, v, hidden[None]), k[len(k) - N:], v[len(v) - N:])

    def receive(self, tokens, s, k, v):
        """The drafter's side: verified tokens, their states s (1, T, C), k and v (N, 1, G, T, D) of N layers."""
        S, n = len(self.text), len(tokens)
        self.text += tokens
        self.kv = self.ca.write(0, *self.net.ca.keys(s, self.net.rope[:, S:S + n]))          # (1, G, S+T, D)
        self.ca.length += n
        if self.last:
            self.last.k[:, :, :, S:S + n], self.last.v[:, :, :, S:S + n] = k, v
            self.last.length = S + n

    def forward(self, tokens, at, mask, queries):
        """Tokens at positions at through SA; the last ones, all at one position, to the end -> (queries, V)."""
        net, target, pos, rope = self.net, self.target, self.pos[at], self.net.rope[:, at]
        x = target.embed(torch.tensor([tokens], device=pos.device), pos)                             # (1, T, C)
        x = net.sa(x, rope, mask, self.sa)[:, -queries:]
        self.sa.length += len(tokens)
        x = net.ca(x, self.kv, rope[:, -1:], None)                     # no mask: all that is cached is verified
        if self.last:
            x = net.finish(x, target, pos[-1:], mask if len(tokens) == queries else None, self.last)
            self.last.length += queries
        return target.lm_head(x[0])

    def alone(self, tokens):
        """
        Logits (1, V) for what follows unverified tokens behind the text: the root, and what was written after it without
        the target. Asked once for every token more, as far as max_len; a draft or a verification ends it.
        """
        S, end = len(self.text), len(self.text) + len(tokens)
        assert not self.last or self.last.length == end - 1, f"{self.last.length - S} of {len(tokens)} tokens went before"
        self.sa.crop(min(self.sa.length, end - 1))
        new = (self.text + tokens)[self.sa.length:]
        mask = self.target.attention_mask(len(new), None, self.sa, self.sa.k.dtype)
        return self.forward(new, slice(self.sa.length, end), mask, 1)

    def draft(self, root, sampler):
        S = len(self.text)                                             # the root stands at position S
        depth = min(self.depth, self.max_len - S - 2)                  # a deeper node could never be emitted
        if depth < 1 or self.rows < 2:
            return Tree([root], [-1], [1.0])
        tokens, parent, value = [root], [-1], [1.0]
        if self.shape:
            tokens, parent, value = [root] * self.rows, self.shape.parent, [1.0] * self.rows
        self.sa.crop(min(self.sa.length, S))                           # if asked twice, the other root goes
        new = self.text[self.sa.length:] + [root]                      # what SA has not seen yet
        mask = self.target.attention_mask(len(new), None, self.sa, self.sa.k.dtype)
        logits = self.forward(new, slice(self.sa.length, S + 1), mask, 1)
        level, seen, rows = [0], {0: []}, 0                            # seen: rows behind the root, by node
        for d in range(1, depth + 1):
            scores = sampler.rank(logits, [S + d])                     # one row of noise: one position a level
            top = scores.topk(self.breadth)
            logq = top.values - scores.logsumexp(-1, keepdim=True)
            found = torch.cat((logq, top.indices), -1).tolist()        # the one wait for the device in a level
            if self.shape:
                for up, guess in zip(level, found):
                    for i in self.children[up]:
                        r = self.shape.rank[i]
                        tokens[i], value[i] = int(guess[self.breadth + r]), value[up] * math.exp(guess[r])
                level = [i for up in level for i in self.children[up] if self.children[i]]
            else:
                first = len(tokens)
                for up, guess in zip(level, found):
                    for logq, token in zip(guess[:self.breadth], guess[self.breadth:]):
                        q = value[up] * min(1.0, math.exp(logq))       # <= its parent's, so the best are connected
                        if q > self.floor:
                            tokens.append(int(token))
                            parent.append(up)
                            value.append(q)
                best = sorted(range(1, len(tokens)), key=lambda i: -value[i])[:self.rows - 1]
                level = [i for i in best if i >= first][:self.breadth]  # others' children cannot be among the best
            if d == depth or not level:
                break
            seen |= {i: seen[parent[i]] + [row] for row, i in enumerate(level, rows)}
            rows += len(level)
            mask = [[0.0 if j in seen[i] else -math.inf for j in range(rows)] for i in level]
            mask = torch.tensor(mask, dtype=self.sa.k.dtype, device=self.pos.device)
            mask = F.pad(mask, (S + 1, 0))                             # text and root: seen by all
            logits = self.forward([tokens[i] for i in level], slice(S + d, S + d + 1), mask, len(level))
        self.sa.crop(S + 1)                                            # text and root stay, drafts go
        if self.last:
            self.last.crop(S)
        if self.shape:
            return Tree(tokens, parent, value).cut(depth)
        keep = [0] + sorted(best)                                      # in order of birth: parents first
        place = {-1: -1} | {i: n for n, i in enumerate(keep)}
        return Tree([tokens[i] for i in keep], [place[parent[i]] for i in keep], [value[i] for i in keep])


# ---------------------------------------------------------------------------------------------------------------------
# Train

def train(cfg, target, run):
    """
    Train LSA, SA and CA and return them; the target stays frozen. run (train.py) hands out batches (B, T), sets the
    learning rate (warm-up, then cosine), knows the progress (0 to 1), logs, evaluates on held-out text and saves.
    """
    net = Net(cfg, target).to(target.wte.weight.device)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for x in run.steps(net, [opt], lambda x: loss(net, target, x)):
        total, _ = loss(net, target, x, run.progress())
        opt.zero_grad(set_to_none=True)
        total.backward()
        run.sync(net, total)                                           # mean gradient of all processes, clipped
        opt.step()
    return net


# ---------------------------------------------------------------------------------------------------------------------
# Client and server: the wire
#
# The paper's setting; its protocol is not public, this one is ours. The server has the target and LSA; the client has SA,
# CA, embeddings, lm_head and the target's last N layers. Two calls, JSON up, safetensors down:
#
#     /open    the text so far, how many of its states the client has    -> the next token; the states of the others
#     /verify  the length of the text, the tree behind it                -> accepted nodes, bonus token; their states
#
# The server chooses with the session's Sampler, so the text is plain decoding's. A text only grows, so its length says
# whether both sides mean the same one. Whatever went wrong (evicted, restarted, cut off), the client opens again with the
# text that it has shown by then, and the server goes on behind it with the cache rows that still hold.

WIRES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


class Refused(Exception):
    """What the server says to a request that it will not serve: an HTTP status and a line."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Unreachable(Exception):
    """No answer, and no way to go on without one."""


def check(ok, message, status=400):
    if not ok:
        raise Refused(status, message)


def whole(x, low, high):
    """Is x a list of ints in low .. high - 1? JSON's true is none."""
    return type(x) is list and all(type(i) is int and low <= i < high for i in x)


def pack(answer, tensors, wire):
    """A dict of plain JSON types and named tensors -> bytes. int8 has a scale for every vector (last dimension)."""
    out, dtype = {}, WIRES[wire]
    for name, x in tensors.items():
        x = x.float()
        if wire == "int8":
            scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
            out[name + ".scale"], x = scale.contiguous(), (x / scale).round()
        else:
            x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        out[name] = x.to(dtype).contiguous()
    return safetensors.torch.save(out, {"answer": json.dumps(answer)})


def unpack(data, like):
    """What pack wrote -> the dict, and the tensors in the dtype and on the device of like."""
    n, = struct.unpack("<Q", data[:8])
    answer = json.loads(json.loads(data[8:8 + n])["__metadata__"]["answer"])
    raw = {name: x.to(like.device) for name, x in safetensors.torch.load(data).items()}
    return answer, {name: (x.float() * raw.get(name + ".scale", 1.0)).to(like.dtype) for name, x in raw.items()
                    if not name.endswith(".scale")}


# ---------------------------------------------------------------------------------------------------------------------
# Client and server: the server

@dataclass
class Serve:
    """Verify the drafts of clients: python sample.py --method moa --server URL."""
    host: str = arg("127.0.0.1", "address to listen on; any but a loopback address needs a token")
    port: int = arg(8765, "port; 0 takes a free one")
    token: str = arg("", "what clients must know; empty = $NANOSPEC_TOKEN, if that is set")
    sessions: int = arg(16, "texts in work at a time; one more throws out the one that was idle longest", low=1)
    memory_mb: int = arg(1024, "memory for their caches, likewise", low=1)
    idle: float = arg(600.0, "seconds until an idle session is dropped")
    nodes: int = arg(128, "most nodes of a tree, root included", low=1)
    connections: int = arg(64, "connections at a time", low=1)
    timeout: float = arg(20.0, "seconds for a request to come in, or for an answer to be taken", low=0.05)
    out: str = arg("out", "folder of checkpoints, as train.py wrote it")
    checkpoint: str = arg("", "another training of the drafter: a folder or a .safetensors file")
    device: str = arg("auto", "cpu, cuda, cuda:1, mps")
    dtype: str = arg("auto", "of the weights; auto = float32 on a CPU, bfloat16 on a GPU",
                     choices=["auto", "float32", "bfloat16", "float16", "float64"])


class Server(http.server.ThreadingHTTPServer):
    """
    A thread for each connection reads and writes; one worker owns the model and all sessions, so there is nothing to lock.
    What is refused gets a 4xx and {"error": ...}. A request has opt.timeout seconds and self.most bytes.
    """
    daemon_threads, request_queue_size = True, 128

    def __init__(self, target, net, opt):
        self.target, self.net, self.opt, self.sessions = target, net, opt, {}      # sessions: longest idle first
        self.most = 4096 + 12 * (target.cfg.block_size + 2 * opt.nodes)
        self.since = {}                                                # connection -> when its request began to come in
        self.worker = ThreadPoolExecutor(1)
        self.sweep = self.worker.submit(self.make_room)
        self.address_family = socket.AF_INET6 if ":" in opt.host else socket.AF_INET
        super().__init__((opt.host, opt.port), Handler)

    def verify_request(self, request, address):                        # may this connection stay?
        free = len(self.since) < self.opt.connections
        if free:
            self.since[request] = time.monotonic()
        else:
            request.sendall(b'HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\n\r\n{"error": "too many connections"}')
        return free

    def shutdown_request(self, request):
        self.since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self):                                         # twice a second
        for connection, since in list(self.since.items()):
            if since < time.monotonic() - self.opt.timeout:
                try:
                    connection.shutdown(socket.SHUT_RD)                # its thread reads an end, however slowly bytes came
                except OSError:
                    pass
        if self.sweep.done():
            self.sweep = self.worker.submit(self.make_room)

    def handle_error(self, request, address):
        if not isinstance(sys.exc_info()[1], OSError):                 # those are clients that went away
            super().handle_error(request, address)

    def make_room(self, sessions=0, size=0):
        """Drop sessions that were idle too long, then the longest idle ones until so many more, of so many bytes, fit."""
        for name, s in list(self.sessions.items()):
            if (s.used < time.monotonic() - self.opt.idle or len(self.sessions) + sessions > self.opt.sessions
                    or sum(s.size for s in self.sessions.values()) + size > self.opt.memory_mb * 2**20):
                del self.sessions[name]

    @torch.inference_mode()
    def answer(self, path, body):
        """A call -> bytes of the answer. Raises Refused. Runs on the worker."""
        check(path in ("/open", "/verify"), "there are /open and /verify, nothing else", 404)
        try:
            m = json.loads(body)
        except (ValueError, RecursionError):
            m = None
        check(type(m) is dict, "the body must be a JSON object")
        name = m.get("session")
        check(type(name) is str and re.fullmatch("[0-9a-f]{32}", name), "session must be 32 hex digits")
        s = self.sessions.get(name)
        if not s or s.request != (path, body):                         # else the answer was lost: the same once more
            s, answer, start, hidden = (self.open if path == "/open" else self.verify)(s, m)
            new, N = slice(start, s.cache.length), self.net.cfg.tli
            k, v = s.cache.k[:, :, :, new], s.cache.v[:, :, :, new]    # (L, 1, G, T, D)
            states = dict(s=self.net.read(k, v, hidden), k=k[len(k) - N:], v=v[len(v) - N:]) if s.drafts else {}
            s.request, s.reply = (path, body), pack(answer, states, s.wire)
        s.size, s.used = s.cache.k.nbytes + s.cache.v.nbytes + len(s.reply), time.monotonic()
        self.sessions.pop(name, None)
        self.make_room(1, s.size)
        self.sessions[name] = s                                        # the last one to be thrown out
        return s.reply

    def open(self, s, m):
        """Bring session s, or a new one, to the text of m -> session, answer, first row whose state is sent, hidden states."""
        c, w, text, max_len = self.target.cfg, self.target.wte.weight, m.get("text"), m.get("max_len")
        check(m.get("backbone") == self.target.fingerprint, f"this server has the backbone {self.target.fingerprint}, not yours",
              412)
        check(m.get("drafter") in (None, self.net.fingerprint), f"this server has the drafter {self.net.fingerprint}, not yours",
              412)
        check(m.get("wire") in list(WIRES), f"wire must be one of {', '.join(WIRES)}")
        check(text and whole(text, 0, c.vocab_size), f"text must be a list of tokens below {c.vocab_size}")
        check(whole([max_len], len(text) + 1, c.block_size + 1), f"max_len must lie above the {len(text)} tokens of the text, and "
              f"not above {c.block_size}")
        check(whole([m.get("have")], 0, len(text)), f"have must lie between 0 and {len(text) - 1}")
        numbers = {k: m.get(k) for k in ("temperature", "top_k", "top_p", "seed")}
        check(all(type(x) is int or type(x) is float and k in ("temperature", "top_p") for k, x in numbers.items())
              and numbers["temperature"] < 1e6, "temperature and top_p must be numbers, top_k and seed whole ones")
        try:
            sampler = Sampler(**numbers)
        except ValueError as e:
            raise Refused(400, str(e)) from None
        rows = max_len + self.opt.nodes
        size = 2 * c.n_layer * c.n_kv_head * c.head_dim * rows * w.element_size()
        check(size <= self.opt.memory_mb * 2**20, f"{max_len} tokens need more memory than this server gives", 413)
        if not s or s.cache.max_len != rows:
            self.sessions.pop(m["session"], None)
            self.make_room(1, size)                                    # before the memory is taken
            s = SimpleNamespace(cache=self.target.new_cache(rows), text=[])
        same = next((i for i, (a, b) in enumerate(zip(s.text, text)) if a != b), min(len(s.text), len(text)))
        start = min(same, m["have"], len(text) - 1)                    # rows that hold and whose states are not asked for
        s.cache.crop(start)
        s.text, s.request, s.max_len, s.sampler = text[:start], None, max_len, sampler
        s.wire, s.drafts = m["wire"], m.get("drafter") is not None
        hidden = self.target.hidden(torch.tensor([text[start:]], device=w.device), cache=s.cache)
        choice, = sampler.choose(self.target.lm_head(hidden[:, -1]), [len(text)])
        s.cache.keep(range(len(text) - start))
        s.text = text
        return s, {"path": [], "bonus": choice}, m["have"], hidden[:, m["have"] - start:]

    def verify(self, s, m):
        """One target forward over the tree of m, and the walk -> as open."""
        check(s, "there is no such session, or no longer", 404)
        S, V, tokens, parent = len(s.text), self.target.cfg.vocab_size, m.get("tokens"), m.get("parent")
        check(whole([m.get("length")], S, S + 1), f"the text has {S} tokens here", 409)
        check(whole(tokens, 0, V) and 0 < len(tokens) <= self.opt.nodes, f"tokens must be 1 to {self.opt.nodes} tokens below {V}")
        check(type(parent) is list and len(parent) == len(tokens) and all(whole([up], min(i - 1, 0), max(i, 0)) for i, up in
              enumerate(parent)), "parent must be -1, then an earlier node for every token")
        tree, device = Tree(tokens, parent), s.cache.k.device
        check(S + max(tree.depth) < s.max_len, f"the tree reaches beyond the {s.max_len} tokens of this session")
        pos = torch.tensor(tree.depth, device=device) + S
        hidden = self.target.hidden(torch.tensor([tokens], device=device), pos, tree_mask(parent, S).to(device), s.cache)
        choice = s.sampler.choose(self.target.lm_head(hidden[0]), [S + d + 1 for d in tree.depth])
        s.sampler.rows.clear()                                         # V numbers a position, and they can be drawn again
        path, out = walk(tokens, parent, choice)
        s.cache.keep(path)
        s.text = s.text + [tokens[i] for i in path]
        return s, {"path": path, "bonus": out[-1]}, S, hidden[:, path]


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection of the server."""
    protocol_version = default_request_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        self.timeout = self.server.opt.timeout
        super().setup()

    def handle_one_request(self):
        self.server.since[self.connection] = time.monotonic()
        super().handle_one_request()

    def reply(self, status, body):
        self.send_response_only(status)
        self.send_header("Content-Type", "application/octet-stream" if status == 200 else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, message):
        self.reply(status, json.dumps({"error": message}).encode())

    def send_error(self, code, message=None, explain=None):            # http.server's own complaints
        self.close_connection = True
        self.refuse(405 if code == 501 else code if code < 500 else 400, (message or "bad request")[:200])

    def log_message(self, *args):
        pass

    def body(self):
        """First who asks, then how much comes, and only then what it is."""
        given, token = self.headers.get("Authorization", ""), f"Bearer {self.server.opt.token}"
        check(not self.server.opt.token or hmac.compare_digest(given.encode("latin-1", "replace"), token.encode()),
              "the bearer token is missing or wrong", 401)
        if self.command == "GET":
            return b"{}"
        n = self.headers.get("Content-Length", "")
        check(n and "Transfer-Encoding" not in self.headers, "a Content-Length is needed", 411)
        check(n.isascii() and n.isdigit(), "Content-Length must be a number")
        check(len(n) < 12 and int(n) <= self.server.most, f"a body may have {self.server.most} bytes", 413)
        try:
            data = self.rfile.read(int(n))
        except TimeoutError:
            data = b""
        check(len(data) == int(n), f"the body of {n} bytes was cut short, or came too slowly", 408)
        return data

    def do_POST(self):
        keep, self.close_connection = self.close_connection, True      # until the whole body is read
        try:
            data = self.body()
            self.close_connection, self.server.since[self.connection] = keep, math.inf     # now it is we who take time
            if self.command == "GET":                                  # a client that looks whether we are there
                return self.reply(200, data)
            self.reply(200, self.server.worker.submit(self.server.answer, self.path, data).result())
        except Refused as e:
            self.refuse(e.status, str(e))
        except OSError:                                                # the client went away
            raise
        except Exception as e:                                         # our own fault: say so and live on
            print(f"error: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            self.refuse(500, f"the server failed: {type(e).__name__}")

    do_GET = do_POST


def serve(argv):
    """python moa.py serve"""
    opt, = parse(Serve, argv=argv)
    opt.token = opt.token or os.environ.get("NANOSPEC_TOKEN", "")
    try:
        local = opt.host == "localhost" or ipaddress.ip_address(opt.host).is_loopback
    except ValueError:
        local = False
    if not local and not opt.token:
        fail(f"--host {opt.host} may be reached by others: give --token (or NANOSPEC_TOKEN), or leave --host out")
    import sample                                                      # not above: it imports this file
    common = {k: getattr(opt, k) for k in ("out", "checkpoint", "device", "dtype")}
    target, _, drafter, _ = sample.setup(sample.Options(method="moa", **common))
    try:
        server = Server(target, drafter.net, opt)
    except (OSError, OverflowError) as e:
        fail(f"cannot listen on {opt.host} port {opt.port} ({getattr(e, 'strerror', 0) or e}): name another --port or --host")
    print(f"serving {opt.out} at http://{server.server_address[0]}:{server.server_port}", flush=True)
    server.serve_forever()


# ---------------------------------------------------------------------------------------------------------------------
# Client and server: the client

@dataclass
class Split:
    """Write what a client needs of --out and no more: embeddings, lm_head, the target's last N layers, and the drafter."""
    to: str = arg("out/client", "folder for it; give it to sample.py as --out")
    out: str = arg("out", "folder of checkpoints, as train.py wrote it")


def split(argv):
    """python moa.py split"""
    opt, = parse(Split, argv=argv)
    import sample
    target, tokenizer, _, _ = sample.setup(sample.Options(method="moa", out=opt.out, device="cpu", dtype="float32"), remote=True)
    save(os.path.join(opt.to, "backbone", "model.safetensors"), model_tensors(target),
         {"kind": "client", "config": asdict(replace(target.cfg, n_layer=len(target.blocks))), "tokenizer": tokenizer.to_dict(),
          "fingerprint": target.fingerprint})
    save(os.path.join(opt.to, "moa", "model.safetensors"), *load(os.path.join(opt.out, "moa", "model.safetensors"), "", ""))
    print(f"{sum(map(torch.numel, model_tensors(target).values())):,} of the target's parameters and the drafter -> {opt.to}")


def keep_last(target, N):
    """The target as a client has it: no layers but the last N."""
    del target.blocks[:len(target.blocks) - N]


@dataclass
class Remote:
    """The line to a server."""
    server: str = arg("", "let python moa.py serve verify, at this address (http://host:port); empty = all on this machine")
    token: str = arg("", "the server's token; empty = $NANOSPEC_TOKEN, if that is set")
    wire: str = arg("float16", "how states come down; int8 has a scale for every vector", choices=list(WIRES))
    timeout: float = arg(5.0, "seconds to wait for the server before trying again", low=0.01)
    retries: int = arg(3, "how often to try again before going on alone; each pause is twice the last")
    offline_limit: int = arg(128, "tokens to write without the server, one after the other, before giving up")
    probe: float = arg(1.0, "seconds between looks whether a lost server is back", low=0.01)
    rtt_ms: float = arg(0.0, "simulated network: milliseconds added to a round trip")
    mbit: float = arg(0.0, "simulated network: megabits per second each way (0 = no limit)")


@dataclass
class RemoteStats(Stats):
    """Stats of a text verified by a server. Tokens written without it are in offline, and in no count of accepted ones."""
    offline: list = field(default_factory=list)                        # their places in what was written, from 0
    calls: int = 0                                                     # requests sent, repeated ones too
    up: int = 0                                                        # bytes, headers too
    down: int = 0
    waiting: float = 0.0                                               # seconds


# what a line can do to an exchange: no answer, half an answer, another's answer
FAULTS = (OSError, http.client.HTTPException, safetensors.SafetensorError, struct.error, ValueError, KeyError, TypeError)


class Client:
    """Decodes with a server's target. alone: was the last step written without it?"""

    def __init__(self, opt):
        url = urlsplit(opt.server)
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.port == 0:        # or it raises
            raise ValueError(f"--server must look like http://127.0.0.1:8765, not {opt.server!r}")
        self.opt, self.url, self.line, self.alone = opt, url, None, False
        token = opt.token or os.environ.get("NANOSPEC_TOKEN", "")
        self.headers = {"Authorization": f"Bearer {token}".encode()} if token else {}

    def connect(self):
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        return kind(self.url.hostname, self.url.port, timeout=self.opt.timeout)

    def travel(self, n):
        """What n bytes more cost on the simulated network."""
        time.sleep(8e-6 * n / self.opt.mbit if self.opt.mbit else 0)

    def exchange(self, path, body):
        """One request on the line at hand -> status, bytes."""
        stats, half = self.stats, self.opt.rtt_ms / 2000
        if self.line is None:
            self.line = self.connect()
            send = self.line.send
            def counted(data):
                stats.up += len(data)
                self.travel(len(data))
                send(data)
            self.line.send = counted
            time.sleep(2 * half)                                       # a handshake
        stats.calls += 1
        time.sleep(half)
        self.line.request("POST", path, body, self.headers)
        r = self.line.getresponse()
        data = r.read()
        n = len(data) + sum(len(k) + len(v) + 4 for k, v in r.headers.items()) + len(r.reason) + 17        # and the status line
        stats.down += n
        self.travel(n)
        time.sleep(half)
        return r.status, data

    def call(self, path, message, like, tries):
        """-> answer and tensors. Raises Refused for a 4xx, and Unreachable if no try brought an answer."""
        body, start = json.dumps(message).encode(), time.perf_counter()
        try:
            for i in range(tries):
                if i:
                    time.sleep(min(0.1 * 2**i, 5.0))
                try:
                    status, data = self.exchange(path, body)
                    if status == 200:
                        return unpack(data, like)
                    error = json.loads(data)["error"]
                    if status < 500 and status not in (408, 429):
                        raise Refused(status, f"the server refuses: {error}")
                except FAULTS as e:
                    error = str(e) or type(e).__name__
                self.hang_up()
            raise Unreachable(f"no answer from {self.opt.server} after {tries} tries ({error})")
        finally:
            self.stats.waiting += time.perf_counter() - start

    def hang_up(self):
        if self.line:
            self.line.close()
        self.line = None

    def watch(self):
        """-> an event that is set once the server answers again. A thread looks now and then; no token waits for it."""
        back = threading.Event()
        def look():
            while not back.wait(self.opt.probe):
                line = self.connect()
                try:
                    line.request("GET", "/", headers=self.headers)
                    line.getresponse().read()
                    back.set()
                except FAULTS:
                    pass
                finally:
                    line.close()
        threading.Thread(target=look, daemon=True).start()
        return back

    @torch.inference_mode()
    def generate(self, target, prompt, max_new_tokens, drafter=None, sampler=None, eos=()):
        """
        tree.generate with the server's target; of target here only embeddings, lm_head and the last N layers are used. Same
        text, as long as the server answers. Without it the drafter writes on by itself, at most opt.offline_limit tokens at
        a stretch; what was shown stays, and the server takes it as given when it is back. Returns RemoteStats.

        Raises ValueError as generate, Refused, and Unreachable if the server is lost for longer than that.
        """
        block, opt, sampler = target.cfg.block_size, self.opt, sampler or Sampler()
        if not 0 < len(prompt) < block:
            raise ValueError(f"the prompt has {len(prompt)} tokens: it must have some, and leave room in a context of {block}")
        left = min(max_new_tokens, block - len(prompt))
        stats = self.stats = RemoteStats(stop="budget" if max_new_tokens <= block - len(prompt) else "context")
        text, like, known = list(prompt), target.wte.weight, 0         # known: tokens whose states are here
        live, back, alone = False, None, 0                             # live: the server has text[:known], the root is behind it
        session = dict(session=secrets.token_hex(16), backbone=target.fingerprint, max_len=len(prompt) + left,
                       drafter=drafter and drafter.net.fingerprint, wire=opt.wire,
                       **{k: getattr(sampler, k) for k in ("temperature", "top_k", "top_p", "seed")})
        if drafter:
            drafter.start(target, len(prompt) + left)
        clock = time.perf_counter()
        def lap(what):
            nonlocal clock
            clock, before = time.perf_counter(), clock
            stats.seconds[what] += clock - before

        try:
            while left and stats.stop != "eos":
                self.alone = False
                try:
                    if live:
                        tree = drafter.draft(text[-1], sampler).cut(left - 1) if drafter else Tree([text[-1]], [-1])
                        lap("draft")
                        message = dict(session=session["session"], length=known, tokens=tree.tokens, parent=tree.parent)
                        answer, states = self.call("/verify", message, like, 1 + opt.retries)
                        new = [tree.tokens[i] for i in answer["path"]]
                    elif back and not back.is_set() and alone < opt.offline_limit:
                        raise Unreachable
                    else:
                        patient = back is None or alone == opt.offline_limit
                        message = session | dict(text=text, have=known)
                        answer, states = self.call("/open", message, like, 1 + opt.retries * patient)
                        new = text[known:]
                    if drafter:
                        drafter.receive(new, states["s"], states["k"], states["v"])
                    out = (new[1:] if live else []) + [answer["bonus"]]
                    if back:
                        back.set()                                     # nobody need look any longer
                    known, live, back, alone = known + len(new), True, None, 0
                except Refused as e:
                    if live and e.status in (404, 409):                # evicted, restarted, or gone on without us: open again
                        live = False
                        continue
                    raise
                except Unreachable as e:
                    if not known or not drafter or alone == opt.offline_limit:
                        raise Unreachable(f"{e}; {alone} tokens were written without it, --offline-limit allows no more"
                                          if known and drafter else str(e)) from None
                    live, self.alone, alone = False, True, alone + 1
                    back = self.watch() if back is None or back.is_set() else back
                    out = sampler.choose(drafter.alone(text[known:]), [len(text)])
                end = next((i + 1 for i, token in enumerate(out) if token in eos), 0)
                out = out[:end or None]
                stats.stop = "eos" if end else stats.stop
                if self.alone:
                    stats.offline.append(len(text) - len(prompt))
                else:
                    stats.accepted.append(len(out))
                text += out
                left -= len(out)
                sampler.forget(len(text) - 1)
                lap("rest" if self.alone else "verify" if len(stats.accepted) > 1 else "prompt")
                yield out
                clock = time.perf_counter()                            # what the caller did meanwhile is not ours
            return stats
        finally:
            self.hang_up()
            if back:
                back.set()


# ---------------------------------------------------------------------------------------------------------------------
# Self-check

if __name__ == "__main__":
    if sys.argv[1:]:
        commands = {"serve": serve, "split": split}
        if sys.argv[1] not in commands:
            fail(f"python moa.py takes nothing (a self-check), serve or split, not {sys.argv[1]}")
        try:
            raise SystemExit(commands[sys.argv[1]](sys.argv[2:]))
        except KeyboardInterrupt:
            raise SystemExit(130)
    torch.manual_seed(0)
    target = GPT(GPTConfig(n_layer=2, n_embd=32, n_ffn=64, vocab_size=50, block_size=128)).double().eval()
    drafter = Drafter(Net(Config(), target).double(), target)
    for T in (0.0, 1.0):
        plain, _ = complete(target, [1, 2, 3], 100, sampler=Sampler(T))
        text, stats = complete(target, [1, 2, 3], 100, drafter, Sampler(T))
        assert text == plain, "the drafter changed the text"
        print(f"moa, untrained, T = {T:.0f}: {len(text)} tokens in {len(stats.accepted)} target forwards, same text as plain decoding")
