"""train.py: the backbone's steps, which training is wanted, and what it says to a user's mistakes."""
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

import plumbing.checkpoint
import train
from model import GPT, GPTConfig
from plumbing.checkpoint import load, load_model

TINY = ("--n-layer 1 --n-embd 32 --n-ffn 64 --n-head 2 --n-kv-head 1 --vocab-size 300 --block-size 64 "
        "--batch-size 2 --first-length 32 --device cpu").split()
SMALL = ["--batch-size", "2", "--device", "cpu"]


def backbone(out, data, *more):
    train.main(["--method", "backbone", "--out", str(out), "--data", str(data), *TINY, *map(str, more)])


def drafter(out, data, *more):
    train.main(["--method", "medusa", "--out", str(out), "--data", str(data), *SMALL, *map(str, more)])


def weights(out, kind="backbone"):
    return load_file(os.path.join(out, kind, "model.safetensors"))


def metadata(out, kind="backbone"):
    return load(os.path.join(out, kind, "model.safetensors"), "", "")[1]


def refused(capsys, *argv):
    """Run train.py; it must end with status 2 and one line on stderr, which is returned."""
    with pytest.raises(SystemExit) as e:
        train.main([str(a) for a in argv])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_accumulated_steps_equal_the_big_batch():
    """Gradients that are not divided by the number of parts, or parts of unequal size weighed alike."""
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


@pytest.mark.parametrize("argv, says", [
    (["--method", "nosuch"], "nosuch"),
    (["--nosuch", "1"], "--nosuch"),
    (["--lr", "fast"], "--lr"),
    (["--meth", "medusa"], "--meth"),
    (["--n-heads", "1.5"], "--n-heads"),
    (["--steps", "0"], "--steps"),
    (["--batch-size", "0"], "--batch-size"),
    (["--lr", "-1"], "--lr"),
    (["--minutes", "-1"], "--minutes"),
    (["--data", "/nonexistent"], "no file"),
    (["--device", "cuda:99"], "device"),
    (["--method", "backbone", "--n-head", "3", "--n-kv-head", "2"], "heads"),
    (["--method", "backbone", "--vocab-size", "100"], "--vocab-size"),
    (["--method", "backbone", "--style", "rnn"], "style"),
    (["--method", "backbone", "--backbone", "gpt2"], "leave --backbone out"),
])
def test_mistakes_get_one_line(argv, says, tmp_path, capsys):
    """Tracebacks and bare assertions for what a user typed."""
    assert says in refused(capsys, "--data", __file__, *argv, "--out", tmp_path)


def test_an_integer_is_a_float_and_presets_differ(tmp_path, text_file, capsys):
    """`--lr 1` refused as no float; a preset that changes nothing; and help that cannot be printed."""
    backbone(tmp_path, text_file, "--steps", "1", "--lr-rest", "0")
    assert "lr_rest=0.0" in capsys.readouterr().out
    for preset, says in (("cpu", "default: 4)"), ("gpu", "default: 12)")):
        with pytest.raises(SystemExit) as e:
            train.main(["--method", "backbone", "--preset", preset, "-h"])
        assert e.value.code == 0 and says in capsys.readouterr().out


def test_help_says_where_the_options_of_a_method_are(capsys):
    """Options of single methods that nobody finds: without --method, -h lists none of them."""
    helps = {}
    for argv in ([], ["--method", "medusa"]):
        with pytest.raises(SystemExit) as e:
            train.main([*argv, "-h"])
        assert e.value.code == 0
        helps[len(argv)] = " ".join(capsys.readouterr().out.split())
    assert "--n-heads" not in helps[0] and "--n-heads" in helps[2]
    assert "options of one method: python train.py --method medusa -h" in helps[0]


def test_resume_trains_only_what_is_missing(tmp_path, text_file, capsys):
    """
    --resume that trains a finished drafter again, or takes one of another backbone, other options or other
    text for finished. It says why it trains again, and what to look at in the end.
    """
    mine = tmp_path / "mine.txt"
    shutil.copy(text_file, mine)
    backbone(tmp_path, mine, "--steps", "2")
    drafter(tmp_path, mine, "--steps", "2")
    path = tmp_path / "medusa/model.safetensors"

    def again(*more):
        before = path.stat().st_mtime_ns
        capsys.readouterr()
        drafter(tmp_path, mine, "--steps", "2", "--resume", *more)
        out = capsys.readouterr().out
        kept = path.stat().st_mtime_ns == before
        assert ("finished already" in out) == kept == ("is of another" not in out)
        return out
    said = again()
    assert "finished already" in said
    assert said.endswith(f"\npython sample.py --method all --show page --out {tmp_path}\n")
    assert "config.n_heads (4, now 2)" in again("--n-heads", "2")
    assert "finished already" in again("--n-heads", "2")
    assert "draft_vocab (0, now 50)" in again("--n-heads", "2", "--draft-vocab", "50")
    mine.write_text(mine.read_text().replace("dog", "cow"))
    assert "data (" in again("--n-heads", "2", "--draft-vocab", "50")
    backbone(tmp_path, mine, "--steps", "3")
    assert "backbone (" in again("--n-heads", "2", "--draft-vocab", "50")


def test_text_that_the_backbone_was_not_trained_on_is_named(tmp_path, text_file, capsys):
    """Drafters that learn one text for a backbone that knows another, and nobody is told."""
    mine = tmp_path / "mine.txt"
    mine.write_text(open(text_file, encoding="utf-8").read().replace("dog", "cow"), encoding="utf-8")
    backbone(tmp_path, text_file, "--steps", "2")

    def note(data):
        capsys.readouterr()
        drafter(tmp_path, data, "--steps", "1")
        return "was trained on other text" in capsys.readouterr().out
    assert note(mine)
    mine.write_bytes(open(text_file, "rb").read())
    assert not note(text_file) and not note(mine)
    assert metadata(tmp_path)["data"] == metadata(tmp_path, "medusa")["data"]
    path = str(tmp_path / "backbone/model.safetensors")                # an older one does not say
    tensors, meta = load(path, "", "")
    del meta["data"]
    plumbing.checkpoint.save(path, {k: v.clone() for k, v in tensors.items()}, meta)
    mine.write_text("another text altogether, of numbers: 1 2 3 4 5. " * 400)
    assert not note(mine)


@pytest.mark.parametrize("kind", train.METHODS)
def test_a_drafter_starts_from_another(kind, trained, tmp_path, text_file, capsys):
    """--warm-start that is not obeyed, or obeyed where drafter, vocabulary or backbone do not fit."""
    shutil.copytree(os.path.join(trained, "backbone"), tmp_path / "backbone")
    args = ["--method", kind, "--data", text_file, *SMALL, "--steps", "1", "--out", str(tmp_path)]
    train.main([*args, "--lr", "1e-9", "--warm-start", trained])
    new, old = weights(tmp_path, kind), weights(trained, kind)
    moved = [k for k in old if not torch.equal(old[k], new[k])]
    assert all(torch.allclose(old[k], new[k], atol=1e-6) for k in old) and moved, "one step of almost nothing"
    before = metadata(trained, kind)
    init = {"checkpoint": plumbing.checkpoint.fingerprint(old), "metrics": before["metrics"]}
    assert metadata(tmp_path, kind)["init"] == init
    if kind != "medusa":
        return
    train.main([*args, "--draft-vocab", "100"])
    keep = weights(tmp_path, kind)["head.ids"]
    train.main([*args, "--warm-start", str(tmp_path), "--lr", "1e-9"])
    assert torch.equal(weights(tmp_path, kind)["head.ids"], keep) and len(keep) == 100
    for out in (tmp_path, trained):
        argv = [*args, "--warm-start", out, "--draft-vocab", "50"]
        assert "leave --draft-vocab out" in refused(capsys, *argv)
    assert "proj" in refused(capsys, *args, "--warm-start", trained, "--n-heads", "2")
    assert "no medusa checkpoint" in refused(capsys, *args, "--warm-start", tmp_path / "none")
    assert "starts drafters" in refused(capsys, *args[2:], "--method", "backbone", "--warm-start", trained)
    assert "starts drafters" in refused(capsys, *args, "--warm-start", trained, "--out", tmp_path / "empty")
    shutil.rmtree(tmp_path / "backbone")
    backbone(tmp_path, text_file, "--steps", "1")
    assert "another backbone" in refused(capsys, *args, "--warm-start", trained)


def test_half_checkpoints_are_half_as_large_and_fit_each_other(tmp_path, text_file):
    """A drafter that does not know the backbone, since that was rounded after its fingerprint was taken."""
    backbone(tmp_path, text_file, "--half", "--steps", "3")
    drafter(tmp_path, text_file, "--steps", "2", "--half")
    target, _, _ = load_model(str(tmp_path / "backbone/model.safetensors"))
    assert {v.dtype for v in weights(tmp_path).values()} == {torch.bfloat16}
    assert target.wte.weight.dtype == torch.float32
    assert metadata(tmp_path, "medusa")["backbone"] == target.fingerprint


def test_a_run_killed_before_its_calibration_is_not_finished(tmp_path, text_file, monkeypatch):
    """A checkpoint that calls itself finished while its calibration and figures are missing."""
    backbone(tmp_path, text_file, "--steps", "3")

    def killed(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(train, "calibrate", killed)
        drafter(tmp_path, text_file, "--steps", "3")
    trained = weights(tmp_path, "medusa")
    drafter(tmp_path, text_file, "--steps", "3", "--resume")
    meta = metadata(tmp_path, "medusa")
    assert meta["finished"] and meta["calibration"]
    assert "seconds" in meta["metrics"] and meta["metrics"]["step"] == 3
    assert all(torch.equal(v, trained[k]) for k, v in weights(tmp_path, "medusa").items())
