r"""
Medusa: extra heads on a frozen language model guess several future tokens from one hidden state.

Paper    Cai et al. 2024, arXiv:2401.10774
Idea     1. One target forward gives the hidden state h_t and the target's own next token.
         2. K heads read the same h_t; head k guesses the token k places after the next one.
         3. The best guesses of all heads form a tree of candidate continuations.
         4. One target forward with a tree mask scores every node of the tree.
         5. Walk the tree along the target's own choices; add one token of the target's own.

                  +-- lm_head --> x[t+1]                 x[t+1]            0  x . . .
            h_t --+-- head 1  --> x[t+2]      tree       /    \            1  x x . .
                  +-- head 2  --> x[t+3]                a      b           2  x . x .
                  +-- head K  --> x[t+1+K]              |                  3  x x . x
                                                        c                 (row may look at column)

Maths    q_k(. | h_t) = softmax( W2_k ( h_t + silu(W1_k h_t) ) ),   k = 1..K                      (2.1.1)
         loss = sum_k decay^k [ hard * CE( x[t+1+k], q_k ) + soft * CE( p(. | x[..t+k]), q_k ) ]   (2.2.1)
         Medusa-2:  L = L_LM + heads_weight * loss                                            (2.2.2)
                    L_LM = CE( x[t+1], p )  or  KL( p_original || p )                         (2.3.2)
         paper:  W_1^(k)  W_2^(k)  lambda_k  lambda_0      here:  proj  out[k-1]  decay^k  heads_weight

Shapes   B batch, T tokens, C channels, V vocabulary, K heads, M anchors of a batch in one row
Differs  Exact acceptance by default; sample.py --accept typical is the paper's (2.3.1) and changes the text.
         Heads share the target's frozen lm_head (as the authors' first trainer did); --no-share-head gives
         each its own W2 as in the paper, V * C weights, a copy of the lm_head at the start.
         The loss aims at the target's own distribution (--soft) more than at the text (--hard): the paper's
         Medusa-1 is --soft 0 --hard 1, and is accepted less (bench/RESULTS.md). Anchors are drawn at random.
         W1 starts at zero with its bias, so every head starts as the lm_head; the authors' bias is random.
         Four heads, not five. The tree is grown anew each step from the heads' own probabilities;
         --tree sparse is the paper's (2.3.3), from calibration on held-out text.
         Medusa-2 trains all of a copy of the target, no LoRA on a quantised one, both stages in one schedule.
         --ramp raises the weight of the heads' loss, as eq. 2 and the authors' code; their prose differs.
Run      python train.py --method medusa  # 2 cores, 61 s: head 1 right .136 of the time, tau 1.74 at 8 nodes
         python sample.py --method medusa --compare
         python train.py --method medusa --recipe 2  # Medusa-2: all of a copy of the target -> out/medusa2
         python sample.py --method medusa --out out/medusa2
"""
import copy
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, DraftLMHead, GPTConfig, arg
from tree import Sampler, complete, plant


# --------------------------------------------------------------------------------------------------
# Config

@dataclass
class Config:
    """Heads on a frozen target (Medusa-1), or heads and a backbone of their own (Medusa-2)."""
    n_heads: int = arg(4, "K, number of heads; head k guesses the token k places after the next one",
                       low=1, high=1000)
    share_head: bool = arg(True, "heads end in the target's frozen lm_head; off = a trained output matrix "
                           "for each (the paper's)")
    soft: float = arg(1.0, "weight of the cross-entropy against the target's own distribution")
    hard: float = arg(0.1, "weight of the cross-entropy against the text (the paper: 1, and soft 0)")
    decay: float = arg(0.8, "head k weighs decay^k in the loss", high=1)
    anchors: int = arg(64, "random anchors a sequence that a training step puts through the heads; 0 = all")
    steps: int = arg(400, "optimiser steps", low=1)
    batch_size: int = arg(8, "sequences in a step", low=1, high=2**20)
    lr: float = arg(3e-3, "learning rate at its peak")
    recipe: int = arg(1, "1 = Medusa-1; 2 = Medusa-2, which also trains a copy of the backbone "
                      "-> OUT/medusa2", choices=[1, 2])
    warmup: float = arg(0.5, "recipe 2: share of the training in which the heads learn alone (stage 1)")
    heads_weight: float = arg(0.2, "recipe 2: lambda_0, weight of the heads' loss beside the "
                              "language model's")
    ramp: str = arg("none", "recipe 2: how heads_weight grows from 0 in the joint training",
                    choices=["none", "linear", "sine"])
    backbone_lr: float = arg(0.25, "recipe 2: learning rate of the backbone, as a share of the heads'")
    lm: str = arg("text", "recipe 2: the backbone learns the text, or to stay what it was (kl; right for "
                  "text that it wrote itself, for one more forward of the original a step)",
                  choices=["text", "kl"])

    def __post_init__(self):
        if self.warmup >= 1:
            raise ValueError(f"--warmup is a share of the training and must be below 1, not {self.warmup}")

    @property
    def min_tokens(self):
        """A training sequence has so many, or more."""
        return self.n_heads + 2


# --------------------------------------------------------------------------------------------------
# Modules

class Net(nn.Module):
    """K residual blocks that all read the same hidden state, each followed by an output matrix."""

    def __init__(self, cfg, target, vocab=None):
        super().__init__()
        C = target.cfg.n_embd
        self.cfg, self.K = cfg, cfg.n_heads
        self.head = DraftLMHead(target, vocab)        # the frozen lm_head, or its rows for a draft vocabulary
        self.proj = nn.Linear(C, self.K * C)                           # W1 of all heads in one product
        nn.init.zeros_(self.proj.weight)                               # silu(0) = 0, so at the start ...
        nn.init.zeros_(self.proj.bias)                            # ... every head equals the target's lm_head
        self.out = None
        if not cfg.share_head:
            self.out = nn.Parameter(self.head.matrix(target).repeat(self.K, 1, 1))      # W2 (K, V, C), a copy

    def forward(self, h, target):  # (M, C) -> logits (M, K, V)
        z = h.unsqueeze(1) + F.silu(self.proj(h)).unflatten(1, (self.K, -1))     # h + silu(W1 h)  (M, K, C)
        if self.out is None:
            return self.head(z, target)                                # W2: the lm_head
        return (self.out @ z.permute(1, 2, 0)).permute(2, 0, 1)        # (K, V, C) @ (K, C, M)


# --------------------------------------------------------------------------------------------------
# Loss

def predictions(net, target, x, states=None):
    """
    What the heads say on the text x (B, T), for every anchor at once. Yields for k = 1..K: logits (M, V)
    of head k, the tokens (M,) it should have guessed, and the target's own logits (M, V) for them, with
    M = B * (T - k - 1); while training, M = B * cfg.anchors at most, drawn anew for every batch.
    states: the target's hidden states (Medusa-2: gradients flow through them) and logits, if there already.
    """
    if states is None:
        with torch.no_grad():
            h = target.hidden(x)                                       # (B, T, C)
            states = h, net.head(h, target)                            # (B, T, V)
    h, own = states
    B, T, C = h.shape
    at = torch.arange(T - 1, device=x.device).expand(B, -1)            # (B, A) anchors t
    if net.training and 0 < net.cfg.anchors < T - net.K - 1:
        at = torch.rand(B, T - net.K - 1).topk(net.cfg.anchors).indices.to(x.device)
    row = torch.arange(B, device=x.device)[:, None]
    logits = net(h[row, at].flatten(0, 1), target).unflatten(0, (B, -1))           # (B, A, K, V)
    for k, guess in enumerate(logits.unbind(2), 1):
        n = max(0, T - k - 1)                                          # the last anchors have no x[t+1+k]
        t = at[:, :n]
        truth = net.head.labels(x[row, t + 1 + k]).flatten()
        yield guess[:, :n].flatten(0, 1), truth, own[row, t + k].flatten(0, 1)


def loss(net, target, x, states=None):
    """x (B, T) -> the training loss, and how often each head's best guess is right (K,), as a share."""
    cfg, total, top1 = net.cfg, 0.0, []
    for k, (guess, truth, own) in enumerate(predictions(net, target, x, states), 1):
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

class Drafter:
    """Keeps the hidden state of the last committed token; one product of all heads makes a draft."""

    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0):
        self.net, self.target, self.shape, self.floor = net.eval(), target, shape, floor
        self.max_nodes = self.cache_rows = max_nodes if shape is None else len(shape.parent)

    def start(self, target, max_len):
        """Forget the last text; at most max_len tokens follow."""
        self.h, self.n = None, 0

    def observe(self, tokens, hidden, cache):
        """tokens (T,) became text; hidden (T, C) are the target's states for them."""
        self.h = hidden[-1:]                                           # (1, C)
        self.n += len(tokens)                                          # the root stands at position n

    def draft(self, root, sampler, limit=None):
        """-> a Tree of at most limit nodes of what the heads see after root, the token at position n."""
        logits = self.net(self.h, self.target)[0]                      # (K, V)
        scores = sampler.rank(self.net.head.full_vocab(logits), range(self.n + 1, self.n + 1 + self.net.K))
        return plant(root, scores, self.shape, limit or self.max_nodes, self.floor)


# --------------------------------------------------------------------------------------------------
# Train

def train(cfg, target, run):
    """
    Train the heads and return them; the target stays frozen. run (train.py) hands out batches (B, T),
    sets the learning rate (warm-up, then cosine), logs, evaluates on held-out text and saves.
    """
    net = Net(cfg, target, run.vocab).to(target.wte.weight.device)
    if cfg.recipe == 2:
        return train_jointly(cfg, net, target, run)
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
# Medusa-2 (2.2.2)

class Joint(nn.Module):
    """The heads, and a copy of the target that trains and decodes with them; the original stays as it is."""

    def __init__(self, net, target):
        super().__init__()
        self.net, self.target = net, copy.deepcopy(target).requires_grad_(True)


def joint_loss(joint, original, x, weight):
    """x (B, T) -> L_LM + weight * L_Medusa1 (eq. 2), L_LM, and the top-1 of each head (K,)."""
    h = joint.target.hidden(x)
    logits = joint.target.lm_head(h)                                   # (B, T, V)
    if joint.net.cfg.lm == "kl":                              # 2.3.2: labels it wrote itself would sharpen it
        with torch.no_grad():
            p = original(x)[0].log_softmax(-1)
        lm = F.kl_div(logits.log_softmax(-1), p, log_target=True, reduction="none").sum(-1).mean()
    else:
        lm = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    heads, top1 = loss(joint.net, joint.target, x, (h, logits.detach()))
    return lm + weight * heads, lm, top1


def held_out(joint, original, x):
    """For the log: joint loss, top-1, and the backbone's loss on the text before and now, in nats a token."""
    total, _, top1 = joint_loss(joint, original, x, joint.net.cfg.heads_weight)
    now, before = (F.cross_entropy(model(x[:, :-1])[0].flatten(0, 1), x[:, 1:].flatten())
                   for model in (joint.target, original))
    return total, top1, {"backbone_before": before, "backbone": now}


def train_jointly(cfg, net, target, run):
    """
    Two stages: the heads alone, then the backbone too, at a lower rate; returns a Joint, which train.py
    saves as the backbone and the heads of OUT/medusa2. Without stages
    (--warmup 0 --backbone-lr 1 --heads-weight 1) the heads' first, large gradients damage the backbone, as
    in table 2. Memory: a copy, its gradients, AdamW's two numbers a weight; --lm kl adds logits (B, T, V).
    """
    joint = Joint(net, target)
    opt = torch.optim.AdamW([dict(params=list(net.parameters())),
                             dict(params=list(joint.target.parameters()), lr=cfg.lr * cfg.backbone_lr)],
                            lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=target.wte.weight.is_cuda)
    for x in run.steps(joint, [opt], lambda x: held_out(joint, target, x)):
        done = (run.progress() - cfg.warmup) / (1 - cfg.warmup)        # of the joint training; < 0 in stage 1
        if done < 0:
            total, _ = loss(net, target, x)                 # joint.target gets no gradient and is not touched
        else:
            if cfg.warmup:                             # AdamW knows nothing of the backbone yet: start gently
                opt.param_groups[1]["lr"] *= min(1.0, 10 * done)
            ramp = {"none": 1.0, "linear": done, "sine": math.sin(done * math.pi / 2)}[cfg.ramp]
            total, _, _ = joint_loss(joint, target, x, cfg.heads_weight * ramp)
        opt.zero_grad(set_to_none=True)
        total.backward()
        run.sync(joint, total)
        opt.step()
    return joint


# --------------------------------------------------------------------------------------------------
# Typical acceptance (2.3.1)

def walk_typical(tokens, parent, choice, p, epsilon, delta):
    """
    LOSSY, never the default: Medusa's typical acceptance (2.3.1). A node is accepted with its parent if the
    target finds its token likely enough, measured by how certain the target is there,

        p(x) > min( epsilon, delta * exp(-H(p)) )          H: entropy of p in nats

    whether or not the target would have chosen it. The longest accepted path is taken, the likelier of
    equally long ones. The root, the bonus token of the step before, is always accepted, and the bonus
    token is the target's greedy choice, so a step yields one token at least. At temperature 0 (p one-hot)
    this is walk; above, the text depends on the drafter and is no sample of the target's distribution.

    p (N, V): Typical.probabilities after each node; all else as for walk, with a greedy choice.
    """
    bound = (delta * torch.exp(-torch.special.entr(p).sum(-1))).clamp(max=epsilon)       # (N,)
    up = parent[1:]
    chance = p[up, tokens[1:]]                                         # (N - 1,) of every node after the root
    ok, chance = (chance > bound[up]).tolist(), chance.log().tolist()
    accepted = {0: (0, 0.0)}                                           # node -> (depth, log p of its path)
    for i, (a, good, logp) in enumerate(zip(up, ok, chance), 1):
        if good and a in accepted:
            accepted[i] = accepted[a][0] + 1, accepted[a][1] + logp
    path = [max(accepted, key=accepted.get)]
    while path[0]:
        path.insert(0, parent[path[0]])
    return path, [tokens[i] for i in path[1:]] + [choice[path[-1]]]


class Typical:
    """
    LOSSY: what generate is handed for --accept typical. sampler: the target's temperature, top-k, top-p.
    Choices are greedy and draw no noise, so the seed has no effect: decode with the sampler self.greedy.
    Raises ValueError for values that make no sense.
    """

    def __init__(self, sampler, epsilon=0.09, delta=0.3):
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon must lie between 0 and 1, not {epsilon}")
        if not 0 <= delta < math.inf:
            raise ValueError(f"delta must be 0 or more, not {delta}")
        self.sampler, self.epsilon, self.delta = sampler, epsilon, delta
        self.greedy = Sampler(0.0, seed=sampler.seed, share=sampler.share)

    def probabilities(self, logits):
        """(N, V) -> (N, V): the target's distribution after temperature (0: one-hot), top-k and top-p."""
        s = self.sampler
        z = logits.double() if logits.dtype == torch.float64 else logits.float()
        if s.temperature == 0:
            return F.one_hot(z.argmax(-1), z.size(-1)).to(z.dtype)
        z = s.filter(z)
        return ((z - z.max(-1, keepdim=True).values) / s.temperature).softmax(-1)   # shifted: no overflow

    def __call__(self, tree, choice, logits):
        p = self.probabilities(logits)
        return walk_typical(tree.tokens, tree.parent, choice, p, self.epsilon, self.delta)


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
        print(f"medusa, untrained, T = {T:.0f}: {len(text)} tokens in "
              f"{len(stats.accepted)} target forwards, same text as plain decoding")
