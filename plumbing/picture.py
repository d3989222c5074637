r"""
Decoding as a person sees it: what is kept of a run, and a step's token tree as text (--show tree).

    after '     lines.append(line)\n    return lines'
    '\n\n\n'              draft P(token)  P(path)       the root: the last token of the text
    ├─ ✓ 'def'                     0.694    0.694       ✓ drafted, and the target's own choice: accepted
    │  ├─ ✓ ' read'                0.251    0.174
    │  │  └─ ✓ '_l'                0.712    0.124
    │  │     └─ ✓ 'ines'           0.892    0.110
    │  │        └─ + '('                                + the target's choice behind the last of them
    │  ├─   ' _'                   0.236    0.164
    │  └─   ' get'                 0.138    0.096
    └─   '#'                       0.084    0.084

P(path) is what the drafter thinks of the path (Tree.value), by which trees are grown; P(token) is its last
factor. Above temperature 0 they include the noise that is shared with the target.
"""
import codecs
import time
import unicodedata
from dataclasses import dataclass, field


# --------------------------------------------------------------------------------------------------
# What is kept of a run

@dataclass
class Run:
    """A text that was decoded: tokens, Stats, the seconds of each forward, and the trees drafted."""
    tokens: list = field(default_factory=list)
    stats: object = None
    seconds: list = field(default_factory=list)                        # the first is the prompt's
    trees: list = field(default_factory=list)                          # one a forward after the prompt's

    @property
    def speed(self):
        return self.stats.tokens_per_second


def watch(drafter):
    """Let a drafter keep its trees -> the list that they go to, one for every forward after the prompt's."""
    trees, draft = [], drafter.draft

    def keep(*args):
        trees.append(draft(*args))
        return trees[-1]

    drafter.draft = keep
    return trees


def follow(steps, trees=(), show=None):
    """Run generate to its end -> Run. trees: what watch keeps; show: is handed each step's tokens."""
    run, before = Run(), len(trees)
    while True:
        start = time.perf_counter()
        try:
            new = next(steps)
        except StopIteration as stop:
            run.stats, run.trees = stop.value, list(trees[before:])
            return run
        run.seconds.append(time.perf_counter() - start)
        run.tokens += new
        if show:
            show(new)


def verified(run, deepest):
    """
    The steps of a run that had a tree: (tokens before it, its tokens, accepted nodes, root first, tree).
    deepest(n): the deepest level that the target was shown when n tokens were written; the rest was cut.
    """
    n = run.stats.accepted[0]
    for length, tree in zip(run.stats.accepted[1:], run.trees):
        tree, new = tree.cut(deepest(n)), run.tokens[n:n + length]
        child = {node: i for i, node in enumerate(zip(tree.parent, tree.tokens))}
        path = [0]
        for token in new[:-1]:
            path.append(child[path[-1], token])
        yield n, new, path, tree
        n += length


# --------------------------------------------------------------------------------------------------
# Tokens as text

def pieces(tokenizer, tokens):
    """Tokens -> their text each; a character of several tokens comes with its last one."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    out = [utf8.decode(tokenizer.decode_bytes([token])) for token in tokens]
    rest = utf8.decode(b"", final=True)
    return out[:-1] + [out[-1] + rest] if out else []


def visible(text):
    """
    What a reader sees of a text: a sign for each character, white space and control characters too. One
    that has no look, or turns the order of others around, is named by its number.
    """
    signs = {" ": "\N{MIDDLE DOT}", "\n": "\N{RETURN SYMBOL}", "\x7f": "\u2421"}
    out = []
    for ch in text:
        if ch < " " and ch != "\n":
            ch = chr(0x2400 + ord(ch))                                 # Unicode has a picture of each
        elif unicodedata.category(ch)[0] in "CZ" and ch not in signs:
            ch = f"<{ord(ch):04X}>"
        out.append(signs.get(ch, ch))
    return "".join(out)


def say(tokenizer, token, show=repr):
    """One token as text: show of its characters, of its bytes where they are a part of a character only."""
    raw = tokenizer.decode_bytes([token])
    if not raw:
        return "<end>" if token in tokenizer.stops else f"<{token}>"
    text = raw.decode("utf-8", "ignore")
    return show(text) if text.encode() == raw else repr(raw)


# --------------------------------------------------------------------------------------------------
# A tree as text

UNICODE = ("├─ ", "└─ ", "│  ", "✓ ")
ASCII = ("|- ", "`- ", "|  ", "* ")


def branches(nodes):
    """Nodes (parent, token) -> depth first (node, is it, and are those above it, a last child?)."""
    todo = [(0, [])]
    while todo:
        i, ends = todo.pop()
        yield i, ends
        children = [c for c, (up, _) in enumerate(nodes) if up == i]
        todo += [(c, ends + [c == children[-1]]) for c in reversed(children)]


def draw(name, tokenizer, prompt, run, deepest, stream):
    """
    The step with the longest accepted path, and of several the one whose path the drafter thought least
    likely -> text. Unicode and colours (accepted green, other drafts dim) only where stream can show them.
    deepest: see verified.
    """
    signs, show = UNICODE, repr
    try:
        "".join(UNICODE).encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        signs, show = ASCII, ascii
    fork, last, down, yes = signs

    steps = list(verified(run, deepest))
    if not steps:
        return f"{name}: no tree was drafted, the prompt's forward brought the whole text"
    best = max(range(len(steps)), key=lambda s: (len(steps[s][1]), -steps[s][3].value[steps[s][2][-1]]))
    n, new, path, tree = steps[best]
    nodes, own = list(zip(tree.parent, tree.tokens)), (path[-1], new[-1])
    if own not in nodes:                                               # else drafted too: the text ends there
        nodes.append(own)
    rows = []
    for i, ends in branches(nodes):
        up, token = nodes[i]
        mark = "" if i == 0 else "+ " if (up, token) == own else yes if i in path else "  "
        lines = "".join(" " * len(down) if end else down for end in ends[:-1])
        lines += (last if ends[-1] else fork) if ends else ""
        p = "" if i else "  draft P(token)  P(path)"
        if 0 < i < len(tree):
            p = f"  {tree.value[i] / (tree.value[up] or 1):14.3f}  {tree.value[i]:7.3f}"
        rows.append((f"{lines}{mark}{say(tokenizer, token, show)}", p, mark))
    width = max(len(text) for text, _, _ in rows)
    colours = {yes: "\033[32m", "  ": "\033[2m"} if stream.isatty() else {}
    out = [f"{name}, forward {best + 2} of {len(run.stats.accepted)}, the longest accepted path: "
           f"{len(tree)} nodes, {len(new) - 1} accepted ({yes[0]}), one token of the target's own (+)",
           f"after {show(tokenizer.decode(prompt + run.tokens[:n - 1])[-40:])}"]
    for text, p, mark in rows:
        line = f"{text:<{width}}{p}".rstrip()
        out.append(f"{colours[mark]}{line}\033[0m" if mark in colours else line)
    return "\n".join(out)
