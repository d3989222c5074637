"""plumbing/compare.py: figures, verdicts, and methods in turn."""
import math
import re

import pytest
import torch

from conftest import tiny
from plumbing.compare import compare, gap, histogram, milliseconds, verdict, why_slower
from plumbing.picture import Run, follow
from tree import Sampler, Stats, generate


def table(err):
    """The table of compare -> {method: (tau, target forwards, tokens/s, speed-up, the rest)}."""
    lines = err[err.index("\nmethod ") + 1:].split("\n\n")[0].splitlines()[1:]
    rows = [line.split(maxsplit=5) for line in lines]
    rows = {r[0]: (*map(float, r[1:5]), *r[5:]) for r in rows}
    rows.pop("inexact", None)                                          # see test_what_exactness_costs
    return rows


def test_figures_of_a_hand_made_trace():
    """Catches tau that counts the prompt's forward or leaves out the bonus token."""
    s = Stats(accepted=[1, 3, 1, 2], seconds=dict(prompt=9.0, draft=1.0, verify=1.5, rest=0.5))
    assert s.steps == 3 and s.tau == 2.0 and s.tokens_per_second == 2.0
    assert histogram(s.accepted) == "1 x2  2 x1  3 x1"


def a_run(tokens, ms, nodes=1, forwards=3):
    """A run of forwards after the prompt's, whose steps take these milliseconds."""
    each = [1, *[(len(tokens) - 1) // forwards] * forwards]
    seconds = {part: value * forwards / 1000 for part, value in ms.items()}
    return Run(tokens, Stats(each, nodes * forwards, dict(prompt=5.0, **seconds)))


def test_medians_of_rounds_in_turn(capsys):
    """
    Catches a ratio of medians (a drifting machine spoils it), methods that do not take turns, a warm-up
    that counts, and runs of different rounds that are called one.
    """
    speeds, asked = {"plain": [9, 10, 20, 40], "d": [30, 20, 40]}, []  # tokens/s, plain's warm-up first

    def decode(name):
        asked.append(name)
        seconds = 1 / speeds[name][asked.count(name) - 1]
        parts = dict(prompt=0, draft=0, verify=seconds, choice=0, rest=0)
        return Run([1, 2], Stats(accepted=[1, 1], seconds=parts))

    runs = compare(decode, ["d"], {"d": Run([1, 2], Stats([1, 1]))}, None)
    rows = table(capsys.readouterr().err)
    assert asked == ["plain"] + ["plain", "d"] * 3 and list(runs) == ["plain", "d"]
    assert rows == {"plain": (1, 2, 20, 1), "d": (1, 2, 30, 1, "text identical")}
    assert (round(runs["plain"].speed), round(runs["d"].speed)) == (20, 20)


def test_a_different_text_in_any_round_is_named(capsys):
    """Catches a proof that looks at the first text only, at one method's, or calls a lossy one a fault."""
    ms = dict(draft=0, verify=5, choice=0, rest=0)
    right, wrong = a_run([1, 2, 3, 4], ms), a_run([1, 2, 7, 4], ms)
    turns = []

    def decode(name):
        turns.append(name)
        return wrong if name == "b" and turns.count("b") == 3 else right

    for lossy in (False, True):
        turns.clear()
        compare(decode, ["a", "b"], {}, lambda at: f"looked at {at}", lossy)
        rows = table(capsys.readouterr().err)
        if lossy:
            assert rows["a"][4] == rows["b"][4] == "text lossy: differs by design"
        else:
            assert rows["a"][4] == "text identical"
            assert rows["b"][4] == "text DIFFERENT from token 2 on: [3] against [7]; looked at 2"


def test_a_text_that_ends_early_differs():
    """Catches a text that is called identical because it is a beginning of the other."""
    assert verdict([1, 2, 3], [1, 2], None) == "text DIFFERENT from token 2 on: [3] against []"
    assert verdict([], [1], None) == "text DIFFERENT from token 0 on: [] against [1]"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_gap_is_that_of_the_choice(temperature):
    """Catches a gap at another position, without the noise, or of logits that decoding does not see."""
    target = tiny()
    sampler = lambda: Sampler(temperature, seed=3)
    run = follow(generate(target, [1, 2, 3], 12, None, sampler()))
    for at in (0, 5, 11):
        text = [1, 2, 3] + run.tokens[:at]
        logits = target(torch.tensor([text]))[0][0, -1:]
        scores = sampler().scores(logits, [len(text)])[0]
        best = scores.topk(2)
        assert best.indices[0] == run.tokens[at]
        far = best.values[0] - best.values[1]
        words = gap(target, [1, 2, 3], run.tokens[:at], sampler())
        assert float(re.search(r"are (\S+) apart", words)[1]) == pytest.approx(far.item(), rel=0.06)
        assert far < 1e-3 or words.endswith("more than rounding does (float64)")


def test_a_near_tie_is_told_from_a_fault():
    """Catches a fault that is excused as rounding, and rounding that is called a fault."""
    target = tiny(dtype=torch.bfloat16)
    spread = target.logits(target.hidden(torch.tensor([[1, 2]]))[0, -1:]).abs().max().item()
    for apart, says in ((0.0, "a near tie (bfloat16)"), (0.02, "a near tie"), (0.2, "more than rounding")):
        class Chosen(Sampler):
            def scores(self, logits, positions):
                assert positions == [2]
                return torch.tensor([[0.0, spread, spread * (1 - apart)]])
        assert says in gap(target, [1], [2], Chosen())


def test_which_part_costs_too_much():
    """Catches a sentence that blames the largest part, not the one that grew, and figures of no step."""
    plain = a_run([0] * 4, dict(draft=0.0, verify=5.0, choice=0.4, rest=0.2)).stats
    slow = a_run([0] * 7, dict(draft=6.0, verify=7.0, choice=0.5, rest=0.3), nodes=8).stats
    words = why_slower("moa", slow, plain)
    assert words == ("moa is slower than plain decoding here: its step of 13.8 ms brings 2.00 tokens, "
                     "for which plain decoding needs 11.2 ms. Too much of it goes into drafting: 6.0 ms, "
                     "where plain decoding's step has 0.0.")
    big = a_run([0] * 7, dict(draft=1.0, verify=12.0, choice=0.5, rest=0.3), nodes=8).stats
    assert "the target's forward over 8.0 nodes: 12.0 ms, where plain decoding's step has 5.0." in \
        why_slower("medusa", big, plain)
    assert milliseconds(Stats(accepted=[1])) == dict(draft=0, verify=0, choice=0, rest=0)


def test_only_what_is_slower_gets_a_sentence(capsys):
    """Catches a sentence for every method, for none, and one that the table contradicts."""
    parts = dict(draft=0.0, verify=5.0, choice=0.0, rest=0.0)
    more = dict(parts, draft=1.0)
    texts = {"plain": a_run([0] * 4, parts), "fast": a_run([0] * 7, parts, nodes=8),
             "slow": a_run([0] * 4, more, nodes=8), "plain again": a_run([0] * 4, more)}
    compare(texts.get, ["fast", "slow", "plain again"], {}, lambda at: "")
    err = capsys.readouterr().err
    assert err.count("is slower than") == 1 and "\nslow is slower than plain decoding here" in err
    compare(lambda name: Run([0], Stats([1])), ["d"], {}, None)        # one token: no speed, no ratio
    err = capsys.readouterr().err
    assert "is slower" not in err and all(math.isnan(r[3]) for r in table(err).values())
