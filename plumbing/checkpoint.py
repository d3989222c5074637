"""
Checkpoints: tensors in safetensors, all else as JSON in the same file's header (and beside it, to be read).
"""
import glob
import hashlib
import json
import math
import os
import platform
import struct
import subprocess
from dataclasses import asdict, fields

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
import torch

from model import GPT, GPTConfig
from plumbing.options import fail
from plumbing.text import Tokenizer


# what a file can raise that is damaged, of another version, or somebody else's
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError, ArithmeticError,
           OSError, SafetensorError)


def versions():
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=os.path.dirname(os.path.abspath(__file__))).stdout.strip()
    return {"torch": torch.__version__, "python": platform.python_version(), "commit": commit}


def out_folder(out, backbone):
    """
    Where drafters of --backbone live: OUT for our own; OUT/gpt2, OUT/smollm2, ... for a pretrained one. A
    folder has one name, its own, whether --backbone calls it that, or . or .. or ~, or by a link.
    """
    if not backbone:
        return out
    path = os.path.expanduser(backbone)
    path = os.path.realpath(path) if os.path.isdir(path) else os.path.normpath(path)
    name = os.path.basename(path).removesuffix(".gguf")
    if name in ("", ".", ".."):                                        # that would be OUT, or outside of it
        fail(f"--backbone {backbone} has no name under which its drafters could be kept")
    return os.path.join(out, name)


def fingerprint(tensors):
    """A short hash of named tensors: a drafter's checkpoint carries the one of its target."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(t.view(-1).view(torch.uint8).numpy())
    return h.hexdigest()[:16]


def differences(old, new):
    """
    What goes on with what, decided here alone: the names in new whose values are others in old, with both, as
    a text; "" where there are none. Dicts in dicts are compared name by name, what is missing is None.
    """
    def flat(x, at=""):
        for name, value in x.items():
            if isinstance(value, dict):
                yield from flat(value, f"{at}{name}.")
            else:
                yield at + name, value
    new = json.loads(json.dumps(new))                                  # as a file keeps it: lists, no tuples
    old = dict(flat({name: old.get(name) for name in new} if isinstance(old, dict) else {}))
    new = dict(flat(new))
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    told = [f"{name} ({old.get(name)!s:.40}, now {new.get(name)!s:.40})" for name in names[:6]]
    return ", ".join(told) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def save(path, tensors, meta, half=False):
    """
    Write tensors (in bfloat16 if half) and meta (plain JSON types) to path. Both are in the one safetensors
    file, which is renamed into place whole: a killed run leaves the old file. The .json beside it is a copy
    for people, never read back.
    """
    text = json.dumps(meta, allow_nan=False)
    tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    if half:
        tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    tmp = f"{path}.tmp{os.getpid()}"
    if os.path.exists(path) and not os.path.isfile(path):
        fail(f"cannot write {path}: it is there already, and is no file")
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        for left in glob.glob(f"{glob.escape(path)}.tmp*"):            # of a run that was killed
            os.remove(left)
        save_file(tensors, tmp, metadata={"meta": text})
        os.replace(tmp, path)
        with open(tmp, "w") as f:
            f.write(json.dumps({k: v for k, v in meta.items() if k != "tokenizer"}, indent=1) + "\n")
        os.replace(tmp, os.path.splitext(path)[0] + ".json")
    except (OSError, SafetensorError) as e:
        fail(f"cannot write {path}: {e}")
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def check_numbers(meta):
    """Raises ValueError for a number in meta that is none, so that nobody who reads one has to ask."""
    for name, kinds in (("parameters", (int,)), ("step", (int,)), ("elapsed", (int, float))):
        value = meta.get(name, 0)
        if type(value) not in kinds or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r:.40}")
    for name, value in meta.get("metrics", {}).items():
        values = value if name == "top1" else [value]                  # one for each position
        if type(values) is not list or not all(type(x) in (int, float) and math.isfinite(x) for x in values):
            raise ValueError(f"{name} is {value!r:.40}")


def read_config(Config, said, **least):
    """
    A config from what a file says. Raises TypeError or ValueError for what its options would refuse; least:
    fields that may be less than those.
    """
    config = Config(**said)
    for f in fields(Config):
        value, kinds = getattr(config, f.name), (int, float) if f.type is float else (f.type,)
        low, high, choices = (f.metadata.get(k) for k in ("low", "high", "choices"))
        if type(value) not in kinds or choices and value not in choices:
            raise ValueError(f"{f.name} is {value!r:.40}")
        low = least.get(f.name, low)
        if f.type in (int, float) and not low <= value <= high:
            raise ValueError(f"{f.name} is {value!r:.40}, not {low} to {high}")
    return config


def load(path, what, hint):
    """
    -> (tensors, meta) of a file written by save, see check_numbers. what and hint complete the message when
    there is none or it is broken.
    """
    if not os.path.isfile(path):
        fail(f"no {what} in {path}: {hint}")
    try:
        tensors = load_file(path)
        with open(path, "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        meta = dict(json.loads(header["__metadata__"]["meta"]))
        check_numbers(meta)
        return tensors, meta
    except DAMAGED as e:
        fail(f"{path} is broken or not ours ({type(e).__name__}: {e}): {hint}")


def load_weights(module, tensors, path, own=None):
    """Strict: missing, foreign or misshapen tensors are an error that names them."""
    own = {k: v.shape for k, v in (module.state_dict() if own is None else own).items()}
    given = {k: v.shape for k, v in tensors.items()}
    wrong = sorted(k for k in own.keys() | given.keys() if own.get(k) != given.get(k))
    if wrong:
        k = wrong[0]
        state = "is missing" if k not in given else "is foreign" if k not in own else "has another shape"
        fail(f"{path} does not fit: {k} {state} ({len(wrong)} tensors differ); train it again or name "
             "another checkpoint")
    module.load_state_dict(tensors, strict=False)                      # a tied lm_head is not in own
    return module


def model_tensors(model):
    """The state of a GPT, a tied lm_head stored once."""
    return {k: v for k, v in model.state_dict().items() if not (model.cfg.tied and k == "lm_head.weight")}


def save_model(path, model, tokenizer, half=False, **meta):
    """Write a backbone, in bfloat16 if half. Sets model.fingerprint to that of the weights in the file."""
    if model.scaled:
        fail("a model with scaled rotary frequencies cannot be saved")
    tensors = model_tensors(model)
    model.fingerprint = fingerprint({k: v.bfloat16().to(v.dtype) if half else v for k, v in tensors.items()})
    meta = {"kind": "backbone", "config": asdict(model.cfg), "tokenizer": tokenizer.to_dict(), **meta}
    save(path, tensors, meta, half)


def load_model(path, device="cpu", dtype=torch.float32, kinds=("backbone",)):
    """
    -> (GPT, Tokenizer, meta). Ends with a message if the file is missing, broken or none of kinds (client:
    moa.py split).
    """
    tensors, meta = load(path, "backbone", "run python train.py --method backbone")
    if meta.get("kind") not in kinds:
        fail(f"{path} holds {meta.get('kind', 'something else')}, not a backbone")
    try:
        least = {"n_layer": 0} if meta["kind"] == "client" else {}     # its drafter may run none of them
        cfg = read_config(GPTConfig, meta["config"], **least)
        tokenizer = Tokenizer.from_dict(meta["tokenizer"])
        if cfg.vocab_size != tokenizer.vocab_size:
            raise ValueError(f"{cfg.vocab_size} rows for {tokenizer.vocab_size} tokens")
        model = GPT(cfg)
    except DAMAGED as e:
        fail(f"{path} was written by another version ({type(e).__name__}: {e}): train it again")
    load_weights(model, tensors, path, model_tensors(model))
    whole = meta["kind"] == "backbone"                                 # a part has that of the whole
    model.fingerprint = fingerprint(model_tensors(model)) if whole else meta["fingerprint"]
    return model.to(device, dtype).eval().requires_grad_(False), tokenizer, meta
