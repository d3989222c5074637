"""
Text: our own byte-level BPE (trained with `tokenizers`, used through `tiktoken`), and the corpus that is trained on.
"""
import base64
import glob
import os
import re
import sysconfig
import zlib

import torch

from plumbing.options import fail, say


# --------------------------------------------------------------------------------------------------
# Tokenizer

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_characters():
    """The printable character with which `tokenizers` writes a byte -> the byte: itself where printable, else chr(256 + n)."""
    from tokenizers.pre_tokenizers import ByteLevel
    printable = [b for b in range(256) if chr(b) in ByteLevel.alphabet()]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


class Tokenizer:
    """
    Bytes <-> token ids. ranks: list of byte strings, most basic first; the id after the last one, eos, ends a text.

    stops: all ids that end a generation; start: the ids that a plain text begins with; has_chat: is there a chat template?
    """
    has_chat = False

    def __init__(self, ranks, pattern=PATTERN):
        import tiktoken
        self.ranks, self.pattern, self.eos = ranks, pattern, len(ranks)
        self.stops, self.start = {self.eos}, [self.eos]                # a text begins after the end of another
        self.vocab_size = len(ranks) + 1
        self.bpe = tiktoken.Encoding("nanospec", pat_str=pattern, mergeable_ranks={b: i for i, b in enumerate(ranks)},
                                     special_tokens={"<|end|>": self.eos})

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn vocab_size tokens (the end-of-text token among them) from an iterable of strings."""
        from tokenizers import Regex, Tokenizer as Trainable, models, pre_tokenizers, trainers
        t = Trainable(models.BPE())
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"),
                                                   pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        pieces = (p for text in texts for p in re.split(r"(\S{1000}|\s{1000})", text))       # long words take the square of time
        t.train_from_iterator(pieces, trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False))
        byte = byte_characters()
        tokens = sorted(t.get_vocab().items(), key=lambda item: item[1])
        return cls([bytes(byte[ch] for ch in token) for token, _ in tokens])

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        return b"".join(self.ranks[i] for i in ids if i < self.eos)

    def to_dict(self):
        return {"pattern": self.pattern, "ranks": [base64.b64encode(b).decode() for b in self.ranks]}

    @classmethod
    def from_dict(cls, d):
        import regex                                                   # came with tiktoken, which would crash on these later
        ranks = [base64.b64decode(b) for b in d["ranks"]]
        if not {bytes([b]) for b in range(256)} <= set(ranks) or len(set(ranks)) < len(ranks):
            raise ValueError("a tokenizer needs every byte, and no token twice")
        if not all(m[0] for m in regex.finditer(d["pattern"], "a é1 \n!")):
            raise ValueError("the tokenizer's pattern finds empty words")
        return cls(ranks, d["pattern"])


# --------------------------------------------------------------------------------------------------
# Corpus

def read_text(path, errors="strict"):
    """A file -> its text. Raises OSError, also for what is no file: a pipe could keep us waiting for ever."""
    if not os.path.isfile(path):
        raise FileNotFoundError("there is no such file")
    with open(path, encoding="utf-8", errors=errors) as f:
        return f.read()


SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def read_texts(data, with_packages=False):
    """--data -> list of (name, text). Ends with a message where there is nothing to read."""
    if data == "python":
        roots = [sysconfig.get_paths()["stdlib"]]
        if with_packages:                                              # a GPU asks for more: the packages it came with
            roots += [os.path.join(sysconfig.get_paths()["purelib"], p) for p in ("torch", "transformers", "numpy")]
        files = [(root, f) for root in roots for f in sorted(glob.glob(os.path.join(root, "**", "*.py"), recursive=True))
                 if not SKIP & set(os.path.relpath(f, root).split(os.sep))]
    elif os.path.isdir(data):
        files = [(data, f) for f in sorted(glob.glob(os.path.join(data, "**", "*"), recursive=True)) if os.path.isfile(f)]
    else:
        files = [(os.path.dirname(f), f) for f in sorted(glob.glob(data, recursive=True)) if os.path.isfile(f)]
    if not files:
        fail(f"--data {data}: no file there")
    texts, skipped = [], 0
    for root, f in files:
        try:
            with open(f, "rb") as file:
                text = file.read().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            text = "\0"
        if "\0" in text:
            skipped += 1
        elif text.strip():
            texts.append((os.path.relpath(f, root or "."), text))
    if not texts:
        fail(f"--data {data}: no readable UTF-8 text in {len(files)} files")
    if skipped:
        say(f"data: {skipped} of {len(files)} files are not UTF-8 text and were left out")
    return texts


class Corpus:
    """Training and held-out tokens. A file is held out by a hash of its name; a single file gives its last twentieth."""
    aligned = False

    def __init__(self, texts):                                         # [(name, text)]; a text may be a list of tokens
        if len(texts) == 1:
            cut = len(texts[0][1]) * 19 // 20
            self.train_texts, self.val_texts = [texts[0][1][:cut]], [texts[0][1][cut:]]
        else:
            held = {name for name, _ in texts if zlib.crc32(name.replace(os.sep, "/").encode()) % 40 == 0}
            held = held or {texts[-1][0]}
            self.train_texts = [text for name, text in texts if name not in held]
            self.val_texts = [text for name, text in texts if name in held]

    def tokenize(self, tokenizer):
        def tokens(texts):
            texts = (text if isinstance(text, list) else [*tokenizer.encode(text), tokenizer.eos] for text in texts)
            return torch.tensor([t for text in texts for t in text], dtype=torch.int32)
        self.tokenizer = tokenizer
        self.train, self.val = tokens(self.train_texts), tokens(self.val_texts)
        chars = sum(len(text if isinstance(text, str) else tokenizer.decode(text)) for text in self.val_texts)
        self.chars_per_token = chars / max(1, len(self.val) - len(self.val_texts))
        return self

    def frequent(self, n):
        """(n,) the most frequent tokens of the training text, in order of their ids; None where that is all of them."""
        V = self.tokenizer.vocab_size
        counts = torch.bincount(self.train, minlength=V)
        return counts.argsort(descending=True, stable=True)[:n].sort().values if 0 < n < V else None

    def batch(self, seed, B, T):
        """(B, T) random stretches of training text (aligned: of those that lie side by side), a function of seed alone."""
        if len(self.train) < T + 1:
            fail(f"the training text has {len(self.train)} tokens, a sequence needs {T + 1}: give more --data")
        stride = T if self.aligned else 1
        at = torch.randint((len(self.train) - T) // stride + 1, (B,), generator=torch.Generator().manual_seed(seed)) * stride
        return self.train[at[:, None] + torch.arange(T)].long()

    def val_batches(self, B, T, n):
        """At most n batches of held-out text, side by side; the same every time."""
        T = min(T, len(self.val))
        x = self.val[:len(self.val) // T * T].view(-1, T).long()
        x = x[torch.linspace(0, len(x) - 1, min(len(x), n * B)).long()]                # spread over all held-out files
        return list(x.split(B))

    def prompts(self, n, length):
        """n lists of length tokens of held-out text, spread over all of it."""
        at = torch.linspace(0, max(0, len(self.val) - length - 1), n).long().tolist()
        return [self.val[i:i + length].tolist() for i in at]
