"""train.py: corpus, steps, checkpoints, resume, and what it says to a user's mistakes."""
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback

import pytest
import torch
import torch.nn as nn

import plumbing.budget
import plumbing.checkpoint
import plumbing.fast
import plumbing.text
import plumbing.trainer
import train
from conftest import tiny
from model import GPT, GPTConfig
from safetensors.torch import load_file
from plumbing.text import Tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = "--n-layer 1 --n-embd 32 --n-ffn 64 --n-head 2 --n-kv-head 1 --vocab-size 300 --block-size 64 --batch-size 2 " \
       "--first-length 32 --device cpu".split()


def backbone(out, text_file, *more):
    train.main(["--method", "backbone", "--out", str(out), "--data", text_file, *TINY, *more])


def weights(out, kind="backbone"):
    return load_file(os.path.join(out, kind, "model.safetensors"))


def refused(capsys, *argv):
    """Run train.py; it must end with status 2 and one line on stderr, which is returned."""
    with pytest.raises(SystemExit) as e:
        train.main([str(a) for a in argv])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_accumulated_steps_equal_the_big_batch():
    """Catches gradients that are not divided by the number of parts, or parts of unequal size weighed alike."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(1, 2, 2, 16, 32, 40, 32)).double()
    x = torch.randint(40, (8, 20))
    grads = []
    for parts in (1, 2, 3):                                            # 3 parts of 8 are 3 + 3 + 2
        net.zero_grad()
        loss = train.backbone_step(net, x, parts)
        grads.append((loss, [p.grad.clone() for p in net.parameters()]))
    for loss, grad in grads[1:]:
        torch.testing.assert_close(loss, grads[0][0])
        for a, b in zip(grad, grads[0][1]):
            torch.testing.assert_close(a, b)


def test_corpus_holds_out_whole_files_and_always_the_same():
    """Catches held-out text that leaks into training, or a split that depends on which other files there are."""
    texts = [(f"dir/file{i}.py", f"text number {i} " * 3) for i in range(400)]
    a, b = plumbing.text.Corpus(texts), plumbing.text.Corpus(texts[100:])
    assert 2 <= len(a.val_texts) <= 40 and len(a.val_texts) + len(a.train_texts) == 400
    assert not set(a.val_texts) & set(a.train_texts)
    assert set(b.val_texts) == {t for name, t in texts[100:] if t in set(a.val_texts)}
    alone = plumbing.text.Corpus([("x", "0123456789" * 20)])
    assert alone.train_texts[0] + alone.val_texts[0] == "0123456789" * 20


def test_batches_are_a_function_of_the_seed_and_reach_the_last_token(capsys):
    """Catches an exclusive bound taken twice (the last token never drawn), and text shorter than a sequence."""
    corpus = plumbing.text.Corpus([("x", "abcdefghij" * 20)]).tokenize(Tokenizer([bytes([i]) for i in range(256)]))
    assert torch.equal(corpus.batch(7, 4, 16), corpus.batch(7, 4, 16))
    assert not torch.equal(corpus.batch(7, 4, 16), corpus.batch(8, 4, 16))
    corpus.train = torch.arange(17)
    seen = {row[-1].item() for s in range(40) for row in corpus.batch(s, 4, 16)}
    assert seen == {15, 16}
    with pytest.raises(SystemExit):
        corpus.batch(0, 1, 17)
    assert "give more --data" in capsys.readouterr().err


def test_resume_continues_to_the_same_weights(tmp_path, text_file, monkeypatch, capsys):
    """Catches optimiser state, step or batches lost on resume. Ctrl-C in the middle leaves a checkpoint that loads."""
    backbone(tmp_path / "whole", text_file, "--steps", "12")
    sync, count = plumbing.trainer.Run.sync, []

    def interrupt(self, *args):
        count.append(1)
        if len(count) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return sync(self, *args)
    monkeypatch.setattr(plumbing.trainer.Run, "sync", interrupt)
    with pytest.raises(SystemExit) as e:
        backbone(tmp_path / "parts", text_file, "--steps", "12")
    assert e.value.code == 130 and len(count) == 7
    _, _, meta = plumbing.checkpoint.load_model(str(tmp_path / "parts/backbone/model.safetensors"))
    assert meta["finished"] is False and meta["metrics"]["step"] == 7
    with pytest.raises(SystemExit) as e:                               # other options would make another run of it
        backbone(tmp_path / "parts", text_file, "--steps", "13", "--resume")
    assert e.value.code == 2 and "another steps" in capsys.readouterr().err
    backbone(tmp_path / "parts", text_file, "--steps", "12", "--resume")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not glob.glob(str(tmp_path / "parts/backbone/resume*")) and not glob.glob(str(tmp_path / "*/*/*.tmp*"))


def test_a_drafter_resumes_too(tmp_path, text_file, monkeypatch):
    """Catches a drafter whose optimiser state or schedule starts afresh after an interruption."""
    backbone(tmp_path, text_file, "--steps", "3")
    args = ["--method", "medusa", "--out", str(tmp_path), "--data", text_file, "--device", "cpu", "--steps", "8", "--batch-size", "2"]
    train.main(args)
    whole = weights(tmp_path, "medusa")
    sync, count = plumbing.trainer.Run.sync, []

    def interrupt(self, *a):
        count.append(1)
        self.stop = len(count) == 4
        return sync(self, *a)
    monkeypatch.setattr(plumbing.trainer.Run, "sync", interrupt)
    with pytest.raises(SystemExit):
        train.main(args)
    assert not torch.equal(weights(tmp_path, "medusa")["proj.weight"], whole["proj.weight"])
    train.main(args + ["--resume"])
    assert all(torch.equal(v, whole[k]) for k, v in weights(tmp_path, "medusa").items())


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path, text_file, monkeypatch, capsys):
    """Catches training on after NaN, and a good checkpoint overwritten with NaN weights."""
    backbone(tmp_path, text_file, "--steps", "3")
    before = weights(tmp_path)
    real = train.backbone_loss
    monkeypatch.setattr(train, "backbone_loss", lambda m, x: (real(m, x)[0] * float("nan"), ()))
    with pytest.raises(SystemExit) as e:
        backbone(tmp_path, text_file, "--steps", "20")
    assert e.value.code == 2 and "the loss is nan" in capsys.readouterr().err
    assert all(torch.equal(v, before[k]) for k, v in weights(tmp_path).items())


def test_log_and_side_file_are_plain_json(trained):
    """Catches numpy scalars, NaN or tensors in what other programs read."""
    for kind in ("backbone", "medusa"):
        lines = [json.loads(line) for line in open(os.path.join(trained, kind, "log.jsonl"))]
        assert lines[-1]["val_loss"] > 0 and lines[-1]["step"] > 0
        side = json.load(open(os.path.join(trained, kind, "model.json")))
        assert side["kind"] == kind and side["finished"] and side["metrics"]["seconds"] >= 0
    calibration = side["calibration"]
    assert len(calibration["hits"]) == len(calibration["samples"]) == side["config"]["n_heads"]
    assert side["metrics"]["tau"] >= 1
    assert all(0 <= a <= 1 for row in plumbing.budget.accuracy(calibration) for a in row)


def test_a_log_is_read_whatever_happened_to_it(tmp_path):
    """Catches a torn or foreign line that ends in a traceback, and curves of two runs drawn as one."""
    assert plumbing.trainer.read_log(str(tmp_path / "none")) == plumbing.trainer.read_log(str(tmp_path)) == []
    line = lambda step, seconds: json.dumps(dict(step=step, seconds=seconds)).encode()
    for again in ((20, 3.0), (30, 1.9)):                               # another run begins: fewer steps, or less time
        (tmp_path / "log.jsonl").write_bytes(line(20, 2.0) + b"\n" + line(*again))
        assert plumbing.trainer.read_log(str(tmp_path / "log.jsonl")) == [dict(step=again[0], seconds=again[1])]
    lines = [line(15, 1.5), b"\xff\x00{", b"7", b"[[]]", b'{"step": "x", "seconds": 1}', b'{"step": Infinity}',
             b"[" * 100_000, b'{"step": 25, "sec' + line(30, 3.0), line(30, 3.0), line(40, 4.0)[:-3]]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines))
    assert plumbing.trainer.read_log(str(tmp_path / "log.jsonl")) == [dict(step=15, seconds=1.5), dict(step=30, seconds=3.0)]


def test_a_log_is_of_one_run_whole_or_resumed(tmp_path, text_file, monkeypatch):
    """Catches a resumed log that goes on behind a torn line or repeats steps, and a new run's that goes on behind an old one's."""
    steps = lambda out: [json.loads(line)["step"] for line in open(tmp_path / out / "backbone/log.jsonl")]
    for _ in range(2):
        backbone(tmp_path / "whole", text_file, "--steps", "10")
        assert steps("whole") == list(range(1, 11))
    sync, count = plumbing.trainer.Run.sync, []
    monkeypatch.setattr(plumbing.trainer.Run, "sync", lambda self, *a: (count.append(1), setattr(self, "stop", len(count) == 4), sync(self, *a)))
    with pytest.raises(SystemExit):
        backbone(tmp_path / "parts", text_file, "--steps", "10")
    with open(tmp_path / "parts/backbone/log.jsonl", "a") as f:        # killed between an evaluation and its checkpoint, then torn
        f.write(json.dumps(dict(step=5, seconds=1e9)) + '\n{"step": 6, "sec')
    backbone(tmp_path / "parts", text_file, "--steps", "10", "--resume")
    assert steps("parts") == list(range(1, 11))


def test_curves_show_the_logs(trained, text_file, tmp_path, monkeypatch, capsys):
    """Catches a curve that is another's, a missing panel, and training again what is there already."""
    figure = pytest.importorskip("matplotlib.figure", reason="curves need matplotlib")
    shutil.copytree(trained, tmp_path / "out")
    figures, savefig = [], figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **o: (figures.append(self), savefig(self, *a, **o)))
    argv = ["--out", str(tmp_path / "out"), "--data", text_file, "--method", "medusa", "--steps", "6", "--batch-size", "2", "--device", "cpu"]
    train.main(argv)                                                   # others may have trained that one since
    train.main([*argv, "--resume", "--plot"])
    assert "finished already" in capsys.readouterr().out
    assert (tmp_path / "out/training.png").read_bytes().startswith(b"\x89PNG")
    panels = {ax.get_title("left"): ax for ax in figures[0].axes}
    assert list(panels) == ["backbone", "medusa", "amphista", "hidden transfer", "moa"]
    for kind in ("backbone", *train.METHODS):
        log = [json.loads(line) for line in open(tmp_path / "out" / kind / "log.jsonl")]
        curves = [list(line.get_ydata()) for line in panels[kind.replace("_", " ")].lines]
        assert curves[:1] == [[r["bits_per_char"] for r in log]] if kind == "backbone" else curves == [list(c) for c in zip(*(r["top1"] for r in log))]
    (tmp_path / "empty/training.png").mkdir(parents=True)              # nothing to draw, then nowhere to draw it
    for says in ("no log of a training", "cannot write"):
        with pytest.raises(SystemExit) as e:
            sys.modules["bench.plot"].draw(str(tmp_path / "empty"))
        assert e.value.code == 2 and says in capsys.readouterr().err
        shutil.copytree(os.path.join(trained, "medusa"), tmp_path / "empty/medusa", dirs_exist_ok=True)


def test_without_matplotlib_nothing_is_trained_for_a_plot(tmp_path, text_file, monkeypatch, capsys):
    """Catches an optional package that is missed only after the minutes of training."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "bench.plot", raising=False)
    assert "pip install matplotlib" in refused(capsys, "--plot", "--out", tmp_path, "--data", text_file)
    assert os.listdir(tmp_path) == []


def test_remembered_states_are_the_targets():
    """Catches states of another sequence, more in memory than was allowed, a forward for what is there, and decoding with them."""
    target, g = tiny(), torch.Generator().manual_seed(0)
    texts = torch.randint(23, (5, 12), generator=g)
    hidden, forwards = target.hidden, []
    target.hidden = lambda x, *a, **o: forwards.append(len(x)) or hidden(x, *a, **o)
    for room, kept, expected in ((1e9, 5, 5), (3.5 * 12 * 16 * 2, 3, 3 + 8), (0, 0, 21)):
        forwards, memory = [], plumbing.fast.Remember(target, room)
        for order in ([4, 2], [0, 0, 4], [1, 3], *[[i] for i in range(5)], [3, 1, 0, 2, 4], [2, 0, 1], [4, 3]):
            x = texts[order]
            torch.testing.assert_close(memory(x), hidden(x).bfloat16().double(), rtol=0, atol=0)
        assert len(memory.kept) == kept and sum(forwards) == expected
    cache = target.new_cache(12)
    assert torch.equal(memory(texts[:1], cache=cache), hidden(texts[:1], cache=target.new_cache(12)))


def test_aligned_batches_lie_side_by_side():
    """Catches sequences that never come again, and an end of the text that is never or wrongly drawn."""
    corpus = plumbing.text.Corpus([("a", "x" * 20), ("b", "y")])
    corpus.train = torch.arange(47)
    for aligned, starts in ((True, set(range(0, 40, 10))), (False, set(range(38)))):
        corpus.aligned = aligned
        x = torch.cat([corpus.batch(seed, 8, 10) for seed in range(100)])
        assert set(x[:, 0].tolist()) == starts and torch.equal(x, x[:, :1] + torch.arange(10))


def test_calibration_counts_by_hand():
    """Catches a calibration divisor that is right for the first head only (Medusa's own script)."""
    class Method:
        @staticmethod
        def guesses(net, target, x):
            for k in (1, 2):
                truth = x[:, k + 1:].flatten()
                yield nn.functional.one_hot(truth + (k == 2), 8).float(), truth, None   # head 2 is always one off
    x = torch.arange(6).view(1, 6)
    c = plumbing.budget.calibrate(Method, None, None, [x, x], ranks=3)
    assert c["samples"] == [8, 6] and c["hits"][0] == [8, 0, 0] and c["hits"][1][0] == 0


@pytest.mark.parametrize("argv, says", [
    (["--method", "nosuch"], "nosuch"), (["--nosuch", "1"], "--nosuch"), (["--lr", "fast"], "--lr"), (["--meth", "medusa"], "--meth"),
    (["--n-heads", "1.5"], "--n-heads"), (["--steps", "0"], "--steps"), (["--batch-size", "0"], "--batch-size"), (["--lr", "-1"], "--lr"),
    (["--minutes", "-1"], "--minutes"), (["--data", "/nonexistent"], "no file"), (["--device", "cuda:99"], "device"),
    (["--method", "backbone", "--n-head", "3", "--n-kv-head", "2"], "heads"), (["--method", "backbone", "--vocab-size", "100"], "--vocab-size"),
    (["--method", "backbone", "--style", "rnn"], "style"),
])
def test_mistakes_get_one_line(argv, says, tmp_path, capsys):
    """Catches tracebacks and bare assertions for what a user typed."""
    assert says in refused(capsys, "--data", __file__, *argv, "--out", tmp_path)


def test_texts_that_cannot_be_read(tmp_path, capsys):
    """Catches binary, Latin-1 or empty files that end in a traceback, or one bad file that spoils a folder."""
    (tmp_path / "binary").write_bytes(b"\x00\x01\x02" * 100)
    (tmp_path / "latin").write_bytes("é".encode("latin-1") * 100)
    (tmp_path / "empty").write_text("")
    for name in ("binary", "latin", "empty"):
        assert "no readable UTF-8 text" in refused(capsys, "--data", tmp_path / name, "--out", tmp_path / "out")
    (tmp_path / "good").write_text("good text " * 50)
    assert [name for name, _ in plumbing.text.read_texts(str(tmp_path))] == ["good"]
    assert "2 of 4 files" in capsys.readouterr().out
    assert "give more --data" in refused(capsys, "--method", "backbone", "--data", tmp_path / "good", "--out", tmp_path / "out")


def test_an_integer_is_a_float_and_presets_differ(tmp_path, text_file, capsys):
    """Catches `--lr 1` refused as no float; a preset that changes nothing; and help that cannot be printed."""
    backbone(tmp_path, text_file, "--steps", "1", "--lr-rest", "0")
    assert "lr_rest=0.0" in capsys.readouterr().out
    for preset, says in (("cpu", "default: 4)"), ("gpu", "default: 12)")):
        with pytest.raises(SystemExit) as e:
            train.main(["--method", "backbone", "--preset", preset, "-h"])
        assert e.value.code == 0 and says in capsys.readouterr().out


def check_two_processes(out, printed):
    assert printed.count("step     4 |") == 1 and "256 tokens a step" in printed
    assert len(weights(out)) > 5


def test_two_processes_train_one_model(tmp_path, text_file):
    """Catches gradients that are not averaged over processes, and more than one process that logs or saves."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = []
    for i in range(2):
        pid = os.fork()                                                # what torchrun does, but torch is in memory already
        if not pid:
            status = 1
            try:
                os.dup2(os.open(tmp_path / f"printed{i}", os.O_CREAT | os.O_WRONLY), 1)
                sys.stdout = open(1, "w", closefd=False)
                os.environ |= dict(RANK=str(i), LOCAL_RANK=str(i), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                plumbing.trainer.tqdm.set_lock(threading.RLock())                 # its own is shared with the parent
                sync = plumbing.trainer.Run.sync
                plumbing.trainer.Run.sync = lambda self, module, loss: (sync(self, module, loss), print(
                    "gradient", sum(p.grad.double().abs().sum().item() for p in module.parameters())))
                backbone(tmp_path, text_file, "--steps", "4")
                sys.stdout.flush()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
    printed = [(tmp_path / f"printed{i}").read_text() for i in range(2)]
    check_two_processes(tmp_path, "".join(printed))
    a, b = ([line for line in text.splitlines() if line.startswith("gradient")] for text in printed)
    assert a == b and len(set(a)) == 4


@pytest.mark.long
def test_torchrun_trains_one_model(tmp_path, text_file):
    """The same as the README has it. Three new processes, each of which imports torch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517", "train.py",
               "--method", "backbone", "--out", str(tmp_path), "--data", text_file, *TINY, "--steps", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    check_two_processes(tmp_path, done.stdout)


def test_gradients_are_averaged_over_processes(monkeypatch):
    """Catches a sum where the mean belongs: with two processes of equal gradients nothing may change."""
    net = nn.Linear(3, 2)
    net(torch.ones(1, 3)).sum().mul(0.01).backward()
    before = [p.grad.clone() for p in net.parameters()]
    monkeypatch.setattr(train.dist, "all_reduce", lambda t: t.mul_(2))
    run = plumbing.trainer.Run.__new__(plumbing.trainer.Run)
    run.world, run.seen = 2, []
    run.sync(net, torch.tensor(1.0))
    assert all(torch.allclose(p.grad, b) for p, b in zip(net.parameters(), before))


def test_resume_trains_only_what_is_missing(tmp_path, text_file, capsys):
    """Catches --resume that trains a finished drafter again, or takes one of another backbone for finished."""
    backbone(tmp_path, text_file, "--steps", "2")
    args = ["--method", "medusa", "--out", str(tmp_path), "--data", text_file, "--device", "cpu", "--steps", "2", "--batch-size", "2"]
    train.main(args)
    path = tmp_path / "medusa/model.safetensors"
    before = path.stat().st_mtime_ns
    train.main(args + ["--resume"])
    assert path.stat().st_mtime_ns == before and "finished already" in capsys.readouterr().out
    train.main([*args, "--n-heads", "2", "--resume"])
    assert path.stat().st_mtime_ns != before
    before = path.stat().st_mtime_ns
    backbone(tmp_path, text_file, "--steps", "3")
    train.main([*args, "--n-heads", "2", "--resume"])
    assert path.stat().st_mtime_ns != before


@pytest.mark.parametrize("kind", train.METHODS)
def test_a_drafter_starts_from_another(kind, trained, tmp_path, text_file, capsys):
    """Catches --warm-start that is not obeyed, or obeyed for a drafter, a vocabulary or a backbone that it does not fit."""
    shutil.copytree(os.path.join(trained, "backbone"), tmp_path / "backbone")
    args = ["--method", kind, "--data", text_file, "--device", "cpu", "--steps", "1", "--batch-size", "2", "--out", str(tmp_path)]
    train.main([*args, "--lr", "1e-9", "--warm-start", trained])
    new, old = weights(tmp_path, kind), weights(trained, kind)
    moved = [k for k in old if not torch.equal(old[k], new[k])]
    assert all(torch.allclose(old[k], new[k], atol=1e-6) for k in old) and moved, "one step of almost nothing"
    meta = plumbing.checkpoint.load(str(tmp_path / kind / "model.safetensors"), "", "")[1]
    before = plumbing.checkpoint.load(os.path.join(trained, kind, "model.safetensors"), "", "")[1]
    assert meta["init"] == {"checkpoint": plumbing.checkpoint.fingerprint(old), "metrics": before["metrics"]}
    if kind != "medusa":
        return
    train.main([*args, "--draft-vocab", "100"])
    keep = weights(tmp_path, kind)["head.ids"]
    train.main([*args, "--warm-start", str(tmp_path), "--lr", "1e-9"])
    assert torch.equal(weights(tmp_path, kind)["head.ids"], keep) and len(keep) == 100
    assert "leave --draft-vocab out" in refused(capsys, *args, "--warm-start", tmp_path, "--draft-vocab", "50")
    assert "leave --draft-vocab out" in refused(capsys, *args, "--warm-start", trained, "--draft-vocab", "50")
    assert "proj" in refused(capsys, *args, "--warm-start", trained, "--n-heads", "2")
    assert "no medusa checkpoint" in refused(capsys, *args, "--warm-start", tmp_path / "none")
    assert "starts drafters" in refused(capsys, *args[2:], "--method", "backbone", "--warm-start", trained)
    assert "starts drafters" in refused(capsys, *args, "--warm-start", trained, "--out", tmp_path / "empty")
    shutil.rmtree(tmp_path / "backbone")
    backbone(tmp_path, text_file, "--steps", "1")
    assert "another backbone" in refused(capsys, *args, "--warm-start", trained)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])     # its compiler takes seconds
def test_compiled_blocks_compute_the_same(backend, tmp_path, text_file, monkeypatch):
    """Catches --compile that does nothing, breaks a checkpoint's names, or changes what is learnt."""
    real, compiled = nn.Module.compile, []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(type(self).__name__) or real(self, backend=backend))
    for name, more in (("plain", []), ("compiled", ["--compile"])):
        backbone(tmp_path / name, text_file, "--steps", "3", *more)
        assert set(compiled) == ({"Block"} if more else set())
    a, b = weights(tmp_path / "plain"), weights(tmp_path / "compiled")
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(a[k], b[k], atol=1e-3, rtol=1e-2)


def test_half_checkpoints_are_half_as_large_and_fit_each_other(tmp_path, text_file):
    out = str(tmp_path)
    backbone(out, text_file, "--half", "--steps", "3")
    train.main(["--method", "medusa", "--out", out, "--data", text_file, "--steps", "2", "--batch-size", "2", "--half"])
    target, _, _ = plumbing.checkpoint.load_model(f"{out}/backbone/model.safetensors")
    assert {v.dtype for v in weights(out).values()} == {torch.bfloat16} and target.wte.weight.dtype == torch.float32
    assert plumbing.checkpoint.load(f"{out}/medusa/model.safetensors", "", "")[1]["backbone"] == target.fingerprint


def test_a_run_killed_before_its_calibration_is_not_finished(tmp_path, text_file, monkeypatch):
    """Catches a checkpoint that calls itself finished while its calibration and figures are missing."""
    backbone(tmp_path, text_file, "--steps", "3")
    args = ["--method", "medusa", "--out", str(tmp_path), "--data", text_file, "--device", "cpu", "--steps", "3", "--batch-size", "2"]

    def killed(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(train, "calibrate", killed)
        train.main(args)
    trained = weights(tmp_path, "medusa")
    train.main(args + ["--resume"])
    _, meta = plumbing.checkpoint.load(f"{tmp_path}/medusa/model.safetensors", "", "")
    assert meta["finished"] and meta["calibration"] and "seconds" in meta["metrics"] and meta["metrics"]["step"] == 3
    assert all(torch.equal(v, trained[k]) for k, v in weights(tmp_path, "medusa").items())


def test_an_interrupted_drafter_knows_its_backbone(tmp_path, text_file, monkeypatch, capsys):
    """Catches --resume that goes on with a drafter after its backbone was trained anew."""
    backbone(tmp_path, text_file, "--steps", "3")
    args = ["--method", "medusa", "--out", str(tmp_path), "--data", text_file, "--device", "cpu", "--steps", "8", "--batch-size", "2"]
    with monkeypatch.context() as m, pytest.raises(SystemExit):
        m.setattr(plumbing.trainer.Run, "sync", lambda self, *_: setattr(self, "stop", True) or self.seen.append(torch.zeros(())))
        train.main(args)
    backbone(tmp_path, text_file, "--steps", "4")
    capsys.readouterr()
    assert "another backbone" in refused(capsys, *args, "--resume")
