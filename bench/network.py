r"""
What a network does to decoding, and what a drafter is worth when the network is gone.

    python bench/network.py                            # both tables, from the checkpoints in out/

Round trips: python moa.py serve on loopback, the network simulated by sleeping (sample.py's --rtt-ms,
--mbit). For each round trip, ms per token and server calls per 100 tokens: a plain API (every token a call),
MoA with trees, MoA with chains.

Cut off: held-out text, each drafter alone since its last verification: it sees the text's tokens, but no
state of the target after the last verified position. Top-1 accuracy and perplexity of the same tokens,
guessed 1, 8, ... tokens on (1: the drafter has seen the root). Heads that know K positions end there (n/a).
The last line is JSON.
"""
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import moa
import sample
from model import arg
from train import METHODS
from tree import Sampler
from plumbing.shapes import chain
from plumbing.budget import most_nodes
from plumbing.checkpoint import versions
from plumbing.client import Client, Remote
from plumbing.drafters import load_net, setup
from plumbing.options import command, fail, parse
from plumbing.text import Corpus, read_texts
from plumbing.wire import WIRE_DTYPES


@dataclass
class Options:
    """Decoding over simulated networks, and drafters that are cut off."""
    rtts: str = arg("5,20,50,100", "round trips in ms, with commas; empty = no such table")
    mbit: float = arg(0.0, "megabits per second each way (0 = no limit)")
    wire: str = arg("float16", "as for sample.py", choices=list(WIRE_DTYPES))
    chains: str = arg("2,4,8", "lengths of MoA's chain drafts")
    temperature: float = arg(0.0, "of the texts over the network", high=1e9)
    prompts: int = arg(8, "number of prompts", low=1)
    prompt_tokens: int = arg(64, "length of a prompt", low=1)
    new_tokens: int = arg(128, "tokens to write after each", low=1)
    distances: str = arg("1,8,32,128", "tokens since the last verification, with commas; empty = no table")
    texts: int = arg(8, "held-out texts for the second table", low=1)
    guessed: int = arg(64, "tokens guessed in each, its last ones", low=1)
    data: str = arg("python", "corpus, as for train.py")
    out: str = arg("out", "folder of checkpoints")


def numbers(text, name):
    if not re.fullmatch(r"(\d+,)*\d*", text):
        fail(f"--{name} must be whole numbers with commas, not {text!r}")
    return [int(n) for n in text.split(",") if n]


def round_trips(opt, rtts, lengths, target, tokenizer, net, prompts):
    """The first table -> its rows."""
    ways = {"plain API": None,
            "MoA trees": moa.Drafter(net, target, max_nodes=most_nodes("cpu"), depth=net.K)}
    ways |= {f"MoA chain {k}": moa.Drafter(net, target, shape=chain(k)) for k in lengths}
    command = [sys.executable, moa.__file__, "serve", "--port", "0", "--out", opt.out, "--device", "cpu"]
    server, rows = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), []
    try:
        url = re.search(r"http://\S+", server.stdout.readline() or fail("the server did not start"))[0]
        print(f"{'round trip':>10s}  {'':12s} {'ms/token':>8s} {'calls/100':>9s} {'B down/token':>12s}")
        for rtt in rtts:
            client = Client(Remote(server=url, wire=opt.wire, rtt_ms=rtt, mbit=opt.mbit, timeout=30.0))
            total = {name: [0.0, 0, 0, 0] for name in ways}            # seconds, tokens, calls, bytes down
            for i in range(-1, len(prompts)):                          # -1 is the warm-up
                for name, drafter in ways.items():
                    how = Sampler(opt.temperature), {tokenizer.eos}
                    steps = client.generate(target, prompts[i], opt.new_tokens, drafter, *how)
                    next(steps)                                        # the prompt, which does not count
                    start, calls, down = time.perf_counter(), client.stats.calls, client.stats.down
                    tokens = sum(map(len, steps))
                    seconds = time.perf_counter() - start
                    row = seconds, tokens, client.stats.calls - calls, client.stats.down - down
                    if i >= 0:
                        total[name] = [a + b for a, b in zip(total[name], row)]
            for name, (seconds, tokens, calls, down) in total.items():
                n = max(1, tokens)
                row = dict(rtt=rtt, way=name, ms=1e3 * seconds / n, calls=100 * calls / n, down=down / n)
                print("{rtt:7d} ms  {way:12s} {ms:8.1f} {calls:9.1f} {down:12.0f}".format(**row), flush=True)
                rows.append(row)
    finally:
        server.kill()
        server.wait()
    return rows


@torch.no_grad()
def cut_off(opt, distances, nets, target, corpus):
    """The second table -> its rows."""
    T = max(distances) + opt.guessed + 1
    if T > target.cfg.block_size or min(distances) < 1:
        fail("--distances must be 1 or more, and the largest, --guessed and 1 together at most "
             f"{target.cfg.block_size}")
    rows, texts = [], corpus.val_batches(1, T, opt.texts)
    print(f"\n{'cut off for':16s}" + "".join(f"{d:18d}" for d in distances))
    print(" " * 16 + " top-1  perplexity" * len(distances))
    for name, net in {"target": nets["moa"], **nets}.items():          # the target beside MoA's guesses
        module = METHODS["moa" if name == "target" else name]
        K, sums = net.K, {d: [0, 0.0, 0] for d in distances}           # right, nats, tokens
        net.K = max(distances) if module is moa else K                 # MoA goes on as long as it likes
        for x in texts:
            for k, (logits, truth, own) in enumerate(module.predictions(net, target, x), 1):
                if k in sums:
                    logits = own if name == "target" else logits
                    logits, truth = logits[-opt.guessed:], truth[-opt.guessed:]
                    nats = F.cross_entropy(logits, truth, reduction="sum").item()
                    row = (logits.argmax(-1) == truth).sum().item(), nats, len(truth)
                    sums[k] = [a + b for a, b in zip(sums[k], row)]
        net.K = K
        row = {d: dict(top1=right / n, perplexity=math.exp(nats / n), tokens=n) if n else None
               for d, (right, nats, n) in sums.items()}
        rows.append(dict(drafter=name, distances=row))
        cell = lambda r: f"{r['top1']:6.3f}{r['perplexity']:12.1f}" if r else f"{'n/a':>18s}"
        print(f"{name:16s}" + "".join(map(cell, row.values())))
    return rows


def main(argv=None):
    opt, = parse(Options, argv=argv)
    rtts, distances, lengths = (numbers(getattr(opt, name), name) for name in ("rtts", "distances", "chains"))
    common = dict(out=opt.out, device="cpu")
    target, tokenizer, drafter, _ = setup(sample.Options(method="moa", **common), METHODS)
    nets = {name: load_net(sample.Options(method=name, **common), target, METHODS[name]) for name in METHODS}
    corpus = Corpus(read_texts(opt.data)).tokenize(tokenizer)
    prompts = corpus.prompts(opt.prompts, opt.prompt_tokens)
    trips = round_trips(opt, rtts, lengths, target, tokenizer, drafter.net, prompts) if rtts else []
    alone = cut_off(opt, distances, nets, target, corpus) if distances else []
    print(json.dumps(dict(options=asdict(opt), versions=versions(), round_trips=trips, cut_off=alone)))


if __name__ == "__main__":
    command(main)
