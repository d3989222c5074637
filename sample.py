r"""
Decode with a method and watch it work.

    python sample.py --method medusa --prompt "def main():" --compare
    python sample.py --method all --show tree

Text goes to stdout as it comes, figures to stderr. What comes out is the target's own text, whatever the method: --compare
proves it on the spot by running plain decoding beside it, and --method all is every drafter beside it. The one exception must
be asked for and is named wherever it is used: --accept typical, Medusa's lossy acceptance.

    python sample.py --method moa --server http://127.0.0.1:8765

has the drafter here and the target on the other side of python moa.py serve; --method plain asks it for every token.
Tokens written while the server was away are dim.
"""
import codecs
import inspect
import math
import os
import statistics
import sys
from dataclasses import dataclass, replace

import torch

from bench.picture import draw, watch
from bench.remote import Client, Refused, Remote, Unreachable, keep_last
from model import (DAMAGED, DTYPES, arg, command, fail, fingerprint, for_decoding, load, load_model, load_pretrained, load_weights,
                   out_folder, parse, pick_device)
from train import METHODS, accuracy, gpu, most_nodes
from tree import Budget, Sampler, complete, generate, grow, parse_tree

PROMPT = 'import os\nimport sys\n\n\ndef read_lines(path):\n    """Return the lines of a file as a list of strings."""\n'


@dataclass
class Options:
    """Generate text with a target and a drafter."""
    method: str = arg("medusa", "the drafter; plain = none; all = compare all there are", choices=["plain", *METHODS, "all"])
    backbone: str = arg("", "the target: empty = OUT/backbone; a hub id (gpt2, a Llama), a folder, a GGUF file, or smollm2")
    prompt: str = arg(PROMPT, "the text to continue; - reads it from stdin")
    chat: bool = arg(True, "put the prompt into the model's chat template, if it has one")
    max_new_tokens: int = arg(200, "tokens to write at most", low=1)
    temperature: float = arg(0.0, "0 is greedy; 1 samples from the model's own distribution")
    top_k: int = arg(0, "sample among the k likeliest tokens only (0 = off)")
    top_p: float = arg(1.0, "sample among the likeliest tokens that hold this much probability (1 = off)")
    seed: int = arg(0, "same seed, same text, with any method", high=2**64 - 1)
    accept: str = arg("exact", "typical = Medusa's LOSSY acceptance: faster, but no sample of the model's distribution",
                      choices=["exact", "typical"])
    epsilon: float = arg(0.09, "typical accepts a token of probability p if p > min(epsilon, delta * exp(-entropy))")
    delta: float = arg(0.3, "see epsilon; the paper sets it to the square root of epsilon")
    tree: str = arg("best", "best = grown anew each step; sparse = Medusa's, from calibration; chain; or widths such as 4,2,1")
    nodes: str = arg("auto", "most nodes of a tree, root included; auto = as many as pay, by the time a forward takes here and "
                     "by what is accepted (best-first trees; others: 8 on a CPU, 64 on a GPU)")
    floor: float = arg(0.0, "a node enters a best-first tree only if its draft probability is above this")
    groups: int = arg(-1, "Hidden Transfer: nodes that carry pseudo states in the verifying forward (-1 = its default)", low=-1)
    depth: int = arg(0, "MoA: levels of the tree (0 = its default)", high=4096)
    breadth: int = arg(0, "MoA: nodes run in a level, and children that each proposes (0 = as trained)", high=4096)
    share_noise: bool = arg(True, "let the drafter rank its guesses with the target's own noise (matters when temperature > 0)")
    out: str = arg("out", "folder of checkpoints, as train.py wrote it; drafters of --backbone gpt2 are in OUT/gpt2")
    checkpoint: str = arg("", "another training of the drafter: a folder or a .safetensors file")
    compare: bool = arg(False, "run plain decoding too: is the text identical, and how much faster is the method?")
    show: str = arg("none", "tokens = accepted drafts green, the target's own plain (on a terminal); tree = a step's token tree",
                    choices=["none", "tokens", "tree"])
    compile: bool = arg(False, "torch.compile the forwards: faster, after a minute or more of compiling")
    device: str = arg("auto", "cpu, cuda, cuda:1, mps")
    dtype: str = arg("auto", "of the weights; auto = float32 on a CPU, bfloat16 on a GPU", choices=DTYPES)


WEIGHTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "weights")


def checkpoints(opt):
    """The folder of the checkpoints: OUT (or OUT/gpt2, ...), or weights/ as long as the default OUT has none of its own."""
    own, ours = out_folder(opt.out, opt.backbone), out_folder(WEIGHTS, opt.backbone)
    wanted = opt.method if opt.backbone else "backbone"
    missing = opt.out == Options.out and not os.path.exists(os.path.join(own, wanted))
    return ours if missing and os.path.exists(os.path.join(ours, wanted)) else own


def how_many(nodes, target):
    """--nodes -> a number; for auto the device's default."""
    if nodes == "auto":
        return most_nodes(str(target.wte.weight.device))
    try:
        n = int(nodes)
    except ValueError:
        n = 0
    if not 1 <= n <= 4096:
        fail(f"--nodes must be auto or a number from 1 to 4096, not {nodes}")
    return n


def same_place(opt):
    """The options that make a command of train.py find what this one looks for."""
    return "".join(f" --{k} {v}" for k in ("backbone", "out") if (v := getattr(opt, k)) != getattr(Options, k))


def load_drafters(opt, target):
    """--method all -> {name: drafter}, and a line for each that has no checkpoint for this target; one there must be."""
    if opt.checkpoint:
        fail("--checkpoint is one drafter's: name its --method, or with --out the folder of all")
    skipped = []
    found = {name: load_drafter(replace(opt, method=name), target, skipped=skipped) for name in METHODS}
    if len(skipped) == len(found):
        fail(f"no drafter to compare, such as {skipped[0]}; or all of them: run python train.py{same_place(opt)}")
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    return {name: d for name, d in found.items() if d}


def load_drafter(opt, target, method=None, hint=None, skipped=None):
    """
    The drafter of --method (a module; default: METHODS' own) from its checkpoint, or None for plain decoding. skipped, of
    load_drafters: takes the reason if there is no checkpoint for this target; and options of other methods are no mistake.
    """
    if opt.method in ("plain", "all"):
        return load_drafters(opt, target) if opt.method == "all" else None
    absent = fail if skipped is None else skipped.append
    method, path = method or METHODS[opt.method], opt.checkpoint or os.path.join(checkpoints(opt), opt.method)
    if not path.endswith(".safetensors"):
        path = os.path.join(path, "model.safetensors")
    hint = (hint or f"run python train.py --method {opt.method}") + same_place(opt)
    if not os.path.isfile(path):
        return absent(f"no {opt.method} checkpoint in {path}: {hint}")
    tensors, meta = load(path, f"{opt.method} checkpoint", hint)
    if meta.get("kind") != opt.method:
        fail(f"{path} holds {meta.get('kind', 'something else')}, not {opt.method}: name another --checkpoint or --method")
    if meta.get("backbone") != target.fingerprint:
        if "original" in meta:                                         # Medusa-2: the backbone it was trained with lies beside it
            hint = f"use --out {os.path.dirname(os.path.dirname(path))}"
        return absent(f"{path} was trained for another backbone ({meta.get('backbone')}, not {target.fingerprint}): {hint}")
    try:
        ids, cfg = tensors.get("head.ids"), method.Config(**meta["config"])            # ids: of a draft vocabulary
        net = method.Net(cfg, target) if ids is None else method.Net(cfg, target, ids)
        hits = meta.get("calibration") and accuracy(meta["calibration"])
    except DAMAGED as e:
        fail(f"{path} was written by another version of {opt.method}.py ({e}): {hint}")
    net = for_decoding(load_weights(net, tensors, path).to(target.wte.weight), opt.compile)
    net.fingerprint, net.meta = fingerprint(tensors), meta
    nodes = how_many(opt.nodes, target)
    auto = opt.nodes == "auto" and opt.tree == "best" and opt.accept == "exact" and hits       # typical: the text would depend on it
    most = 4 * nodes if auto and not gpu(str(target.wte.weight.device)) else nodes
    own = {k: v for k in ("groups", "depth", "breadth") if (v := getattr(opt, k)) != getattr(Options, k)
           and (skipped is None or k in inspect.signature(method.Drafter).parameters)}
    try:
        shape = parse_tree(opt.tree, net.K, target.cfg.vocab_size if ids is None else len(ids), hits, nodes)
    except ValueError as e:
        fail(str(e))
    except DAMAGED as e:
        fail(f"{path} has no calibration that makes sense ({e}): {hint}")
    try:
        drafter = method.Drafter(net, target, shape=shape, nodes=most, floor=opt.floor, **own)
        if auto:
            drafter.nodes = nodes                                      # for who has no use for a budget: a client
            drafter.budget = Budget(grow(hits[:getattr(drafter, "depth", net.K)], most).value[1:], most)
        return drafter
    except TypeError:
        fail(f"--{' and --'.join(own)} cannot be used with --method {opt.method}")
    except ValueError as e:
        fail(str(e))


def make_sampler(opt, exact=False):
    typical = (opt.epsilon, opt.delta) if opt.accept == "typical" and not exact else None
    return Sampler(opt.temperature, opt.top_k, opt.top_p, opt.seed, opt.share_noise, typical)


def setup(opt, remote=False):
    """-> target, tokenizer, drafter (for all: a dict), sampler for a command line. remote: of the target just what a client has."""
    if opt.accept == "typical" and opt.method == "plain":
        fail("--accept typical is about drafts, and --method plain has none: name a drafter, or leave --accept out")
    device = pick_device(opt.device)
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if opt.dtype == "auto" else opt.dtype
    try:
        sampler = make_sampler(opt)
    except ValueError as e:
        fail(str(e))
    if opt.backbone:
        target, tokenizer, _ = load_pretrained(opt.backbone, device, getattr(torch, dtype))
        return for_decoding(target, opt.compile), tokenizer, load_drafter(opt, target), sampler
    path = os.path.join(checkpoints(opt), "backbone", "model.safetensors")
    if not os.path.exists(path):
        fail(f"no backbone in {path}: run python train.py" + f" --method {opt.method}" * (opt.method in METHODS) + same_place(opt))
    target, tokenizer, _ = load_model(path, device, getattr(torch, dtype), ("backbone", "client") if remote else ("backbone",))
    drafter = load_drafter(opt, for_decoding(target, opt.compile))
    if remote:
        keep_last(target, drafter.net.cfg.tli if drafter else 0)
    return target, tokenizer, drafter, sampler


def warm_up(target, prompt, drafters, opt):
    """--compile: what is decoded first waits for it, so a few tokens by every method that no one sees."""
    print("compiling: a minute or more the first time, less with what torch has kept on disk ...", file=sys.stderr)
    for drafter in (None, *drafters.values()) if 0 < len(prompt) < target.cfg.block_size else ():
        complete(target, prompt, min(64, opt.max_new_tokens), drafter, make_sampler(opt))


def stream(opt, target, tokenizer, prompt, drafter, sampler, client=None):
    """Print the text as it comes, whole characters only. Returns its tokens and Stats."""
    colour, dim = opt.show == "tokens" and sys.stdout.isatty(), client and sys.stdout.isatty()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    decode = client.generate if client else generate
    steps, tokens = decode(target, prompt, opt.max_new_tokens, drafter, sampler, tokenizer.stops), []
    try:
        while True:
            out = next(steps)
            tokens += out
            for i, token in enumerate(out):
                text = utf8.decode(tokenizer.decode_bytes([token]))
                accepted = colour and i < len(out) - 1                 # the last token of a step is the target's own
                style = "\033[2m" if dim and client.alone else "\033[32m" if accepted else ""
                sys.stdout.write(f"{style}{text}\033[0m" if style else text)
            sys.stdout.flush()
    except StopIteration as stop:
        sys.stdout.write(utf8.decode(b"", final=True) + "\n")
        sys.stdout.flush()
        return tokens, stop.value


def histogram(accepted):
    """Tokens per target forward -> a line such as '1 x34  2 x21  3 x8'."""
    return "  ".join(f"{n} x{accepted.count(n)}" for n in range(1, max(accepted) + 1))


def compare(target, prompt, drafters, runs, opt, tokenizer, repeats=3):
    """
    Plain (exact) decoding and drafters (by name) in turn, and a table: tau, target forwards, medians of tokens/s and of its
    ratio to plain decoding's in the same round, and whether the text is plain decoding's. runs: tokens and Stats of what was
    decoded already, its warm-up. Returns those of all.
    """
    def once(name):
        d = drafters.get(name)
        return complete(target, prompt, opt.max_new_tokens, d, make_sampler(opt, exact=not d), tokenizer.stops)
    runs = {name: runs.get(name) or once(name) for name in ("plain", *drafters)}
    rounds = [[once(name)[1].tokens_per_second for name in runs] for _ in range(repeats)]
    plain = runs["plain"][0]
    print(f"\n{'method':<15}  tau  target forwards  tokens/s  speed-up   (medians of {repeats} rounds, in turn)", file=sys.stderr)
    for (name, (tokens, stats)), *speeds in zip(runs.items(), *rounds):
        ratio = statistics.median(v / r[0] if r[0] else math.nan for v, r in zip(speeds, rounds))      # 0: one token has no speed
        at = next((i for i, (a, b) in enumerate(zip(plain, tokens)) if a != b), min(len(plain), len(tokens)))
        same = "identical" if plain == tokens else f"DIFFERENT from token {at} on: {plain[at:at + 1]} against {tokens[at:at + 1]}"
        if opt.accept == "typical" and opt.temperature:
            same = "lossy: differs by design"
        print(f"{name:<15} {stats.tau:4.2f} {len(stats.accepted):16d} {statistics.median(speeds):9.0f} {ratio:9.2f}"
              + (f"   text {same}" if name in drafters else ""), file=sys.stderr)
    return runs


def main(argv=None):
    opt, remote = parse(Options, Remote, argv=argv)
    if remote.server and (opt.compare or opt.show == "tree" or opt.method not in ("moa", "plain")):
        fail("--server works with --method moa or plain, and without --compare and --show tree: the target is not here")
    if (opt.show, opt.method) in (("tree", "plain"), ("tokens", "all")):
        fail(f"--show {opt.show} shows what one drafter does: name its --method" + (", or all" if opt.show == "tree" else ""))
    try:
        client = Client(remote) if remote.server else None
    except ValueError as e:
        fail(str(e))
    target, tokenizer, drafter, sampler = setup(opt, bool(client))
    drafters = {opt.method: drafter} if drafter else {}
    if opt.method == "all":                                            # the text is plain decoding's; the others' are compared with it
        drafters, drafter, sampler, opt = drafter, None, make_sampler(opt, exact=True), replace(opt, method="plain", compare=True)
    try:
        text = sys.stdin.read() if opt.prompt == "-" else opt.prompt
        text.encode()
    except UnicodeError:
        fail("--prompt -: what came from stdin is not UTF-8 text")
    chat = opt.chat and tokenizer.has_chat
    prompt = tokenizer.chat([text]) if chat else tokenizer.start + tokenizer.encode(text)
    if opt.compile and not client:                                     # a client has not the whole target
        warm_up(target, prompt, drafters, opt)
    trees = {name: watch(d) for name, d in drafters.items()} if opt.show == "tree" else {}         # none of the warm-up's
    sys.stdout.write(text + "\n\n" if chat else text)
    sys.stdout.flush()
    try:
        tokens, stats = stream(opt, target, tokenizer, prompt, drafter, sampler, client)
    except (ValueError, Refused, Unreachable) as e:
        print()
        fail(str(e))
    why = {"eos": "end of text", "budget": "--max-new-tokens", "context": f"the context of {target.cfg.block_size} tokens is full"}
    print(f"\n{opt.method}: {len(tokens)} tokens in {len(stats.accepted)} target forwards, tau {stats.tau:.2f}, "
          f"{stats.tokens_per_second:.0f} tokens/s, stopped by {why[stats.stop]}"
          + ("; LOSSY: typical acceptance" + (", which at temperature 0 is exact" if not opt.temperature else "")
             if sampler.typical else ""), file=sys.stderr)
    print(f"tokens per forward: {histogram(stats.accepted)}", file=sys.stderr)
    if client:
        print(f"server: {stats.calls} calls, {sum(stats.accepted) / max(1, stats.calls):.2f} tokens each, {stats.up:,} bytes up and "
              f"{stats.down:,} down, {stats.waiting:.2f} s waiting; {len(stats.offline)} tokens written without it", file=sys.stderr)
    runs = {opt.method: (tokens, stats)}
    if opt.compare and drafters:
        runs = compare(target, prompt, drafters, runs, opt, tokenizer)
    room = min(opt.max_new_tokens, target.cfg.block_size - len(prompt))
    for name, kept in trees.items():
        label = name + " (LOSSY: typical acceptance)" * (opt.accept == "typical" and opt.temperature > 0)
        print("\n" + draw(label, tokenizer, prompt, *runs[name], kept, room, sys.stderr), file=sys.stderr)


if __name__ == "__main__":
    command(main)
