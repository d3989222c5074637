r"""
Answers on disk, and from answers to figures: the table, its intervals, charts. Used by run.py; measures nothing itself.

A record is one prompt with the answers of all methods: {temperature, index, turn, question, category, prompt_tokens,
answers: {method: {tokens, accepted, nodes, seconds}}}; accepted[0] is the prompt's forward, as in tree.Stats.
"""
import json
import os
import random
import statistics

from plumbing.checkpoint import DAMAGED
from plumbing.options import fail
from plumbing.text import read_text


# --------------------------------------------------------------------------------------------------
# Answers on disk

def whole(r, names):
    """Has this record a whole, non-empty answer of every method? If not, the prompt is asked again."""
    try:
        answers = [r["answers"][n] for n in names]
        return {"temperature", "index", "turn", "question", "category", "prompt_tokens"} <= r.keys() and all(
            a["tokens"] and sum(a["accepted"]) == len(a["tokens"]) and {"seconds", "nodes"} <= a.keys() for a in answers)
    except (AttributeError, KeyError, TypeError):
        return False


def read_answers(path, header, names):
    """What an interrupted run left -> {(temperature, index, turn): record}. A torn line is no answer."""
    try:
        if not os.path.exists(path):
            return {}
        first, *lines = read_text(path, errors="replace").split("\n")
        first = dict(json.loads(first))
    except DAMAGED as e:
        fail(f"{path} is not a file of answers ({e}): start without --resume")
    wrong = sorted(k for k in header if first.get(k) != header[k])
    if wrong:
        fail(f"{path} was started with another {', '.join(wrong)}: use the same options and checkpoints, or leave --resume out")
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
        with open(path + ".tmp", "w", encoding="utf-8") as f:
            f.writelines(json.dumps(r) + "\n" for r in (header, *done.values()))
        os.replace(path + ".tmp", path)
        return open(path, "a", encoding="utf-8")
    except OSError as e:
        fail(f"cannot write {path}: {e}")


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
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None if len(a) == len(b) else min(len(a), len(b)))


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


def row(records, name):
    """The figures of one method over records of one temperature."""
    answers = [r["answers"][name] for r in records]
    paired = [(speed(a), speed(r["answers"]["plain"])) for r, a in zip(records, answers)]
    ratios = [mine / plain for mine, plain in paired if mine and plain]
    accepted = [n for a in answers for n in a["accepted"][1:]]
    steps, hf = max(1, len(accepted)), name.startswith("hf")
    ms = {k: 1000 * sum(a["seconds"].get(k, 0.0) for a in answers) / steps for k in ("draft", "verify", "choice", "rest")}
    differs = [dict(question=r["question"], turn=r["turn"], token=at) for r, a in zip(records, answers)
               if (at := first_difference(a["tokens"], r["answers"]["plain"]["tokens"])) is not None]
    own_noise = hf and records[0]["temperature"] > 0                   # transformers draws its own: another sample, no fault
    return dict(
        method=name, temperature=records[0]["temperature"], prompts=len(records),
        tau=sum(accepted) / steps if accepted else None, nodes=sum(a["nodes"] for a in answers) / steps,
        speed=statistics.median([s for s, _ in paired if s] or [0.0]), speedup=statistics.median(ratios) if ratios else None,
        interval=interval(ratios), draft=None if hf else ms["draft"], verify=None if hf else ms["verify"],
        choice=ms["choice"], rest=ms["rest"],
        prompt=1000 * statistics.median(a["seconds"]["prompt"] for a in answers),
        same=None if own_noise else not differs, differs=[] if own_noise else differs,
        looping=sum(loops(r["answers"]["plain"]["tokens"]) for r in records),
        accepted={n: accepted.count(n) for n in sorted(set(accepted))},
        positions=[sum(n > k for n in accepted) / steps for k in range(1, max(accepted, default=1))])


def summary(records, names):
    """Records of one temperature -> rows, one a method, and rows of each category and method."""
    categories = list(dict.fromkeys(r["category"] for r in records))
    return [row(records, n) for n in names], [
        dict(category=c, **row([r for r in records if r["category"] == c], n)) for c in categories for n in names]


# --------------------------------------------------------------------------------------------------
# Table, file and charts

def text(value, form):
    return "-" if value is None else form.format(value)


def million(n):
    return "-" if n is None else f"{n / 1e6:.2f}M"


def show(rows, by_category, trained, profile):
    """Print one temperature's tables: overall, then by category if there are several."""
    print(f"\nT = {rows[0]['temperature']:g}; {rows[0]['looping']} of {rows[0]['prompts']} plain texts end in a loop")
    more = f"{'choice':>7s} {'rest':>7s} {'other':>6s} {'limit':>6s} {'prompt':>7s} " if profile else ""
    print(f"{'method':17s} {'trained':>8s} {'on tokens':>9s} {'tau':>5s} {'nodes':>5s} {'tokens/s':>8s} {'speed-up':>8s} {'95 %':>9s} "
          f"{'draft':>7s} {'verify':>7s} {more} same")
    for r in rows:
        t = trained.get(r["method"], {})
        same = {None: "-", True: "yes"}.get(r["same"]) or (
            f"NO, {len(r['differs'])}: question {r['differs'][0]['question']} from token {r['differs'][0]['token']} on")
        more = ""
        if profile:
            other, step = r["choice"] + r["rest"], sum(r[k] or 0.0 for k in ("draft", "verify", "choice", "rest"))
            limit = r["tau"] * rows[0]["verify"] / (r["verify"] + r["draft"]) if r["verify"] else None
            more = (f"{r['choice']:7.2f} {r['rest']:7.2f} {other / step:6.1%} {text(limit, '{:.2f}'):>6s} {r['prompt']:7.2f} ")
        print(f"{r['method']:17s} {million(t.get('parameters')):>8s} {million(t.get('training_tokens')):>9s} {text(r['tau'], '{:.2f}'):>5s} "
              f"{r['nodes']:5.1f} {r['speed']:8.0f} {text(r['speedup'], '{:.2f}'):>8s} "
              f"{text(r['interval'], '{0[0]:.2f}-{0[1]:.2f}'):>9s} {text(r['draft'], '{:.2f}'):>7s} {text(r['verify'], '{:.2f}'):>7s} {more} {same}",
              flush=True)
    print("draft, verify" + (", choice, rest: milliseconds a step; other: share of choice and rest; limit: tau c(1) / (c(n) + draft), "
          "the speed-up without them; prompt: median of its forward" if profile else ": milliseconds a step"))
    categories = list(dict.fromkeys(r["category"] for r in by_category))
    if len(categories) > 1:
        names = [r["method"] for r in rows if r["method"] != "plain"]
        print("\nspeed-up / tau     " + " ".join(f"{n:>17s}" for n in names))
        for c in categories:
            cells = {r["method"]: text(r["speedup"], "{:.2f}") + " / " + text(r["tau"], "{:.2f}") for r in by_category if r["category"] == c}
            print(f"{c:18s} " + " ".join(f"{cells[n]:>17s}" for n in names), flush=True)


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
        print("no charts: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    temperatures = list(dict.fromkeys(r["temperature"] for r in result["rows"]))
    for what in ("speedup", "accepted", "positions"):
        fig, axes = plt.subplots(1, len(temperatures), figsize=(6 * len(temperatures), 4), squeeze=False, layout="constrained")
        for ax, temperature in zip(axes[0], temperatures):
            rows = [r for r in result["rows"] if r["temperature"] == temperature and r["speedup"] is not None]
            drawn = [r for r in rows if r["method"] not in ("plain", "hf")]
            if what == "speedup":
                ends = [r["interval"] or [r["speedup"]] * 2 for r in rows]
                error = [[max(0.0, r["speedup"] - low) for r, (low, _) in zip(rows, ends)],
                         [max(0.0, high - r["speedup"]) for r, (_, high) in zip(rows, ends)]]
                ax.bar([r["method"] for r in rows], [r["speedup"] for r in rows], yerr=error, capsize=3)
                ax.axhline(1, color="black", linewidth=0.8)
                plt.setp(ax.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
                ax.set_ylabel("speed-up over plain decoding")
            elif what == "accepted":
                for r in drawn:
                    steps = sum(r["accepted"].values())
                    ax.plot(list(r["accepted"]), [n / steps for n in r["accepted"].values()], marker="o", label=r["method"])
                ax.set(xlabel="tokens a target forward", ylabel="share of the forwards")
            else:
                for r in drawn:
                    ax.plot(range(1, len(r["positions"]) + 1), r["positions"], marker="o", label=r["method"])
                ax.set(xlabel="draft position", ylabel="share of the forwards that accept it")
            if what != "speedup":
                ax.xaxis.get_major_locator().set_params(integer=True)
                ax.legend()
            ax.set(title=f"T = {temperature:g}", ylim=(0, None))
        name = f"{os.path.splitext(path)[0]}-{what}.png"
        fig.savefig(name, dpi=120)
        plt.close(fig)
        print(f"chart: {name}")
