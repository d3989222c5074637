r"""
Train a backbone and a drafter for it, on text that is already on this machine.

    python train.py                            # a small backbone, if out/ has none, then all four drafters
    python train.py --method medusa            # ... or just one of them
    python train.py --method medusa -h         # with the options that only this one has
    python train.py --method backbone --data my_texts/

Idea     Corpus     the Python sources of this installation (or --data), split by file into training and
                    held-out text
         backbone   GPT with Muon for matrices and AdamW for the rest
         drafter    each method file has its own training loop; its batches, schedule and checkpoints are
                    plumbing/trainer.py's

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
from plumbing.contract import check_method
from plumbing.checkpoint import DAMAGED, differences, load, load_model, out_folder, versions
from plumbing.fast import HiddenStateCache
from plumbing.options import OUT, command, fail, gpu, mixed, parse, pick_device, rank, say
from plumbing.own_text import own_text
from plumbing.pretrained import load_pretrained
from plumbing.text import Corpus, Tokenizer, read_texts
from plumbing.trainer import Run, compile_blocks, count, describe, setup

# --method -> the file that is the method
METHODS = {"medusa": medusa, "amphista": amphista, "hidden_transfer": hidden_transfer, "moa": moa}


OWN, SPEED = "the backbone's own text", "speed and size"               # groups of options in -h


@dataclass
class Options:
    """Train drafters (default: all four), or a backbone. Where there is no backbone yet, it comes first."""
    method: str = arg("all", "what to train: one drafter, all of them, or the backbone",
                      choices=["all", "backbone", *METHODS])
    data: str = arg("python", "python = this installation's sources; or a file, a folder, a glob of text; "
                    "self = the backbone's own")
    backbone: str = arg("", "the target: empty = OUT/backbone; a hub id (gpt2, a Llama), a folder, a GGUF "
                        "file, or smollm2")
    out: str = arg(OUT, "folder of checkpoints and logs: OUT/backbone, OUT/medusa, ...; for --backbone gpt2 "
                   "OUT/gpt2/medusa")
    minutes: float = arg(0.0, "train for this long instead of a number of steps (0 = off)")
    resume: bool = arg(False, "go on where an interrupted run stopped")
    preset: str = arg("auto", "sizes for 2 CPU cores or one data-centre GPU; auto = by device",
                      choices=["auto", "cpu", "gpu"])
    device: str = arg("auto", "cpu, cuda, cuda:1, mps; auto takes the best there is")
    seed: int = arg(0, "seed of weights and batches")
    plot: bool = arg(False, "draw the curves of all trainings in OUT to OUT/training.png; needs matplotlib")

    draft_vocab: int = arg(0, "drafters guess among the N most frequent tokens of the training text only "
                           "(0 = all tokens)", group="drafters")
    warm_start: str = arg("", "folder like OUT: drafters start from the ones in it, with their draft "
                          "vocabulary, not untrained", group="drafters")

    self_tokens: int = arg(0, "--data self: size of the text (0 = 200,000 on a CPU, 4,000,000 on a GPU)",
                           group=OWN)
    self_prompts: str = arg("", "--data self: file of prompts, one a line, or JSON lines with \"turns\"; "
                            "empty = no prompt", group=OWN)
    self_temperature: float = arg(0.8, "--data self: temperature; 0 = greedy (what it asks itself, without "
                                  "--self-prompts, is drawn at 0.8 or more)", group=OWN)
    self_top_p: float = arg(0.95, "--data self: sample among the likeliest tokens that hold this much "
                            "probability", group=OWN)

    state_cache: float = arg(2.0, "--backbone: gigabytes of its hidden states to keep, so that text which "
                             "Medusa or Amphista sees again costs no forward; sequences then lie side by "
                             "side, not at random (0 = off)", group=SPEED)
    half: bool = arg(False, "write checkpoints in bfloat16: half the size", group=SPEED)
    compile: bool = arg(False, "torch.compile every block (worth it on a GPU)", group=SPEED)


@dataclass
class BackboneConfig(GPTConfig):
    """The backbone and its training."""
    steps: int = arg(1500, "optimiser steps", low=1)
    batch_size: int = arg(2, "sequences of block_size tokens in a step (or more of them, shorter)",
                          low=1, high=2**20)
    accumulate: int = arg(1, "split a step into this many forward passes, to save memory", low=1)
    first_length: int = arg(128, "sequences start this short, and as many more of them, until two thirds of "
                            "the training", low=1)
    lr: float = arg(0.02, "peak learning rate of the matrices (Muon)")
    lr_rest: float = arg(0.03, "peak learning rate of embeddings and norms (AdamW)")


GPU = {                                                                # what the gpu preset changes
    "backbone": dict(n_layer=12, n_head=12, n_kv_head=12, n_embd=768, n_ffn=2048, vocab_size=8192,
                     block_size=1024, steps=4000, batch_size=48, lr=0.02),
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
    shape = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(GPTConfig)}
    model = GPT(GPTConfig(**shape)).to(run.device)
    compile_blocks(model, run.opt)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimisers = [torch.optim.Muon(matrices, lr=cfg.lr, weight_decay=0.1, ns_steps=3),
                  torch.optim.AdamW(rest, lr=cfg.lr_rest, betas=(0.9, 0.95), weight_decay=0.0,
                                    fused=gpu(run.device))]
    for x in run.steps(model, optimisers, lambda x: backbone_loss(model, x)):
        model.zero_grad(set_to_none=True)
        total = backbone_step(model, x, cfg.accumulate)
        run.sync(model, total)
        for o in optimisers:
            o.step()
    return model


def own_backbone(opt, cfg, corpus, device, path, resume_path):
    """Train OUT/backbone and write it to path; go on with the run in resume_path unless that is None."""
    if corpus is None:
        fail("--data self needs a backbone that can write: run python train.py --method backbone first, or "
             "name a --backbone")
    if cfg.vocab_size < 257:
        fail(f"--vocab-size must be 257 or more (256 bytes and the end of text), not {cfg.vocab_size}")
    if resume_path:
        state = load(resume_path, "interrupted run", "start without --resume")[1]
        try:
            tokenizer = Tokenizer.from_dict(state["tokenizer"])
        except DAMAGED as e:
            fail(f"{resume_path} is broken or of another version ({type(e).__name__}: {e}): "
                 "start without --resume")
    else:
        tokenizer = Tokenizer.train(corpus.train_texts, cfg.vocab_size)
    cfg.vocab_size = tokenizer.vocab_size                              # a short text may not have that many
    corpus.tokenize(tokenizer)
    say(f"corpus: {len(corpus.train):,} training and {len(corpus.val):,} held-out tokens, "
        f"{corpus.chars_per_token:.2f} characters each")
    run = Run(opt, "backbone", cfg, corpus, device, cfg.block_size, {"finished": False})
    describe(run)
    model = train_backbone(cfg, run)
    say(f"backbone: {count(model):,} parameters, {run.metrics['bits_per_char']:.3f} bits/char on held-out "
        f"text, {run.metrics['seconds']:.0f} s -> {path}")
    if dist.is_initialized():
        dist.barrier()                                                 # the first process writes the file


def get_backbone(opt, cfg, corpus, device, again):
    """
    Load --backbone, or train OUT/backbone if it is not there, unfinished, or again is wanted; tokenize the
    corpus, or let the target write it (corpus None). -> the target, frozen, and the corpus.
    """
    folder = os.path.join(opt.out, "backbone")
    path, resume_path = (os.path.join(folder, name) for name in ("model.safetensors", "resume.safetensors"))
    resume = opt.resume and os.path.exists(resume_path)
    if opt.backbone:
        target, tokenizer, meta = load_pretrained(opt.backbone, device)
        say(f"backbone: {meta['source']}, {count(target):,} parameters, {tokenizer.vocab_size:,} tokens "
            f"-> {opt.out}")
    else:
        if again or resume or not os.path.exists(path):
            own_backbone(opt, cfg, corpus, device, path, resume_path if resume else None)
        target, tokenizer, meta = load_model(path, device)
    if not meta.get("finished"):
        say("note: this backbone's training was interrupted; --resume would finish it first")
    if corpus is None:
        corpus = own_text(opt, target, tokenizer, device)
        corpus.tokenize(tokenizer)
    elif not hasattr(corpus, "tokenizer"):                             # training it has done that already
        corpus.tokenize(tokenizer)
        if meta.get("data", corpus.digest) != corpus.digest:           # pretrained and older ones do not say
            say(f"note: {path} was trained on other text than --data {opt.data}; "
                "--method backbone would train it on this text")
    compile_blocks(target, opt)
    return target, corpus


# --------------------------------------------------------------------------------------------------
# Drafters

def mean_tau(target, drafter, prompts, new_tokens, **sampling):
    """Tokens per target forward over all prompts together."""
    runs = [complete(target, p, new_tokens, drafter, **sampling)[1] for p in prompts]
    return sum(sum(s.accepted[1:]) for s in runs) / max(1, sum(s.steps for s in runs))


def finished(run, target):
    """The metadata of this training's checkpoint if it is finished; None, and a line, if it is of another."""
    if not run.opt.resume or os.path.exists(run.resume_path) or not os.path.exists(run.path):
        return None
    _, meta = load(run.path, f"{run.kind} checkpoint", "start without --resume")
    if not meta.get("finished"):
        return None
    there = {**meta, "backbone": meta.get("original", meta.get("backbone")),
             "draft_vocab": dict(meta.get("options", {})).get("draft_vocab", 0)}
    wanted = {"backbone": target.fingerprint, "draft_vocab": run.opt.draft_vocab, "config": asdict(run.cfg)}
    if "data" in meta:                                                 # older ones do not say
        wanted["data"] = run.corpus.digest
    differs = differences(there, wanted)
    if differs:
        say(f"{run.kind}: {run.path} is of another {differs}, so it is trained again")
    return None if differs else meta


def train_drafter(kind, opt, cfg, corpus, target, device, method=None):
    """
    Train a drafter of this method (a module; default: METHODS' own), calibrate and try it. -> its row of the
    closing table.
    """
    method = method or METHODS[kind]
    meta = {"finished": False, "backbone": target.fingerprint}
    run = Run(opt, kind, cfg, corpus, device, min(target.cfg.block_size, 256), meta)
    there = finished(run, target)
    if there:
        say(f"{kind}: finished already -> {run.path}")
        return dict(method=kind, parameters=there["parameters"], **there["metrics"])
    room = min(run.T, len(corpus.val))
    if room < cfg.min_tokens:
        fail(f"{kind} learns from sequences of {cfg.min_tokens} tokens or more; here they have {room}: fewer "
             "draft positions, a longer --block-size, or more --data")
    check_method(kind, method)
    describe(run)
    try:
        net = method.train(cfg, target, run)
    except ValueError as e:
        if not str(e).startswith("--"):
            raise
        fail(e)                                                        # an option that this target refuses
    run.meta["parameters"] = count(net)
    if hasattr(net, "target"):                                         # Medusa-2: a new backbone, its heads
        net, target = net.net, net.target
    net.eval()
    held_out = [x.to(device) for x in corpus.val_batches(8, run.T, 16)]
    run.meta["calibration"] = calibrate(method, net, target, held_out)
    hits = accuracy(run.meta["calibration"])
    run.metrics["top1"] = [round(row[0], 4) for row in hits]           # over more text than the log's
    prompts = corpus.prompts(8, min(64, target.cfg.block_size // 2))
    drafter = method.Drafter(net, target, None, most_nodes(device))
    run.metrics["tau"] = round(mean_tau(target, drafter, prompts, 64), 3)
    run.meta["finished"] = True
    run.save()
    say(f"{kind}: {run.meta['parameters']:,} trained parameters -> {run.path}")
    return dict(method=kind, parameters=run.meta["parameters"], **run.metrics)


# --------------------------------------------------------------------------------------------------
# Main

def options(argv):
    """-> Options, the Config of --method or None, does the gpu preset hold? Ends with a message."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("method", "preset", "device"):                        # these say which options there are
        first.add_argument("--" + name, default=getattr(Options, name))
    first.error = fail
    known, _ = first.parse_known_args(argv)
    big = known.preset == "gpu" or known.preset == "auto" and gpu(pick_device(known.device))
    configs = {"backbone": BackboneConfig} | {name: method.Config for name, method in METHODS.items()}
    Config = configs.get(known.method)
    opt, *cfg = parse(Options, *filter(None, [Config]), argv=argv, defaults=preset(known.method, big),
                      epilog="options of one method: python train.py --method medusa -h; on a GPU training "
                      "has bf16 autocast, fused AdamW and pinned batches")
    return opt, cfg[0] if cfg else None, big


def preset(kind, big):
    """What a preset changes of the Config of a method or of the backbone."""
    return GPU.get(kind, {}) if big else {}


def check(opt, cfg):
    """Ends with a message where options contradict each other; opt.out is the folder of this backbone."""
    backbone = os.path.join(opt.out, "backbone", "model.safetensors")
    again = opt.method == "backbone"
    if again and opt.backbone:
        fail("--method backbone trains one of our own: leave --backbone out")
    if opt.warm_start and (again or not opt.backbone and not os.path.exists(backbone)):
        fail("--warm-start starts drafters, and from those of a backbone that is there, "
             f"in --out {opt.out} or as --backbone")
    if opt.self_top_p > 1:
        fail(f"--self-top-p must lie between 0 and 1, not {opt.self_top_p}")
    if getattr(cfg, "recipe", 1) == 2 and (opt.backbone or opt.draft_vocab):
        fail("--recipe 2 trains a backbone of our own and all of its vocabulary: "
             "leave --backbone and --draft-vocab out")


def main(argv=None):
    opt, cfg, big = options(sys.argv[1:] if argv is None else argv)
    try:
        os.makedirs(opt.out or ".", exist_ok=True)                     # better now than after minutes
    except OSError as e:
        fail(f"--out {opt.out} cannot be written to: {e}")
    if opt.minutes and "RANK" in os.environ:
        fail("--minutes works with one process only: several would not stop at the same step")
    if opt.plot:
        from plumbing.plot import draw                                 # without matplotlib it ends here, now
    device = setup(opt)
    torch.manual_seed(opt.seed)
    precision = "fp32, for the backbone bf16 autocast" if mixed(device, "backbone") else "fp32"
    precision = "bf16 autocast" if gpu(device) else precision
    say(f"device {device}, {precision}, {torch.get_num_threads()} threads | "
        + " ".join(f"{k} {v}" for k, v in versions().items()))
    again, out, opt.out = opt.method == "backbone", opt.out, out_folder(opt.out, opt.backbone)
    check(opt, cfg)
    corpus = None if opt.data == "self" else Corpus(read_texts(opt.data, with_packages=big))
    backbone_cfg = cfg if again else BackboneConfig(**preset("backbone", big))
    target, corpus = get_backbone(opt, backbone_cfg, corpus, device, again)
    if opt.backbone and opt.state_cache:                               # all drafters of this run share it
        target.hidden, corpus.aligned = HiddenStateCache(target, opt.state_cache * 1e9), True
    if getattr(cfg, "recipe", 1) == 2:                                 # a backbone of its own: like OUT
        out = opt.out = os.path.join(opt.out, "medusa2")
    kinds = [] if again else list(METHODS) if opt.method == "all" else [opt.method]
    rows = []
    for kind in kinds:
        torch.manual_seed(opt.seed)
        kind_cfg = cfg or METHODS[kind].Config(**preset(kind, big))
        rows.append(train_drafter(kind, opt, kind_cfg, corpus, target, device))
    if rows:
        say(f"\n{'method':16s} {'parameters':>11s} {'seconds':>8s} {'tau':>6s}  held-out top-1 by position")
        for r in rows:
            say(f"{r['method']:16s} {r['parameters']:11,d} {r['seconds']:8.0f} {r['tau']:6.2f}  "
                + " ".join(f"{a:.3f}" for a in r["top1"]))
        best = max(rows, key=lambda r: r["tau"])["method"]
        where = f" --backbone {opt.backbone}" if opt.backbone else ""
        where += f" --out {out}" if out != Options.out else ""
        say("\ntau: tokens per target forward at T = 0 on 8 held-out prompts. Now try\n"
            f"python sample.py --method {best} --compare{where}\n"
            f"python sample.py --method all --show page{where}")
    if opt.plot and rank() == 0:
        draw(opt.out)


if __name__ == "__main__":
    command(main)
