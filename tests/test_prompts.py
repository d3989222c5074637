"""bench/prompts.py: many prompts, of all kinds, none of them from a benchmark."""
import json
import os
import re
import subprocess
import sys

import pytest

import prompts
import run as bench
from plumbing.own_text import read_prompts

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OURS = os.path.join(ROOT, "bench", "questions.jsonl")


@pytest.fixture(scope="module")
def made():
    """Five thousand prompts; 20,000 where there is a Spec-Bench to compare them with."""
    return prompts.prompts(20_000 if "SPEC_BENCH" in os.environ else 5000, seed=0)


def test_nearly_all_are_distinct(made):
    """A template with hardly a slot, a slot that is not drawn, a category that repeats itself."""
    assert [p["question_id"] for p in made] == list(range(1, len(made) + 1))
    for category in prompts.CATEGORIES:
        first = [p["turns"][0] for p in made if p["category"] == category]
        assert len(first) >= len(made) // 12 and len(set(first)) > 0.99 * len(first), category
    openings = {" ".join(p["turns"][0].split()[:3]) for p in made}
    assert len(openings) > 400


def test_every_slot_is_filled(made):
    """
    A slot that nobody knows, a new line that is two letters, turns that are still one text, a foreign
    section.
    """
    for p in made:
        assert 1 <= len(p["turns"]) <= 2 and all(turn.strip() == turn != "" for turn in p["turns"])
        if p["category"] not in ("coding", "summarization", "rag", "extraction"):      # texts of others
            assert not re.search(r"[{}\\|]| // ", "".join(p["turns"])), p
    sections = prompts.read_templates()
    used = {slot.lower() for lines in sections.values() for line in lines
            for _, slot, *_ in prompts.SLOT.findall(line)}
    assert set(sections) - used == set(prompts.CATEGORIES)


def runs(texts, n=8):
    """All runs of n words in texts."""
    out = set()
    for text in texts:
        words = re.findall(r"[^\W_]+", text.lower())
        out.update(tuple(words[i:i + n]) for i in range(len(words) - n + 1))
    return out


def shared(made, path):
    """Runs of eight words that made prompts have in common with a file of questions."""
    with open(path, encoding="utf-8") as f:
        asked = runs(turn for line in f if line.strip() for turn in json.loads(line)["turns"])
    assert len(asked) > 100
    return sorted(asked & runs(turn for p in made for turn in p["turns"]))


def test_nothing_is_from_a_benchmark(made):
    """
    A question or a passage of a benchmark among the prompts that drafters are trained on: not one run of
    eight words is shared with our questions, nor with Spec-Bench's, if SPEC_BENCH names its question.jsonl.
    """
    for path in filter(None, (OURS, os.environ.get("SPEC_BENCH"))):
        assert shared(made, path) == []


def test_a_shared_run_is_seen(made):
    """The test above must see eight words, whatever stands between them."""
    with open(OURS, encoding="utf-8") as f:
        words = json.loads(f.readline())["turns"][0].split()
    planted = [dict(turns=["Please: " + ", ".join(words[3:11]).upper() + "!"])]
    assert len(shared(made + planted, OURS)) == 1
    planted[0]["turns"][0] = " ".join(words[3:10])
    assert shared(made + planted, OURS) == []


def test_the_same_seed_makes_the_same(tmp_path, capsys):
    """Prompts that depend on the order of a set; a seed without effect; categories that nobody asked for."""
    args = ["--n", "24", "--seed", "5"]
    prompts.main([*args, "--to", str(tmp_path / "new" / "a")])
    a = (tmp_path / "new" / "a").read_text(encoding="utf-8")
    assert "24 prompts" in capsys.readouterr().out
    prompts.main(["--n", "24", "--seed", "6"])
    assert capsys.readouterr().out != a
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, os.path.join(ROOT, "bench", "prompts.py"), *args]
    assert subprocess.run(command, capture_output=True, env=env).stdout.decode() == a
    prompts.main(["--n", "9", "--categories", "math,qa"])
    assert {json.loads(line)["category"] for line in capsys.readouterr().out.splitlines()} == {"math", "qa"}
    for wrong, says in ((["--categories", "maths"], "no maths"),
                        (["--n", "1", "--to", str(tmp_path)], "--to")):
        with pytest.raises(SystemExit) as e:
            prompts.main(wrong)
        err = capsys.readouterr().err
        assert e.value.code == 2 and says in err and err.count("\n") == 1


def test_others_can_read_them(made, tmp_path):
    """A file that bench/run.py or --self-prompts refuses."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in made[:48]), encoding="utf-8")
    rows = bench.read_questions(str(path), 12)
    assert len(rows) == 12 and rows[0]["turns"] == made[0]["turns"]
    assert read_prompts(str(path)) == [p["turns"] for p in made[:48]]
