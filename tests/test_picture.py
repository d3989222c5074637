"""plumbing/picture.py: what is kept of a run, tokens as text, and a step's tree."""
import ast
import re

import pytest

import sample
import train
from plumbing import picture
from plumbing.drafters import setup
from plumbing.picture import Run, follow, pieces, visible
from tree import Sampler, Stats, Tree, complete, generate


class Words:
    """A tokenizer of whole words for pictures."""
    stops = {9}
    words = [b"zero", b"one", b"two ", b"\n", b"\xe2\x82\xac", b"\xe2", b"six", b"", b"eight", b""]

    def decode_bytes(self, ids):
        return b"".join(self.words[i] for i in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode(errors="replace")


class Stream:
    def __init__(self, encoding, tty=False):
        self.encoding, self.isatty = encoding, lambda: tty


PICTURE = """\
name, forward 3 of 4, the longest accepted path: 6 nodes, 2 accepted (✓), one token of the target's own (+)
after 'eightzeroone'
'two '           draft P(token)  P(path)
├─ ✓ '\\n'                 0.500    0.500
│  ├─   b'\\xe2'           0.500    0.250
│  ├─ ✓ '€'               0.250    0.125
│  │  └─ + <7>
│  └─   <end>             0.100    0.050
└─   'six'                0.250    0.250"""


def hand_made():
    """-> a run of four forwards, and its trees."""
    wide = Tree([2, 3, 6, 5, 4, 9], [-1, 0, 0, 1, 1, 1], [1.0, 0.5, 0.25, 0.25, 0.125, 0.05])
    deep = Tree([7, 0, 1, 0], [-1, 0, 1, 2], [1.0, 0.9, 0.8, 0.4])
    trees = [Tree([1], [-1], [1.0]), wide, deep]
    return Run([0, 1, 2, 3, 4, 7, 0, 1, 0], Stats(accepted=[2, 1, 3, 3]), [], trees), wide, deep


def test_a_hand_made_picture():
    """
    Catches branches that hang on the wrong node, another step than the rule's, and what a terminal or a
    pipe cannot show.
    """
    run, wide, deep = hand_made()

    def show(stream, trees=run.trees, room=99):
        deepest = lambda n: room - n - 1
        kept = Run(run.tokens, run.stats, [], trees)
        return picture.draw("name", Words(), [8], kept, deepest, stream)

    assert show(Stream("utf-8")) == PICTURE
    plain = show(Stream("latin-1"))
    assert plain.isascii() and plain.count("* ") == 2 and plain.count("\n") == PICTURE.count("\n")
    assert "|- * '\\n'" in plain and "|  |- * '\\u20ac'" in plain and "|  |  `- + <7>" in plain
    assert "`-   'six'" in plain
    colours = show(Stream("utf-8", tty=True))
    assert re.sub("\033.*?m", "", colours) == PICTURE
    assert colours.count("\033[32m") == 2 and colours.count("\033[2m") == 3
    deep.value[2] = 0.1                                                # now its path is the one less likely
    at_once = show(Stream("utf-8"), room=9)                            # the last node could not be emitted
    assert "forward 4 of 4" in at_once and ": 3 nodes, 2 accepted" in at_once
    assert "after 'ghtzeroonetwo \\n€'" not in at_once
    assert at_once.splitlines()[-1].strip() == "└─ + 'zero'"
    cut = Tree([2, 3, 4, 7], [-1, 0, 1, 2], [1.0, 0.5, 0.05, 0.04])    # the target's own token was drafted
    drawn = show(Stream("utf-8"), [run.trees[0], cut, deep])           # it is drawn once
    assert re.search(r"└─ \+ <7> +0.800    0.040$", drawn)


PIECE = r"""('(?:[^'\\]|\\.)*'|"[^"]*"|b'[^']*'|<end>|<\d+>)"""


@pytest.mark.parametrize("tree", ["best", "chain", "2,2"])
@pytest.mark.parametrize("method", train.METHODS)
def test_the_picture_is_a_step_of_the_text(method, tree, trained, capsys):
    """
    Catches a tree beside the wrong step, marks that are not what the text says, and a picture that changes
    the text.
    """
    def run(*argv):
        sample.main([str(a) for a in argv])
        return capsys.readouterr()

    opt = sample.Options(method=method, out=trained, device="cpu", tree=tree, nodes="8")
    target, tokenizer, drafter, _ = setup(opt, train.METHODS)
    prompt = tokenizer.start + tokenizer.encode("the cat ")
    for T in (0, 1):
        args = ["--out", trained, "--max-new-tokens", 40, "--prompt", "the cat ", "--temperature", T,
                "--method", method, "--tree", tree, "--nodes", 8]
        got = run(*args, "--show", "tree")
        assert got.out == run(*args).out
        text, stats = complete(target, prompt, 40, drafter, Sampler(T), tokenizer.stops)
        head, after, root, *nodes = got.err[got.err.index(f"\n{method}, forward ") + 1:].splitlines()
        found = re.search(r"forward (\d+) of .*: (\d+) nodes, (\d+) accepted", head)
        step, n, accepted = map(int, found.groups())
        assert accepted + 1 == stats.accepted[step - 1] == max(stats.accepted[1:])
        row = r"([│ ]*)[├└]─ ([✓+ ]) " + PIECE + r"(?: +([\d.]+) +([\d.]+))?"
        lines = [re.fullmatch(row, line).groups() for line in nodes]
        marked = [line for line in lines if line[1] != " "]
        assert len(lines) in (n - 1, n)
        assert [len(line[0]) // 3 for line in marked] == list(range(accepted + 1))
        assert all(0 <= float(path) <= float(token) <= 1 for *_, token, path in lines if path)
        at = sum(stats.accepted[:step - 1])
        assert ast.literal_eval(after[6:]) == tokenizer.decode(prompt + text[:at - 1])[-40:]
        said = [re.match(PIECE, root)[0]] + [line[2] for line in marked]
        said = [ast.literal_eval(x) if x[0] != "<" else b"" for x in said]
        said = b"".join(x if isinstance(x, bytes) else x.encode() for x in said)
        assert said == tokenizer.decode_bytes(text[at - 1:at + accepted + 1])


def test_every_tree_stands_beside_its_step(trained):
    """Catches trees of another run, seconds of another step, and nodes that the target was never shown."""
    opt = sample.Options(method="medusa", out=trained, device="cpu", nodes="8")
    target, tokenizer, drafter, _ = setup(opt, train.METHODS)
    prompt, verified = tokenizer.start + tokenizer.encode("a dog "), []
    kept, shown, real = picture.watch(drafter), [], target.hidden

    def counted(idx, *more):
        verified.append(idx.size(1))
        return real(idx, *more)
    target.hidden = counted
    for seed in (0, 1):
        verified.clear()
        run = follow(generate(target, prompt, 25, drafter, Sampler(1, seed=seed), tokenizer.stops), kept,
                     lambda new: shown.append(new))
        room = min(25, target.cfg.block_size - len(prompt))
        deepest = lambda n: min(room - n - 1, target.reach(len(prompt) + n - 1))
        steps = list(picture.verified(run, deepest))
        assert len(steps) == run.stats.steps == len(run.trees) == len(run.seconds) - 1 > 5
        assert [len(tree) for *_, tree in steps] == verified[1:] and sum(verified[1:]) == run.stats.nodes
        for n, new, path, tree in steps:
            assert new == run.tokens[n:n + len(new)] and len(path) == len(new)
            assert tree.tokens[0] == run.tokens[n - 1]
            assert [tree.tokens[i] for i in path[1:]] == new[:-1]
    assert shown[-run.stats.steps - 1:] == [run.tokens[:1]] + [new for _, new, _, _ in steps]


def test_texts_of_tokens():
    """Catches text that is lost between tokens, and characters that nobody would see or that hide others."""
    tokens = [0, 5, 5, 4, 7, 9, 3, 5]
    assert pieces(Words(), tokens) == ["zero", "", "\ufffd", "\ufffd€", "", "", "\n", "\ufffd"]
    assert "".join(pieces(Words(), tokens)) == Words().decode(tokens) and pieces(Words(), []) == []
    assert visible("a b\n\t\x00\x7f") == "a·b⏎␉␀␡"
    for hidden in "\u202e\u200f\u2028\u00a0\u200b\ufeff\x9b\ue000\uffff\u00ad":
        assert visible("a" + hidden) == f"a<{ord(hidden):04X}>"
    assert visible("é€ש😀e\u0301") == "é€ש😀e\u0301"
    said = [picture.say(Words(), token, visible) for token in (2, 3, 4, 5, 7, 9)]
    assert said == ["two·", "⏎", "€", "b'\\xe2'", "<7>", "<end>"]
