"""The house: which file may import which, what lies on top, and how long a file may grow."""
import ast
import functools
import os
import shutil
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
METHODS = ["medusa", "amphista", "hidden_transfer", "moa"]
CARD = {f"{name}.py" for name in [*METHODS, "tree", "model", "train", "sample"]} | {"tests", "README.md"}
USUAL = {"plumbing", "bench", "weights", "LICENSE", "requirements.txt", ".gitignore", ".ci", ".git"}
LINES = {"model.py": 450, "tree.py": 430, "train.py": 400, "sample.py": 260, "medusa.py": 350,
         "amphista.py": 350, "hidden_transfer.py": 350, "moa.py": 390, "plumbing": 320}
COLUMNS = 110
HANDS_OVER = ("moa.py", "plumbing.server")  # python moa.py serve, inside __main__: the one arrow up


def floor(name):
    """
    A module of ours -> how high it stands.
    An import may lead to a lower floor, in plumbing and bench to the same.
    """
    if name in ("model", "tree"):
        return 0
    if name in METHODS:
        return 1
    return {"plumbing": 2, "train": 3, "sample": 4, "bench": 5}[name.split(".")[0]]


def sources(root):
    """Python files of the product -> {path: text}."""
    out = {}
    for folder in ("", "plumbing", "bench"):
        for name in sorted(os.listdir(os.path.join(root, folder))):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(os.path.join(root, path), encoding="utf-8") as f:
                    out[path] = f.read()
    return out


def module(path):
    return path[:-3].replace(os.sep, ".")


@functools.cache
def imported(text):
    """Whatever a source imports, lazily too: a for import a, a and a.b for from a import b."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
    return names


def imports(path, text, ours):
    """Modules of ours that a file imports."""
    names = imported(text)
    if path.startswith("bench"):                                       # its files import each other by name
        names = names + [f"bench.{name}" for name in names]
    return ours.intersection(names)


def faults(root):
    """Everything that is wrong with a house, a line each."""
    files = sources(root)
    ours = {module(path) for path in files}
    arrows = {module(path): imports(path, text, ours) for path, text in files.items()}
    out = []
    for path in files:
        a = module(path)
        for b in arrows[a]:
            level = floor(a) == floor(b) and a.split(".")[0] in ("plumbing", "bench")
            if not (floor(b) < floor(a) or level or (path, b) == HANDS_OVER):
                out.append(f"{path} imports {b}, which stands no lower")
    arrows[module(HANDS_OVER[0])].discard(HANDS_OVER[1])
    done = set()
    while ready := {a for a in arrows if a not in done and arrows[a] <= done}:
        done |= ready
    if circle := sorted(arrows.keys() - done):
        out.append(f"a circle runs through {', '.join(circle)}")
    git = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    top = {path.split("/")[0] for path in git.stdout.splitlines()} or set(os.listdir(root))
    out += [f"{name} is not on the card" for name in sorted(top - CARD - USUAL)]
    tests = [os.path.join("tests", n) for n in os.listdir(os.path.join(root, "tests")) if n.endswith(".py")]
    for path in [*files, *tests]:
        with open(os.path.join(root, path), encoding="utf-8") as f:
            lines = f.read().split("\n")
        most = LINES.get(path, LINES.get(os.path.dirname(path), len(lines)))
        if len(lines) - 1 > most:
            out.append(f"{path} has {len(lines) - 1} lines, {most} are the most")
        for n, line in enumerate(lines, 1):
            if len(line) > COLUMNS:
                out.append(f"{path}:{n} has {len(line)} columns")
    return out


def test_the_house_is_in_order():
    """
    Catches an import that runs up, a circle, a stranger at the top level,
    a file that outgrows its size.
    """
    assert faults(ROOT) == []


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the house, and what is wrong with it before anything is planted."""
    root = tmp_path_factory.mktemp("house")
    for folder in ("", "plumbing", "bench", "tests"):
        (root / folder).mkdir(exist_ok=True)
        for name in os.listdir(os.path.join(ROOT, folder)):
            if name.endswith(".py") and folder != "tests":
                shutil.copy(os.path.join(ROOT, folder, name), root / folder / name)
    return root, faults(root)


@pytest.mark.parametrize("path, line, says", [
    ("tree.py", "import plumbing.options", "tree.py imports plumbing.options"),
    ("model.py", "def f():\n    from tree import walk", "model.py imports tree"),
    ("medusa.py", "from plumbing.options import fail", "medusa.py imports plumbing.options"),
    ("moa.py", "from plumbing import wire", "moa.py imports plumbing.wire"),
    ("amphista.py", "import medusa", "amphista.py imports medusa"),
    ("plumbing/wire.py", "def f():\n    import medusa\n    import train", "plumbing/wire.py imports train"),
    ("plumbing/text.py", "def f():\n    from plumbing import trainer", "a circle runs through"),
    ("bench/report.py", "import run", "a circle runs through"),
    ("train.py", "import sample", "train.py imports sample"),
    ("utils.py", "", "utils.py is not on the card"),
    ("model.py", "\n" * 450, "model.py has"), ("plumbing/wire.py", "\n" * 320, "plumbing/wire.py has"),
    ("bench/report.py", "x = 1" + " " * 106, "has 111 columns"),
])
def test_a_planted_fault_is_seen(path, line, says, house):
    """Catches a house test that would pass whatever is done to the house."""
    root, before = house
    assert not any(says in fault for fault in before)
    whole = root / path
    kept = whole.read_text(encoding="utf-8") if whole.exists() else None
    whole.write_text((kept or "") + line + "\n", encoding="utf-8")
    after = faults(root)
    if kept is None:
        whole.unlink()
    else:
        whole.write_text(kept, encoding="utf-8")
    assert any(says in fault for fault in after), after
