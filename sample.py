r"""
Decode with a method and watch it work.

    python sample.py --method medusa --prompt "def main():" --compare
    python sample.py --method all --show tree

Text goes to stdout as it comes, figures to stderr. What comes out is the target's own text, whatever the method: --compare
proves it on the spot by running plain decoding beside it, and --method all is every drafter beside it. The one exception must
be asked for and is named wherever it is used: --accept typical, Medusa's lossy acceptance.

    python sample.py --method moa --server http://127.0.0.1:8765

has the drafter here and the target on the other side of python moa.py serve; --method plain asks it for every token.
Tokens written while the server was away are dim.
"""
import codecs
import math
import statistics
import sys
from dataclasses import dataclass, field, replace

from medusa import Typical
from model import arg
from train import METHODS
from tree import complete, generate
from plumbing.client import Client, Remote
from plumbing.drafters import given, make_sampler, own_options, setup
from plumbing.options import DTYPES, OUT, command, fail, parse
from plumbing.picture import draw, watch
from plumbing.wire import Refused, Unreachable

PROMPT = 'import os\nimport sys\n\n\ndef read_lines(path):\n    """Return the lines of a file as a list of strings."""\n'


@dataclass
class Options:
    """Generate text with a target and a drafter."""
    method: str = arg("medusa", "the drafter; plain = none; all = compare all there are", choices=["plain", *METHODS, "all"])
    prompt: str = arg(PROMPT, "the text to continue; - reads it from stdin")
    max_new_tokens: int = arg(200, "tokens to write at most", low=1)
    temperature: float = arg(0.0, "0 is greedy; 1 samples from the model's own distribution")
    seed: int = arg(0, "same seed, same text, with any method", high=2**64 - 1)
    compare: bool = arg(False, "run plain decoding too: is the text identical, and how much faster is the method?")
    show: str = arg("none", "tokens = accepted drafts green, the target's own plain (on a terminal); tree = a step's token tree",
                    choices=["none", "tokens", "tree"])
    nodes: str = arg("auto", "most nodes of a tree, root included; auto = as many as pay, by the time a forward takes here and "
                     "by what is accepted (best-first trees; others: 8 on a CPU, 64 on a GPU)")
    backbone: str = arg("", "the target: empty = OUT/backbone; a hub id (gpt2, a Llama), a folder, a GGUF file, or smollm2")
    out: str = arg(OUT, "folder of checkpoints, as train.py wrote it; drafters of --backbone gpt2 are in OUT/gpt2")

    chat: bool = arg(True, "put the prompt into the model's chat template, if it has one", group="what to decode")

    top_k: int = arg(0, "sample among the k likeliest tokens only (0 = off)", group="how tokens are chosen")
    top_p: float = arg(1.0, "sample among the likeliest tokens that hold this much probability (1 = off)", group="how tokens are chosen")
    accept: str = arg("exact", "typical = Medusa's LOSSY acceptance: faster, but no sample of the model's distribution",
                      choices=["exact", "typical"], group="how tokens are chosen")
    epsilon: float = arg(0.09, "typical accepts a token of probability p if p > min(epsilon, delta * exp(-entropy))",
                         group="how tokens are chosen")
    delta: float = arg(0.3, "see epsilon; the paper sets it to the square root of epsilon", group="how tokens are chosen")

    tree: str = arg("best", "best = grown anew each step; sparse = Medusa's, from calibration; chain; or widths such as 4,2,1",
                    group="the tree")
    floor: float = arg(0.0, "a node enters a best-first tree only if its draft probability is above this", group="the tree")
    share_noise: bool = arg(True, "let the drafter rank its guesses with the target's own noise (matters when temperature > 0)",
                            group="the tree")

    checkpoint: str = arg("", "another training of the drafter: a folder or a .safetensors file", group="where things are")
    device: str = arg("auto", "cpu, cuda, cuda:1, mps", group="where things are")
    dtype: str = arg("auto", "of the weights; auto = float32 on a CPU, bfloat16 on a GPU", choices=DTYPES, group="where things are")
    compile: bool = arg(False, "torch.compile the forwards: faster, after a minute or more of compiling", group="where things are")

    own: dict = field(default_factory=dict)                            # no option: those of single methods, by name


def chooser(opt, exact=False):
    """-> the sampler, and the rule by which drafts are accepted (None: the exact one), as generate takes them."""
    if opt.accept == "exact" or exact:
        return make_sampler(opt), None
    try:
        typical = Typical(make_sampler(opt), opt.epsilon, opt.delta)
    except ValueError as e:
        fail(str(e))
    return typical.greedy, typical


def warm_up(target, prompt, drafters, opt):
    """--compile: what is decoded first waits for it, so a few tokens by every method that no one sees."""
    print("compiling: a minute or more the first time, less with what torch has kept on disk ...", file=sys.stderr)
    for drafter in (None, *drafters.values()) if 0 < len(prompt) < target.cfg.block_size else ():
        sampler, verify = chooser(opt)
        complete(target, prompt, min(64, opt.max_new_tokens), drafter, sampler, (), verify)


def stream(opt, target, tokenizer, prompt, drafter, exact=False, client=None):
    """Print the text as it comes, whole characters only. Returns its tokens and Stats."""
    colour, dim = opt.show == "tokens" and sys.stdout.isatty(), client and sys.stdout.isatty()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    sampler, verify = chooser(opt, exact)
    decode = client.generate if client else generate
    how = (sampler, tokenizer.stops) if client else (sampler, tokenizer.stops, verify)
    steps, tokens = decode(target, prompt, opt.max_new_tokens, drafter, *how), []
    try:
        while True:
            out = next(steps)
            tokens += out
            for i, token in enumerate(out):
                text = utf8.decode(tokenizer.decode_bytes([token]))
                accepted = colour and i < len(out) - 1                 # the last token of a step is the target's own
                style = "\033[2m" if dim and client.alone else "\033[32m" if accepted else ""
                sys.stdout.write(f"{style}{text}\033[0m" if style else text)
            sys.stdout.flush()
    except StopIteration as stop:
        sys.stdout.write(utf8.decode(b"", final=True) + "\n")
        sys.stdout.flush()
        return tokens, stop.value


def histogram(accepted):
    """Tokens per target forward -> a line such as '1 x34  2 x21  3 x8'."""
    return "  ".join(f"{n} x{accepted.count(n)}" for n in range(1, max(accepted) + 1))


def compare(target, prompt, drafters, runs, opt, tokenizer, repeats=3):
    """
    Plain (exact) decoding and drafters (by name) in turn, and a table: tau, target forwards, medians of tokens/s and of its
    ratio to plain decoding's in the same round, and whether the text is plain decoding's. runs: tokens and Stats of what was
    decoded already, its warm-up. Returns those of all.
    """
    def once(name):
        d = drafters.get(name)
        sampler, verify = chooser(opt, exact=not d)
        return complete(target, prompt, opt.max_new_tokens, d, sampler, tokenizer.stops, verify)
    runs = {name: runs.get(name) or once(name) for name in ("plain", *drafters)}
    rounds = [[once(name)[1].tokens_per_second for name in runs] for _ in range(repeats)]
    plain = runs["plain"][0]
    print(f"\n{'method':<15}  tau  target forwards  tokens/s  speed-up   (medians of {repeats} rounds, in turn)", file=sys.stderr)
    for (name, (tokens, stats)), *speeds in zip(runs.items(), *rounds):
        ratio = statistics.median(v / r[0] if r[0] else math.nan for v, r in zip(speeds, rounds))      # 0: one token has no speed
        at = next((i for i, (a, b) in enumerate(zip(plain, tokens)) if a != b), min(len(plain), len(tokens)))
        same = "identical" if plain == tokens else f"DIFFERENT from token {at} on: {plain[at:at + 1]} against {tokens[at:at + 1]}"
        if opt.accept == "typical" and opt.temperature:
            same = "lossy: differs by design"
        print(f"{name:<15} {stats.tau:4.2f} {len(stats.accepted):16d} {statistics.median(speeds):9.0f} {ratio:9.2f}"
              + (f"   text {same}" if name in drafters else ""), file=sys.stderr)
    return runs


def main(argv=None):
    opt, own, remote = parse(Options, own_options(METHODS), Remote, argv=argv)
    opt.own = given(own)
    chooser(opt)                                                       # what it refuses, it refuses now
    if remote.server and (opt.compare or opt.show == "tree" or opt.method not in ("moa", "plain")):
        fail("--server works with --method moa or plain, and without --compare and --show tree: the target is not here")
    if (opt.show, opt.method) in (("tree", "plain"), ("tokens", "all")):
        fail(f"--show {opt.show} shows what one drafter does: name its --method" + (", or all" if opt.show == "tree" else ""))
    try:
        client = Client(remote) if remote.server else None
    except ValueError as e:
        fail(str(e))
    target, tokenizer, drafter, _ = setup(opt, METHODS, bool(client))
    drafters, exact = {opt.method: drafter} if drafter else {}, opt.method == "all"
    if opt.method == "all":                                            # the text is plain decoding's; the others' are compared with it
        drafters, drafter, opt = drafter, None, replace(opt, method="plain", compare=True)
    try:
        text = sys.stdin.read() if opt.prompt == "-" else opt.prompt
        text.encode()
    except UnicodeError:
        fail("--prompt -: what came from stdin is not UTF-8 text")
    chat = opt.chat and tokenizer.has_chat
    prompt = tokenizer.chat([text]) if chat else tokenizer.start + tokenizer.encode(text)
    if opt.compile and not client:                                     # a client has not the whole target
        warm_up(target, prompt, drafters, opt)
    trees = {name: watch(d) for name, d in drafters.items()} if opt.show == "tree" else {}         # none of the warm-up's
    sys.stdout.write(text + "\n\n" if chat else text)
    sys.stdout.flush()
    try:
        tokens, stats = stream(opt, target, tokenizer, prompt, drafter, exact, client)
    except (ValueError, Refused, Unreachable) as e:
        print()
        fail(str(e))
    why = {"eos": "end of text", "budget": "--max-new-tokens", "context": f"the context of {target.cfg.block_size} tokens is full"}
    print(f"\n{opt.method}: {len(tokens)} tokens in {len(stats.accepted)} target forwards, tau {stats.tau:.2f}, "
          f"{stats.tokens_per_second:.0f} tokens/s, stopped by {why[stats.stop]}"
          + ("; LOSSY: typical acceptance" + (", which at temperature 0 is exact" if not opt.temperature else "")
             if opt.accept == "typical" and not exact else ""), file=sys.stderr)
    print(f"tokens per forward: {histogram(stats.accepted)}", file=sys.stderr)
    if client:
        print(f"server: {stats.calls} calls, {sum(stats.accepted) / max(1, stats.calls):.2f} tokens each, {stats.up:,} bytes up and "
              f"{stats.down:,} down, {stats.waiting:.2f} s waiting; {len(stats.offline)} tokens written without it", file=sys.stderr)
    runs = {opt.method: (tokens, stats)}
    if opt.compare and drafters:
        runs = compare(target, prompt, drafters, runs, opt, tokenizer)
    room = min(opt.max_new_tokens, target.cfg.block_size - len(prompt))
    for name, kept in trees.items():
        label = name + " (LOSSY: typical acceptance)" * (opt.accept == "typical" and opt.temperature > 0)
        print("\n" + draw(label, tokenizer, prompt, *runs[name], kept, room, sys.stderr), file=sys.stderr)


if __name__ == "__main__":
    command(main)
