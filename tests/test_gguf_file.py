"""GGUF files: whatever they say of a model is computed, or refused in one line that names it."""
import json

import pytest
import torch

from plumbing.pretrained import load_pretrained
from test_pretrained import byte_level, hf_llama, hf_qwen2, ids, refused

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


def interleaved(weight, heads):
    """Rows of queries or keys in the order of llama.cpp: the halves of a head lie in turn."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_file(path, hf, says=(), tensors=(), arch="llama"):
    """
    A GGUF file of a Llama or Qwen2 with byte_level's tokenizer.

    says       more of its metadata: name without the architecture's -> value
    tensors    more of them: name -> tensor
    """
    c, w = hf.config, gguf.GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)
    width = c.hidden_size // c.num_attention_heads
    for name, value in {"rope.dimension_count": width, **dict(says)}.items():
        add = {int: w.add_uint32, float: w.add_float32, str: w.add_string, bool: w.add_bool}[type(value)]
        add(f"{arch}.{name}", value)

    model = json.loads(byte_level().backend_tokenizer.to_str())["model"]
    w.add_tokenizer_model("gpt2")
    w.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    w.add_token_types([3] * 3 + [1] * (len(model["vocab"]) - 3))       # 3: special
    w.add_token_merges([" ".join(pair) for pair in model["merges"]])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)

    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), c.num_hidden_layers)
    for name, x in hf.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        part, kind = name.rsplit(".", 1)
        if arch == "llama" and part.endswith(("q_proj", "k_proj")):
            x = interleaved(x, c.num_attention_heads if part.endswith("q_proj") else c.num_key_value_heads)
        w.add_tensor(f"{names.get_name(part)}.{kind}", x.numpy())
    for name, x in dict(tensors).items():
        w.add_tensor(name, x.numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return str(path)


def off_by(ours, hf):
    x = ids(300, 1, 40)
    return (ours(x)[0] - hf(x).logits).abs().max()


NEUTRAL = {"attention.causal": True, "expert_count": 0, "logit_scale": 1.0, "attention.sliding_window": 64,
           "rope.scaling.type": "none", "attention.key_length": 8}


@pytest.mark.parametrize("make, arch, tied", [
    (hf_llama, "llama", True), (hf_llama, "llama", False), (hf_qwen2, "qwen2", True)])
def test_a_file_computes_what_transformers_computes(make, arch, tied, tmp_path):
    """Catches a file read wrongly, and one that is refused for what changes nothing."""
    hf = make(vocab_size=300, tie_word_embeddings=tied)
    for says in ({}, NEUTRAL):
        path = gguf_file(tmp_path / "a.gguf", hf, says, arch=arch)
        assert off_by(load_pretrained(path)[0], hf) < 1e-4


def scaled(divisor):
    """A Llama whose rotary frequencies (4) are divided."""
    hf = hf_llama(vocab_size=300)
    hf.model.rotary_emb.inv_freq /= divisor
    return hf


FREQS = torch.tensor([1.0, 2.0, 4.0, 8.0])


@pytest.mark.parametrize("says, factors, divisor", [
    ({}, torch.full((4,), 8.0), 8), ({}, FREQS, FREQS), ({"rope.scaling.type": "none"}, FREQS, FREQS),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, None, 4),
    ({"rope.scale_linear": 4.0}, None, 4),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, FREQS, 4 * FREQS),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None, 1)], ids=str)
def test_rope_scaling_is_applied(says, factors, divisor, tmp_path):
    """Catches scaling that transformers drops: Llama 3's, which is a tensor, and linear scaling."""
    hf, plain = scaled(divisor), hf_llama(vocab_size=300)
    tensors = {} if factors is None else {"rope_freqs.weight": factors}
    ours = load_pretrained(gguf_file(tmp_path / "a.gguf", plain, says, tensors))[0]
    changed = torch.is_tensor(divisor) or divisor != 1
    assert off_by(ours, hf) < 1e-4
    assert (off_by(ours, plain) > 1e-2) == ours.scaled == changed


@pytest.mark.parametrize("says, tensors, name", [
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}, "rope.scaling.type = yarn"),
    ({"rope.scaling.attn_factor": 1.5}, {}, "rope.scaling.attn_factor"),
    ({"rope.scaling.factor": float("nan")}, {}, "no positive number"),
    ({}, {"rope_freqs.weight": torch.zeros(4)}, "no positive number"),
    ({}, {"rope_freqs.weight": torch.ones(1)}, "1 numbers, not 4"),
    ({}, {"rope_factors_long.weight": torch.ones(4)}, "rope_factors_long.weight"),
    ({"attention.sliding_window": 16}, {}, "attention.sliding_window = 16"),
    ({"attention.value_length": 4}, {}, "attention.value_length = 4"),
    ({"attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping"),
    ({"logit_scale": 0.5}, {}, "logit_scale = 0.5"), ({"attention.scale": 0.5}, {}, "attention.scale"),
    ({"attention.causal": False}, {}, "attention.causal = False"),
    ({"expert_count": 8}, {}, "expert_count = 8"), ({"some.new_thing": 3}, {}, "some.new_thing"),
    ({}, {"blk.0.attn_q.bias": torch.ones(32), "extra": torch.ones(3)}, "blk.0.attn_q.bias, extra"),
    ({}, {"blk.3.attn_q.weight": torch.ones(32, 32)}, "blk.3.attn_q.weight"),
    ({}, {"output.bias": torch.ones(300)}, "output.bias")], ids=str)
def test_what_cannot_be_computed_is_refused(says, tensors, name, tmp_path, capsys):
    """Catches a model that computes something else than its file says."""
    path = gguf_file(tmp_path / "a.gguf", hf_llama(vocab_size=300), says, tensors)
    err = refused(capsys, load_pretrained, path)
    assert name in err and path in err


def test_a_partial_rotation_is_refused(tmp_path, capsys):
    """Catches a head of which a half is rotated: in Qwen2's files transformers does not look."""
    path = gguf_file(tmp_path / "a.gguf", hf_qwen2(vocab_size=300), {"rope.dimension_count": 4}, arch="qwen2")
    assert "rope.dimension_count = 4" in refused(capsys, load_pretrained, path)


def test_a_file_cut_off(tmp_path, capsys):
    """Catches a traceback, and a reader of ours that stays in the place of the library's."""
    before, path = gguf.GGUFReader, gguf_file(tmp_path / "a.gguf", hf_llama(vocab_size=300))
    load_pretrained(path)
    assert gguf.GGUFReader is before
    data = open(path, "rb").read()
    for left in (0, 3, 100, len(data) // 2):
        with open(path, "wb") as f:
            f.write(data[:left])
        assert path in refused(capsys, load_pretrained, path)
    assert gguf.GGUFReader is before
