"""bench/run.py: the runner counts, compares, resumes, and says what it cannot do."""
import json
import os
import re
import shutil
import sys

import pytest
import torch

import report
import run as bench
import train
from plumbing.checkpoint import save
from plumbing.drafters import setup
from plumbing.text import Corpus, Tokenizer, read_texts
from tree import Sampler, complete

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def no_charts(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)               # they take seconds


SMALL = ["--device", "cpu", "--dtype", "float32",                      # transformers' texts part in bfloat16
         "--prompts", "3", "--prompt-tokens", "8", "--new-tokens", "16", "--nodes", "8"]


def run_bench(capsys, *argv):
    """-> what was printed, and its last line as JSON."""
    bench.main([str(a) for a in argv])
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as e:
        bench.main([str(a) for a in argv])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def plain_target(out):
    """-> target and tokenizer of a folder."""
    opt = bench.sample.Options(method="plain", out=out, device="cpu", dtype="float32")
    return setup(opt, train.METHODS)[:2]


@pytest.fixture(scope="module")
def contest(trained, text_file, tmp_path_factory):
    """
    The trained folder with the rivals trained too, by the runner itself: everything for a fraction of a
    second each.
    """
    out = str(tmp_path_factory.mktemp("contest") / "out")
    shutil.copytree(trained, out)
    bench.main(["--out", out, "--data", text_file, *SMALL, "--temperatures", "0", "--train-minutes", "0.005",
                "--methods", "medusa,eagle2,self_speculative,prompt_lookup"])
    return out


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [dict(question_id=81, category="writing", turns=["the cat sees", "and the dog"]),
            dict(question_id=82, category="writing", turns=["a big house"]),
            dict(question_id=83, category="qa", turns=["the small tree likes"])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return str(path)


def test_own_questions():
    """A question file that cannot be read, with a category or an id twice, or cut off."""
    rows = bench.read_questions(os.path.join(ROOT, "bench", "questions.jsonl"), 0)
    count = {}
    for r in rows:
        count[r["category"]] = count.get(r["category"], 0) + 1
    assert 36 <= len(rows) <= 48
    assert len({r["question"] for r in rows}) == len(rows) == len({r["turns"][0] for r in rows})
    assert set(count) == set("writing roleplay reasoning math coding extraction stem humanities translation "
                             "summarization qa rag".split())
    assert set(count.values()) == {3}


def test_training_budget(contest, text_file, capsys):
    """
    Checkpoints in the wrong place, a budget that is not kept, figures of training that are not those of
    the checkpoint.
    """
    out, result = run_bench(capsys, "--out", contest, "--data", text_file, *SMALL, "--temperatures", "0",
                            "--methods", "medusa,eagle2,self_speculative")
    for name in ("medusa", "eagle2", "self_speculative"):
        meta = json.load(open(os.path.join(contest, name, "model.json")))
        assert meta["kind"] == name and meta["finished"] and meta["options"]["minutes"] == 0.005
        assert 0 < meta["metrics"]["seconds"] < 60                     # when it was last logged
        assert meta["metrics"]["tokens"] == meta["metrics"]["step"] * meta["config"]["batch_size"] * 64
        tokens = meta["metrics"]["tokens"] if meta["parameters"] else None
        assert result["trained"][name]["training_tokens"] == tokens
        assert result["trained"][name]["parameters"] == meta["parameters"]
    parameters = {name: result["trained"][name]["parameters"] for name in ("self_speculative", "eagle2")}
    assert parameters["self_speculative"] == 0 < parameters["eagle2"]
    assert out.count("yes\n") == 4


@pytest.mark.parametrize("form", ["text", "chat"])
def test_questions_and_turns(form, contest, questions, capsys, monkeypatch, tmp_path, no_charts):
    """
    Rows that are missing, categories mixed up, a second turn without the first answer, other prompts
    for other methods.
    """
    asked, seen, real = [], [], bench.complete

    def chat(self, turns):
        asked.append(list(turns))
        return [7] + self.encode("|".join(turns))

    def watched(target, prompt, *args):
        seen.append(prompt)
        return real(target, prompt, *args)

    if form == "chat":
        monkeypatch.setattr(Tokenizer, "chat", chat, raising=False)
        monkeypatch.setattr(Tokenizer, "has_chat", True)
    monkeypatch.setattr(bench, "complete", watched)
    names = ["plain", "medusa", "eagle2", "self_speculative", "prompt_lookup", "hf", "hf-lookup"]
    out, result = run_bench(capsys, "--out", contest, *SMALL, "--prompts", 0, "--questions", questions,
                            "--methods", ",".join(names[1:]), "--json", tmp_path / "r.json", "--profile")
    rows, categories = result["rows"], result["categories"]
    assert [(r["method"], r["temperature"]) for r in rows] == [(n, t) for t in (0, 1) for n in names]
    expect = [(c, n) for c in ("writing", "qa") for n in names]
    assert [(r["category"], r["method"]) for r in categories[:14]] == expect
    assert json.load(open(tmp_path / "r.json"))["trained"] == result["trained"]
    for r in rows:
        assert r["tau"] >= 1 and r["speed"] > 0 and r["prompts"] == 4 and r["speedup"] > 0
        assert r["interval"][0] <= r["speedup"] <= r["interval"][1]
        assert r["same"] is (None if r["method"].startswith("hf") and r["temperature"] else True), r
    records = [json.loads(line) for line in open(tmp_path / "r.answers.jsonl")][1:]
    assert [(r["temperature"], r["question"], r["turn"]) for r in records] == [
        (t, q, turn) for t in (0, 1) for q, turn in (("81", 0), ("81", 1), ("82", 0), ("83", 0))]
    first, second = records[0]["answers"], records[1]["answers"]
    orders = [list(r["answers"]) for r in records]
    assert all(sorted(o) == sorted(names) for o in orders)
    assert len({o[o.index("medusa") - 1] for o in orders[:4]}) > 1     # not always behind the same other one
    target, tokenizer = plain_target(contest)
    text = ["the cat sees", tokenizer.decode(first["plain"]["tokens"]), "and the dog"]
    prompt = [tokenizer.eos] + tokenizer.encode("\n\n".join(text) + "\n\n")
    if form == "chat":
        prompt = [7] + tokenizer.encode("|".join(text))
    tokens, _ = complete(target, prompt[-48:], 16, None, Sampler(), {tokenizer.eos})
    assert tokens == second["plain"]["tokens"]
    assert seen[5:10] == [seen[0]] * 5 and seen[10:15] == [prompt[-48:]] * 5       # a warm-up before
    assert form == "text" or asked[:2] == [["the cat sees"], text]


def test_hf_counts_like_we_do(contest, text_file, capsys):
    """
    transformers' tokens counted with the prompt, with the first token timed, or its lookup's steps
    counted as tokens.
    """
    target, tokenizer = plain_target(contest)
    hf, prompt = bench.to_hf(target), tokenizer.encode("the cat sees the cat sees the")
    ours, stats = complete(target, prompt, 20, None, Sampler(), {tokenizer.eos})
    for name in ("hf", "hf-lookup"):
        a = bench.hf_answer(hf, name, prompt, 20, 0.0, 0, [tokenizer.eos])
        assert a["tokens"] == ours and sum(a["accepted"]) == len(ours)
        about = dict(temperature=0, index=0, turn=0, question="", category="", prompt_tokens=1)
        assert report.whole(dict(about, answers={name: a}), [name])
        assert a["accepted"] == stats.accepted if name == "hf" else len(a["accepted"]) <= len(ours)
        assert a["seconds"]["prompt"] > 0 and a["seconds"]["rest"] > 0


def test_resume(contest, questions, capsys, monkeypatch, tmp_path, no_charts):
    """
    Answers lost or asked twice after an interruption; a torn or empty answer that is taken for one;
    another experiment's.
    """
    args = ["--out", contest, *SMALL, "--prompts", 0, "--questions", questions,
            "--methods", "medusa,hf", "--json", tmp_path / "r.json"]
    _, whole = run_bench(capsys, *args)
    path = tmp_path / "r.answers.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 8
    calls, real = [], bench.complete
    monkeypatch.setattr(bench, "complete", lambda *args: calls.append(args[4].temperature) or real(*args))

    def again(text):
        path.write_text(text)
        calls.clear()
        _, result = run_bench(capsys, *args, "--resume")
        figures = lambda result: [(r["tau"], r["same"], r["prompts"]) for r in result["rows"]]
        assert figures(result) == figures(whole)
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(kept) == 9
        return len(calls)

    assert again("".join(lines)) == 0
    # three prompts for two methods (hf is not counted), and a warm-up
    assert again("".join(lines[:6]) + lines[6][:100]) == 2 * (3 + 1)
    for change in (dict(tokens=[], accepted=[]), "last", None):
        broken = json.loads(lines[3])
        medusa = broken["answers"].pop("medusa")
        if change == "last":
            change = dict(tokens=medusa["tokens"][:-1])
        if change:
            broken["answers"]["medusa"] = medusa | change
        assert again("".join([*lines[:3], json.dumps(broken) + "\n", *lines[4:]])) == 2 * (1 + 1)
    path.write_text("".join(lines))
    assert "another options" in refused(capsys, *args, "--resume", "--new-tokens", "17")
    assert path.read_text() == "".join(lines)                          # and nothing is lost by it
    path.write_text("no header\n")
    assert "start without --resume" in refused(capsys, *args, "--resume")


def test_a_measurement_of_other_prompts_is_not_resumed(contest, questions, text_file, capsys, monkeypatch,
                                                       tmp_path, no_charts):
    """
    Old answers that stand under new questions, since the file has the same name. It is told by the prompts
    themselves: other words, another order, more of them, other held-out text, another chat template. The same
    prompts from elsewhere go on.
    """
    common = ["--out", contest, *SMALL, "--methods", "medusa", "--temperatures", "0",
              "--json", tmp_path / "r.json"]
    args = [*common, "--prompts", 0, "--questions", questions]
    _, whole = run_bench(capsys, *args)
    path = tmp_path / "r.answers.jsonl"
    before, asked = path.read_bytes(), open(questions).read()
    rows = asked.splitlines()
    for text, says in ((asked.replace("a big house", "a small house"), "prompts.1 (82, "),
                       ("\n".join(reversed(rows)), "prompts.0 (81, "), (rows[0], "prompts.1 (82, "),
                       (asked + rows[0].replace("81", "84"), "prompts.3 (None, now 84, "),
                       (asked.replace('"and the dog"', '"and the cat"'), "prompts.0 (81, ")):
        with open(questions, "w") as f:
            f.write(text)
        err = refused(capsys, *args, "--resume")
        assert "was started with another " in err and says in err and path.read_bytes() == before
    calls = []
    monkeypatch.setattr(bench, "complete", lambda *args: calls.append(args) or complete(*args))
    elsewhere = tmp_path / "elsewhere.jsonl"
    elsewhere.write_bytes(b"\xef\xbb\xbf" + asked.encode())           # with a byte order mark, too
    moved = [*common, "--prompts", 9, "--questions", elsewhere, "--resume"]
    _, again = run_bench(capsys, *moved)
    assert not calls and [r["tau"] for r in again["rows"]] == [r["tau"] for r in whole["rows"]]
    with monkeypatch.context() as m:
        m.setattr(Tokenizer, "template", "{{ messages }}")
        assert "prompts.0 (81, " in refused(capsys, *moved)
    mine = tmp_path / "mine.txt"
    shutil.copy(text_file, mine)
    run_bench(capsys, *common, "--data", mine)
    mine.write_text(mine.read_text().replace("cat", "cow"))
    assert "prompts.0 (0, " in refused(capsys, *common, "--data", mine, "--resume")
    shutil.copy(text_file, tmp_path / "other.txt")
    calls.clear()
    run_bench(capsys, *common, "--data", tmp_path / "other.txt", "--resume")
    assert not calls


def test_another_text_is_named(contest, text_file, capsys, monkeypatch):
    """A comparison that says yes whatever it is given; a gap at another token, or of other scores."""
    real = bench.complete

    def liar(target, prompt, new, drafter, *args):
        tokens, stats = real(target, prompt, new, drafter, *args)
        if drafter:
            tokens = [t if i != 5 else (t + 1) % 256 for i, t in enumerate(tokens)]
        return tokens, stats
    monkeypatch.setattr(bench, "complete", liar)
    out, result = run_bench(capsys, "--out", contest, "--data", text_file, *SMALL,
                            "--methods", "medusa", "--temperatures", "1")
    plain, medusa = result["rows"]
    assert plain["same"] is True and medusa["same"] is False
    assert {d["token"] for d in medusa["differs"]} == {5}
    said = f"question 0 from token 5 on; {medusa['differs'][0]['gap']}"
    assert f"NO, {len(medusa['differs'])}: {said}" in out
    target, tokenizer = plain_target(contest)
    prompts = Corpus(read_texts(text_file)).tokenize(tokenizer).prompts(3, 8)
    for d in medusa["differs"]:
        sampler = Sampler(1.0, seed=int(d["question"]))
        tokens, _ = real(target, prompts[int(d["question"])], 5, None, sampler)
        idx = torch.tensor([prompts[int(d["question"])] + tokens])
        noisy = target(idx)[0][0, -1] + sampler.noise(13, target.cfg.vocab_size, target.wte.weight)
        top = noisy.sort().values
        said = re.match(r"the two best scores there are (.*) apart, more than rounding does", d["gap"])
        assert float(said[1]) == pytest.approx((top[-1] - top[-2]).item(), rel=0.06)


def their_speed(file, base, count, task):
    """
    Spec-Bench's speed.py in small: tokens/s of a method and of the baseline, each the mean over questions;
    their ratio; and all accept lengths. Of the baseline it counts the tokens of its text, count(text).
    """
    def read(path):
        with open(path, encoding="utf-8") as f:
            data = [json.loads(line) for line in f]
        return [d["choices"][0] for d in data if task in ("overall", d["category"])]
    mine, speeds, lengths = read(file), [], []
    for choice in mine:
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths += choice["accept_lengths"]
    others = [sum(map(count, choice["turns"])) / sum(choice["wall_time"]) for choice in read(base)]
    mean = lambda values: sum(values) / len(values)
    return mean(speeds), mean(others), mean(speeds) / mean(others), lengths


def test_spec_bench_files(contest, questions, capsys, tmp_path, no_charts):
    """Answers that Spec-Bench's scripts cannot read, or from which they compute other figures than ours."""
    folder, names = tmp_path / "answers", ["plain", "medusa", "prompt_lookup:nodes=3", "hf"]
    _, result = run_bench(capsys, "--out", contest, *SMALL, "--prompts", 0, "--questions", questions,
                          "--methods", ",".join(names), "--json", tmp_path / "r.json", "--spec-bench", folder)
    _, tokenizer = plain_target(contest)
    records = [json.loads(line) for line in open(tmp_path / "r.answers.jsonl")][1:]
    files = {(n, t): folder / f"{n.replace(':', '-')}-temperature-{t}.jsonl" for n in names for t in (0, 1)}
    assert {path.name for path in files.values()} == set(os.listdir(folder))
    for (name, t), path in files.items():
        lines = [json.loads(line) for line in open(path)]
        asked = [(d["question_id"], d["category"]) for d in lines]
        assert asked == [(81, "writing"), (82, "writing"), (83, "qa")]
        assert len({d["answer_id"] for d in lines}) == 3 and all(d["model_id"] and d["tstamp"] for d in lines)
        for d in lines:
            choice, = d["choices"]
            sizes = {len(choice[k]) for k in ("turns", "decoding_steps", "new_tokens", "wall_time")}
            assert choice["index"] == 0 and sizes == {2 if d["question_id"] == 81 else 1}
            assert sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
        for task in ("overall", "qa"):
            asked = [r for r in records if r["temperature"] == t and task in ("overall", r["category"])]
            base = files["plain", t]
            count = lambda text: len(tokenizer.encode(text))
            speed, plain, ratio, lengths = their_speed(path, base, count, task)
            by_question = {}
            for r in asked:
                a = r["answers"][name]
                sums = by_question.setdefault(r["question"], [0, 0.0])
                sums[0] += len(a["tokens"])
                sums[1] += sum(a["seconds"].values())
            ours = [tokens / seconds for tokens, seconds in by_question.values()]
            assert speed == pytest.approx(sum(ours) / len(ours))
            assert ratio == pytest.approx(speed / plain)
            rows = result["rows"] if task == "overall" else result["categories"]
            row, = [r for r in rows if r["method"] == name and r["temperature"] == t and
                    r.get("category", "overall") == task]
            assert sum(lengths) / len(lengths) == pytest.approx(row["tau"])
    same = [json.loads(line)["choices"][0]["turns"] for line in open(files["medusa", 1])]
    assert same == [json.loads(line)["choices"][0]["turns"] for line in open(files["plain", 1])]
    (tmp_path / "file").write_text("")
    assert "--spec-bench" in refused(capsys, "--out", contest, "--spec-bench", tmp_path / "file")


def test_it_says_how_long_it_will_take(contest, questions, capsys, monkeypatch, tmp_path, no_charts):
    """An estimate from the warm-up, or of prompts that are answered already; a bar where nobody looks."""
    now, real = [0.0], bench.complete

    def clock():
        now[0] += 1e-6
        return now[0]
    monkeypatch.setattr(bench.time, "perf_counter", clock)

    def slow(*args):
        now[0] += 30.0
        return real(*args)
    monkeypatch.setattr(bench, "complete", slow)
    args = ["--out", contest, *SMALL, "--prompts", 0, "--questions", questions, "--methods", "medusa",
            "--json", tmp_path / "r.json"]
    bench.main([str(a) for a in args])
    out = capsys.readouterr()
    said = "the first prompt took 60.0 s, all methods together: about 7 minutes for the other 7"
    assert out.out.count(said) == out.out.count("the first prompt") == 1 and out.err == ""
    lines = (tmp_path / "r.answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "r.answers.jsonl").write_text("".join(lines[:6]))      # five of eight are answered
    out, _ = run_bench(capsys, *args, "--resume")
    assert "about 2 minutes for the other 2" in out
    out, _ = run_bench(capsys, *args, "--resume")
    assert "the first prompt" not in out


def test_the_header_says_how_it_was_decoded(contest, text_file, capsys):
    """A table of nearly exact texts that looks like one of exact texts."""
    for more, says in (["--dtype", "bfloat16"], "exact"), (["--no-exact"], "not exact: --no-exact"):
        out, result = run_bench(capsys, "--out", contest, "--data", text_file, *SMALL, "--methods", "plain",
                                "--temperatures", "0", *more)
        assert result["decoding"].startswith(says) and result["decoding"] in out.splitlines()[0]


def test_what_exactness_costs_plain_decoding(contest, text_file, capsys, monkeypatch):
    """A baseline slower than plain decoding can be, with nothing beside it; a row that is exact too."""
    real, seen = bench.complete, []

    def watched(target, prompt, new, drafter, *args):
        seen.append((drafter is None, target.exact is None))
        return real(target, prompt, new, drafter, *args)
    monkeypatch.setattr(bench, "complete", watched)
    out, result = run_bench(capsys, "--out", contest, "--data", text_file, *SMALL, "--temperatures", "0",
                            "--methods", "inexact,medusa", "--dtype", "bfloat16")
    assert [r["method"] for r in result["rows"]] == ["plain", "inexact", "medusa"]
    assert {(True, True), (True, False), (False, False)} == set(seen)
    assert result["rows"][1]["speed"] > 0 and result["rows"][2]["same"]
    assert "inexact" in bench.Options().methods.split(",")


def test_help_has_what_most_people_need_first(capsys):
    """Thirty options in a row, of which most people need ten."""
    with pytest.raises(SystemExit) as e:
        bench.main(["-h"])
    first, *others = capsys.readouterr().out.split("what most people need:")[1].split("\n\n")
    shown = [line.split()[0] for line in first.splitlines() if line.strip().startswith("--")]
    assert e.value.code == 0 and len(shown) == 10 and shown[:3] == ["--methods", "--questions", "--prompts"]
    assert {"--spec-bench", "--tree", "--dtype"} <= set("\n".join(others).split())


@pytest.mark.parametrize("argv, says", [
    (["--methods", "nosuch"], "unknown method nosuch"),
    (["--temperatures", "a"], "numbers with commas"),
    (["--temperatures", "-1"], "0 or more"),
    (["--prompts", "0"], "--prompts"),
    (["--resume"], "--json"),
    (["--questions", "/nonexistent"], "/nonexistent"),
    (["--new-tokens", "64"], "no room"),
    (["--methods", "prompt_lookup", "--tree", "2,2"], "best or chain"),
    (["--methods", "self_speculative", "--tree", "2,2"], "best or chain"),
    (["--methods", "eagle2", "--out", "nosuch"], "no backbone"),
    (["--json", "/proc/nosuch/x.json"], "cannot write"),
])
def test_mistakes_get_one_line(argv, says, contest, text_file, capsys):
    """Tracebacks for what a user typed."""
    good = ["--out", contest, "--data", text_file, *SMALL, "--methods", "medusa", "--temperatures", "0"]
    assert says in refused(capsys, *good, *argv)


def test_bad_question_files(contest, tmp_path, capsys):
    """A file that is half read, or whose fault is not located."""
    good = json.dumps(dict(question_id=1, category="a", turns=["x"]))
    for bad, says in (("{", "line 2"),
                      ('{"question_id": 1, "category": "a"}', "line 2: KeyError"),
                      ("[]", "line 2"),
                      (good.replace('["x"]', "[]"), "turns"),
                      (good.replace('["x"]', '"xy"'), "turns"),
                      (good.replace('"x"', "3"), "turns")):
        path = tmp_path / "q.jsonl"
        path.write_text(f"{good}\n{bad}\n")
        assert says in refused(capsys, "--questions", path, "--out", contest), bad
    path.write_text("\n")
    assert "no question" in refused(capsys, "--questions", path, "--out", contest)


def test_without_a_checkpoint_it_says_which_command_makes_one(trained, text_file, capsys):
    """Advice that names a command which does not exist."""
    err = refused(capsys, "--out", trained, "--data", text_file, *SMALL, "--methods", "eagle2")
    assert f"run python bench/run.py --methods eagle2 --train-minutes 5 --out {trained}" in err


def test_a_result_replaces_no_device(tmp_path, capsys):
    """--json /dev/null, by somebody who may write there: everything that uses it would find a file."""
    os.mkfifo(tmp_path / "null")
    for write in (lambda path: bench.main(["--json", path]), lambda path: save(path, {}, {})):
        with pytest.raises(SystemExit) as e:
            write(str(tmp_path / "null"))
        assert e.value.code == 2 and "no file" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["null"] and not os.path.isfile(tmp_path / "null")


def test_options_of_one_method(trained, text_file, capsys):
    """
    A variant that has the options of all, is measured as another, or an option that none can have of
    its own.
    """
    opt = bench.Options(nodes="6")
    assert bench.variant("medusa", opt) == ("medusa", opt)
    name, own = bench.variant("medusa:nodes=1:share-noise=False:floor=0.5", opt)
    assert (name, own.nodes, own.share_noise, own.floor, own.tree) == ("medusa", "1", False, 0.5, opt.tree)
    _, result = run_bench(capsys, "--out", trained, "--data", text_file, *SMALL, "--temperatures", "0",
                          "--methods", "medusa:nodes=1,medusa:nodes=5")
    rows = {r["method"]: r for r in result["rows"]}
    assert rows["medusa:nodes=1"]["nodes"] == 1 == rows["medusa:nodes=1"]["tau"]
    assert 4 < rows["medusa:nodes=5"]["nodes"] <= 5
    for bad in ("medusa:oak=1", "medusa:nodes", "medusa:nodes=many", "medusa:floor=x",
                "medusa:share-noise=no", "oak:nodes=3", "medusa:seed=1"):
        assert "--methods" in refused(capsys, "--out", trained, "--methods", bad) or "many" in bad, bad
