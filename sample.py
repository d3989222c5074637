r"""
Decode with a method and watch it work.

    python sample.py --method medusa --compare
    python sample.py --method all --show page

Text goes to stdout as it comes, figures to stderr. What comes out is the target's own text, whatever the
method: --compare proves it on the spot by running plain decoding beside it, and --method all is every drafter
beside it. The one exception must be asked for and is named wherever it is used: --accept typical, Medusa's
lossy acceptance.

    python sample.py --method moa --server http://127.0.0.1:8765

has the drafter here and the target on the other side of python moa.py serve; --method plain asks it for every
token. Tokens written while the server was away are dim.
"""
import codecs
import os
import shlex
import sys
import time
from dataclasses import dataclass, field, replace

from medusa import Typical
from model import arg
from train import METHODS
from tree import complete, generate
from plumbing import page
from plumbing.client import Client, Remote
from plumbing.compare import compare, gap, summary
from plumbing.exact import INEXACT, inexact
from plumbing.drafters import given, make_sampler, own_options, setup
from plumbing.options import DTYPES, OUT, command, fail, parse
from plumbing.picture import draw, follow, watch
from plumbing.text import MARK
from plumbing.wire import Refused, Unreachable

# the kind of text that weights/ was trained on: what it writes can be read (and tau is above other texts')
PROMPT = '''class DraftHead(nn.Module):
    """Guesses the next tokens from one hidden state."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
'''
CHOICE, TREE, PLACES = "how tokens are chosen", "the tree", "where things are"         # groups in -h


@dataclass
class Options:
    """Generate text with a target and a drafter."""
    method: str = arg("medusa", "the drafter; plain = none; all = compare all there are",
                      choices=["plain", *METHODS, "all"])
    prompt: str = arg(PROMPT, "the text to continue; - reads it from stdin")
    max_new_tokens: int = arg(200, "tokens to write at most", low=1)
    temperature: float = arg(0.8, "0 is greedy; 1 samples from the model's own distribution")
    seed: int = arg(0, "same seed, same text, with any method", high=2**64 - 1)
    compare: bool = arg(False, "run plain decoding too: is the text identical, and is the method faster?")
    show: str = arg("none", "tokens = accepted drafts green, the target's own plain (on a terminal); "
                    "tree = one step's token tree; page = a replay of all steps, to be opened in a browser",
                    choices=["none", "tokens", "tree", "page"])
    page: str = arg("", "write the replay to this file (--show page alone: to OUT/page.html)")
    nodes: str = arg("auto", "most nodes of a tree, root included; auto = as many as pay, by the time a "
                     "forward takes here and by what is accepted (best-first trees; others: 8 on a CPU, "
                     "64 on a GPU)")
    backbone: str = arg("", "the target: empty = OUT/backbone; a hub id (gpt2, a Llama), a folder, a GGUF "
                        "file, or smollm2")
    out: str = arg(OUT, "folder of checkpoints, as train.py wrote it; drafters of --backbone gpt2 are in "
                   "OUT/gpt2")

    chat: bool = arg(True, "put the prompt into the model's chat template, if it has one",
                     group="what to decode")

    top_k: int = arg(0, "sample among the k likeliest tokens only (0 = off)", group=CHOICE)
    top_p: float = arg(1.0, "sample among the likeliest tokens that hold this much probability (1 = off)",
                       group=CHOICE)
    accept: str = arg("exact", "typical = Medusa's LOSSY acceptance: faster, but no sample of the model's "
                      "distribution", choices=["exact", "typical"], group=CHOICE)
    epsilon: float = arg(0.09, "typical accepts a token of probability p if p > min(epsilon, delta * "
                         "exp(-entropy))", group=CHOICE)
    delta: float = arg(0.3, "see epsilon; the paper sets it to the square root of epsilon", group=CHOICE)

    exact: bool = arg(True, "decode bit for bit alike in every tree, where that can be had: the first line "
                      "says; off = as fast as can be, and alike but for near ties", group=CHOICE)

    tree: str = arg("best", "best = grown anew each step; sparse = Medusa's, from calibration; chain; or "
                    "widths such as 4,2,1", group=TREE)
    floor: float = arg(0.0, "a node enters a best-first tree only if its draft probability is above this",
                       group=TREE)
    share_noise: bool = arg(True, "let the drafter rank its guesses with the target's own noise (matters "
                            "when temperature > 0)", group=TREE)

    checkpoint: str = arg("", "another training of the drafter: a folder or a .safetensors file",
                          group=PLACES)
    device: str = arg("auto", "cpu, cuda, cuda:1, mps", group=PLACES)
    dtype: str = arg("auto", "of the weights; auto = bfloat16 on a GPU and where the processor multiplies "
                     "it, else float32", choices=DTYPES, group=PLACES)
    threads: int = arg(0, "processor threads; 0 = as many as pay, one where two bring little", high=1024,
                       group=PLACES)
    compile: bool = arg(False, "torch.compile the forwards: faster, after a minute or more of compiling",
                        group=PLACES)
    graphs: bool = arg(False, "on a GPU: replay one captured forward (CUDA graphs); not measured yet",
                       group=PLACES)

    own: dict = field(default_factory=dict)                            # no option: those of single methods

    @property
    def lossy(self):
        """May a text be another than the target's? Greedy typical acceptance is exact."""
        return self.accept == "typical" and self.temperature > 0


def check(opt, server):
    """Ends with a message where options contradict each other."""
    here = opt.compare or opt.page or opt.show in ("tree", "page")
    if server and (here or opt.method not in ("moa", "plain")):
        fail("--server works with --method moa or plain, and without --compare, --show tree and --show page: "
             "the target is not here")
    if (opt.show, opt.method) in (("tree", "plain"), ("tokens", "all")):
        fail(f"--show {opt.show} shows what one drafter does: name its --method"
             + (", or all" if opt.show == "tree" else ""))


def chooser(opt, exact=False):
    """-> the sampler, and the rule by which drafts are accepted (None: exactly), for generate."""
    if opt.accept == "exact" or exact:
        return make_sampler(opt), None
    try:
        typical = Typical(make_sampler(opt), opt.epsilon, opt.delta)
    except ValueError as e:
        fail(str(e))
    return typical.greedy, typical


def warm_up(target, prompt, drafters, opt):
    """--compile: what is decoded first waits for it, so a few tokens by every method that no one sees."""
    print("compiling: a minute or more the first time, less with what torch has kept on disk ...",
          file=sys.stderr)
    for drafter in (None, *drafters.values()):
        sampler, accept = chooser(opt)
        complete(target, prompt, min(64, opt.max_new_tokens), drafter, sampler, (), accept)


def stream(opt, target, tokenizer, prompt, drafter, exact=False, client=None, trees=()):
    """Print the text as it comes, whole characters only -> Run. trees: see follow."""
    colour, dim = opt.show == "tokens" and sys.stdout.isatty(), client and sys.stdout.isatty()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def show(new):
        for i, token in enumerate(new):
            text = utf8.decode(tokenizer.decode_bytes([token]))
            accepted = colour and i < len(new) - 1                     # the last token is the target's own
            style = "\033[2m" if dim and client.offline else "\033[32m" if accepted else ""
            sys.stdout.write(f"{style}{text}\033[0m" if style else text)
        sys.stdout.flush()

    sampler, accept = chooser(opt, exact)
    what = target, prompt, opt.max_new_tokens, drafter, sampler, tokenizer.stops
    run = follow(client.generate(*what) if client else generate(*what, accept), trees, show)
    sys.stdout.write(utf8.decode(b"", final=True) + "\n")
    sys.stdout.flush()
    return run


def read_prompt(opt):
    """Ends with a message where it is no text."""
    try:
        text = sys.stdin.read().lstrip(MARK) if opt.prompt == "-" else opt.prompt
        text.encode()
    except UnicodeError:
        fail("--prompt -: what came from stdin is not UTF-8 text")
    return text


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    opt, own, remote = parse(Options, own_options(METHODS), Remote, argv=argv)
    opt.own = given(own)
    chooser(opt)                                                       # what it refuses, it refuses now
    check(opt, remote.server)
    try:
        client = Client(remote) if remote.server else None
    except ValueError as e:
        fail(str(e))
    target, tokenizer, drafter, _ = setup(opt, METHODS, bool(client))
    drafters, exact = {opt.method: drafter} if drafter else {}, opt.method == "all"
    if exact:                                                          # plain decoding's text is shown
        drafters, drafter, opt = drafter, None, replace(opt, method="plain", compare=True)
    text = read_prompt(opt)
    chat = opt.chat and tokenizer.has_chat
    prompt = tokenizer.chat([text]) if chat else tokenizer.start + tokenizer.encode(text)
    try:
        complete(target, prompt, 0)                                    # runs nothing: does the prompt fit?
    except ValueError as e:
        fail(str(e))
    if opt.compile and not client:                                     # a client has not the whole target
        warm_up(target, prompt, drafters, opt)
    replay = opt.page or opt.show == "page"
    kept = {name: watch(d) for name, d in drafters.items()} if replay or opt.show == "tree" else {}

    if not client:                                                     # the server knows how it decodes
        print(target.told, file=sys.stderr)
    sys.stdout.write(text + "\n\n" if chat else text)
    sys.stdout.flush()
    try:
        run = stream(opt, target, tokenizer, prompt, drafter, exact, client, kept.get(opt.method, ()))
    except (ValueError, Refused, Unreachable) as e:
        print()
        fail(str(e))
    lossy = "; LOSSY: typical acceptance" + (", which at temperature 0 is exact" if not opt.lossy else "")
    note = lossy if opt.accept == "typical" and not exact else ""
    print("\n" + summary(opt.method, run, target.cfg.block_size, note), file=sys.stderr)
    runs = {opt.method: run}

    def decode(name):
        d = drafters.get(name)
        sampler, accept = chooser(opt, exact=not d)
        steps = generate(target, prompt, opt.max_new_tokens, d, sampler, tokenizer.stops, accept)
        with inexact(target, name == INEXACT):
            return follow(steps, kept.get(name, ()))

    def explain(at):                                                   # in case that a text differs there
        return gap(target, prompt, run.tokens[:at], make_sampler(opt))

    if opt.compare and drafters:
        names = [*drafters, *([INEXACT] if target.exact else [])]      # what exactness costs plain decoding
        runs = compare(decode, names, runs, explain, opt.lossy)
    room = min(opt.max_new_tokens, target.cfg.block_size - len(prompt))
    deepest = lambda n: min(room - n - 1, target.reach(len(prompt) + n - 1))           # as generate has it
    for name in drafters if opt.show == "tree" else ():
        label = name + " (LOSSY: typical acceptance)" * opt.lossy
        print("\n" + draw(label, tokenizer, prompt, runs[name], deepest, sys.stderr), file=sys.stderr)
    if replay:
        path = opt.page or os.path.join(opt.out, "page.html")
        weight, words = target.wte.weight, shlex.join(["python", "sample.py", *argv])
        made = f"{words} ({time.strftime('%Y-%m-%d')}, {weight.device}, {str(weight.dtype)[6:]})"
        raced = {name: run for name, run in runs.items() if name == "plain" or name in drafters}
        page.write(path, page.page(raced, tokenizer, text, deepest, made, drafters if opt.lossy else ()))
        print(f"\nthe replay is in {path}: open it in a browser", file=sys.stderr)


if __name__ == "__main__":
    command(main)
