"""
A training run, whatever is trained: batches, schedule, log, checkpoints, resuming, several processes.
"""
import datetime
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict

from tqdm import tqdm
import torch
import torch.distributed as dist
import torch.nn as nn

from plumbing.checkpoint import (DAMAGED, fingerprint, load, load_weights, out_folder, save,
                                 save_model, versions)
from plumbing.options import fail, gpu, pick_device, rank, say
from plumbing.text import read_text


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


def count(module):
    return sum(p.numel() for p in module.parameters())


def compile_blocks(model, opt):
    """--compile: every block by itself, in place; they are alike, so one compilation serves all."""
    for block in model.blocks if opt.compile else ():
        block.compile()


def describe(run):
    say(f"{run.kind}: " + " ".join(f"{k}={v}" for k, v in asdict(run.cfg).items())
        + f" | {run.cfg.batch_size * run.T * run.world:,} tokens a step")


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
