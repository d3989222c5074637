r"""
Token trees: the target's choice, the walk along it, and the decode loop that every method shares.

Idea     The target's token at position t is a function of the text before t alone: argmax of its logits
         plus T times a row of Gumbel noise that belongs to (seed, t). A drafter guesses a tree of
         continuations, one forward of the target with a tree mask gives its choice after every node, and
         we walk down while a child carries the choice. Every emitted token is the target's own: a drafter
         changes how many a step yields, never which.

             root x          tree mask     x a b c        target's choice after    x   a   b   c
             /    \                     x  1 . . .                                 b   e   c   d
            a      b                    a  1 1 . .
                   |                    b  1 . 1 .        walk: x -> b -> c, then d is no child: emit b c d
                   c                    c  1 . 1 1        (two accepted, one bonus token), next root d

Maths    x_t = argmax_v [ z_t(v) + T g_t(v) ]  is a sample of softmax(z_t / T)                  (Gumbel-max)
         Sharing g: drafter-invariant speculative decoding (Daliri, Musco, Suresh 2024, arXiv:2408.07978)
Shapes   N nodes of a tree (root included), K draft positions, V vocabulary, S cached tokens
"""
import heapq
import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch


# --------------------------------------------------------------------------------------------------
# The target's choice

class Sampler:
    """
    Turns logits into choices. Temperature 0 is greedy; top_k 0 and top_p 1 mean off. The same seed gives
    the same text, whoever drafts; share=False hides the noise from drafters. Raises ValueError.
    """

    def __init__(self, temperature=0.0, top_k=0, top_p=1.0, seed=0, share=True):
        rules = [(0 <= temperature <= 1e9, f"temperature must lie between 0 and 1e9, not {temperature}"),
                 (top_k >= 0, f"top-k must be 0 (off) or more, not {top_k}"),
                 (0 <= top_p <= 1, f"top-p must lie between 0 and 1, not {top_p}"),
                 (0 <= seed < 2**64, f"seed must lie between 0 and 2^64 - 1, not {seed}")]
        for ok, rule in rules:
            if not ok:
                raise ValueError(rule)
        self.temperature = 0.0 if temperature < 1e-30 else temperature  # fp32 divides by no less
        self.top_k, self.top_p, self.seed, self.share = top_k, top_p, seed, share
        self.drawn = {}                                                # position -> noise, until it is text

    def noise(self, t, V, like):
        """(V,) Gumbel noise, -log Exp(1), for position t: from (seed, t) alone, drawn on the CPU."""
        if (t, V) not in self.drawn:
            rng = np.random.Generator(np.random.Philox(key=np.array([self.seed, t], dtype=np.uint64)))
            g = torch.from_numpy(-np.log(np.maximum(rng.standard_exponential(V), 1e-300)))
            self.drawn[t, V] = g.to(like.device, torch.float32 if like.is_mps else torch.float64)
        return self.drawn[t, V]

    def forget(self, t):
        """The text has passed position t: its noise is not asked for again."""
        self.drawn = {key: g for key, g in self.drawn.items() if key[0] > t}

    def filter(self, z):
        """(N, V) logits: what top-k and top-p exclude becomes -inf; ties at the k-th stay, one always."""
        if 0 < self.top_k < z.size(-1):
            z = z.masked_fill(z < z.topk(self.top_k).values[..., -1:], -math.inf)
        if self.top_p < 1:
            top, order = z.sort(descending=True, stable=True)
            p = ((top - top[..., :1]) / self.temperature).softmax(-1)
            drop = p.cumsum(-1) - p >= self.top_p                      # those before it hold top_p already
            drop[..., 0] = False
            z = z.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
        return z

    def scores(self, logits, positions):
        """Logits (N, V) of N positions -> scores (N, V) whose argmax is the choice: z + T g."""
        z = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperature == 0:
            return z
        g = torch.stack([self.noise(t, z.size(-1), z) for t in positions])
        return self.filter(z) + self.temperature * g

    def choose(self, logits, positions):
        """Logits (N, V) of N positions -> the N choices, a list. Raises FloatingPointError on NaN."""
        best, choice = self.scores(logits, positions).max(-1)
        choice = choice.masked_fill_(best.isnan(), -1).tolist()        # a step waits here for the device
        if -1 in choice:
            raise FloatingPointError("the target's logits are NaN: its weights or dtype are broken")
        return choice

    def rank(self, logits, positions):
        """A drafter's scores, with the target's own noise: where q = p its first guess is the choice."""
        return self.scores(logits, positions).float() if self.share else logits.float()


# --------------------------------------------------------------------------------------------------
# Trees

class Tree:
    """
    tokens (N,) of the nodes, node 0 is the root; parent (N,), parent[i] < i, -1 for the root; value (N,)
    or None: how probable the drafter thinks the path down to the node.
    """

    def __init__(self, tokens, parent, value=None):
        self.tokens, self.parent, self.value = tokens, parent, value
        self.depth = [0] * len(parent)
        for i in range(1, len(parent)):
            self.depth[i] = self.depth[parent[i]] + 1

    def __len__(self):
        return len(self.tokens)

    def take(self, keep):
        """The tree of these nodes (ascending, each with its parent) alone."""
        new = {old: i for i, old in enumerate(keep)} | {-1: -1}
        return Tree([self.tokens[i] for i in keep], [new[self.parent[i]] for i in keep],
                    self.value and [self.value[i] for i in keep])

    def cut(self, depth):
        """The same tree without nodes deeper than depth."""
        keep = [i for i, d in enumerate(self.depth) if d <= depth]
        return self.take(keep) if len(keep) < len(self) else self


def tree_mask(parent, S=0):
    """(N,) parents -> (N, S+N) bool: node i may look at all S cached tokens, itself and its ancestors."""
    mask = np.eye(len(parent), S + len(parent), S, dtype=bool)
    mask[:, :S] = True
    for i, up in enumerate(parent):
        if up >= 0:
            mask[i] |= mask[up]
    return torch.from_numpy(mask)


@dataclass
class Shape:
    """A tree without tokens: node i will get the rank[i]-th best guess for the position at its depth."""
    parent: list
    rank: list
    value: list = None

    def cut(self, K, V):
        """Cut to K draft positions and V guesses each; the root stays."""
        tree, keep = Tree(self.rank, self.parent, self.value), {-1}
        for i, up in enumerate(tree.parent):
            if up in keep and tree.depth[i] <= K and self.rank[i] < V:
                keep.add(i)
        tree = tree.take(sorted(keep)[1:])
        return Shape(tree.parent, tree.tokens, tree.value)


def grow(p, limit, floor=0.0):
    """
    The Shape of at most limit nodes, root included, that is expected to be accepted furthest if
    positions are guessed independently. p[d][r] = P(guess r for draft position d + 1 is right), falling
    with r; a node is worth the product of p along its path. The most valuable node whose parent is in
    enters next, while it is worth more than floor. Medusa's sparse tree (2.3.3) takes p from other text,
    the best-first tree from this step's drafts.
    """
    shape = Shape([-1], [0], [1.0])
    heap = [(-p[0][0], 0, 0, 0)] if p else []                          # (-value, parent, position, rank)
    while heap and len(shape.parent) < limit:
        value, up, d, r = heapq.heappop(heap)
        if -value <= floor:
            break
        shape.parent.append(up)
        shape.rank.append(r)
        shape.value.append(-value)
        if r + 1 < len(p[d]):                                          # its next sibling ...
            heapq.heappush(heap, (-shape.value[up] * p[d][r + 1], up, d, r + 1))
        if d + 1 < len(p):                                             # ... and its first child may enter
            heapq.heappush(heap, (value * p[d + 1][0], len(shape.parent) - 1, d + 1, 0))
    return shape


def plant(root, scores, shape=None, limit=16, floor=0.0):
    """
    A Tree for draft positions that are guessed independently. scores (K, V) as Sampler.rank gives them.
    shape fixes the topology; without one the best-first tree of at most limit nodes is grown.
    """
    K, V = scores.shape
    shape = shape and shape.cut(K, V)
    width = min(V, limit if shape is None else max(shape.rank) + 1)
    top = scores.softmax(-1).topk(width)
    guesses, chance = top.indices.tolist(), top.values.tolist()
    shape = shape or grow(chance, limit, floor)
    tree = Tree([root] * len(shape.parent), shape.parent, [1.0] * len(shape.parent))
    for i in range(1, len(tree)):
        d, r = tree.depth[i] - 1, shape.rank[i]
        tree.tokens[i], tree.value[i] = guesses[d][r], tree.value[tree.parent[i]] * chance[d][r]
    return tree


class LevelRunner:
    r"""
    For drafters that guess token after token: the nodes run since the root, level by level, a row each.
    step(d, tokens, up, mask) -> logits (n, V) runs the n nodes of level d. up: the row in the last level
    that each continues; mask (n, rows) bool: which of all rows, these n last, each may look at.

           root          rows   a b | c d         up of c and d: 1, 1
           /  \                 c: . 1 | 1 .
          a    b                d: . 1 | . 1      c looks at b and at itself
              / \
             c   d
    """

    def __init__(self, step, logits, sampler, S):  # logits (1, V) for what follows the root, at position S
        self.step, self.logits, self.sampler, self.S = step, logits, sampler, S
        self.row, self.row_parent = {0: -1}, []     # node -> its row; row -> its parent's; -1: the root

    def best_children(self, d, level, tokens, parent, breadth):
        """Runs the nodes of level d - 1 -> the breadth best children of each, (token, probability)."""
        if d > 1:
            first = len(self.row_parent) - len(self.logits)            # first row of the last level
            up = [self.row[parent[i]] for i in level]
            self.row |= {i: len(self.row_parent) + n for n, i in enumerate(level)}
            self.row_parent += up
            mask = tree_mask(self.row_parent)[-len(level):].to(self.logits.device)
            self.logits = self.step(d - 1, [tokens[i] for i in level], [row - first for row in up], mask)
        scores = self.sampler.rank(self.logits, [self.S + d])          # a level shares one row of noise
        top = scores.topk(breadth)
        logq = top.values - scores.logsumexp(-1, keepdim=True)
        rows = torch.cat((top.indices, logq), -1).tolist()             # a level waits here for the device
        return [[(int(token), math.exp(min(0.0, x))) for token, x in zip(row, row[breadth:])] for row in rows]


def plant_best_levels(root, levels, depth, breadth, limit=16, floor=0.0, price=0.0):
    """
    EAGLE-2's tree (arXiv:2406.16858): run the breadth best nodes of a level, let each propose its
    breadth best children, keep the limit best of all by path probability V > floor. Stop before a level
    whose nodes' V sum to less than price, what it costs to run it: the text is unlikely to come that far.
    """
    tokens, parent, value, level, best = [root], [-1], [1.0], [0], []
    for d in range(1, depth + 1):
        first = len(tokens)
        for up, guesses in zip(level, levels.best_children(d, level, tokens, parent, breadth)):
            for token, q in guesses:
                if value[up] * q > floor:                              # never above its parent's
                    tokens.append(token)
                    parent.append(up)
                    value.append(value[up] * q)
        best = sorted(range(1, len(tokens)), key=lambda i: -value[i])[:limit - 1]
        level = [i for i in best if i >= first][:breadth]             # a node outside best has no child in it
        if not level or sum(value[i] for i in level) < price:
            break
    return Tree(tokens, parent, value).take([0] + sorted(best))        # in order of birth: parents first


def plant_shape_levels(root, levels, depth, shape):
    """A tree of a given shape, cut to depth."""
    parent, N = shape.parent, len(shape.parent)
    tokens, value, level = [root] * N, [1.0] * N, [0]
    children = [[i for i in range(1, N) if parent[i] == up] for up in range(N)]
    for d in range(1, depth + 1):
        for up, guesses in zip(level, levels.best_children(d, level, tokens, parent, max(shape.rank) + 1)):
            for i in children[up]:
                tokens[i], q = guesses[shape.rank[i]]
                value[i] = value[up] * q
        level = [i for up in level for i in children[up] if children[i]]
        if not level:
            break
    return Tree(tokens, parent, value).cut(depth)


# --------------------------------------------------------------------------------------------------
# Walk and decode loop

def walk(tokens, parent, choice):
    """
    Follow the tree, tokens and parent (N,), along the target's own choices: choice (N,), the token it puts
    after each node, with the noise of that position. Exact for any tree: there is no q, so nothing to
    correct for. Returns the accepted nodes, root first, and the tokens to emit, the bonus token last.
    """
    child = {(up, token): i for i, (up, token) in enumerate(zip(parent, tokens))}
    path, out = [0], [choice[0]]
    while (path[-1], out[-1]) in child:
        path.append(child[path[-1], out[-1]])
        out.append(choice[path[-1]])
    return path, out


@dataclass
class Stats:
    """What a text cost. accepted: tokens that each forward of the target brought, the prompt's first."""
    accepted: list = field(default_factory=list)
    nodes: int = 0                                                     # tree nodes verified in all steps
    seconds: dict = field(default_factory=lambda: dict.fromkeys(
        ("prompt", "draft", "verify", "choice", "rest"), 0.0))
    stop: str = ""                                                     # eos, budget (max_new_tokens), context

    @property
    def steps(self):
        """Target forwards after the prompt's."""
        return max(0, len(self.accepted) - 1)

    @property
    def tau(self):
        """Mean accepted length, 1 to depth + 1: tokens per forward after the prompt's, bonus included."""
        return sum(self.accepted[1:]) / max(1, self.steps)

    @property
    def tokens_per_second(self):
        """Speed after the prompt."""
        s = self.seconds
        return sum(self.accepted[1:]) / max(1e-9, sum(s.values()) - s["prompt"])


class Text:
    """A text in the making: all of generate but its idea. Cache, room, clocks, a second try after a NaN."""

    def __init__(self, target, prompt, max_new_tokens, drafter, sampler, eos):
        block, n = target.cfg.block_size, len(prompt)
        if n == 0 or not isinstance(prompt[0], int):
            raise ValueError("the prompt must be one non-empty list of token ids (one sequence at a time)")
        if n >= block:
            raise ValueError(f"the prompt has {n} tokens, which leaves no room in a context of {block}: "
                             "shorten it")
        self.target, self.drafter, self.sampler, self.eos = target, drafter, sampler, eos
        self.device, self.stats = target.wte.weight.device, Stats()
        self.stats.stop = "budget" if max_new_tokens <= block - n else "context"
        self.left = max(0, min(max_new_tokens, block - n))             # tokens still to emit
        if self.done:
            return
        self.cache = target.new_cache(n + self.left + (drafter.cache_rows if drafter else 1))
        self.node_budget = getattr(drafter, "node_budget", None)
        if drafter:
            drafter.start(target, n + self.left)
        if self.node_budget:
            self.node_budget.start(target)

    def lap(self, what):
        """The time since the last lap went into this. A GPU may be at work still: choosing waits for it."""
        before, self.clock = self.clock, time.perf_counter()
        self.stats.seconds[what] += self.clock - before

    def forward(self, tokens, pos, mask=None, tree=None):
        """The target on new tokens behind the text -> their last hidden states (T, C)."""
        idx = torch.tensor([tokens], device=self.device)
        if hasattr(self.drafter, "target_forward"):
            return self.drafter.target_forward(self.target, idx, pos, mask, self.cache, tree)[0]
        return self.target.hidden(idx, pos, mask, self.cache)[0]

    def read(self, prompt):
        """The prompt, all of it text -> the target's first token."""
        self.clock = time.perf_counter()
        self.hidden = self.forward(prompt, self.target.positions(len(prompt)))
        out = self.sampler.choose(self.target.logits(self.hidden[-1:]), [len(prompt)])
        self.lap("prompt")
        return self.keep(prompt, range(len(prompt)), out)

    def draft(self, root):
        """The drafter sees what became text, and guesses a tree behind root. Plain decoding: root alone."""
        self.began = self.clock = time.perf_counter()                  # what the caller did is not our time
        tree = Tree([root], [-1])
        if self.drafter:
            self.drafter.observe(self.tokens, self.hidden, self.cache)
            limit = self.node_budget.limit() if self.node_budget else None
            tree = self.drafter.draft(root, self.sampler, limit)
        self.lap("draft")
        return tree.cut(min(self.left - 1, self.target.reach(self.cache.length)))     # deeper: never emitted

    def verify(self, tree):
        """One forward of the target -> the tree, the target's choice after every node, its logits (N, V)."""
        positions = [self.cache.length + d for d in tree.depth]
        mask = tree_mask(tree.parent, self.cache.length).to(self.device)
        self.hidden = self.forward(tree.tokens, torch.tensor(positions, device=self.device), mask, tree)
        logits = self.target.logits(self.hidden)
        if self.device.type == "cpu":
            self.lap("verify")
        try:
            choice = self.sampler.choose(logits, [t + 1 for t in positions])
        except FloatingPointError:
            if len(tree) == 1:
                raise
            return self.verify(tree.cut(0))    # a NaN passes through every mask: without what was drafted
        self.lap("choice" if self.device.type == "cpu" else "verify")
        self.stats.nodes += len(tree)
        return tree, choice, logits

    def keep(self, tokens, path, out, tree=None):  # tokens: of all rows of the last forward
        """The rows of path become text, the others are gone -> out, up to a token that ends the text."""
        end = next((i + 1 for i, token in enumerate(out) if token in self.eos), 0)
        out = out[:end or None]                                        # before anything is counted or kept
        path = path[:len(out)] if tree else path
        self.tokens, self.hidden = [tokens[i] for i in path], self.hidden[path]
        self.cache.keep(path)
        self.sampler.forget(self.cache.length)
        self.left -= len(out)
        self.stats.accepted.append(len(out))
        self.stats.stop = "eos" if end else self.stats.stop
        if self.node_budget and tree:
            self.node_budget.learn(tree, path, time.perf_counter() - self.began)
        self.lap("rest")
        return out

    @property
    def done(self):
        return not self.left or self.stats.stop == "eos"


@torch.inference_mode()
def generate(target, prompt, max_new_tokens, drafter=None, sampler=None, eos=(), accept=None):
    """
    Decode after prompt, a list of token ids. Yields the tokens of each forward of the target, a list, cut
    right after a token in eos, at max_new_tokens, and where prompt and text fill block_size. Returns Stats.
    drafter None: plain decoding, a tree of one node. accept(tree, choice, logits) -> path, tokens takes the
    place of walk: medusa.py has a LOSSY one. Raises ValueError: a prompt empty, too long, or a batch.
    """
    text = Text(target, prompt, max_new_tokens, drafter, sampler or Sampler(), eos)
    if text.done:
        return text.stats
    out = text.read(prompt)
    while True:
        yield out
        if text.done:
            return text.stats
        tree = text.draft(root=out[-1])                     # guess what may follow root, the last token
        tree, choice, logits = text.verify(tree)            # one forward: the target's choice after each node
        path, out = accept(tree, choice, logits) if accept else walk(tree.tokens, tree.parent, choice)
        out = text.keep(tree.tokens, path, out, tree)                 # the path is text now, the rest is gone


def complete(*args, **kwargs):
    """generate to the end -> (tokens, Stats)."""
    steps, tokens = generate(*args, **kwargs), []
    while True:
        try:
            tokens += next(steps)
        except StopIteration as stop:
            return tokens, stop.value
