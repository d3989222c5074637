"""bench/report.py: figures from answers, by hand; tables, charts, a page."""
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


def result_of(records, trained, **options):
    """What run.py writes of records."""
    rows, categories = report.summary(records, ["plain", "m"])
    o = dict(questions="", prompt_tokens=8, new_tokens=16, out="nowhere", backbone="", json="r.json")
    return dict(options=o | options, versions=dict(torch="2.9", commit="abc"), machine="an abacus",
                threads=3, device="cpu", dtype="torch.float32", date="2026-11-30",
                decoding="exact, bit for bit", trained=trained, rows=rows, categories=categories,
                command="python bench/run.py --methods m")


def test_the_page(tmp_path, capsys):
    """
    A page without the machine, a temperature or a method, whose tables are no tables or say another
    figure.
    """
    records = [record([1] * 5, [1, 3, 1]), record([1] * 5, [1, 2, 2], "y", (1.0, 0.25))]
    records[1]["answers"]["m"] |= dict(tokens=[0, 1, 9, 3, 4], gap="a near tie")
    warm = [dict(r, temperature=0.7) for r in records]
    trained = dict(m=dict(parameters=2_500_000, training_tokens=7_000_000))
    result = result_of(records, trained, out=str(tmp_path))
    more = result_of(warm, {})
    result["rows"] += more["rows"]
    result["categories"] += more["categories"]
    (tmp_path / "m").mkdir()
    log = [dict(step=10, seconds=30.0, tokens=1000, val_loss=3.25, train_loss=3.0, top1=[0.5, 0.25]),
           dict(step=20, seconds=66.0, tokens=2000, val_loss=2.5, train_loss=2.0, top1=[0.75, 0.5])]
    (tmp_path / "m" / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in log))
    (tmp_path / "r-speedup.png").write_bytes(b"")
    (tmp_path / "training.png").write_bytes(b"")
    (tmp_path / "r.json").write_text(json.dumps(result))
    report.main([str(tmp_path / "r.json")])
    page = capsys.readouterr().out
    for says in ("# Speculative decoding on an abacus, 2026-11-30",
                 "cpu, 3 threads, float32, exact, bit for bit",
                 "torch 2.9, commit abc", "`python bench/run.py --methods m`", "## T = 0\n", "## T = 0.7\n",
                 "2 held-out prompts of 8 tokens", "![r-speedup.png](r-speedup.png)",
                 "![training.png](training.png)",
                 "NO, 1: question q from token 2 on; a near tie |"):
        assert says in page, says
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    for lines in tables:
        assert len({line.count("|") for line in lines}) == 1 and set(lines[1]) == set("|-: ")
    assert len(tables) == 5                                            # 2 a temperature, and the trainings
    cell = dict(zip(*(map(str.strip, line.split("|")[1:-1]) for line in (tables[0][0], tables[0][3]))))
    assert cell["method"] == "m" and cell["trained"] == "2.50M" and cell["tau"] == "2.00"
    assert cell["speed-up"] == "3.00" and cell["tokens/s"] == "12"
    assert [line.split("|")[1:-1] for line in tables[4][2:]] == [
        [" m ", " 20 ", " 0.00M ", " 1.1 ", " 3.250 2.500 ", " 0.75 0.50 "]]


def test_a_page_of_what_is_no_result(tmp_path, capsys):
    """A traceback for a file that is not there or not run.py's, or half a page."""
    (tmp_path / "r.json").write_text("{}")
    for argv, says in (([str(tmp_path / "none")], "no such file"), ([str(tmp_path / "r.json")], "no result"),
                       ([], "one file"), (["--x"], "one file")):
        with pytest.raises(SystemExit) as e:
            report.main(argv)
        out, err = capsys.readouterr()
        assert e.value.code == 2 and says in err and err.count("\n") == 1 and out == ""


def test_tables_have_what_they_say(capsys):
    """A column under another's name, with and without --profile; categories mixed up."""
    records = [record([1] * 5, [1, 3, 1]), record([1] * 5, [1, 2, 2], "y", (1.0, 0.25))]
    rows, categories = report.summary(records, ["plain", "m"])
    report.show(rows, categories, {}, profile=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "T = 0; 0 of 2 plain texts end in a loop"
    names = lines[2].replace("on tokens", "on-tokens").replace("95 %", "95%").split()
    cell = dict(zip(names, lines[4].split()))
    assert cell["method"] == "m" and cell["same"] == "yes" and cell["95%"] == "2.00-4.00"
    assert cell["prompt"] == "9000.00" and cell["choice"] == "0.00" and cell["other"] == "25.0%"
    assert cell["limit"] == f"{2 * rows[0]['verify'] / (rows[1]['verify'] + rows[1]['draft']):.2f}"
    assert lines[-2].split() == ["x", "2.00", "/", "2.00"] and lines[-1].split() == ["y", "4.00", "/", "2.00"]


def test_a_fault_comes_before_near_ties():
    """A text that is wrong, hidden behind the first of many in which only rounding chose."""
    records = [record([1] * 5, [1, 3, 1]) for _ in range(3)]
    for i, gap in enumerate(("a near tie", "more than rounding does", "a near tie")):
        records[i]["answers"]["m"] |= dict(tokens=[0, 1, 9, 3, 4], gap=gap)
        records[i]["question"] = str(i)
    rows, _ = report.summary(records, ["plain", "m"])
    assert [d["question"] for d in rows[1]["differs"]] == ["1", "0", "2"]
    assert report.same(rows[1]) == "NO, 3: question 1 from token 2 on; more than rounding does"
