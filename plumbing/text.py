"""
Text: our own byte-level BPE (trained by `tokenizers`, used through `tiktoken`), reading, and the corpus.
"""
import base64
import codecs
import glob
import hashlib
import json
import os
import re
import sysconfig
import zlib
from pathlib import Path

import torch

from plumbing.options import fail, say


# --------------------------------------------------------------------------------------------------
# Tokenizer

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
LONGEST_GAP = 200_000                                                  # white space encoded as one, at most


def byte_characters():
    """The character with which `tokenizers` writes a byte -> the byte: itself, or chr(256 + n)."""
    from tokenizers.pre_tokenizers import ByteLevel
    printable = [b for b in range(256) if chr(b) in ByteLevel.alphabet()]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def pieces(text):
    """
    A text in parts that tiktoken can encode: one, unless white space goes on for more than LONGEST_GAP.
    Its matcher notes every place of a gap to which it may have to go back, and panics at a million notes
    (which no `except Exception` catches). Words of any length are harmless.
    """
    at = 0
    for gap in re.finditer(r"(?<!\s)\s{%d,}" % LONGEST_GAP, text):
        for cut in range(gap.start() + LONGEST_GAP, gap.end(), LONGEST_GAP):
            yield text[at:cut]
            at = cut
    yield text[at:]


class Tokenizer:
    """
    Bytes <-> token ids. ranks: list of byte strings, most basic first; eos, the id after the last one,
    ends a text.

    stops: all ids that end a generation; start: the ids that a plain text begins with;
    template: the chat template, None = there is none; has_chat: is there one?
    """
    has_chat, template = False, None

    def __init__(self, ranks, pattern=PATTERN):
        import tiktoken
        self.ranks, self.pattern, self.eos = ranks, pattern, len(ranks)
        self.stops, self.start = {self.eos}, [self.eos]                # a text begins after another's end
        self.vocab_size = len(ranks) + 1
        self.bpe = tiktoken.Encoding("nanospec", pat_str=pattern, special_tokens={"<|end|>": self.eos},
                                     mergeable_ranks={b: i for i, b in enumerate(ranks)})

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn vocab_size tokens (the end-of-text token among them) from an iterable of strings."""
        from tokenizers import Regex, Tokenizer as Trainable, models, pre_tokenizers, trainers
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        t = Trainable(models.BPE())
        words = pre_tokenizers.Split(Regex(PATTERN), "isolated")
        t.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=byte_level.alphabet(),
                                      show_progress=False)
        # long words take the square of time
        parts = (part for text in texts for part in re.split(r"(\S{1000}|\s{1000})", text))
        t.train_from_iterator(parts, trainer)
        byte = byte_characters()
        tokens = sorted(t.get_vocab().items(), key=lambda item: item[1])
        return cls([bytes(byte[ch] for ch in token) for token, _ in tokens])

    def encode(self, text):
        return [token for piece in pieces(text) for token in self.bpe.encode_ordinary(piece)]

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        return b"".join(self.ranks[i] for i in ids if i < self.eos)

    def to_dict(self):
        return {"pattern": self.pattern, "ranks": [base64.b64encode(b).decode() for b in self.ranks]}

    @classmethod
    def from_dict(cls, d):
        """Raises ValueError for ranks or a pattern that tiktoken would crash on later."""
        import regex                                                   # came with tiktoken
        ranks = [base64.b64decode(b) for b in d["ranks"]]
        if not {bytes([b]) for b in range(256)} <= set(ranks) or len(set(ranks)) < len(ranks):
            raise ValueError("a tokenizer needs every byte, and no token twice")
        if not all(m[0] for m in regex.finditer(d["pattern"], "a é1 \n!")):
            raise ValueError("the tokenizer's pattern finds empty words")
        return cls(ranks, d["pattern"])


# --------------------------------------------------------------------------------------------------
# Reading

MARK = "\ufeff"                                                        # some editors begin a file with it
OTHER_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",       # before UTF-16: one
               codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}       # begins with the other


def read_text(path, errors="strict"):
    """
    A file -> its text without a byte order mark, line ends as they are: whoever reads text, reads it so.
    Raises OSError, also for what is no file (a pipe might never end), and ValueError for what is not UTF-8.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError("there is no such file")
    with open(path, "rb") as f:
        data = f.read()
    for mark, name in OTHER_MARKS.items():
        if errors == "strict" and data.startswith(mark):
            raise ValueError(f"this is {name} text; save it as UTF-8")
    return data.decode("utf-8", errors).lstrip(MARK)


def read_lines(path, errors="strict"):
    """Its lines. Files put together can have a byte order mark in the middle: it is left out, too."""
    return [line.lstrip(MARK) for line in re.split("\r\n|\n|\r", read_text(path, errors))]


def digest(x):
    """A short hash of whatever JSON can say."""
    return hashlib.sha256(json.dumps(x, sort_keys=True).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# Corpus

SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings",
        "pydoc_data"}
ENOUGH = 5_000                                                         # characters of held-out text
LEAST = 64                                                             # tokens of it; fewer score by chance


def entries(folder):
    """Paths of what is in a folder, hidden things left out; nothing if it cannot be looked into."""
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder or ".")) if name[0] != "."]
    except OSError:
        return []


def folders(top, skip=()):
    """
    A folder and all below it, but for names in skip. Links are followed, after everything else. What comes
    again or is a folder around top is left out, so that a folder may contain itself.
    """
    root, seen, todo, links = os.path.realpath(top), set(), [top], []
    while todo or links:
        folder = todo.pop() if todo else links.pop(0)
        real = os.path.realpath(folder)
        if real in seen or seen and root.startswith(os.path.join(real, "")):
            continue
        seen.add(real)
        yield folder
        for path in entries(folder):
            if os.path.isdir(path) and os.path.basename(path) not in skip:
                (links if os.path.islink(path) else todo).append(path)


def matches(pattern):
    """
    A path with *, ?, [..] and ** -> the folder before the first of them, and the paths it stands for. A part
    that exists under that very name is no pattern: notes[1].txt means notes1.txt only where there is no
    notes[1].txt.
    """
    parts, found, top = list(Path(pattern).parts), [""], None
    if parts[-1:] == ["**"]:
        parts.append("*")                                              # not the folders, but what is in them
    for part in parts:
        there = [path for folder in found if os.path.lexists(path := os.path.join(folder, part))]
        if not there and top is None:
            top = found[0]
        if there:
            found = there
        elif part == "**":
            found = [below for folder in found for below in folders(folder)]
        else:
            found = [os.path.join(folder, name) for folder in found
                     for name in glob.glob(part, root_dir=folder or None)]
    return os.path.dirname(pattern) if top is None else top, found


def once(paths, top):
    """The files among paths below top, sorted, each once: by the path that needs no link, else the first."""
    root, kept = os.path.realpath(top), {}
    real = {path: os.path.realpath(path) for path in paths if os.path.isfile(path)}
    linked = {path: real[path] != os.path.join(root, os.path.relpath(path, top or ".")) for path in real}
    for path in sorted(real, key=lambda path: (linked[path], path)):
        kept.setdefault(real[path], path)
    return sorted(kept.values())


def find_files(data, with_packages=False):
    """--data -> [(top, path)]: its files, and the folder below which their paths tell them apart."""
    if data == "python":
        tops = [sysconfig.get_paths()["stdlib"]]
        if with_packages:                                              # a GPU wants more: what it came with
            packages = sysconfig.get_paths()["purelib"]
            tops += [os.path.join(packages, name) for name in ("torch", "transformers", "numpy")]
        found = {top: [path for folder in folders(top, SKIP) for path in entries(folder)
                       if path.endswith(".py")] for top in tops}
    elif os.path.isdir(data):
        found = {data: [path for folder in folders(data) for path in entries(folder)]}
    else:
        found = dict([matches(data)])
    return [(top, path) for top, paths in found.items() for path in once(paths, top)]


def read_texts(data, with_packages=False):
    """--data -> list of (name, text). Ends with a message where there is nothing to read."""
    files = find_files(data, with_packages)
    if not files:
        fail(f"--data {data}: no file there")
    texts, bad = [], []
    for top, path in files:
        name = os.path.relpath(path, top or ".")
        try:
            text = read_text(path)
            if "\0" in text:
                raise ValueError("this is no text")
            if text.strip():
                texts.append((name, text))
        except (OSError, ValueError) as e:
            bad.append(f"{name}: {e}".encode(errors="replace").decode())           # names may be no UTF-8
    example = f", such as {bad[0]}" if bad else ""
    if not texts:
        fail(f"--data {data}: no readable UTF-8 text in {len(files)} files{example}")
    if bad:
        say(f"data: {len(bad)} of {len(files)} files are not UTF-8 text and were left out{example}")
    return texts


class Corpus:
    """
    Training and held-out tokens of texts: [(name, text)], a text may be a list of tokens. A file is held out
    by a hash of its name. Of a single file, and where that would leave next to nothing to one of the two,
    the last twentieth of all text is held out (more of a short one).
    """
    aligned, digest = False, None

    def __init__(self, texts):
        size = sum(len(text) for _, text in texts)
        chance = {name: zlib.crc32(os.fsencode(name.replace(os.sep, "/"))) for name, _ in texts}
        held = {name for name in chance if chance[name] % 40 == 0} or {texts[-1][0]}
        self.train_texts = [text for name, text in texts if name not in held]
        self.val_texts = [text for name, text in texts if name in held]
        out, cut = sum(map(len, self.val_texts)), min(size * 19 // 20, max(size * 3 // 4, size - 4 * LEAST))
        least = min(ENOUGH, size - cut, max(4 * LEAST, size // 100))
        if len(texts) > 1 and least <= out <= size * 3 // 4:
            return
        if len(texts) > 1:
            say(f"data: the files to hold out have {out / size:.1%} of the text; "
                f"its last {1 - cut / size:.1%} are held out instead")
        self.train_texts, self.val_texts = [], []
        for _, text in texts:
            self.train_texts += [text[:cut]] if cut else []
            self.val_texts += [text[cut:]] if cut < len(text) else []
            cut = max(0, cut - len(text))

    def tokenize(self, tokenizer):
        def tokens(texts):
            ids = []
            for text in texts:
                ids += text if isinstance(text, list) else [*tokenizer.encode(text), tokenizer.eos]
            return torch.tensor(ids, dtype=torch.int32)
        self.tokenizer = tokenizer
        self.train, self.val = tokens(self.train_texts), tokens(self.val_texts)
        both = self.train.numpy().tobytes() + b"held out" + self.val.numpy().tobytes()
        self.digest = hashlib.sha256(both).hexdigest()[:16]            # two corpora are the same if this is
        chars = sum(len(text if isinstance(text, str) else tokenizer.decode(text)) for text in self.val_texts)
        self.chars_per_token = chars / max(1, len(self.val) - len(self.val_texts))
        return self

    def frequent(self, n):
        """(n,) the most frequent tokens of the training text, by id; None where that is all of them."""
        V = self.tokenizer.vocab_size
        counts = torch.bincount(self.train, minlength=V)
        return counts.argsort(descending=True, stable=True)[:n].sort().values if 0 < n < V else None

    def check(self, T):
        """Ends with a message where T tokens to train on are missing, or held-out text worth a score."""
        for what, tokens, least in (("training", self.train, T + 1), ("held-out", self.val, min(LEAST, T))):
            if len(tokens) < least:
                fail(f"the {what} text has {len(tokens)} tokens, but {least} are needed: give more --data")

    def batch(self, seed, B, T):
        """(B, T) random stretches of training text (aligned: side by side), a function of seed alone."""
        if len(self.train) < T + 1:
            fail(f"the training text has {len(self.train)} tokens, but {T + 1} are needed: give more --data")
        stride, g = T if self.aligned else 1, torch.Generator().manual_seed(seed)
        at = torch.randint((len(self.train) - T) // stride + 1, (B,), generator=g) * stride
        return self.train[at[:, None] + torch.arange(T)].long()

    def val_batches(self, B, T, n):
        """At most n batches of held-out text, side by side; the same every time."""
        T = min(T, len(self.val))
        x = self.val[:len(self.val) // T * T].view(-1, T).long()
        x = x[torch.linspace(0, len(x) - 1, min(len(x), n * B)).long()]            # spread over all of it
        return list(x.split(B))

    def prompts(self, n, length):
        """n lists of length tokens of held-out text, spread over all of it."""
        at = torch.linspace(0, max(0, len(self.val) - length - 1), n).long().tolist()
        return [self.val[i:i + length].tolist() for i in at]
