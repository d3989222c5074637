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
import dataclasses
import os
import sys
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

import amphista
import hidden_transfer
import medusa
import moa
from model import GPT, GPTConfig, arg
from tree import complete
from plumbing.budget import accuracy, calibrate, most_nodes
from plumbing.checkpoint import DAMAGED, load, load_model, out_folder, versions
from plumbing.fast import Remember
from plumbing.options import OUT, command, fail, gpu, parse, pick_device, rank, say
from plumbing.own_text import own_text
from plumbing.pretrained import load_pretrained
from plumbing.text import Corpus, Tokenizer, read_texts
from plumbing.trainer import Run, compile_blocks, count, describe, setup

# --method -> the file that is the method
METHODS = {"medusa": medusa, "amphista": amphista, "hidden_transfer": hidden_transfer, "moa": moa}


@dataclass
class Options:
    """Train drafters (default: all four), or a backbone. Where there is no backbone yet, it is trained first."""
    method: str = arg("all", "what to train: one drafter, all of them, or the backbone", choices=["all", "backbone", *METHODS])
    data: str = arg("python", "python = this installation's sources; or a file, a folder, a glob of text; self = the backbone's own")
    backbone: str = arg("", "the target: empty = OUT/backbone; a hub id (gpt2, a Llama), a folder, a GGUF file, or smollm2")
    out: str = arg(OUT, "folder of checkpoints and logs: OUT/backbone, OUT/medusa, ...; for --backbone gpt2 OUT/gpt2/medusa")
    minutes: float = arg(0.0, "train for this long instead of a number of steps (0 = off)")
    resume: bool = arg(False, "go on where an interrupted run stopped")
    preset: str = arg("auto", "sizes for 2 CPU cores or one data-centre GPU; auto = by device", choices=["auto", "cpu", "gpu"])
    device: str = arg("auto", "cpu, cuda, cuda:1, mps; auto takes the best there is")
    seed: int = arg(0, "seed of weights and batches")
    plot: bool = arg(False, "draw the curves of all trainings in OUT to OUT/training.png; needs matplotlib")

    draft_vocab: int = arg(0, "drafters guess among the N most frequent tokens of the training text only (0 = all tokens)", group="drafters")
    warm_start: str = arg("", "folder like OUT: drafters start from the ones in it, with their draft vocabulary, not untrained", group="drafters")

    self_tokens: int = arg(0, "--data self: size of the text (0 = 200,000 on a CPU, 4,000,000 on a GPU)", group="the backbone's own text")
    self_prompts: str = arg("", "--data self: file of prompts, one a line, or JSON lines with \"turns\"; empty = no prompt", group="the backbone's own text")
    self_temperature: float = arg(0.8, "--data self: temperature; 0 = greedy (what it asks itself, without --self-prompts, is "
                                  "drawn at 0.8 or more)", group="the backbone's own text")
    self_top_p: float = arg(0.95, "--data self: sample among the likeliest tokens that hold this much probability", group="the backbone's own text")

    state_cache: float = arg(2.0, "--backbone: gigabytes of its hidden states to keep, so that text which Medusa or Amphista sees again "
                             "costs no forward; sequences then lie side by side, not at random (0 = off)", group="speed and size")
    half: bool = arg(False, "write checkpoints in bfloat16: half the size", group="speed and size")
    compile: bool = arg(False, "torch.compile every block (worth it on a GPU)", group="speed and size")


@dataclass
class BackboneConfig(GPTConfig):
    """The backbone and its training."""
    steps: int = arg(1500, "optimiser steps", low=1)
    batch_size: int = arg(2, "sequences of block_size tokens in a step (or more of them, shorter)", low=1, high=2**20)
    accumulate: int = arg(1, "split a step into this many forward passes, to save memory", low=1)
    first_length: int = arg(128, "sequences start this short, and as many more of them, until two thirds of the training", low=1)
    lr: float = arg(0.02, "peak learning rate of the matrices (Muon)")
    lr_rest: float = arg(0.03, "peak learning rate of embeddings and norms (AdamW)")


GPU = {                                                                # what the gpu preset changes; unset = as on a CPU
    "backbone": dict(n_layer=12, n_head=12, n_kv_head=12, n_embd=768, n_ffn=2048, vocab_size=8192, block_size=1024,
                     steps=4000, batch_size=48, lr=0.02),
    "medusa": dict(steps=2000, batch_size=32, anchors=256, lr=1e-3),
    "amphista": dict(steps=2000, batch_size=32, anchors=256, lr=5e-4),
    "hidden_transfer": dict(steps=2000, batch_size=32, anchors=128, lr=5e-4),
    "moa": dict(steps=2000, batch_size=32, lr=6e-4),
}


# --------------------------------------------------------------------------------------------------
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


# --------------------------------------------------------------------------------------------------
# Drafters


def mean_tau(target, drafter, prompts, new_tokens, **sampling):
    """Tokens per target forward over all prompts together."""
    runs = [complete(target, p, new_tokens, drafter, **sampling)[1] for p in prompts]
    return sum(sum(s.accepted[1:]) for s in runs) / max(1, sum(s.steps for s in runs))


# --------------------------------------------------------------------------------------------------
# Main


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
    try:
        net = method.train(cfg, target, run)
    except ValueError as e:
        if not str(e).startswith("--"):
            raise
        fail(e)                                                        # an option that does not fit this target
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
        from plumbing.plot import draw                                 # now: without matplotlib it ends here, not after the training
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


if __name__ == "__main__":
    command(main)
