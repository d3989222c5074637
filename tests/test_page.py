"""plumbing/page.py: the replay in a browser. Without one, what is in the file."""
import json
import os
import random
import re
import shutil
import subprocess
from html import unescape

import pytest

import sample
import train
from plumbing import page
from plumbing.drafters import setup
from plumbing.picture import Run
from tree import Sampler, Stats, Tree, complete

NASTY = ["</script><script>document.title = 'owned'</script>",
         "<img src=x onerror=\"document.title = 'owned'\">",
         "'\"`${document.title = 'owned'}", "\x00\x01\x1b[31m\r\x7f\x9b", "\u202eabc\u2066\u200f\u05d0",
         "\u2028\u2029", "&lt;&amp;", "<!--", "]]>", "\\u003c\\", "{{DATA}}{{POLICY}}",
         "\ufeff\ufffe\uffff", "😀é", "__proto__", " \n\t"]


class Tokens:
    """Tokens that hold what may not run; the last two are halves of one character."""
    stops, raw = {99}, [text.encode() for text in NASTY] + ["€".encode()[:2], "€".encode()[2:]]

    def decode_bytes(self, ids):
        return b"".join(self.raw[i] if i < len(self.raw) else b"" for i in ids)


def random_run(rng, n, words, nodes, depth):
    """A run as a drafter with trees of so many nodes might have had, of n random tokens."""
    run = Run([rng.randrange(words) for _ in range(n)], Stats([1]), [0.01])
    while sum(run.stats.accepted) < n:
        at = sum(run.stats.accepted)
        length = min(n - at, rng.randint(1, depth + 1))
        tree = Tree([run.tokens[at - 1], *run.tokens[at:at + length - 1]], list(range(-1, length - 1)))
        for _ in range(nodes - len(tree)):
            up = rng.randrange(len(tree))
            token = max(token for node, token in enumerate(tree.tokens)) + 1 + rng.randrange(words)
            tree = Tree([*tree.tokens, token], [*tree.parent, up if tree.depth[up] < depth else 0])
        tree.value = [0.7**d * (0.5 + rng.random() / 2) for d in tree.depth]
        run.trees.append(tree)
        run.stats.accepted.append(length)
        run.seconds.append(rng.random() / 50)
    return run


def contents(html):
    """The data of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def test_nothing_of_a_token_is_markup():
    """Catches a tag, an entity or a line end that a token, the prompt or the command brings into the file."""
    rng, tokenizer = random.Random(0), Tokens()
    run = random_run(rng, 60, len(Tokens.raw), 6, 3)
    html = page.page({"plain": run}, tokenizer, "".join(NASTY), lambda n: 99, NASTY[0])
    for tag in ("<script", "</script", "<img", "<!--"):
        assert html.count(tag) == page.TEMPLATE.count(tag)
    data = re.search(r'id="data">(.*?)</script>', html, re.S)[1]
    assert data.isascii() and data.isprintable() and not set("<>&") & set(data)
    found = contents(html)
    assert found["prompt"] == "".join(NASTY) and found["made"] == NASTY[0]
    text = "".join(t for step in found["runs"][0]["steps"] for t in step["text"])
    assert text == tokenizer.decode_bytes(run.tokens).decode(errors="replace")


def test_two_hundred_tokens_by_five_methods_stay_small():
    """Catches a page that repeats every word of every tree."""
    rng = random.Random(0)
    runs = {name: random_run(rng, 200, 4000, 32, 5) for name in ("a", "b", "c", "d")}
    plain = Run([1] * 200, Stats([1] * 200), [0.01] * 200)
    html = page.page({"plain": plain, **runs}, Tokens(), "prompt", lambda n: 99, "made")
    assert len(html.encode()) < 1e6, len(html)


def test_a_page_takes_nothing_from_elsewhere():
    """Catches an address of anything, a script that the policy does not name, one too long to be read."""
    html = page.page({"plain": Run([14], Stats([1]), [0.1])}, Tokens(), "a", lambda n: 99, "made")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)[1]
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("sha256-") == 2
    assert re.findall(r"https?://[^\"]*", html) == ["http://www.w3.org/2000/svg"]       # a name, no address
    loads = r"\b(src|href|@import|url\(|fetch|XMLHttp|innerHTML|eval\()"
    assert not re.search(loads, html.replace("-src", ""))
    script, = re.findall(r"<script>(.*?)</script>", html, re.S)
    assert script.count("\n") < 200 and max(len(line) for line in html.split("\n")) < 500


def colours(dark):
    """{name: (r, g, b)} of the page, 0 to 1."""
    found = {}
    for name, value in re.findall(r"--([\w-]+): #(\w{6})", page.TEMPLATE.split("* {")[0]):
        found.setdefault(name, []).append(tuple(int(value[i:i + 2], 16) / 255 for i in (0, 2, 4)))
    return {name: values[dark] for name, values in found.items()}


def linear(colour):
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055)**2.4 for c in colour]


def contrast(a, b):
    """WCAG's contrast of two colours, 1 to 21."""
    light = [sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x))) + 0.05 for x in (a, b)]
    return max(light) / min(light)


# Vienot, Brettel, Mollon 1999: linear RGB as a protanope, a deuteranope sees it; blue-yellow stays
BLINDNESS = {"protan": [(0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)],
             "deutan": [(0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)]}


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_told_apart(dark):
    """Catches text that is hard to read, and two kinds of tokens that one man in twelve takes for one."""
    c = colours(dark)
    for back in ("back", "panel", "draft", "own"):
        assert contrast(c["text"], c[back]) >= 4.5, back
    assert contrast(c["dim"], c["back"]) >= 4.5 and contrast(c["dim"], c["panel"]) >= 4.5
    for line in ("draft-line", "own-line", "focus"):
        assert contrast(c[line], c["panel"]) >= 3, line
    for a, b in (("draft", "own"), ("draft-line", "own-line")):
        for kind, matrix in BLINDNESS.items():
            seen = [[sum(w * v for w, v in zip(row, linear(c[x]))) for row in matrix] for x in (a, b)]
            apart = max(abs(max(0, x)**(1 / 2.2) - max(0, y)**(1 / 2.2)) for x, y in zip(*seen))
            assert apart > 0.15, f"{a}, {b}: {kind} {apart:.2f}"


def test_where_it_cannot_be_written(tmp_path, capsys):
    """Catches a traceback at the end of a long run, and a folder that is not made."""
    page.write(str(tmp_path / "new" / "page.html"), "x")
    assert (tmp_path / "new" / "page.html").read_text() == "x"
    for name in (tmp_path, tmp_path / "new" / "page.html" / "page.html", "a\0b"):
        with pytest.raises(SystemExit) as e:
            page.write(str(name), "x")
        assert e.value.code == 2 and "cannot write" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# In a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BEFORE = """<script>
const faults = [];
for (const kind of ["error", "unhandledrejection", "securitypolicyviolation"])
  addEventListener(kind, e => faults.push(kind + " " + (e.message || e.blockedURI || e.reason)), true);
for (const kind of ["error", "warn"]) console[kind] = (...words) => faults.push(words.join(" "));
</script>"""
AFTER = """<script>
const all = (where, what) => [...document.querySelectorAll(where)].map(what);
const press = key => document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const shown = node => getComputedStyle(node).display !== "none";
const text = () => all("#texts pre", pre => [...pre.children].filter(shown).map(s => s.textContent).join(""));
const seen = {runs: runs.length, chosen: runs[chosen].name};
for (const list of ["said", "trees", "lit", "later", "times"]) seen[list] = [];
const look = () => {
  seen.said.push($("say").textContent);
  seen.trees.push(all("#tree g", g => g.querySelector("text").textContent));
  seen.lit.push(all("#tree g.draft, #tree g.own", g => g).length);
  seen.later.push(all("#lines .later", g => g).length);
  seen.times.push(Number($("time").value));
};
runs.forEach(run => run.pre.style.display = "block");                    // at phone width one text is shown
seen.start = text();
look();
for (let i = 1; i < runs[chosen].steps.length; i++) { press("ArrowRight"); look(); }
seen.end = text()[chosen];
press("ArrowLeft");
seen.back = text()[chosen];
press("Home");
seen.home = text();
press("ArrowDown");
seen.down = runs[chosen].name;
seen.pressed = all("[aria-pressed=true]", node => node.textContent);
press("End");
seen.all = text();
press("Home");
$("time").value = total / 2;
$("time").dispatchEvent(new Event("input"));
seen.half = text();
const label = node => (node.getAttribute("aria-label") || node.textContent).trim();
seen.names = all("button, input, select, svg, [role]", label);
seen.value = $("time").getAttribute("aria-valuetext");
press("Home");
press(" ");
seen.playing = $("play").textContent;
setTimeout(() => {
  press(" ");
  seen.played = now;
  seen.paused = $("play").textContent;
  seen.title = document.title;
  seen.images = document.images.length;
  seen.wide = [innerWidth, document.documentElement.scrollWidth];
  seen.requests = performance.getEntriesByType("resource").map(entry => entry.name);
  seen.faults = faults;
  parent.postMessage(JSON.stringify(seen), "*");
}, 500);
</script>"""
FRAMES = """<!DOCTYPE html><body style="margin: 0">
<iframe src="0.html" width="390" height="800"></iframe><iframe src="1.html" width="390" height="800"></iframe>
<script>
const got = {};
addEventListener("message", event => {
  got[[0, 1].find(i => frames[i] === event.source)] = JSON.parse(event.data);
  if (got[0] && got[1]) document.documentElement.textContent = JSON.stringify(got);
});
</script>"""


def replayed(pages, folder):
    """
    Open two pages in a browser, each as wide as a phone, and press keys -> what was seen of each. All that
    a page does besides is forbidden by its policy, and is seen.
    """
    for i, html in enumerate(pages):
        for script in (BEFORE, AFTER):
            digest = page.digest(re.search(r"<script>(.*?)</script>", script, re.S)[1])
            html = html.replace("script-src ", f"script-src {digest} ", 1)
        html = html.replace("<title>", BEFORE + "<title>", 1).replace("</body>", AFTER + "</body>")
        with open(os.path.join(folder, f"{i}.html"), "w", encoding="utf-8", newline="\n") as f:
            f.write(html)
    with open(os.path.join(folder, "frames.html"), "w") as f:
        f.write(FRAMES)
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000",
               f"--user-data-dir={folder}/profile", "--window-size=1000,900", "--dump-dom",
               f"file://{folder}/frames.html"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    found = re.search(r"\{.*\}", done.stdout, re.S)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    got = json.loads(unescape(found[0]))
    return [got[str(i)] for i in range(len(pages))]


def check_replay(found, seen, texts):
    """What was seen of a page is what its data say; texts: of the runs, prompt included."""
    assert seen["faults"] == seen["requests"] == [] and seen["images"] == 0
    assert seen["title"] == "nanospec: how a text was decoded"
    runs = found["runs"]
    names = [run["name"] for run in runs]
    assert seen["runs"] == len(names)
    firsts = [found["prompt"] + run["steps"][0]["text"][0] for run in runs]
    assert seen["start"] == seen["home"] == firsts and seen["all"] == texts
    for first, half, last in zip(firsts, seen["half"], texts):
        assert half.startswith(first) and last.startswith(half)
    assert firsts != seen["half"] != texts                             # the slowest run is half done

    chosen = names.index(seen["chosen"])                               # its trees were stepped through
    steps = runs[chosen]["steps"]
    assert seen["end"] == texts[chosen] == seen["back"] + "".join(steps[-1]["text"])
    after = (names * 2)[chosen + 1]
    assert seen["down"] == after and seen["pressed"] == [after]
    assert len(steps) == len(seen["said"]) > 5
    for k, step in enumerate(steps):
        assert f"forward {k + 1} of {len(steps)}" in seen["said"][k]
        nodes = step["tree"]["word"] if k else []
        words = sorted(found["words"][w] for w in nodes)
        assert sorted(re.sub("^[✓+] ", "", text) for text in seen["trees"][k]) == words
        assert seen["lit"][k] == (len(step["text"]) if k else 0)
    assert seen["later"] == sorted(seen["later"], reverse=True) and seen["later"][0] > seen["later"][-1]
    assert seen["times"] == sorted(set(seen["times"])) and seen["times"][0] == 0

    assert all(seen["names"]) and len(seen["names"]) > 4 + 2 * len(names)
    assert f"{after}: forward" in seen["value"]
    assert (seen["playing"], seen["paused"]) == ("Pause", "Play") and seen["played"] > 0
    assert seen["wide"][0] >= seen["wide"][1] and 370 < seen["wide"][0] <= 390         # nothing sticks out


@pytest.mark.skipif(not CHROMIUM, reason="needs a browser: apt-get install chromium")
def test_a_browser_replays_what_was_printed(trained, tmp_path, capsys):
    """
    Catches a page that does not run, shows another text or tree than was decoded, cannot be used with keys
    or be read aloud, sends a request, writes to the console, or runs what a prompt or a token holds.
    """
    prompt = "</script><img src onerror=document.title=1>"
    target, tokenizer, _, _ = setup(sample.Options(method="plain", out=trained, device="cpu"), {})
    ids = tokenizer.start + tokenizer.encode(prompt)

    def whole(seed):
        stats = complete(target, ids, 15, None, Sampler(1, seed=seed), tokenizer.stops)[1]
        return stats.stop == "budget"
    seed = next(filter(whole, range(99)))                              # not one whose text ends at once
    path = tmp_path / "page.html"
    sample.main(["--out", trained, "--method", "all", "--prompt", prompt, "--max-new-tokens", "15",
                 "--seed", str(seed), "--temperature", "1", "--nodes", "6", "--page", str(path)])
    printed = capsys.readouterr().out
    rng = random.Random(1)
    runs = {name: random_run(rng, 60, len(Tokens.raw), 8, 3) for name in NASTY[:3]}
    pages = [path.read_text(encoding="utf-8"),
             page.page(runs, Tokens(), "".join(NASTY), lambda n: 99, NASTY[1])]
    first, second = replayed(pages, str(tmp_path))
    found = contents(pages[0])
    assert [run["name"] for run in found["runs"]] == ["plain", *train.METHODS]
    check_replay(found, first, [printed.removesuffix("\n")] * 5)
    texts = [Tokens().decode_bytes(run.tokens).decode(errors="replace") for run in runs.values()]
    check_replay(contents(pages[1]), second, ["".join(NASTY) + text for text in texts])
