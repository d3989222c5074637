"""How many nodes pay: the times of forwards, what is learnt while decoding, and the text that stays."""
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import medusa
from conftest import tiny
from model import GPT, GPTConfig
from plumbing.budget import NodeBudget, calibrate, forward_seconds
from tree import Sampler, Tree, complete


def simulate(budget, a, c, d, steps=800, seed=0):
    """
    Steps of a text in which the i-th best node is accepted with probability a[i]:
    a chain, so that nodes before it are.
    """
    rng, used = random.Random(seed), []
    for _ in range(steps):
        n = budget.limit()
        used.append(n)
        u, path = rng.random(), [0]
        while len(path) < n and u < a[len(path) - 1]:
            path.append(len(path))
        budget.learn(Tree([0] * n, list(range(-1, n - 1)), [0.9**i for i in range(n)]), path, c[n] + d)
    return used


def test_the_budget_finds_the_best_number_of_nodes():
    """
    A prior that is never unlearnt, a cost that is off by one, the rest of a step left out:
    all would choose another n.
    """
    c = {n: 1 + 0.1 * n for n in range(1, 33)}
    powers = {p: [p**i for i in range(1, 32)] for p in (0.9, 0.8, 0.7, 0.5)}
    for a, d in ((powers[0.9], 0.0), (powers[0.5], 0.0), (powers[0.5], 5.0), ([0.05] * 31, 0.0),
                 (powers[0.8], 1.0)):
        rate = {n: (1 + sum(a[:n - 1])) / (c[n] + d) for n in range(2, 33)}
        for prior in (powers[0.7], powers[0.8], [0.95] * 40):
            budget, timed = NodeBudget(prior, 32), SimpleNamespace(seconds=(1.0, 0.1))
            budget.start(timed)
            used = simulate(budget, a, c, d)
            assert set(used) <= {2, 3, 4, 6, 8, 12, 16, 24, 32}
            assert rate[used[-1]] > 0.9 * max(rate.values()), (a[:3], d, prior[:3], used[-1])
            budget.start(timed)
            assert budget.limit() == budget.limit() >= 2               # another text, the same prior


def test_forward_seconds():
    """A cache too small, a position past the context."""
    for block in (2, 9, 300):
        shape = dict(n_layer=1, n_embd=16, n_head=2, n_kv_head=1, n_ffn=16, vocab_size=9, block_size=block)
        target = GPT(GPTConfig(**shape)).eval()
        for most in (2, 20):
            fixed, slope = forward_seconds(target, most)
            assert 0 <= slope < 1 and 0 < fixed + slope < 10


@pytest.mark.parametrize("slope", [0.3, 0.0, -0.02])
def test_forward_seconds_on_a_machine_that_others_use(slope, monkeypatch):
    """One disturbed size or round, or luck with the largest, decides for all; a warm-up that counts."""
    sizes, now, calls = (1, 2, 5, 10, 20), 0.0, itertools.count()

    def clock():                                                       # asked before and after every size
        nonlocal now
        call = next(calls)
        round, n = call // 10, sizes[call // 2 % 5]
        if call % 2:
            seconds = 3 + slope * n
            if round == 0:                                             # a warm-up
                seconds *= 9
            if round == 2:                                             # a disturbed round
                seconds *= 1.5
            if round in (3, 5) and n == 5:                             # a disturbed size
                seconds *= 1.4
            now += seconds
        return now
    monkeypatch.setattr("plumbing.budget.time", SimpleNamespace(perf_counter=clock))
    fixed, per_node = forward_seconds(tiny(n_layer=1), 20)
    assert per_node == pytest.approx(max(0, slope), rel=0.1)
    assert fixed + per_node == pytest.approx(3 + slope, rel=0.1)


def test_a_budget_changes_no_text():
    """Trees of another size each step: rows for the largest must be there, and the text must stay."""
    shape = dict(n_layer=2, n_embd=16, n_head=2, n_kv_head=1, n_ffn=16, vocab_size=9, block_size=80)
    target = GPT(GPTConfig(**shape)).double().eval()
    drafter = medusa.Drafter(medusa.Net(medusa.Config(), target).double(), target, max_nodes=12)
    budget, target.seconds = NodeBudget([0.5, 0.3, 0.2], 12), (1.0, 0.05)
    drafter.node_budget = budget
    sizes = itertools.cycle([2, 12, 3, 7])
    budget.limit = lambda: next(sizes)
    for T in (0.0, 1.0):
        text, stats = complete(target, [1, 2], 70, drafter, Sampler(T))
        assert text == complete(target, [1, 2], 70, None, Sampler(T))[0]
        assert stats.nodes > 4 * stats.steps and sum(budget.seen) == stats.nodes - stats.steps
        assert sum(budget.hits) == sum(stats.accepted[1:]) - stats.steps


def test_calibration_counts_by_hand():
    """Catches a calibration divisor that is right for the first head only (Medusa's own script)."""
    class Method:
        @staticmethod
        def predictions(net, target, x):
            for k in (1, 2):
                truth = x[:, k + 1:].flatten()
                guess = F.one_hot(truth + (k == 2), 8).float()         # head 2 is always one off
                yield guess, truth, None
    x = torch.arange(6).view(1, 6)
    c = calibrate(Method, None, None, [x, x], ranks=3)
    assert c["samples"] == [8, 6] and c["hits"][0] == [8, 0, 0] and c["hits"][1][0] == 0
