r"""
What a token costs as the context grows: plain and speculative decoding, time and memory.

    python bench/context.py --backbone smollm2 --method amphista

The prompt is training text of so many tokens; after it a few tokens are written by plain decoding, exact
as it is and not exact, and by the method, in turn. A step reads the cache once, so its cost should grow as
the cache does, in a straight line.
"""
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import sample
from model import arg
from train import METHODS
from tree import Sampler, complete
from plumbing.checkpoint import versions
from plumbing.drafters import setup
from plumbing.exact import INEXACT, inexact
from plumbing.options import DTYPES, command, fail, parse
from plumbing.text import Corpus, read_texts


@dataclass
class Options:
    """Cost of a token against the length of the context."""
    method: str = arg("amphista", "the drafter", choices=list(METHODS))
    backbone: str = arg("", "as for sample.py")
    lengths: str = arg("256,1024,4096,8192", "tokens of prompt and text together, with commas")
    new_tokens: int = arg(24, "tokens to write after each prompt", low=2)
    repeats: int = arg(3, "times that plain decoding and the method take turns; medians", low=1)
    nodes: str = arg("8", "as for sample.py")
    data: str = arg("python", "text of the prompts, as for train.py")
    out: str = arg("out", "folder of checkpoints, as for sample.py")
    device: str = arg("auto", "as for sample.py")
    dtype: str = arg("auto", "as for sample.py", choices=DTYPES)


def memory():
    """GiB in use: of the GPU if there is one, else the resident memory of this process (Linux), else None."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / 2**30
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    except OSError:
        return None


def main(argv=None):
    opt, = parse(Options, argv=argv)
    common = {k: getattr(opt, k) for k in ("method", "backbone", "nodes", "out", "device", "dtype")}
    target, tokenizer, drafter, _ = setup(sample.Options(**common), METHODS)
    try:
        lengths = [int(n) for n in opt.lengths.split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) <= opt.new_tokens or max(lengths) > target.cfg.block_size:
        fail(f"--lengths must be numbers above --new-tokens {opt.new_tokens}, up to the context of "
             f"{target.cfg.block_size}, with commas, not {opt.lengths}")
    text = Corpus(read_texts(opt.data)).tokenize(tokenizer).train[:max(lengths)].tolist()
    if len(text) < max(lengths):
        fail(f"--data {opt.data} has {len(text)} tokens: too few for --lengths {opt.lengths}")
    machine = platform.processor() or platform.machine()
    result = dict(options=asdict(opt), versions=versions(), machine=machine,
                  threads=torch.get_num_threads(), rows=[])
    print(f"{opt.method}, trees of {opt.nodes} | {target.told} | "
          + " ".join(f"{k} {v}" for k, v in result["versions"].items()))
    print(f"{'context':>8s} {'prompt, s':>9s} {'plain step, ms':>14s} {'method step, ms':>15s} "
          f"{'draft, ms':>9s} {'not exact, ms':>13s} {'speed-up':>8s} {'cache, MiB':>10s} "
          f"{'memory, GiB':>11s}")
    for length in lengths:
        seen = {d: [] for d in (None, *([INEXACT] if target.exact else []), drafter)}
        for _ in range(opt.repeats):
            for d in seen:
                prompt, who = text[:length - opt.new_tokens], drafter if d is drafter else None
                with inexact(target, d == INEXACT):
                    seen[d].append(complete(target, prompt, opt.new_tokens, who, Sampler())[1])
        middle = lambda d, figure: statistics.median(figure(stats) for stats in seen[d])
        step = lambda s: 1000 * (sum(s.seconds.values()) - s.seconds["prompt"]) / s.steps
        speed = lambda s: s.tokens_per_second
        c, size = target.cfg, target.wte.weight.element_size()
        row = dict(context=length, prompt=middle(None, lambda s: s.seconds["prompt"]),
                   plain=middle(None, step), step=middle(drafter, step),
                   inexact=middle(INEXACT if target.exact else None, step),
                   draft=middle(drafter, lambda s: 1000 * s.seconds["draft"] / s.steps),
                   speedup=middle(drafter, speed) / middle(None, speed),
                   cache=2 * c.n_layer * c.n_kv_head * c.head_dim * length * size / 2**20, memory=memory())
        print(f"{length:8d} {row['prompt']:9.2f} {row['plain']:14.2f} {row['step']:15.2f} "
              f"{row['draft']:9.2f} {row['inexact']:13.2f} {row['speedup']:8.2f} {row['cache']:10.1f} "
              f"{row['memory'] or 0:11.2f}", flush=True)
        result["rows"].append(row)
    print(json.dumps(result))


if __name__ == "__main__":
    command(main)
