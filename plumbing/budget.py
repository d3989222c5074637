"""
How many nodes a tree should have: as many as pay on this machine, for this text. The number's way:

    --nodes 12     drafters.load_drafter makes Drafter(max_nodes=12); a best-first tree has at most so many
    --nodes auto   NODES of the device; on a CPU Drafter(max_nodes=4 * 8) and a NodeBudget: its limit, asked
                   by the decode loop (tree.Text.draft) for every step, goes to Drafter.draft(limit)
    both           Drafter.draft -> tree.plant -> tree.grow, which adds nodes until there are so many
"""
import time

import numpy as np
import torch

from tree import tree_mask
from plumbing.options import fail, gpu


NODES = {"cpu": 8, "gpu": 64}                                          # of a tree, root included


def most_nodes(device):
    """How many nodes a tree has unless told otherwise."""
    return NODES["gpu" if gpu(device) else "cpu"]


def how_many(nodes, target):
    """--nodes -> a number; for auto the device's default."""
    if nodes == "auto":
        return most_nodes(str(target.wte.weight.device))
    try:
        n = int(nodes)
    except ValueError:
        n = 0
    if not 1 <= n <= 4096:
        fail(f"--nodes must be auto or a number from 1 to 4096, not {nodes}")
    return n


# --------------------------------------------------------------------------------------------------
# Calibration

def calibrate(method, net, target, batches, ranks=32):
    """
    How often the r-th best guess for each draft position is right on held-out text: {"hits": K x ranks
    counts, "samples": K counts}. Their quotients are the accuracies that Medusa's sparse tree is grown
    from (2.3.3).
    """
    hits, samples = None, None
    with torch.no_grad():
        for x in batches:
            rows = []
            for guess, truth, _ in method.predictions(net, target, x):
                top = guess.topk(min(ranks, guess.size(-1))).indices                   # (M, ranks)
                rows.append((top == truth[:, None]).sum(0))
            n = torch.tensor([x.size(0) * max(0, x.size(1) - k - 1) for k in range(1, len(rows) + 1)])
            hits = torch.stack(rows) if hits is None else hits + torch.stack(rows)
            samples = n if samples is None else samples + n
    return {"hits": hits.tolist(), "samples": samples.tolist()}


def accuracy(calibration, K=None):
    """
    calibration -> K x ranks, the share of anchors at which guess r of position k is right. Raises ValueError
    or TypeError for counts that calibrate cannot have made of K positions.
    """
    hits, samples = calibration["hits"], calibration["samples"]
    if not len(hits) == len(samples) == (K or len(hits)):
        raise ValueError(f"calibration of {len(hits)} positions and {len(samples)} counts, not of {K}")
    for row, n in zip(hits, samples):
        if len(row) != len(hits[0]) or not row:
            raise ValueError("calibration has rows of different lengths")
        if any(type(count) is not int or count < 0 for count in (*row, n)) or sum(row) > n:
            raise ValueError("calibration has counts that are none, or more hits than samples")
    return [[h / max(1, n) for h in row] for row, n in zip(hits, samples)]


# --------------------------------------------------------------------------------------------------
# The number of nodes that pays

@torch.inference_mode()
def forward_seconds(target, most, rounds=7):
    """
    (fixed, slope): a forward of the target over n nodes behind 128 tokens, choice included, takes
    fixed + slope * n seconds, n up to most. A straight line through each round, the median of all: where
    others use the machine too, one size at one moment can be off by a half, and a choice between sizes
    would follow that.
    """
    S, device = min(128, target.cfg.block_size // 2), target.wte.weight.device
    sizes, lines = sorted({1, most, *(max(1, most // k) for k in (8, 4, 2))}), []
    cache = target.new_cache(S + most + 1)                 # never full: --compile would make a graph for that
    target.hidden(torch.zeros(1, S, dtype=torch.long, device=device), cache=cache)
    cache.keep(range(S))
    for _ in range(1 + rounds):
        seconds = []
        for n in sizes:
            start = time.perf_counter()
            pos = torch.tensor([S - 1] * n, device=device)
            mask = tree_mask([-1] + [0] * (n - 1), S).to(device)
            hidden = target.hidden(torch.zeros(1, n, dtype=torch.long, device=device), pos, mask, cache)
            target.logits(hidden[0]).float().max(-1)[1].tolist()       # waits for the device
            seconds.append(time.perf_counter() - start)
        lines.append(np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds)))             # in relative error
    slope, fixed = np.median(lines[1:], 0)                             # the first round is the warm-up
    return (fixed, slope) if slope > 0 else (fixed + slope, 0.0)       # only chance makes more nodes cheaper


class NodeBudget:
    """
    The number of nodes that yields the most tokens a second here, for this text,

        tokens(n) / seconds(n) = (1 + a_1 + .. + a_{n-1}) / (c(n) + d)

    with a_i = P(the i-th best node is accepted), c(n) a forward of n nodes, d all else in a step.
    Best-first trees of different sizes are nested, so every verified tree says something of a; what it
    starts from, calibration, is worth weight steps.

    prior      a_1, a_2, ... on held-out text, falling
    max_nodes  of a tree; one of a few numbers up to that is taken (MKL is slower at some between them)
    usual      a fixed number, for MoA's client, for whom a round trip costs more than any node
    """
    every = 16                                                   # steps between two looks at what was learned

    def __init__(self, prior, max_nodes, usual=None, weight=16):
        self.prior, self.weight, self.c = np.zeros(max_nodes - 1), weight, None
        self.usual = usual or max_nodes
        self.prior[:len(prior)] = prior[:max_nodes - 1]
        sizes = 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96
        self.sizes = np.array([n for n in sizes if n < max_nodes] + [max_nodes])

    def start(self, target):
        """Another text: forget the last one. Before the first the target is timed, once for all drafters."""
        if self.c is None:
            if target.seconds is None:
                target.seconds = forward_seconds(target, len(self.prior) + 1)
            fixed, slope = target.seconds
            self.c = fixed + slope * np.arange(1, len(self.prior) + 2)
            self.d = 0.3 * self.c[0]                                   # a guess, until some steps were timed
        self.hits, self.seen, self.times, self.n = [0] * len(self.prior), [0] * len(self.prior), [], 0

    def limit(self):
        """How many nodes the next tree may have, 2 or more."""
        if self.n == 0 or len(self.times) == self.every:
            if self.times:
                self.d, self.times = sorted(self.times)[self.every // 2], []
            a = self.believed()
            rate = (1 + a.cumsum()[self.sizes - 2]) / (self.c[self.sizes - 1] + self.d)
            self.n = int(self.sizes[rate.argmax()])
        return self.n

    def believed(self):
        """a_1, a_2, ...: calibration, and what this text has shown so far."""
        hits, seen = np.array(self.hits), np.array(self.seen)
        # how much better or worse than calibration this text is, for each node
        ratio = (self.weight * self.prior + hits + 1e-9) / ((self.weight + seen) * self.prior + 1e-9)
        tried = int((seen > 0).sum())
        # no tree had these: as the last two
        ratio[tried:] = ratio[max(0, tried - 2):tried].mean() if tried else 1.0
        return ratio * self.prior

    def learn(self, tree, path, seconds):
        """Which nodes of a verified tree were accepted, and how long its step took."""
        self.times.append(seconds - self.c[len(tree) - 1])
        for r, i in enumerate(sorted(range(1, len(tree)), key=lambda i: -tree.value[i])):
            self.seen[r] += 1
            self.hits[r] += i in path
