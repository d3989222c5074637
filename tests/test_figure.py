"""bench/figure.py: the picture shows what was decoded."""
import os
import xml.etree.ElementTree as ElementTree

import pytest

import figure
import sample
import train
from plumbing.drafters import setup
from plumbing.picture import visible
from tree import Sampler, complete

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SVG = "{http://www.w3.org/2000/svg}"


def drawn(path):
    """
    An SVG of figure.py -> {method: its forwards, each a list of (the token's sign, is it green?)},
    after a look at the places.
    """
    root, rows = ElementTree.parse(path).getroot(), {}
    width, height = float(root.get("width")), float(root.get("height"))
    for row in root.iter(SVG + "g"):
        if row.get("class") != "row":
            continue
        rows[row.get("id")], right = [], {}
        for group in (g for g in row if g.get("class") == "forward"):
            green = {(float(r.get("x")), float(r.get("y"))) for r in group.iter(SVG + "rect")}
            texts = [t for t in group.iter(SVG + "text")]
            place = lambda t: (float(t.get("x")), float(t.get("y")) - 13)
            rows[row.get("id")].append([("".join(t.itertext()), place(t) in green) for t in texts])
            for t in texts:
                x, y, length = (float(t.get(k)) for k in ("x", "y", "textLength"))
                assert right.get(y, 0) <= x and x + length < width     # nothing lies over anything else
                assert y < height
                right[y] = x + length
    return rows


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_figure_is_what_was_decoded(temperature, trained, tmp_path, capsys):
    """
    Text that is lost, doubled or not XML; a draft shown as the target's own; forwards that are counted
    otherwise than Stats does.
    """
    argv = ["--out", trained, "--prompt", "the <cat> & \x01é\n ", "--new-tokens", "45",
            "--temperature", str(temperature), "--nodes", "9"]
    figure.main([*argv, "--svg", str(tmp_path / "a.svg")])
    said, rows = capsys.readouterr().out.splitlines(), drawn(tmp_path / "a.svg")
    everything = sample.Options(method="all", out=trained, device="cpu", nodes=9, dtype="float32")
    target, tokenizer, drafters, _ = setup(everything, train.METHODS)
    prompt = tokenizer.start + tokenizer.encode("the <cat> & \x01é\n ")
    assert list(rows) == ["plain", *train.METHODS] and len(said) == 5
    for (name, forwards), line in zip(rows.items(), said):
        drafter, sampler = drafters.get(name), Sampler(temperature)
        tokens, stats = complete(target, prompt, 45, drafter, sampler, tokenizer.stops)
        assert [len(f) for f in forwards] == stats.accepted
        assert all([green for _, green in f] == [True] * (len(f) - 1) + [False] for f in forwards)
        assert "".join(text for f in forwards for text, _ in f) == visible(tokenizer.decode(tokens))
        counted = f"{len(stats.accepted)} forwards for {len(tokens)} tokens"
        assert line.endswith(f": {counted}") and f">{counted}</text>" in (tmp_path / "a.svg").read_text()
    again = (tmp_path / "a.svg").read_bytes()
    figure.main([*argv, "--svg", str(tmp_path / "a.svg")])
    assert (tmp_path / "a.svg").read_bytes() == again


def test_any_text_can_be_drawn(tmp_path):
    """
    Signs that are XML's own, that XML cannot hold, or that nobody would see; a token that ends within a
    character.
    """
    texts = ["<b>", "&amp;", '"\'', "", "\x00\x1b\x7f", " \t\n", "\u00b7\uffff", "\U0001f600"] * 9
    rows = {"plain": (texts, [1] * 72), "moa": (texts, [1, 70, 1])}
    (tmp_path / "a.svg").write_text(figure.svg(rows, texts, "\x00<&>", "python <&> \x01"), encoding="utf-8")
    shown = '<b>&amp;"\'\u2400\u241b\u2421\u00b7\u2409\u23ce\u00b7<FFFF>\U0001f600' * 9
    for forwards in drawn(tmp_path / "a.svg").values():
        assert "".join(text for f in forwards for text, _ in f) == shown


def test_figure_mistakes(trained, tmp_path, capsys, monkeypatch):
    """
    A picture of texts that differ; tracebacks for a folder that is not there and a prompt that is too
    long.
    """
    good = ["--out", trained, "--new-tokens", "9", "--prompt", "a", "--svg", str(tmp_path / "a.svg")]
    for wrong, says in ((["--svg", str(tmp_path / "no" / "a.svg")], "cannot write"),
                        (["--prompt", "long " * 400], "leaves no room"),
                        (["--temperature", "-1"], "temperature"),
                        (["--out", str(tmp_path)], "no backbone")):
        with pytest.raises(SystemExit) as e:
            figure.main([*good, *wrong])
        err = capsys.readouterr().err
        assert e.value.code == 2 and says in err and err.count("\n") == 1

    def liar(target, prompt, n, drafter, *more):
        tokens, stats = complete(target, prompt, n, drafter, *more)
        return tokens[::-1 if drafter else 1], stats
    monkeypatch.setattr(figure, "complete", liar)
    with pytest.raises(SystemExit):
        figure.main([*good, "--temperature", "1"])
    assert "another one than plain" in capsys.readouterr().err and not os.listdir(tmp_path)


def test_the_figure_of_the_readme():
    """
    A picture that is out of step with the options or broken: five rows, one text, the plain one token a
    forward; a claim that it does not show.
    """
    path = os.path.join(ROOT, "bench", "figure.svg")
    rows = drawn(path)
    texts = {name: [text for f in forwards for text, _ in f] for name, forwards in rows.items()}
    assert list(rows) == ["plain", *train.METHODS] and all(text == texts["plain"] for text in texts.values())
    assert len(texts["plain"]) == len(rows["plain"]) == figure.Options.new_tokens
    counts = [len(rows[m]) for m in train.METHODS]
    assert figure.Options.new_tokens > max(counts)
    said = next(t.text for t in ElementTree.parse(path).iter(SVG + "text") if t.get("class") == "claim")
    n = len(rows["plain"])
    assert said == (f"The same {n} tokens: {n} forwards of the model by plain decoding, "
                    f"{min(counts)} to {max(counts)} with a drafter.")
