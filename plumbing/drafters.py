"""
Checkpoints -> a target and its drafters, ready to decode. Who calls hands over the methods' modules; opt is a
command line, such as sample.Options.
"""
import inspect
import os
import sys
from dataclasses import asdict, make_dataclass, replace

import torch

from model import arg
from tree import Sampler, grow
from plumbing.budget import NodeBudget, accuracy, how_many, most_nodes
from plumbing.checkpoint import (DAMAGED, fingerprint, load, load_model, load_weights, out_folder,
                                 read_config)
from plumbing.client import keep_last_layers
from plumbing.exact import make_exact
from plumbing.graphs import use_graphs
from plumbing.fast import for_decoding, pick_threads
from plumbing.options import OUT, fail, gpu, pick_device, pick_dtype
from plumbing.shapes import parse_tree
from plumbing.pretrained import load_pretrained

WEIGHTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "weights")


# --------------------------------------------------------------------------------------------------
# Where things are

def checkpoints(opt):
    """The folder of the checkpoints: OUT (or OUT/gpt2, ...), or weights/ while the default OUT has none."""
    own, ours = out_folder(opt.out, opt.backbone), out_folder(WEIGHTS, opt.backbone)
    wanted = opt.method if opt.backbone else "backbone"
    missing = opt.out == OUT and not os.path.exists(os.path.join(own, wanted))
    return ours if missing and os.path.exists(os.path.join(ours, wanted)) else own


def same_place(opt):
    """The options that make a command of train.py find what this one looks for."""
    words = f" --backbone {opt.backbone}" if opt.backbone else ""
    return words + (f" --out {opt.out}" if opt.out != OUT else "")


def own_options(methods):
    """
    A dataclass of the options that only some drafters have: what a module's OPTIONS says of its Drafter's own
    keyword arguments (whole numbers, 0 or more; -1 = the drafter's default). methods: name -> module.
    """
    told = {}
    for name, module in methods.items():
        for option, help in getattr(module, "OPTIONS", {}).items():
            told.setdefault(option, []).append(f"{name}: {help}")
    made = [(option, int, arg(-1, "; ".join(helps) + " (-1 = its default)", low=-1, high=4096))
            for option, helps in told.items()]
    Own = make_dataclass("Own", made)
    Own.__doc__ = "the options of single methods"
    return Own


def given(own):
    """Own options -> those that were given, by name."""
    return {option: value for option, value in asdict(own).items() if value >= 0}


# --------------------------------------------------------------------------------------------------
# Target and drafters

def load_target(opt, client=False):
    """-> target and tokenizer of a command line. client: a part of the target (moa.py split) will do."""
    device = pick_device(opt.device)
    dtype, why = pick_dtype(opt.dtype, device)
    if opt.backbone:
        target, tokenizer, _ = load_pretrained(opt.backbone, device, dtype)
    else:
        path = os.path.join(checkpoints(opt), "backbone", "model.safetensors")
        if not os.path.exists(path):
            method = "" if opt.method in ("plain", "all") else f" --method {opt.method}"
            fail(f"no backbone in {path}: run python train.py{method}{same_place(opt)}")
        kinds = ("backbone", "client") if client else ("backbone",)
        target, tokenizer, _ = load_model(path, device, dtype, kinds)
    target = for_decoding(target, opt.compile)
    if not client:                                                     # which verifies nothing
        pick_threads(target, opt.threads)
        wishes = {"--compile": opt.compile, "--graphs": opt.graphs, "--no-exact": not opt.exact}
        make_exact(target, most_nodes(device), next((option for option, wish in wishes.items() if wish), ""))
        if opt.graphs:
            use_graphs(target, most_nodes(device))
    target.told = (f"{device}, {str(dtype).removeprefix('torch.')} ({why}), {torch.get_num_threads()} "
                   f"threads, {target.exactness}")
    return target, tokenizer


def draft_vocabulary(tensors, target):
    """The ids of a draft vocabulary, (N,) tokens of the target, or None for all. Raises ValueError."""
    ids = tensors.get("head.ids")
    if ids is None:
        return None
    whole = ids.dtype == torch.int64 and ids.dim() == 1 and len(ids) and len(ids.unique()) == len(ids)
    if not whole or ids.min() < 0 or ids.max() >= target.cfg.vocab_size:
        raise ValueError("head.ids are no tokens of this backbone")
    return ids


def load_net(opt, target, method, hint=None, absent=fail):
    """
    What --method trained (method is its module), ready to decode: from --checkpoint or OUT. Carries what its
    checkpoint says: fingerprint and meta. Where there is none for this target, absent (fail, or whoever
    collects reasons) is told and None returned.
    """
    path = opt.checkpoint or os.path.join(checkpoints(opt), opt.method)
    if not path.endswith(".safetensors"):
        path = os.path.join(path, "model.safetensors")
    hint = (hint or f"run python train.py --method {opt.method}") + same_place(opt)
    if not os.path.isfile(path):
        return absent(f"no {opt.method} checkpoint in {path}: {hint}")
    tensors, meta = load(path, f"{opt.method} checkpoint", hint)
    if meta.get("kind") != opt.method:
        fail(f"{path} holds {meta.get('kind', 'something else')}, not {opt.method}: name another "
             "--checkpoint or --method")
    if meta.get("backbone") != target.fingerprint:
        if "original" in meta:                                         # Medusa-2: its backbone lies beside it
            hint = f"use --out {os.path.dirname(os.path.dirname(path))}"
        return absent(f"{path} was trained for another backbone ({meta.get('backbone')}, not "
                      f"{target.fingerprint}): {hint}")
    try:
        cfg, ids = read_config(method.Config, meta["config"]), draft_vocabulary(tensors, target)
        net = method.Net(cfg, target) if ids is None else method.Net(cfg, target, ids)
        net.accuracy = accuracy(meta["calibration"], net.K) if meta.get("calibration") else None
    except DAMAGED as e:
        fail(f"{path} was written by another version of {opt.method}.py, or is damaged ({e}): {hint}")
    net = for_decoding(load_weights(net, tensors, path).to(target.wte.weight), opt.compile)
    net.fingerprint, net.meta, net.path, net.ids = fingerprint(tensors), {"metrics": {}, **meta}, path, ids
    return net


def load_drafter(opt, target, method, hint=None, absent=fail, own=None):
    """
    The drafter of --method (method is its module), with the tree that opt asks for; see load_net.
    own: its own options.
    """
    net = load_net(opt, target, method, hint, absent)
    if net is None:
        return None
    ids, hits, usual = net.ids, net.accuracy, how_many(opt.nodes, target)
    auto = opt.nodes == "auto" and opt.tree == "best" and hits
    auto = auto and opt.accept == "exact"                              # else the text depends on it
    max_nodes = 4 * usual if auto and not gpu(str(target.wte.weight.device)) else usual
    own = opt.own if own is None else own
    foreign = own.keys() - inspect.signature(method.Drafter).parameters.keys()
    if foreign:
        fail(f"--{' and --'.join(sorted(foreign))} cannot be used with --method {opt.method}")
    V = target.cfg.vocab_size if ids is None else len(ids)
    try:
        shape = parse_tree(opt.tree, net.K, V, hits, usual)
        drafter = method.Drafter(net, target, shape, max_nodes, opt.floor, **own)
    except ValueError as e:
        fail(str(e))
    if auto:
        hits = hits[:getattr(drafter, "depth", net.K)]
        drafter.node_budget = NodeBudget(grow(hits, max_nodes).value[1:], max_nodes, usual)
    return drafter


def load_drafters(opt, target, methods):
    """--method all -> {name: drafter}, and a line for each that has no checkpoint for this target."""
    if opt.checkpoint:
        fail("--checkpoint is one drafter's: name its --method, or with --out the folder of all")
    skipped, found = [], {}
    for name, method in methods.items():
        known = inspect.signature(method.Drafter).parameters
        own = {option: value for option, value in opt.own.items() if option in known}
        drafter = load_drafter(replace(opt, method=name), target, method, absent=skipped.append, own=own)
        if drafter:
            found[name] = drafter
    if not found:
        fail(f"no drafter to compare, such as {skipped[0]}; or all of them: run python train.py"
             f"{same_place(opt)}")
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    return found


def make_sampler(opt):
    """How tokens are chosen, as the command line says it."""
    try:
        return Sampler(opt.temperature, opt.top_k, opt.top_p, opt.seed, opt.share_noise)
    except ValueError as e:
        fail(str(e))


def setup(opt, methods, client=False):
    """
    -> target, tokenizer, drafter (for all: a dict; for plain: None), sampler of a command line.

    methods    name -> module
    client     of the target no more than a client has
    """
    if opt.accept == "typical" and opt.method == "plain":
        fail("--accept typical is about drafts, and --method plain has none: name a drafter, or leave "
             "--accept out")
    sampler, drafter = make_sampler(opt), None
    target, tokenizer = load_target(opt, client)
    if opt.method == "all":
        drafter = load_drafters(opt, target, methods)
    elif opt.method != "plain":
        drafter = load_drafter(opt, target, methods[opt.method])
    if client:
        keep_last_layers(target, drafter.net.cfg.tli if drafter else 0)
    return target, tokenizer, drafter, sampler
