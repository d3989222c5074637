"""
GGUF files: what they say of a model and transformers, which reads the rest, does not look at.
"""
import contextlib
import math
import re

import torch

READ = {                                                               # by transformers, or of no account
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon", "rope.freq_base", "rope.scaling.finetuned",
    "rope.scaling.original_context_length"}
SCALING = {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}            # see rope_divisor
WIDTHS = {"rope.dimension_count", "attention.key_length", "attention.value_length"}    # all of a head
NEUTRAL = dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.attn_factor"),
                        (0, 1)) | {"attention.causal": (True,)}        # values that change nothing


@contextlib.contextmanager
def opened(path):
    """A GGUF file's reader. Meanwhile transformers uses it too, which would read the file three times."""
    import gguf
    make, reader = gguf.GGUFReader, gguf.GGUFReader(path)
    gguf.GGUFReader = lambda *_: reader
    try:
        yield reader
    finally:
        gguf.GGUFReader = make


def said(reader):
    """What a file says of its architecture: name, without that of the architecture -> value."""
    start = reader.fields["general.architecture"].contents() + "."
    return {name.removeprefix(start): field.contents()
            for name, field in reader.fields.items() if name.startswith(start)}


def head_width(about):
    """D, by what is said."""
    return about.get("attention.key_length") or about["embedding_length"] // about["attention.head_count"]


def odd_fields(reader):
    """What a file says that our GPT does not compute: name -> value."""
    odd, about = {}, said(reader)
    for name, value in about.items():
        if name in WIDTHS:
            fine = value == head_width(about)
        elif name == "rope.scaling.type":
            fine = value in ("none", "linear")
        elif name == "attention.sliding_window":
            fine = not 0 < value < about["context_length"]
        else:
            fine = name in READ | SCALING or value in NEUTRAL.get(name, (0, "", []))
        if not fine:
            odd[name] = value
    return odd


def rope_divisor(reader):
    """
    What rotary frequencies are divided by, as llama.cpp does: (D/2,), or None for nothing. The tensor
    rope_freqs holds Llama 3's scaling, a factor is linear scaling. Raises ValueError if it makes no sense.
    """
    import gguf
    about = said(reader)
    divisor = torch.ones(head_width(about) // 2, dtype=torch.float64)
    if about.get("rope.scaling.type") != "none":
        divisor *= float(about.get("rope.scaling.factor") or about.get("rope.scale_linear") or 1)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            factors = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).double()
            if factors.shape != divisor.shape:
                raise ValueError(f"rope_freqs.weight has {factors.numel()} numbers, not {len(divisor)}")
            divisor *= factors
    if not all(math.isfinite(x) and x > 0 for x in divisor.tolist()):
        raise ValueError("its rotary frequencies are divided by what is no positive number")
    return None if (divisor == 1).all() else divisor


def unused(reader, names, n_layer):
    """Tensors of a file that are none of a model of transformers', which has names."""
    import gguf
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[reader.fields["general.architecture"].contents()], n_layer)
    parts = [re.fullmatch(r"(.*)(\.\w+)", name).groups() for name in names]
    known = {f"{table.get_name(name)}{kind}" for name, kind in parts} | {"rope_freqs.weight"}
    return sorted(tensor.name for tensor in reader.tensors if tensor.name not in known)
