"""Checkpoints: what is saved comes back; what is damaged, foreign or no number is refused in one line."""
import json
import os

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import plumbing.checkpoint
from conftest import tiny
from plumbing.fast import for_decoding
from plumbing.text import Tokenizer


def ids(V, B, T, seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


WORDS = "def walk(tokens, parent, choice):\n    return path, out  # été, naïve, 漢字 and 12345\n" * 20


@pytest.fixture(scope="module")
def tokenizer():
    with open(__file__, encoding="utf-8") as f:
        return Tokenizer.train([WORDS, f.read()], 400)


@pytest.fixture
def saved(tmp_path, tokenizer):
    """-> path of a saved tied backbone, the backbone."""
    target = tiny(dtype=torch.float32, vocab_size=tokenizer.vocab_size)
    path = str(tmp_path / "backbone" / "model.safetensors")
    plumbing.checkpoint.save_model(path, target, tokenizer, metrics={"val_loss": 3.5}, finished=True)
    return path, target


def refused(capsys, call, *words):
    """call ends with status 2 and exactly one line on stderr, which holds words."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        call()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    for word in words:
        assert word in err, err


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_save_and_load(style, tied, tmp_path, tokenizer):
    """A tensor or number of the config that does not come back; a tie lost or stored twice; other words."""
    target = tiny(style, dtype=torch.float32, tied=tied, vocab_size=tokenizer.vocab_size, rope_theta=77.0,
                  eps=0.01)
    path = str(tmp_path / "deep" / "er" / "m.safetensors")
    plumbing.checkpoint.save_model(path, target, tokenizer, metrics={"val_loss": 3.5})
    loaded, again, meta = plumbing.checkpoint.load_model(path)
    assert loaded.cfg == target.cfg and meta["metrics"] == {"val_loss": 3.5} and meta["kind"] == "backbone"
    x = ids(tokenizer.vocab_size, 1, 40)
    assert torch.allclose(loaded(x)[0], target(x)[0], atol=1e-5)       # equal numbers, in another layout
    for (name, a), (_, b) in zip(loaded.named_parameters(), target.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert loaded.fingerprint == target.fingerprint
    assert again.encode(WORDS) == tokenizer.encode(WORDS) and again.eos == tokenizer.eos
    assert (loaded.lm_head.weight.data_ptr() == loaded.wte.weight.data_ptr()) == tied
    assert ("lm_head.weight" in load_file(path)) == (not tied)
    matrix = 4 * 16 * tokenizer.vocab_size
    numbers = 4 * sum(p.numel() for p in target.parameters())          # a tie counts once
    bare = os.path.getsize(path) - numbers - len(json.dumps(tokenizer.to_dict()))
    assert 0 < bare < matrix, "the embedding is stored twice"
    with open(path.replace(".safetensors", ".json")) as f:
        assert json.load(f)["config"]["n_embd"] == 16
    assert len(os.listdir(os.path.dirname(path))) == 2                 # no temporary file


def test_tie_is_kept_in_training_after_load(saved):
    """A tie that is only a copy of values: one step of training would tear it."""
    loaded = plumbing.checkpoint.load_model(saved[0])[0]
    for p in loaded.parameters():
        p.requires_grad_(True)
    opt = torch.optim.SGD(loaded.parameters(), lr=1.0)
    F.cross_entropy(loaded(torch.tensor([[1, 2]]))[0][0], torch.tensor([2, 3])).backward()
    opt.step()
    assert torch.equal(loaded.wte.weight, loaded.lm_head.weight)
    assert loaded.wte.weight is loaded.lm_head.weight


def test_fingerprint():
    """A hash that misses a weight, a name or a shape: drafters would accept another backbone."""
    of = plumbing.checkpoint.fingerprint
    target = tiny()
    tensors = plumbing.checkpoint.model_tensors(target)
    first = of(tensors)
    assert of(plumbing.checkpoint.model_tensors(for_decoding(tiny()))) == first          # whatever its layout
    for name, t in tensors.items():
        t.view(-1)[-1] += 1e-9
        assert of(tensors) != first, name
        t.view(-1)[-1] -= 1e-9
        t.copy_(tiny().state_dict()[name])
    assert of(tensors) == first
    w = torch.arange(6.0)
    prints = {of(t) for t in ({"a": w}, {"b": w}, {"a": w.view(2, 3)}, {"a": w.view(3, 2)}, {"a": w, "b": w})}
    assert len(prints) == 5


def test_missing_file(tmp_path, capsys):
    """A traceback where a sentence with the next command is due."""
    path = str(tmp_path / "none.safetensors")
    refused(capsys, lambda: plumbing.checkpoint.load_model(path), path, "train.py")
    refused(capsys, lambda: plumbing.checkpoint.load_model(str(tmp_path)), str(tmp_path))


@pytest.mark.parametrize("left", [0, 4, 8, 100, 0.5, 0.999])
def test_truncated_file(saved, left, capsys):
    """A half-written file read as if whole, or a traceback."""
    path, size = saved[0], os.path.getsize(saved[0])
    os.truncate(path, left if isinstance(left, int) else int(size * left))
    refused(capsys, lambda: plumbing.checkpoint.load_model(path), path, "broken")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"meta": "not json"}])
def test_foreign_safetensors_file(tmp_path, metadata, capsys):
    """Somebody else's file taken for ours."""
    path = str(tmp_path / "foreign.safetensors")
    save_file({"w": torch.zeros(3)}, path, metadata=metadata)
    refused(capsys, lambda: plumbing.checkpoint.load_model(path), path, "not ours")


def test_a_text_file_is_no_checkpoint(tmp_path, capsys):
    """A traceback for a file that is not safetensors at all."""
    path = tmp_path / "m.safetensors"
    path.write_text("hello " * 100)
    refused(capsys, lambda: plumbing.checkpoint.load_model(str(path)), str(path))


@pytest.mark.parametrize("kind", ["medusa", "backbone (resume)"])
def test_other_checkpoints_are_no_backbone(saved, kind, capsys):
    """Heads, or the state of an interrupted run, loaded as a backbone."""
    path = saved[0]
    meta = {"kind": kind, "config": {"n_heads": 4}}
    plumbing.checkpoint.save(path, {"proj.weight": torch.zeros(2, 2)}, meta)
    refused(capsys, lambda: plumbing.checkpoint.load_model(path), path, kind)


def rewrite(path, change):
    tensors, meta = plumbing.checkpoint.load(path, "", "")
    change(tensors, meta)
    plumbing.checkpoint.save(path, tensors, meta)


@pytest.mark.parametrize("name", ["wte.weight", "norm.weight", "blocks.1.attn.qkv.weight"])
def test_missing_tensor(saved, name, capsys):
    """Non-strict loading: a model with random weights in one place."""
    rewrite(saved[0], lambda tensors, meta: tensors.pop(name))
    refused(capsys, lambda: plumbing.checkpoint.load_model(saved[0]), saved[0], name)


@pytest.mark.parametrize("name", ["blocks.2.norm1.weight", "extra", "lm_head.weight"])
def test_extra_tensor(saved, name, capsys):
    """A tensor that nobody reads: the file is of another model (lm_head.weight: of an untied one)."""
    shape = (saved[1].cfg.vocab_size, 16)
    rewrite(saved[0], lambda tensors, meta: tensors.update({name: torch.zeros(shape)}))
    refused(capsys, lambda: plumbing.checkpoint.load_model(saved[0]), saved[0], name)


def test_misshapen_tensor(saved, capsys):
    """A tensor of another size is named, not thrown as an exception."""
    rewrite(saved[0], lambda tensors, meta: tensors.update({"norm.weight": torch.zeros(17)}))
    refused(capsys, lambda: plumbing.checkpoint.load_model(saved[0]), saved[0], "norm.weight")


def test_config_of_another_version(saved, capsys):
    """A config with a field that this version does not know: a traceback instead of a sentence."""
    rewrite(saved[0], lambda tensors, meta: meta["config"].update(dropout=0.1))
    refused(capsys, lambda: plumbing.checkpoint.load_model(saved[0]), saved[0], "dropout")


NONE = float("nan")                                                    # no number


@pytest.mark.parametrize("place, name, values", [
    ((), "parameters", (-1, 1.5, "7", None, [], NONE)), ((), "step", (-1, "x", NONE)),
    ((), "elapsed", (-0.5, [])),
    (("metrics",), "val_loss", ("3.5", None, [1.0], NONE, float("inf"))),
    (("metrics",), "top1", (0.5, None, [0.5, "x"], [NONE])), ((), "metrics", (None, 3, [1])),
    (("config",), "n_layer", (0, -1, 1.5, True, "2", 10**6)), (("config",), "eps", ("x", -1.0, NONE)),
    (("config",), "style", ("bert", 1)), (("config",), "tied", (1, None)), ((), "config", ([], 7, None))])
def test_numbers_that_make_no_sense(place, name, values, saved, capsys):
    """A traceback, or another model, from a number that nobody looked at where the file was read."""
    whole = open(saved[0], "rb").read()
    for value in values:
        tensors, meta = plumbing.checkpoint.load(saved[0], "", "")
        tensors = {k: v.clone() for k, v in tensors.items()}           # they lie in the file
        at = meta
        for key in place:
            at = at[key]
        at[name] = value
        save_file(tensors, saved[0], metadata={"meta": json.dumps(meta)})                # save refuses NaN
        refused(capsys, lambda: plumbing.checkpoint.load_model(saved[0]), saved[0])
        with open(saved[0], "wb") as f:
            f.write(whole)
    plumbing.checkpoint.load_model(saved[0])


def test_a_part_may_have_no_layers(saved, capsys):
    """The client's part of a target of which its drafter runs no layer: refused, as a backbone of none is."""
    rewrite(saved[0], lambda tensors, meta: meta["config"].update(n_layer=0))
    refused(capsys, lambda: plumbing.checkpoint.load_model(saved[0]), saved[0], "n_layer")

    def part(tensors, meta):
        meta |= {"kind": "client", "fingerprint": "whole"}
        for name in [name for name in tensors if name.startswith("blocks.")]:
            tensors.pop(name)
    rewrite(saved[0], part)
    target, _, _ = plumbing.checkpoint.load_model(saved[0], kinds=("client",))
    assert not target.blocks and target.fingerprint == "whole"


def test_another_tokenizer_in_the_file(saved, capsys):
    """A tokenizer that has lost a token: each id behind it means another word, the last one has no row."""
    for change in (lambda ranks: ranks.pop(), lambda ranks: ranks.append("eHl6eQ==")):
        whole = open(saved[0], "rb").read()
        rewrite(saved[0], lambda tensors, meta: change(meta["tokenizer"]["ranks"]))
        refused(capsys, lambda: plumbing.checkpoint.load_model(saved[0]), saved[0], "400 rows")
        with open(saved[0], "wb") as f:
            f.write(whole)


@pytest.mark.parametrize("broken", ["replace", "save_file", "half", "interrupt"])
def test_a_failing_save_leaves_the_old_file(saved, tokenizer, broken, monkeypatch, capsys):
    """A full disk or Ctrl-C while writing: the old checkpoint must stay whole, and no rubbish beside it."""
    path, target = saved
    before, files = open(path, "rb").read(), sorted(os.listdir(os.path.dirname(path)))

    def full(*args, **kwargs):
        if broken in ("half", "interrupt"):
            with open(args[1], "wb") as f:
                f.write(b"half")
        raise KeyboardInterrupt if broken == "interrupt" else OSError("No space left on device")

    with monkeypatch.context() as m:
        m.setattr(*(os, "replace", full) if broken == "replace" else (plumbing.checkpoint, "save_file", full))
        target.wte.weight.data.add_(1)
        call = lambda: plumbing.checkpoint.save_model(path, target, tokenizer)
        if broken == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                call()
        else:
            refused(capsys, call, path, "No space left")
    assert open(path, "rb").read() == before and sorted(os.listdir(os.path.dirname(path))) == files
    plumbing.checkpoint.load_model(path)


def test_save_into_a_folder_that_cannot_be_made(saved, capsys):
    """--out that names a file: a traceback after minutes of training."""
    path = os.path.join(saved[0], "medusa", "model.safetensors")       # below a file
    refused(capsys, lambda: plumbing.checkpoint.save(path, {"w": torch.zeros(2)}, {}), path)


def test_save_refuses_what_json_cannot_say(saved):
    """A NaN metric or a tensor in the metadata: a file that strict readers refuse; the old one stays."""
    before = open(saved[0], "rb").read()
    for wrong in (float("nan"), torch.tensor(1.0)):
        with pytest.raises((ValueError, TypeError)):
            plumbing.checkpoint.save(saved[0], {"w": torch.zeros(2)}, {"loss": wrong})
    assert open(saved[0], "rb").read() == before and len(os.listdir(os.path.dirname(saved[0]))) == 2


# --------------------------------------------------------------------------------------------------
# Where drafters of a pretrained backbone live

def test_a_folder_has_one_name(tmp_path, monkeypatch, capsys):
    """Catches drafters that are written over others', or outside OUT, as a folder is named in another way."""
    model = tmp_path / "models" / "tiny-chat"
    (model / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    of = lambda backbone: plumbing.checkpoint.out_folder("x", backbone)
    for where, names in {tmp_path: ["models/tiny-chat", "./models//tiny-chat/", "link", "link/", "~/link",
                                    "~/models/tiny-chat/.", str(model), "models/../models/tiny-chat"],
                         model: [".", "./", "./.", "../tiny-chat", "sub/.."], model / "sub": ["..", "../"],
                         tmp_path / "link": [".", "../tiny-chat"]}.items():
        monkeypatch.chdir(where)
        for name in names:
            assert of(name) == os.path.join("x", "tiny-chat"), name
    monkeypatch.chdir(tmp_path)
    for name, last in (("x.gguf", "x"), ("~/x.gguf", "x"), ("gpt2", "gpt2"), ("some/model", "model"),
                       ("smollm2", "smollm2"), ("some/model/", "model")):
        assert of(name) == os.path.join("x", last)
    assert of("") == "x"
    for name in ("/", "//", "no/..", "no/../.."):
        refused(capsys, lambda: of(name), "--backbone")


def test_differences():
    """
    A rule for what goes on with what that overlooks a value inside another, a name that one side lacks, or
    takes for different what a file only keeps in another form.
    """
    differences = plumbing.checkpoint.differences
    own = dict(groups=3, deep=dict(x=[1, 2]))
    new = dict(steps=12, name="a", own=own, nothing=None, pair=(1, 2), empty={})
    kept = json.loads(json.dumps(new)) | dict(versions="whatever else the file says")
    assert differences(kept, new) == ""
    assert differences({k: v for k, v in kept.items() if v}, new) == ""        # what is missing is None
    assert differences(kept, new | dict(steps=13)) == "steps (12, now 13)"
    other = new | dict(own=dict(groups=3, deep=dict(x=[1, 3])))
    assert differences(kept, other) == "own.deep.x ([1, 2], now [1, 3])"
    assert differences(kept, new | dict(own={})) == "own.groups (3, now None), own.deep.x ([1, 2], now None)"
    assert differences(kept, new | dict(data="ab")) == "data (None, now ab)"
    old = kept | dict(nothing=0, steps=None)
    assert differences(old, new) == "steps (None, now 12), nothing (0, now None)"
    for junk in (None, [], 3, "x", {"own": 3}, {"own": [1]}):                   # a file may say anything
        assert "own" in differences(junk, new) and "steps (None, now 12)" in differences(junk, new)
    many = {f"n{i}": i for i in range(20)}
    assert differences({}, many).endswith("n5 (None, now 5) and 14 more")
    assert "x" * 50 not in differences({}, {"x": "x" * 99})
