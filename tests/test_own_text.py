"""The backbone's own text: what it is given, what it writes, and what becomes of text that is there."""
import json
import os
import shutil

import pytest
import torch

import plumbing.own_text
import sample
import train
from conftest import tiny
from plumbing.chat import PretrainedTokenizer
from plumbing.checkpoint import load
from plumbing.own_text import own_text, pick, write
from plumbing.pretrained import load_pretrained
from plumbing.text import Corpus
from test_pretrained import TEMPLATE, byte_level, chat_model, folder, hf_llama, refused  # noqa: F401
from tree import Sampler


def test_pick_samples_the_nucleus():
    """Catches a sampler that is off by one token, lets in what top-p excludes, or ignores the temperature."""
    z, n = torch.randn(1, 600, generator=torch.Generator().manual_seed(0)) * 2, 8000
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.9), (1.5, 0.999), (1.0, 0.0)):
        want = (Sampler(temperature, top_p=top_p).filter(z) / temperature).softmax(-1)[0]
        u = (torch.arange(n) + 0.5) / n                                # every part of the unit interval once
        got = pick(z.expand(n, -1), temperature, top_p, u)
        share = torch.bincount(got, minlength=600) / n
        assert (share - want).abs().max() < 2 / n + 1e-4 and not share[want == 0].any()
    assert pick(z, 0.0, 1.0, torch.zeros(1)).item() == z.argmax()
    u = torch.tensor([0.0, 1 - 2**-24])
    assert pick(z.expand(2, -1), 1.0, 1.0, u).max() < 600              # the ends of the interval too


SCRIPTS = [[[1, 5, 6, 7], [9, 9, 8]], [[1, 5]], [[1, 5, 6, 7, 8, 9, 10], [4], [3, 3]], [[1, 5]], [[1, 6]],
           [[1, 7, 8]], [[1]], [[2, 2]]]


def slowly(target, script, row, B, stops, limit, seed, asking):
    """One text, token by token, without a cache or neighbours."""
    uniform, text, given = torch.Generator().manual_seed(seed), list(script[0]), list(script[1:])
    first = min(len(s[0]) for s in SCRIPTS)
    for n in range(first, limit):                                      # a number a position, used or not
        u = torch.rand(B, generator=uniform)[row:row + 1]
        if n < len(text):
            continue
        logits = target(torch.tensor([text]))[0][:, -1]
        token = pick(logits, asking if given and asking else 0.9, 0.95, u).item()
        if token in stops and given:
            text += given.pop(0)
        else:
            text.append(token)
            if token in stops:
                break
    return text[:limit]


@pytest.mark.parametrize("longest, asking", [(3, None), (60, None), (60, 0.1)])
def test_written_text_is_what_the_model_says_token_by_token(longest, asking, monkeypatch):
    """Rows that mix when some end, prompts of other lengths fed at wrong places, lost turns, and overruns."""
    monkeypatch.setattr(plumbing.own_text, "LONGEST", longest)
    target, stops = tiny(block_size=60, vocab_size=23), {11, 12, 13}
    limit = min(60, longest + 10)
    texts = write(target, SCRIPTS, stops, 0.9, 0.95, seed=3, asking=asking)
    how = len(SCRIPTS), stops, limit, 3, asking
    assert texts == [slowly(target, script, i, *how) for i, script in enumerate(SCRIPTS)]
    lengths = sorted(map(len, texts))
    assert lengths[-1] <= limit and (longest == 3 or lengths[0] < lengths[-1])
    if longest == 60 and asking is None:
        assert [9, 9, 8] == texts[0][texts[0].index(9):][:3] or 9 not in texts[0]
        assert any(t[-1] in stops for t in texts)


def own(path, backbone, *more):
    """train.py --data self -> what was written: tokens, lengths of the texts."""
    train.main(["--backbone", backbone, "--out", str(path), "--data", "self", "--method", "medusa",
                "--device", "cpu", "--steps", "1", "--batch-size", "2", "--self-tokens", "1500", *more])
    name = os.path.basename(backbone)
    return written(os.path.join(path, name, "self", "text.safetensors"))


def write_only(out, backbone, **options):
    """The same without a training; out is the folder of this backbone."""
    opt = train.Options(out=str(out), **{"self_tokens": 1500, **options})
    own_text(opt, *load_pretrained(backbone)[:2], "cpu")
    return written(os.path.join(out, "self", "text.safetensors"))


def written(path):
    tensors, _ = load(path, "", "")
    return tensors["tokens"].tolist(), tensors["lengths"].tolist()


def test_own_text_is_kept_and_resumed(chat_model, tmp_path, monkeypatch, capsys):
    """
    Text that is written twice, lost when a run is killed or other text is asked for, or taken though it was
    written otherwise. What was written is never gone without a word.
    """
    real, calls = plumbing.own_text.write, []

    def counted(*args):
        calls.append(args)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(plumbing.own_text, "write", counted)
    monkeypatch.setattr(plumbing.own_text, "LONGEST", 16)
    stop_at = 0
    whole = own(tmp_path / "whole", chat_model)
    batches = len(calls)
    assert batches > 1 and sum(whole[1]) == len(whole[0]) >= 1500
    texts = [tuple(t.tolist()) for t in torch.tensor(whole[0]).split(whole[1])]
    assert len(set(texts)) == len(texts), "a batch came twice"
    assert own(tmp_path / "whole", chat_model) == whole and len(calls) == batches, "written again"
    assert own(tmp_path / "whole", chat_model, "--self-tokens", "700") == whole, "a part is there"
    assert len(calls) == batches
    calls, stop_at = [], 2                                             # killed in the second batch ...
    with pytest.raises(KeyboardInterrupt):
        own(tmp_path / "killed", chat_model)
    calls, stop_at = [], 0
    assert own(tmp_path / "killed", chat_model) == whole and len(calls) == batches - 1, "not resumed"
    capsys.readouterr()
    out, kept = tmp_path / "whole/tiny-chat", [whole]
    prompts = tmp_path / "prompts"
    prompts.write_text("the cat\n")
    for n, (name, value) in enumerate(dict(temperature=0.5, seed=3, prompts=str(prompts)).items(), 1):
        calls, option = [], name if name == "seed" else f"self_{name}"
        now = write_only(out, chat_model, **{option: value})
        assert now not in kept and len(calls) > 1, "other settings, old text"
        said = capsys.readouterr().out
        assert "written with another" in said and f"{name} (" in said
        assert f"kept as {out / 'self' / f'text-{n}.safetensors'}" in said
        kept.append(now)
        assert [written(out / "self" / f"text-{i + 1}.safetensors") for i in range(n)] == kept[:-1]
    prompts.rename(tmp_path / "elsewhere")                             # the same prompts, wherever they are
    calls = []
    assert write_only(out, chat_model, self_prompts=str(tmp_path / "elsewhere")) == now and not calls


CLOCK = TEMPLATE.replace("{% for", "{{ strftime_now('%H:%M:%S.%f') }}{% for", 1)


def test_a_clock_in_the_chat_template(tmp_path, monkeypatch, capsys):
    """Text that is thrown away a minute later, since the prompt has the time in it."""
    hf, tokenizer = hf_llama(vocab_size=320, max_position_embeddings=128, eos_token_id=2), byte_level()
    monkeypatch.setattr(plumbing.own_text, "LONGEST", 16)
    tokenizer.chat_template = CLOCK
    model = folder(tmp_path / "clock", hf, tokenizer)
    times = [load_pretrained(model)[1].chat(["a"]) for _ in range(2)]
    assert times[0] != times[1], "this clock stands still"
    prompts = tmp_path / "prompts"
    prompts.write_text("the cat\na dog\nsees\n")
    for option in ("", str(prompts)):
        out = tmp_path / f"out{len(option)}"
        short = write_only(out, model, self_prompts=option)
        longer = write_only(out, model, self_prompts=option, self_tokens=3000)
        assert longer[0][:len(short[0])] == short[0] and len(longer[0]) >= 3000 > len(short[0])
        assert write_only(out, model, self_prompts=option) == longer and len(os.listdir(out / "self")) == 2
        assert "another" not in capsys.readouterr().out
    for template in (TEMPLATE, TEMPLATE.replace("|start|", "|end|")):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(model)
        before = written(out / "self/text.safetensors")
        assert write_only(out, model, self_prompts=option) != before
        assert "another template (" in capsys.readouterr().out
    assert sorted(os.listdir(out / "self")) == sorted(
        f"text{n}.{end}" for n in ("", "-1", "-2") for end in ("json", "safetensors"))


def test_prompts_that_cannot_be_read(chat_model, tmp_path, capsys):
    """Options that contradict each other and are half obeyed, and prompts that cannot be read."""
    run = lambda *argv: train.main([*map(str, argv), "--out", str(tmp_path), "--device", "cpu"])
    assert "run python train.py --method backbone first" in refused(capsys, run, "--data", "self")
    self = ["--backbone", chat_model, "--data", "self", "--method", "medusa"]
    assert "--self-top-p" in refused(capsys, run, *self, "--self-top-p", "1.5")
    with pytest.MonkeyPatch.context() as m:                            # as if nothing ended its question
        m.setattr(PretrainedTokenizer, "script", lambda self, turns: [[1]])
        assert "give --self-prompts" in refused(capsys, run, *self, "--self-temperature", "0")
    prompts = tmp_path / "prompts"
    assert "cannot be read" in refused(capsys, run, *self, "--self-prompts", prompts)
    for text in ("", '{"turns": []}', '{"turns": "a"', '{"turn": ["a"]}', '{"turns": [1]}',
                 '{"turns": ["a"]}\nb', '{"turns": ["\\ud800"]}'):
        prompts.write_text(text)
        refused(capsys, run, *self, "--self-prompts", prompts)
    prompts.write_text("long " * 200)
    assert "no prompt leaves room" in refused(capsys, run, *self, "--self-prompts", prompts)


def test_greedy_answers_to_questions_of_its_own(chat_model, tmp_path, monkeypatch):
    """Catches greedy questions, which were all the same one, and answers that are not greedy."""
    monkeypatch.setattr(plumbing.own_text, "LONGEST", 40)
    tokens, lengths = write_only(tmp_path, chat_model, self_temperature=0.0)
    target, tokenizer, _ = load_pretrained(chat_model)
    texts = [t.tolist() for t in torch.tensor(tokens).split(lengths)]
    before, between = tokenizer.script(None)
    assert len({tuple(t) for t in texts}) > 0.9 * len(texts)
    answers = 0
    for text in texts[:20]:
        ends = [i for i, t in enumerate(text) if t in tokenizer.stops and i >= len(before)]
        end = ends[0] if ends else len(text)
        start = end + len(between)
        if start < len(text):
            assert text[end:start] == between
            said = target(torch.tensor([text]))[0][0, start - 1:-1].argmax(-1).tolist()
            answers += text[start:] == said
            assert text[start:] == said
    assert answers, "no question ended"


def test_own_text_begins_as_asked(chat_model, tmp_path):
    """Prompts that are not used, in another format than the model's, or trained on though held out."""
    _, tokenizer, _ = load_pretrained(chat_model)
    prompts = tmp_path / "prompts.jsonl"
    turns = [[f"the {word}", "and?"] for word in "cat dog house tree mouse".split()]
    lines = [json.dumps({"question_id": i, "turns": t}) for i, t in enumerate(turns)]
    prompts.write_text("\n".join(lines))
    tokens, lengths = write_only(tmp_path, chat_model, self_prompts=str(prompts))
    texts = [t.tolist() for t in torch.tensor(tokens).split(lengths)]
    for i, text in enumerate(texts):
        start = tokenizer.chat(turns[i % 5][:1])
        assert text[:len(start)] == start
    corpus = Corpus([(str(i % 5), t) for i, t in enumerate(texts)])
    opening = lambda texts: {tuple(text[:12]) for text in texts}
    assert corpus.val_texts and not opening(corpus.val_texts) & opening(corpus.train_texts)
    tokens, lengths = write_only(tmp_path, chat_model)
    before, after = tokenizer.script(None)
    assert tokens[:len(before)] == before
    prompts.write_text("the cat\n\na dog\n")
    tokens, lengths = write_only(tmp_path, chat_model, self_prompts=str(prompts))
    assert tokens[:len(start)] == tokenizer.chat(["the cat"])[:len(start)]


def test_own_backbone_writes_its_own_text(trained, tmp_path, capsys):
    """Catches --data self that works for pretrained backbones only."""
    shutil.copytree(os.path.join(trained, "backbone"), tmp_path / "backbone")
    train.main(["--out", str(tmp_path), "--data", "self", "--self-tokens", "3000", "--method", "medusa",
                "--steps", "2", "--device", "cpu", "--draft-vocab", "50"])
    sample.main(["--out", str(tmp_path), "--max-new-tokens", "20", "--prompt", "the ", "--compare"])
    assert "text identical" in capsys.readouterr().err
