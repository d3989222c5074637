"""A training run: schedule, resuming, stopping, its log lines, several processes."""
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import plumbing.options
import plumbing.trainer
import train
from conftest import ROOT
from plumbing.budget import accuracy
from plumbing.checkpoint import load_model
from plumbing.options import command
from plumbing.text import Corpus, Tokenizer
from plumbing.trainer import Run
from test_train import SMALL, TINY, backbone, drafter, refused, weights


def stopping_at(monkeypatch, *steps):
    """The runs that come are told to stop in these steps, one each. -> the steps done, all together."""
    sync, done, steps = Run.sync, [], list(steps)

    def told(self, *args):
        done.append(self.step + 1)
        if steps and self.step + 1 == steps[0]:
            steps.pop(0)
            os.kill(os.getpid(), signal.SIGINT)
        return sync(self, *args)
    monkeypatch.setattr(Run, "sync", told)
    return done


def contents(folder):
    """Everything in a folder, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# --------------------------------------------------------------------------------------------------
# Schedule

def a_run(out, steps=40, minutes=0.0, batch_size=4, T=32, first_length=8):
    """A run of a Linear, on text that does not matter."""
    corpus = Corpus([("x", "the cat sees " * 400)]).tokenize(Tokenizer([bytes([i]) for i in range(256)]))
    opt = train.Options(out=str(out), minutes=minutes)
    cfg = train.BackboneConfig(steps=steps, batch_size=batch_size, block_size=T, first_length=first_length)
    return Run(opt, "medusa", cfg, corpus, "cpu", T, {"finished": False})


def go(run, seconds=None, clock=None):
    """Its training -> (share of each of two peaks, shape of the batch) at every step."""
    net, seen, peaks = nn.Linear(2, 2), [], (0.5, 20.0)
    optimisers = [torch.optim.SGD([net.weight], lr=peaks[0]), torch.optim.SGD([net.bias], lr=peaks[1])]
    for x in run.steps(net, optimisers, lambda x: (torch.tensor(1.0), ())):
        shares = {round(o.param_groups[0]["lr"] / peak, 9) for o, peak in zip(optimisers, peaks)}
        seen.append((*shares, tuple(x.shape)))
        net.zero_grad()
        net(torch.ones(2)).sum().backward()
        run.sync(net, torch.tensor(1.0))
        if clock:
            clock[0] += seconds
    assert all(len(row) == 2 for row in seen), "the two peaks are not scaled alike"
    return seen


def cosine(p):
    return 0.05 + 0.95 * (1 + math.cos(math.pi * p)) / 2


@pytest.mark.parametrize("steps", [1, 7, 40, 400, 1500])
def test_the_schedule_by_steps(steps, tmp_path, monkeypatch):
    """A rate that is constant, has no warm-up, ends elsewhere, or is not what the optimisers get."""
    monkeypatch.setattr(Run, "report", lambda self: None)
    monkeypatch.setattr(Run, "save", lambda self: None)
    seen = go(a_run(tmp_path, steps))
    shares = [share for share, _ in seen]
    assert len(seen) == steps
    for step, share in enumerate(shares):
        warm = max((step + 1) / 20, step / steps / 0.02)               # 20 steps, or 2 % where that is sooner
        assert share == pytest.approx(min(1, warm, cosine(step / steps)), abs=1e-8), step
    if steps > 400:
        top = shares.index(max(shares))
        assert shares[0] == 0.05 and 15 < top < 20 and shares[top] > 0.999
        assert all(a > b for a, b in zip(shares[20:], shares[21:]))
        assert shares[steps // 2] == pytest.approx(0.525) and shares[-1] < 0.0501
    # short sequences, as many more of them, until two thirds
    lengths = [shape for _, shape in seen]
    assert lengths == [(16, 8) if step / steps < 2 / 3 else (4, 32) for step in range(steps)]


@pytest.mark.parametrize("minutes, seconds", [(1.0, 0.5), (2.0, 7.0), (0.5, 100.0)])
def test_the_schedule_by_minutes(minutes, seconds, tmp_path, monkeypatch):
    """A schedule that goes by --steps though --minutes were given, or forgets the time before a resume."""
    monkeypatch.setattr(Run, "report", lambda self: None)
    monkeypatch.setattr(Run, "save", lambda self: None)
    clock = [1000.0]
    monkeypatch.setattr(plumbing.trainer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for before in (0.0, 20.0):
        run = a_run(tmp_path, 10**6, minutes)
        run.elapsed = before
        seen = go(run, seconds, clock)
        assert len(seen) == max(1, math.ceil((60 * minutes - before) / seconds))
        for step, (share, shape) in enumerate(seen):
            p = min(1, (before + step * seconds) / (60 * minutes))
            assert share == pytest.approx(min(1, max(p / 0.02, (step + 1) / 20), cosine(p)), abs=1e-8)
            assert shape == ((16, 8) if p < 2 / 3 else (4, 32))


def test_it_reports_and_saves_ten_times(tmp_path, monkeypatch):
    """Evaluations that come with every step of a long training, or not at all in a short one."""
    tenths = {100: list(range(10, 101, 10)), 25: [3, 5, 8, 10, 13, 15, 18, 20, 23, 25], 3: [1, 2, 3]}
    for steps, at in tenths.items():
        done = []
        monkeypatch.setattr(Run, "report", lambda self: done.append(("report", self.step)))
        monkeypatch.setattr(Run, "save", lambda self: done.append(("save", self.step)))
        go(a_run(tmp_path, steps))
        assert done == [(what, step) for step in at for what in ("report", "save")]


# --------------------------------------------------------------------------------------------------
# Resuming

def test_resume_continues_to_the_same_weights(tmp_path, text_file, monkeypatch):
    """Optimiser state, step or batches lost on resume. Ctrl-C leaves a checkpoint that loads."""
    backbone(tmp_path / "whole", text_file, "--steps", "12")
    done = stopping_at(monkeypatch, 7)
    with pytest.raises(SystemExit) as e:
        backbone(tmp_path / "parts", text_file, "--steps", "12")
    assert e.value.code == 130 and done == [1, 2, 3, 4, 5, 6, 7]
    _, _, meta = load_model(str(tmp_path / "parts/backbone/model.safetensors"))
    assert meta["finished"] is False and meta["metrics"]["step"] == 7
    backbone(tmp_path / "parts", text_file, "--steps", "12", "--resume")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not list(tmp_path.glob("parts/backbone/resume*")) and not list(tmp_path.glob("*/*/*.tmp*"))


def test_a_drafter_resumes_too(tmp_path, text_file, monkeypatch):
    """A drafter whose optimiser state or schedule starts afresh after an interruption."""
    backbone(tmp_path, text_file, "--steps", "3")
    drafter(tmp_path, text_file, "--steps", "8")
    whole = weights(tmp_path, "medusa")
    stopping_at(monkeypatch, 4)
    with pytest.raises(SystemExit):
        drafter(tmp_path, text_file, "--steps", "8")
    assert not torch.equal(weights(tmp_path, "medusa")["proj.weight"], whole["proj.weight"])
    drafter(tmp_path, text_file, "--steps", "8", "--resume")
    assert all(torch.equal(v, whole[k]) for k, v in weights(tmp_path, "medusa").items())


def test_only_the_same_run_is_resumed(tmp_path, text_file, monkeypatch, capsys):
    """
    A run that goes on with other options or other text, and is neither of the two then. It is told by what is
    in a text, not by where that is. A refusal names what differs, and loses nothing.
    """
    mine = tmp_path / "mine.txt"
    shutil.copy(text_file, mine)
    stopping_at(monkeypatch, 5, 5, 2)
    for kind, train_it, more in (("backbone", backbone, []), ("medusa", drafter, ["--draft-vocab", "99"])):
        common = [*more, "--steps", "12"]
        with pytest.raises(SystemExit):
            train_it(tmp_path, mine, *common)
        before = contents(tmp_path / kind)
        capsys.readouterr()
        argv = ["--method", kind, "--out", tmp_path, "--resume"]
        argv += [*(TINY if kind == "backbone" else SMALL), *common]
        for option, says in {"steps 13": "another steps (12, now 13)", "seed 7": "seed (0, now 7)",
                             "batch-size 3": "batch_size (2, now 3)",
                             "minutes 1": "minutes (0.0, now 1.0)"}.items():
            assert says in refused(capsys, *argv, "--data", mine, *f"--{option}".split())
            assert contents(tmp_path / kind) == before
        mine.write_text(mine.read_text().replace("cat", "cow"))        # the same name, another text
        assert "data (" in refused(capsys, *argv, "--data", mine)
        assert contents(tmp_path / kind) == before
        train_it(tmp_path, text_file, *common, "--resume")             # the same text under another name
        assert f"resuming {kind} at step 5" in capsys.readouterr().out
        shutil.copy(text_file, mine)
    with pytest.raises(SystemExit):
        drafter(tmp_path, text_file, "--steps", "4")
    capsys.readouterr()
    argv = ["--method", "medusa", "--out", tmp_path, "--data", text_file, *SMALL, "--steps", "4", "--resume"]
    assert "another draft vocabulary" in refused(capsys, *argv, "--draft-vocab", "50")
    assert "another warm start" in refused(capsys, *argv, "--warm-start", tmp_path)


def test_an_interrupted_drafter_knows_its_backbone(tmp_path, text_file, monkeypatch, capsys):
    """A drafter that goes on after its backbone was trained anew."""
    backbone(tmp_path, text_file, "--steps", "3")
    stopping_at(monkeypatch, 2)
    with pytest.raises(SystemExit):
        drafter(tmp_path, text_file, "--steps", "8")
    backbone(tmp_path, text_file, "--steps", "4")
    capsys.readouterr()
    argv = ["--method", "medusa", "--out", tmp_path, "--data", text_file, *SMALL, "--steps", "8", "--resume"]
    assert "another backbone" in refused(capsys, *argv)


def test_a_run_that_is_stopped_before_it_begins_loses_nothing(tmp_path, text_file, monkeypatch, capsys):
    """A finished drafter that is replaced by an untrained one, since Ctrl-C came early."""
    backbone(tmp_path, text_file, "--steps", "3")
    drafter(tmp_path, text_file, "--steps", "3")
    before = contents(tmp_path / "medusa")
    real = Run.stopping
    monkeypatch.setattr(Run, "stopping", lambda self: (os.kill(os.getpid(), signal.SIGTERM), real(self))[1])
    with pytest.raises(SystemExit) as e:
        drafter(tmp_path, text_file, "--steps", "9")
    assert e.value.code == 130 and contents(tmp_path / "medusa") == before
    assert "nothing was written" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Reports and checkpoints

def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path, text_file, monkeypatch, capsys):
    """Training on after NaN, and a good checkpoint overwritten with NaN weights."""
    backbone(tmp_path, text_file, "--steps", "3")
    before = weights(tmp_path)
    real = train.backbone_loss
    monkeypatch.setattr(train, "backbone_loss", lambda m, x: (real(m, x)[0] * float("nan"), ()))
    with pytest.raises(SystemExit) as e:
        backbone(tmp_path, text_file, "--steps", "20")
    assert e.value.code == 2 and "the loss is nan" in capsys.readouterr().err
    assert all(torch.equal(v, before[k]) for k, v in weights(tmp_path).items())


def test_autocast_follows_the_processor(tmp_path, text_file, monkeypatch, capsys):
    """A backbone in float32 where bfloat16 is faster, in bfloat16 where it is imitated; a drafter in it."""
    seen, real = [], Run.steps

    def watched(run, *args):
        for x in real(run, *args):
            seen.append((run.kind, torch.is_autocast_enabled("cpu")))
            yield x
    monkeypatch.setattr(Run, "steps", watched)
    for has in (True, False):
        monkeypatch.setattr(plumbing.options, "bf16_cpu", lambda: has)
        backbone(tmp_path / str(has), text_file, "--steps", "2")
        drafter(tmp_path / str(has), text_file, "--steps", "2")
        assert set(seen) == {("backbone", has), ("medusa", False)}
        assert ("bf16 autocast" in capsys.readouterr().out) == has
        seen.clear()


def test_log_and_side_file_are_plain_json(trained):
    """Numpy scalars, NaN or tensors in what other programs read."""
    for kind in ("backbone", "medusa"):
        lines = [json.loads(line) for line in open(os.path.join(trained, kind, "log.jsonl"))]
        assert lines[-1]["val_loss"] > 0 and lines[-1]["step"] > 0
        side = json.load(open(os.path.join(trained, kind, "model.json")))
        assert side["kind"] == kind and side["finished"] and side["metrics"]["seconds"] >= 0
    calibration = side["calibration"]
    assert len(calibration["hits"]) == len(calibration["samples"]) == side["config"]["n_heads"]
    assert side["metrics"]["tau"] >= 1
    assert all(0 <= a <= 1 for row in accuracy(calibration) for a in row)


def test_a_log_is_of_one_run_whole_or_resumed(tmp_path, text_file, monkeypatch):
    """
    A resumed log that goes on behind a torn line or repeats steps, and a new run's that goes on behind an old
    one's.
    """
    steps = lambda out: [json.loads(line)["step"] for line in open(tmp_path / out / "backbone/log.jsonl")]
    for _ in range(2):
        backbone(tmp_path / "whole", text_file, "--steps", "10")
        assert steps("whole") == list(range(1, 11))
    stopping_at(monkeypatch, 4)
    with pytest.raises(SystemExit):
        backbone(tmp_path / "parts", text_file, "--steps", "10")
    # killed between an evaluation and its checkpoint, then torn
    with open(tmp_path / "parts/backbone/log.jsonl", "a") as f:
        f.write(json.dumps(dict(step=5, seconds=1e9)) + '\n{"step": 6, "sec')
    backbone(tmp_path / "parts", text_file, "--steps", "10", "--resume")
    assert steps("parts") == list(range(1, 11))


# the compiler of inductor takes seconds
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_blocks_compute_the_same(backend, tmp_path, text_file, monkeypatch):
    """--compile that does nothing, breaks a checkpoint's names, or changes what is learnt."""
    real, compiled = nn.Module.compile, []

    def counted(self):
        compiled.append(type(self).__name__)
        return real(self, backend=backend)
    monkeypatch.setattr(nn.Module, "compile", counted)
    for name, more in (("plain", []), ("compiled", ["--compile"])):
        backbone(tmp_path / name, text_file, "--steps", "3", *more)
        assert set(compiled) == ({"Block"} if more else set())
    a, b = weights(tmp_path / "plain"), weights(tmp_path / "compiled")
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(a[k], b[k], atol=1e-3, rtol=1e-2)


# --------------------------------------------------------------------------------------------------
# Several processes

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def two_processes(folder, work):
    """
    What torchrun does, but torch is in memory already: work(rank) in two processes. -> their exit statuses,
    and what each printed, on both of its streams.
    """
    port, children = free_port(), []
    for i in range(2):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                printed = os.open(folder / f"printed{i}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
                os.dup2(printed, 1), os.dup2(printed, 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
                os.environ |= dict(RANK=str(i), LOCAL_RANK=str(i), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                                   MASTER_PORT=port)
                plumbing.trainer.tqdm.set_lock(threading.RLock())      # its own is shared with the parent
                work(i)
                status = 0
            except SystemExit as e:
                status = e.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return statuses, [(folder / f"printed{i}").read_text() for i in range(2)]


def check_two_processes(out, printed):
    assert printed.count("step     4 |") == 1 and "256 tokens a step" in printed
    assert len(weights(out)) > 5


def test_two_processes_train_one_model(tmp_path, text_file):
    """Gradients that are not averaged over processes, and more than one process that logs or saves."""
    def work(rank):
        sync = Run.sync

        def watched(self, module, loss):
            sync(self, module, loss)
            print("gradient", sum(p.grad.double().abs().sum().item() for p in module.parameters()))
        Run.sync = watched
        backbone(tmp_path, text_file, "--steps", "4")
    statuses, printed = two_processes(tmp_path, work)
    assert statuses == [0, 0], printed
    check_two_processes(tmp_path, "".join(printed))
    a, b = ([line for line in text.splitlines() if line.startswith("gradient")] for text in printed)
    assert a == b and len(set(a)) == 4


# name -> the signals that each of two processes gets: {step: signal}
TOLD = {
    "rank 1 at once": ({}, {1: signal.SIGTERM}),
    "rank 0": ({2: signal.SIGINT}, {}),
    "both, not at the same time": ({3: signal.SIGTERM}, {2: signal.SIGINT}),
    "rank 1 in the last step": ({}, {30: signal.SIGTERM}),
}


@pytest.mark.parametrize("name", TOLD)
def test_processes_stop_after_the_same_step(name, tmp_path, text_file):
    """One process that stops, the others that wait for its gradients: no checkpoint, and a traceback."""
    def work(rank):
        sync = Run.sync

        def told(self, *args):
            if self.step + 1 in TOLD[name][rank]:
                os.kill(os.getpid(), TOLD[name][rank][self.step + 1])
            sync(self, *args)
            print("done:", self.step + 1)
        Run.sync = told
        command(backbone, tmp_path, text_file, "--steps", "30")
    statuses, printed = two_processes(tmp_path, work)
    assert statuses == [130, 130], printed
    steps = [[line for line in text.splitlines() if line.startswith("done:")] for text in printed]
    first = min(step for signals in TOLD[name] for step in signals)
    assert steps[0] == steps[1] and first <= len(steps[0]) <= first + 2
    assert "Traceback" not in "".join(printed)
    assert "".join(printed).count(f"stopped at step {len(steps[0])}; the checkpoint is usable") == 1
    _, _, meta = load_model(str(tmp_path / "backbone/model.safetensors"))
    assert meta["metrics"]["step"] == len(steps[0]) and meta["finished"] == (len(steps[0]) == 30)
    if name == "rank 1 at once":                                       # what was saved is the whole state
        other = tmp_path / "unbroken"
        other.mkdir()
        for out, more in ((tmp_path, ["--resume"]), (other, [])):
            argv = out, text_file, "--steps", "30", *more
            assert two_processes(out, lambda rank: backbone(*argv))[0] == [0, 0]
        assert all(torch.equal(w, weights(other)[k]) for k, w in weights(tmp_path).items())


def test_a_process_that_fails_takes_no_other_down_with_a_traceback(tmp_path, text_file):
    """A full disk where the first process saves: its line, and one line of the other, no traceback."""
    def work(rank):
        if rank == 0:
            def full(*args, **more):
                raise OSError("No space left on device")
            plumbing.checkpoint.save_file = full
        try:
            command(backbone, tmp_path, text_file, "--steps", "30")
        finally:
            dist.destroy_process_group()
    statuses, printed = two_processes(tmp_path, work)
    assert statuses == [2, 2] and "Traceback" not in "".join(printed)
    assert "error: cannot write" in printed[0] and "error: another of the processes has ended" in printed[1]


@pytest.mark.long
def test_torchrun_trains_one_model(tmp_path, text_file):
    """The same as the README has it. Three new processes, each of which imports torch."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
           free_port(), "train.py", "--method", "backbone", "--out", tmp_path, "--data", text_file, *TINY]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, run), "--steps", "4"], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    check_two_processes(tmp_path, done.stdout)


def test_gradients_are_averaged_over_processes(monkeypatch):
    """A sum where the mean belongs: with two processes of equal gradients nothing may change."""
    net = nn.Linear(3, 2)
    net(torch.ones(1, 3)).sum().mul(0.01).backward()
    before = [p.grad.clone() for p in net.parameters()]
    monkeypatch.setattr(dist, "all_reduce", lambda t: t.mul_(2))
    run = Run.__new__(Run)
    run.world, run.seen = 2, []
    run.sync(net, torch.tensor(1.0))
    assert all(torch.allclose(p.grad, b) for p, b in zip(net.parameters(), before))
