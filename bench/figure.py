r"""
README's figure: one text by plain decoding and by every method, token for token, as an SVG that is written right here.

    python bench/figure.py

A box is one forward of the target: accepted draft tokens green, the target's own token, its last, plain. The text stands in
the same places in every row, because it is the same text; the script ends with an error if it is not.
"""
import codecs
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
from tree import Sampler, complete

NAMES = dict(plain="plain decoding", medusa="Medusa", amphista="Amphista", hidden_transfer="Hidden Transfer", moa="Mixture of Attentions")
WIDTH, LEFT, CHAR, LINE, GAP = 900, 24, 7.8, 27, 6                     # pixels; a character of 13 px is 7.8 wide
STYLE = """
text { font-family: SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; fill: #1f2328 }
.name { font-weight: bold } .small { font-size: 11px; fill: #59636e } .space { fill: #aab1b8 }
.forward path { fill: #ffffff; stroke: #8c959f } .draft { fill: #aceebb }
"""


@dataclass
class Options:
    """Draw a text that all methods have decoded."""
    svg: str = arg(os.path.join(os.path.dirname(os.path.abspath(__file__)), "figure.svg"), "the file to write")
    prompt: str = arg(sample.PROMPT, "the text to continue")
    new_tokens: int = arg(48, "tokens to write", low=1, high=1000)
    temperature: float = arg(0.0, "as for sample.py")
    seed: int = arg(0, "as for sample.py", high=2**64 - 1)
    nodes: int = arg(8, "as for sample.py", low=1, high=4096)
    out: str = arg(WEIGHTS, "folder of checkpoints")
    device: str = arg("cpu", "as for sample.py; another may round otherwise")


def pieces(tokenizer, tokens):
    """Tokens -> their text each; a character of several tokens comes with its last one."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    out = [utf8.decode(tokenizer.decode_bytes([t])) for t in tokens]
    return out[:-1] + [out[-1] + utf8.decode(b"", final=True)]


def visible(text):
    """What a reader sees of a text: one sign for each character, white space and control characters too."""
    signs = {" ": "\N{MIDDLE DOT}", "\n": "\N{RETURN SYMBOL}", "\x7f": "\u2421", "\ufffe": "\ufffd", "\uffff": "\ufffd"}
    return "".join(signs.get(ch) or (chr(0x2400 + ord(ch)) if ch < " " else ch) for ch in text)


def layout(texts):
    """Token texts -> (x, line, width) of each in pixels, the same for every row; lines are filled one after the other."""
    places, x, line = [], LEFT, 0                                      # an empty piece of a character has room for one
    for text in texts:
        w = CHAR * max(1, len(text))
        if x > LEFT and x + w > WIDTH - LEFT:
            x, line = LEFT, line + 1
        places.append((x, line, w))
        x += w + GAP
    return places


def span(x0, x1, y, opens, closes):
    """A box from x0 to x1; where its forward goes on in another line it is open, and reaches a little further."""
    x0, x1, h, r = x0 - (0 if opens else 8), x1 + (0 if closes else 8), LINE - 6, 4
    left = f"M{x0 + r:.1f} {y + h}q-{r} 0 -{r} -{r}v-{h - 2 * r}q0 -{r} {r} -{r}" if opens else f"M{x0:.1f} {y}"
    right = f"H{x1 - r:.1f}q{r} 0 {r} {r}v{h - 2 * r}q0 {r} -{r} {r}" if closes else f"H{x1:.1f}M{x1:.1f} {y + h}"
    return f'<path d="{left}{right}H{x0 + r * opens:.1f}"/>'


def row(name, y, tokens, texts, accepted, places):
    """One method -> SVG, and the y below it."""
    forwards = f"{len(accepted)} forwards for {len(tokens)} tokens" if len(accepted) > 1 else f"1 forward for {len(tokens)} tokens"
    out, i, top = [f'<g class="row" id={quoteattr(name)}>', f'<text class="name" x="{LEFT}" y="{y}">{NAMES[name]}</text>'], 0, y + 8
    for n in accepted:
        out.append('<g class="forward">')
        group, i = range(i, i + n), i + n
        lines = sorted({places[t][1] for t in group})
        for l in lines:
            inside = [places[t] for t in group if places[t][1] == l]
            out.append(span(inside[0][0] - 1.5, inside[-1][0] + inside[-1][2] + 1.5, top + LINE * l, l == lines[0], l == lines[-1]))
        for t in group:
            x, l, w = places[t]
            if t != group[-1]:
                out.append(f'<rect class="draft" x="{x:.1f}" y="{top + LINE * l + 2}" width="{w:.1f}" height="{LINE - 10}" rx="2"/>')
            text = escape(visible(texts[t]))
            for sign in "\N{MIDDLE DOT}\N{RETURN SYMBOL}":
                text = text.replace(sign, f'<tspan class="space">{sign}</tspan>')
            out.append(f'<text class="token" x="{x:.1f}" y="{top + LINE * l + 15}" textLength="{CHAR * len(texts[t]):.1f}">{text}</text>')
        out.append("</g>")
    x, last, w = places[-1]
    x, y = x + w + 16, top + LINE * last
    if x + CHAR * len(forwards) > WIDTH - LEFT:
        x, y = LEFT, y + LINE
    return [*out, f'<text class="name" x="{x:.1f}" y="{y + 15}">{forwards}</text>', "</g>"], y + LINE + 24


def svg(rows, texts, prompt, words):
    """rows: {method: (tokens, accepted)} -> the whole picture. words: how it was made."""
    places, body, y = layout(texts), [], 34
    for name, (tokens, accepted) in rows.items():
        part, y = row(name, y, tokens, texts, accepted, places)
        body += part
    shown, words = (visible(text).replace("\N{MIDDLE DOT}", " ") for text in (prompt, words))
    notes = ["A box is one forward of the target; green: drafted and accepted; the rest is the target's own.",
             "Forwards are not time: drafting costs some too (README has the tables).",
             f"prompt: {shown if len(shown) < 110 else '…' + shown[-109:]}", f"made by: {words}"]
    for note in notes:
        body.append(f'<text class="small" x="{LEFT}" y="{y}">{escape(note)}</text>')
        y += 18
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" xml:space="preserve">',
                      f"<title>The same {len(texts)} tokens in {len(rows)} ways, one box for each forward of the target</title>",
                      f"<desc>{escape(words)}; prompt: {escape(shown)}</desc>", f"<style>{STYLE}</style>",
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
    for name, (text, accepted) in rows.items():
        if text != tokens:
            fail(f"the text of {name} is another one than plain decoding's")
    for name, (text, accepted) in rows.items():
        print(f"{NAMES[name]}: {len(accepted)} forwards for {len(text)} tokens")
    words = f"{shlex.join(['python', 'bench/figure.py', *argv])} (temperature {opt.temperature:g}, trees of at most {opt.nodes} nodes)"
    try:
        with open(opt.svg, "w", encoding="utf-8") as f:
            f.write(svg(rows, pieces(tokenizer, tokens), opt.prompt, words))
    except OSError as e:
        fail(f"cannot write {opt.svg}: {e}")


if __name__ == "__main__":
    command(main)
