"""Nothing lost, nobody let in: nonsense options, bad files, killed trainings, full disks, weights that are not numbers."""
import dataclasses
import io
import os
import random
import signal
import sys

import pytest

import hidden_transfer
import sample
import train
from model import command

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "bench"))
import by_layer  # noqa: E402
import network  # noqa: E402
import run as bench_run  # noqa: E402
import typical  # noqa: E402
from bench import remote  # noqa: E402


def attempt(capsys, main, argv, seconds=10):
    """
    Run a command in process. It ends well (None), or with status 2 and one line that begins with error:, which is returned;
    anything else, a hang among it, raises AssertionError.
    """
    def late(*_):
        raise TimeoutError("it hangs")
    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        command(main, [str(a) for a in argv])
        return None
    except SystemExit as e:
        err = capsys.readouterr().err
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert e.code == 2 and len(lines) == 1 and "Traceback" not in err and err.splitlines()[-1] == lines[0], (argv, e.code, err)
        return lines[0]
    except Exception as e:
        raise AssertionError(f"{main.__module__} {argv}: {type(e).__name__}: {str(e)[:300]}") from e
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        capsys.readouterr()


# ---------------------------------------------------------------------------------------------------------------------
# Options

NONSENSE = {
    int: ["x", "", "-1", "-7", "1.5", "nan", "inf", "1e3", str(10**30), "2147483647", "0", "1", "3"],
    float: ["x", "", "-1", "nan", "inf", "-inf", "1e300", "1e-300", "0", "1e999", "2"],
    str: ["", "x" * 5000, "..", "no such", "%s{}\n", ",", "-1", "1,,2", "nan", "é\udcff", "/dev/null"],
    bool: ["maybe", ""],
}
SMALL = ["--steps", 1, "--batch-size", 1]
SIZES = "--n-layer 1 --n-embd 16 --n-ffn 16 --n-head 2 --n-kv-head 1 --vocab-size 260 --block-size 32 --first-length 16".split()
SHORT = ["--prompts", 1, "--prompt-tokens", 4, "--new-tokens", 6]
CPU = ["--device", "cpu"]
PROGRAMS = {                                                           # main, its configs, an argument list that works
    **{f"train {m}": (train.main, [train.Options, *([train.METHODS[m].Config] if m in train.METHODS else [train.BackboneConfig])],
                      ["--method", m, *CPU, *SMALL, *(SIZES if m == "backbone" else [])]) for m in ("backbone", *train.METHODS)},
    "sample": (sample.main, [sample.Options], ["--max-new-tokens", 6, "--prompt", "a", *CPU]),
    "sample moa": (sample.main, [sample.Options, remote.Remote], ["--method", "moa", "--max-new-tokens", 6, "--prompt", "a", *CPU]),
    "run": (bench_run.main, [bench_run.Options], ["--methods", "medusa,prompt_lookup", "--temperatures", 0, *SHORT, *CPU]),
    "typical": (typical.main, [typical.Options], ["--epsilons", "0.1", *SHORT, *CPU]),
    "by_layer": (by_layer.main, [by_layer.Options], ["--batches", 1, *CPU]),
    "network": (network.main, [network.Options], ["--rtts", "", "--distances", "1,4", "--texts", 1, "--guessed", 5, *SHORT]),
    "serve": (remote.serve, [remote.Serve], ["--port", 0, *CPU]),
    "split": (remote.split, [remote.Split], []),
}


def cases():
    for name, (main, configs, base) in PROGRAMS.items():
        for f in (f for c in configs for f in dataclasses.fields(c)):
            for value in NONSENSE[f.type]:
                if "minutes" in f.name and value in ("1e300", "2"):    # would take that long
                    continue
                yield name, f.name, value


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Everything as it is, but little of it: one held-out batch and prompt, a server that stops as soon as it serves."""
    batches, prompts = train.Corpus.val_batches, train.Corpus.prompts
    monkeypatch.setattr(train.Corpus, "val_batches", lambda self, B, T, n: batches(self, 1, T, 1))
    monkeypatch.setattr(train.Corpus, "prompts", lambda self, n, length: prompts(self, min(n, 1), length))
    monkeypatch.setattr(train, "versions", lambda: {})
    monkeypatch.setattr(remote.Server, "serve_forever", lambda self: self.server_close())
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    os.mkdir("python")                                                 # the default of --data must not be what is read


def try_option(capsys, trained, text_file, case):
    name, field, value = case
    main, configs, base = PROGRAMS[name]
    argv = ["--out", "new" if name in ("train backbone",) else "copy", *base]
    if any(f.name == "data" for c in configs for f in dataclasses.fields(c)):
        argv += ["--data", text_file]
    return attempt(capsys, main, [*argv, f"--{field.replace('_', '-')}={value}"])
