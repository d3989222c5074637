r"""
Hidden Transfer: linear maps make states of tokens to come inside the target; its upper blocks finish them.

Paper    Wu et al. 2024, arXiv:2404.12022
Idea     1. At the input of block l, K linear maps make K pseudo states of the state of token n, the anchor.
         2. State k stands for token n + k, yet unknown. Blocks l .. L-1 run them beside the real rows.
         3. The target's own norm and lm_head read K more tokens from them, in the same forward pass.
         4. That pass verifies: likely last nodes carry K states each, and those of the true one draft next.

                     real rows    group of a   group of b           looks at  S  x a b   a1 a2   b1 b2
            hidden   x   a   b    a1*  a2*     b1*  b2* -> guesses     x      1  1 . .    .  .    .  .
                     ^   ^   ^    ^    ^       ^    ^                  a      1  1 1 .    .  .    .  .
            l..L-1   |   |   |    |    |       |    |                  b      1  1 . 1    .  .    .  .
                     x   a   b   W1 a W2 a    W1 b W2 b                a1     1  1 1 .    1  .    .  .
                     ^   ^   ^                                         a2     1  1 1 .    1  1    .  .
            0..l-1   |   |   |    not run for pseudo states            b1     1  1 . 1    .  .    1  .
                     x   a   b    (tree: x -> a, x -> b; K = 2)        b2     1  1 . 1    .  .    1  1

Maths    p_k  = W_k h_n                  h_n: state of anchor n at the input of block layers[k-1], k = 1..K
         q_k  = softmax( lm_head( norm( blocks l..L-1 of p_k, given x_<=n, p_1..p_k ) ) )   at position n + k
         loss = sum_k decay^k * KL( target( . | x_<=n+k ) || q_k )                          both for x[n+1+k]

Shapes   B batch, T tokens, C channels, V vocabulary, K draft positions, L blocks, N tree nodes, S cached
         tokens, M anchors. Pseudo rows lie position by position: row (slot of k) * M + (index of anchor)
Differs  The paper's method section could not be had, and no public code is known. What rests on what:
         abstract    states are transferred, later layers refine them, a tree verifies, lossless
         digests     one linear map a position is trained, by KL to the target (direction untold: --kl)
         follows     position n + k (gpt2 adds positions at its input only: W_k says it); pseudo keys go
         remembered  three positions, four fifths up (unchecked); here four, to compare, three quarters up
         our own     from h_n, not the state before (--source); start (--init); earlier states are seen
                     (--blind; from a figure's title); decay^k; random anchors; groups as measured (Drafter)
Run      python train.py --method hidden_transfer   # 2 cores, 59 s: state 1 right .142, tau 1.77 at 8 nodes
         python sample.py --method hidden_transfer --compare
"""
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, DraftLMHead, GPTConfig, arg
from tree import Sampler, complete, plant


# --------------------------------------------------------------------------------------------------
# Config

@dataclass
class Config:
    """Hidden Transfer: pseudo states of the next K tokens on a frozen target."""
    n_heads: int = arg(4, "K, number of pseudo states; state k guesses the token k places after the next one",
                       low=1, high=1000)
    layers: str = arg("", "block at whose input the states are made: one for all, such as 3, or one each, "
                          "such as 2,2,3,3; empty = three quarters up")
    source: str = arg("anchor", "made from the anchor, or from the state before it",
                      choices=["anchor", "previous"])
    blind: bool = arg(False, "hide the pseudo states of an anchor from each other")
    init: str = arg("identity", "the maps at the start", choices=["identity", "random"])
    kl: str = arg("forward", "KL(target || draft), or KL(draft || target)", choices=["forward", "reverse"])
    hard: float = arg(0.0, "share of the loss against the text instead of the target's own distribution")
    decay: float = arg(0.8, "state k weighs decay^k in the loss", high=1)
    anchors: int = arg(64, "anchors drawn from a sequence in a training step (0 = all of them)")
    steps: int = arg(260, "optimiser steps", low=1)
    batch_size: int = arg(8, "sequences in a step", low=1, high=2**20)
    lr: float = arg(3e-3, "learning rate at its peak")

    @property
    def min_tokens(self):  # of a training sequence
        return self.n_heads + 2


# --------------------------------------------------------------------------------------------------
# Modules

class Net(nn.Module):
    """K linear maps, and the passage of what they make through the target's upper blocks."""

    def __init__(self, cfg, target, vocab=None):
        super().__init__()
        C, L, K = target.cfg.n_embd, target.cfg.n_layer, cfg.n_heads
        self.cfg, self.K = cfg, K
        self.head = DraftLMHead(target, vocab)        # the frozen lm_head, or its rows for a draft vocabulary
        self.proj = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(K))      # W_k
        for proj in self.proj:
            nn.init.eye_(proj.weight) if cfg.init == "identity" else nn.init.normal_(proj.weight, std=C**-0.5)
        try:
            layers = [int(l) for l in cfg.layers.split(",")] if cfg.layers else [3 * L // 4]
        except ValueError:
            layers = []
        self.layers = layers = layers * K if len(layers) == 1 else layers
        if not layers or len(layers) != K or min(layers) < 0 or max(layers) >= L:
            raise ValueError(f"--layers {cfg.layers} must be one number, or one for each of {K} positions, "
                             f"from 0 to {L - 1}")
        if cfg.source == "previous" and layers != sorted(layers):
            raise ValueError(f"--layers {cfg.layers}: with --source previous no state can be made below "
                             "the one before it")
        order = sorted(range(1, K + 1), key=lambda k: layers[k - 1])   # k in the order of joining
        self.order, self.slot = np.array(order), [order.index(k) for k in range(1, K + 1)]
        i, j = self.order[:, None], self.order                         # state i looks at state j
        self.sees = i == j if cfg.blind else i >= j                    # (K, K)
        self.first = min(layers)                                       # below it: real rows only

    def positions_and_mask(self, target, n, real):
        """Of K states of each anchor at n (M,), positions (K*M,) and mask (K*M, S+K*M): they look at what the
        anchor sees, real (M, S), itself included, and at the states of their own group up to themselves."""
        M, device = len(n), target.wte.weight.device
        pos = np.minimum(np.add.outer(self.order, n), target.cfg.block_size - 1).flatten()
        siblings = np.kron(self.sees, np.eye(M)).astype(bool)          # never at another group's
        mask = np.concatenate((np.tile(real, (self.K, 1)), siblings), 1)
        return torch.from_numpy(pos).to(device), torch.from_numpy(mask).to(device)

    def join(self, l, x, h):
        """Rows x, and behind them the states made at the input of block l from the anchors' h (B, M, C)."""
        rows = [x]                                                     # (B, n, C)
        for k in self.order:
            if self.layers[k - 1] == l:
                chained = self.cfg.source == "previous" and k > 1
                rows.append(self.proj[k - 1](rows[-1][:, -h.size(1):] if chained else h))
        return torch.cat(rows, 1)

    def forward(self, target, x, anchors, pos, mask, cache, every=False):
        """
        Blocks first .. L-1 on N >= 0 real rows x (B, N, C) and the pseudo rows, which join behind them.
        anchors(l, x) -> their states (B, M, C) at the input of block l, or None. pos, mask: of all rows.
        -> {l: rows (B, N+K*M, C) at the input of block l, where some join (every: of all l); L: the output}.
        """
        L, states = target.cfg.n_layer, {}
        stops = sorted({*self.layers, *(range(self.first, L) if every else ())})
        for l, stop in zip(stops, stops[1:] + [L]):
            if anchors is not None:
                x = self.join(l, x, anchors(l, x))
            states[l] = x
            n = x.size(1)                                              # later states are not there yet
            seen = None if mask is None else mask[:n, :cache.length + n]
            x = target.run(x, pos[:n], seen, cache, l, stop)
        states[L] = x
        return states


# --------------------------------------------------------------------------------------------------
# Loss

class JoinedCache:
    """A text's full cache: new rows are joined to it, not written into it, so that gradients reach them."""

    def __init__(self, cache):
        self.k, self.v, self.length = cache.k, cache.v, cache.max_len  # full: the text has max_len rows

    def write(self, layer, k, v):
        return torch.cat((self.k[layer], k), 2), torch.cat((self.v[layer], v), 2)


@torch.no_grad()
def context(target, x):
    """The target's own pass over x (B, T) -> the L + 1 states (B, T, C) between blocks, keys and values."""
    pos, cache = target.positions(x.size(1)), target.new_cache(x.size(1), x.size(0))
    h = [target.embed(x, pos)]
    for l in range(target.cfg.n_layer):
        h.append(target.run(h[l], pos, None, cache, l, l + 1))
    return h, JoinedCache(cache)


def transfer(net, target, h, cache, at, every=False):
    """Pseudo states for the anchors at (A,) of a text in one pass -> {l: (B, 1..K, A, C)}: Net.forward's."""
    real = np.tri(h[0].size(1), dtype=bool)[at.numpy()]                # (A, T)  the text up to the anchor
    pos, mask = net.positions_and_mask(target, at.numpy(), real)
    on = at.to(pos.device)
    states = net(target, h[0][:, :0], lambda l, x: h[l][:, on], pos, mask, cache, every)
    return {l: x.unflatten(1, (-1, len(at))) for l, x in states.items()}


def predictions(net, target, x):
    """
    What the pseudo states of every anchor say on the text x (B, T). Yields for k = 1..K: logits (M, V), the
    tokens (M,) to guess, the target's own logits (M, V); M = B * (T - k - 1), or B * cfg.anchors in training.
    """
    T, K, some = x.size(1), net.K, net.cfg.anchors
    assert T > K + 1, f"{T} tokens are too few for {K} draft positions"
    at = torch.arange(T - 2)                                           # all that have a token to guess
    if net.training and some > 0:                         # some that have K, the same in every sequence
        at = torch.randperm(T - K - 1)[:some].sort().values
    h, cache = context(target, x)
    states = [transfer(net, target, h, cache, part)[target.cfg.n_layer] for part in at.split(64)]
    states = torch.cat(states, 2)     # (B, K, A, C)   no anchor sees another: 64 at a time save memory
    for k in range(1, K + 1):
        n = at[at < T - k - 1].to(x.device)                            # x[n + k + 1] is in the text
        with torch.no_grad():
            own = net.head(target.norm(h[-1][:, n + k]), target)       # (B, A, V)  teacher forcing
        guess = net.head(target.norm(states[:, net.slot[k - 1], :len(n)]), target)     # (B, A, V)
        yield guess.flatten(0, 1), net.head.labels(x[:, n + k + 1]).flatten(), own.flatten(0, 1)


def loss(net, target, x):
    """x (B, T) -> the training loss, and how often each state's best guess is right (K,)."""
    cfg, total, top1 = net.cfg, 0.0, []
    for k, (guess, truth, own) in enumerate(predictions(net, target, x), 1):
        error = 0.0
        if cfg.hard < 1 and cfg.kl == "forward":
            error = (1 - cfg.hard) * F.cross_entropy(guess, own.softmax(-1))   # KL + own's entropy
        elif cfg.hard < 1:
            p, q = own.log_softmax(-1), guess.log_softmax(-1)          # sum_v q (log q - log p)
            error = (1 - cfg.hard) * F.kl_div(p, q, log_target=True, reduction="batchmean")
        if cfg.hard > 0:
            error = error + cfg.hard * F.cross_entropy(guess, truth, reduction="sum") / len(truth)
        total = total + cfg.decay**k * error
        top1.append((guess.argmax(-1) == truth).float().mean())
    return total, torch.stack(top1)


# --------------------------------------------------------------------------------------------------
# Draft

OPTIONS = {"groups": "nodes that carry pseudo states in the verifying forward"}
MOST_GROUPS = 4


class Drafter:
    """
    Groups of K pseudo rows ride in the target's forward, for the nodes likeliest to end the path; if another
    ends it, K rows run alone. By default what is cheapest: the rows, and P(another) times such a pass.
    """

    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0, groups=None):
        self.net, self.target, self.shape, self.floor = net.eval(), target, shape, floor
        self.max_nodes = max_nodes if shape is None else len(shape.parent)
        self.fixed = groups is not None
        self.groups = min(groups if self.fixed else MOST_GROUPS, self.max_nodes)   # at most, unless fixed
        self.cache_rows = self.max_nodes + max(1, self.groups) * net.K
        self.ended = np.array([4.0, 2.0] + [1.0] * (self.groups - 1))  # paths that ended at rank r (prior)

    def start(self, target, max_len):
        """Forget the last text; at most max_len tokens follow."""
        target.reserve(max_len + self.net.K)
        self.tree, self.ends, self.states, self.h, self.n = None, [], {}, None, 0

    def n_groups(self):
        """How many groups the next forward carries."""
        if self.fixed or not self.target.seconds:
            return self.groups if self.fixed else 0
        (fixed, per_row), K = self.target.seconds, self.net.K
        groups = np.arange(self.groups + 1)
        missed = 1 - np.append(0, self.ended[:self.groups]).cumsum() / self.ended.sum()
        return int((groups * K * per_row + missed * (fixed + K * per_row)).argmin())

    def likely_ends(self, tree):
        """Nodes, the likeliest to end the path first: P(it ends there) = value - the children's values."""
        stay = [-d for d in tree.depth]                                # without values: shallow nodes first
        if tree.value:
            stay = list(tree.value)
            for i in range(1, len(tree)):
                stay[tree.parent[i]] -= tree.value[i]
        return sorted(range(len(tree)), key=lambda i: -stay[i])

    def target_forward(self, target, idx, pos, mask, cache, tree, carry=True):
        """target.hidden(idx, pos, mask, cache) with pseudo rows behind the real ones; keeps their states."""
        net, N = self.net, idx.size(1)
        self.tree, self.ranked = tree, self.likely_ends(tree) if tree else []   # no tree: a prompt
        self.ends = sorted(self.ranked[:self.n_groups()]) if carry else []
        x = target.run(target.embed(idx, pos), pos, mask, cache, 0, net.first)
        anchors, all_pos, all_mask = None, pos, mask
        if self.ends:
            at, real = torch.tensor(self.ends, device=x.device), mask.cpu().numpy()
            behind, look = net.positions_and_mask(target, pos.cpu().numpy()[self.ends], real[self.ends])
            real = np.pad(real, ((0, 0), (0, len(behind))))            # real rows look at no pseudo row
            all_pos = torch.cat((pos, behind))
            all_mask = torch.cat((torch.from_numpy(real).to(look.device), look))
            anchors = lambda l, x: x.index_select(1, at)
        self.states = net(target, x, anchors, all_pos, all_mask, cache)    # (1, N + K*M, C) each
        hidden = target.norm(self.states[target.cfg.n_layer][:, :N])   # pseudo keys are not kept
        if self.ends and hidden.isnan().any():         # a NaN passes through every mask: real rows alone
            return self.target_forward(target, idx, pos, mask, cache, tree, carry=False)
        return hidden

    def observe(self, tokens, hidden, cache):
        """tokens (T,) became text: the pseudo states of the last of them are the next draft."""
        end = len(tokens) - 1                                          # the row of the last committed token
        if self.tree is not None:                                      # down the tree, as in walk
            child = {(up, token): i for i, (up, token) in enumerate(zip(self.tree.parent, self.tree.tokens))}
            end = 0
            for token in tokens[1:]:
                end = child[end, token]
            self.ended[min(self.ranked.index(end), len(self.ended) - 1)] += 1
        net, L, self.n = self.net, self.target.cfg.n_layer, cache.length    # root at n, anchor at n - 1
        states, M, N, m = self.states, len(self.ends), len(tokens), 0
        if end in self.ends:
            m, N = self.ends.index(end), states[L].size(1) - net.K * M
        else:                                                          # K rows behind the text, not kept
            M, N, before = 1, 0, states
            pos, mask = net.positions_and_mask(self.target, [self.n - 1], np.ones((1, self.n), dtype=bool))
            anchor = lambda l, x: before[l][:, end:end + 1]
            states = net(self.target, before[L][:, :0], anchor, pos, mask, cache)
        self.h = states[L][0, [N + slot * M + m for slot in net.slot]]    # (K, C)

    def draft(self, root, sampler, limit=None):
        """-> a Tree of at most limit nodes of what may follow root, the token at position n."""
        logits = self.net.head.full_vocab(self.net.head(self.target.norm(self.h), self.target))  # (K, V)
        scores = sampler.rank(logits, range(self.n + 1, self.n + 1 + self.net.K))
        return plant(root, scores, self.shape, limit or self.max_nodes, self.floor)


# --------------------------------------------------------------------------------------------------
# Train and analysis

def train(cfg, target, run):
    """Train the maps on the batches (B, T) of run (train.py); gradients pass through the frozen target."""
    target.requires_grad_(False)
    net = Net(cfg, target, run.vocab).to(target.wte.weight.device)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0,
                            fused=target.wte.weight.is_cuda)
    for x in run.steps(net, [opt], lambda x: loss(net, target, x)):
        total, _ = loss(net, target, x)
        opt.zero_grad(set_to_none=True)
        total.backward()
        run.sync(net, total)                                           # mean over processes, clipped
        opt.step()
    return net


@torch.no_grad()
def by_layer(net, target, x):
    """
    On x (B, T) two tables (L + 1, K), of state k at the input of block l (row L: the end), NaN before it is
    made: its mean cosine with the real state, and how often norm and lm_head read the right token from it.
    """
    h, cache = context(target, x)
    at = torch.arange(x.size(1) - net.K - 1)
    n = at.to(x.device)
    cosine = torch.full((len(h), net.K), float("nan"))
    top1 = cosine.clone()
    for l, states in transfer(net, target, h, cache, at, every=True).items():
        for k, p in zip(net.order, states.unbind(1)):                  # (B, A, C)
            cosine[l, k - 1] = F.cosine_similarity(p, h[l][:, n + k], dim=-1).mean()
            top1[l, k - 1] = (target.lm_head(target.norm(p)).argmax(-1) == x[:, n + k + 1]).float().mean()
    return cosine, top1


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
        print(f"hidden_transfer, untrained, T = {T:.0f}: {len(text)} tokens in {len(stats.accepted)} target "
              "forwards, same text as plain decoding")
