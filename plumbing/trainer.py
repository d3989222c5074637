"""
A training run, whatever is trained: batches, schedule, log, checkpoints, resuming, several processes.
"""
import contextlib
import datetime
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

from plumbing.checkpoint import (DAMAGED, differences, fingerprint, load, load_weights, out_folder, save,
                                 save_model, versions)
from plumbing.log import read_log, write_log
from plumbing.options import fail, gpu, mixed, pick_device, rank, say


def setup(opt):
    """Device and processes. Returns the device's name."""
    if "RANK" in os.environ:
        cuda = torch.cuda.is_available() and opt.device in ("auto", "cuda")
        # a day: while one process writes own text, the others wait
        dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(days=1))
        if cuda:
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        else:
            device = pick_device("cpu" if opt.device == "auto" else opt.device)
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


def progress_bar(name):
    return tqdm(total=100, desc=name, disable=None if rank() == 0 else True,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}")


@contextlib.contextmanager
def signals_noted(run):
    """Ctrl-C and SIGTERM set run.stop, which ends a training in order."""
    def note(*_):
        run.stop = True
    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class Run:
    """What every training loop needs and no paper is about. kind: backbone or a method; cfg: its Config."""
    stop, told, heard = False, None, None                              # see sync and stopping

    def __init__(self, opt, kind, cfg, corpus, device, T, meta):
        corpus.check(T)
        self.opt, self.kind, self.cfg, self.corpus = opt, kind, cfg, corpus
        self.device, self.T, self.meta = device, T, meta
        self.path = os.path.join(opt.out, kind, "model.safetensors")
        self.resume_path = os.path.join(opt.out, kind, "resume.safetensors")
        self.log_path = os.path.join(opt.out, kind, "log.jsonl")
        self.step, self.elapsed, self.metrics, self.seen, self.log = 0, 0.0, {}, [], []
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.amp = torch.autocast("cuda" if gpu(device) else "cpu", torch.bfloat16, mixed(device, kind))
        self.vocab = None                                              # what a drafter may draft; None = all
        if kind != "backbone":
            self.vocab = corpus.frequent(opt.draft_vocab)
        self.init = self.start_from(opt.warm_start) if opt.warm_start and kind != "backbone" else None
        vocab = None if self.vocab is None else fingerprint({"ids": self.vocab})
        # what a resumed run must have in common with the one that stopped
        self.same = {"backbone": meta.get("backbone"), "draft vocabulary": vocab, **asdict(cfg),
                     "minutes": opt.minutes, "seed": opt.seed, "processes": self.world,
                     "data": corpus.digest, "sequences side by side": corpus.aligned,
                     "warm start": meta.get("init", {}).get("checkpoint")}

    def start_from(self, folder):
        """--warm-start -> (tensors, path) of the drafter there; takes over its draft vocabulary."""
        path = os.path.join(out_folder(folder, self.opt.backbone), self.kind, "model.safetensors")
        hint = "leave --warm-start out, or name a folder that has one"
        tensors, old = load(path, f"{self.kind} checkpoint", hint)
        if old.get("kind") != self.kind or old.get("original", old.get("backbone")) != self.meta["backbone"]:
            fail(f"--warm-start: {path} is a {old.get('kind')} drafter of another backbone: "
                 "leave --warm-start out")
        ids = tensors.get("head.ids")
        if self.opt.draft_vocab and (ids is None or self.vocab is None or not torch.equal(ids, self.vocab)):
            fail(f"--warm-start: {path} has a draft vocabulary of its own: leave --draft-vocab out")
        self.vocab = ids
        self.meta["init"] = {"checkpoint": fingerprint(tensors), "metrics": old.get("metrics")}
        return tensors, path

    def progress(self):
        """0 at the start, 1 at the end, by steps or by minutes."""
        if self.opt.minutes:
            return min(1.0, (self.elapsed + time.perf_counter() - self.since) / (60 * self.opt.minutes))
        return self.step / self.cfg.steps

    def schedule(self):
        """Learning rate as a share of its peak: up in 20 steps or 2 %, then a cosine to a twentieth."""
        p = self.progress()
        return min(1.0, max(p / 0.02, (self.step + 1) / 20), 0.525 + 0.475 * math.cos(math.pi * p))

    def next_batch(self):
        """(B, T) text for the step at hand: short sequences, more of them, until two thirds of the run."""
        B, T = self.cfg.batch_size, self.T
        short = getattr(self.cfg, "first_length", T)
        if short < T and self.progress() < 2 / 3:
            B, T = B * T // short, short
        return self.corpus.batch((self.opt.seed * 1_000_003 + self.step) * self.world + rank(), B, T)

    def steps(self, module, optimisers, evaluate):
        """
        Yield batches (B, T) until the training is done; resumes, shows progress, evaluates and saves between
        them. evaluate(x) -> (loss, top1[, more figures by name]) on held-out text. Ctrl-C ends the loop after
        the step at hand, checkpoint written.
        """
        self.module, self.optimisers, self.evaluate = module, optimisers, evaluate
        if hasattr(module, "target"):
            compile_blocks(module.target, self.opt)
        peak = [[g["lr"] for g in o.param_groups] for o in optimisers]
        if self.init:
            load_weights(module.net if hasattr(module, "target") else module, *self.init)
        if self.opt.resume and os.path.exists(self.resume_path):
            self.restore()
        self.since, self.last = time.perf_counter(), (self.step, time.perf_counter())
        tenth = math.floor(self.progress() * 10)
        module.train()
        with signals_noted(self), progress_bar(self.kind) as bar:
            while (self.progress() < 1 or not self.step) and not self.stopping():
                for o, lrs in zip(optimisers, peak):
                    for g, lr in zip(o.param_groups, lrs):
                        g["lr"] = lr * self.schedule()
                x = self.next_batch()
                if gpu(self.device):
                    x = x.pin_memory()                                 # copied while the GPU still works
                with self.amp:
                    yield x.to(self.device, non_blocking=True)
                self.step += 1
                bar.update(int(100 * self.progress()) - bar.n)
                if tenth < math.floor(self.progress() * 10) < 10:      # nine times, and at the end
                    tenth = math.floor(self.progress() * 10)
                    self.report()
                    self.save()
            if self.step:                                              # untrained, it must replace nothing
                self.report()
                # a drafter is still to be calibrated
                self.meta["finished"] = self.progress() >= 1 and self.kind == "backbone"
                self.save()
            if self.anyone(self.stop):                                 # all wait here until it is saved
                bar.close()
                left = "the checkpoint is usable, --resume goes on from here"
                if rank() == 0:
                    print(f"stopped at step {self.step};", left if self.step else "nothing was written",
                          file=sys.stderr)
                raise SystemExit(130)

    def sync(self, module, loss):
        """
        After backward: average gradients over processes, clip them to norm 1. Remembers the loss for the next
        report. With the gradients travels the news that a process was told to stop.
        """
        params = [p for p in module.parameters() if p.grad is not None]
        if self.world > 1:
            stop = params[0].grad.new_tensor([float(self.stop)])
            flat = torch.cat([*(p.grad.flatten() for p in params), stop])
            dist.all_reduce(flat)
            self.heard, self.told = self.told, flat[-1]
            mean = flat[:-1].div_(self.world).split([p.numel() for p in params])
            for p, g in zip(params, mean):
                p.grad.copy_(g.view_as(p))
        nn.utils.clip_grad_norm_(params, 1.0)
        self.seen.append(loss.detach())

    def stopping(self):
        """
        Is this the end? All processes say so after the same step, or one would wait for ever for the others'
        gradients: they go by the news of the step before last, for which no GPU has to be waited for.
        """
        return self.stop if self.world == 1 else bool(self.heard)

    def anyone(self, says):
        """Does any process say so? All get the same answer, once all have asked."""
        if self.world > 1:
            says = torch.tensor([float(says)], device=self.device)
            dist.all_reduce(says)
        return bool(says)

    def measure(self):
        """The model on held-out text -> loss, top1, more figures by name."""
        self.module.eval()
        with torch.no_grad(), self.amp, torch.random.fork_rng(devices=[]):         # changes nothing
            torch.manual_seed(0)
            parts = [self.evaluate(x.to(self.device)) for x in self.corpus.val_batches(8, self.T, 4)]
        self.module.train()
        mean = lambda values: sum(map(float, values)) / len(parts)
        val, first = mean(p[0] for p in parts), parts[0]
        top1 = torch.stack([p[1] for p in parts]).mean(0).tolist() if len(first[1]) else []
        more = {k: mean(p[2][k] for p in parts) for k in first[2]} if len(first) > 2 else {}
        return val, [round(a, 4) for a in top1], {k: round(v, 4) for k, v in more.items()}

    def report(self):
        """One log line, and one of this run's log.jsonl. A loss that is not finite ends the run, unsaved."""
        if not self.seen:
            return
        tokens = self.cfg.batch_size * self.T * self.world             # of a step
        train = torch.stack(self.seen).mean().item()                   # only here we wait for the device
        now = time.perf_counter()
        val, top1, more = self.measure()
        if not math.isfinite(train + val):
            fail(f"{self.kind}: the loss is {train if math.isfinite(val) else val} before step {self.step}: "
                 f"lower --lr; {self.path} keeps the last good state")
        spent = self.elapsed + now - self.since
        self.metrics = dict(step=self.step, tokens=self.step * tokens, train_loss=round(train, 4),
                            val_loss=round(val, 4), seconds=round(spent, 1), **more)
        if top1:
            self.metrics["top1"] = top1
            figures = [f"top1 {' '.join(f'{a:.3f}' for a in top1)}"]
        else:
            bits = self.metrics["bits_per_char"] = round(val / math.log(2) / self.corpus.chars_per_token, 4)
            figures = [f"{bits:.3f} bits/char"]
        figures += [f"{name.replace('_', ' ')} {value:.3f}" for name, value in more.items()]
        speed = (self.step - self.last[0]) * tokens / (now - self.last[1])
        eta = spent * (1 / max(self.progress(), 1e-9) - 1)
        figures += [f"lr {self.schedule():.2f}", f"{speed:,.0f} tok/s", f"{spent:.0f} s, eta {eta:.0f} s"]
        say(" | ".join([f"step {self.step:5d}", f"loss {train:.3f}", f"held-out {val:.3f}", *figures]))
        self.log.append({**self.metrics, "tokens_per_second": round(speed)})
        if rank() == 0:
            write_log(self.log_path, self.log)
        self.seen, self.last = [], (self.step, time.perf_counter())

    def save(self):
        """Write the checkpoint and, until the run is finished, what --resume needs: two files, each whole."""
        if rank() > 0:
            return
        meta = {**self.meta, "metrics": self.metrics, "options": asdict(self.opt), "data": self.corpus.digest,
                "versions": versions()}
        net = self.module
        if hasattr(net, "target"):                                     # a drafter and a backbone of its own
            meta["original"] = meta.pop("backbone")
            save_model(os.path.join(self.opt.out, "backbone", "model.safetensors"), net.target,
                       self.corpus.tokenizer, self.opt.half, **meta)
            meta["backbone"], net = net.target.fingerprint, net.net
        if self.kind == "backbone":
            save_model(self.path, net, self.corpus.tokenizer, self.opt.half, **meta)
        else:
            meta = {"kind": self.kind, "config": asdict(self.cfg), **meta}
            save(self.path, net.state_dict(), meta, self.opt.half)
        if meta.get("finished"):
            for end in (".safetensors", ".json"):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.splitext(self.resume_path)[0] + end)
            return
        tensors = {f"module.{k}": v.clone() for k, v in self.module.state_dict().items()}
        tensors["rng"] = torch.get_rng_state()
        for i, o in enumerate(self.optimisers):
            for p, state in o.state_dict()["state"].items():
                tensors |= {f"optimiser.{i}.{p}.{k}": torch.as_tensor(v).clone() for k, v in state.items()}
        spent = self.elapsed + time.perf_counter() - self.since
        state = {"kind": self.kind + " (resume)", "same": self.same, "step": self.step, "elapsed": spent,
                 "metrics": self.metrics}
        if self.kind == "backbone":
            state["tokenizer"] = self.corpus.tokenizer.to_dict()
        save(self.resume_path, tensors, state)

    def restore(self):
        """Go back to the last save of an interrupted run, if that was one of the same."""
        tensors, meta = load(self.resume_path, "interrupted run", "start without --resume")
        try:
            differs = differences(meta["same"], self.same)
            if differs:
                fail(f"{self.resume_path} was started with another {differs}: use the same options and text, "
                     "or leave --resume out")
            module = {k[7:]: v for k, v in tensors.items() if k.startswith("module.")}
            load_weights(self.module, module, self.resume_path)
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
            self.step, self.elapsed = int(meta["step"]), float(meta["elapsed"])
            self.metrics = dict(meta["metrics"])
        except DAMAGED as e:
            fail(f"{self.resume_path} is broken or of another version ({type(e).__name__}: {e}): "
                 "start without --resume")
        self.log = [row for row in read_log(self.log_path) if row["step"] <= self.step]
        say(f"resuming {self.kind} at step {self.step}")
