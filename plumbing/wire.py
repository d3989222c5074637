"""
What goes over the network between server.py and client.py: JSON up, safetensors down.
"""
import json
import struct

import safetensors.torch
import torch


WIRES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


class Refused(Exception):
    """What the server says to a request that it will not serve: an HTTP status and a line."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Unreachable(Exception):
    """No answer, and no way to go on without one."""


def check(ok, message, status=400):
    if not ok:
        raise Refused(status, message)


def whole(x, low, high):
    """Is x a list of ints in low .. high - 1? JSON's true is none."""
    return type(x) is list and all(type(i) is int and low <= i < high for i in x)


def pack(answer, tensors, wire):
    """A dict of plain JSON types and named tensors -> bytes. int8 has a scale for every vector (last dimension)."""
    out, dtype = {}, WIRES[wire]
    for name, x in tensors.items():
        x = x.float()
        if wire == "int8":
            scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
            out[name + ".scale"], x = scale.contiguous(), (x / scale).round()
        else:
            x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        out[name] = x.to(dtype).contiguous()
    return safetensors.torch.save(out, {"answer": json.dumps(answer)})


def unpack(data, like):
    """What pack wrote -> the dict, and the tensors in the dtype and on the device of like."""
    n, = struct.unpack("<Q", data[:8])
    answer = json.loads(json.loads(data[8:8 + n])["__metadata__"]["answer"])
    raw = {name: x.to(like.device) for name, x in safetensors.torch.load(data).items()}
    return answer, {name: (x.float() * raw.get(name + ".scale", 1.0)).to(like.dtype) for name, x in raw.items()
                    if not name.endswith(".scale")}
