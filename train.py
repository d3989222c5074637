r"""
Train a backbone and a drafter for it, on text that is already on this machine.

    python train.py                            # a small backbone, if out/ has none, then all four drafters for it
    python train.py --method medusa            # ... or just one of them
    python train.py --method backbone --data my_texts/

Idea     Corpus     the Python sources of this installation (or --data), split by file into training and held-out text
         backbone   GPT with Muon for matrices and AdamW for the rest
         drafter    each method file has its own training loop; here are its batches, its schedule and its checkpoints

Shapes   B sequences in a batch, T tokens in a sequence, K draft positions
"""
import argparse
import copy
import dataclasses
import datetime
import glob
import itertools
import json
import math
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import time
import zlib
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import amphista
import hidden_transfer
import medusa
import moa
from model import (DAMAGED, GPT, GPTConfig, Tokenizer, arg, command, fail, fingerprint, for_decoding, load, load_model, load_pretrained,
                   load_weights, out_folder, parse, pick_device, read_text, save, save_model)
from tree import complete

# --method -> the file that is the method
METHODS = {"medusa": medusa, "amphista": amphista, "hidden_transfer": hidden_transfer, "moa": moa}


@dataclass
class Options:
    """Train drafters (default: all four), or a backbone. Where there is no backbone yet, it is trained first."""
    method: str = arg("all", "what to train: one drafter, all of them, or the backbone", choices=["all", "backbone", *METHODS])
    data: str = arg("python", "python = this installation's sources; or a file, a folder, a glob of text; self = the backbone's own")
    out: str = arg("out", "folder of checkpoints and logs: OUT/backbone, OUT/medusa, ...; for --backbone gpt2 OUT/gpt2/medusa")
    backbone: str = arg("", "the target: empty = OUT/backbone; a hub id (gpt2, a Llama), a folder, a GGUF file, or smollm2")
    draft_vocab: int = arg(0, "drafters guess among the N most frequent tokens of the training text only (0 = all tokens)")
    self_tokens: int = arg(0, "--data self: size of the text (0 = 200,000 on a CPU, 4,000,000 on a GPU)")
    self_prompts: str = arg("", "--data self: file of prompts, one a line, or JSON lines with \"turns\"; empty = no prompt")
    self_temperature: float = arg(0.8, "--data self: temperature; 0 = greedy (what it asks itself, without --self-prompts, is drawn at 0.8 or more)")
    self_top_p: float = arg(0.95, "--data self: sample among the likeliest tokens that hold this much probability")
    preset: str = arg("auto", "sizes for 2 CPU cores or one data-centre GPU; auto = by device", choices=["auto", "cpu", "gpu"])
    device: str = arg("auto", "cpu, cuda, cuda:1, mps; auto takes the best there is")
    seed: int = arg(0, "seed of weights and batches")
    minutes: float = arg(0.0, "train for this long instead of a number of steps (0 = off)")
    resume: bool = arg(False, "go on where an interrupted run stopped")
    warm_start: str = arg("", "folder like OUT: drafters start from the ones in it, with their draft vocabulary, not untrained")
    state_cache: float = arg(2.0, "--backbone: gigabytes of its hidden states to keep, so that text which Medusa or Amphista sees again "
                             "costs no forward; sequences then lie side by side, not at random (0 = off)")
    half: bool = arg(False, "write checkpoints in bfloat16: half the size")
    compile: bool = arg(False, "torch.compile every block (worth it on a GPU)")
    plot: bool = arg(False, "draw the curves of all trainings in OUT to OUT/training.png; needs matplotlib")


@dataclass
class BackboneConfig(GPTConfig):
    """The backbone and its training."""
    steps: int = arg(1500, "optimiser steps", low=1)
    batch_size: int = arg(2, "sequences of block_size tokens in a step (or more of them, shorter)", low=1, high=2**20)
    accumulate: int = arg(1, "split a step into this many forward passes, to save memory", low=1)
    first_length: int = arg(128, "sequences start this short, and as many more of them, until two thirds of the training", low=1)
    lr: float = arg(0.02, "peak learning rate of the matrices (Muon)")
    lr_rest: float = arg(0.03, "peak learning rate of embeddings and norms (AdamW)")


NODES = {"cpu": 8, "gpu": 64}                                          # most nodes of a tree, root included
GPU = {                                                                # what the gpu preset changes; unset = as on a CPU
    "backbone": dict(n_layer=12, n_head=12, n_kv_head=12, n_embd=768, n_ffn=2048, vocab_size=8192, block_size=1024,
                     steps=4000, batch_size=48, lr=0.02),
    "medusa": dict(steps=2000, batch_size=32, anchors=256, lr=1e-3),
    "amphista": dict(steps=2000, batch_size=32, anchors=256, lr=5e-4),
    "hidden_transfer": dict(steps=2000, batch_size=32, anchors=128, lr=5e-4),
    "moa": dict(steps=2000, batch_size=32, lr=6e-4),
}


# ---------------------------------------------------------------------------------------------------------------------
# Corpus

SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def read_texts(data, with_packages=False):
    """--data -> list of (name, text). Ends with a message where there is nothing to read."""
    if data == "python":
        roots = [sysconfig.get_paths()["stdlib"]]
        if with_packages:                                              # a GPU asks for more: the packages it came with
            roots += [os.path.join(sysconfig.get_paths()["purelib"], p) for p in ("torch", "transformers", "numpy")]
        files = [(root, f) for root in roots for f in sorted(glob.glob(os.path.join(root, "**", "*.py"), recursive=True))
                 if not SKIP & set(os.path.relpath(f, root).split(os.sep))]
    elif os.path.isdir(data):
        files = [(data, f) for f in sorted(glob.glob(os.path.join(data, "**", "*"), recursive=True)) if os.path.isfile(f)]
    else:
        files = [(os.path.dirname(f), f) for f in sorted(glob.glob(data, recursive=True)) if os.path.isfile(f)]
    if not files:
        fail(f"--data {data}: no file there")
    texts, skipped = [], 0
    for root, f in files:
        try:
            with open(f, "rb") as file:
                text = file.read().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            text = "\0"
        if "\0" in text:
            skipped += 1
        elif text.strip():
            texts.append((os.path.relpath(f, root or "."), text))
    if not texts:
        fail(f"--data {data}: no readable UTF-8 text in {len(files)} files")
    if skipped:
        say(f"data: {skipped} of {len(files)} files are not UTF-8 text and were left out")
    return texts


class Corpus:
    """Training and held-out tokens. A file is held out by a hash of its name; a single file gives its last twentieth."""
    aligned = False

    def __init__(self, texts):                                         # [(name, text)]; a text may be a list of tokens
        if len(texts) == 1:
            cut = len(texts[0][1]) * 19 // 20
            self.train_texts, self.val_texts = [texts[0][1][:cut]], [texts[0][1][cut:]]
        else:
            held = {name for name, _ in texts if zlib.crc32(name.replace(os.sep, "/").encode()) % 40 == 0}
            held = held or {texts[-1][0]}
            self.train_texts = [text for name, text in texts if name not in held]
            self.val_texts = [text for name, text in texts if name in held]

    def tokenize(self, tokenizer):
        def tokens(texts):
            texts = (text if isinstance(text, list) else [*tokenizer.encode(text), tokenizer.eos] for text in texts)
            return torch.tensor([t for text in texts for t in text], dtype=torch.int32)
        self.tokenizer = tokenizer
        self.train, self.val = tokens(self.train_texts), tokens(self.val_texts)
        chars = sum(len(text if isinstance(text, str) else tokenizer.decode(text)) for text in self.val_texts)
        self.chars_per_token = chars / max(1, len(self.val) - len(self.val_texts))
        return self

    def frequent(self, n):
        """(n,) the most frequent tokens of the training text, in order of their ids; None where that is all of them."""
        V = self.tokenizer.vocab_size
        counts = torch.bincount(self.train, minlength=V)
        return counts.argsort(descending=True, stable=True)[:n].sort().values if 0 < n < V else None

    def batch(self, seed, B, T):
        """(B, T) random stretches of training text (aligned: of those that lie side by side), a function of seed alone."""
        if len(self.train) < T + 1:
            fail(f"the training text has {len(self.train)} tokens, a sequence needs {T + 1}: give more --data")
        stride = T if self.aligned else 1
        at = torch.randint((len(self.train) - T) // stride + 1, (B,), generator=torch.Generator().manual_seed(seed)) * stride
        return self.train[at[:, None] + torch.arange(T)].long()

    def val_batches(self, B, T, n):
        """At most n batches of held-out text, side by side; the same every time."""
        T = min(T, len(self.val))
        x = self.val[:len(self.val) // T * T].view(-1, T).long()
        x = x[torch.linspace(0, len(x) - 1, min(len(x), n * B)).long()]                # spread over all held-out files
        return list(x.split(B))

    def prompts(self, n, length):
        """n lists of length tokens of held-out text, spread over all of it."""
        at = torch.linspace(0, max(0, len(self.val) - length - 1), n).long().tolist()
        return [self.val[i:i + length].tolist() for i in at]


# ---------------------------------------------------------------------------------------------------------------------
# Text of the backbone's own (self-distillation, Medusa 2.3.2)

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


# ---------------------------------------------------------------------------------------------------------------------
# A training run: batches, schedule, log, checkpoints

def rank():
    return int(os.environ.get("RANK", 0))


def say(text):
    """Print on the first process only, above a progress bar."""
    if rank() == 0:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


def read_log(path):
    """log.jsonl -> the evaluations of the last run in it, each a dict. A line that a kill or a full disk tore is none."""
    rows = []
    try:
        lines = read_text(path, errors="replace").split("\n")
    except OSError:
        lines = []
    for line in lines:
        try:
            row = dict(json.loads(line))
            row |= {"step": int(row["step"]), "seconds": float(row["seconds"])}
        except DAMAGED:
            continue
        if rows and (row["step"] <= rows[-1]["step"] or row["seconds"] < rows[-1]["seconds"]):
            rows = []                                                  # another run
        rows.append(row)
    return rows


class Run:
    """What every training loop needs and no paper is about. kind: backbone or a method; cfg: its Config."""

    def __init__(self, opt, kind, cfg, corpus, device, T, meta):
        self.opt, self.kind, self.cfg, self.corpus, self.device, self.T, self.meta = opt, kind, cfg, corpus, device, T, meta
        self.path = os.path.join(opt.out, kind, "model.safetensors")
        self.resume_path = os.path.join(opt.out, kind, "resume.safetensors")
        self.log_path = os.path.join(opt.out, kind, "log.jsonl")
        self.step, self.elapsed, self.stop, self.metrics, self.seen, self.log = 0, 0.0, False, {}, [], []
        self.vocab = None if kind == "backbone" else corpus.frequent(opt.draft_vocab)  # what a drafter may draft; None = all
        self.init = self.start_from(opt.warm_start) if opt.warm_start and kind != "backbone" else None
        self.amp = torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda"))
        self.world = int(os.environ.get("WORLD_SIZE", 1))

    def start_from(self, folder):
        """--warm-start -> (tensors, path) of the drafter there; takes over its draft vocabulary."""
        path = os.path.join(out_folder(folder, self.opt.backbone), self.kind, "model.safetensors")
        tensors, old = load(path, f"{self.kind} checkpoint", "leave --warm-start out, or name a folder that has one")
        if old.get("kind") != self.kind or old.get("original", old.get("backbone")) != self.meta["backbone"]:
            fail(f"--warm-start: {path} is a {old.get('kind')} drafter of another backbone: leave --warm-start out")
        ids = tensors.get("head.ids")
        if self.opt.draft_vocab and (ids is None or self.vocab is None or not torch.equal(ids, self.vocab)):
            fail(f"--warm-start: {path} has a draft vocabulary of its own: leave --draft-vocab out")
        self.vocab, self.meta["init"] = ids, {"checkpoint": fingerprint(tensors), "metrics": old.get("metrics")}
        return tensors, path

    def progress(self):
        """0 at the start, 1 at the end, by steps or by minutes."""
        if self.opt.minutes:
            return min(1.0, (self.elapsed + time.perf_counter() - self.since) / (60 * self.opt.minutes))
        return self.step / self.cfg.steps

    def schedule(self):
        """Learning rate as a share of its peak: up in 20 steps or the first 2 %, then a cosine down to a twentieth."""
        p = self.progress()
        return min(1.0, max(p / 0.02, (self.step + 1) / 20), 0.525 + 0.475 * math.cos(math.pi * p))

    def steps(self, module, optimisers, evaluate):
        """
        Yield batches (B, T) until the training is done; resumes, shows progress, evaluates and saves between them.
        evaluate(x) -> (loss, top1[, more figures by name]) on held-out text. Ctrl-C ends the loop after the step at hand,
        checkpoint written.
        """
        self.module, self.optimisers, self.evaluate = module, optimisers, evaluate
        if hasattr(module, "target"):
            compile_blocks(module.target, self.opt)
        peak = [[g["lr"] for g in o.param_groups] for o in optimisers]
        if self.init:
            load_weights(module.net if hasattr(module, "target") else module, *self.init)
        if self.opt.resume and os.path.exists(self.resume_path):
            try:
                self.restore()
            except DAMAGED as e:
                fail(f"{self.resume_path} is broken or of another version ({type(e).__name__}: {e}): start without --resume")
        old = signal.signal(signal.SIGINT, lambda *_: setattr(self, "stop", True)), signal.signal(
            signal.SIGTERM, lambda *_: setattr(self, "stop", True))
        bar = tqdm(total=100, desc=self.kind, disable=None if rank() == 0 else True, bar_format="{desc} {percentage:3.0f}%|{bar}| "
                   "{elapsed}<{remaining}{postfix}")
        self.since, self.last = time.perf_counter(), (self.step, time.perf_counter())
        eval_at = math.floor(self.progress() * 10) + 1
        module.train()
        try:
            while (self.progress() < 1 or not self.step) and not self.stop:
                for o, lrs in zip(optimisers, peak):
                    for g, lr in zip(o.param_groups, lrs):
                        g["lr"] = lr * self.schedule()
                B, T = self.cfg.batch_size, self.T
                short = getattr(self.cfg, "first_length", T)
                if short < T and self.progress() < 2 / 3:
                    B, T = B * T // short, short
                x = self.corpus.batch((self.opt.seed * 1_000_003 + self.step) * self.world + rank(), B, T)
                with self.amp:
                    yield x.to(self.device)
                self.step += 1
                bar.update(int(100 * self.progress()) - bar.n)
                if self.progress() * 10 >= eval_at and self.progress() < 1:        # ten times in a run
                    eval_at = math.floor(self.progress() * 10) + 1
                    self.report()
                    self.save()
            self.report()
            self.meta["finished"] = self.progress() >= 1 and self.kind == "backbone"      # a drafter is still to be calibrated
            self.save()
        finally:
            bar.close()
            signal.signal(signal.SIGINT, old[0])
            signal.signal(signal.SIGTERM, old[1])
        if self.stop:
            if rank() == 0:
                print(f"stopped at step {self.step}; the checkpoint is usable, --resume goes on from here", file=sys.stderr)
            raise SystemExit(130)

    def sync(self, module, loss):
        """After backward: average gradients over processes, clip them to norm 1. Remembers the loss for the next report."""
        params = [p for p in module.parameters() if p.grad is not None]
        if self.world > 1:
            flat = torch.cat([p.grad.flatten() for p in params])
            dist.all_reduce(flat)
            for p, g in zip(params, flat.div_(self.world).split([p.numel() for p in params])):
                p.grad.copy_(g.view_as(p))
        nn.utils.clip_grad_norm_(params, 1.0)
        self.seen.append(loss.detach())

    def report(self):
        """Evaluate on held-out text; one log line, one line of this run's log.jsonl. A loss that is not finite ends the run, unsaved."""
        if not self.seen:
            return
        train = torch.stack(self.seen).mean().item()                   # only here does training wait for the device
        now = time.perf_counter()
        speed = (self.step - self.last[0]) * self.cfg.batch_size * self.T * self.world / (now - self.last[1])
        self.module.eval()
        with torch.no_grad(), self.amp, torch.random.fork_rng(devices=[]):         # a look at the model changes nothing
            torch.manual_seed(0)
            parts = [self.evaluate(x.to(self.device)) for x in self.corpus.val_batches(8, self.T, 4)]
        self.module.train()
        val = sum(float(p[0]) for p in parts) / len(parts)
        if not math.isfinite(train + val):
            fail(f"{self.kind}: the loss is {train if math.isfinite(val) else val} before step {self.step}: lower --lr; {self.path} keeps "
                 "the last good state")
        top1 = [round(float(a), 4) for a in torch.stack([p[1] for p in parts]).mean(0)] if len(parts[0][1]) else []
        more = {k: round(sum(float(p[2][k]) for p in parts) / len(parts), 4) for k in (parts[0][2] if len(parts[0]) > 2 else ())}
        spent = self.elapsed + now - self.since
        eta = spent * (1 / max(self.progress(), 1e-9) - 1)
        self.metrics = dict(step=self.step, tokens=self.step * self.cfg.batch_size * self.T * self.world,
                            train_loss=round(train, 4), val_loss=round(val, 4), seconds=round(spent, 1), **more)
        text = f"step {self.step:5d} | loss {train:.3f} | held-out {val:.3f}"
        if top1:
            self.metrics["top1"] = top1
            text += " | top1 " + " ".join(f"{a:.3f}" for a in top1)
        else:
            self.metrics["bits_per_char"] = round(val / math.log(2) / self.corpus.chars_per_token, 4)
            text += f" | {self.metrics['bits_per_char']:.3f} bits/char"
        text += "".join(f" | {k.replace('_', ' ')} {v:.3f}" for k, v in more.items())
        say(text + f" | lr {self.schedule():.2f} | {speed:,.0f} tok/s | {spent:.0f} s, eta {eta:.0f} s")
        if rank() == 0:
            self.log.append({**self.metrics, "tokens_per_second": round(speed)})
            try:                                                       # anew each time, and renamed: a dozen lines, never a torn one
                os.makedirs(os.path.dirname(self.log_path), exist_ok=True)
                with open(self.log_path + ".tmp", "w") as f:
                    f.writelines(json.dumps(row) + "\n" for row in self.log)
                os.replace(self.log_path + ".tmp", self.log_path)
            except OSError as e:
                fail(f"cannot write {self.log_path}: {e}; --resume goes on from the last checkpoint")
        self.seen, self.last = [], (self.step, time.perf_counter())

    def save(self):
        """Write the checkpoint and, until the run is finished, what --resume needs. Each file is whole by itself."""
        if rank() > 0:
            return
        meta = {**self.meta, "metrics": self.metrics, "options": asdict(self.opt), "versions": versions()}
        net = self.module
        if hasattr(net, "target"):                                     # trained with its drafter: a backbone of its own
            meta["original"] = meta.pop("backbone")
            save_model(os.path.join(self.opt.out, "backbone", "model.safetensors"), net.target, self.corpus.tokenizer, self.opt.half, **meta)
            meta["backbone"], net = net.target.fingerprint, net.net
        if self.kind == "backbone":
            save_model(self.path, net, self.corpus.tokenizer, self.opt.half, **meta)
        else:
            save(self.path, net.state_dict(), {"kind": self.kind, "config": asdict(self.cfg), **meta}, self.opt.half)
        if meta.get("finished"):
            for end in (".safetensors", ".json"):
                path = os.path.splitext(self.resume_path)[0] + end
                if os.path.exists(path):
                    os.remove(path)
            return
        tensors = {f"module.{k}": v.clone() for k, v in self.module.state_dict().items()}
        tensors["rng"] = torch.get_rng_state()
        for i, o in enumerate(self.optimisers):
            for p, state in o.state_dict()["state"].items():
                tensors |= {f"optimiser.{i}.{p}.{k}": torch.as_tensor(v).clone() for k, v in state.items()}
        spent = self.elapsed + time.perf_counter() - self.since
        state = {"kind": self.kind + " (resume)", "config": asdict(self.cfg), "step": self.step, "elapsed": spent,
                 "backbone": self.meta.get("backbone"), "metrics": self.metrics}
        if self.kind == "backbone":
            state["tokenizer"] = self.corpus.tokenizer.to_dict()
        save(self.resume_path, tensors, state)

    def restore(self):
        """Go back to the last save of an interrupted run."""
        tensors, meta = load(self.resume_path, "interrupted run", "start without --resume")
        if meta.get("config") != asdict(self.cfg):
            wrong = [k for k, v in asdict(self.cfg).items() if meta["config"].get(k) != v]
            fail(f"{self.resume_path} was started with another {', '.join(wrong)}: use the same options, or leave --resume out")
        if self.vocab is not None and not torch.equal(self.vocab, tensors.get("module.head.ids", self.vocab[:0])):
            fail(f"{self.resume_path} was started with another draft vocabulary: use the same options, or leave --resume out")
        if meta["backbone"] != self.meta.get("backbone"):
            fail(f"{self.resume_path} was started with another backbone: leave --resume out")
        load_weights(self.module, {k[7:]: v for k, v in tensors.items() if k.startswith("module.")}, self.resume_path)
        for i, o in enumerate(self.optimisers):
            state = {}
            for name, v in tensors.items():
                if name.startswith(f"optimiser.{i}."):
                    _, _, p, k = name.split(".", 3)
                    state.setdefault(int(p), {})[k] = v
            if len({frozenset(s) for s in state.values()}) > 1:
                raise KeyError("a part of the optimiser's state")
            o.load_state_dict({"state": state, "param_groups": o.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["rng"])
        self.step, self.elapsed, self.metrics = int(meta["step"]), float(meta["elapsed"]), dict(meta["metrics"])
        self.log = [row for row in read_log(self.log_path) if row["step"] <= self.step]
        say(f"resuming {self.kind} at step {self.step}")


def versions():
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=os.path.dirname(os.path.abspath(__file__))).stdout.strip()
    return {"torch": torch.__version__, "python": platform.python_version(), "commit": commit}


# ---------------------------------------------------------------------------------------------------------------------
# Backbone

def backbone_loss(model, x):
    """x (B, T) -> mean cross-entropy of the next token, in nats."""
    logits, _ = model(x[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()), ()


def backbone_step(model, x, accumulate=1):
    """Gradients of one step of batch x (B, T), in equal parts: as one big batch. Returns the loss."""
    total = 0.0
    for part in x.chunk(accumulate):
        error = backbone_loss(model, part)[0] * (len(part) / len(x))
        error.backward()
        total = total + error.detach()
    return total


def train_backbone(cfg, run):
    """Train a GPT from scratch on the run's batches and return it."""
    model = GPT(GPTConfig(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(GPTConfig)})).to(run.device)
    compile_blocks(model, run.opt)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimisers = [torch.optim.Muon(matrices, lr=cfg.lr, weight_decay=0.1, ns_steps=3),
                  torch.optim.AdamW(rest, lr=cfg.lr_rest, betas=(0.9, 0.95), weight_decay=0.0)]
    for x in run.steps(model, optimisers, lambda x: backbone_loss(model, x)):
        model.zero_grad(set_to_none=True)
        total = backbone_step(model, x, cfg.accumulate)
        run.sync(model, total)
        for o in optimisers:
            o.step()
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Drafters

def calibrate(method, net, target, batches, ranks=32):
    """
    How often the r-th best guess for each draft position is right on held-out text: {"hits": K x ranks counts,
    "samples": K counts}. Their quotients are the accuracies that Medusa's sparse tree is grown from (2.3.3).
    """
    hits, samples = None, None
    with torch.no_grad():
        for x in batches:
            rows = []
            for guess, truth, _ in method.guesses(net, target, x):
                top = guess.topk(min(ranks, guess.size(-1))).indices                   # (M, ranks)
                rows.append((top == truth[:, None]).sum(0))
            n = torch.tensor([x.size(0) * (x.size(1) - k - 1) for k in range(1, len(rows) + 1)])
            hits = torch.stack(rows) if hits is None else hits + torch.stack(rows)
            samples = n if samples is None else samples + n
    return {"hits": hits.tolist(), "samples": samples.tolist()}


def accuracy(calibration):
    """calibration -> K x ranks, the share of anchors at which guess r of position k is right."""
    return [[h / max(1, n) for h in row] for row, n in zip(calibration["hits"], calibration["samples"])]


def mean_tau(target, drafter, prompts, new_tokens, **sampling):
    """Tokens per target forward over all prompts together."""
    runs = [complete(target, p, new_tokens, drafter, **sampling)[1] for p in prompts]
    return sum(sum(s.accepted[1:]) for s in runs) / max(1, sum(s.steps for s in runs))


class Remember:
    """
    Stands in for a frozen target's hidden(x) while drafters are trained: the states (T, C) of every sequence are kept, in
    bfloat16, as long as they fit into room bytes, and a sequence that comes again costs no forward. New ones are rounded as
    well, so what is in memory changes nothing. What decodes, with a KV cache, goes to the target.
    """

    def __init__(self, target, room):
        self.hidden, self.like, self.room, self.kept = target.hidden, target.wte.weight, room, {}

    def __call__(self, x, pos=None, mask=None, cache=None):  # (B, T) -> (B, T, C)
        if cache is not None or pos is not None or mask is not None:
            return self.hidden(x, pos, mask, cache)
        keys = [row.numpy().tobytes() for row in x.cpu()]
        new = {key: i for i, key in enumerate(keys) if key not in self.kept}
        fresh = dict(zip(new, self.hidden(x[[*new.values()]]).bfloat16().cpu())) if new else {}
        for key, h in fresh.items():
            if h.nbytes <= self.room:
                self.kept[key] = h.clone()                             # a view would keep its whole batch alive
                self.room -= h.nbytes
        return torch.stack([fresh[key] if key in fresh else self.kept[key] for key in keys]).to(self.like)


# ---------------------------------------------------------------------------------------------------------------------
# Main

def setup(opt):
    """Device and processes. Returns the device's name."""
    if "RANK" in os.environ:
        cuda = torch.cuda.is_available() and opt.device in ("auto", "cuda")
        dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(days=1))  # own text: one writes
        device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else pick_device("cpu" if opt.device == "auto" else opt.device)
    else:
        device = pick_device(opt.device)
    if gpu(device):
        torch.cuda.set_device(torch.device(device).index or 0)
        torch.set_float32_matmul_precision("high")
    return device


def get_backbone(opt, cfg, corpus, device, again):
    """
    Load --backbone, or train OUT/backbone if it is not there, unfinished, or again is wanted; tokenize the corpus, or let the
    target write it (corpus None). -> the target, frozen, and the corpus.
    """
    path, resume_path = (os.path.join(opt.out, "backbone", name) for name in ("model.safetensors", "resume.safetensors"))
    resume = opt.resume and os.path.exists(resume_path)
    if not opt.backbone and (again or resume or not os.path.exists(path)):
        if corpus is None:
            fail("--data self needs a backbone that can write: run python train.py --method backbone first, or name a --backbone")
        if cfg.vocab_size < 257:
            fail(f"--vocab-size must be 257 or more (256 bytes and the end of text), not {cfg.vocab_size}")
        if resume:
            state = load(resume_path, "interrupted run", "start without --resume")[1]
            try:
                tokenizer = Tokenizer.from_dict(state["tokenizer"])
            except DAMAGED as e:
                fail(f"{resume_path} is broken or of another version ({type(e).__name__}: {e}): start without --resume")
        else:
            tokenizer = Tokenizer.train(corpus.train_texts, cfg.vocab_size)
        cfg.vocab_size = tokenizer.vocab_size                          # a short text may not have that many tokens
        corpus.tokenize(tokenizer)
        say(f"corpus: {len(corpus.train):,} training and {len(corpus.val):,} held-out tokens, "
            f"{corpus.chars_per_token:.2f} characters each")
        run = Run(opt, "backbone", cfg, corpus, device, cfg.block_size, {"finished": False})
        describe(run)
        model = train_backbone(cfg, run)
        say(f"backbone: {count(model):,} parameters, {run.metrics['bits_per_char']:.3f} bits/char on held-out text, "
            f"{run.metrics['seconds']:.0f} s -> {path}")
        if dist.is_initialized():
            dist.barrier()                                             # the file is written by the first process
    target, tokenizer, meta = load_pretrained(opt.backbone, device) if opt.backbone else load_model(path, device)
    if opt.backbone:
        say(f"backbone: {meta['source']}, {count(target):,} parameters, {tokenizer.vocab_size:,} tokens -> {opt.out}")
    if not meta.get("finished"):
        say("note: this backbone's training was interrupted; --resume would finish it first")
    if corpus is None:
        corpus = own_text(opt, target, tokenizer, device)
    if not hasattr(corpus, "tokenizer"):                               # training it has done that already
        corpus.tokenize(tokenizer)
    compile_blocks(target, opt)
    return target, corpus


def train_drafter(kind, opt, cfg, corpus, target, device, method=None):
    """Train a drafter of this method (a module; default: METHODS' own), calibrate and try it. -> its row of the closing table."""
    method = method or METHODS[kind]
    run = Run(opt, kind, cfg, corpus, device, min(target.cfg.block_size, 256), {"finished": False, "backbone": target.fingerprint})
    if opt.resume and not os.path.exists(run.resume_path) and os.path.exists(run.path):
        _, meta = load(run.path, f"{kind} checkpoint", "start without --resume")
        same = meta.get("options", {}).get("draft_vocab", 0) == opt.draft_vocab and meta.get("config") == asdict(cfg)
        if meta.get("finished") and meta.get("original", meta.get("backbone")) == target.fingerprint and same:
            say(f"{kind}: finished already -> {run.path}")
            return dict(method=kind, parameters=meta["parameters"], **meta["metrics"])
    K, room = 1 if kind == "moa" else getattr(cfg, "n_heads", 0) or cfg.depth, min(run.T, len(corpus.val))
    if room < K + 2:
        fail(f"{kind} guesses {K} positions, for which sequences need {K + 2} tokens; here they have {room}: fewer positions, a "
             "longer --block-size, or more --data")
    describe(run)
    net = method.train(cfg, target, run)
    run.meta["parameters"] = count(net)
    if hasattr(net, "target"):                                         # Medusa-2: a new backbone and its heads
        net, target = net.net, net.target
    net.eval()
    run.meta["calibration"] = calibrate(method, net, target, [x.to(device) for x in corpus.val_batches(8, run.T, 16)])
    hits = accuracy(run.meta["calibration"])
    run.metrics["top1"] = [round(row[0], 4) for row in hits]           # over more text than the log's
    prompts = corpus.prompts(8, min(64, target.cfg.block_size // 2))
    run.metrics["tau"] = round(mean_tau(target, method.Drafter(net, target, nodes=most_nodes(device)), prompts, 64), 3)
    run.meta["finished"] = True
    run.save()
    say(f"{kind}: {run.meta['parameters']:,} trained parameters -> {run.path}")
    return dict(method=kind, parameters=run.meta["parameters"], **run.metrics)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)            # which options there are depends on these
    for name in ("method", "preset", "device"):
        first.add_argument("--" + name, default=getattr(Options, name))
    first.error = fail
    known, _ = first.parse_known_args(argv)
    big = known.preset == "gpu" or known.preset == "auto" and gpu(pick_device(known.device))
    preset = lambda kind: GPU.get(kind, {}) if big else {}
    Config = BackboneConfig if known.method == "backbone" else METHODS[known.method].Config if known.method in METHODS else None
    opt, *cfg = parse(Options, *filter(None, [Config]), argv=argv, defaults=preset(known.method))
    try:
        os.makedirs(opt.out or ".", exist_ok=True)                     # better now than after the first minutes
    except OSError as e:
        fail(f"--out {opt.out} cannot be written to: {e}")
    if opt.minutes and "RANK" in os.environ:
        fail("--minutes works with one process only: several would not stop at the same step")
    if opt.plot:
        from bench.plot import draw                                    # now: without matplotlib it ends here, not after the training
    device = setup(opt)
    torch.manual_seed(opt.seed)
    say(f"device {device}, {'bf16 autocast' if gpu(device) else 'fp32'}, {torch.get_num_threads()} threads | "
        + " ".join(f"{k} {v}" for k, v in versions().items()))
    again, out, opt.out = opt.method == "backbone", opt.out, out_folder(opt.out, opt.backbone)
    if again and opt.backbone:
        fail("--method backbone trains one of our own: leave --backbone out")
    if opt.warm_start and (again or not opt.backbone and not os.path.exists(os.path.join(opt.out, "backbone", "model.safetensors"))):
        fail(f"--warm-start starts drafters, and from those of a backbone that is there, in --out {opt.out} or as --backbone")
    if opt.self_top_p > 1:
        fail(f"--self-top-p must lie between 0 and 1, not {opt.self_top_p}")
    joint = cfg and getattr(cfg[0], "recipe", 1) == 2
    if joint and (opt.backbone or opt.draft_vocab):
        fail("--recipe 2 trains a backbone of our own and all of its vocabulary: leave --backbone and --draft-vocab out")
    corpus = None if opt.data == "self" else Corpus(read_texts(opt.data, with_packages=big))
    target, corpus = get_backbone(opt, cfg[0] if again else BackboneConfig(**preset("backbone")), corpus, device, again)
    if opt.backbone and opt.state_cache:
        target.hidden, corpus.aligned = Remember(target, opt.state_cache * 1e9), True  # all drafters of this run share it
    if joint:                                                          # a folder like OUT: a backbone and a drafter for it
        out = opt.out = os.path.join(opt.out, "medusa2")
    kinds = [] if again else list(METHODS) if opt.method == "all" else [opt.method]
    rows = []
    for kind in kinds:
        torch.manual_seed(opt.seed)
        rows.append(train_drafter(kind, opt, cfg[0] if cfg else METHODS[kind].Config(**preset(kind)), corpus, target, device))
    if rows:
        say(f"\n{'method':16s} {'parameters':>11s} {'seconds':>8s} {'tau':>6s}  held-out top-1 by position")
        for r in rows:
            say(f"{r['method']:16s} {r['parameters']:11,d} {r['seconds']:8.0f} {r['tau']:6.2f}  " + " ".join(f"{a:.3f}" for a in r["top1"]))
        say(f"\ntau: tokens per target forward at T = 0 on 8 held-out prompts. Now try\n"
            f"python sample.py --method {max(rows, key=lambda r: r['tau'])['method']} --compare"
            + (f" --backbone {opt.backbone}" if opt.backbone else "") + (f" --out {out}" if out != Options.out else ""))
    if opt.plot and rank() == 0:
        draw(opt.out)


def compile_blocks(model, opt):
    """--compile: every block by itself, in place; they are alike, so one compilation serves all."""
    for block in model.blocks if opt.compile else ():
        block.compile()


def count(module):
    return sum(p.numel() for p in module.parameters())


def gpu(device):
    return device.startswith("cuda")


def most_nodes(device):
    """How many nodes a tree has unless told otherwise."""
    return NODES["gpu" if gpu(device) else "cpu"]


def describe(run):
    say(f"{run.kind}: " + " ".join(f"{k}={v}" for k, v in asdict(run.cfg).items())
        + f" | {run.cfg.batch_size * run.T * run.world:,} tokens a step")


if __name__ == "__main__":
    command(main)
