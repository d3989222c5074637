r"""
Answers on disk, and from answers to figures: tables, intervals, charts, a page. Measures nothing itself.

    python bench/report.py out/bench.json > page.md        # what run.py --json wrote, as Markdown

A record is one prompt with the answers of all methods: {temperature, index, turn, question, category,
prompt_tokens, answers: {method: {tokens, accepted, nodes, seconds}}}; accepted[0] is the prompt's forward, as
in tree.Stats. One that differs from plain decoding's has a gap too, see plumbing/compare.py.
"""
import json
import os
import random
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from plumbing import checkpoint
from plumbing.checkpoint import DAMAGED, out_folder
from plumbing.exact import INEXACT
from plumbing.options import command, fail, say
from plumbing.log import read_log
from plumbing.text import read_lines, read_text


# --------------------------------------------------------------------------------------------------
# Answers on disk

def whole(r, names):
    """Has this record a whole, non-empty answer of every method? If not, the prompt is asked again."""
    try:
        answers = [r["answers"][n] for n in names]
        return {"temperature", "index", "turn", "question", "category", "prompt_tokens"} <= r.keys() and all(
            a["tokens"] and sum(a["accepted"]) == len(a["tokens"]) and {"seconds", "nodes"} <= a.keys()
            for a in answers)
    except (AttributeError, KeyError, TypeError):
        return False


def read_answers(path, header, names):
    """What an interrupted run left -> {(temperature, index, turn): record}. A torn line is no answer."""
    try:
        if not os.path.exists(path):
            return {}
        first, *lines = read_lines(path, errors="replace")
        first = dict(json.loads(first))
    except DAMAGED as e:
        fail(f"{path} is not a file of answers ({e}): start without --resume")
    differs = checkpoint.differences(first, header)
    if differs:
        fail(f"{path} was started with another {differs}: use the same options, prompts and checkpoints, "
             "or leave --resume out")
    done = {}
    for line in lines:
        try:
            r = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if whole(r, names):
            done[r["temperature"], r["index"], r["turn"]] = r
    return done


def open_answers(path, header, done):
    """A file to append answers to; header and those done already are in it, and nothing torn."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_lines(path, (header, *done.values()))
        return open(path, "a", encoding="utf-8")
    except OSError as e:
        fail(f"cannot write {path}: {e}")


def write_lines(path, rows):
    """Rows as JSON lines, the whole file or none of it. Raises OSError."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    os.replace(path + ".tmp", path)


def write_spec_bench(folder, records, names, decode, model):
    """
    The answers of one temperature as Spec-Bench's model_answer files, FOLDER/<method>-temperature-<T>.jsonl,
    which its speed.py and equal.py read (github.com/hemingkx/Spec-Bench): wall_time has the prompt in it,
    accept_lengths are the target's forwards after the prompt's, so that their mean is tau.

    decode(tokens) -> text; model: its name, for model_id.
    """
    for name in names:
        lines = {}
        for r in records:
            a = r["answers"][name]
            line = lines.setdefault(r["index"], dict(
                question_id=int(r["question"]) if r["question"].isdecimal() else r["question"],
                category=r["category"], answer_id=f"{r['question']}-{name}", model_id=f"{model}-{name}",
                choices=[dict(index=0, turns=[], decoding_steps=[], new_tokens=[], wall_time=[],
                              accept_lengths=[])],
                tstamp=time.time()))
            choice = line["choices"][0]
            choice["turns"].append(decode(a["tokens"]).strip())
            choice["decoding_steps"].append(len(a["accepted"]) - 1)
            choice["new_tokens"].append(len(a["tokens"]))
            choice["wall_time"].append(sum(a["seconds"].values()))
            choice["accept_lengths"] += a["accepted"][1:]
        file = f"{name.replace(':', '-')}-temperature-{records[0]['temperature']:g}.jsonl"
        try:
            write_lines(os.path.join(folder, file), lines.values())
        except OSError as e:
            fail(f"--spec-bench {folder}: {e}")


# --------------------------------------------------------------------------------------------------
# Figures

def loops(tokens):
    """Does the second half of a text repeat with a period of at most a quarter of the text?"""
    half = tokens[len(tokens) // 2:]
    return any(half[p:] == half[:-p] for p in range(1, len(tokens) // 4 + 1))


def first_difference(a, b):
    """Where two texts differ first, None if nowhere. A text that is missing or empty equals none."""
    if not a or not b:
        return 0
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def interval(values, resamples=1000):
    """95 % bootstrap interval of the median; None for fewer than two values."""
    if len(values) < 2:
        return None
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return [medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]]


def speed(a):
    """Tokens per second after the prompt; None for an answer that the prompt's forward ended."""
    work = sum(a["seconds"].values()) - a["seconds"]["prompt"]
    return sum(a["accepted"][1:]) / work if len(a["accepted"]) > 1 else None


def differences(records, name):
    """
    Answers of a method that are not plain decoding's: question, turn, first other token, and how far the best
    scores lay apart there, in words (or None). Those that rounding does not explain come first.
    """
    out = []
    for r in records:
        a = r["answers"][name]
        at = first_difference(a["tokens"], r["answers"]["plain"]["tokens"])
        if at is not None:
            out.append(dict(question=r["question"], turn=r["turn"], token=at, gap=a.get("gap")))
    return sorted(out, key=lambda d: "near tie" in (d["gap"] or ""))


def row(records, name):
    """The figures of one method over records of one temperature."""
    answers = [r["answers"][name] for r in records]
    speeds = [speed(a) for a in answers]
    plain = [speed(r["answers"]["plain"]) for r in records]
    ratios = [mine / other for mine, other in zip(speeds, plain) if mine and other]
    accepted = [n for a in answers for n in a["accepted"][1:]]
    steps, hf, temperature = max(1, len(accepted)), name.startswith("hf"), records[0]["temperature"]
    ms = lambda part: 1000 * sum(a["seconds"].get(part, 0.0) for a in answers) / steps
    differs = differences(records, name)
    own_noise = hf and temperature > 0                                 # another sample, which is no fault
    return dict(
        method=name, temperature=temperature, prompts=len(records),
        tau=sum(accepted) / steps if accepted else None,
        nodes=sum(a["nodes"] for a in answers) / steps,
        speed=statistics.median([s for s in speeds if s] or [0.0]),
        speedup=statistics.median(ratios) if ratios else None, interval=interval(ratios),
        draft=None if hf else ms("draft"), verify=None if hf else ms("verify"),
        choice=ms("choice"), rest=ms("rest"),
        prompt=1000 * statistics.median(a["seconds"]["prompt"] for a in answers),
        same=None if own_noise else not differs, differs=[] if own_noise else differs,
        looping=sum(loops(r["answers"]["plain"]["tokens"]) for r in records),
        accepted={n: accepted.count(n) for n in sorted(set(accepted))},
        positions=[sum(n > k for n in accepted) / steps for k in range(1, max(accepted, default=1))])


def of_category(records, category):
    return [r for r in records if r["category"] == category]


def summary(records, names):
    """Records of one temperature -> rows, one a method, and rows of each category and method."""
    categories = list(dict.fromkeys(r["category"] for r in records))
    parts = [dict(category=c, **row(of_category(records, c), n)) for c in categories for n in names]
    return [row(records, n) for n in names], parts


# --------------------------------------------------------------------------------------------------
# Tables

WIDTHS = {"method": -17, "trained": 8, "on tokens": 9, "tau": 5, "nodes": 5, "tokens/s": 8, "speed-up": 8,
          "95 %": 9, "draft": 7, "verify": 7, "choice": 7, "rest": 7, "other": 6, "limit": 6, "prompt": 7,
          "same": 0}                                                   # of the columns; below 0: to the left
PROFILE = ("choice", "rest", "other", "limit", "prompt")               # columns of --profile
STEP = "draft, verify: milliseconds a step"
PARTS = ("draft, verify, choice, rest: milliseconds a step; other: share of choice and rest; limit: "
         "tau c(1) / (c(n) + draft), the speed-up without them; prompt: median of its forward")


def text(value, form="{:.2f}"):
    return "-" if value is None else form.format(value)


def million(n):
    return "-" if n is None else f"{n / 1e6:.2f}M"


def same(r):
    """Were all texts plain decoding's? If not: where the first was not, and why."""
    if r["same"] is None:
        return "-"                                                     # another sample by design
    if r["same"]:
        return "yes"
    first = r["differs"][0]
    out = f"NO, {len(r['differs'])}: question {first['question']} from token {first['token']} on"
    return f"{out}; {first['gap']}" if first.get("gap") else out


def cells(r, plain, trained):
    """A row of figures -> {column: text}. plain: plain decoding's row."""
    t = trained.get(r["method"], {})
    out = {"method": r["method"], "trained": million(t.get("parameters")),
           "on tokens": million(t.get("training_tokens")), "tau": text(r["tau"]),
           "nodes": text(r["nodes"], "{:.1f}"), "tokens/s": text(r["speed"], "{:.0f}"),
           "speed-up": text(r["speedup"]), "95 %": text(r["interval"], "{0[0]:.2f}-{0[1]:.2f}")}
    out |= {column: text(r[column]) for column in ("draft", "verify", "choice", "rest", "prompt")}
    other = r["choice"] + r["rest"]
    step = other + (r["draft"] or 0.0) + (r["verify"] or 0.0)
    limit = r["tau"] * plain["verify"] / (r["verify"] + r["draft"]) if r["verify"] else None
    share = text(other / step if step else None, "{:.1%}")
    return out | {"other": share, "limit": text(limit), "same": same(r)}


def table(rows, trained, profile=False):
    """Rows of one temperature -> the names of the columns, and a list of cells for each row."""
    columns = [c for c in WIDTHS if profile or c not in PROFILE]
    every = [cells(r, rows[0], trained) for r in rows]
    return columns, [[c[column] for column in columns] for c in every]


def categories_table(rows, by_category):
    """
    The same of the categories, speed-up / tau of every method but plain decoding; None where there is
    only one.
    """
    names = [r["method"] for r in rows if r["method"] != "plain"]
    both = {(r["category"], r["method"]): f"{text(r['speedup'])} / {text(r['tau'])}" for r in by_category}
    categories = list(dict.fromkeys(category for category, _ in both))
    if len(categories) < 2:
        return None
    return ["speed-up / tau", *names], [[c, *(both[c, n] for n in names)] for c in categories]


def show(rows, by_category, trained, profile):
    """Print one temperature's tables: overall, then by category if there are several."""
    def line(texts, widths):
        say(" ".join(f"{t:<{-w}s}" if w <= 0 else f"{t:>{w}s}" for t, w in zip(texts, widths)).rstrip())

    say(f"\nT = {rows[0]['temperature']:g}; "
        f"{rows[0]['looping']} of {rows[0]['prompts']} plain texts end in a loop")
    columns, body = table(rows, trained, profile)
    for texts in (columns, *body):
        line(texts, [WIDTHS[c] for c in columns])
    say(PARTS if profile else STEP)
    parts = categories_table(rows, by_category)
    if parts:
        say("")
        for texts in (parts[0], *parts[1]):
            line(texts, [-18] + [17] * len(texts))


# --------------------------------------------------------------------------------------------------
# A file, charts, a page

def write(path, result):
    """The result as JSON, whole or not at all, and three charts beside it if matplotlib is there."""
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as f:
            json.dump(result, f, indent=1)
        os.replace(path + ".tmp", path)
    except OSError as e:
        fail(f"--json {path}: {e}")
    try:
        import matplotlib
    except ImportError:
        say("no charts: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    temperatures = list(dict.fromkeys(r["temperature"] for r in result["rows"]))
    for what, draw in (("speedup", draw_speedup), ("accepted", draw_accepted), ("positions", draw_positions)):
        fig, axes = plt.subplots(1, len(temperatures), figsize=(6 * len(temperatures), 4), squeeze=False,
                                 layout="constrained")
        for ax, temperature in zip(axes[0], temperatures):
            rows = [r for r in result["rows"] if r["temperature"] == temperature and r["speedup"] is not None]
            draw(ax, rows)
            ax.set(title=f"T = {temperature:g}", ylim=(0, None))
        name = f"{os.path.splitext(path)[0]}-{what}.png"
        fig.savefig(name, dpi=120)
        plt.close(fig)
        say(f"chart: {name}")


def draw_speedup(ax, rows):
    """A bar a method, with the interval."""
    names, middle = [r["method"] for r in rows], [r["speedup"] for r in rows]
    ends = [r["interval"] or [r["speedup"]] * 2 for r in rows]
    below = [max(0.0, m - low) for m, (low, _) in zip(middle, ends)]
    above = [max(0.0, high - m) for m, (_, high) in zip(middle, ends)]
    ax.bar(names, middle, yerr=[below, above], capsize=3)
    ax.axhline(1, color="black", linewidth=0.8)
    for label in ax.get_xticklabels():
        label.set(rotation=30, ha="right", rotation_mode="anchor")
    ax.set_ylabel("speed-up over plain decoding")


def draw_accepted(ax, rows):
    """How many tokens a forward brought."""
    for r in rows:
        if r["method"] not in ("plain", INEXACT, "hf"):
            steps = sum(r["accepted"].values())
            shares = [n / steps for n in r["accepted"].values()]
            ax.plot([int(n) for n in r["accepted"]], shares, marker="o", label=r["method"])
    finish(ax, "tokens a target forward", "share of the forwards")


def draw_positions(ax, rows):
    """How often each draft position was accepted."""
    for r in rows:
        if r["method"] not in ("plain", INEXACT, "hf"):
            ax.plot(range(1, len(r["positions"]) + 1), r["positions"], marker="o", label=r["method"])
    finish(ax, "draft position", "share of the forwards that accept it")


def finish(ax, x, y):
    ax.set(xlabel=x, ylabel=y)
    ax.xaxis.get_major_locator().set_params(integer=True)
    if ax.lines:
        ax.legend()


def markdown(columns, body):
    """A table as Markdown, the first column to the left, the others to the right."""
    rule = ["---"] + ["--:"] * (len(columns) - 1)
    return "\n".join("| " + " | ".join(texts) + " |" for texts in (columns, rule, *body)) + "\n"


def trainings(out):
    """The trainings in a folder of checkpoints as a table: what was trained, and held-out loss on the way."""
    kinds, body = os.listdir(out) if os.path.isdir(out) else [], []
    for kind in sorted(kinds, key=lambda kind: (kind != "backbone", kind)):
        log = read_log(os.path.join(out, kind, "log.jsonl"))
        if log:
            end = log[-1]
            losses = " ".join(f"{r['val_loss']:.3f}" for r in log if "val_loss" in r)
            top1 = " ".join(f"{share:.2f}" for share in end.get("top1", ())) or "-"
            body.append([kind, f"{end['step']:,}", million(end.get("tokens")), f"{end['seconds'] / 60:.1f}",
                         losses, top1])
    return (["training", "steps", "tokens", "minutes", "held-out loss, in time", "top-1 by position"], body)


def page(result, folder):
    """
    What run.py --json wrote into folder -> a page of Markdown: machine, versions, tables, trainings,
    charts.
    """
    o, machine = result["options"], result["machine"]
    picture = lambda path: f"![{os.path.basename(path)}]({os.path.relpath(path, folder or '.')})\n"
    prompts = f"held-out prompts of {o['prompt_tokens']} tokens"
    if o["questions"]:
        prompts = f"turns of questions in {o['questions']}"
    count = result["rows"][0]["prompts"]
    out = [f"# Speculative decoding on {machine}, {result['date']}\n",
           f"- {result['device']}, {result['threads']} threads, {result['dtype'].removeprefix('torch.')}, "
           f"{result.get('decoding', 'decoding as it was')}",
           "- " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()),
           f"- `{result['command']}`",
           f"- {count} {prompts}, {o['new_tokens']} tokens written after each, one text at a time\n",
           "tau: new tokens per forward of the target after the prompt's. speed-up: tokens/s over plain "
           "decoding's on the same prompt, the median, with its 95 % interval. " + STEP + ". same: every "
           "text is plain decoding's. hf is transformers' generate.\n"]
    for temperature in dict.fromkeys(r["temperature"] for r in result["rows"]):
        rows = [r for r in result["rows"] if r["temperature"] == temperature]
        out += [f"## T = {temperature:g}\n", markdown(*table(rows, result["trained"]))]
        out.append(f"{rows[0]['looping']} of {count} plain texts end in a loop.\n")
        parts = categories_table(rows, [r for r in result["categories"] if r["temperature"] == temperature])
        out += [markdown(*parts)] if parts else []
    out += [picture(path) for path in pictures(o, folder)]
    columns, body = trainings(out_folder(o["out"], o["backbone"]))
    out += ["## Trainings\n", markdown(columns, body)] if body else []
    return "\n".join(out)


def pictures(options, folder):
    """The charts that are there: of the run, and of the trainings."""
    base = os.path.join(folder, os.path.basename(os.path.splitext(options["json"])[0]))
    paths = [f"{base}-{what}.png" for what in ("speedup", "accepted", "positions")]
    paths.append(os.path.join(out_folder(options["out"], options["backbone"]), "training.png"))
    return [path for path in paths if os.path.exists(path)]


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv in (["-h"], ["--help"]):
        return print(__doc__.strip())
    if len(argv) != 1 or argv[0].startswith("-"):
        fail("one file, which run.py --json wrote: python bench/report.py out/bench.json > page.md")
    try:
        result = json.loads(read_text(argv[0]))
        print(page(result, os.path.dirname(argv[0])), end="")
    except DAMAGED as e:
        fail(f"{argv[0]} is no result of run.py --json ({type(e).__name__}: {e})")


if __name__ == "__main__":
    command(main)
