r"""
Token trees: the target's choice, the walk along it, and the decode loop that every method shares.

Idea     The target's token at position t is a function of the text before t alone: argmax of its logits, plus T times a row
         of Gumbel noise that belongs to (seed, t). A drafter guesses a tree of continuations, one forward of the target
         with a tree mask gives the target's choice after every node, and we walk down while a child carries the choice.
         Every emitted token is the target's own, so a drafter changes how many tokens a step yields, never which. (There is
         one lossy rule beside it, walk_typical, which must be asked for.)

             root x          tree mask     x a b c        target's choice after    x   a   b   c
             /    \                     x  1 . . .                                 b   e   c   d
            a      b                    a  1 1 . .
                   |                    b  1 . 1 .        walk: x -> b -> c, then d is no child:
                   c                    c  1 . 1 1        emit b c d (two accepted, one bonus token), next root d

Maths    x_t = argmax_v [ z_t(v) + T g_t(v) ]  is a sample of softmax(z_t / T)   (Gumbel-max; Daliri, Musco, Suresh 2024,
         arXiv:2408.07978, call the sharing of g drafter-invariant speculative decoding)
         tau = new tokens / target forwards after the prompt's, 1 <= tau <= depth + 1

Shapes   N nodes of a tree (root included), K draft positions, V vocabulary, S cached tokens

A drafter is any object with

    rows                                   most cache rows that it writes behind the text in one forward (its largest tree)
    start(target, max_len)                 forget the last sequence; at most max_len tokens follow
    observe(tokens, hidden, cache)         the last forward made these tokens text: list (T,), their hidden states (T, C),
                                           and the target's cache, whose last T rows they are
    draft(root, sampler) -> Tree           guess what follows root, the last emitted token, which is not yet in the cache
    ride(target, idx, pos, mask, cache, tree) -> hidden      optional: run the target's forward itself (Hidden Transfer)
    budget, nodes                          optional: a Budget, which sets nodes, how large the next tree may be, before each draft
"""
import heapq
import itertools
import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F


# ---------------------------------------------------------------------------------------------------------------------
# The target's choice

class Sampler:
    """
    Turns logits into choices. Temperature 0 is greedy; top_k 0 and top_p 1 mean off. The same seed gives the same text,
    whoever drafts; another sample of the same prompt needs another seed. share=False hides the noise from drafters.

    typical=(epsilon, delta) asks generate for Medusa's LOSSY acceptance, see walk_typical. It draws no noise: choices are
    greedy at any temperature, the seed has no effect.

    Raises ValueError for values that make no sense.
    """

    def __init__(self, temperature=0.0, top_k=0, top_p=1.0, seed=0, share=True, typical=None):
        epsilon, delta = typical or (0, 0)
        for ok, message in ((0 <= temperature <= 1e9, f"temperature must lie between 0 and 1e9, not {temperature}"),
                            (top_k >= 0, f"top-k must be 0 (off) or more, not {top_k}"),
                            (0 <= top_p <= 1, f"top-p must lie between 0 and 1, not {top_p}"),
                            (0 <= seed < 2**64, f"seed must lie between 0 and 2^64 - 1, not {seed}"),
                            (0 <= epsilon <= 1, f"epsilon must lie between 0 and 1, not {epsilon}"),
                            (0 <= delta < math.inf, f"delta must be 0 or more, not {delta}")):
            if not ok:
                raise ValueError(message)
        temperature = 0.0 if temperature < 1e-30 else temperature      # single precision cannot divide by less
        self.temperature, self.top_k, self.top_p, self.seed, self.share = temperature, top_k, top_p, seed, share
        self.typical = typical
        self.rows = {}                                                 # position -> its noise, until the text has passed it

    def noise(self, t, V, like):
        """(V,) Gumbel noise for the token at position t: a function of (seed, t) alone. Drawn on the CPU in float64."""
        if (t, V) not in self.rows:
            rng = np.random.Generator(np.random.Philox(key=np.array([self.seed, t], dtype=np.uint64)))
            g = torch.from_numpy(-np.log(np.maximum(rng.standard_exponential(V), 1e-300)))   # -log Exp(1) is Gumbel
            self.rows[t, V] = g.to(like.device, torch.float32 if like.device.type == "mps" else torch.float64)
        return self.rows[t, V]

    def forget(self, t):
        """The text has passed position t: its noise is not asked for again."""
        for key in [key for key in self.rows if key[0] <= t]:
            del self.rows[key]

    def filter(self, z):
        """Logits (N, V): what top-k and top-p exclude becomes -inf. At least one token stays; ties at the k-th stay too."""
        if 0 < self.top_k < z.size(-1):
            z = z.masked_fill(z < z.topk(self.top_k).values[..., -1:], -math.inf)
        if self.top_p < 1:
            top, order = z.sort(descending=True, stable=True)
            p = ((top - top[..., :1]) / self.temperature).softmax(-1)
            drop = p.cumsum(-1) - p >= self.top_p                      # the tokens before it hold top_p already
            drop[..., 0] = False
            z = z.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
        return z

    def scores(self, logits, positions):
        """(N, V) logits for the tokens at N positions -> (N, V) scores whose argmax is the choice: z + T g."""
        z = logits.double() if logits.dtype == torch.float64 else logits.float()
        if self.temperature == 0 or self.typical:
            return z
        g = torch.stack([self.noise(t, z.size(-1), z) for t in positions])
        return self.filter(z) + self.temperature * g

    def probabilities(self, logits):
        """(N, V) -> (N, V): what a choice is a sample of, after temperature, top-k and top-p; one-hot at temperature 0."""
        z = logits.double() if logits.dtype == torch.float64 else logits.float()
        if self.temperature == 0:
            return F.one_hot(z.argmax(-1), z.size(-1)).to(z.dtype)
        z = self.filter(z)
        return ((z - z.max(-1, keepdim=True).values) / self.temperature).softmax(-1)     # no overflow at a tiny temperature

    def choose(self, logits, positions):
        """(N, V), N positions -> list of the N choices. Raises FloatingPointError on NaN, which no token can answer."""
        best, choice = self.scores(logits, positions).max(-1)
        choice = choice.masked_fill_(best.isnan(), -1).tolist()        # the one wait for the device in a step
        if -1 in choice:
            raise FloatingPointError("the target's logits are NaN: its weights or dtype are broken")
        return choice

    def rank(self, logits, positions):
        """Scores for a drafter's logits: with the target's own noise, so that where q = p the first guess is the choice."""
        return self.scores(logits, positions).float() if self.share else logits.float()


# ---------------------------------------------------------------------------------------------------------------------
# Trees

class Tree:
    """tokens (N,) of each node, node 0 the root; parent (N,), parent[i] < i, -1 for the root; value (N,) or None: what the
    drafter thinks of the path down to the node, as a probability."""

    def __init__(self, tokens, parent, value=None):
        self.tokens, self.parent, self.value = tokens, parent, value
        self.depth = [0] * len(parent)
        for i in range(1, len(parent)):
            self.depth[i] = self.depth[parent[i]] + 1

    def __len__(self):
        return len(self.tokens)

    def cut(self, depth):
        """The same tree without the nodes below depth."""
        if max(self.depth) <= depth:
            return self
        keep = [i for i, d in enumerate(self.depth) if d <= depth]
        new = {old: i for i, old in enumerate(keep)} | {-1: -1}
        return Tree([self.tokens[i] for i in keep], [new[self.parent[i]] for i in keep],
                    self.value and [self.value[i] for i in keep])


def tree_mask(parent, S=0):
    """(N,) parents -> (N, S+N) bool: node i may look at all S cached tokens, itself and its ancestors."""
    N = len(parent)
    mask = np.zeros((N, S + N), dtype=bool)
    mask[:, :S] = True
    for i, up in enumerate(parent):
        if up >= 0:
            mask[i] = mask[up]
        mask[i, S + i] = True
    return torch.from_numpy(mask)


@dataclass
class Shape:
    """A tree before its tokens are known: node i takes the rank[i]-th best guess of draft position depth(i)."""
    parent: list
    rank: list
    value: list = None

    def limit(self, K, V):
        """Cut to K draft positions and V guesses each; the root stays."""
        keep, depth = {-1: -1}, {-1: -1}
        out = Shape([], [], self.value and [])
        for i, (up, r) in enumerate(zip(self.parent, self.rank)):
            if up in keep and depth[up] < K and r < V:
                keep[i], depth[i] = len(out.parent), depth[up] + 1
                out.parent.append(keep[up])
                out.rank.append(r)
                if self.value:
                    out.value.append(self.value[i])
        return out


def chain(k):
    """One path of k guesses."""
    return Shape(list(range(-1, k)), [0] * (k + 1))


def cartesian(*s):
    """Every combination of the top s[0] guesses of position 1, top s[1] of position 2, ... (Medusa 2.1.2)"""
    parent, rank, level = [-1], [0], [0]
    for width in s:
        start = len(parent)
        for up in level:
            parent += [up] * width
            rank += range(width)
        level = range(start, len(parent))
    return Shape(parent, rank)


def grow(p, nodes, floor=0.0):
    """
    The tree of at most nodes nodes (root included) that is expected to be accepted furthest, if the guesses of different
    positions are right independently: p[d][r] = P(guess r of draft position d + 1 is right), falling with r, and a node is
    worth the product of p along its path. The best node next to the tree enters until the budget is used or all are below floor.

    With p averaged over a calibration text this is Medusa's sparse tree (2.3.3); with this step's probabilities it is the
    best-first tree.
    """
    shape = Shape([-1], [0], [1.0])
    heap = [(-p[0][0], 0, 0, 0)] if p else []                          # (-value, parent, draft position, rank)
    while heap and len(shape.parent) < nodes:
        value, up, d, r = heapq.heappop(heap)
        if -value <= floor:
            break
        shape.parent.append(up)
        shape.rank.append(r)
        shape.value.append(-value)
        if r + 1 < len(p[d]):                                          # its next sibling ...
            heapq.heappush(heap, (-shape.value[up] * p[d][r + 1], up, d, r + 1))
        if d + 1 < len(p):                                             # ... and its first child stand next to the tree now
            heapq.heappush(heap, (value * p[d + 1][0], len(shape.parent) - 1, d + 1, 0))
    return shape


def plant(root, scores, shape=None, nodes=16, floor=0.0):
    """
    A tree for draft positions that are guessed independently. scores (K, V), one row a position, from Sampler.rank.
    shape fixes the topology; without one the best-first tree of this step's own probabilities is grown.
    """
    K, V = scores.shape
    shape = shape and shape.limit(K, V)
    width = min(V, nodes if shape is None else max(shape.rank) + 1)
    top = scores.softmax(-1).topk(width)
    guesses, chance = top.indices.tolist(), top.values.tolist()
    if shape is None:
        shape = grow(chance, nodes, floor)
    tree = Tree([root] * len(shape.parent), shape.parent, [1.0] * len(shape.parent))
    for i in range(1, len(tree)):
        d, r = tree.depth[i] - 1, shape.rank[i]
        tree.tokens[i], tree.value[i] = guesses[d][r], tree.value[tree.parent[i]] * chance[d][r]
    return tree


def plant_levels(root, logits, step, sampler, S, depth, breadth, nodes=16, floor=0.0, shape=None, least=0.0):
    """
    A tree for drafters that guess one token after the other. EAGLE-2's (arXiv:2406.16858): run the breadth best nodes of a
    level, let each propose its breadth best children, keep the best of all (path probability V > floor); or a shape says
    which ranks to take. A level is not run where the text reaches it with a probability below least, the sum of its nodes' V.

    root at position S, logits (1, V) for what follows it. step(d, tokens, up, mask) -> (n, V): runs the n nodes of level d,
    all at position S + d. up: which row of the last logits guessed each; mask (n, rows) additive: which of the rows since
    the root, these last, each looks at.
    """
    tokens, parent, value = [root], [-1], [1.0]
    if shape:
        tokens, parent, value = [root] * len(shape.parent), shape.parent, [1.0] * len(shape.parent)
        children = [[] for _ in parent]
        for i in range(1, len(parent)):
            children[parent[i]].append(i)
    level, seen, rows = [0], {0: []}, 0                                # seen: rows since the root, by node
    for d in range(1, depth + 1):
        scores = sampler.rank(logits, [S + d])                         # one row of noise: one position a level
        top = scores.topk(breadth)
        logq = top.values - scores.logsumexp(-1, keepdim=True)
        found = torch.cat((logq, top.indices), -1).tolist()            # the one wait for the device in a level
        row = {i: n for n, i in enumerate(level)}
        if shape:
            for up, guess in zip(level, found):
                for i in children[up]:
                    r = shape.rank[i]
                    tokens[i], value[i] = int(guess[breadth + r]), value[up] * math.exp(guess[r])
            level = [i for up in level for i in children[up] if children[i]]
        else:
            first = len(tokens)
            for up, guess in zip(level, found):
                for logq, token in zip(guess[:breadth], guess[breadth:]):
                    q = value[up] * min(1.0, math.exp(logq))           # <= its parent's, so the best are connected
                    if q > floor:
                        tokens.append(int(token))
                        parent.append(up)
                        value.append(q)
            best = sorted(range(1, len(tokens)), key=lambda i: -value[i])[:nodes - 1]
            level = [i for i in best if i >= first][:breadth]          # others' children cannot be among the best
        if d == depth or not level or not shape and sum(value[i] for i in level) < least:
            break
        seen |= {i: seen[parent[i]] + [n] for n, i in enumerate(level, rows)}
        rows += len(level)
        mask = [[0.0 if n in seen[i] else -math.inf for n in range(rows)] for i in level]
        mask = torch.tensor(mask, dtype=logits.dtype, device=logits.device)
        logits = step(d, [tokens[i] for i in level], [row[parent[i]] for i in level], mask)
    if shape:
        return Tree(tokens, parent, value).cut(depth)
    keep = [0] + sorted(best)                                          # in order of birth: parents first
    place = {-1: -1} | {i: n for n, i in enumerate(keep)}
    return Tree([tokens[i] for i in keep], [place[parent[i]] for i in keep], [value[i] for i in keep])


def parse_tree(text, K, V, accuracy=None, nodes=16):
    """The --tree option -> Shape, or None for best-first. Raises ValueError for a text that names no tree."""
    if text == "best":
        return None
    if text == "sparse":
        if accuracy is None:
            raise ValueError("--tree sparse needs the drafter's calibration, which its checkpoint does not have")
        falling = [list(itertools.accumulate(row, min)) for row in accuracy]       # small samples may say otherwise
        return grow(falling, nodes).limit(K, V)
    if text == "chain":
        return chain(min(K, nodes - 1))
    try:
        widths = [int(w) for w in text.split(",")]
    except ValueError:
        widths = [0]
    if min(widths) < 1 or math.prod(widths) > 4096:
        raise ValueError(f"--tree must be best, sparse, chain, or widths such as 4,2,1, not {text!r}")
    if len(widths) > K:
        raise ValueError(f"--tree {text} is {len(widths)} deep, but the drafter guesses {K} positions")
    return cartesian(*widths).limit(K, V)


# ---------------------------------------------------------------------------------------------------------------------
# Budget: how many nodes pay on this machine

@torch.inference_mode()
def forward_seconds(target, most, rounds=7):
    """
    (fixed, slope): a forward of the target over n nodes behind 128 tokens, choice included, takes fixed + slope * n seconds, n
    up to most. A straight line through each round, the median of all: where others use the machine too, one size at one
    moment can be off by a half, and a choice between sizes would follow that.
    """
    S, device = min(128, target.cfg.block_size // 2), target.wte.weight.device
    sizes, lines = sorted({1, most, *(max(1, most // k) for k in (8, 4, 2))}), []
    cache = target.new_cache(S + most + 1)                             # never full, which --compile would make a graph of its own for
    target.hidden(torch.zeros(1, S, dtype=torch.long, device=device), cache=cache)
    cache.keep(range(S))
    for _ in range(1 + rounds):
        seconds = []
        for n in sizes:
            start = time.perf_counter()
            pos = torch.tensor([S - 1] * n, device=device)
            mask = tree_mask([-1] + [0] * (n - 1), S).to(device)
            hidden = target.hidden(torch.zeros(1, n, dtype=torch.long, device=device), pos, mask, cache)
            target.lm_head(hidden[0]).float().max(-1)[1].tolist()      # waits for the device
            seconds.append(time.perf_counter() - start)
        lines.append(np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds)))             # in relative error
    slope, fixed = np.median(lines[1:], 0)                             # the first round is the warm-up
    return (fixed, slope) if slope > 0 else (fixed + slope, 0.0)       # only chance makes more nodes cheaper


class Budget:
    """
    The number of nodes that yields the most tokens a second here, for this text,

        tokens(n) / seconds(n) = (1 + a_1 + .. + a_{n-1}) / (c(n) + d)

    with a_i = P(the i-th best node is accepted), c(n) a forward of n nodes, d all else in a step. Best-first trees of different
    sizes are nested, so every verified tree says something of a; what it starts from, calibration, is worth weight steps.

    prior    a_1, a_2, ... on held-out text, falling
    most     nodes; one of a few sizes up to that is taken (MKL is slower at some between them)
    """

    def __init__(self, prior, most, weight=16):
        self.prior, self.weight, self.c = np.zeros(most - 1), weight, None
        self.prior[:len(prior)] = prior[:most - 1]
        self.sizes = np.array([n for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if n < most] + [most])

    def start(self, target):
        """Another text: forget what the last one said. Before the first one the target is timed, once for all drafters."""
        if self.c is None:
            if not hasattr(target, "seconds"):
                target.seconds = forward_seconds(target, len(self.prior) + 1)
            fixed, slope = target.seconds
            self.c = fixed + slope * np.arange(1, len(self.prior) + 2)
            self.d = 0.3 * self.c[0]                                   # a guess, until some steps were timed
        self.hits, self.seen, self.times, self.n = [0] * len(self.prior), [0] * len(self.prior), [], 0

    def nodes(self):
        """n, 2 or more; looked at anew every 16 steps."""
        if self.n == 0 or len(self.times) == 16:
            self.d, self.times = sorted(self.times)[8] if self.times else self.d, []
            hits, seen = np.array(self.hits), np.array(self.seen)
            more = (self.weight * self.prior + hits + 1e-9) / ((self.weight + seen) * self.prior + 1e-9)     # than calibration said
            k = int((seen > 0).sum())
            more[k:] = more[max(0, k - 2):k].mean() if k else 1.0      # nodes that no tree had yet: as the last that one had
            a = more * self.prior
            rate = (1 + a.cumsum()[self.sizes - 2]) / (self.c[self.sizes - 1] + self.d)
            self.n = int(self.sizes[rate.argmax()])
        return self.n

    def learn(self, tree, path, seconds):
        """Which nodes of a verified tree were accepted, and how long its step took."""
        self.times.append(seconds - self.c[len(tree) - 1])
        for r, i in enumerate(sorted(range(1, len(tree)), key=lambda i: -tree.value[i])):
            self.seen[r] += 1
            self.hits[r] += i in path


# ---------------------------------------------------------------------------------------------------------------------
# Walk and decode loop

def walk(tokens, parent, choice):
    """
    Follow the tree along the target's own choices. Exact for any tree: a drafter changes how many tokens come out, never
    which. (There is no q here, so nothing to correct for: sampled drafts, repeated or sorted children are all right.)

    tokens  (N,)  token of each node; node 0 is the root, the last token already emitted
    parent  (N,)  parent[i] < i is the node that node i continues, -1 for the root
    choice  (N,)  the token the target puts after node i, with the noise of that position

    Returns the accepted nodes, root first, and the 1 to depth + 1 tokens to emit; the last one is the bonus token.
    """
    child = {(up, token): i for i, (up, token) in enumerate(zip(parent, tokens))}
    path, out = [0], [choice[0]]
    while (path[-1], out[-1]) in child:
        path.append(child[path[-1], out[-1]])
        out.append(choice[path[-1]])
    return path, out


def walk_typical(tokens, parent, choice, p, epsilon, delta):
    """
    LOSSY, never the default: Medusa's typical acceptance (2.3.1). A node is accepted with its parent if the target finds its
    token likely enough, measured by how certain the target is there,

        p(x) > min( epsilon, delta * exp(-H(p)) )          H: entropy of p in nats

    whether or not the target would have chosen it. The longest accepted path is taken, the likelier of equally long ones. The
    root, the bonus token of the step before, is accepted in any case, and the bonus token is the target's greedy choice, so
    every step yields one token at least. At temperature 0 (p one-hot) this is walk; above, the text is no sample of the
    target's distribution, and depends on the drafter.

    tokens, parent, choice  as for walk; choice is greedy
    p  (N, V)  the target's distribution after each node, with temperature, top-k and top-p (Sampler.probabilities)

    Returns what walk returns.
    """
    limit = (delta * torch.exp(-torch.special.entr(p).sum(-1))).clamp(max=epsilon)       # (N,)
    up = parent[1:]
    chance = p[up, tokens[1:]]                                         # (N - 1,) of every node after the root
    ok, chance = (chance > limit[up]).tolist(), chance.log().tolist()
    reach = {0: (0, 0.0)}                                              # accepted node -> (depth, log p of its path)
    for i, (a, good, logp) in enumerate(zip(up, ok, chance), 1):
        if good and a in reach:
            reach[i] = reach[a][0] + 1, reach[a][1] + logp
    path = [max(reach, key=reach.get)]
    while path[0]:
        path.insert(0, parent[path[0]])
    return path, [tokens[i] for i in path[1:]] + [choice[path[-1]]]


@dataclass
class Stats:
    """What a generation cost. accepted[0] is the prompt's forward, which yields one token; sum(accepted) = tokens emitted."""
    accepted: list = field(default_factory=list)
    nodes: int = 0                                                     # tree nodes verified in all steps
    seconds: dict = field(default_factory=lambda: dict(prompt=0.0, draft=0.0, verify=0.0, choice=0.0, rest=0.0))
    stop: str = ""                                                     # eos, budget (max_new_tokens) or context (block_size)

    @property
    def steps(self):
        """Target forwards after the prompt's."""
        return max(0, len(self.accepted) - 1)

    @property
    def tau(self):
        """Mean accepted length: tokens per target forward after the prompt's, bonus token included."""
        return sum(self.accepted[1:]) / max(1, self.steps)

    @property
    def tokens_per_second(self):
        """Speed after the prompt."""
        s = self.seconds
        return sum(self.accepted[1:]) / max(1e-9, sum(s.values()) - s["prompt"])


@torch.inference_mode()
def generate(target, prompt, max_new_tokens, drafter=None, sampler=None, eos=()):
    """
    Decode after prompt (list of token ids). Yields the list of tokens that each target forward brought, cut right after a
    token in eos, at max_new_tokens and at the end of the context (prompt and text together hold block_size tokens).
    Returns Stats. drafter None is plain decoding: the same loop with a tree of one node. The text is the target's own, unless
    sampler asks for typical acceptance.

    Raises ValueError if the prompt is empty, leaves no room for a token, or is a batch.
    """
    sampler, stats, block = sampler or Sampler(), Stats(), target.cfg.block_size
    if len(prompt) == 0 or not isinstance(prompt[0], int):
        raise ValueError("the prompt must be one non-empty list of token ids (one sequence at a time)")
    if len(prompt) >= block:
        raise ValueError(f"the prompt has {len(prompt)} tokens, which leaves no room in a context of {block}: shorten it")
    device = target.wte.weight.device
    left = min(max_new_tokens, block - len(prompt))                    # tokens still to emit
    stats.stop = "budget" if max_new_tokens <= block - len(prompt) else "context"
    if left < 1:
        return stats
    max_len = len(prompt) + left
    cache = target.new_cache(max_len + (drafter.rows if drafter else 1))
    budget = getattr(drafter, "budget", None)                          # None: as many nodes as the drafter was made for
    if drafter:
        drafter.start(target, max_len)
    if budget:
        budget.start(target)

    def forward(idx, pos=None, mask=None, tree=None):
        idx = torch.tensor([idx], device=device)
        pos = target.positions(idx.size(1), cache) if pos is None else pos
        if hasattr(drafter, "ride"):
            return drafter.ride(target, idx, pos, mask, cache, tree)
        return target.hidden(idx, pos, mask, cache)

    clock = time.perf_counter()
    def lap(what):
        nonlocal clock
        now = time.perf_counter()
        stats.seconds[what] += now - clock
        clock = now

    hidden = forward(prompt)
    out = sampler.choose(target.lm_head(hidden[:, -1]), [len(prompt)])
    tokens, path = prompt, range(len(prompt))
    lap("prompt")
    while True:
        cache.keep(path)                                               # these rows are text now
        end = next((i + 1 for i, token in enumerate(out) if token in eos), 0)
        stats.accepted.append(len(out))
        left -= len(out)
        stats.stop = "eos" if end else stats.stop
        lap("rest")
        yield out
        began = clock = time.perf_counter()                            # what the caller did meanwhile is not ours
        if end or not left:
            return stats
        root, S = out[-1], cache.length
        if drafter:
            drafter.observe(tokens, hidden[0, path], cache)
            if budget:
                drafter.nodes = budget.nodes()
            tree = drafter.draft(root, sampler).cut(left - 1)          # a node deeper than that could never be emitted
        else:
            tree = Tree([root], [-1])
        lap("draft")
        while True:
            pos = torch.tensor(tree.depth, device=device) + S
            hidden = forward(tree.tokens, pos, tree_mask(tree.parent, S).to(device), tree)
            logits = target.lm_head(hidden[0])                         # (N, V)
            if device.type == "cpu":                                   # elsewhere it is not done yet: choose waits for it
                lap("verify")
            try:
                choice = sampler.choose(logits, [S + d + 1 for d in tree.depth])
                break
            except FloatingPointError:                                 # a draft that overflows spoils its neighbours: without
                if len(tree) == 1:
                    raise
                tree = tree.cut(0)
        lap("choice" if device.type == "cpu" else "verify")
        stats.nodes += len(tree)
        if sampler.typical:                                            # lossy, and only if asked for
            path, out = walk_typical(tree.tokens, tree.parent, choice, sampler.probabilities(logits), *sampler.typical)
        else:
            path, out = walk(tree.tokens, tree.parent, choice)
        end = next((i + 1 for i, token in enumerate(out) if token in eos), len(out))
        out = out[:end]                                                # cut before anything is counted or kept
        path = path[:len(out)]
        tokens = [tree.tokens[i] for i in path]
        sampler.forget(S + len(path))
        if budget:
            budget.learn(tree, path, time.perf_counter() - began)


def complete(*args, **kwargs):
    """generate to the end -> (tokens, Stats)."""
    steps, tokens = generate(*args, **kwargs), []
    while True:
        try:
            tokens += next(steps)
        except StopIteration as stop:
            return tokens, stop.value
