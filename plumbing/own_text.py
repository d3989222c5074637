"""
Text of the target's own: what it is given, and what it writes (self-distillation, Medusa 2.3.2).
"""
import copy
import itertools
import json
import os
import zlib

from tqdm import tqdm
import torch
import torch.distributed as dist

from plumbing.checkpoint import DAMAGED, load, save, versions
from plumbing.fast import for_decoding
from plumbing.options import fail, gpu, rank, say
from plumbing.text import Corpus, read_text


LONGEST = 512                                                          # tokens that a text adds to what it was given, at most
ASKING = 0.8                                                           # lowest temperature of questions: greedy ones were all the same


def pick(logits, temperature, top_p, u):
    """(B, V) logits, u (B,) uniform in [0, 1) -> (B,) samples after temperature and top-p; temperature 0 is greedy."""
    if temperature < 1e-30:                                            # single precision cannot divide by less
        return logits.argmax(-1)
    p = (logits.float() / temperature).softmax(-1)
    top, ids, k = p, torch.arange(p.size(-1), device=p.device).expand_as(p), p.size(-1)
    if top_p < 1:
        k = min(256, k)                                                # far cheaper than sorting all V, and nearly always enough
        while (found := p.topk(k))[0].sum(-1).min() < top_p and k < p.size(-1):
            k = min(8 * k, p.size(-1))
        top, ids = found
    mass = top.cumsum(-1)
    inside = (mass - top < top_p).sum(-1).clamp(min=1)                 # (B,) so many: the tokens before do not hold top_p yet
    total = mass.gather(-1, inside[:, None] - 1)
    i = (mass <= u[:, None] * total).sum(-1).minimum(inside - 1)       # the distribution function, inverted
    return ids.gather(-1, i[:, None]).squeeze(-1)


@torch.inference_mode()
def write(target, scripts, stops, temperature, top_p, seed, bar=None, asking=None):
    """
    One text for each script, all side by side. A script is a list of lists of ids: what the target is given first, and after
    each token in stops but the last, which they replace. asking: temperature of what is written before the last of them was
    given, None = the same. -> list of lists of ids, given ones included.
    """
    B, device = len(scripts), target.wte.weight.device
    texts, given, done = [list(s[0]) for s in scripts], [list(s[1:]) for s in scripts], [False] * B
    limit = min(target.cfg.block_size, LONGEST + max(sum(map(len, s)) for s in scripts))
    cache, uniform = target.new_cache(limit, B), torch.Generator().manual_seed(seed)
    rows, S = list(range(B)), min(map(len, texts))                     # longer openings go in token by token
    x = torch.tensor([t[:S] for t in texts], device=device)
    while True:
        hidden = target.hidden(x, cache=cache)
        cache.keep(range(x.size(1)))
        u = torch.rand(B, generator=uniform)[rows].to(device)          # a row's numbers do not depend on who is left
        logits = target.lm_head(hidden[:, -1])
        choice = pick(logits, temperature, top_p, u)
        if asking is not None and any(asks := [bool(given[row]) for row in rows]):
            choice = torch.where(torch.tensor(asks, device=device), pick(logits, asking, top_p, u), choice)
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
        if len(left) <= 0.75 * len(rows):                              # a copy of the cache each time, so not at every end
            rows = [rows[i] for i in left]
            cache.k, cache.v = ([x[left] for x in layers] for layers in (cache.k, cache.v))
        x = torch.tensor([[0 if done[row] else texts[row][S - 1]] for row in rows], device=device)


def read_scripts(opt, tokenizer, block_size):
    """What the backbone is given to write from, see write: from --self-prompts, or next to nothing."""
    conversations = [None]                                             # lists of the user's turns
    if opt.self_prompts:
        try:
            lines = [line.strip() for line in read_text(opt.self_prompts).split("\n") if line.strip()]
            conversations = [json.loads(line)["turns"] if lines[0].startswith("{") else [line] for line in lines]
        except DAMAGED as e:
            fail(f"--self-prompts {opt.self_prompts} cannot be read ({type(e).__name__}: {e}): a prompt a line, or JSON lines")
        if not conversations or not all(
                turns and isinstance(turns, list) and all(isinstance(t, str) for t in turns) for turns in conversations):
            fail(f"--self-prompts {opt.self_prompts}: every line needs a prompt, or turns, a list of texts")
    scripts = [tokenizer.script(turns) if tokenizer.has_chat else [tokenizer.start + tokenizer.encode(turns[0] if turns else "")]
               for turns in conversations]
    fit = [s for s in scripts if sum(map(len, s)) < block_size]
    if not fit:
        fail(f"--self-prompts {opt.self_prompts}: no prompt leaves room in a context of {block_size} tokens")
    if len(fit) < len(scripts):
        say(f"{len(scripts) - len(fit)} of {len(scripts)} prompts do not fit a context of {block_size} tokens and were left out")
    return fit


def own_text(opt, target, tokenizer, device):
    """--data self: a Corpus of the target's own text, from OUT/self as far as it is there; the rest is written, batch by batch."""
    path, size = os.path.join(opt.out, "self", "text.safetensors"), opt.self_tokens or (4_000_000 if gpu(device) else 200_000)
    scripts = read_scripts(opt, tokenizer, target.cfg.block_size)
    asks = not opt.self_prompts and len(scripts[0]) > 1                # writes the questions too
    asking = ASKING if asks and opt.self_temperature < ASKING else None            # at a temperature of their own?
    if opt.self_temperature < 1e-30 and not opt.self_prompts and not asks:
        fail("--self-temperature 0 writes the same text again and again where nothing is asked: give --self-prompts")
    meta = {"kind": "self", "backbone": target.fingerprint, "temperature": opt.self_temperature, "top_p": opt.self_top_p,
            "seed": opt.seed, "longest": LONGEST, "scripts": zlib.crc32(json.dumps(scripts).encode()), "prompts": opt.self_prompts}
    meta |= {"asking": asking} if asking else {}
    texts = []
    if rank() > 0:
        dist.barrier()                                                 # the file is written by the first process
    if os.path.exists(path):
        tensors, old = load(path, "own text", "remove it, and it is written anew")
        if all(old.get(k) == v for k, v in meta.items()):
            texts = [t.tolist() for t in tensors["tokens"].split(tensors["lengths"].tolist())]
    have, c = sum(map(len, texts)), target.cfg
    if have < size:
        row = 4 * c.n_layer * c.n_kv_head * c.head_dim * min(c.block_size, LONGEST + max(sum(map(len, s)) for s in scripts))
        B = max(1, min(256, 2**34 // row) if gpu(device) else min(32, 2**30 // row))       # caches of 16 GB at most (here 2)
        writer = for_decoding(copy.deepcopy(target).to(torch.bfloat16 if gpu(device) else torch.float32))  # target is yet to train with
        say(f"own text: {size:,} tokens, temperature {opt.self_temperature}, top-p {opt.self_top_p}, {B} texts at once -> {path}")
        with tqdm(total=size, initial=have, desc="own text", unit="tok", unit_scale=True, disable=None) as bar:
            while have < size:
                n = len(texts)
                todo = [scripts[(n + i) % len(scripts)] for i in range(B)]
                texts += write(writer, todo, tokenizer.stops, opt.self_temperature, opt.self_top_p, opt.seed * 1_000_003 + n, bar, asking)
                have = sum(map(len, texts))
                bar.n = have
                tensors = [torch.tensor(t, dtype=torch.int32) for t in ([i for t in texts for i in t], [len(t) for t in texts])]
                save(path, dict(zip(("tokens", "lengths"), tensors)), {**meta, "versions": versions()})
        del writer
    if rank() == 0 and dist.is_initialized():
        dist.barrier()
    ends = itertools.accumulate(map(len, texts))
    texts = [t for t, end in zip(texts, ends) if end - len(t) < size]  # there may be more of it than was asked for
    return Corpus([(str(i % len(scripts) if len(scripts) > 1 else i), t) for i, t in enumerate(texts)])
