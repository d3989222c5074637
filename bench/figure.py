r"""
README's figure: one text by plain decoding and by every method, token for token, as an SVG that is written
right here.

    python bench/figure.py

A box is one forward of the target: accepted draft tokens green, the target's own token, its last, plain. The
text stands in the same places in every row, because it is the same text; the script ends with an error if it
is not.
"""
import os
import shlex
import sys
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import sample
from model import arg
from train import METHODS
from plumbing.drafters import WEIGHTS, setup
from plumbing.options import command, fail, parse
from plumbing.picture import pieces, visible
from tree import Sampler, complete

HERE = os.path.dirname(os.path.abspath(__file__))
NAMES = dict(plain="plain decoding", medusa="Medusa", amphista="Amphista", hidden_transfer="Hidden Transfer",
             moa="Mixture of Attentions")
WIDTH, LEFT, CHAR, LINE, GAP = 900, 24, 7.8, 27, 6                     # pixels; at 13 px a character has 7.8
STYLE = """
text { font-family: SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
text { fill: #1f2328 } .name { font-weight: bold } .small { font-size: 11px; fill: #59636e }
.claim { font-size: 14px; font-weight: bold } .space { fill: #aab1b8 }
.forward path { fill: #ffffff; stroke: #8c959f } .draft { fill: #aceebb }
"""


@dataclass
class Options:
    """Draw a text that all methods have decoded."""
    svg: str = arg(os.path.join(HERE, "figure.svg"), "the file to write")
    prompt: str = arg(sample.PROMPT, "the text to continue")
    new_tokens: int = arg(48, "tokens to write", low=1, high=1000)
    temperature: float = arg(sample.Options.temperature, "as for sample.py")
    seed: int = arg(sample.Options.seed, "as for sample.py", high=2**64 - 1)
    nodes: int = arg(8, "as for sample.py", low=1, high=4096)
    out: str = arg(WEIGHTS, "folder of checkpoints")
    device: str = arg("cpu", "as for sample.py; another may round otherwise")


def forwards(accepted):
    """How many, in words."""
    return f"{len(accepted)} forward{'s' * (len(accepted) > 1)}"


def claim(rows):
    """What the picture is to show, in a sentence."""
    n, plain = len(rows["plain"][0]), forwards(rows["plain"][1])
    counts = sorted(len(accepted) for name, (_, accepted) in rows.items() if name != "plain")
    if not counts:
        return f"{n} tokens by {plain} of the model."
    few = f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else f"{counts[0]}"
    return f"The same {n} tokens: {plain} of the model by plain decoding, {few} with a drafter."


def layout(signs):
    """Signs of the tokens -> (x, line, width) of each in pixels, for every row; line after line is filled."""
    places, x, line = [], LEFT, 0                                      # an empty piece has room for one
    for text in signs:
        w = CHAR * max(1, len(text))
        if x > LEFT and x + w > WIDTH - LEFT:
            x, line = LEFT, line + 1
        places.append((x, line, w))
        x += w + GAP
    return places


def span(x0, x1, y, opens, closes):
    """A box from x0 to x1; open, and a little longer, where its forward goes on in another line."""
    x0, x1, h, r = x0 - (0 if opens else 8), x1 + (0 if closes else 8), LINE - 6, 4
    left, right = f"M{x0:.1f} {y}", f"H{x1:.1f}M{x1:.1f} {y + h}"
    if opens:
        left = f"M{x0 + r:.1f} {y + h}q-{r} 0 -{r} -{r}v-{h - 2 * r}q0 -{r} {r} -{r}"
    if closes:
        right = f"H{x1 - r:.1f}q{r} 0 {r} {r}v{h - 2 * r}q0 {r} -{r} {r}"
    return f'<path d="{left}{right}H{x0 + r * opens:.1f}"/>'


def draw_token(signs, place, top, drafted):
    """-> SVG of one token: its green, if it was drafted, and its signs."""
    (x, line, w), text = place, escape(signs)
    for sign in "\N{MIDDLE DOT}\N{RETURN SYMBOL}":
        text = text.replace(sign, f'<tspan class="space">{sign}</tspan>')
    y, out = top + LINE * line, []
    if drafted:
        size = f'width="{w:.1f}" height="{LINE - 10}"'
        out.append(f'<rect class="draft" x="{x:.1f}" y="{y + 2}" {size} rx="2"/>')
    length = f'textLength="{CHAR * len(signs):.1f}"'
    return [*out, f'<text class="token" x="{x:.1f}" y="{y + 15}" {length}>{text}</text>']


def row(name, y, signs, accepted, places):
    """One method -> SVG, and the y below it."""
    out = [f'<g class="row" id={quoteattr(name)}>',
           f'<text class="name" x="{LEFT}" y="{y}">{NAMES[name]}</text>']
    i, top = 0, y + 8
    for n in accepted:
        out.append('<g class="forward">')
        group, i = range(i, i + n), i + n
        lines = sorted({places[t][1] for t in group})
        for line in lines:
            inside = [places[t] for t in group if places[t][1] == line]
            (first, _, _), (last, _, w) = inside[0], inside[-1]
            ends = line == lines[0], line == lines[-1]
            out.append(span(first - 1.5, last + w + 1.5, top + LINE * line, *ends))
        for t in group:
            out += draw_token(signs[t], places[t], top, t != group[-1])
        out.append("</g>")
    words = f"{forwards(accepted)} for {len(signs)} tokens"
    x, last, w = places[-1]
    x, y = x + w + 16, top + LINE * last
    if x + CHAR * len(words) > WIDTH - LEFT:
        x, y = LEFT, y + LINE
    return [*out, f'<text class="name" x="{x:.1f}" y="{y + 15}">{words}</text>', "</g>"], y + LINE + 24


def svg(rows, texts, prompt, words):
    """
    rows: {method: (tokens, accepted)}; texts: of the tokens, which are the same in all -> the whole picture.
    words: how it was made.
    """
    signs = [visible(text) for text in texts]
    places, y = layout(signs), 64
    body = [f'<text class="claim" x="{LEFT}" y="32">{escape(claim(rows))}</text>']
    for name, (_, accepted) in rows.items():
        part, y = row(name, y, signs, accepted, places)
        body += part
    shown, words = (visible(text).replace("\N{MIDDLE DOT}", " ") for text in (prompt, words))
    notes = ["A box is one forward; green: drafted and accepted; the rest is the model's own.",
             "Forwards are not time: drafting costs some too (README has the tables).",
             f"prompt: {shown if len(shown) < 110 else '…' + shown[-109:]}",
             f"made by: {words}"]
    for note in notes:
        body.append(f'<text class="small" x="{LEFT}" y="{y}">{escape(note)}</text>')
        y += 18
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} xml:space="preserve">',
                      f"<title>{escape(claim(rows))}</title>",
                      f"<desc>{escape(words)}; prompt: {escape(shown)}</desc>",
                      f"<style>{STYLE}</style>",
                      f'<rect width="{WIDTH}" height="{y}" rx="6" fill="#f6f8fa"/>', *body, "</svg>", ""])


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    opt, = parse(Options, argv=argv)
    common = dict(out=opt.out, nodes=opt.nodes, device=opt.device, dtype="float32")
    target, tokenizer, drafters, _ = setup(sample.Options(method="all", **common), METHODS)
    prompt, rows = tokenizer.start + tokenizer.encode(opt.prompt), {}
    try:
        for name, drafter in dict(plain=None, **drafters).items():
            sampler = Sampler(opt.temperature, seed=opt.seed)
            tokens, stats = complete(target, prompt, opt.new_tokens, drafter, sampler, tokenizer.stops)
            rows[name] = tokens, stats.accepted
    except ValueError as e:
        fail(str(e))
    tokens = rows["plain"][0]
    for name, (text, _) in rows.items():
        if text != tokens:
            fail(f"the text of {name} is another one than plain decoding's")
    for name, (text, accepted) in rows.items():
        print(f"{NAMES[name]}: {forwards(accepted)} for {len(text)} tokens")
    words = (f"{shlex.join(['python', 'bench/figure.py', *argv])} (temperature {opt.temperature:g}, "
             f"seed {opt.seed}, trees of at most {opt.nodes} nodes)")
    try:
        with open(opt.svg, "w", encoding="utf-8") as f:
            f.write(svg(rows, pieces(tokenizer, tokens), opt.prompt, words))
    except OSError as e:
        fail(f"cannot write {opt.svg}: {e}")


if __name__ == "__main__":
    command(main)
