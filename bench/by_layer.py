r"""
Do Hidden Transfer's pseudo states come closer to the real ones on their way up? (The paper has such a
figure.)

    python train.py --method hidden_transfer --layers 0        # made at the bottom: all layers can be seen
    python bench/by_layer.py --png by_layer.png

For state k at the input of each block: its mean cosine with the real state of the token that it stands for,
and how often the target's norm and lm_head, put right there, read the right token from it. Held-out text.
The last line is JSON.
"""
import json
import os
import sys
from dataclasses import dataclass

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import hidden_transfer
import sample
from model import arg
from train import METHODS
from plumbing.drafters import setup
from plumbing.options import command, fail, parse
from plumbing.text import Corpus, read_texts


@dataclass
class Options:
    """Similarity and accuracy of pseudo states by layer."""
    checkpoint: str = arg("", "a training of Hidden Transfer; empty = OUT/hidden_transfer")
    out: str = arg("out", "folder of checkpoints")
    data: str = arg("python", "corpus, as for train.py")
    batches: int = arg(8, "batches of 8 x 256 held-out tokens", low=1)
    png: str = arg("", "file for a chart; needs matplotlib")
    device: str = arg("auto", "as for sample.py")


def chart(path, cosine, top1):
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        fail("--png needs matplotlib: pip install matplotlib")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharex=True)
    for ax, table, label in zip(axes, (cosine, top1), ("cosine with the real state", "top-1 if read here")):
        for k, column in enumerate(table.T, 1):
            ax.plot(range(len(column)), column, marker="o", label=f"state {k}")
        ax.set(xlabel="blocks passed", ylabel=label, xticks=range(len(table)), ylim=(0, None))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv=None):
    opt, = parse(Options, argv=argv)
    which = sample.Options(method="hidden_transfer", checkpoint=opt.checkpoint, out=opt.out,
                           device=opt.device, dtype="float32")
    target, tokenizer, drafter, _ = setup(which, METHODS)
    corpus = Corpus(read_texts(opt.data)).tokenize(tokenizer)
    batches = corpus.val_batches(8, min(256, target.cfg.block_size), opt.batches)
    tables = [hidden_transfer.by_layer(drafter.net, target, x.to(target.wte.weight.device)) for x in batches]
    cosine, top1 = (torch.stack(t).mean(0) for t in zip(*tables))      # (L + 1, K)
    states = range(1, drafter.net.K + 1)
    heads = "".join(f"{f'cosine {k}':>10s}" for k in states) + "".join(f"{f'top-1 {k}':>9s}" for k in states)
    print(f"{'blocks passed':14s}{heads}")
    for l in range(len(cosine)):
        print(f"{l:<14d}" + "".join(f"{c:10.3f}" for c in cosine[l]) + "".join(f"{a:9.3f}" for a in top1[l]))
    if opt.png:
        chart(opt.png, cosine, top1)
    clean = lambda t: [[None if v != v else round(v, 4) for v in row] for row in t.tolist()]
    print(json.dumps({"cosine": clean(cosine), "top1": clean(top1)}))


if __name__ == "__main__":
    command(main)
