r"""
Measure methods side by side: the same prompts, one after the other, so that a drifting machine slows all alike.

    python bench/run.py --methods plain,medusa,hf --temperatures 0,1

For each temperature: tau, tokens per second, the speed-up over plain decoding (median over the prompts of the ratio of
tokens per second, both runs of a prompt seconds apart), the share of a step that drafting takes, whether every text equals
plain decoding's, and how many plain texts end in a loop (loops flatter every drafter). hf is transformers' own generate
with the same weights. The last line is JSON.
"""
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import sample
from model import arg, fail, parse, to_hf
from train import METHODS, Corpus, read_texts, versions
from tree import Sampler, complete


@dataclass
class Options:
    """Compare methods on held-out prompts of the training corpus."""
    methods: str = arg("plain," + ",".join(METHODS), "which, with commas; plain is always there; hf = transformers' generate")
    temperatures: str = arg("0,1", "which, with commas")
    prompts: int = arg(16, "number of prompts")
    prompt_tokens: int = arg(64, "length of a prompt")
    new_tokens: int = arg(128, "tokens to write after each")
    data: str = arg("python", "corpus, as for train.py")
    tree: str = arg("best", "as for sample.py")
    nodes: int = arg(0, "as for sample.py")
    floor: float = arg(sample.Options.floor, "as for sample.py")
    share_noise: bool = arg(True, "as for sample.py")
    out: str = arg("out", "folder of checkpoints")
    backbone: str = arg("", "as for sample.py")
    device: str = arg("auto", "as for sample.py")
    dtype: str = arg("auto", "as for sample.py")


def loops(tokens):
    """Does the second half of a text repeat with a period of at most a quarter of the text?"""
    half = tokens[len(tokens) // 2:]
    return any(half[p:] == half[:-p] for p in range(1, len(tokens) // 4 + 1))


def hf_generate(hf, prompt, opt, temperature, seed):
    """transformers' generate -> (tokens after the prompt, tokens per second after the first)."""
    torch.manual_seed(seed)
    idx = torch.tensor([prompt], device=hf.device)
    sampling = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)
    start = time.perf_counter()
    out = hf.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=opt.new_tokens, **sampling)
    return out[0, len(prompt):].tolist(), opt.new_tokens / (time.perf_counter() - start)


def main(argv=None):
    opt, = parse(Options, argv=argv)
    names = [n for n in opt.methods.split(",") if n not in ("plain", "")]
    for n in names:
        if n not in METHODS and n != "hf":
            fail(f"--methods: unknown method {n}; there are plain, {', '.join(METHODS)}, hf")
    try:
        temperatures = [float(t) for t in opt.temperatures.split(",")]
    except ValueError:
        fail(f"--temperatures must be numbers with commas, not {opt.temperatures!r}")
    common = dict(tree=opt.tree, nodes=opt.nodes, floor=opt.floor, out=opt.out, backbone=opt.backbone, device=opt.device, dtype=opt.dtype)
    target, tokenizer, _, _ = sample.setup(sample.Options(method="plain", **common))
    drafters = {n: sample.load_drafter(sample.Options(method=n, **common), target) for n in ("plain", *names) if n != "hf"}
    hf = to_hf(target) if "hf" in names else None
    prompts = Corpus(read_texts(opt.data)).tokenize(tokenizer).prompts(opt.prompts, opt.prompt_tokens)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, {target.wte.weight.device}, "
          f"{target.wte.weight.dtype} | {opt.prompts} prompts x {opt.new_tokens} tokens | "
          + " ".join(f"{k} {v}" for k, v in versions().items()), flush=True)
    result = {"options": asdict(opt), "versions": versions(), "rows": []}
    for temperature in temperatures:
        runs, looping = {n: [] for n in ("plain", *names)}, 0
        for i in range(-1, len(prompts)):                              # -1 is the warm-up
            order = list(runs)[i % len(runs):] + list(runs)[:i % len(runs)]
            texts = {}
            for n in order:
                sampler = Sampler(temperature, seed=max(i, 0), share=opt.share_noise)
                if n == "hf":
                    texts[n], speed = hf_generate(hf, prompts[i], opt, temperature, i)
                    row = dict(speed=speed)
                else:
                    texts[n], s = complete(target, prompts[i], opt.new_tokens, drafters[n], sampler, tokenizer.stops)
                    work = sum(s.seconds[k] for k in ("draft", "verify", "rest"))
                    row = dict(speed=s.tokens_per_second, tokens=sum(s.accepted[1:]), steps=s.steps, nodes=s.nodes, work=work,
                               draft=s.seconds["draft"], verify=s.seconds["verify"])
                if i >= 0 and len(texts[n]) > 1:
                    runs[n].append(row | dict(prompt=i))
            for row in (runs[n][-1] for n in names if n != "hf" and runs[n]):
                row["same"] = all(texts[n] == texts["plain"] for n in texts if n != "hf")
            looping += i >= 0 and loops(texts["plain"])
        plain = {row["prompt"]: row["speed"] for row in runs["plain"]}
        print(f"\nT = {temperature:g}; {looping} of {len(prompts)} plain texts end in a loop")
        print(f"{'method':16s} {'tau':>5s} {'nodes':>5s} {'tokens/s':>8s} {'speed-up':>8s} {'draft':>6s} {'verify':>6s} {'same':>5s}")
        for n, rows in runs.items():
            ratio = statistics.median(row["speed"] / plain[row["prompt"]] for row in rows if row["prompt"] in plain)
            line = dict(method=n, temperature=temperature, speed=statistics.median(row["speed"] for row in rows), speedup=ratio)
            if n != "hf":
                total = {k: sum(row[k] for row in rows) for k in ("tokens", "steps", "nodes", "work", "draft", "verify")}
                line |= dict(tau=total["tokens"] / total["steps"], nodes=total["nodes"] / total["steps"], draft=total["draft"] / total["work"],
                             verify=total["verify"] / total["work"], same=all(row.get("same", True) for row in rows))
                print(f"{n:16s} {line['tau']:5.2f} {line['nodes']:5.1f} {line['speed']:8.0f} {ratio:8.2f} {line['draft']:6.0%} "
                      f"{line['verify']:6.0%} {'yes' if line['same'] else 'NO':>5s}", flush=True)
            else:
                print(f"{n:16s} {'':5s} {'':5s} {line['speed']:8.0f} {ratio:8.2f}", flush=True)
            result["rows"].append(line | dict(looping=looping))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
