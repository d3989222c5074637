"""README.md: every command in it runs, at tiny size, and what it says of the files is true."""
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest

import train
from test_backbones import chat_model  # noqa: F401

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
README = open(os.path.join(ROOT, "README.md"), encoding="utf-8").read()
BLOCKS = re.findall(r"```(?:bash|sh)\n(.*?)```", README, re.S)
COMMANDS = sorted({part.split("#")[0].strip() for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()
                   for part in line.split("&&") if part.strip().startswith("python")})

BACKBONE = "--n-layer 1 --n-embd 32 --n-ffn 64 --n-head 2 --n-kv-head 1 --vocab-size 300 --block-size 64 --first-length 32 " \
           "--steps 3 --batch-size 2"
DRAFTER = "--steps 3 --batch-size 2"
ALONE = {words.split()[1]: words for words in COMMANDS}.values()                        # the last of each program
TINY = {"bench/typical.py": "--prompts 1 --prompt-tokens 8 --new-tokens 8", "bench/by_layer.py": "--batches 1",
        "sample.py": "--max-new-tokens 8 --prompt a", "bench/run.py": "--prompts 1 --prompt-tokens 8 --new-tokens 8",
        "bench/context.py": "--lengths 20,40 --new-tokens 4 --repeats 1", "bench/training.py": "--steps 3 --length 16 --batch-size 1",
        "bench/network.py": "--rtts 1 --prompts 1 --prompt-tokens 8 --new-tokens 8 --distances 1,9 --texts 1 --guessed 8"}


def test_there_are_commands():
    """Catches a README whose commands the next test no longer finds."""
    assert any("train.py" in c for c in COMMANDS) and any("sample.py" in c for c in COMMANDS) and len(COMMANDS) >= 5


@pytest.fixture(scope="module")
def pretrained(chat_model, trained):  # noqa: F811
    """A tiny model in transformers' format that stands in for SmolLM2, with drafters in OUT."""
    for method in ("medusa", "amphista"):
        train.main(["--backbone", chat_model, "--data", "self", "--self-tokens", "600", "--method", method, "--out", trained,
                    "--device", "cpu", *DRAFTER.split()])
    return chat_model


@pytest.mark.parametrize("command", [c for c in COMMANDS if "pytest" not in c and "serve" not in c])      # see test_remote
def test_commands_run(command, trained, text_file, tmp_path, monkeypatch, request):
    """
    Catches a command in the README that does not run as written (its sizes apart). One of each program runs in a process of its
    own, as a user's does; the others spare themselves the seconds in which torch is imported.
    """
    words = shlex.split(command)[1:]
    assert os.path.exists(os.path.join(ROOT, words[0])), words[0]
    more = TINY.get(words[0], "")
    if "smollm2" in words:
        words[words.index("smollm2")] = request.getfixturevalue("pretrained")
    if words[0] == "train.py":
        more = ("--self-tokens 600 " if "self" in words else f"--data {text_file} ") + "--device cpu " + (
            BACKBONE if "backbone" in words else DRAFTER if "--method" in words else "--minutes 0.001")
    out = tmp_path if words[0] == "train.py" and "backbone" in words else trained
    if words[0] != "bench/training.py" and words[0].split("/")[0] in ("train.py", "sample.py", "bench"):
        more += f" --out {out}"
    if words[0].startswith("bench/") and words[0] != "bench/training.py":
        more += f" --data {text_file}"
    argv = [*words, *more.split()]
    if command in ALONE:
        done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(os.path.join(ROOT, argv[0]), run_name="__main__")


def test_the_fifth_method(trained, text_file, tmp_path):
    """Catches a walk-through that no longer works: done as the README says, in a copy of the project."""
    code, = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) < 60
    shutil.copytree(ROOT, tmp_path / "copy", ignore=lambda _, names: [n for n in names if not n.endswith(".py") and n != "bench"])
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


def test_links_lead_somewhere():
    """Catches a link to a file that is not there."""
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert os.path.exists(os.path.join(ROOT, path)), path


def test_every_word_of_the_project_is_its_own():
    """Catches the name of one machine's folder in a tracked text."""
    home = os.path.expanduser("~")
    for name in os.listdir(ROOT):
        if name.endswith((".py", ".md", ".txt")):
            assert home not in open(os.path.join(ROOT, name), encoding="utf-8").read(), name
