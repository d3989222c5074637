"""Text: the tokenizer, how files are found and read, and the split into training and held-out text."""
import codecs
import io
import json
import os
import random
import re
import sys
import zlib

import pytest
import torch

import plumbing.text
import sample
import train
from plumbing.own_text import read_prompts
from plumbing.text import Corpus, Tokenizer, pieces, read_lines, read_text, read_texts
from test_train import TINY, refused

# --------------------------------------------------------------------------------------------------
# Tokenizer

WORDS = "def walk(tokens, parent, choice):\n    return path, out  # été, naïve, 漢字 and 12345\n" * 20


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([WORDS, open(__file__, encoding="utf-8").read()], 400)


TEXTS = ["", " ", "a", "\n", "\r\n", "\t\tif x:\r\n\t\t\treturn  y   \n\n\n", "naïve café — “quoted” …",
         "漢字かな交じり文 한국어 עברית العربية", "👩‍👩‍👧‍👦 🇫🇷 😀😀", "é é ﬁ ①②③ ½",
         "\u200b\ufeff\u00a0x\u2028y", "\x00\x01\x7f", "1234567890 12,345.678", "a" * 500, " " * 300 + "x",
         "<|end|>", "text <|end|> text", "<|endoftext|>", "don't I'LL we've", WORDS]


def random_texts(n=200):
    rng = random.Random(0)
    pools = ["ab \n", "\t\r\n ", "0123 x", "éüñ漢字한", "😀👍🏽\u200d", "<|end|>", "\x1c\x85\u2003!",
             "".join(map(chr, range(32, 127))), "\U0001F600\U00010348\u0301"]
    characters = lambda: (rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 60)))
    return ["".join(characters()) for _ in range(n)]


def test_tokenizer_round_trip(tokenizer):
    """Bytes that are lost, normalised or not in the vocabulary; an id beyond the embedding matrix."""
    for text in TEXTS + random_texts():
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode_bytes(tokens) == text.encode()
        assert all(0 <= t < tokenizer.eos for t in tokens)
    assert tokenizer.vocab_size == 400 == tokenizer.eos + 1
    assert len(set(tokenizer.ranks)) == 399
    assert sorted(tokenizer.ranks[:256]) == [bytes([b]) for b in range(256)]


def test_every_byte_decodes(tokenizer):
    """
    A single token of a multi-byte character: a crash while streaming;
    the end of text must print as nothing.
    """
    for t in range(tokenizer.vocab_size):
        tokenizer.decode([t])
    assert tokenizer.decode([tokenizer.eos]) == "" and tokenizer.decode_bytes([tokenizer.eos]) == b""


def test_special_text_is_ordinary_text(tokenizer):
    """Text that spells the end token: it must not end a generation, nor raise."""
    assert tokenizer.eos not in tokenizer.encode("a<|end|>b")
    assert tokenizer.decode(tokenizer.encode("a<|end|>b")) == "a<|end|>b"


def test_segmentation_equals_tokenizers(tokenizer, monkeypatch):
    """Merges in another order, or another splitting of text into words, than the trainer used."""
    import tokenizers
    made = []

    class Spy:  # keep the object that Tokenizer.train makes
        def __new__(cls, *args):
            made.append(real(*args))
            return made[-1]

    real = tokenizers.Tokenizer
    monkeypatch.setattr(tokenizers, "Tokenizer", Spy)
    again = Tokenizer.train([WORDS, open(__file__, encoding="utf-8").read()], 400)
    assert again.ranks == tokenizer.ranks                              # training is deterministic
    for text in TEXTS + random_texts():
        assert again.encode(text) == made[0].encode(text, add_special_tokens=False).ids, repr(text)


def test_tokenizer_dict_round_trip(tokenizer):
    """A tokenizer that does not survive JSON: bytes that are no UTF-8, another pattern."""
    again = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.ranks == tokenizer.ranks and again.pattern == tokenizer.pattern
    assert [again.encode(t) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]


def test_tokenizer_of_a_tiny_corpus():
    """A corpus with fewer merges than asked for: vocab_size must be what there is."""
    small = Tokenizer.train(["ab"], 5000)
    assert small.vocab_size == len(small.ranks) + 1 < 300
    assert small.decode(small.encode("ab ß")) == "ab ß"


GAPS = ("spaces", "lines", "blank lines", "Windows lines", "tabs", "wide spaces")
RUNS = {"letters": "a", "words of two letters": "ab", "spaces": " ", "lines": "\n", "blank lines": " \n",
        "Windows lines": "\r\n", "tabs": "\t", "wide spaces": "\u3000", "digits": "7", "marks": "!", "é": "é"}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_anything_is_encoded(name, tokenizer):
    """
    A library that panics on a million spaces, which no `except Exception` catches. And other tokens than the
    library's own where that copes: cuts that are not needed, or elsewhere than inside a gap.
    """
    part = RUNS[name]
    for text in (part * 20_000 + "x", "x " + part * 9_999, "a" + part * 1000 + "\n", part * 9 + "x" + part):
        assert list(pieces(text)) == [text] and tokenizer.encode(text) == tokenizer.bpe.encode_ordinary(text)
    long = part * ((1_200_000 if name in GAPS else 250_000) // len(part))
    for text in (long + "x", long, "x" + long + "\n", "a\n" + long + "b c" + long):
        assert "".join(pieces(text)) == text and (len(list(pieces(text))) > 5) == (name in GAPS)
        assert all(len(gap) <= 200_000 for piece in pieces(text) for gap in re.findall(r"\s{999,}", piece))
    if name not in GAPS[2:]:                                           # a second each, for nothing new
        assert tokenizer.decode(tokenizer.encode(long + "x")) == long + "x"


def test_short_gaps_are_never_cut(tokenizer, monkeypatch):
    """Ordinary text whose tokens change because of where it was cut."""
    monkeypatch.setattr(plumbing.text, "LONGEST_GAP", 40)
    for text in TEXTS + random_texts():
        gaps = [len(gap) for gap in re.findall(r"\s+", text)]
        if max(gaps, default=0) <= 40:
            assert tokenizer.encode(text) == tokenizer.bpe.encode_ordinary(text)
    assert list(pieces("a" + " " * 90 + "b")) == ["a" + " " * 40, " " * 40, " " * 10 + "b"]
    assert list(pieces("a" + " " * 80 + "b")) == ["a" + " " * 40, " " * 40 + "b"]


def test_a_library_that_panics_gets_one_line(capsys):
    """A panic elsewhere: not an Exception, so that no handler sees it."""
    PanicException = type("PanicException", (BaseException,), {})

    def main():
        raise PanicException("called `Result::unwrap()` on an `Err` value: StackOverflow")
    with pytest.raises(SystemExit) as e:
        plumbing.options.command(main)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and "StackOverflow" in err and err.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# Reading

def test_a_byte_order_mark_is_no_text(tmp_path, capsys, monkeypatch):
    """
    A mark that becomes the first token, or hides the { of a JSON line: wherever text is read. Of an encoding
    that is not UTF-8 it gets a line that names it.
    """
    words, line = "the cat sees\n" * 40, json.dumps({"question_id": 1, "category": "x", "turns": ["the cat"]})
    plain, marked, other = (tmp_path / name for name in ("plain", "marked", "other"))
    for text in (words, line + "\n" + line + "\r\n\n"):
        for path, mark in ((plain, b""), (marked, codecs.BOM_UTF8), (other, codecs.BOM_UTF8 * 2)):
            path.write_bytes(mark + text.encode())
        assert read_text(plain) == read_text(marked) == read_text(other) == text
        assert read_lines(plain) == read_lines(marked) == re.split("\r?\n", text)
        assert read_prompts(str(plain)) == read_prompts(str(marked))
        assert {text for _, text in read_texts(str(tmp_path / "*"))} == {text}
    other.write_bytes(marked.read_bytes() * 2)                         # cat a.jsonl b.jsonl > other
    assert read_prompts(str(other)) == 2 * read_prompts(str(plain)) == 4 * [["the cat"]]
    for name in ("utf-16", "utf-32"):
        other.write_text(words, encoding=name)
        with pytest.raises(ValueError, match=name.upper()):
            read_text(other)
        assert name.upper() in refused(capsys, "--data", other, "--out", tmp_path / "out")
        with pytest.raises(SystemExit):
            read_prompts(str(other))
        assert name.upper() in capsys.readouterr().err
        assert len(read_texts(str(tmp_path / "*"))) == 2
        assert name.upper() in capsys.readouterr().out
    assert read_text(other, errors="replace")                          # a file of ours that was damaged


def test_a_byte_order_mark_from_stdin(trained, capsys, monkeypatch):
    """The same for a prompt that is piped in: another text, because of a mark that nobody sees."""
    out = []
    for text in ("the cat ", "\ufeffthe cat "):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        sample.main(["--out", trained, "--method", "plain", "--device", "cpu", "--max-new-tokens", "9",
                     "--prompt", "-"])
        out.append(capsys.readouterr().out)
    assert out[0] == out[1]


# --------------------------------------------------------------------------------------------------
# Finding

def put(folder, **texts):
    """a__b=text -> folder/a/b.txt"""
    for name, text in texts.items():
        path = folder / (name.replace("__", "/") + ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(data):
    return [name for name, _ in read_texts(str(data))]


def test_paths_tell_files_apart(tmp_path, monkeypatch):
    """Files of one name that are all held out together, or another split for another way to say the same."""
    for i in range(60):
        put(tmp_path, **{f"d__{i}__readme": f"text {i} " * 500})
    texts = read_texts(str(tmp_path / "d/*/readme.txt"))
    assert sorted(name for name, _ in texts) == sorted(f"{i}/readme.txt" for i in range(60))
    corpus, whole = Corpus(texts), Corpus(read_texts(str(tmp_path / "d")))
    assert len(corpus.train_texts) > 50 and corpus.val_texts == whole.val_texts
    monkeypatch.chdir(tmp_path)
    for pattern in ("d/*/*.txt", "d/**/readme.txt", "d/**", "./d/*/readme.txt", "d/*/../*/readme.txt"):
        assert Corpus(read_texts(pattern)).val_texts == whole.val_texts, pattern
    some = Corpus(read_texts("d/[1-3]*/readme.txt"))                   # whichever others there are
    assert {text for text in whole.val_texts if text[5] in "123"} == set(some.val_texts)
    put(tmp_path, e__a__same="x" * 20_000, e__b__same="y" * 20_000)    # two alone: one of each
    corpus = Corpus(read_texts("e/*/same.txt"))
    assert [len(corpus.train_texts), len(corpus.val_texts)] == [1, 1]


def test_folders_that_contain_themselves(tmp_path):
    """A file that is read forty times, or a search that never ends."""
    put(tmp_path, top__a="a", top__b="b", top__sub__c="c", top__z__d="d", elsewhere__e="e",
        elsewhere__in__f="f", around="never asked for")
    top = tmp_path / "top"
    want = ["a.txt", "b.txt", "sub/c.txt", "z/d.txt"]
    (top / "loop").symlink_to(".")
    (top / "sub" / "back").symlink_to(top)
    (top / "A").symlink_to("z")                                        # found before z, which has the names
    (top / "sub" / "up").symlink_to("..")
    (top / "aa.txt").symlink_to("b.txt")
    (top / "out").symlink_to(tmp_path)                                 # leads to what top lies in
    (top / "dangling").symlink_to("nowhere")
    (top / "self").symlink_to("self")
    for data in ("top", "top/**", "top/**/*.txt", "top/loop", "top/**/**/*", "t*p/**/*.txt"):
        found = names(tmp_path / data)
        assert [name.removeprefix("top/") for name in found] == want, data
    (top / "more").symlink_to("../elsewhere")                          # a link to other files is followed
    (top / "again").symlink_to("../elsewhere/in")
    assert names(top) == ["a.txt", "again/f.txt", "b.txt", "more/e.txt", "sub/c.txt", "z/d.txt"]
    assert names(tmp_path / "top/loop/loop/*.txt") == ["a.txt", "b.txt"]


def test_names_that_look_like_patterns(tmp_path, monkeypatch):
    """notes1.txt that is read in the place of notes[1].txt, and folders with such names that are lost."""
    monkeypatch.chdir(tmp_path)
    for name in ("notes[1]", "notes1", "d[1]/a", "d1/a", "d1/b", "what?", "whats", "x*", "xy", "[ab]/**/c",
                 "a/c"):
        put(tmp_path, **{name.replace("/", "__"): name})
    meant = {
        "notes[1].txt": ["notes[1]"], "./notes[1].txt": ["notes[1]"], "notes[12].txt": ["notes1"],
        "d[1]": ["d[1]/a"], "d[1]/": ["d[1]/a"], "d[1]/*.txt": ["d[1]/a"], "d[1]/**": ["d[1]/a"],
        "d[12]/*.txt": ["d1/a", "d1/b"], "d[1]/[ab].txt": ["d[1]/a"],
        "what?.txt": ["what?"], "what[s].txt": ["whats"],
        "x*.txt": ["x*"], "x[*].txt": ["x*"], "[x]*.txt": ["x*", "xy"],
        "[ab]": ["[ab]/**/c"], "[ab]/**/*.txt": ["[ab]/**/c"], "[a]/*.txt": ["a/c"],
        str(tmp_path / "d[1]/a.txt"): ["d[1]/a"]}
    for data, want in meant.items():
        assert [text for _, text in read_texts(data)] == want, data


def test_a_file_name_that_is_no_text(tmp_path, capsys):
    """A traceback for a name from another system, with bytes that are no UTF-8: hashed, or printed."""
    for name, data in ((b"\xe9.txt", b"text " * 100), (b"\xe8.txt", b"\0"), (b"b.txt", b"more " * 100)):
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as f:
            f.write(data)
    assert len(Corpus(read_texts(str(tmp_path))).val_texts) == 1
    assert "1 of 3 files" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Corpus

def test_corpus_holds_out_whole_files_and_always_the_same():
    """Held-out text that leaks into training, or a split that depends on which other files there are."""
    texts = [(f"dir/file{i}.py", f"text number {i} " * 3) for i in range(400)]
    a, b = Corpus(texts), Corpus(texts[100:])
    assert 2 <= len(a.val_texts) <= 40 and len(a.val_texts) + len(a.train_texts) == 400
    assert not set(a.val_texts) & set(a.train_texts)
    assert set(b.val_texts) == {t for name, t in texts[100:] if t in set(a.val_texts)}
    alone = Corpus([("x", "0123456789" * 20)])
    assert alone.train_texts[0] + alone.val_texts[0] == "0123456789" * 20


def test_batches_are_a_function_of_the_seed_and_reach_the_last_token(capsys):
    """An exclusive bound taken twice (the last token never drawn), and text shorter than a sequence."""
    corpus = Corpus([("x", "abcdefghij" * 20)]).tokenize(Tokenizer([bytes([i]) for i in range(256)]))
    assert torch.equal(corpus.batch(7, 4, 16), corpus.batch(7, 4, 16))
    assert not torch.equal(corpus.batch(7, 4, 16), corpus.batch(8, 4, 16))
    corpus.train = torch.arange(17)
    seen = {row[-1].item() for s in range(40) for row in corpus.batch(s, 4, 16)}
    assert seen == {15, 16}
    with pytest.raises(SystemExit):
        corpus.batch(0, 1, 17)
    assert "give more --data" in capsys.readouterr().err


def test_aligned_batches_lie_side_by_side():
    """Catches sequences that never come again, and an end of the text that is never or wrongly drawn."""
    corpus = Corpus([("a", "x" * 20), ("b", "y")])
    corpus.train = torch.arange(47)
    for aligned, starts in ((True, set(range(0, 40, 10))), (False, set(range(38)))):
        corpus.aligned = aligned
        x = torch.cat([corpus.batch(seed, 8, 10) for seed in range(100)])
        assert set(x[:, 0].tolist()) == starts and torch.equal(x, x[:, :1] + torch.arange(10))


def test_texts_that_cannot_be_read(tmp_path, capsys):
    """Binary, Latin-1 or empty files that end in a traceback, or one bad file that spoils a folder."""
    (tmp_path / "binary").write_bytes(b"\x00\x01\x02" * 100)
    (tmp_path / "latin").write_bytes("é".encode("latin-1") * 100)
    (tmp_path / "empty").write_text("")
    for name in ("binary", "latin", "empty"):
        err = refused(capsys, "--data", tmp_path / name, "--out", tmp_path / "out")
        assert "no readable UTF-8 text" in err
    (tmp_path / "good").write_text("good text " * 50)
    assert [name for name, _ in read_texts(str(tmp_path))] == ["good"]
    assert "2 of 4 files" in capsys.readouterr().out
    argv = ["--method", "backbone", "--data", tmp_path / "good", "--out", tmp_path / "out"]
    assert "give more --data" in refused(capsys, *argv)


def test_a_text_may_be_a_link(tmp_path, text_file):
    """Refusing pipes must not refuse links to files."""
    (tmp_path / "link").symlink_to(text_file)
    assert read_texts(str(tmp_path / "link")) and read_texts(str(tmp_path))


def test_the_most_frequent_tokens():
    """Catches rare tokens in the place of frequent ones, and an index that is out of order."""
    corpus = Corpus([("a", "x")])
    corpus.train = torch.tensor([5, 5, 5, 2, 2, 9, 9, 7], dtype=torch.int32)
    corpus.tokenizer = Tokenizer([b"%d" % i for i in range(10)])
    assert corpus.frequent(3).tolist() == [2, 5, 9]
    assert corpus.frequent(0) is None and corpus.frequent(11) is None
    assert corpus.frequent(6).tolist() == [0, 1, 2, 5, 7, 9]


@pytest.mark.parametrize("sizes", [[200_000, 200_000, 3], [200_000, 200_000, 300], [3, 3, 3, 9000],
                                   [30_000, 900_000], [20] * 2000, [70_000]], ids=lambda n: str(n[:3]))
def test_enough_is_held_out_and_enough_is_left(sizes, tmp_path, capsys):
    """A score of three characters, and a training on what is left beside a held-out giant."""
    corpus = Corpus([(f"{i:05d}", "x" * n) for i, n in enumerate(sizes)])
    train, val = ("".join(texts) for texts in (corpus.train_texts, corpus.val_texts))
    assert len(train) + len(val) == sum(sizes)
    assert sum(sizes) / 100 <= len(val) <= sum(sizes) / 2
    assert all(corpus.train_texts) and all(corpus.val_texts)
    assert ("held out instead" in capsys.readouterr().out) == (1 < len(sizes) < 9)


def test_files_are_held_out_as_ever():
    """Another split of the default corpus, or of a folder, than the one that weights/ was trained on."""
    texts = [(f"dir/file{i}.py", f"text number {i} " * 30) for i in range(400)]
    held = [i for i, text in enumerate(text for _, text in texts) if text in Corpus(texts).val_texts]
    assert held == [90, 209, 245, 249, 279, 282, 354, 358]
    texts = read_texts("python")
    names = {name.replace(os.sep, "/") for name, _ in texts}
    assert len(texts) == len(names) > 300 and {"argparse.py", "json/decoder.py"} <= names
    assert not any(plumbing.text.SKIP & set(name.split("/")) for name in names)
    held = [text for name, text in texts if zlib.crc32(name.replace(os.sep, "/").encode()) % 40 == 0]
    assert Corpus(texts).val_texts == held


def test_too_little_text_gets_a_line_before_any_training(tmp_path, capsys, monkeypatch):
    """Minutes of training that end in "give more --data", or in a score of four tokens."""
    monkeypatch.setattr(train, "train_backbone", lambda *_: pytest.fail("it was trained"))
    out = ["--method", "backbone", *TINY, "--steps", "5", "--out", tmp_path / "out"]
    words = "the cat sees a big dog, 12 small houses. "
    put(tmp_path, short=words * 3, few=words * 20, a__x=words * 9, a__y="z", blank=words * 200 + "\n" * 500)
    for data, says in (("short.txt", "training text"), ("few.txt", "held-out text"), ("a", "held-out text"),
                       ("blank.txt", "held-out text")):
        assert says in refused(capsys, *out, "--data", tmp_path / data), data
    # sequences begin short: a text that has no long one must not be found out at two thirds
    monkeypatch.setattr(plumbing.text, "LEAST", 8)
    long = [*out, "--block-size", "600", "--first-length", "8", "--data", tmp_path / "few.txt"]
    assert "601 are needed" in refused(capsys, *long)
