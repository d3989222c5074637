r"""
How fast training is: the backbone's step and each drafter's against a plain loop over a GPT of the same size.

    python bench/training.py

The plain loop is what one writes first: a GPT-2 of the same layers, channels and vocabulary, cross-entropy,
AdamW, nothing else. All train on the same random tokens, in turn; reported: tokens a second (median of the
steps) and the peak memory so far.
"""
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from model import GPT, GPTConfig, arg
from plumbing.options import command, gpu, mixed, parse, pick_device
from train import METHODS, BackboneConfig, train_backbone
from plumbing.checkpoint import versions
from plumbing.trainer import count


@dataclass
class Options:
    """Tokens a second of every training loop, with the cpu preset's sizes."""
    steps: int = arg(12, "steps of each; the first two do not count", low=3)
    length: int = arg(256, "tokens in a sequence", low=8)
    batch_size: int = arg(4, "sequences in a step", low=1)
    device: str = arg("auto", "cpu, cuda, cuda:1, mps")


class Watch:
    """A run as train.py's, that only hands out random tokens and looks at the clock."""
    vocab = None

    def __init__(self, opt, V, device, kind):
        self.opt, self.device, self.V, self.seconds, self.done = opt, device, V, [], 0
        self.opt.compile = False
        self.amp = torch.autocast("cuda" if gpu(device) else "cpu", torch.bfloat16, mixed(device, kind))

    def steps(self, module, optimisers, evaluate):
        module.train()
        for self.done in range(self.opt.steps):
            x = torch.randint(self.V, (self.opt.batch_size, self.opt.length), device=self.device)
            start = time.perf_counter()
            with self.amp:
                yield x
            self.seconds.append(time.perf_counter() - start)

    def progress(self):
        return self.done / self.opt.steps

    def sync(self, module, loss):
        torch.nn.utils.clip_grad_norm_([p for p in module.parameters() if p.grad is not None], 1.0)
        loss.item()                                                    # waits for the device

    @property
    def tokens_per_second(self):
        return self.opt.batch_size * self.opt.length / statistics.median(self.seconds[2:])


def plain_loop(cfg, run):
    """GPT-2's architecture and AdamW, in the order in which one writes it."""
    shape = GPTConfig(style="gpt2", n_layer=cfg.n_layer, n_head=cfg.n_head, n_kv_head=cfg.n_head,
                      n_embd=cfg.n_embd, n_ffn=4 * cfg.n_embd, vocab_size=cfg.vocab_size,
                      block_size=run.opt.length)
    model = GPT(shape).to(run.device)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for x in run.steps(model, [opt], None):
        logits = model(x[:, :-1])[0]
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), x[:, 1:].reshape(-1))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        run.sync(model, loss)
        opt.step()
    return model


def peak():
    """
    MiB: of the GPU if there is one, else this process's largest resident memory so far; None where not
    known.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main(argv=None):
    opt, = parse(Options, argv=argv)
    device, cfg = pick_device(opt.device), BackboneConfig(block_size=opt.length)
    machine = platform.processor() or platform.machine()
    result = dict(options=asdict(opt), versions=versions(), machine=machine,
                  threads=torch.get_num_threads(), rows=[])
    print(f"{result['threads']} threads, {device} | {opt.batch_size} x {opt.length} tokens a step | "
          + " ".join(f"{k} {v}" for k, v in result["versions"].items()))
    torch.manual_seed(0)
    target = GPT(GPTConfig(**{k: getattr(cfg, k) for k in asdict(GPTConfig())}))
    target = target.to(device).eval().requires_grad_(False)
    loops = {"plain loop": lambda run: plain_loop(cfg, run), "backbone": lambda run: train_backbone(cfg, run)}
    loops |= {name: lambda run, m=m: m.train(m.Config(), target, run) for name, m in METHODS.items()}
    for name, loop in loops.items():
        run = Watch(opt, cfg.vocab_size, device, name if name in METHODS else "backbone")
        trained = count(loop(run))
        row = dict(loop=name, trained=trained, tokens_per_second=run.tokens_per_second, peak=peak())
        print(f"{name:16s} {trained:10,d} trained {row['tokens_per_second']:8.0f} tokens/s, "
              f"peak {row['peak'] or 0:6.0f} MiB", flush=True)
        result["rows"].append(row)
    print(json.dumps(result))


if __name__ == "__main__":
    command(main)
