"""
What goes over the network between server.py and client.py: JSON up, safetensors down.

POST /open begins a text, or goes on with it after whatever went wrong:

    session   32 hex digits, the client's name for this text
    backbone  fingerprint of the target
    drafter   fingerprint of the drafter; null: the client has none, and wants no states
    text      the tokens so far
    have      for how many of them the client has the states already
    max_len   how many tokens the text may grow to
    wire      how the states come down, one of WIRE_DTYPES
    temperature, top_k, top_p, seed

POST /verify has a tree of guesses judged:

    session   as above
    length    tokens of the text before the root: do both sides mean the same text?
    tokens    of the tree's nodes, the root first: it is chosen, but not yet part of the text
    parent    of each node the one that it continues, -1 for the root

Both are answered with path (the accepted nodes, root first), bonus (the token that the target puts
after them), and what the drafter is told of the tokens that became text: the states s (1, T, C), and
k and v (N, 1, G, T, D) of the target's last N layers. A request that cannot be served is answered
with an HTTP status and {"error": one line}.
"""
import json
import re
import struct

import safetensors.torch
import torch

from tree import Sampler, Tree


WIRE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


class Refused(Exception):
    """What the server says to a request that it will not serve: an HTTP status and a line."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Unreachable(Exception):
    """No answer, and no way to go on without one."""


# --------------------------------------------------------------------------------------------------
# Requests

def refuse_unless(ok, message, status=400):
    if not ok:
        raise Refused(status, message)


def is_int(x, low, end):
    """Is x a whole number, at least low and below end? JSON's true is none, though Python takes it for 1."""
    return type(x) is int and low <= x < end


def are_ints(x, low, end):
    """Is x a list of such numbers?"""
    return type(x) is list and all(is_int(i, low, end) for i in x)


def read_message(body):
    """The body of a request -> the message, a dict that has at least the name of a session."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        message = None
    refuse_unless(type(message) is dict, "the body must be a JSON object")
    name = message.get("session")
    refuse_unless(type(name) is str and re.fullmatch("[0-9a-f]{32}", name), "session must be 32 hex digits")
    return message


def read_open(message, target, net):
    """What an /open asks of a server that has this target and this drafter's net -> the text's sampler."""
    cfg, text, max_len = target.cfg, message.get("text"), message.get("max_len")
    refuse_unless(message.get("backbone") == target.fingerprint,
                  f"this server has the backbone {target.fingerprint}, not yours", 412)
    refuse_unless(message.get("drafter") in (None, net.fingerprint),
                  f"this server has the drafter {net.fingerprint}, not yours", 412)
    refuse_unless(message.get("wire") in list(WIRE_DTYPES), f"wire must be one of {', '.join(WIRE_DTYPES)}")
    refuse_unless(text and are_ints(text, 0, cfg.vocab_size),
                  f"text must be a list of tokens below {cfg.vocab_size}")
    refuse_unless(is_int(max_len, len(text) + 1, cfg.block_size + 1),
                  f"max_len must lie above the {len(text)} tokens of the text, "
                  f"and not above {cfg.block_size}")
    refuse_unless(is_int(message.get("have"), 0, len(text)), f"have must lie between 0 and {len(text) - 1}")
    numbers = {name: message.get(name) for name in ("temperature", "top_k", "top_p", "seed")}
    for name, x in numbers.items():
        refuse_unless(type(x) is int or type(x) is float and name in ("temperature", "top_p"),
                      "temperature and top_p must be numbers, top_k and seed whole ones")
    try:
        return Sampler(**numbers)
    except ValueError as e:
        raise Refused(400, str(e)) from None


def read_verify(message, length, max_len, vocab_size, max_nodes):
    """What a /verify asks about a text that has length tokens, of max_len at most -> its Tree."""
    tokens, parent = message.get("tokens"), message.get("parent")
    refuse_unless(is_int(message.get("length"), length, length + 1),
                  f"the text has {length} tokens here", 409)
    refuse_unless(are_ints(tokens, 0, vocab_size) and 0 < len(tokens) <= max_nodes,
                  f"tokens must be 1 to {max_nodes} tokens below {vocab_size}")
    is_tree = type(parent) is list and len(parent) == len(tokens) and is_int(parent[0], -1, 0)
    is_tree = is_tree and all(is_int(parent[i], 0, i) for i in range(1, len(parent)))
    refuse_unless(is_tree, "parent must be -1, then an earlier node for every token")
    tree = Tree(tokens, parent)
    refuse_unless(length + max(tree.depth) < max_len,
                  f"the tree reaches beyond the {max_len} tokens of this session")
    return tree


# --------------------------------------------------------------------------------------------------
# Answers

def pack(answer, tensors, wire):
    """
    A dict of plain JSON types and named tensors -> bytes.
    int8 has a scale for every vector (last dimension).
    """
    out, dtype = {}, WIRE_DTYPES[wire]
    for name, x in tensors.items():
        x = x.float()
        if wire == "int8":
            scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
            out[name + ".scale"] = scale.contiguous()
            x = (x / scale).round()
        else:
            x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        out[name] = x.to(dtype).contiguous()
    return safetensors.torch.save(out, {"answer": json.dumps(answer)})


def unpack(data, like):
    """What pack wrote -> the dict, and the tensors in the dtype and on the device of like."""
    n, = struct.unpack("<Q", data[:8])                                 # safetensors: n bytes of JSON first
    answer = json.loads(json.loads(data[8:8 + n])["__metadata__"]["answer"])
    raw = {name: x.to(like.device) for name, x in safetensors.torch.load(data).items()}
    tensors = {}
    for name, x in raw.items():
        if not name.endswith(".scale"):
            tensors[name] = (x.float() * raw.get(name + ".scale", 1.0)).to(like.dtype)
    return answer, tensors
