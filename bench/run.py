r"""
Measure methods side by side: the same prompts, one after the other, so that a drifting machine slows all
alike.

    python bench/run.py --methods medusa,eagle2,hf --train-minutes 5 --json out/bench.json
    python bench/run.py --questions bench/questions.jsonl --backbone smollm2 --prompts 12

Methods     the four drafters; eagle2, self_speculative, prompt_lookup (the files beside this one); plain
            (always there); hf = transformers' generate with the same weights, hf-lookup = the same with its
            own prompt lookup. medusa:nodes=4:tree=sparse is Medusa with these options of its own, so that one
            switch can be compared with another
Prompts     held-out text of the training corpus, or --questions: a file of Spec-Bench's or MT-Bench's form, a
            JSON object a line: {"question_id": 81, "category": "writing", "turns": ["...", "..."]}. A
            question is the prompt as it stands, or in its tokenizer's chat form if there is one; the second
            turn follows plain decoding's answer.
Fair        batch 1, the same target, cache, loop and seeds; all methods on every prompt, in an order drawn
            anew; a warm-up before; trees and chains of at most --nodes nodes for all of ours; --train-minutes
            gives every drafter the same time on the same text, the search of self_speculative too
Reported    overall and by category: tau; tokens/s after the prompt (median); speed-up over plain = median
            over the prompts of the ratio of tokens/s, with its 95 % bootstrap interval; milliseconds a step
            for draft and verification; whether every text equals plain decoding's, or the first token that
            does not and the gap between the two best scores there (a fault has a large one, a rounding error
            a tiny one); how many plain texts end in a loop (loops flatter every drafter). The last line is
            JSON. --spec-bench FOLDER writes the answers for Spec-Bench's own scripts too.
"""
import datetime
import json
import os
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version

from tqdm import tqdm
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import eagle2
import prompt_lookup
import report
import sample
import self_speculative
import train
from model import arg
from train import METHODS
from tree import Sampler, complete
from plumbing.budget import how_many
from plumbing.checkpoint import DAMAGED, load_model, out_folder, versions
from plumbing.compare import gap
from plumbing.drafters import given, load_drafter, load_target, own_options
from plumbing.exact import INEXACT, inexact
from plumbing.options import DTYPES, OUT, command, fail, gpu, parse, say
from plumbing.shapes import parse_tree
from plumbing.pretrained import load_pretrained, to_hf
from plumbing.text import Corpus, digest, read_lines, read_texts

RIVALS = {"eagle2": eagle2, "self_speculative": self_speculative, "prompt_lookup": prompt_lookup}
MODULES = METHODS | RIVALS
Own = own_options(MODULES)                                             # options that only some methods know
OWN = ("tree", "nodes", "floor", *(f.name for f in fields(Own)), "share_noise", "out")     # for one method
HF = {"hf": {}, "hf-lookup": dict(prompt_lookup_num_tokens=10)}
GPU = {"eagle2": dict(batch_size=32, lr=6e-4), "self_speculative": dict(batch_size=8)}     # as train.GPU


@dataclass
class Options:
    """Compare methods on held-out prompts of the training corpus, or on a file of questions."""
    methods: str = arg(f"plain,{INEXACT}," + ",".join(METHODS),
                       f"which, with commas: {', '.join([*MODULES, *HF])}; plain is always there; {INEXACT} "
                       "is plain decoding as with --no-exact, a row only where that differs")
    questions: str = arg("", "a file of questions, such as bench/questions.jsonl; without one: held-out text")
    prompts: int = arg(16, "number of prompts, spread over all there are; 0 = all questions of a file")
    new_tokens: int = arg(128, "tokens to write after each", low=1)
    temperatures: str = arg("0,1", "which, with commas")
    nodes: str = arg("auto", "most nodes of a tree, as for sample.py")
    train_minutes: float = arg(0.0, "train each drafter this long first, into OUT (0 = take those there are)")
    json: str = arg("", "write the result here, the answers beside it (.answers.jsonl), and charts if "
                    "matplotlib is there")
    out: str = arg(OUT, "folder of checkpoints")
    backbone: str = arg("", "the target, as for sample.py; empty = OUT/backbone")

    prompt_tokens: int = arg(64, "length of a held-out prompt", low=1, group="held-out prompts")
    data: str = arg("python", "corpus, as for train.py", group="held-out prompts")

    tree: str = arg("best", "as for sample.py", group="the tree")
    floor: float = arg(sample.Options.floor, "as for sample.py", group="the tree")
    share_noise: bool = arg(True, "as for sample.py", group="the tree")

    resume: bool = arg(False, "go on where an interrupted run with this --json stopped", group="results")
    profile: bool = arg(False, "also choice (noise, argmax) and rest (walk, cache) of a step, and the "
                        "prompt, in milliseconds", group="results")
    spec_bench: str = arg("", "also write the answers to this folder as Spec-Bench's model_answer files, "
                          "which its speed.py and equal.py read", group="results")

    device: str = arg("auto", "as for sample.py", group="where things are")
    dtype: str = arg("auto", "as for sample.py", choices=DTYPES, group="where things are")
    threads: int = arg(0, "as for sample.py", high=1024, group="where things are")
    exact: bool = arg(True, "as for sample.py", group="where things are")
    compile: bool = arg(False, "as for sample.py", group="where things are")

    own: dict = field(default_factory=dict)                            # no option: single methods', by name


# --------------------------------------------------------------------------------------------------
# Prompts

def read_questions(path, n):
    """A JSONL file -> n questions spread over it (0 = all): dicts with question, category, turns."""
    out, number = [], 0
    try:
        for number, line in enumerate(read_lines(path), 1):
            if line.strip():
                q = json.loads(line)
                turns = q["turns"]
                texts = isinstance(turns, list) and all(isinstance(t, str) and t.strip() for t in turns)
                if not texts or not turns:
                    raise ValueError("turns must be a list of texts")
                out.append(dict(question=str(q["question_id"]), category=str(q["category"]), turns=turns))
    except DAMAGED as e:
        fail(f"--questions {path}" + (f", line {number}" if number else "") + f": {type(e).__name__}: {e}")
    if not out:
        fail(f"--questions {path}: there is no question in it")
    return [out[i] for i in torch.linspace(0, len(out) - 1, min(n, len(out)) or len(out)).long()]


def tokens_of(turns, tokenizer):
    """Question, answer, question .. (texts), or one list of tokens -> the tokens of the prompt."""
    if isinstance(turns[0], list):
        return turns[0]
    if tokenizer.has_chat:
        return tokenizer.chat(turns)
    return tokenizer.start + tokenizer.encode("\n\n".join(turns) + "\n\n")


# --------------------------------------------------------------------------------------------------
# Methods

def variant(name, opt):
    """medusa:nodes=4:tree=sparse -> medusa, and Options with these. Raises ValueError."""
    name, *own = name.split(":")
    for item in own:
        key, _, value = item.replace("-", "_").partition("=")
        if key not in OWN or not value or key == "share_noise" and value not in ("True", "False"):
            raise ValueError(f"{item} is none of {'=.., '.join(OWN)}=..")
        if key in (f.name for f in fields(Own)):
            opt = replace(opt, own=opt.own | {key: int(value)})
        elif key == "share_noise":
            opt = replace(opt, share_noise=value == "True")
        else:
            kind = type(getattr(opt, key))
            opt = replace(opt, **{key: kind(value)})
    return name, opt


def train_all(opt, names, target, tokenizer, device):
    """Train every drafter of names for the same time on the same text."""
    corpus = Corpus(read_texts(opt.data, with_packages=gpu(device))).tokenize(tokenizer)
    todo = train.Options(data=opt.data, out=out_folder(opt.out, opt.backbone), device=opt.device,
                         minutes=opt.train_minutes, resume=opt.resume)
    for n in names:
        if hasattr(MODULES.get(n), "train"):                           # a variant trains nothing
            preset = (train.GPU | GPU).get(n, {}) if gpu(device) else {}
            torch.manual_seed(todo.seed)
            train.train_drafter(n, todo, MODULES[n].Config(**preset), corpus, target, device, MODULES[n])


def load_method(name, opt, target):
    """-> the drafter (None = plain decoding), and what its checkpoint says of its training."""
    name, opt = variant(name, opt)
    if name in ("plain", INEXACT):
        return None, {}
    module = MODULES[name]
    if not hasattr(module, "train"):                                   # nothing to load
        net, nodes = module.Net(module.Config(), target), how_many(opt.nodes, target)
        try:
            shape = parse_tree(opt.tree, net.K, target.cfg.vocab_size, None, nodes)
            return module.Drafter(net, target, shape, nodes), {}
        except ValueError as e:
            fail(str(e))
    common = options_of_sample(opt, "tree", "nodes", "floor")
    own = {k: v for k, v in opt.own.items() if k in getattr(module, "OPTIONS", {})}
    hint = None if name in METHODS else f"run python bench/run.py --methods {name} --train-minutes 5"
    drafter = load_drafter(sample.Options(method=name, **common), target, module, hint, own=own)
    meta = drafter.net.meta
    n = meta.get("parameters", 0)                                      # 0: a search, or interrupted training
    return drafter, dict(parameters=n, checkpoint=drafter.net.fingerprint,
                         training_tokens=meta["metrics"].get("tokens") if n else None,
                         training_seconds=meta["metrics"].get("seconds"))


def options_of_sample(opt, *more):
    """The options that this program shares with sample.py, as a dict: where things are, and more of them."""
    names = (*more, "out", "backbone", "device", "dtype", "threads", "exact", "compile")
    return {name: getattr(opt, name) for name in names}


class Clock:
    """A transformers streamer that only notes when how many tokens came; the prompt comes first."""

    def __init__(self):
        self.at, self.accepted = [], []

    def put(self, tokens):
        self.at.append(time.perf_counter())
        self.accepted.append(tokens.numel())

    def end(self):
        pass


def hf_answer(hf, name, prompt, new_tokens, temperature, seed, eos):
    """
    transformers' generate -> an answer as of our own loop: tokens, accepted (a forward), nodes,
    seconds.
    """
    torch.manual_seed(seed)
    idx, clock, start = torch.tensor([prompt], device=hf.device), Clock(), time.perf_counter()
    sampling = dict(do_sample=False)
    if temperature:
        sampling = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
    out = hf.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=new_tokens, streamer=clock,
                      eos_token_id=eos, pad_token_id=eos[0], **sampling, **HF[name])
    tokens, done = out[0, len(prompt):].tolist(), time.perf_counter()
    return dict(tokens=tokens, accepted=clock.accepted[1:], nodes=0,
                seconds=dict(prompt=clock.at[1] - start, draft=0.0, verify=0.0, rest=done - clock.at[1]))


# --------------------------------------------------------------------------------------------------
# Main

class Progress:
    """How far a run is: a bar on a terminal, and after the first prompt how long the others will take."""

    def __init__(self, prompts):
        self.bar = tqdm(total=prompts, desc="prompts", unit="", disable=None)
        self.left, self.told = prompts, False

    def done(self, seconds=None):
        """A prompt is answered by all methods, in so many seconds (None: by an earlier run)."""
        self.bar.update()
        self.left -= 1
        if seconds is not None and not self.told:
            self.told, rest = True, seconds * self.left
            rest = f"{rest:.0f} s" if rest < 120 else f"{rest / 60:.0f} minutes"
            say(f"the first prompt took {seconds:.1f} s, all methods together: about {rest} for the other "
                f"{self.left}")


def measure(temperature, questions, names, ask, gaps, tokenizer, done, file, progress):
    """
    All methods on all prompts at one temperature -> records (report.py). ask(name, prompt, temperature, seed)
    -> an answer; gaps(answers, prompt, temperature, seed) adds the gaps of those that differ.
    """
    records, cold = [], True
    for i, q in enumerate(questions):
        turns = []
        for t, turn in enumerate(q["turns"]):
            turns.append(turn)
            r, seconds = done.get((temperature, i, t)), None
            if r is None:
                prompt = tokens_of(turns, tokenizer)
                order = random.Random(i).sample(names, len(names))     # one that runs after another is slower
                for n in order if cold else ():                        # the warm-up
                    ask(n, prompt, temperature, i)
                start = time.perf_counter()
                answers = {n: ask(n, prompt, temperature, i) for n in order}
                cold, seconds = False, time.perf_counter() - start
                gaps(answers, prompt, temperature, i)
                r = dict(temperature=temperature, index=i, turn=t, question=q["question"],
                         category=q["category"], prompt_tokens=len(prompt), answers=answers)
                if file:
                    file.write(json.dumps(r) + "\n")
                    file.flush()
            progress.done(seconds)
            records.append(r)
            turns.append(tokenizer.decode(r["answers"]["plain"]["tokens"]))
    return records


def options(argv):
    """-> Options, names of the methods, temperatures. Ends with a message for what cannot be."""
    opt, own = parse(Options, Own, argv=argv)
    opt.own = given(own)
    names = ["plain"] + list(dict.fromkeys(n for n in opt.methods.split(",") if n not in ("plain", "")))
    for n in names[1:]:
        try:
            known = variant(n, opt)[0] in MODULES or n in HF or n == INEXACT
        except ValueError as e:
            fail(f"--methods: {n}: {e}")
        if not known:
            fail(f"--methods: unknown method {n}; there are plain, {INEXACT}, {', '.join([*MODULES, *HF])}")
    try:
        temperatures = [Sampler(float(t)).temperature for t in opt.temperatures.split(",")]
    except ValueError:
        fail(f"--temperatures must be numbers with commas, 0 or more, not {opt.temperatures!r}")
    if os.path.exists(opt.json) and not os.path.isfile(opt.json):      # /dev/null: a rename would replace it
        fail(f"--json {opt.json}: it is there already, and is no file")
    if opt.resume and not opt.json:
        fail("--resume needs the --json of the interrupted run")
    if not opt.questions and not opt.prompts:
        fail("--prompts must be 1 or more, unless --questions names a file")
    if opt.spec_bench:
        try:
            os.makedirs(opt.spec_bench, exist_ok=True)                 # better now than after the measurement
        except OSError as e:
            fail(f"--spec-bench {opt.spec_bench}: {e}")
    return opt, names, temperatures


def about(opt, target, device, argv):
    """What a result says of itself: options, versions, machine, how it was decoded."""
    machine = platform.processor() or platform.machine()
    if gpu(device):
        machine = torch.cuda.get_device_name(device)
    return dict(options=asdict(opt), versions=versions() | {"transformers": version("transformers")},
                machine=machine, threads=torch.get_num_threads(), device=device,
                dtype=str(target.wte.weight.dtype), date=datetime.date.today().isoformat(),
                decoding=target.exactness, command=" ".join(["python", "bench/run.py", *argv]))


def answers_file(opt, result, target, tokenizer, questions, names, trained):
    """--json: the file of answers, open, and the answers of an interrupted run that are in it."""
    path = os.path.splitext(opt.json)[0] + ".answers.jsonl"
    # prompts and models are compared by what is in them, not by where they are
    where = ("questions", "data", "prompts", "prompt_tokens", "out", "backbone", "json", "spec_bench")
    never = ("resume", "profile", "train_minutes", *where)
    prompts = {str(i): f"{q['question']}, {digest([q, tokenizer.template])}" for i, q in enumerate(questions)}
    header = dict(options={k: v for k, v in asdict(opt).items() if k not in never}, prompts=prompts,
                  dtype=result["dtype"], backbone=target.fingerprint, machine=result["machine"],
                  checkpoints={n: t.get("checkpoint") for n, t in trained.items()})
    done = report.read_answers(path, header, names) if opt.resume else {}
    file = report.open_answers(path, header, done)
    if done:
        say(f"{len(done)} prompts are answered in {path}; going on")
    return file, done


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    opt, names, temperatures = options(argv)
    questions = read_questions(opt.questions, opt.prompts) if opt.questions else None
    target, tokenizer = load_target(sample.Options(method="plain", **options_of_sample(opt)))
    device, room = str(target.wte.weight.device), target.cfg.block_size - opt.new_tokens
    if room < 1:
        fail(f"--new-tokens {opt.new_tokens} leave no room for a prompt in a context of "
             f"{target.cfg.block_size}")
    if set(names) & set(HF) and (target.cfg.style != "llama" or target.cfg.qkv_bias or target.scaled):
        fail("hf and hf-lookup need a plain llama-style backbone: leave them out of --methods")
    if not target.exact:                                               # plain decoding is as fast as can be
        names = [n for n in names if n != INEXACT]
    if opt.train_minutes:
        path = os.path.join(opt.out, "backbone", "model.safetensors")
        fresh = load_pretrained(opt.backbone, device) if opt.backbone else load_model(path, device)
        train_all(opt, names, fresh[0], tokenizer, device)
    methods = {n: load_method(n, opt, target) for n in names if n not in HF}
    trained = {n: t for n, (_, t) in methods.items()}
    if questions is None:
        texts = Corpus(read_texts(opt.data)).tokenize(tokenizer).prompts(opt.prompts, opt.prompt_tokens)
        questions = [dict(question=str(i), category="held-out", turns=[ids]) for i, ids in enumerate(texts)]
    result = about(opt, target, device, argv) | dict(trained=trained)
    say(f"{result['machine']}, {target.told} | {len(questions)} prompts x {opt.new_tokens} tokens | "
        + " ".join(f"{k} {v}" for k, v in result["versions"].items()))
    file, done = None, {}
    if opt.json:
        file, done = answers_file(opt, result, target, tokenizer, questions, names, trained)
    hf = None
    if set(names) & set(HF):
        import transformers
        transformers.logging.set_verbosity_error()
        hf = to_hf(target).to(device)

    def sampler(name, temperature, seed):
        return Sampler(temperature, seed=seed, share=variant(name, opt)[1].share_noise)

    def ask(name, prompt, temperature, seed):
        prompt = prompt[-room:]
        if name in HF:
            stops = sorted(tokenizer.stops)
            return hf_answer(hf, name, prompt, opt.new_tokens, temperature, seed, stops)
        how = sampler(name, temperature, seed), tokenizer.stops
        with inexact(target, name == INEXACT):
            tokens, s = complete(target, prompt, opt.new_tokens, methods[name][0], *how)
        return dict(tokens=tokens, accepted=s.accepted, nodes=s.nodes, seconds=s.seconds)

    def gaps(answers, prompt, temperature, seed):
        plain = answers["plain"]["tokens"]
        for name, a in answers.items():
            at = report.first_difference(a["tokens"], plain)
            if at is not None and not (name in HF and temperature):    # whose noise is another
                a["gap"] = gap(target, prompt[-room:], plain[:at], sampler("plain", temperature, seed))

    result |= dict(rows=[], categories=[])
    progress = Progress(len(temperatures) * sum(len(q["turns"]) for q in questions))
    for temperature in temperatures:
        records = measure(temperature, questions, names, ask, gaps, tokenizer, done, file, progress)
        rows, categories = report.summary(records, names)
        report.show(rows, categories, trained, opt.profile)
        result["rows"] += rows
        result["categories"] += categories
        if opt.spec_bench:
            decode = lambda tokens: tokenizer.decode([t for t in tokens if t not in tokenizer.stops])
            model = os.path.basename(os.path.normpath(opt.backbone)) if opt.backbone else "nanospec"
            report.write_spec_bench(opt.spec_bench, records, names, decode, model)
    progress.bar.close()
    cut = sum(r["prompt_tokens"] > room for r in records)
    if cut:
        say(f"\nnote: {cut} of {len(records)} prompts had more than {room} tokens; their last {room} were "
            f"used, so that --new-tokens {opt.new_tokens} fit into the context of {target.cfg.block_size}")
    if opt.json:
        report.write(opt.json, result)
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        command(main)
    except SystemExit as e:
        if e.code == 130:
            print("stopped; with --json the answers so far are kept, and --resume goes on from here",
                  file=sys.stderr)
        raise
