r"""
Prompts of the kinds that people ask, as many as wanted: for a target that writes its own training text, and
for bench/run.py.

    python bench/prompts.py --n 5000 --to prompts.jsonl
    python train.py --backbone smollm2 --data self --self-prompts prompts.jsonl
    python bench/run.py --backbone smollm2 --questions prompts.jsonl --prompts 24

A line is {"question_id": 1, "category": "math", "turns": ["...", "..."]}. The categories take turns. Words
and templates stand in prompts.txt; many prompts are about a text or a function that lies on this machine:
docstrings and code of the standard library, descriptions and licences of installed packages. No network, no
model; the same seed gives the same prompts where the same packages are installed. Nothing of it is from a
benchmark, so drafters may be trained on it and measured on one.
"""
import ast
import functools
import importlib.metadata
import json
import os
import random
import re
import sys
import sysconfig
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from model import arg
from plumbing.options import command, fail, parse

CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
              "translation", "summarization", "qa", "rag"]


@dataclass
class Options:
    """Make prompts, as JSON lines with question_id, category and turns."""
    n: int = arg(5000, "how many", low=1)
    seed: int = arg(0, "same seed, same prompts, on the same installation")
    to: str = arg("", "the file to write; empty = print them")
    categories: str = arg("", "only these, with commas; empty = all twelve")


# --------------------------------------------------------------------------------------------------
# Templates

SLOT = re.compile(r"\{(\*?)([a-z_]+)(\d?)(?:=(\d+)-(\d+))?\}", re.I)   # {person} {Person2} {n=3-17} {*order}


def read_templates():
    """prompts.txt -> {section: its words or lines}."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "prompts.txt"), encoding="utf-8") as f:
        parts = re.split(r"^\[(\w+)\]\n", f.read(), flags=re.M)[1:]
    sections = {}
    for name, body in zip(parts[::2], parts[1::2]):
        lines = body.strip().split("\n")
        words = " ".join(lines).split("|") if " |" in body else lines
        sections[name] = [word.strip().replace(r"\n", "\n") for word in words]
    return sections


def fill(template, rng, sections, known):
    """A template with its slots filled. known: what the slots of this prompt stand for so far; it grows."""
    def value(m):
        many, slot, number, low, high = m.groups()
        key = slot.lower() + number
        if many:
            lines = rng.choices(sections[slot], k=rng.randint(3, 7))
            return "\n".join(fill(line, rng, sections, {}) for line in lines)
        if low:
            known[key] = str(rng.randint(int(low), int(high)))
        elif key not in known:
            words = sections[slot.lower()]
            taken = {known.get(slot.lower() + n) for n in ("", "2", "3", "4")}
            word = rng.choice([word for word in words if word not in taken] or words)
            known[key] = fill(word, rng, sections, {})
        return known[key][0].upper() + known[key][1:] if slot[0].isupper() else known[key]
    return SLOT.sub(value, template)


# --------------------------------------------------------------------------------------------------
# What lies on this machine

@functools.cache
def library():
    """The standard library's sources, sorted by path: texts."""
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
    paths, out = [], []
    for folder, names, files in os.walk(sysconfig.get_paths()["stdlib"]):
        names[:] = set(names) - skip
        paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths):
        with open(path, encoding="utf-8", errors="ignore") as f:
            out.append(f.read())
    return out


def prose(text):
    """The paragraphs of a text that are plain sentences, 12 to 150 words each, as single lines."""
    out = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        paragraph = " ".join(words)
        plain = sum(word.strip(".,;:()'\"").isalpha() for word in words)
        odd = re.search(r">>>|::|:\w+:|//|--|``|[|=<>\[\]{}#*]|\.\. |\* |- ", paragraph)
        if 12 <= len(words) <= 150 and plain > 0.85 * len(words) and not odd and paragraph.isascii():
            if paragraph[0].isupper() and paragraph[-1] in ".!?":
                out.append(paragraph)
    return out


@functools.cache
def passages():
    """Texts of 40 to 200 words, paragraphs of one docstring, README or licence; none twice."""
    texts = [text for source in library() for text in re.findall(r'"""(.*?)"""', source, re.S)]
    packages = importlib.metadata.distributions()
    for package in sorted(packages, key=lambda package: str(package.metadata["Name"]).lower()):
        files = "METADATA", "LICENSE", "LICENSE.txt", "licenses/LICENSE", "licenses/LICENSE.txt"
        found = [package.read_text(name) or "" for name in files]
        texts += [found[0].partition("\n\n")[2], *found[1:]]           # behind METADATA's fields: the README
    out = {}                                                           # a dict: ordered, and none twice
    for text in texts:
        paragraphs = prose(text)
        for i in range(len(paragraphs)):
            for j in range(i + 1, len(paragraphs) + 1):
                length = sum(len(p.split()) for p in paragraphs[i:j])
                if length >= 40:
                    if length <= 200:
                        out["\n\n".join(paragraphs[i:j])] = None
                    break
    return list(out)


@functools.cache
def functions():
    """Functions of 5 to 30 lines, as text."""
    out = []
    for source in library():
        if len(source) > 20_000:                                       # short files are enough, soon parsed
            continue
        try:
            nodes = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue
        lines = source.split("\n")
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and 5 <= node.end_lineno - node.lineno + 1 <= 30:
                out.append("\n".join(lines[node.lineno - 1:node.end_lineno]))
    return out


# --------------------------------------------------------------------------------------------------
# Prompts

def prompts(n, seed, categories=CATEGORIES):
    """
    -> n prompts, dicts as a line of the file. A first turn that was there before is drawn anew, a few
    times.
    """
    rng, sections, seen, out = random.Random(seed), read_templates(), set(), []
    texts, code = passages(), functions()
    if not texts or not code:
        raise ValueError("this installation has no docstrings or no functions in its standard library")
    for i in range(n):
        category = categories[i % len(categories)]
        for _ in range(20):
            turns = rng.choice(sections[category]).split(" // ")
            if rng.random() < 0.3:
                turns = turns[:1]                                      # not everybody asks again
            known = dict(passage=rng.choice(texts), function=rng.choice(code))
            known["word"] = rng.choice(sorted(set(re.findall(r"[a-z]{6,}", known["passage"]))) or ["text"])
            turns = [fill(turn, rng, sections, known) for turn in turns]
            if turns[0] not in seen:
                break
        seen.add(turns[0])
        out.append(dict(question_id=i + 1, category=category, turns=turns))
    return out


def main(argv=None):
    opt, = parse(Options, argv=argv)
    categories = [c for c in opt.categories.split(",") if c] or CATEGORIES
    unknown = sorted(set(categories) - set(CATEGORIES))
    if unknown:
        fail(f"--categories: there is no {', '.join(unknown)}; there are {', '.join(CATEGORIES)}")
    try:
        lines = [json.dumps(p, ensure_ascii=False) + "\n" for p in prompts(opt.n, opt.seed, categories)]
        if opt.to:
            os.makedirs(os.path.dirname(opt.to) or ".", exist_ok=True)
            with open(opt.to, "w", encoding="utf-8") as f:
                f.writelines(lines)
    except (OSError, ValueError) as e:
        fail(f"--to {opt.to}: {e}" if isinstance(e, OSError) else e)
    if opt.to:
        print(f"{len(lines)} prompts -> {opt.to}")
    else:
        sys.stdout.writelines(lines)


if __name__ == "__main__":
    command(main)
