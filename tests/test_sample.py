"""sample.py: streaming, comparison, and what it says to a user's mistakes."""
import io
import os
import pty
import re
import shutil
import sys

import pytest
import torch

import sample
import train
from plumbing.checkpoint import load, save
from plumbing.drafters import setup
from test_compare import table
from test_page import contents
from tree import Stats, complete

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(capsys, *argv):
    sample.main([str(a) for a in argv])
    return capsys.readouterr()


def refused(capsys, *argv):
    """Run sample.py; it must end with status 2 and one line on stderr, which is returned."""
    with pytest.raises(SystemExit) as e:
        sample.main([str(a) for a in argv])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("method", ["plain", *train.METHODS])
def test_text_is_the_same_by_every_method(method, trained, capsys):
    """Catches a drafter that is loaded or driven wrongly by the command line: the text would depend on it."""
    if not os.path.exists(os.path.join(trained, method)) and method != "plain":
        pytest.skip(f"{method} is not in the trained fixture")
    args = ["--out", trained, "--max-new-tokens", 40, "--prompt", "the cat "]
    plain = run(capsys, *args, "--method", "plain", "--temperature", 1).out
    got = run(capsys, *args, "--method", method, "--temperature", 1, "--compare")
    assert got.out == plain and len(plain) > len("the cat ")
    assert f"{method}: 40 tokens" in got.err or "stopped by end of text" in got.err
    assert method == "plain" or "text identical" in got.err


@pytest.mark.parametrize("tree", ["best", "sparse", "chain", "3,2,1"])
def test_trees(tree, trained, capsys):
    """Catches a tree option that changes the text, or does not load."""
    args = ["--out", trained, "--max-new-tokens", 30, "--prompt", "a dog", "--temperature", 0.8,
            "--top-k", 50, "--top-p", 0.9]
    assert run(capsys, *args, "--tree", tree, "--nodes", 9).out == run(capsys, *args, "--method", "plain").out


def lies(monkeypatch, method, at):
    """From now on the drafter of a method writes another token at this place."""
    real = sample.generate

    def generate(target, prompt, n, drafter, *more):
        before = 0
        steps = real(target, prompt, n, drafter, *more)
        while True:
            try:
                out = next(steps)
            except StopIteration as stop:
                return stop.value
            if isinstance(drafter, train.METHODS[method].Drafter) and before <= at < before + len(out):
                i = at - before
                out = out[:i] + [7 if out[i] != 7 else 8] + out[i + 1:]
            before += len(out)
            yield out
    monkeypatch.setattr(sample, "generate", generate)


def test_a_different_text_would_be_noticed(trained, capsys, monkeypatch):
    """Catches a comparison that says identical whatever it is given, and a fault that passes for rounding."""
    lies(monkeypatch, "medusa", 5)
    args = ["--out", trained, "--max-new-tokens", 20, "--prompt", "a", "--seed", 1, "--dtype", "float32"]
    err = run(capsys, *args, "--compare").err
    assert "DIFFERENT from token 5 on: [" in err and "the two best scores there are" in err
    opt = sample.Options(method="plain", out=trained, device="cpu", seed=1, dtype="float32")
    target, tokenizer, _, sampler = setup(opt, {})
    prompt = tokenizer.start + tokenizer.encode("a")
    text, _ = complete(target, prompt, 6, None, sampler)
    with torch.inference_mode():
        logits = target.logits(target.hidden(torch.tensor([prompt + text[:5]]))[0, -1:])
    best = sampler.scores(logits, [len(prompt) + 5])[0].topk(2)
    assert best.indices[0] == text[5]
    far = (best.values[0] - best.values[1]).item()
    assert float(re.search(r"are (\S+) apart, more than rounding", err)[1]) == pytest.approx(far, rel=0.06)


def test_one_different_text_among_all_is_named(trained, capsys, monkeypatch):
    """Catches a proof that looks at one method's text only, or at the wrong one's."""
    lies(monkeypatch, "amphista", 5)
    args = ["--method", "all", "--max-new-tokens", 12, "--prompt", "a", "--temperature", 1]
    rows = table(run(capsys, "--out", trained, *args).err)
    assert [m for m in train.METHODS if "text identical" != rows[m][4]] == ["amphista"]
    assert "DIFFERENT from token 5 on" in rows["amphista"][4]


def test_all_methods_side_by_side(trained, capsys):
    """
    Catches a method that is left out, a text that is shown twice or is not plain decoding's, and figures of
    another method.
    """
    args = ["--out", trained, "--max-new-tokens", 40, "--prompt", "the cat ", "--temperature", 1,
            "--nodes", 8]
    got = run(capsys, *args, "--method", "all")
    assert got.out == run(capsys, *args, "--method", "plain").out
    rows = table(got.err)
    rows.pop("inexact", None)                                          # where exactness costs something
    assert "\nplain: " in got.err and list(rows) == ["plain", *train.METHODS]
    assert rows["plain"][3:] == (1.0,) and rows["plain"][0] == 1
    for method in train.METHODS:
        alone = run(capsys, *args, "--method", method).err
        tau, forwards, speed, ratio, text = rows[method]
        assert f"in {forwards:.0f} target forwards, tau {tau:.2f}," in alone
        assert speed and ratio and text == "text identical"
        assert (f"\n{method} is slower than plain decoding here" in got.err) == (ratio < 1) or ratio == 1


def test_a_text_of_one_token_has_no_speed(trained, capsys):
    """Catches a division by the zero tokens that came after the prompt's forward."""
    args = ["--method", "all", "--max-new-tokens", 1, "--prompt", "a", "--show", "tree"]
    err = run(capsys, "--out", trained, *args).err
    assert all(r[1] == 1 and r[3] != r[3] for r in table(err).values())
    assert "medusa: no tree was drafted" in err


def test_methods_without_a_checkpoint_are_skipped(trained, tmp_path, capsys):
    """
    Catches a comparison that ends because one of four is missing, or hides that it is, or knows no command
    that helps.
    """
    args = ["--out", tmp_path, "--method", "all", "--max-new-tokens", 8, "--prompt", "a"]
    assert f"run python train.py --out {tmp_path}\n" in refused(capsys, *args)
    shutil.copytree(os.path.join(trained, "backbone"), tmp_path / "backbone")
    assert f"all of them: run python train.py --out {tmp_path}\n" in refused(capsys, *args)
    shutil.copytree(os.path.join(trained, "moa"), tmp_path / "moa")
    tensors, meta = load(os.path.join(trained, "medusa", "model.safetensors"), "", "")
    save(str(tmp_path / "medusa" / "model.safetensors"), tensors, {**meta, "backbone": "0" * 16})
    err = run(capsys, *args).err
    said = [line for line in err.splitlines() if line.startswith("skipped: ")]
    assert list(table(err)) == ["plain", "moa"] and len(said) == 3 and "another backbone" in said[0]
    for line, method in zip(said, ("medusa", "amphista", "hidden_transfer")):
        assert line.endswith(f"run python train.py --method {method} --out {tmp_path}")
    (tmp_path / "moa" / "model.safetensors").write_bytes(b"x")         # what is broken is no reason to go on
    assert "broken" in refused(capsys, *args)


def test_options_of_one_method_reach_it_among_all(trained):
    """Catches options that --method all drops, or hands to a method that has none."""
    opt = sample.Options(method="all", out=trained, device="cpu", nodes=9, floor=0.01,
                         own=dict(groups=3, depth=2, breadth=2))
    drafters = setup(opt, train.METHODS)[2]
    assert list(drafters) == list(train.METHODS) and drafters["hidden_transfer"].groups == 3
    assert (drafters["moa"].depth, drafters["moa"].breadth) == (2, 2)
    others = [d for name, d in drafters.items() if name != "hidden_transfer"]
    assert {(d.floor, d.cache_rows) for d in others} == {(0.01, 9)}


def test_typical_acceptance_among_all(trained, capsys):
    """
    Catches lossy texts that are called identical, a lossy text that is shown as the target's, and exact ones
    called lossy.
    """
    common = ["--out", trained, "--max-new-tokens", 30, "--prompt", "a dog"]
    args = [*common, "--method", "all", "--accept", "typical", "--show", "tree"]
    got = run(capsys, *args, "--temperature", 1)
    assert got.out == run(capsys, "--method", "plain", *common, "--temperature", 1).out
    rows = table(got.err)
    assert all(rows[method][4] == "text lossy: differs by design" for method in train.METHODS)
    assert got.err.count("(LOSSY: typical acceptance), forward") == len(train.METHODS)
    got = run(capsys, *args, "--temperature", 0)
    assert "LOSSY" not in got.err and got.err.count("text identical") == len(train.METHODS)


def test_typical_acceptance_is_named_lossy(trained, capsys):
    """
    Catches a lossy text that is passed off as the model's own, and a comparison with anything but exact
    plain decoding.
    """
    args = ["--out", trained, "--max-new-tokens", 40, "--prompt", "a dog", "--temperature", 1]
    exact, greedy = run(capsys, *args, "--compare"), run(capsys, *args[:-1], 0)
    assert "LOSSY" not in exact.err and "lossy" not in exact.err
    got = run(capsys, *args, "--accept", "typical", "--epsilon", 0.01, "--delta", 0.1, "--compare")
    assert re.search(r"^medusa: .*LOSSY: typical acceptance$", got.err, re.M)
    assert table(got.err)["medusa"][4] == "text lossy: differs by design"
    assert got.out not in (exact.out, greedy.out)
    other = run(capsys, *args, "--accept", "typical", "--epsilon", 0.01, "--delta", 0.1, "--seed", 5)
    assert other.out == got.out                                        # no noise
    none = run(capsys, *args, "--accept", "typical", "--epsilon", 1, "--delta", 99)
    assert none.out == greedy.out                                      # accepts nothing
    got = run(capsys, *args[:-1], 0, "--accept", "typical", "--compare")
    assert got.out == greedy.out and "text identical" in got.err and "at temperature 0 is exact" in got.err
    for method in train.METHODS:                                       # not Medusa's alone
        assert "LOSSY" in run(capsys, *args, "--accept", "typical", "--method", method).err


def test_comparing_typical_acceptance_runs_plain_decoding_exactly(trained, capsys, monkeypatch):
    """Catches a baseline that decodes greedily at T = 1, because it was handed the lossy sampler."""
    seen, real = [], sample.generate

    def generate(target, prompt, n, drafter, sampler, stops, rule):
        seen.append((drafter is None, rule and (rule.epsilon, rule.delta)))
        return real(target, prompt, n, drafter, sampler, stops, rule)
    monkeypatch.setattr(sample, "generate", generate)
    run(capsys, "--out", trained, "--max-new-tokens", 10, "--prompt", "a", "--temperature", 1,
        "--accept", "typical", "--compare")
    assert set(seen) == {(True, None), (False, (0.09, 0.3))}


def test_many_byte_characters_come_whole(trained, monkeypatch, capsys):
    """Catches a character that is cut where one token ends and the next begins."""
    def steps(*args):
        yield [0]
        yield [1, 2]
        yield [3]
        return Stats(accepted=[1, 2, 1])
    monkeypatch.setattr(sample, "generate", steps)

    class Bytes:
        stops = {9}

        def decode_bytes(self, ids):
            return b"".join({0: b"a\xe2", 1: b"\x82", 2: b"\xac", 3: b"\xf0\x9f"}[i] for i in ids)
    run = sample.stream(sample.Options(), None, Bytes(), [0], None)
    assert run.tokens == [0, 1, 2, 3] and len(run.seconds) == 3
    assert capsys.readouterr().out == "a€\N{REPLACEMENT CHARACTER}\n"


def test_show_colours_accepted_tokens_on_a_terminal_only(trained, capsys, monkeypatch):
    """Catches escape codes in a pipe, and colours that are missing on a terminal."""
    args = ["--out", trained, "--max-new-tokens", 30, "--temperature", 1, "--show", "tokens", "--prompt", "a"]
    piped = run(capsys, *args).out
    assert "\033[" not in piped
    a, b = pty.openpty()
    with open(b, "w") as terminal, monkeypatch.context() as m:         # its buffer holds more than we write
        m.setattr(sys, "stdout", terminal)
        run(capsys, *args)
        seen = os.read(a, 4096).decode().replace("\r\n", "\n")
    os.close(a)
    assert "\033[32m" in seen and seen.replace("\033[32m", "").replace("\033[0m", "") == piped


def test_the_end_of_the_context_is_named(trained, capsys):
    """Catches generation that stops silently, or runs past the last position."""
    err = run(capsys, "--out", trained, "--max-new-tokens", 1000, "--prompt", "", "--temperature", 0).err
    assert "the context of 64 tokens is full" in err or "end of text" in err


@pytest.mark.parametrize("argv, says", [
    (["--method", "nosuch"], "nosuch"),
    (["--temperature", "-1"], "temperature"),
    (["--temperature", "nan"], "temperature"),
    (["--top-p", "1.5"], "top-p"),
    (["--top-k", "-3"], "top-k"),
    (["--seed", "-1"], "seed"),
    (["--max-new-tokens", "0"], "max-new-tokens"),
    (["--nodes", "-2"], "nodes"),
    (["--tree", "oak"], "--tree"),
    (["--tree", "2,2,2,2,2,2"], "deep"),
    (["--dtype", "int3"], "dtype"),
    (["--device", "tpu"], "device"),
    (["--checkpoint", "/nonexistent"], "no medusa checkpoint"),
    (["--accept", "maybe"], "--accept"),
    (["--accept", "typical", "--method", "plain"], "plain has none"),
    (["--accept", "typical", "--epsilon", "1.5"], "epsilon"),
    (["--accept", "typical", "--delta", "-1"], "delta"),
    (["--method", "all", "--checkpoint", "x"], "name its --method"),
    (["--method", "all", "--tree", "9,9,9,9,9,9"], "--tree"),
    (["--method", "all", "--show", "tokens"], "name its --method"),
    (["--method", "plain", "--show", "tree"], "name its --method"),
    (["--show"], "--show"),
    (["--groups", "2"], "--groups cannot be used with --method medusa"),
    (["--server", "http://127.0.0.1:1", "--method", "moa", "--show", "page"], "--show page"),
    (["--server", "http://127.0.0.1:1", "--method", "moa", "--page", "x.html"], "--show page"),
])
def test_mistakes_get_one_line(argv, says, trained, capsys):
    """Catches tracebacks for what a user typed."""
    assert says in refused(capsys, "--out", trained, *argv)


SERVER = ["--method", "moa", "--server", "http://127.0.0.1:1"]


@pytest.mark.parametrize("more", [[], SERVER, ["--compile"]], ids=str)
def test_nothing_is_printed_of_a_prompt_that_does_not_fit(more, trained, capsys, monkeypatch):
    """Catches megabytes that are echoed, or a minute of compiling, before the one line that says why not."""
    def compiled(*args):
        raise AssertionError("it was warmed up")
    monkeypatch.setattr(sample, "warm_up", compiled)
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(sys, "stdin", io.StringIO("long " * 10_000))
    with pytest.raises(SystemExit) as e:
        sample.main(["--out", trained, "--prompt", "-", *more])
    got = capsys.readouterr()
    assert e.value.code == 2 and got.out == "" and got.err.count("\n") == 1 and "leaves no room" in got.err


def test_the_page_of_one_method_and_of_a_comparison(trained, tmp_path, capsys):
    """Catches a page of other runs than were shown, one that nobody asked for, and one in another place."""
    args = ["--out", trained, "--max-new-tokens", 20, "--prompt", "a dog", "--temperature", 1, "--nodes", 6]
    path = tmp_path / "page.html"
    compared = ["--compare"], ["plain", "medusa"]
    for more, names in (([], ["medusa"]), compared, (["--method", "plain"], ["plain"])):
        got = run(capsys, *args, *more, "--page", path)
        found = contents(path.read_text(encoding="utf-8"))
        assert [r["name"] for r in found["runs"]] == names and str(path) in got.err
        for r in found["runs"]:
            text = "".join(text for step in r["steps"] for text in step["text"])
            assert found["prompt"] + text + "\n" == got.out
            forwards = re.search(r"in (\d+) target forwards", got.err)[1]
            assert len(r["steps"]) == int(forwards) or r["name"] != (more or names)[-1]
            trees = sum("tree" in step for step in r["steps"])
            assert trees == (len(r["steps"]) - 1 if r["name"] == "medusa" else 0)
            assert all(step["ms"] > 0 for step in r["steps"])
        path.unlink()
    run(capsys, *args)
    assert not os.path.exists(os.path.join(trained, "page.html"))
    run(capsys, *args, "--show", "page", "--accept", "typical")
    found = contents(open(os.path.join(trained, "page.html"), encoding="utf-8").read())
    os.remove(os.path.join(trained, "page.html"))
    assert [r["lossy"] for r in found["runs"]] == [True]


def test_without_a_checkpoint_it_says_which_command_makes_one(tmp_path, trained, capsys):
    """Catches a missing file that ends in a traceback or in advice that does not help."""
    assert "run python train.py --method medusa" in refused(capsys, "--out", tmp_path)
    shutil.copytree(os.path.join(trained, "backbone"), tmp_path / "backbone")
    assert f"run python train.py --method medusa --out {tmp_path}" in refused(capsys, "--out", tmp_path)


def test_a_checkpoint_of_something_else_is_refused(tmp_path, trained, capsys):
    """Catches heads that are used with a backbone that they do not know, and loading that is not strict."""
    tensors, meta = load(os.path.join(trained, "medusa", "model.safetensors"), "", "")
    path = tmp_path / "x.safetensors"
    save(str(path), tensors, {**meta, "backbone": "0" * 16})
    assert "another backbone" in refused(capsys, "--out", trained, "--checkpoint", path)
    save(str(path), tensors, {**meta, "kind": "amphista"})
    assert "holds amphista" in refused(capsys, "--out", trained, "--checkpoint", path)
    save(str(path), {k: v for k, v in tensors.items() if k != "proj.bias"}, meta)
    assert "proj.bias is missing" in refused(capsys, "--out", trained, "--checkpoint", path)
    save(str(path), {**tensors, "extra": torch.zeros(1)}, meta)
    assert "extra is foreign" in refused(capsys, "--out", trained, "--checkpoint", path)
    save(str(path), tensors, {**meta, "config": {**meta["config"], "nosuch": 1}})
    assert "another version" in refused(capsys, "--out", trained, "--checkpoint", path)
    path.write_bytes(path.read_bytes()[:300])
    assert "broken" in refused(capsys, "--out", trained, "--checkpoint", path)


@pytest.mark.parametrize("more", [[], ["--compare"], ["--show", "tree"]], ids=str)
def test_the_warm_up_leaves_nothing_behind(more, trained, monkeypatch, capsys):
    """Catches a warm-up that is shown: in the text, its trees, or its figures."""
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    args = ["--out", trained, "--max-new-tokens", 40, "--prompt", "the cat ", "--method", "medusa"]
    if "tree" in more:                                                 # a text longer than the warm-up
        args = ["--out", os.path.join(ROOT, "weights"), "--max-new-tokens", 96, "--method", "amphista"]
    args += ["--nodes", 4, "--temperature", 0, *more]
    eager, compiled = run(capsys, *args, "--no-exact"), run(capsys, *args, "--compile")
    head, _, shown = compiled.err.split("\n", 2)                       # the second says how it decodes
    assert compiled.out == eager.out and head.startswith("compiling")
    speed = r" +\d+ +\d+\.\d\d\b|\d+ tokens/s|\n\w+ is slower than .*\n"

    def same(err):                                                     # but for the speed
        return re.sub(speed, "", err)
    assert same(shown) == same(eager.err.partition("\n")[2])


def test_what_exactness_costs(trained, capsys):
    """Catches a baseline that was made slower without a word, and a first line that promises too much."""
    args = ["--out", trained, "--max-new-tokens", 8, "--prompt", "a", "--compare"]
    exact = run(capsys, *args, "--dtype", "bfloat16").err
    assert "bfloat16 (as asked for)" in exact.splitlines()[0] and ", exact" in exact.splitlines()[0]
    assert any(line.startswith("inexact ") for line in exact.splitlines())
    fast = run(capsys, *args, "--no-exact").err
    assert "not exact: --no-exact" in fast.splitlines()[0] and "inexact " not in fast
