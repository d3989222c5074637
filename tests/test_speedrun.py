"""
bench/speedrun.sh: the stages with a program that only notes how it was called; all of them for real, at tiny
size, in the long run.
"""
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import run as bench
import train
from plumbing.options import parse

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, "bench", "speedrun.sh")
FAKE = """#!/usr/bin/env bash
printf -v line '%q ' "$@"
echo "$line" >> "$CALLS"
if [ "$1" = - ]; then cat > /dev/null; fi
if [[ -n "$SLOW" && "$*" = *"$SLOW"* ]]; then exec sleep 60; fi
if [[ -n "$FAIL" && "$*" = *"$FAIL"* ]]; then echo "no luck"; exit "${STATUS:-1}"; fi
"""
STAGES = ["backbone", "medusa", "amphista", "hidden_transfer", "moa", "eagle2", "table"]
pytestmark = pytest.mark.skipif(not shutil.which("timeout"), reason="the script needs timeout")


@pytest.fixture
def speedrun(tmp_path):
    """speedrun(*argv, FAIL=..) -> the finished process, and the command lines that it gave to python."""
    fake, calls = tmp_path / "python", tmp_path / "calls"
    fake.write_text(FAKE)
    fake.chmod(0o755)

    def run(*argv, **env):
        calls.write_text("")
        env = {"PYTHON": str(fake), "CALLS": str(calls), "OUT": str(tmp_path / "out"), "FAIL": "", **env}
        done = subprocess.run(["bash", SCRIPT, *argv], capture_output=True, text=True, env=os.environ | env)
        return done, [shlex.split(line) for line in calls.read_text().splitlines()]
    return run


def stage_of(argv):
    """Which stage a command line of train.py or bench/run.py belongs to; None for others."""
    if argv[0] == "train.py":
        return argv[argv.index("--method") + 1]
    if argv[0] == "bench/run.py":
        return "table" if "--temperatures 0,1" in " ".join(argv) else "eagle2"
    return None


def ran(calls):
    return sorted(filter(None, map(stage_of, calls)))


@pytest.mark.parametrize("argv", [[], ["--dry"]], ids=["gpu", "dry"])
def test_every_command_is_understood(argv, speedrun, tmp_path, capsys):
    """
    An option that a program does not know, found after five minutes of training; limits above 12
    minutes.
    """
    done, calls = speedrun(*argv)
    assert done.returncode == 0, done.stderr
    assert ran(calls) == sorted(STAGES) and ["bench/report.py", f"{tmp_path}/out/table.json"] in calls
    for program, *options in calls:
        if program == "train.py":
            method = options[options.index("--method") + 1]
            Config = train.BackboneConfig if method == "backbone" else train.METHODS[method].Config
            opt, _ = parse(train.Options, Config, argv=options)
            assert opt.preset == "gpu" and opt.resume and opt.minutes > 0
        elif program == "bench/run.py":
            opt, names, temperatures = bench.options(options)
            assert opt.resume and names[0] == "plain" and (opt.train_minutes > 0) == (names[1:] == ["eagle2"])
        if program in ("train.py", "bench/run.py"):
            assert (opt.out, opt.device) == (f"{tmp_path}/out", "cpu" if argv else "cuda")
    assert names == ["plain", *train.METHODS, "eagle2", "hf"]
    assert temperatures == [0.0, 1.0] and opt.nodes == "64"
    limits = [int(n) for n in re.findall(r"at most (\d+) s", done.stdout)]
    assert len(limits) == 3 and (argv or sum(limits) <= 11 * 60)       # and a minute for everything else


@pytest.mark.parametrize("at", ["backbone", "moa", "eagle2", "table"])
def test_it_goes_on_where_it_was_stopped(at, speedrun):
    """
    A stage that is done again, or left out, after a failure; others that are lost with it; a silent
    end.
    """
    words = {"eagle2": "--train-minutes", "table": "--temperatures 0,1"}
    done, calls = speedrun(FAIL=words.get(at, f"--method {at}"))
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {at} failed")
    before = {"backbone": ["backbone"], "table": STAGES}.get(at, STAGES[:-1])
    assert ran(calls) == sorted(before)
    done, calls = speedrun()
    after = {"backbone": STAGES, "table": ["table"]}.get(at, [at, "table"])
    assert done.returncode == 0 and ran(calls) == sorted(after)
    done, calls = speedrun()
    assert done.returncode == 0 and ran(calls) == []                   # and the page is made anew
    assert any(call[0] == "bench/report.py" for call in calls)


@pytest.mark.parametrize("status, says", [("124", "not ready in its time"), ("130", "stopped in backbone")])
def test_it_says_why_it_ended(status, says, speedrun):
    """A limit that looks like a fault, or an interruption that does."""
    done, calls = speedrun(FAIL="backbone", STATUS=status)
    assert done.returncode == int(status) and says in done.stderr and "goes on from here" in done.stderr
    assert ran(calls) == ["backbone"]


def test_an_interruption_ends_what_runs_beside(tmp_path):
    """Trainings that go on in the background after Ctrl-C, and with them a GPU that is busy."""
    fake, out = tmp_path / "python", tmp_path / "out"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    env = dict(PYTHON=str(fake), CALLS=str(tmp_path / "calls"), OUT=str(out), FAIL="", SLOW="--method moa")
    running = subprocess.Popen(["bash", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=os.environ | env)
    for _ in range(600):
        if all((out / f"{method}.done").exists() for method in STAGES if method not in ("moa", "table")):
            break
        time.sleep(0.1)
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)                                    # whoever still runs has its stdout
    assert running.returncode == 130 and time.monotonic() - began < 30 and not (out / "moa.done").exists()


def check(monkeypatch, capsys, device, there=lambda name: True, disk=1e12):
    """The script's own look at the machine -> its exit status and what it says."""
    with open(SCRIPT) as f:
        source, = re.findall(r"<<'END'\n(.*?)\nEND\n", f.read(), re.S)
    monkeypatch.setattr(importlib.util, "find_spec", there)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2e12, 1e12, disk))
    monkeypatch.setattr(sys, "argv", ["-", device, "."])
    status = 0
    try:
        exec(source, {})
    except SystemExit as e:
        status = e.code
    return status, capsys.readouterr()


def test_what_is_missing_is_said_at_once(monkeypatch, capsys, speedrun):
    """
    One missing thing after the other, each after minutes; a traceback for it; a demand for a GPU in
    --dry.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check(monkeypatch, capsys, "cpu") == (0, ("", ""))
    some = lambda name: name not in ("tiktoken", "tqdm")
    status, (out, err) = check(monkeypatch, capsys, "cuda", some, disk=1e9)
    assert status == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: missing: ")
    for word in ("tiktoken", "tqdm", "pip install", "a GPU", "5 GB of disk", "1.0 are free"):
        assert word in err
    status, (out, err) = check(monkeypatch, capsys, "cpu", lambda name: name != "matplotlib")
    assert status == 0 and "matplotlib" in out and err == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "an old card")
    for good in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: good)
        status, (out, err) = check(monkeypatch, capsys, "cuda")
        assert (status, "an old card" in err) == ((0, False) if good else (2, True))
    done, calls = speedrun(FAIL="- ", STATUS="2")
    assert done.returncode == 2 and len(calls) == 1                    # and nothing else is begun
    done, calls = speedrun(PYTHON="/nonexistent/python")
    assert done.returncode == 2 and "missing" in done.stderr and calls == []


@pytest.mark.parametrize("argv, status", [(["-h"], 0), (["--help"], 0), (["--wet"], 2)])
def test_it_explains_itself(argv, status, speedrun):
    """Twelve minutes of GPU time for who asked for help, or typed something wrong."""
    done, calls = speedrun(*argv)
    assert done.returncode == status and "bash bench/speedrun.sh --dry" in done.stdout and calls == []


@pytest.mark.long
def test_all_stages_at_tiny_size(tmp_path):
    """Whatever a GPU would stumble over that a CPU can show: all stages, as they are, and the page."""
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    done = subprocess.run(["bash", SCRIPT, "--dry"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "out" / "README.md").read_text()
    for method in ("plain", *train.METHODS, "eagle2", "hf"):
        assert len(re.findall(rf"^\| {method} \|", page, re.M)) >= 2, method
    assert "## T = 0\n" in page and "## T = 1\n" in page and "| backbone |" in page and "NO" not in page
    again = subprocess.run(["bash", SCRIPT, "--dry"], capture_output=True, text=True, env=env)
    assert again.returncode == 0 and again.stdout.count("done before") == 2
