"""README.md and bench/RESULTS.md: every command runs, at tiny size; what they say of the files is true; README stays short."""
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
import torch

import train
from test_pretrained import chat_model  # noqa: F401

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEXTS = {name: open(os.path.join(ROOT, name), encoding="utf-8").read() for name in ("README.md", "bench/RESULTS.md")}
README, RESULTS = TEXTS.values()
PROSE = {name: re.sub(r"```.*?```", "", text, flags=re.S) for name, text in TEXTS.items()}


def commands(name):
    """Every command of a text, those within its sentences too."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", TEXTS[name], re.S)
    lines = [line.split("#")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", PROSE[name])
    return [part.strip() for line in lines for part in line.split("&&") if part.strip().startswith("python ")]


FOUND = {name: commands(name) for name in TEXTS}
ALL = {re.sub(r"\d+(\.\d+)?", "0", c): c for name in TEXTS for c in FOUND[name]}        # of those that differ in numbers only, the last
COMMANDS = sorted(c for c in ALL.values() if "pytest" not in c and "serve" not in c and "echo" not in c)      # see test_remote, below
ALONE = {c.split()[1]: c for c in COMMANDS if "--compile" not in c}.values()            # the last of each program

BACKBONE = "--n-layer 1 --n-embd 32 --n-ffn 64 --n-head 2 --n-kv-head 1 --vocab-size 300 --block-size 64 --first-length 32 " \
           "--steps 3 --batch-size 2"
DRAFTER = "--steps 3 --batch-size 2"
RUN = "--prompts 1 --prompt-tokens 8 --new-tokens 8"
TINY = {"bench/typical.py": RUN, "bench/by_layer.py": "--batches 1", "bench/run.py": RUN,
        "sample.py": "--max-new-tokens 8 --prompt a", "bench/figure.py": "--new-tokens 4 --prompt a",
        "bench/context.py": "--lengths 20,40 --new-tokens 4 --repeats 1", "bench/training.py": "--steps 3 --length 16 --batch-size 1",
        "bench/network.py": f"--rtts 1 {RUN} --distances 1,9 --texts 1 --guessed 8"}


def test_there_are_commands():
    """Catches texts whose commands the next test no longer finds."""
    assert len(FOUND["README.md"]) >= 10 and len(FOUND["bench/RESULTS.md"]) >= 20
    for name in TEXTS:
        assert {"train.py", "sample.py", "bench/run.py"} <= {c.split()[1] for c in FOUND[name]}


@pytest.fixture(scope="module")
def out(trained, tmp_path_factory):
    """A copy of the trained folder: what commands train here is nobody else's."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("readme") / "out")


@pytest.fixture(scope="module")
def pretrained(chat_model, out):  # noqa: F811
    """A tiny model in transformers' format that stands in for SmolLM2, with drafters in OUT."""
    for method in train.METHODS:
        train.main(["--backbone", chat_model, "--data", "self", "--self-tokens", "600", "--method", method, "--out", str(out),
                    "--device", "cpu", *DRAFTER.split()])
    return chat_model


def run_here(argv):
    """A command in this process, which spares the seconds in which torch is imported."""
    with pytest.MonkeyPatch.context() as m:
        m.chdir(ROOT)
        m.setattr(sys, "argv", argv)
        m.setattr(torch, "compile", lambda f, **options: f)            # test_sample compiles
        runpy.run_path(os.path.join(ROOT, argv[0]), run_name="__main__")


@pytest.fixture(scope="module")
def rivals(out, text_file):
    """The rivals that are trained, in OUT."""
    run_here(["bench/run.py", "--methods", "eagle2,self_speculative", "--train-minutes", "0.001", "--out", str(out), "--data", text_file,
              *RUN.split()])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, out, text_file, tmp_path, request):
    """
    Catches a command in the README or in RESULTS.md that does not run as written (its sizes apart). One of each program runs in
    a process of its own, as a user's does.
    """
    words = shlex.split(command)[1:]
    assert os.path.exists(os.path.join(ROOT, words[0])), words[0]
    more = TINY.get(words[0], "")
    if "smollm2" in words:
        words[words.index("smollm2")] = request.getfixturevalue("pretrained")
    if "question.jsonl" in words:
        words[words.index("question.jsonl")] = "bench/questions.jsonl"
    if "--train-minutes" in words:
        more += " --train-minutes 0.001"
    elif "eagle2" in command:
        request.getfixturevalue("rivals")
    if words[0] == "train.py":
        more = ("--self-tokens 600 " if "self" in words else f"--data {text_file} ") + "--device cpu " + (
            BACKBONE if "backbone" in words else DRAFTER if "--method" in words else "--minutes 0.001")
    if words[0] == "bench/figure.py":
        more += f" --svg {tmp_path}/figure.svg"
    elif words[0].startswith("bench/") and words[0] != "bench/training.py":
        more += f" --data {text_file}"
    if words[0].split("/")[0] in ("train.py", "sample.py", "bench", "plumbing") and words[0] != "bench/training.py":
        if words[0] == "train.py" or "--train-minutes" in words:       # what is trained is not what others decode with
            out = tmp_path if "backbone" in words else shutil.copytree(out, tmp_path / "out")
        more += f" --out {out}"
    argv = [*words, *more.split()]
    if words[0] == "plumbing/plot.py" and not importlib.util.find_spec("matplotlib"):
        with pytest.raises(SystemExit) as stopped:
            run_here(argv)
        assert stopped.value.code == 2
    elif command in ALONE:
        done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        run_here(argv)


def test_the_fifth_method(trained, text_file, tmp_path):
    """Catches a walk-through that no longer works: done as the README says, in a copy of the project."""
    code, = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) < 60
    for words in ("`import echo` below `import amphista`", '`"echo": echo, ` right after `METHODS = {`'):
        assert words in re.sub(r"\s+", " ", README)
    folders = ("bench", "plumbing")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=lambda _, names: [n for n in names if not n.endswith(".py") and n not in folders])
    shutil.copytree(trained, tmp_path / "copy" / "out")
    (tmp_path / "copy" / "echo.py").write_text(code)
    main = (tmp_path / "copy" / "train.py").read_text(encoding="utf-8")
    for old, new in (("import amphista\n", "import amphista\nimport echo\n"), ('METHODS = {', 'METHODS = {"echo": echo, ')):
        assert main.count(old) == 1
        main = main.replace(old, new)
    (tmp_path / "copy" / "train.py").write_text(main, encoding="utf-8")
    run = lambda command: subprocess.run([sys.executable, *command.split()], cwd=tmp_path / "copy", capture_output=True, text=True)
    done = run(f"train.py --method echo --data {text_file} --device cpu {DRAFTER}")
    assert done.returncode == 0, done.stderr
    for more in ("--tree best", "--tree chain --temperature 1", "--tree sparse"):
        done = run(f"sample.py --method echo --compare --prompt a --max-new-tokens 12 --device cpu {more}")
        assert done.returncode == 0 and "text identical" in done.stderr, done.stderr


def anchors(text):
    """What GitHub calls the headings of a text."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    """Catches a link to a file or a heading that is not there."""
    assert len(anchors(TEXTS[name])) == len(set(anchors(TEXTS[name])))
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", PROSE[name]):
        full = os.path.normpath(os.path.join(ROOT, os.path.dirname(name), path)) if path else os.path.join(ROOT, name)
        assert os.path.exists(full), path
        if anchor:
            assert anchor in anchors(TEXTS[os.path.relpath(full, ROOT)]), anchor


def test_contents():
    """Catches a section of RESULTS.md that its list of contents lacks."""
    listed = re.findall(r"^ *- \[(.*)\]\(#.*\)$", RESULTS, re.M)
    assert listed == re.findall(r"^## (.*)$", PROSE["bench/RESULTS.md"], re.M)


def test_readme_is_short():
    """Catches a README that grows again: a reader has ten minutes."""
    assert len(README.splitlines()) <= 250 and len(README.encode()) <= 18000
    for line in re.sub(r"```.*?```", "", README, flags=re.S).splitlines():
        if not line.startswith(("|", "![")):
            assert len(line) <= 100 or " " not in re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "", line), line


@pytest.mark.parametrize("name", TEXTS)
def test_lines_are_whole(name):
    """Catches sentences that an edit left cut: a link or a command on two lines, a line that ends early."""
    lines = PROSE[name].splitlines()
    for line, after in zip(lines, lines[1:] + [""]):
        if line.startswith(("|", "#", "![", "    ")) or re.match(r" *(- |\d+\. )?$", line):
            continue
        assert line.count("`") % 2 == 0 and line.count("[") == line.count("]") and line.count("](") == line.count("["), line
        if re.match(r"\s*[^-|#!\s]", after) and not re.match(r"\d+\. ", after):           # it goes on there
            word = re.match(r"\s*((?:`[^`]*`|\[[^\]]*\]\([^)]*\)|\S)+)", after)[1]
            assert len(line) + len(word) > 76, f"{line}\n{after}"


def test_figures_of_readme_have_a_source():
    """Catches a figure in a table of README that no table of RESULTS.md has."""
    figures = lambda text: {f for row in re.findall(r"^\|.*\|$", text, re.M) for f in re.findall(r"(?<![\w.])\d*\.\d+(?![\w.])", row)}
    links = re.sub(r"\]\([^)]*\)", "]", README)
    assert len(figures(links)) > 30 and figures(links) <= figures(RESULTS)


def test_files_are_as_readme_says():
    """Catches a file that README's tree lacks or has too many, and a length that is no longer true."""
    tree, = re.findall(r"```\n(model\.py .*?)```", README, re.S)
    parts = re.split(r"^(plumbing|bench|tests)/", tree, flags=re.M)
    for folder, part in zip(["", *parts[1::2]], parts[::2]):
        if folder != "tests":
            there = {n for n in os.listdir(os.path.join(ROOT, folder)) if n.endswith(".py")}
            assert set(re.findall(r"\w+\.py", part)) == there, folder
    for name, lines in re.findall(r"^\| \[(\w+\.py)\].*?\| (\d+) \|", README, re.M):
        count = len(open(os.path.join(ROOT, name), encoding="utf-8").readlines())
        assert abs(int(lines) - count) <= 0.1 * count, f"{name} has {count} lines"


def test_every_word_of_the_project_is_its_own():
    """Catches the name of one machine's folder in a tracked text."""
    home = os.path.expanduser("~")
    for folder in ("", "bench", "plumbing", "tests"):
        for name in os.listdir(os.path.join(ROOT, folder)):
            if name.endswith((".py", ".md", ".txt")):
                assert home not in open(os.path.join(ROOT, folder, name), encoding="utf-8").read(), name
