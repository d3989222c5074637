"""bench/report.py: figures from answers, by hand; charts."""
import json
import math
import os
import random
import sys

import pytest

import report


def record(plain, other, category="x", work=(1.0, 0.5)):
    """tokens a forward of both methods, and their seconds after the prompt."""
    def answer(accepted, s):
        seconds = dict(prompt=9.0, draft=0.25 * s, verify=0.5 * s, rest=0.25 * s)
        tokens = list(range(sum(accepted)))
        return dict(tokens=tokens, accepted=accepted, nodes=4 * (len(accepted) - 1), seconds=seconds)
    return dict(temperature=0.0, index=0, turn=0, question="q", category=category, prompt_tokens=3,
                answers=dict(plain=answer(plain, work[0]), m=answer(other, work[1])))


def test_figures_by_hand():
    """
    tau with the prompt's forward, a mean of ratios for a median, time of a prompt, another category's
    rows.
    """
    records = [record([1] * 5, [1, 3, 1]),
               record([1] * 5, [1, 2, 2], "y", (1.0, 0.25)),
               record([1] * 9, [1, 4, 4], "y", (2.0, 4.0)),
               record([1], [1], "y", (0.0, 0.0))]
    rows, categories = report.summary(records, ["plain", "m"])
    m = rows[1]
    assert m["tau"] == 16 / 6 and m["speedup"] == 2.0 and m["same"] and m["nodes"] == 4 and m["prompts"] == 4
    assert m["accepted"] == {1: 1, 2: 2, 3: 1, 4: 2} and m["positions"] == [5 / 6, 3 / 6, 2 / 6]
    assert m["interval"] == [0.5, 4.0] and m["speed"] == 8.0
    assert math.isclose(m["draft"], 1000 * 0.25 * 4.75 / 6) and math.isclose(m["verify"], 2 * m["draft"])
    assert [(r["category"], r["method"], r["tau"]) for r in categories] == [
        ("x", "plain", 1), ("x", "m", 2), ("y", "plain", 1), ("y", "m", 3)]
    assert rows[0]["speedup"] == 1 and rows[0]["tau"] == 1


def test_texts_and_intervals():
    """
    Empty texts that are equal, a prefix that counts as the whole; an interval that is not one, or
    changes by itself.
    """
    assert report.first_difference([1, 2, 3], [1, 2, 3]) is None
    cases = ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([], [], 0), ([1], [], 0), (None, [1], 0)
    for a, b, at in cases:
        assert report.first_difference(a, b) == at
    rng = random.Random(1)
    truth, inside = 1.5, 0
    for _ in range(100):
        low, high = report.interval([truth + rng.gauss(0, 0.2) for _ in range(25)], 200)
        inside += low <= truth <= high
        assert low < high
    assert 85 <= inside <= 100
    assert report.interval([1.0]) is None and report.interval([3, 1, 2] * 3) == report.interval([3, 1, 2] * 3)
    assert report.loops([1, 2] * 20) and not report.loops(list(range(40)))


@pytest.mark.parametrize("there", [True, False])
def test_charts(there, monkeypatch, tmp_path, capsys):
    """A chart that cannot be drawn, or a run that ends in a traceback because there is no matplotlib."""
    if there:
        pytest.importorskip("matplotlib", reason="charts need matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    rows, categories = report.summary([record([1] * 5, [1, 3, 1]), record([1], [1])], ["plain", "m"])
    report.write(str(tmp_path / "r.json"), dict(rows=rows, categories=categories))
    assert json.load(open(tmp_path / "r.json"))["rows"][1]["method"] == "m"
    charts = sorted(f for f in os.listdir(tmp_path) if f.endswith(".png"))
    assert charts == (["r-accepted.png", "r-positions.png", "r-speedup.png"] if there else [])
    assert there or "no charts" in capsys.readouterr().out
