"""Training curves."""
import json
import os
import shutil
import sys

import pytest

import train
from test_train import refused


def test_curves_show_the_logs(trained, text_file, tmp_path, monkeypatch, capsys):
    """A curve that is another's, a missing panel, and training again what is there already."""
    figure = pytest.importorskip("matplotlib.figure", reason="curves need matplotlib")
    out = tmp_path / "out [1]"                                         # a name that looks like a pattern
    shutil.copytree(trained, out)
    figures, savefig = [], figure.Figure.savefig

    def kept(self, *args, **options):
        figures.append(self)
        savefig(self, *args, **options)
    monkeypatch.setattr(figure.Figure, "savefig", kept)
    argv = ["--out", str(out), "--data", text_file, "--method", "medusa", "--steps", "6", "--batch-size", "2",
            "--device", "cpu"]
    train.main(argv)                                                   # others may have trained it since
    train.main([*argv, "--resume", "--plot"])
    assert "finished already" in capsys.readouterr().out
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    panels = {ax.get_title("left"): ax for ax in figures[0].axes}
    assert list(panels) == ["backbone", "amphista", "hidden transfer", "medusa", "moa"]
    for kind in ("backbone", *train.METHODS):
        log = [json.loads(line) for line in open(out / kind / "log.jsonl")]
        curves = [list(line.get_ydata()) for line in panels[kind.replace("_", " ")].lines]
        if kind == "backbone":
            assert curves[0] == [r["bits_per_char"] for r in log]
        else:
            assert curves == [list(c) for c in zip(*(r["top1"] for r in log))]
    (tmp_path / "empty/training.png").mkdir(parents=True)              # nothing to draw, then nowhere
    for says in ("no log of a training", "cannot write"):
        with pytest.raises(SystemExit) as e:
            sys.modules["plumbing.plot"].draw(str(tmp_path / "empty"))
        assert e.value.code == 2 and says in capsys.readouterr().err
        shutil.copytree(os.path.join(trained, "medusa"), tmp_path / "empty/medusa", dirs_exist_ok=True)


def test_without_matplotlib_nothing_is_trained_for_a_plot(tmp_path, text_file, monkeypatch, capsys):
    """An optional package that is missed only after the minutes of training."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "plumbing.plot", raising=False)
    assert "pip install matplotlib" in refused(capsys, "--plot", "--out", tmp_path, "--data", text_file)
    assert os.listdir(tmp_path) == []
