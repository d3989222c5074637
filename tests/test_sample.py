"""sample.py: figures, streaming, comparison, and what it says to a user's mistakes."""
import ast
import json
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest
import torch

import plumbing.drafters
import sample
import train
from plumbing import picture
from conftest import tiny
from plumbing.checkpoint import load, save
from plumbing.fast import Packed, for_decoding
from tree import Sampler, Stats, Tree, complete

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


def test_figures_of_a_hand_made_trace():
    """Catches tau that counts the prompt's forward or leaves out the bonus token."""
    s = Stats(accepted=[1, 3, 1, 2], seconds=dict(prompt=9.0, draft=1.0, verify=1.5, rest=0.5))
    assert s.steps == 3 and s.tau == 2.0 and s.tokens_per_second == 2.0
    assert sample.histogram(s.accepted) == "1 x2  2 x1  3 x1"


@pytest.mark.parametrize("method", ["plain", *train.METHODS])
def test_text_is_the_same_by_every_method(method, trained, capsys):
    """Catches a drafter that is loaded or driven wrongly by the command line; the text must not depend on it."""
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
    args = ["--out", trained, "--max-new-tokens", 30, "--prompt", "a dog", "--temperature", 0.8, "--top-k", 50, "--top-p", 0.9]
    assert run(capsys, *args, "--tree", tree, "--nodes", 9).out == run(capsys, *args, "--method", "plain").out


def test_a_different_text_would_be_noticed(trained, capsys, monkeypatch):
    """Catches a comparison that says identical whatever it is given."""
    real = sample.complete
    monkeypatch.setattr(sample, "complete", lambda t, p, n, d, *a: ([0, 0, 0], real(t, p, n, d, *a)[1]))
    err = run(capsys, "--out", trained, "--max-new-tokens", 20, "--prompt", "a", "--compare").err
    assert "DIFFERENT from token" in err


def table(err):
    """The table of --compare -> {method: (tau, target forwards, tokens/s, speed-up, the rest)}."""
    rows = [line.split(maxsplit=5) for line in err[err.index("\nmethod ") + 1:].split("\n\n")[0].splitlines()[1:]]
    return {r[0]: (*map(float, r[1:5]), *r[5:]) for r in rows}


def test_all_methods_side_by_side(trained, capsys):
    """Catches a method that is left out, a text that is shown twice or is not plain decoding's, and figures of another method."""
    args = ["--out", trained, "--max-new-tokens", 40, "--prompt", "the cat ", "--temperature", 1, "--nodes", 8]
    got = run(capsys, *args, "--method", "all")
    assert got.out == run(capsys, *args, "--method", "plain").out and got.err.lstrip().startswith("plain: ")
    rows = table(got.err)
    assert list(rows) == ["plain", *train.METHODS] and rows["plain"][3:] == (1.0,) and rows["plain"][0] == 1
    for method in train.METHODS:
        alone = run(capsys, *args, "--method", method).err
        tau, forwards, speed, ratio, text = rows[method]
        assert f"in {forwards:.0f} target forwards, tau {tau:.2f}," in alone and text == "text identical" and speed and ratio


def test_one_different_text_among_all_is_named(trained, capsys, monkeypatch):
    """Catches a proof that looks at one method's text only, or at the wrong one's."""
    real = sample.complete
    def wrong(t, p, n, d, *more):
        tokens, stats = real(t, p, n, d, *more)
        return (tokens[:5] + [7 if tokens[5] != 7 else 8] + tokens[6:] if isinstance(d, train.METHODS["amphista"].Drafter) else tokens), stats
    monkeypatch.setattr(sample, "complete", wrong)
    rows = table(run(capsys, "--out", trained, "--method", "all", "--max-new-tokens", 12, "--prompt", "a", "--temperature", 1).err)
    assert [m for m in train.METHODS if "text identical" != rows[m][4]] == ["amphista"] and "DIFFERENT from token 5 on" in rows["amphista"][4]


def test_medians_of_rounds_in_turn(capsys, monkeypatch):
    """Catches a ratio of medians (a drifting machine spoils it), methods that do not take turns, and a warm-up that counts."""
    times, asked = {None: [9, 10, 20, 40], "d": [30, 20, 40]}, []      # tokens/s, the warm-up first
    def complete(target, prompt, n, d, sampler, stops, verify):
        asked.append(d)
        return [1, 2], Stats(accepted=[1, 1], seconds=dict(prompt=0, draft=0, verify=1 / times[d][asked.count(d) - 1], rest=0))
    monkeypatch.setattr(sample, "complete", complete)
    _, tokenizer = None, type("", (), dict(stops=set()))
    runs = sample.compare(None, [0], {"medusa": "d"}, {"medusa": ([1, 2], Stats([1, 1]))}, sample.Options(), tokenizer)
    rows = table(capsys.readouterr().err)
    assert asked == [None] + [None, "d"] * 3 and list(runs) == ["plain", "medusa"]
    assert rows == {"plain": (1, 2, 20, 1), "medusa": (1, 2, 30, 1, "text identical")}


def test_a_text_of_one_token_has_no_speed(trained, capsys):
    """Catches a division by the zero tokens that came after the prompt's forward."""
    err = run(capsys, "--out", trained, "--method", "all", "--max-new-tokens", 1, "--prompt", "a", "--show", "tree").err
    assert all(r[1] == 1 and r[3] != r[3] for r in table(err).values()) and "medusa: no tree was drafted" in err


def test_methods_without_a_checkpoint_are_skipped(trained, tmp_path, capsys):
    """Catches a comparison that ends because one of four is missing, or hides that it is, or knows no command that helps."""
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
    (tmp_path / "moa" / "model.safetensors").write_bytes(b"x")         # what is there and broken is no reason to go on
    assert "broken" in refused(capsys, *args)


def test_options_of_one_method_reach_it_among_all(trained):
    """Catches options that --method all drops, or hands to a method that has none."""
    opt = sample.Options(method="all", out=trained, device="cpu", nodes=9, floor=0.01, own=dict(groups=3, depth=2, breadth=2))
    drafters = plumbing.drafters.setup(opt, train.METHODS)[2]
    assert list(drafters) == list(train.METHODS) and drafters["hidden_transfer"].groups == 3
    assert (drafters["moa"].depth, drafters["moa"].breadth) == (2, 2)
    assert {(d.floor, d.rows) for n, d in drafters.items() if n != "hidden_transfer"} == {(0.01, 9)}


def test_typical_acceptance_among_all(trained, capsys):
    """Catches lossy texts that are called identical, a lossy text that is shown as the target's, and exact ones called lossy."""
    args = ["--out", trained, "--method", "all", "--max-new-tokens", 30, "--prompt", "a dog", "--accept", "typical", "--show", "tree"]
    got = run(capsys, *args, "--temperature", 1)
    assert got.out == run(capsys, "--method", "plain", *args[:2], *args[4:8], "--temperature", 1).out
    assert all(r[4] == "text lossy: differs by design" for n, r in table(got.err).items() if n != "plain")
    assert got.err.count("(LOSSY: typical acceptance), forward") == len(train.METHODS)
    got = run(capsys, *args)
    assert "LOSSY" not in got.err and got.err.count("text identical") == len(train.METHODS)


class Words:
    """A tokenizer of whole words for pictures."""
    stops, words = {9}, [b"zero", b"one", b"two ", b"\n", b"\xe2\x82\xac", b"\xe2", b"six", b"", b"eight", b""]
    def decode_bytes(self, ids):
        return b"".join(self.words[i] for i in ids)
    def decode(self, ids):
        return self.decode_bytes(ids).decode(errors="replace")


class Stream:
    def __init__(self, encoding, tty=False):
        self.encoding, self.isatty = encoding, lambda: tty


PICTURE = """\
name, forward 3 of 4, the longest accepted path: 6 nodes, 2 accepted (✓), one token of the target's own (+)
after 'eightzeroone'
'two '           draft P(token)  P(path)
├─ ✓ '\\n'                 0.500    0.500
│  ├─   b'\\xe2'           0.500    0.250
│  ├─ ✓ '€'               0.250    0.125
│  │  └─ + <7>
│  └─   <end>             0.100    0.050
└─   'six'                0.250    0.250"""


def test_a_hand_made_picture():
    """Catches branches that hang on the wrong node, another step than the rule's, and what a terminal or a pipe cannot show."""
    wide = Tree([2, 3, 6, 5, 4, 9], [-1, 0, 0, 1, 1, 1], [1.0, 0.5, 0.25, 0.25, 0.125, 0.05])
    deep = Tree([7, 0, 1, 0], [-1, 0, 1, 2], [1.0, 0.9, 0.8, 0.4])
    tokens, stats = [0, 1, 2, 3, 4, 7, 0, 1, 0], Stats(accepted=[2, 1, 3, 3])
    trees = [Tree([1], [-1], [1.0]), wide, deep]
    show = lambda stream, trees=trees, room=99: picture.draw("name", Words(), [8], tokens, stats, trees, room, stream)
    assert show(Stream("utf-8")) == PICTURE
    plain = show(Stream("latin-1"))
    assert plain.isascii() and plain.count("* ") == 2 and plain.count("\n") == PICTURE.count("\n")
    assert "|- * '\\n'" in plain and "|  |- * '\\u20ac'" in plain and "|  |  `- + <7>" in plain and "`-   'six'" in plain
    colours = show(Stream("utf-8", tty=True))
    assert re.sub("\033.*?m", "", colours) == PICTURE and colours.count("\033[32m") == 2 and colours.count("\033[2m") == 3
    deep.value[2] = 0.1                                                # now its path is the one less likely
    at_once = show(Stream("utf-8"), room=9)                            # all was written: the last node could not be emitted
    assert "forward 4 of 4" in at_once and ": 3 nodes, 2 accepted" in at_once and "after 'ghtzeroonetwo \\n€'" not in at_once
    assert at_once.splitlines()[-1].strip() == "└─ + 'zero'"
    cut = Tree([2, 3, 4, 7], [-1, 0, 1, 2], [1.0, 0.5, 0.05, 0.04])    # the target's own token was drafted: it is drawn once
    assert re.search(r"└─ \+ <7> +0.800    0.040$", show(Stream("utf-8"), [trees[0], cut, deep]))


@pytest.mark.parametrize("tree", ["best", "chain", "2,2"])
@pytest.mark.parametrize("method", train.METHODS)
def test_the_picture_is_a_step_of_the_text(method, tree, trained, capsys):
    """Catches a tree beside the wrong step, marks that are not what the text says, and a picture that changes the text."""
    target, tokenizer, drafter, _ = plumbing.drafters.setup(sample.Options(method=method, out=trained, device="cpu", tree=tree, nodes="8"), train.METHODS)
    prompt = tokenizer.start + tokenizer.encode("the cat ")
    for T in (0, 1):
        args = ["--out", trained, "--max-new-tokens", 40, "--prompt", "the cat ", "--temperature", T, "--method", method, "--tree", tree, "--nodes", 8]
        got = run(capsys, *args, "--show", "tree")
        assert got.out == run(capsys, *args).out
        text, stats = complete(target, prompt, 40, drafter, Sampler(T), tokenizer.stops)
        head, after, root, *nodes = got.err[got.err.index(f"\n{method}, forward ") + 1:].splitlines()
        step, n, accepted = map(int, re.search(r"forward (\d+) of .*: (\d+) nodes, (\d+) accepted", head).groups())
        assert accepted + 1 == stats.accepted[step - 1] == max(stats.accepted[1:])
        piece = r"""('(?:[^'\\]|\\.)*'|"[^"]*"|b'[^']*'|<end>|<\d+>)"""
        lines = [re.fullmatch(r"([│ ]*)[├└]─ ([✓+ ]) " + piece + r"(?: +([\d.]+) +([\d.]+))?", line).groups() for line in nodes]
        marked = [line for line in lines if line[1] != " "]
        assert len(lines) in (n - 1, n) and [len(line[0]) // 3 for line in marked] == list(range(accepted + 1))
        assert all(0 <= float(path) <= float(token) <= 1 for *_, token, path in lines if path)
        at = sum(stats.accepted[:step - 1])
        assert ast.literal_eval(after[6:]) == tokenizer.decode(prompt + text[:at - 1])[-40:]
        said = [ast.literal_eval(x) if x[0] != "<" else b"" for x in [re.match(piece, root)[0]] + [line[2] for line in marked]]
        said = b"".join(x if isinstance(x, bytes) else x.encode() for x in said)
        assert said == tokenizer.decode_bytes(text[at - 1:at + accepted + 1])


def test_typical_acceptance_is_named_lossy(trained, capsys):
    """Catches a lossy text that is passed off as the model's own, and a comparison with anything but exact plain decoding."""
    args = ["--out", trained, "--max-new-tokens", 40, "--prompt", "a dog", "--temperature", 1]
    exact, greedy = run(capsys, *args, "--compare"), run(capsys, *args[:-1], 0)
    assert "LOSSY" not in exact.err and "lossy" not in exact.err
    got = run(capsys, *args, "--accept", "typical", "--epsilon", 0.01, "--delta", 0.1, "--compare")
    summary, _, compared = [line for line in got.err.splitlines() if "medusa" in line or "per forward" in line]
    assert summary.startswith("medusa: ") and summary.endswith("LOSSY: typical acceptance")
    assert compared.endswith("text lossy: differs by design") and got.out not in (exact.out, greedy.out)
    assert run(capsys, *args, "--accept", "typical", "--epsilon", 0.01, "--delta", 0.1, "--seed", 5).out == got.out    # no noise
    assert run(capsys, *args, "--accept", "typical", "--epsilon", 1, "--delta", 99).out == greedy.out      # accepts nothing
    got = run(capsys, *args[:-1], 0, "--accept", "typical", "--compare")
    assert got.out == greedy.out and "text identical" in got.err and "at temperature 0 is exact" in got.err
    for method in train.METHODS:                                       # not Medusa's alone
        assert "LOSSY" in run(capsys, *args, "--accept", "typical", "--method", method).err


def test_comparing_typical_acceptance_runs_plain_decoding_exactly(trained, capsys, monkeypatch):
    """Catches a baseline that decodes greedily at T = 1, because it was handed the lossy sampler."""
    seen, real = [], sample.complete
    monkeypatch.setattr(sample, "complete", lambda t, p, n, d, s, e, v: seen.append(
        (d is None, v and (v.epsilon, v.delta))) or real(t, p, n, d, s, e, v))
    run(capsys, "--out", trained, "--max-new-tokens", 10, "--prompt", "a", "--temperature", 1, "--accept", "typical", "--compare")
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
    sample.stream(sample.Options(), None, Bytes(), [0], None)
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
    err = run(capsys, "--out", trained, "--max-new-tokens", 1000, "--prompt", "").err
    assert "the context of 64 tokens is full" in err or "end of text" in err


@pytest.mark.parametrize("argv, says", [
    (["--method", "nosuch"], "nosuch"), (["--temperature", "-1"], "temperature"), (["--temperature", "nan"], "temperature"),
    (["--top-p", "1.5"], "top-p"), (["--top-k", "-3"], "top-k"), (["--seed", "-1"], "seed"), (["--max-new-tokens", "0"], "max-new-tokens"),
    (["--nodes", "-2"], "nodes"), (["--tree", "oak"], "--tree"), (["--tree", "2,2,2,2,2,2"], "deep"), (["--dtype", "int3"], "dtype"),
    (["--device", "tpu"], "device"), (["--prompt", "long " * 400], "leaves no room"), (["--checkpoint", "/nonexistent"], "no medusa checkpoint"),
    (["--accept", "maybe"], "--accept"), (["--accept", "typical", "--method", "plain"], "plain has none"),
    (["--method", "all", "--checkpoint", "x"], "name its --method"), (["--method", "all", "--tree", "9,9,9,9,9,9"], "--tree"),
    (["--method", "all", "--show", "tokens"], "name its --method"), (["--method", "plain", "--show", "tree"], "name its --method"),
    (["--show"], "--show"), (["--groups", "2"], "--groups cannot be used with --method medusa"),
    (["--accept", "typical", "--epsilon", "1.5"], "epsilon"), (["--accept", "typical", "--delta", "-1"], "delta"),
])
def test_mistakes_get_one_line(argv, says, trained, capsys):
    """Catches tracebacks for what a user typed."""
    assert says in refused(capsys, "--out", trained, *argv)


def test_without_a_checkpoint_it_says_which_command_makes_one(tmp_path, trained, capsys):
    """Catches a missing file that ends in a traceback or in advice that does not help."""
    assert "run python train.py --method medusa" in refused(capsys, "--out", tmp_path)
    shutil.copytree(os.path.join(trained, "backbone"), tmp_path / "backbone")
    assert f"run python train.py --method medusa --out {tmp_path}" in refused(capsys, "--out", tmp_path)


def test_a_checkpoint_of_something_else_is_refused(tmp_path, trained, capsys):
    """Catches heads that are used with a backbone they were not trained on, and loading that is not strict."""
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


def test_bench_of_typical_acceptance(trained, text_file, capsys, monkeypatch):
    """Catches a log p of other tokens than the text's, a table whose exact rows are lossy, or that cannot be made."""
    monkeypatch.syspath_prepend(os.path.join(ROOT, "bench"))
    import typical
    argv = ["--out", trained, "--data", text_file, "--prompts", "2", "--prompt-tokens", "8", "--new-tokens", "20",
            "--epsilons", "0.01,1", "--temperature", "1", "--device", "cpu"]
    typical.main(argv)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [r["name"] for r in rows] == ["exact, T = 0", "exact, T = 1", "LOSSY, epsilon 0.01", "LOSSY, epsilon 1"]
    assert rows[0]["greedy"] == 1 > rows[1]["greedy"] and all(r["tau"] >= 1 and r["logp"] < 0 for r in rows)
    assert rows[2]["tau"] > rows[3]["tau"]                             # a higher limit accepts less
    for wrong, says in ((["--epsilons", "2"], "between 0 and 1"), (["--epsilons", "x"], "numbers"), (["--prompt-tokens", "64"], "no room")):
        with pytest.raises(SystemExit) as e:
            typical.main([*argv, *wrong])
        err = capsys.readouterr().err
        assert e.value.code == 2 and says in err and err.count("\n") == 1
    target, _, _, _ = plumbing.drafters.setup(sample.Options(method="plain", out=trained, device="cpu"), train.METHODS)
    logp, greedy = typical.score(target, [5, 6], [7, 8, 9])
    for i, token in enumerate([7, 8, 9]):
        row = target(torch.tensor([[5, 6, 7, 8, 9][:2 + i]]))[0][0, -1].log_softmax(-1)
        assert logp[i] == pytest.approx(row[token].item(), abs=1e-4) and greedy[i] == (row.argmax() == token).item()


def test_bench_measures_and_ends_with_json(trained, text_file):
    """Catches a runner that cannot run, or a last line that is not JSON; texts must be the same as plain decoding's."""
    command = [sys.executable, "bench/run.py", "--out", trained, "--data", text_file, "--prompts", "2", "--prompt-tokens", "8",
               "--new-tokens", "20", "--methods", "medusa,prompt_lookup", "--temperatures", "0,1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(r["method"], r["temperature"]) for r in rows] == [(m, t) for t in (0, 1) for m in ("plain", "medusa", "prompt_lookup")]
    assert all(r["same"] and r["tau"] >= 1 for r in rows)


@pytest.mark.parametrize("more", [[], ["--compare"], ["--show", "tree"]], ids=str)
def test_the_warm_up_leaves_nothing_behind(more, trained, monkeypatch, capsys):
    """Catches a warm-up that is shown: in the text, its trees, or its figures."""
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    args = ["--out", trained, "--max-new-tokens", 40, "--prompt", "the cat ", "--method", "medusa", "--nodes", 4, *more]
    if "tree" in more:                                                 # a text longer than the warm-up
        args = ["--out", os.path.join(ROOT, "weights"), "--max-new-tokens", 96, "--method", "amphista", "--nodes", 4, *more]
    eager, compiled = run(capsys, *args), run(capsys, *args, "--compile")
    head, _, shown = compiled.err.partition("\n")
    assert compiled.out == eager.out and head.startswith("compiling")
    same = lambda err: re.sub(r" +\d+ +\d+\.\d\d\b|\d+ tokens/s", "", err)                          # but for the speed
    assert same(shown) == same(eager.err)


@pytest.fixture
def graphs():
    """How many graphs torch.compile has made in this test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize("method", ["plain", "amphista", *(pytest.param(m, marks=pytest.mark.long) for m in train.METHODS if m != "amphista")])
def test_compiled_text_is_the_same(method, trained, graphs, monkeypatch, capsys):
    """Catches forwards that torch.compile gets wrong or does not get, and graphs that belong to one length of text."""
    real = torch.compile                                               # what is traced runs as it is: that saves minutes
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager", **options))
    args = ["--out", trained, "--max-new-tokens", 30, "--temperature", 1, "--method", method, "--nodes", 4]
    texts = [run(capsys, *args, "--prompt", prompt).out for prompt in ("the cat ", "a big dog sees the house and ")]
    assert graphs() == 0
    target, tokenizer, drafter, sampler = plumbing.drafters.setup(sample.Options(out=trained, method=method, nodes="4", temperature=1.0, compile=True), train.METHODS)
    made = []
    for text, prompt in zip(texts * 2, ("the cat ", "a big dog sees the house and ") * 2):
        tokens, _ = complete(target, tokenizer.start + tokenizer.encode(prompt), 30, drafter, sampler, tokenizer.stops)
        assert prompt + tokenizer.decode(tokens) + "\n" == text
        made.append(graphs())
    assert made[0] > 0 and made[1] == made[3], f"{made} graphs after each text"


@pytest.mark.long
def test_compiled_by_inductor(graphs):
    """Catches matrices that only the eager mode can multiply: packed ones are opaque to the compiler."""
    target, plain = (for_decoding(tiny(n_layer=1, n_embd=384, n_ffn=384, n_head=2, n_kv_head=2, dtype=torch.float32), compile)
                     for compile in (True, False))
    assert isinstance(target.blocks[0].attn.qkv, Packed) or not torch.backends.mkl.is_available()
    for n in (1, 3, 5):
        idx, caches = torch.arange(n)[None], (target.new_cache(20), plain.new_cache(20))
        for cache, model in zip(caches, (target, plain)):
            model.hidden(torch.arange(8)[None], cache=cache)
            cache.keep(range(8))
        a, b = (m(idx, cache=cache)[0] for cache, m in zip(caches, (target, plain)))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(caches[0].read(slice(8 + n)), caches[1].read(slice(8 + n)), rtol=1e-4, atol=1e-4)
    assert 1 <= graphs() <= 3


def test_compile_where_nothing_can_be_compiled(trained, monkeypatch, capsys):
    """Catches a traceback of a hundred lines where there is no C++ compiler."""
    def broken(f, **options):
        raise RuntimeError("No working C++ compiler found\nin: g++")
    monkeypatch.setattr(torch, "compile", broken)
    assert "--compile does not work here (RuntimeError: No working C++ compiler found): leave it out" in \
        refused(capsys, "--out", trained, "--method", "plain", "--compile")
