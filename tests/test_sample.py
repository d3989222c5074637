"""sample.py: figures, streaming, comparison, and what it says to a user's mistakes."""
import json
import os
import pty
import shutil
import subprocess
import sys

import pytest
import torch

import sample
import train
from model import load, save
from tree import Stats

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
    monkeypatch.setattr(sample, "complete", lambda t, p, n, d, s, e: seen.append((d is None, s.typical)) or real(t, p, n, d, s, e))
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
    sample.stream(sample.Options(), None, Bytes(), [0], None, None)
    assert capsys.readouterr().out == "a€\N{REPLACEMENT CHARACTER}\n"


def test_show_colours_accepted_tokens_on_a_terminal_only(trained, capsys, monkeypatch):
    """Catches escape codes in a pipe, and colours that are missing on a terminal."""
    args = ["--out", trained, "--max-new-tokens", 30, "--temperature", 1, "--show", "--prompt", "a"]
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
    target, _, _, _ = sample.setup(sample.Options(method="plain", out=trained, device="cpu"))
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
