"""The command line: what its texts mean, and what they are refused for."""
import dataclasses

import pytest

from model import GPTConfig, arg
from plumbing.options import parse, pick_device


def refused(capsys, call, *words):
    """call ends with status 2 and exactly one line on stderr, which holds words."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        call()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    for word in words:
        assert word in err, err


@dataclasses.dataclass
class Example:
    """An example."""
    n_heads: int = arg(4, "heads, 100% of them", low=1)
    rate: float = arg(0.5, "a float")
    share_head: bool = arg(True, "a switch")
    style: str = arg("x", "a choice", choices=["x", "y"])
    name: str = arg("none", "any text")


@dataclasses.dataclass
class Other:
    """Another."""
    lr: float = arg(0.1, "a rate")


def test_parse_reads_every_type():
    """
    Catches `1` refused where a float is meant, switches that cannot be turned off,
    and defaults that win over flags.
    """
    one, = parse(Example, argv="--n-heads 3 --rate 1 --no-share-head --style y --name=-z".split())
    assert one == Example(3, 1.0, False, "y", "-z") and type(one.rate) is float and type(one.n_heads) is int
    assert parse(Example, argv=[]) == [Example()]
    assert parse(Example, argv=["--rate", "2"], defaults=dict(rate=9.0, n_heads=7)) == [Example(7, 2.0)]
    # low itself is allowed
    assert parse(Example, argv=["--rate", "0", "--n-heads", "1"]) == [Example(1, 0.0)]
    a, b = parse(GPTConfig, Other, argv="--n-head 8 --n-kv-head 8 --n-embd 32 --lr 1".split())
    assert (a.n_head, a.head_dim) == (8, 4) and b == Other(1.0)


@pytest.mark.parametrize("argv, word", [
    ("--unknown 3", "--unknown"), ("--n-head 3", "--n-head"), ("--rat 1", "--rat"), ("--share", "--share"),
    ("stray", "stray"), ("--n-heads 0", "--n-heads"), ("--n-heads -3", "--n-heads"),
    ("--n-heads 1.5", "--n-heads"), ("--n-heads x", "--n-heads"), ("--n-heads", "--n-heads"),
    ("--rate -0.1", "--rate"), ("--rate=-1e-3", "--rate"), ("--rate nan", "--rate"), ("--rate inf", "--rate"),
    ("--rate -inf", "--rate"), ("--rate ,", "--rate"), ("--style z", "--style"), ("--share-head yes", "yes"),
])
def test_parse_refuses_in_one_line(argv, word, capsys):
    """Catches abbreviations that are guessed, numbers that make no sense, and usage texts of many lines."""
    refused(capsys, lambda: parse(Example, argv=argv.split()), word)


def test_parse_names_what_a_config_refuses(capsys):
    """Catches a ValueError of a configuration that reaches the user as a traceback."""
    refused(capsys, lambda: parse(GPTConfig, argv=["--n-kv-head", "3"]), "4 query heads", "3")
    refused(capsys, lambda: parse(GPTConfig, argv=["--head-dim", "3"]), "even")
    with pytest.raises(SystemExit) as e:
        parse(Example, argv=["--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0 and "100% of them" in out and "--no-share-head" in out


def test_a_device_that_is_not_there(capsys):
    """Catches a traceback of the library for a device that is misspelt or missing."""
    for name in ("cuda:99", "nonsense"):
        refused(capsys, lambda: pick_device(name), name)
    assert pick_device("cpu") == "cpu"
    assert pick_device() in ("cpu", "cuda", "mps")
