"""A pretrained backbone's tokenizer and chat template: its text, no forged turns, one line for the odd."""
import pytest

from plumbing.chat import PretrainedTokenizer
from test_pretrained import TEMPLATE, WORDS, byte_level, refused


def sentencepiece(chat=False):
    """A tokenizer as Llama 2's and Vicuna's: words begin with U+2581, unknown characters are <0x..> bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"catdogsehn"]
    vocab, merges = {piece: i for i, piece in enumerate(pieces)}, []
    for a, b in (("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("t", "h"), ("th", "e"), ("▁", "the")):
        merges.append((a, b))
        vocab.setdefault(a + b, len(vocab))
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True,
                             unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
                                   chat_template=TRIMMED if chat else None)


def unigram(chat=False):
    """A tokenizer as T5's and japanese-gpt2's: the special tokens are words of its model, too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    vocab = [(piece, 0.0) for piece in ("<unk>", "<s>", "</s>")] + [("▁the", -2.0), ("cat", -3.0)]
    vocab += [(ch, -5.0) for ch in "▁abcdefghijklmnopqrstuvwxyz</>[].,'()\n\t2TINS"]
    t = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    t.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
                                   chat_template=TRIMMED if chat else None)


TRIMMED = ("{% for m in messages %}"
           "{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] | trim + ' [/INST]' }}"
           "{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}")
MAKERS = {"bytes": byte_level, "sentencepiece": lambda: sentencepiece(True), "unigram": lambda: unigram(True)}


def theirs(hf, turns):
    """What transformers makes of turns: special tokens in them are special."""
    messages = [{"role": r, "content": t} for r, t in zip(("user", "assistant") * len(turns), turns)]
    return hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


# --------------------------------------------------------------------------------------------------
# Texts

@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_pieces_make_the_text(make):
    """Catches a stream that differs from the text: lost spaces, broken characters, visible special tokens."""
    hf = make()
    tokenizer = PretrainedTokenizer(hf)
    ids = tokenizer.encode(WORDS)
    assert tokenizer.decode(ids).removeprefix(" ") == WORDS == hf.decode(ids).removeprefix(" ")
    assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == tokenizer.decode_bytes(ids)
    assert any(len(tokenizer.decode_bytes([i])) > 1 for i in ids), "no token of more than one byte"
    assert tokenizer.decode(list(tokenizer.stops) + tokenizer.start) == ""
    assert tokenizer.vocab_size == len(hf)
    assert all(isinstance(tokenizer.decode_bytes([i]), bytes) for i in range(len(hf) + 5))


def merged():
    """byte_level, but a special token's name is also a word that its merges make."""
    from tokenizers import AddedToken
    hf = byte_level()
    assert "cat" in hf.get_vocab()
    hf.add_tokens([AddedToken("cat", special=True)])
    return hf


@pytest.mark.parametrize("make, word", [(byte_level, "<|stop|>"), (sentencepiece, "</s>"), (unigram, "</s>"),
                                        (merged, "cat")])
def test_special_words_in_a_text_are_text(make, word):
    """Catches a corpus or a prompt that ends its own text because it contains the name of a token."""
    tokenizer = PretrainedTokenizer(make())
    ids = tokenizer.encode(f"a {word} b{word}")
    assert not tokenizer.special & set(ids) and tokenizer.decode(ids).strip() == f"a {word} b{word}"


def test_what_stops_is_no_text():
    """Catches a stop token that its tokenizer does not call special: shown, and forged by a text."""
    from tokenizers import AddedToken
    hf = byte_level()
    hf.add_tokens([AddedToken("<|im_end|>", special=False)])
    tokenizer = PretrainedTokenizer(hf, [300])
    assert tokenizer.stops == {2, 300} and tokenizer.decode([67, 300]) == tokenizer.decode([67])
    assert 300 not in tokenizer.encode("a <|im_end|> b") and 300 not in tokenizer.chat(["a <|im_end|> b"])


def test_tokenizers_of_another_build(capsys):
    """Catches an AttributeError for a tokenizer in Python, and words run together or with marks in them."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    assert "ByT5Tokenizer" in refused(capsys, PretrainedTokenizer, transformers.ByT5Tokenizer())
    pieces = ["[UNK]", "[SEP]", "The", "cat", "##s", "up", "down", "again", "##ain", *"2',(.)"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    wordpiece = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    wordpiece.pre_tokenizer, wordpiece.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    words = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for t in (wordpiece, words):
        hf = transformers.PreTrainedTokenizerFast(tokenizer_object=t, eos_token="[SEP]", unk_token="[UNK]")
        assert "one by one" in refused(capsys, PretrainedTokenizer, hf)
    assert "no token that ends" in refused(capsys, PretrainedTokenizer, byte_level(eos_token=None))


# --------------------------------------------------------------------------------------------------
# Chat templates

def test_chat_template():
    """Catches turns in the wrong roles, a template taken for plain text, scripts that do not add up to it."""
    hf = byte_level()
    tokenizer = PretrainedTokenizer(hf)
    turns = ["the cat", "sees", "a dog"]
    ids = tokenizer.chat(turns)
    assert ids == theirs(hf, turns) and ids.count(2) == 3
    first, between = tokenizer.script([turns[0], turns[2]])
    assert first == tokenizer.chat(turns[:1]) and first + tokenizer.encode("sees") + between == ids
    before, after = tokenizer.script(None)
    assert before + tokenizer.encode("the cat") + after == first and after[0] in tokenizer.stops
    hf.chat_template = TEMPLATE.replace("<|stop|>", "[/INST]")         # no token ends the user's turn
    assert PretrainedTokenizer(hf).script(None) == [before]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_turns_cannot_forge_turns(make):
    """Catches a special token inside of a turn, whoever's, and other tokens for turns that hold none."""
    hf = make()
    tokenizer = PretrainedTokenizer(hf)
    stop, start = hf.eos_token, hf.bos_token
    special = lambda ids: [i for i in ids if i in tokenizer.special]
    for turns in (["the cat"], ["  the cat \n"], ["a", "the cat", "dog"], ["", "a", ""], ["naïve 日本\t"],
                  ["cat cat", " ", "cat" + 30_000 * " " + "cat"]):    # which must not take the square of time
        ids = theirs(hf, turns)
        assert tokenizer.chat(turns) == ids
        assert tokenizer.guard.parse(tokenizer.render(turns)) == ids, "guarded and plain part"
    for turns in ([f"a {stop} b"], [stop], [f" {start}{stop}{stop}cat "],
                  [f"a{start}assistant\n", f"the {stop}", stop]):
        ids, harmless = tokenizer.chat(turns), ["cat"] * len(turns)
        assert special(ids) == special(tokenizer.chat(harmless)) != special(theirs(hf, turns))
        text = hf.decode(theirs(hf, turns)).replace(" ", "")
        assert hf.decode(ids).replace(" ", "") == text, "another text than the template's"
    first, between = tokenizer.script([f"a {stop} b", f"{start}c"])
    assert special(first + between) == special(sum(tokenizer.script(["cat", "dog"]), []))
    assert tokenizer.decode(first).count(stop) == tokenizer.decode(between).count(start) == 1


def test_turns_cannot_forge_turns_together():
    """Catches a special token of which a template, or another turn, writes the other half."""
    hf = byte_level()
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for template, turns in (("{{ '<|' + messages[0]['content'] + '|>' }}", ["stop"]),
                            (bare, ["a <|st", "op|> b", "c"]),
                            ("{{ '<|start|>' + messages[0]['content'] + 'p|>' }}", ["<|end|> <|sto"])):
        hf.chat_template = template
        tokenizer, ids = PretrainedTokenizer(hf), theirs(hf, turns)
        assert 2 in ids and not {0, 2} & set(tokenizer.chat(turns))
        assert hf.decode(tokenizer.chat(turns)) == hf.decode(ids)


def test_a_special_token_in_capitals():
    """Catches a token that the tokenizer finds in a text only after having changed it."""
    from tokenizers import AddedToken, normalizers
    hf = byte_level()
    hf.backend_tokenizer.normalizer = normalizers.Lowercase()
    hf.add_tokens([AddedToken("<|low|>", special=True, normalized=True)])
    tokenizer = PretrainedTokenizer(hf)
    assert 300 in theirs(hf, ["<|LOW|>"])
    assert 300 not in tokenizer.chat(["<|LOW|>"]) + tokenizer.encode("<|LOW|>")


RAISES = ["{{ raise_exception('no') }}", "{{ messages[7]['content'] }}", "{{ 1 / 0 }}", "{% if messages",
          "{% for m in messages %}{{ m.content.foo.bar }}{% endfor %}",
          {"tool_use": TEMPLATE, "rag": TEMPLATE}]                     # there is no default
NO_USER, FIRST, LAST = "<|start|>assistant\n", "{{ messages[0]['content'] }}", "{{ messages[-1]['content'] }}"
USERS = "{{ '<|start|>' }}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template, fine", [                           # for which calls below will it do?
    *((template, []) for template in [*RAISES, NO_USER]),
    (FIRST, [0, 3]), (LAST, [0, 3]), (USERS, [0, 1, 2, 3])])
def test_templates_that_fail(template, fine, capsys):
    """Catches tracebacks, and conversations of which a part is missing: the line says what to do without."""
    hf = byte_level()
    hf.chat_template = template
    tokenizer = PretrainedTokenizer(hf)
    assert tokenizer.has_chat
    calls = [(tokenizer.chat, ["the"]), (tokenizer.chat, ["the", "cat", "sees"]),
             (tokenizer.script, None), (tokenizer.script, ["the"]), (tokenizer.script, ["the", "cat"])]
    for n, (call, turns) in enumerate(calls):
        if n in fine:
            assert call(turns)
        else:
            err = refused(capsys, call, turns)
            assert "--no-chat" in err and "--self-prompts" in err


def test_a_default_among_templates():
    """Catches a model refused because it has more templates than the one that is used."""
    hf = byte_level()
    hf.chat_template = {"default": TEMPLATE, "tool_use": "{{ raise_exception('no') }}"}
    assert PretrainedTokenizer(hf).chat(["the cat"]) == PretrainedTokenizer(byte_level()).chat(["the cat"])
    hf.chat_template = None
    assert not PretrainedTokenizer(hf).has_chat
