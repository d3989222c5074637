r"""
What typical acceptance (Medusa 2.3.1) buys, and what it does to the text, for some epsilon, beside exact
sampling.

    python bench/typical.py --method medusa --temperature 0.7 --epsilons 0.01,0.09,0.25

Each row decodes the same held-out prompts: greedy and exact sampling by the walk (lossless; one seed a
prompt), then typical acceptance with delta = sqrt(epsilon). tau: tokens per target forward. log p: mean
log-probability of the text's tokens under the target as it is (temperature 1), in nats: exact sampling has
what the temperature implies, typical acceptance leans to greedy. greedy: share of tokens that are the
target's argmax. loops: texts that end in one. The last line is JSON.
"""
import json
import math
import os
import sys
from dataclasses import asdict, dataclass

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import sample
from medusa import Typical
from model import arg
from report import loops
from train import METHODS
from tree import Sampler, complete
from plumbing.checkpoint import versions
from plumbing.drafters import setup
from plumbing.options import DTYPES, command, fail, parse
from plumbing.text import Corpus, read_texts


@dataclass
class Options:
    """Typical acceptance against exact sampling on held-out prompts of the training corpus."""
    method: str = arg("medusa", "the drafter", choices=list(METHODS))
    epsilons: str = arg("0.01,0.09,0.25", "which, with commas; delta is the square root of each")
    temperature: float = arg(0.7, "of exact sampling and of typical acceptance", low=1e-6)
    prompts: int = arg(16, "number of prompts", low=1)
    prompt_tokens: int = arg(64, "length of a prompt", low=1)
    new_tokens: int = arg(128, "tokens to write after each", low=2)
    data: str = arg("python", "corpus, as for train.py")
    nodes: str = arg("auto", "as for sample.py")
    out: str = arg("out", "folder of checkpoints, as for sample.py")
    device: str = arg("auto", "as for sample.py")
    dtype: str = arg("auto", "as for sample.py", choices=DTYPES)


@torch.no_grad()
def score(target, prompt, text):
    """
    Log-probability of each token of text after prompt, and whether it is the target's argmax: two
    lists.
    """
    idx = torch.tensor([prompt + text], device=target.wte.weight.device)
    logp = target(idx[:, :-1])[0][0, len(prompt) - 1:].float().log_softmax(-1)           # (len(text), V)
    return logp[range(len(text)), text].tolist(), (logp.argmax(-1).cpu() == torch.tensor(text)).tolist()


def main(argv=None):
    opt, = parse(Options, argv=argv)
    try:
        epsilons = [float(e) for e in opt.epsilons.split(",")]
        typical = [(e, Typical(Sampler(opt.temperature), e, math.sqrt(max(e, 0.0)))) for e in epsilons]
    except ValueError as e:
        fail(f"--epsilons must be numbers between 0 and 1, with commas, not {opt.epsilons!r} ({e})")
    which = sample.Options(accept="typical", method=opt.method, nodes=opt.nodes, out=opt.out,
                           device=opt.device, dtype=opt.dtype)
    target, tokenizer, drafter, _ = setup(which, METHODS)
    if opt.prompt_tokens >= target.cfg.block_size:
        fail(f"--prompt-tokens {opt.prompt_tokens} leaves no room in a context of {target.cfg.block_size}")
    prompts = Corpus(read_texts(opt.data)).tokenize(tokenizer).prompts(opt.prompts, opt.prompt_tokens)
    print(f"{opt.method}, {opt.prompts} prompts x {opt.new_tokens} tokens | "
          + " ".join(f"{k} {v}" for k, v in versions().items()))
    rows = [("exact, T = 0", lambda i: Sampler(), None),
            (f"exact, T = {opt.temperature:g}", lambda i: Sampler(opt.temperature, seed=i), None)]
    rows += [(f"LOSSY, epsilon {e:g}", lambda i: Sampler(), rule) for e, rule in typical]
    result = {"options": asdict(opt), "versions": versions(), "rows": []}
    print(f"{'acceptance':24s} {'tau':>5s} {'log p':>7s} {'greedy':>7s} {'loops':>6s}")
    for name, sampler, verify in rows:
        tokens, steps, logp, greedy, looping = 0, 0, [], [], 0
        for i, prompt in enumerate(prompts):
            how = sampler(i), tokenizer.stops, verify
            text, stats = complete(target, prompt, opt.new_tokens, drafter, *how)
            a, b = score(target, prompt, text)
            logp += a
            greedy += b
            tokens += sum(stats.accepted[1:])
            steps += stats.steps
            looping += loops(text)
        row = dict(name=name, tau=tokens / max(1, steps), logp=sum(logp) / len(logp),
                   greedy=sum(greedy) / len(greedy), loops=looping)
        figures = f"{row['tau']:5.2f} {row['logp']:7.3f} {row['greedy']:7.1%} {looping:6d}"
        print(f"{name:24s} {figures}", flush=True)
        result["rows"].append(row)
    print(json.dumps(result))


if __name__ == "__main__":
    command(main)
