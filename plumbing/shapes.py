"""
--tree: the shapes of trees that an option can name.
"""
import itertools
import math

from tree import Shape, grow


def chain(k):
    """One path of k guesses."""
    return Shape(list(range(-1, k)), [0] * (k + 1))


def cartesian(*s):
    """Every combination of the top s[0] guesses of position 1, top s[1] of position 2, ... (Medusa 2.1.2)"""
    parent, rank, level = [-1], [0], [0]
    for width in s:
        start = len(parent)
        for up in level:
            parent += [up] * width
            rank += range(width)
        level = range(start, len(parent))
    return Shape(parent, rank)


def parse_tree(text, K, V, accuracy=None, nodes=16):
    """The --tree option -> Shape, or None for best-first. Raises ValueError for a text that names no tree."""
    if text == "best":
        return None
    if text == "sparse":
        if accuracy is None:
            raise ValueError("--tree sparse needs the drafter's calibration, which its checkpoint lacks")
        falling = [list(itertools.accumulate(row, min)) for row in accuracy]       # small samples may rise
        return grow(falling, nodes).cut(K, V)
    if text == "chain":
        return chain(min(K, nodes - 1))
    try:
        widths = [int(w) for w in text.split(",")]
    except ValueError:
        widths = [0]
    if min(widths) < 1 or math.prod(widths) > 4096:
        raise ValueError(f"--tree must be best, sparse, chain, or widths such as 4,2,1, not {text!r}")
    if len(widths) > K:
        raise ValueError(f"--tree {text} is {len(widths)} deep, but the drafter guesses {K} positions")
    return cartesian(*widths).cut(K, V)
