"""
README.md and bench/RESULTS.md: every command runs, at tiny size, what they say of the files is
true, and README stays short.
"""
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import traceback

import pytest
import torch

import train
from test_pretrained import chat_model  # noqa: F401

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEXTS = {}
for name in ("README.md", "bench/RESULTS.md"):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        TEXTS[name] = f.read()
README, RESULTS = TEXTS.values()
PROSE = {name: re.sub(r"```.*?```", "", text, flags=re.S) for name, text in TEXTS.items()}
SPAN = r"`[^`]*`|\[[^\]]*\]\([^)]*\)"                                  # a command or a link


def commands(name):
    """Every command of a text, those within its sentences too."""
    blocks = "\n".join(re.findall(r"```(?:bash|sh)\n(.*?)```", TEXTS[name], re.S))
    lines = [line.split("#")[0] for line in blocks.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", PROSE[name])
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith("python ")]


FOUND = {name: commands(name) for name in TEXTS}
ONE = {re.sub(r"\d+(\.\d+)?", "0", c): c for found in FOUND.values() for c in found}
ELSEWHERE = ("pytest", "serve", "echo")                                # test_server, and below
COMMANDS = sorted(c for c in ONE.values() if not any(word in c for word in ELSEWHERE))
SHORTEST = {c.split()[1]: c for c in sorted(COMMANDS, key=len, reverse=True)
            if c != "python train.py"}                                 # per program; it trains all
AS_OTHERS = ("bench/by_layer.py", "bench/figure.py", "bench/typical.py")               # begin alike
ALONE = {c for program, c in SHORTEST.items() if program not in AS_OTHERS}

BACKBONE = "--n-layer 1 --n-embd 32 --n-ffn 64 --n-head 2 --n-kv-head 1 --vocab-size 300 " \
           "--block-size 64 --first-length 32 --steps 3 --batch-size 2"
DRAFTER = "--steps 3 --batch-size 2"
RUN = "--prompts 1 --prompt-tokens 8 --new-tokens 4"
TINY = {
    "sample.py": "--max-new-tokens 8 --prompt a", "bench/run.py": RUN, "bench/typical.py": RUN,
    "bench/by_layer.py": "--batches 1", "bench/figure.py": "--new-tokens 4 --prompt a",
    "bench/context.py": "--lengths 20,40 --new-tokens 4 --repeats 1",
    "bench/training.py": "--steps 3 --length 16 --batch-size 1",
    "bench/network.py": f"--rtts 1 {RUN} --distances 1,9 --texts 1 --guessed 8",
}


def run_here(argv):
    """A command in this process."""
    with pytest.MonkeyPatch.context() as m:
        m.chdir(ROOT)
        m.setattr(sys, "argv", argv)
        m.setattr(sys, "path", [os.path.join(ROOT, os.path.dirname(argv[0])), *sys.path])
        m.setattr(torch, "compile", lambda f, **options: f)            # test_sample compiles
        runpy.run_path(os.path.join(ROOT, argv[0]), run_name="__main__")


def forget_ours():
    """Nothing of ours is imported, or found by an import."""
    sys.path[:] = [path for path in sys.path if path and not path.startswith(ROOT)]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(ROOT) or name in ("bench", "plumbing"):     # a folder without __init__ has no file
            del sys.modules[name]


def run_alone(argv, folder=ROOT):
    """
    A command as a user's shell runs it: nothing of ours imported, the program's folder first in the path.
    A fork of this process does it, which saves each the seconds in which torch is imported.
    -> what it says on stderr.
    """
    with tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(err.fileno(), 2)
                sys.stdout = open(1, "w", closefd=False)
                sys.stderr = open(2, "w", buffering=1, closefd=False)
                os.chdir(folder)
                forget_ours()
                program = os.path.join(folder, argv[0])
                sys.path.insert(0, os.path.dirname(program))
                sys.argv = [*argv]
                runpy.run_path(program, run_name="__main__")
                status = 0
                sys.stdout.flush()
            except SystemExit as e:
                status = e.code if type(e.code) is int else int(e.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        err.seek(0)
        said = err.read()
    assert status == 0, said
    return said


# --------------------------------------------------------------------------------------------------
# Commands

def test_there_are_commands():
    """Catches texts whose commands the next test no longer finds."""
    assert len(FOUND["README.md"]) >= 10 and len(FOUND["bench/RESULTS.md"]) >= 20
    for found in FOUND.values():
        assert {"train.py", "sample.py", "bench/run.py"} <= {c.split()[1] for c in found}


@pytest.fixture(scope="module")
def out(trained, tmp_path_factory):
    """A copy of the trained folder: what is trained for it here is nobody else's."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("readme") / "out")


@pytest.fixture(scope="module")
def pretrained(chat_model, out):  # noqa: F811
    """A tiny model in transformers' format that stands in for SmolLM2, with drafters in OUT."""
    for method in train.METHODS:
        train.main(["--backbone", chat_model, "--data", "self", "--self-tokens", "600",
                    "--method", method, "--out", str(out), "--device", "cpu", *DRAFTER.split()])
    return chat_model


@pytest.fixture(scope="module")
def rivals(out, text_file):
    """The rivals that are trained, in OUT."""
    run_here(["bench/run.py", "--methods", "eagle2,self_speculative", "--train-minutes", "0.001",
              "--out", str(out), "--data", text_file, *RUN.split()])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, out, text_file, tmp_path, request):
    """
    Catches a command in the README or in RESULTS.md that does not run as written (its sizes apart).
    One of each program runs in a process of its own, as a user's does; the others spare themselves
    the seconds in which torch is imported.
    """
    words = shlex.split(command)[1:]
    program, more = words[0], TINY.get(words[0], "")
    assert os.path.exists(os.path.join(ROOT, program)), program
    if "smollm2" in words:
        words[words.index("smollm2")] = request.getfixturevalue("pretrained")
    if "question.jsonl" in words:
        words[words.index("question.jsonl")] = "bench/questions.jsonl"
    if "--train-minutes" in words:
        more += " --train-minutes 0.001"
    elif "eagle2" in command:
        request.getfixturevalue("rivals")
    if program == "train.py":
        more = "--device cpu "
        more += "--self-tokens 600 " if "self" in words else f"--data {text_file} "
        sizes = DRAFTER if "--method" in words else "--minutes 0.001"
        more += BACKBONE if "backbone" in words else sizes
    if program == "bench/figure.py":
        more += f" --svg {tmp_path}/figure.svg"
    elif program.startswith("bench/") and program != "bench/training.py":
        more += f" --data {text_file}"
    if program == "train.py" or "--train-minutes" in words:            # the others' drafters stay
        out = tmp_path if "backbone" in words else shutil.copytree(out, tmp_path / "out")
    if program not in (*(f"{method}.py" for method in train.METHODS), "bench/training.py"):
        more += f" --out {out}"
    argv = [*words, *more.split()]
    if program == "plumbing/plot.py" and not importlib.util.find_spec("matplotlib"):
        with pytest.raises(SystemExit) as stopped:
            run_here(argv)
        assert stopped.value.code == 2
    else:
        (run_alone if command in ALONE else run_here)(argv)


def test_the_fifth_method(trained, text_file, tmp_path):
    """Catches a walk-through that no longer works: done as the README says, in a copy."""
    code, = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) < 60
    text = " ".join(README.split())
    assert "`import echo` below `import amphista`" in text
    assert '`"echo": echo, ` right after `METHODS = {`' in text
    copy, folders = tmp_path / "copy", ("bench", "plumbing")
    other = lambda _, names: [n for n in names if not n.endswith((".py", ".html")) and n not in folders]
    shutil.copytree(ROOT, copy, ignore=other)
    shutil.copytree(trained, copy / "out")
    (copy / "echo.py").write_text(code)
    main = (copy / "train.py").read_text(encoding="utf-8")
    for old, new in (("import amphista\n", "import amphista\nimport echo\n"),
                     ("METHODS = {", 'METHODS = {"echo": echo, ')):
        assert main.count(old) == 1
        main = main.replace(old, new)
    (copy / "train.py").write_text(main, encoding="utf-8")
    run_alone(f"train.py --method echo --data {text_file} --device cpu {DRAFTER}".split(), copy)
    line = "--method echo --compare --prompt a --max-new-tokens 12 --device cpu --tree "
    trees = [(line + tree).split() for tree in ("best", "chain --temperature 1", "sparse")]
    (copy / "three.py").write_text(f"import sample\nfor argv in {trees}:\n    sample.main(argv)\n")
    assert run_alone(["three.py"], copy).count("text identical") == len(trees)


# --------------------------------------------------------------------------------------------------
# Text

def anchors(name):
    """What GitHub calls the headings of a text."""
    heads = re.findall(r"^#+ (.*)$", PROSE[name], re.M)
    return [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    """Catches a link to a file or a heading that is not there, and two headings of one name."""
    assert len(anchors(name)) == len(set(anchors(name)))
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", PROSE[name]):
        path = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
        assert os.path.exists(os.path.join(ROOT, path)), path
        assert not anchor or anchor in anchors(path), anchor


def test_contents():
    """Catches a section of RESULTS.md that its list of contents lacks."""
    listed = re.findall(r"^ *- \[(.*)\]\(#.*\)$", RESULTS, re.M)
    assert listed == re.findall(r"^## (.*)$", PROSE["bench/RESULTS.md"], re.M)


def test_readme_is_short():
    """Catches a README that grows again: a reader has ten minutes."""
    assert len(README.splitlines()) <= 250 and len(README.encode()) <= 18000
    for line in PROSE["README.md"].splitlines():
        if not line.startswith(("|", "![")):
            assert len(line) <= 100 or " " not in re.sub(SPAN, "", line), line


@pytest.mark.parametrize("name", TEXTS)
def test_lines_are_whole(name):
    """Catches what an edit left cut: a link or a command on two lines, a line that ends early."""
    lines = PROSE[name].splitlines()
    for line, after in zip(lines, [*lines[1:], ""]):
        if not line.strip() or line.startswith(("|", "#", "![")):
            continue
        assert line.count("`") % 2 == 0, line
        assert line.count("[") == line.count("]") == line.count("]("), line
        goes_on = re.match(rf"(?! *- | *\d+\. |[|#!]) *((?:{SPAN}|\S)+)", after)
        if goes_on:
            assert len(line) + len(goes_on[1]) > 76, f"{line}\n{after}"


def test_figures_of_readme_have_a_source():
    """Catches a figure in a table of README that no table of RESULTS.md has."""
    def figures(text):
        rows = re.findall(r"^\|.*\|$", re.sub(r"\]\([^)]*\)", "]", text), re.M)
        return {x for row in rows for x in re.findall(r"(?<![\w.])\d*\.\d+(?![\w.])", row)}
    assert len(figures(README)) > 30 and figures(README) <= figures(RESULTS)


def test_files_are_as_readme_says():
    """Catches a file that README's tree lacks or has too many, and a length that is not true."""
    tree, = re.findall(r"```\n(model\.py .*?)```", README, re.S)
    parts = re.split(r"^(plumbing|bench|tests)/", tree, flags=re.M)
    shown = dict(zip(["", *parts[1::2]], parts[::2]))
    for folder in ("", "plumbing", "bench"):
        there = {n for n in os.listdir(os.path.join(ROOT, folder)) if n.endswith(".py")}
        assert set(re.findall(r"\w+\.py", shown[folder])) == there, folder
    for name, lines in re.findall(r"^\| \[(\w+\.py)\].*?\| (\d+) \|", README, re.M):
        with open(os.path.join(ROOT, name), encoding="utf-8") as f:
            count = len(f.readlines())
        assert abs(int(lines) - count) <= 0.1 * count, f"{name} has {count} lines"


def test_every_word_of_the_project_is_its_own():
    """Catches the name of one machine's folder in a tracked text."""
    home = os.path.expanduser("~")
    for folder in ("", "bench", "plumbing", "tests"):
        for name in os.listdir(os.path.join(ROOT, folder)):
            if name.endswith((".py", ".md", ".txt")):
                with open(os.path.join(ROOT, folder, name), encoding="utf-8") as f:
                    assert home not in f.read(), name
