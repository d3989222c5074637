"""weights/: every file is the one of the manifest, fits its backbone, and is as good as the manifest says."""
import hashlib
import json
import os

import pytest

import plumbing.drafters
import sample
import train
from plumbing.checkpoint import load, load_model
from plumbing.fast import for_decoding
from train import METHODS, mean_tau  # the real one: conftest's has fewer prompts
from tree import complete

with open(os.path.join(plumbing.drafters.WEIGHTS, "manifest.json"), encoding="utf-8") as f:
    MANIFEST = json.load(f)


def test_nothing_is_missing_or_too_much():
    """Catches a file that the manifest does not know, one that is not there, and a folder that grows."""
    there = set()
    for folder, _, names in os.walk(plumbing.drafters.WEIGHTS):
        for name in names:
            if name.endswith(".safetensors"):
                path = os.path.relpath(os.path.join(folder, name), plumbing.drafters.WEIGHTS)
                there.add(path.replace(os.sep, "/"))
    assert there == set(MANIFEST["files"])
    assert {f"{m}/model.safetensors" for m in ("backbone", *METHODS)} <= there
    assert sum(entry["bytes"] for entry in MANIFEST["files"].values()) < 50e6


@pytest.mark.parametrize("path", MANIFEST["files"])
def test_hashes(path):
    """Catches a file that was changed, or whose entry was forgotten."""
    with open(os.path.join(plumbing.drafters.WEIGHTS, path), "rb") as f:
        assert hashlib.sha256(f.read()).hexdigest() == MANIFEST["files"][path]["sha256"]
    _, meta = load(os.path.join(plumbing.drafters.WEIGHTS, path), "", "")
    assert meta["kind"] == path.split("/")[-2] and meta["finished"]


@pytest.fixture(scope="module")
def plain():
    """The backbone, and what it writes after the first prompt."""
    path = os.path.join(plumbing.drafters.WEIGHTS, "backbone", "model.safetensors")
    target = for_decoding(load_model(path)[0])
    return target, complete(target, MANIFEST["prompts"][0], MANIFEST["new_tokens"])[0]


@pytest.mark.parametrize("method", METHODS)
def test_taus(method, plain, monkeypatch):
    """
    Catches weights that no longer fit the code:
    another tau, or another text, on the manifest's prompts.
    """
    target, text = plain
    own = dict(depth=4) if method == "moa" else {}                     # the manifest's trees have all levels
    opt = sample.Options(method=method, out=plumbing.drafters.WEIGHTS, nodes=MANIFEST["nodes"])
    drafter = plumbing.drafters.load_drafter(opt, target, METHODS[method], own=own)
    texts = []
    monkeypatch.setattr(train, "complete", lambda *args: texts.append(complete(*args)) or texts[-1])
    tau = mean_tau(target, drafter, MANIFEST["prompts"], MANIFEST["new_tokens"])
    assert tau == pytest.approx(MANIFEST["files"][f"{method}/model.safetensors"]["tau_T0"], rel=0.05)
    assert texts[0][0] == text


def test_own_training_comes_first(tmp_path, monkeypatch):
    """Catches weights/ in the way of what the user has trained, and a fresh clone without anything to run."""
    monkeypatch.chdir(tmp_path)
    assert plumbing.drafters.checkpoints(sample.Options()) == plumbing.drafters.WEIGHTS
    assert plumbing.drafters.checkpoints(sample.Options(out="elsewhere")) == "elsewhere"
    (tmp_path / "out" / "backbone").mkdir(parents=True)
    assert plumbing.drafters.checkpoints(sample.Options()) == "out"
