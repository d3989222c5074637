"""
Text of the target's own: what it is given, and what it writes (self-distillation, Medusa 2.3.2).
"""
import copy
import itertools
import json
import os

from tqdm import tqdm
import torch
import torch.distributed as dist

from plumbing.checkpoint import DAMAGED, differences, load, save, versions
from plumbing.fast import for_decoding
from plumbing.options import fail, gpu, pick_dtype, rank, say
from plumbing.text import Corpus, digest, read_lines


LONGEST = 512                                                          # tokens that a text adds, at most
ASKING = 0.8                                                           # lowest temperature of questions:
                                                                       # greedy ones were all the same


def pick(logits, temperature, top_p, u):
    """(B, V) logits, u (B,) uniform in [0, 1) -> (B,) samples after temperature (0 = greedy) and top-p."""
    if temperature < 1e-30:                                            # floats cannot divide by less
        return logits.argmax(-1)
    p = (logits.float() / temperature).softmax(-1)
    top, ids, k = p, torch.arange(p.size(-1), device=p.device).expand_as(p), p.size(-1)
    if top_p < 1:
        k = min(256, k)                                                # cheaper than all V, and mostly enough
        while (found := p.topk(k))[0].sum(-1).min() < top_p and k < p.size(-1):
            k = min(8 * k, p.size(-1))
        top, ids = found
    mass = top.cumsum(-1)
    inside = (mass - top < top_p).sum(-1).clamp(min=1)                 # (B,) tokens: those before lack top_p
    total = mass.gather(-1, inside[:, None] - 1)
    i = (mass <= u[:, None] * total).sum(-1).minimum(inside - 1)       # the distribution function, inverted
    return ids.gather(-1, i[:, None]).squeeze(-1)


def longest(target, scripts):
    """Tokens that a text written from one of scripts has at most."""
    return min(target.cfg.block_size, LONGEST + max(sum(map(len, script)) for script in scripts))


@torch.inference_mode()
def write(target, scripts, stops, temperature, top_p, seed, bar=None, asking=None):
    """
    One text for each script, all side by side. A script is a list of lists of ids: what the target is given
    first, and after each token in stops but the last, which they replace. asking: temperature of what is
    written before the last of them was given, None = the same. -> list of lists of ids, given ones included.
    """
    B, device = len(scripts), target.wte.weight.device
    texts, given, done = [list(s[0]) for s in scripts], [list(s[1:]) for s in scripts], [False] * B
    limit = longest(target, scripts)
    cache, uniform = target.new_cache(limit, B), torch.Generator().manual_seed(seed)
    rows, S = list(range(B)), min(map(len, texts))                     # longer openings go in token by token
    x = torch.tensor([t[:S] for t in texts], device=device)
    while True:
        hidden = target.hidden(x, cache=cache)
        cache.keep(range(x.size(1)))
        u = torch.rand(B, generator=uniform)[rows].to(device)          # the same whoever is left
        logits = target.lm_head(hidden[:, -1])
        choice = pick(logits, temperature, top_p, u)
        if asking is not None and any(asks := [bool(given[row]) for row in rows]):
            question = pick(logits, asking, top_p, u)
            choice = torch.where(torch.tensor(asks, device=device), question, choice)
        for row, token in zip(rows, choice.tolist()):
            if len(texts[row]) > S or done[row]:
                continue
            if token in stops and given[row]:
                texts[row] += given[row].pop(0)
            else:
                texts[row].append(token)
                done[row] = token in stops
        S += 1
        left = [i for i, row in enumerate(rows) if not done[row]]
        if bar is not None:
            bar.update(len(left))
        if not left or S == limit:
            return [t[:limit] for t in texts]
        if len(left) <= 0.75 * len(rows):                              # copies the cache: not at every end
            rows = [rows[i] for i in left]
            cache.k, cache.v = ([x[left] for x in layers] for layers in (cache.k, cache.v))
        x = torch.tensor([[0 if done[row] else texts[row][S - 1]] for row in rows], device=device)


def read_prompts(path):
    """--self-prompts -> the user's turns of every conversation: lists of texts."""
    try:
        lines = [line.strip() for line in read_lines(path) if line.strip()]
        as_json = bool(lines) and lines[0].startswith("{")
        conversations = [json.loads(line)["turns"] if as_json else [line] for line in lines]
        json.dumps(conversations, ensure_ascii=False).encode()         # raises for half of a character
    except DAMAGED as e:
        fail(f"--self-prompts {path} cannot be read ({type(e).__name__}: {e}): "
             "it needs a prompt a line, or JSON lines")
    whole = lambda turns: turns and isinstance(turns, list) and all(isinstance(t, str) for t in turns)
    if not conversations or not all(map(whole, conversations)):
        fail(f"--self-prompts {path}: every line needs a prompt, or turns, a list of texts")
    return conversations


def make_scripts(opt, tokenizer, conversations, block_size):
    """What the backbone is given to write from, see write. A conversation that is None: next to nothing."""
    def script(turns):
        if tokenizer.has_chat:
            return tokenizer.script(turns)
        return [tokenizer.start + tokenizer.encode(turns[0] if turns else "")]
    scripts = list(map(script, conversations))
    fit = [s for s in scripts if sum(map(len, s)) < block_size]
    if not fit:
        fail(f"--self-prompts {opt.self_prompts}: no prompt leaves room in a context of {block_size} tokens")
    if len(fit) < len(scripts):
        say(f"{len(scripts) - len(fit)} of {len(scripts)} prompts do not fit a context of {block_size} "
            "tokens and were left out")
    return fit


def read_written(path, meta):
    """
    The texts in path, if they were written as meta says: lists of ids. Others are set aside, not lost. What
    is asked for counts, not its ids: a chat template can have the time of day in it.
    """
    if not os.path.exists(path):
        return []
    tensors, old = load(path, "own text", "remove it, and it is written anew")
    differs = differences(old, meta)
    if not differs:
        return [t.tolist() for t in tensors["tokens"].split(tensors["lengths"].tolist())]
    stem = os.path.splitext(path)[0]
    names = (f"{stem}-{n}" for n in itertools.count(1))
    kept = next(name for name in names if not os.path.exists(name + ".safetensors"))
    for end in (".json", ".safetensors"):
        if os.path.exists(stem + end):
            os.replace(stem + end, kept + end)
    say(f"own text: {path} was written with another {differs}; it is kept as {kept}.safetensors")
    return []


def own_text(opt, target, tokenizer, device):
    """--data self: a Corpus of the target's own text. What OUT/self lacks of it is written."""
    path = os.path.join(opt.out, "self", "text.safetensors")
    size = opt.self_tokens or (4_000_000 if gpu(device) else 200_000)
    conversations = read_prompts(opt.self_prompts) if opt.self_prompts else [None]
    scripts = make_scripts(opt, tokenizer, conversations, target.cfg.block_size)
    asks = not opt.self_prompts and len(scripts[0]) > 1                # writes the questions too
    asking = ASKING if asks and opt.self_temperature < ASKING else None
    if opt.self_temperature < 1e-30 and not opt.self_prompts and not asks:
        fail("--self-temperature 0 writes the same text again and again where nothing is asked: "
             "give --self-prompts")
    meta = {"kind": "self", "backbone": target.fingerprint, "temperature": opt.self_temperature,
            "top_p": opt.self_top_p, "seed": opt.seed, "longest": LONGEST, "asking": asking,
            "prompts": digest(conversations), "template": digest(tokenizer.template)}
    if rank() > 0:
        dist.barrier()                                                 # the first process writes the file
    texts, c = read_written(path, meta), target.cfg
    have = sum(map(len, texts))
    if have < size:
        row = 4 * c.n_layer * c.n_kv_head * c.head_dim * longest(target, scripts)
        room, most = (2**34, 256) if gpu(device) else (2**30, 32)      # most bytes of a cache, and texts
        B = max(1, min(most, room // row))
        dtype, _ = pick_dtype("auto", str(device))
        writer = for_decoding(copy.deepcopy(target).to(dtype))         # target is yet to train with
        say(f"own text: {size:,} tokens, temperature {opt.self_temperature}, top-p {opt.self_top_p}, "
            f"{B} texts at once -> {path}")
        how = (tokenizer.stops, opt.self_temperature, opt.self_top_p)
        look = dict(desc="own text", unit="tok", unit_scale=True, disable=None)
        with tqdm(total=size, initial=have, **look) as bar:
            while have < size:
                n = len(texts)
                todo = [scripts[(n + i) % len(scripts)] for i in range(B)]
                texts += write(writer, todo, *how, opt.seed * 1_000_003 + n, bar, asking)
                have = sum(map(len, texts))
                bar.n = have
                tokens, lengths = [t for text in texts for t in text], [len(text) for text in texts]
                save(path, {"tokens": torch.tensor(tokens, dtype=torch.int32),
                            "lengths": torch.tensor(lengths, dtype=torch.int32)},
                     {**meta, "versions": versions()})
        del writer
    if rank() == 0 and dist.is_initialized():
        dist.barrier()
    ends = itertools.accumulate(map(len, texts))
    texts = [t for t, end in zip(texts, ends) if end - len(t) < size]  # more of it may be there
    return Corpus([(str(i % len(scripts) if len(scripts) > 1 else i), t) for i, t in enumerate(texts)])
