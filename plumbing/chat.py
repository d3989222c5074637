"""
The tokenizer and the chat template that a pretrained backbone came with, with Tokenizer's interface.
"""
import functools
import json
import re
import secrets

from plumbing.options import fail, first_line
from plumbing.text import byte_characters

HELP = ("leave the template out with --no-chat, or in train.py --data self try --self-prompts "
        "that it takes")
SAMPLE = "The 2 cats' tails,\n\tup (and down) again."                   # shows how a tokenizer joins tokens


def secret(n=8):
    """Characters that no one can guess, and that no rule for case or blanks changes: of private use."""
    return "".join(chr(0xF0000 + secrets.randbelow(2**16 - 2)) for _ in range(n))


class PretrainedTokenizer:
    """
    transformers' tokenizer of a pretrained backbone. decode continues a text: a leading space stays.

    stops   ids that end a text, besides the tokenizer's own; a dict says where each was found
    rows    of the embedding (None: one for each token); vocab_size leaves out those beyond the tokens
    """

    def __init__(self, hf, stops=(), rows=None):
        self.hf = hf
        if not hasattr(hf, "backend_tokenizer"):                       # Python code of its own, as ByT5's
            fail(f"this tokenizer ({type(hf).__name__}) has no fast version (a tokenizer.json), and no other "
                 "can be used")
        found = {i: "its tokenizer" for i in (hf.eos_token_id, hf.bos_token_id) if i is not None}
        found |= stops if isinstance(stops, dict) else dict.fromkeys(stops, "its config")
        self.stops = {*stops, hf.eos_token_id} - {None}
        if not self.stops:
            fail("this tokenizer names no token that ends a text")
        self.eos = min(self.stops) if hf.eos_token_id is None else hf.eos_token_id
        bos = self.eos if hf.bos_token_id is None else hf.bos_token_id
        self.start = [bos]                                             # gpt2's own text began so
        for token in (token for i, token in hf.added_tokens_decoder.items() if i in self.stops):
            if not token.special:                                      # what ends a text is no part of it
                token.special = True
                hf.add_tokens([token])
        self.added = hf.added_tokens_decoder                           # id -> special and user-defined tokens
        self.special = {i for i, token in self.added.items() if token.special}
        self.guard = Guard(hf, [self.added[i] for i in self.special])

        vocab = hf.get_vocab().values()
        n = max(*vocab, *self.stops, bos) + 1
        self.rows = rows or n
        self.vocab_size = min(self.rows, n)
        for i in (*self.stops, bos):
            if not 0 <= i < self.rows:
                fail(f"{found[i]} names token {i}, but the embedding has {self.rows} rows: correct it there")
        ordinary = max((i for i in vocab if i not in self.added), default=0)
        if ordinary >= self.rows:
            fail(f"its tokenizer has a token {ordinary}, but the embedding has {self.rows} rows: they belong "
                 "to different models")

        self.template = hf.chat_template or None
        self.has_chat, self.gap = bool(self.template), secret()
        byte_level = "ByteLevel" in str(hf.backend_tokenizer.decoder)
        self.byte = {ch: bytes([b]) for ch, b in byte_characters().items()} if byte_level else None
        ids = self.encode(SAMPLE)
        theirs = hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if self.decode(ids).strip() != theirs.strip():
            fail(f"this tokenizer ({type(hf).__name__}) joins tokens in a way that cannot be followed one by "
                 "one")

    def encode(self, text):
        """What looks like a special token in a text is text."""
        ids = self.hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        if not self.special.isdisjoint(ids):                           # Unigram models have them as words too
            ids = self.guard.plain(text)
        return self.with_rows(ids, "a text", "leave it out")

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        return b"".join(map(self.piece, ids))

    def piece(self, i):
        """The bytes of one token; none for a special one."""
        if i in self.added:
            return b"" if self.added[i].special else self.added[i].content.encode()
        token = self.hf.convert_ids_to_tokens(i) or ""
        if self.byte:
            return b"".join(self.byte.get(ch, ch.encode()) for ch in token)
        if len(token) == 6 and token.startswith("<0x"):                # SentencePiece's way to say a byte
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def with_rows(self, ids, where, advice):
        """ids, if the embedding has a row for each: a tokenizer may have been given tokens without one."""
        most = max(ids, default=0)
        if most >= self.rows:
            fail(f"{where} has {self.hf.convert_ids_to_tokens(most)!r} in it, token {most}, but the "
                 f"embedding has {self.rows} rows: {advice}")
        return ids

    # ------------------------------------------------------------------------------------------------
    # Chat

    def chat(self, turns):
        """
        Texts, the user's and the model's by turns, the user's first and last -> ids up to where the model's
        answer begins. What looks like a special token in a turn is text.
        """
        return self.parse_ids(self.render(turns))

    def script(self, turns):
        """
        What is given where a model writes its side of a conversation: ids before its first word, then between
        its answers. turns: the user's. None = the model writes the user's turn as well: then before that, and
        before its answer.
        """
        gap = self.gap                                                 # stands for what the model writes
        said = [t for turn in turns for t in (turn, gap)][:-1] if turns else [gap]
        parts = [self.parse_ids(part) for part in self.render(said).split(gap)]
        if len(parts) != said.count(gap) + 1:
            fail(f"the model's chat template does not print every answer, once: {HELP}")
        if not parts[0]:
            fail(f"the model's chat template prints nothing before the first word: {HELP}")
        if not turns and not (parts[1] and parts[1][0] in self.stops):
            return parts[:1]                                           # nothing ends the user's turn: the
        return parts                                                   # model writes on to the answer's end

    def render(self, turns):
        """The text of the template. Guarded, if a special token comes from a turn, or with its help."""
        try:
            text = self.apply(turns)
            guarded = self.apply([self.guard.hide(turn, n) for n, turn in enumerate(turns)])
        except Exception as e:                                         # a template is a program
            fail(f"the model's chat template fails ({first_line(e)}): {HELP}")
        if any(self.guard.seam(n) not in guarded for n in range(0, len(turns), 2)):
            fail(f"the model's chat template leaves out what the user says: {HELP}")
        return text if self.guard.count(text) == self.guard.count(guarded) else guarded

    def apply(self, turns):
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        return self.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def parse_ids(self, text):
        """A text that render returned, or a part of it -> ids."""
        ids = self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self.guard.mark in text or sum(i in self.special for i in ids) > self.guard.count(text):
            ids = self.guard.parse(text)
        return self.with_rows(ids, "the model's chat template", HELP)


class Guard:
    """
    Keeps a turn from forging others: special tokens in it are text, those that a template writes are not.
    hide puts stand-ins for them into a turn, and seams around it. Once the template has put its own beside
    them, parse gives those other names, which no turn could hold, and gives the turn its words back.
    """

    def __init__(self, hf, special):  # special: the tokens
        self.hf, self.mark, name = hf, secret(), secret()
        texts = sorted((token.content for token in special), key=len, reverse=True)
        self.found = re.compile("|".join(map(re.escape, texts)) or "(?!)")               # the longest first
        self.stand_in = {text: f"{self.mark}{chr(0x100000 + n)}" for n, text in enumerate(texts)}
        self.name = {text: f"{name}{chr(0x100000 + n)}" for n, text in enumerate(texts)}

    def seam(self, n):
        return f"{self.mark}{chr(0x108000 + n)}"

    def hide(self, turn, n):
        """The n-th turn. Blanks stay outside the seams, where a template may strip them."""
        words = turn.strip()
        before, after = turn.split(words, 1) if words else (turn, "")
        words = self.found.sub(lambda match: self.stand_in[match[0]], words)
        return before + self.seam(n) + words + self.seam(n) + after

    def count(self, text):
        return len(self.found.findall(text))

    def plain(self, text):
        """A text in which nothing is special -> ids."""
        return self.twin.encode(text, add_special_tokens=False).ids

    def parse(self, text):
        """A text in which what is special is a template's, for the rest there are stand-ins -> ids."""
        text = self.found.sub(lambda match: self.name[match[0]], text)
        for special, stand_in in self.stand_in.items():
            text = text.replace(stand_in, special)
        return self.plain(re.sub(f"{self.mark}.", "", text))

    @functools.cached_property
    def twin(self):
        """The tokenizer, but special tokens go by their other names, and what was their name is text."""
        state = json.loads(self.hf.backend_tokenizer.to_str())
        state |= dict(truncation=None, padding=None, post_processor=None)
        rename = lambda word: self.name.get(word, word)
        for token in state["added_tokens"]:
            token["content"] = rename(token["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {rename(word): i for word, i in model["vocab"].items()}
        else:
            model["vocab"] = [[rename(word), score] for word, score in model["vocab"]]
        if model.get("merges"):
            model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in self.name]
        if model.get("unk_token"):
            model["unk_token"] = rename(model["unk_token"])
        return type(self.hf.backend_tokenizer).from_str(json.dumps(state))
