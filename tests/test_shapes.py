"""The shapes of trees that --tree can name."""
import itertools

import pytest

from plumbing.shapes import cartesian, chain, parse_tree
from test_tree import rank_paths
from tree import Shape, grow


def test_chain_and_cartesian():
    """A chain one node short; a product whose nodes hang under the wrong parent or repeat a rank."""
    assert chain(0) == Shape([-1], [0]) and chain(3) == Shape([-1, 0, 1, 2], [0, 0, 0, 0])
    assert cartesian(1, 1, 1) == chain(3) and cartesian() == chain(0)
    for widths in [(3,), (2, 3), (4, 2, 1), (2, 2, 2, 2)]:
        shape = cartesian(*widths)
        paths = rank_paths(shape)
        want = [p for d in range(len(widths) + 1) for p in itertools.product(*map(range, widths[:d]))]
        assert sorted(paths) == sorted(want) and len(set(paths)) == len(paths)
        assert all(up < i for i, up in enumerate(shape.parent))


def test_parse_tree():
    """A text that names no tree but is taken for one; a tree beyond what the drafter guesses."""
    assert parse_tree("best", 4, 100) is None
    assert parse_tree("chain", 4, 100) == chain(4) and parse_tree("chain", 4, 100, nodes=3) == chain(2)
    assert parse_tree("chain", 4, 100, nodes=1) == chain(0)
    assert parse_tree("4,2,1", 4, 100) == cartesian(4, 2, 1)
    assert parse_tree(" 3 , 2", 4, 100) == cartesian(3, 2)
    assert parse_tree("4,2", 4, 2) == cartesian(2, 2)                  # a vocabulary of two
    p = [[0.5, 0.2], [0.4, 0.3]]
    assert parse_tree("sparse", 2, 100, p, nodes=4) == grow(p, 4)
    assert parse_tree("sparse", 1, 1, p).parent == [-1, 0]
    for text in ("", "0", "-1", "4,0", "4,,2", "x", "2.5", "chain,2", "best ", "Best", "4;2", "5000", "70,70",
                 "nan"):
        with pytest.raises(ValueError, match="best, sparse, chain"):
            parse_tree(text, 4, 10**6)
    with pytest.raises(ValueError, match="5 deep"):
        parse_tree("1,1,1,1,1", 4, 100)
    with pytest.raises(ValueError, match="calibration"):
        parse_tree("sparse", 4, 100)
