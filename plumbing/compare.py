r"""
Methods side by side: what a text cost, whether it is plain decoding's, how much faster it came, and why not.
"""
import math
import statistics
import sys

import torch

from plumbing.exact import INEXACT


# --------------------------------------------------------------------------------------------------
# What a text cost

def histogram(accepted):
    """Tokens per target forward -> a line such as '1 x34  2 x21  3 x8'."""
    return "  ".join(f"{n} x{accepted.count(n)}" for n in range(1, max(accepted) + 1))


def summary(name, run, block_size, note=""):
    """Lines for the terminal; note comes after the first."""
    stats = run.stats
    why = {"eos": "end of text", "budget": "--max-new-tokens",
           "context": f"the context of {block_size} tokens is full"}
    out = (f"{name}: {len(run.tokens)} tokens in {len(stats.accepted)} target forwards, tau {stats.tau:.2f}, "
           f"{run.speed:.0f} tokens/s, stopped by {why[stats.stop]}{note}\n"
           f"tokens per forward: {histogram(stats.accepted)}")
    if hasattr(stats, "calls"):                                        # a server verified it
        each = sum(stats.accepted) / max(1, stats.calls)
        out += (f"\nserver: {stats.calls} calls, {each:.2f} tokens each, {stats.up:,} bytes up and "
                f"{stats.down:,} down, {stats.waiting:.2f} s waiting; {len(stats.offline)} tokens written "
                "without it")
    return out


PARTS = dict(draft="drafting", verify="the target's forward", choice="choosing tokens",
             rest="walking the tree and keeping the cache")


def milliseconds(stats):
    """What the mean step after the prompt spent on each part -> {part: ms}."""
    return {part: 1000 * stats.seconds[part] / max(1, stats.steps) for part in PARTS}


def why_slower(name, stats, plain):
    """A sentence for a method that is slower than plain decoding: which part of its step costs too much."""
    mine, base = milliseconds(stats), milliseconds(plain)
    part = max(PARTS, key=lambda part: mine[part] - base[part])
    nodes = f" over {stats.nodes / max(1, stats.steps):.1f} nodes" if part == "verify" else ""
    whole, plainly = sum(mine.values()), sum(base.values())
    return (f"{name} is slower than plain decoding here: its step of {whole:.1f} ms brings {stats.tau:.2f} "
            f"tokens, for which plain decoding needs {stats.tau * plainly:.1f} ms. Too much of it goes into "
            f"{PARTS[part]}{nodes}: {mine[part]:.1f} ms, where plain decoding's step has {base[part]:.1f}.")


# --------------------------------------------------------------------------------------------------
# Is it the same text?

@torch.inference_mode()
def gap(target, prompt, text, sampler):
    """How far the two best scores for the token after prompt and text lie apart, in words."""
    tokens, weight = prompt + text, target.wte.weight
    hidden = target.hidden(torch.tensor([tokens], device=weight.device))[0]
    logits = target.logits(hidden[-1:])
    first, second = sampler.scores(logits, [len(tokens)])[0].topk(2).values.tolist()
    rounding = torch.finfo(weight.dtype).eps * logits.abs().max().item()
    near = first - second < 4 * rounding + 1e-3                        # what it is made of is rounded too
    why = "a near tie" if near else "more than rounding does"
    return f"the two best scores there are {first - second:.2g} apart, {why} ({str(weight.dtype)[6:]})"


def verdict(plain, tokens, explain):
    """Is a text plain decoding's? In words. explain(at): more words, of the first token that differs."""
    if plain == tokens:
        return "text identical"
    both = min(len(plain), len(tokens))
    at = next((i for i in range(both) if plain[i] != tokens[i]), both)
    words = f"text DIFFERENT from token {at} on: {plain[at:at + 1]} against {tokens[at:at + 1]}"
    return f"{words}; {explain(at)}" if at < both else words


# --------------------------------------------------------------------------------------------------
# In turn

def ratio(run, plain):
    """How many times as fast as plain decoding; NaN where it has no speed, a text of one token."""
    return run.speed / plain.speed if plain.speed else math.nan


def compare(decode, names, runs, explain, lossy=False, repeats=3):
    """
    Plain decoding and methods in turn, and a table: medians of tokens/s and of the ratio to plain decoding's
    in the same round, tau and target forwards of that round, and whether all texts are the same; then a
    sentence for each method that is slower.

    decode(name) -> Run; runs: {name: Run} of what was decoded already, its warm-up; explain: see verdict;
    lossy: the texts of methods may differ. Returns {name: Run}, all of one round.
    """
    first = {name: runs.get(name) or decode(name) for name in ("plain", *names)}
    rounds = [{name: decode(name) for name in first} for _ in range(repeats)]
    plain, slower = first["plain"].tokens, []
    print(f"\n{'method':<15}  tau  target forwards  tokens/s  speed-up"
          f"   (medians of {repeats} rounds, in turn)", file=sys.stderr)
    for name, run in first.items():
        pairs = [(ratio(r[name], r["plain"]), r) for r in rounds]
        middle, r = sorted(pairs, key=lambda pair: pair[0])[repeats // 2]
        speed = statistics.median(r[name].speed for r in rounds)
        stats = r[name].stats
        line = f"{name:<15} {stats.tau:4.2f} {len(stats.accepted):16d} {speed:9.0f} {middle:9.2f}"
        if name in names and name != INEXACT:                          # of that one only the speed is asked
            texts = [run.tokens, *(r[name].tokens for r in rounds)]
            worst = next((tokens for tokens in texts if tokens != plain), plain)
            line += f"   {'text lossy: differs by design' if lossy else verdict(plain, worst, explain)}"
        print(line, file=sys.stderr)
        if middle < 1 and stats.nodes > stats.steps:                   # plain decoding has one node a step
            slower.append(why_slower(name, stats, r["plain"].stats))
    for sentence in slower:
        print(f"\n{sentence}", file=sys.stderr)
    return sorted(rounds, key=lambda r: r["plain"].speed)[repeats // 2]
