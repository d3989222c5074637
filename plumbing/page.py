r"""
One HTML file that replays how a text was decoded: sample.py --show page.

page.html is the page; what is put into it is the data, as JSON, and a policy by which a browser runs this one
script, takes this one style and fetches nothing, whatever a token holds.
"""
import base64
import hashlib
import json
import os
import re

from plumbing.options import fail
from plumbing.picture import pieces, say, verified, visible

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html"), encoding="utf-8") as f:
    TEMPLATE = f.read()


class Words:
    """The tokens of trees as a reader sees them, each of them once."""

    def __init__(self, tokenizer):
        self.tokenizer, self.place, self.texts = tokenizer, {}, []

    def __getitem__(self, token):
        if token not in self.place:
            self.place[token] = len(self.texts)
            self.texts.append(say(self.tokenizer, token, visible))
        return self.place[token]


def tree_data(words, new, path, tree):
    """
    A verified tree -> its nodes, root first: parent, place of the word, probability of the path (3 digits;
    None for the target's own token if nobody guessed it). path: accepted nodes; own: the node of the target's
    own.
    """
    nodes = list(zip(tree.parent, tree.tokens))
    p = [float(f"{v:.3g}") for v in tree.value]
    if (path[-1], new[-1]) not in nodes:
        nodes.append((path[-1], new[-1]))
        p.append(None)
    own = nodes.index((path[-1], new[-1]))
    parent, word = [up for up, _ in nodes], [words[token] for _, token in nodes]
    return dict(parent=parent, word=word, p=p, path=path, own=own)


def run_data(name, run, tokenizer, words, deepest, lossy):
    """A run -> its steps, the prompt's first: ms, the text of each token, the tree, if one was drafted."""
    texts, trees = pieces(tokenizer, run.tokens), list(verified(run, deepest))
    steps, n = [], 0
    for i, (length, seconds) in enumerate(zip(run.stats.accepted, run.seconds)):
        step = dict(ms=round(1000 * seconds, 3), text=texts[n:n + length])
        if 0 < i <= len(trees):
            step["tree"] = tree_data(words, *trees[i - 1][1:])
        steps.append(step)
        n += length
    return dict(name=name, lossy=lossy, steps=steps)


def digest(text):
    """A script or style as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page(runs, tokenizer, prompt, deepest, made, lossy=()):
    """
    runs: {method: Run}; prompt: the text that they go on from; made: a line that says how. deepest: see
    picture.verified; lossy: names of methods whose text may not be the target's. -> HTML
    """
    words = Words(tokenizer)
    found = [run_data(name, run, tokenizer, words, deepest, name in lossy) for name, run in runs.items()]
    data = json.dumps(dict(made=made, prompt=prompt, runs=found, words=words.texts), separators=(",", ":"))
    for sign in "<>&":                                                 # in strings only: no tag can begin
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    for tag in ("script", "style"):
        text, = re.findall(f"<{tag}>(.*?)</{tag}>", TEMPLATE, re.S)
        policy.append(f"{tag}-src {digest(text)}")
    return TEMPLATE.replace("{{POLICY}}", "; ".join(policy)).replace("{{DATA}}", data)


def write(path, text):
    """The page -> a file; its folder is made if need be. Ends with a message where that cannot be."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            f.write(text)
    except (OSError, ValueError) as e:                                 # ValueError: a name with a NUL
        fail(f"cannot write {path}: {e}")
