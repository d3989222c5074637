r"""
Training curves from the log.jsonl of each: python train.py --plot, or python plumbing/plot.py --out out,
which trains nothing.

Backbone: loss in bits a character. Drafters: how often the best guess for each draft position is right. Over
minutes of training.
"""
import glob
import os
import sys
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from model import arg
from plumbing.log import read_log
from plumbing.options import OUT, command, fail, parse

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    fail("training curves need matplotlib: pip install matplotlib")


@dataclass
class Options:
    """Draw the training curves of a folder of checkpoints to OUT/training.png."""
    out: str = arg(OUT, "folder of checkpoints and logs")


def read_logs(out):
    """OUT/medusa/log.jsonl, ... -> {kind: its records}, the backbone first."""
    paths = glob.glob(os.path.join(glob.escape(out), "*", "log.jsonl"))
    kinds = sorted((os.path.basename(os.path.dirname(path)) for path in paths),
                   key=lambda kind: (kind != "backbone", kind))
    logs = {kind: read_log(os.path.join(out, kind, "log.jsonl")) for kind in kinds}
    return {kind: log for kind, log in logs.items() if log}


def backbone_panel(ax, minutes, log):
    ax.plot(minutes, [r["bits_per_char"] for r in log], "o-", ms=4, color="black", label="held-out")
    bits = [r["train_loss"] * r["bits_per_char"] / r["val_loss"] for r in log]         # in the same unit
    ax.plot(minutes, bits, "--", color="grey", label="training")       # the mean since the point before
    ax.legend(frameon=False)


def drafter_panel(ax, minutes, log, K):
    """A line for each draft position -> the lines. K: most positions of all drafters, for equal colours."""
    lines = []
    for k, curve in enumerate(zip(*(r["top1"] for r in log))):
        colour = plt.cm.viridis(0.9 * (k / K)**0.6)
        mark = "osD^v<>P"[k % 8]                                       # readable without colour
        lines += ax.plot(minutes, curve, mark + "-", ms=4, color=colour, label=f"{k + 1}")
    return lines


def draw(out):
    """
    The logs in OUT -> OUT/training.png, a panel a training. Ends with a message if there is none or it cannot
    be written.
    """
    logs = read_logs(out)
    if not logs:
        fail(f"there is no log of a training in {out}: run python train.py --out {out}")
    rows, columns = -(-len(logs) // 3), min(3, len(logs))
    fig, axes = plt.subplots(rows, columns, figsize=(1 + 3.6 * columns, 3 * rows), squeeze=False,
                             layout="constrained")
    K = max(len(log[-1].get("top1", ())) for log in logs.values())
    legend, first = [], None                                           # longest lines; first drafter's panel
    for ax, (kind, log) in zip(axes.flat, logs.items()):
        minutes, end = [r["seconds"] / 60 for r in log], log[-1]
        if "top1" in end:
            lines = drafter_panel(ax, minutes, log, K)
            legend = max(legend, lines, key=len)
            first = first or ax
            ax.sharey(first)
        else:
            backbone_panel(ax, minutes, log)
        tokens = f", {end['tokens'] / 1e6:.2f}M tokens" if "tokens" in end else ""
        ax.set(xlabel=f"minutes ({end['step']:,} steps{tokens})", xlim=(0, None),
               ylabel="top-1 on held-out text" if "top1" in end else "bits a character")
        ax.set_title(kind.replace("_", " "), loc="left", fontweight="bold")
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.3)
    for ax in axes.flat[len(logs):]:
        ax.remove()
    if first:
        first.set_ylim(0, None)
        fig.legend(handles=legend[:8], title="draft\nposition", loc="outside right upper", frameon=False)
    path = os.path.join(out, "training.png")
    try:
        fig.savefig(path, dpi=120)
    except OSError as e:
        fail(f"cannot write {path}: {e}")
    print(f"curves: {path}")


if __name__ == "__main__":
    command(lambda: draw(parse(Options)[0].out))
