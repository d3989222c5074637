"""The house: which file may import which, what lies on top, and how long a file may grow."""
import ast
import os
import shutil
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
METHODS = ["medusa", "amphista", "hidden_transfer", "moa"]
CARD = {f"{name}.py" for name in [*METHODS, "tree", "model", "train", "sample"]} | {"tests", "README.md"}
USUAL = {"plumbing", "bench", "weights", "LICENSE", "requirements.txt", ".gitignore", ".ci", ".git"}
LINES = {"model.py": 450, "tree.py": 430, "train.py": 400, "sample.py": 260, "medusa.py": 350, "amphista.py": 350,
         "hidden_transfer.py": 350, "moa.py": 390, "plumbing": 320}
COLUMNS = 110
HANDS_OVER = ("moa.py", "plumbing.server")                             # python moa.py serve, inside __main__: the one arrow up


def floor(name):
    """A module of ours -> how high it stands. An import may lead to a lower floor, in plumbing and bench to the same."""
    if name in ("model", "tree"):
        return 0
    if name in METHODS:
        return 1
    return {"plumbing": 2, "train": 3, "sample": 4, "bench": 5}[name.split(".")[0]]


def sources(root):
    """Python files of the product -> {path: tree}."""
    out = {}
    for folder in ("", "plumbing", "bench"):
        for name in sorted(os.listdir(os.path.join(root, folder))):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(os.path.join(root, path), encoding="utf-8") as f:
                    out[path] = ast.parse(f.read())
    return out


def module(path):
    return path[:-3].replace(os.sep, ".")


def imports(path, tree, ours):
    """Modules of ours that a file imports, lazy ones too."""
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        for name in names:
            for found in (name, f"bench.{name}" if path.startswith("bench") else name):
                if found in ours:
                    yield found


def faults(root):
    """Everything that is wrong with a house, a line each."""
    files = sources(root)
    ours = {module(path) for path in files}
    arrows = {module(path): set(imports(path, tree, ours)) for path, tree in files.items()}
    out = []
    for path in files:
        a = module(path)
        for b in arrows[a]:
            level = floor(a) == floor(b) and a.split(".")[0] in ("plumbing", "bench")
            if not (floor(b) < floor(a) or level or (path, b) == HANDS_OVER):
                out.append(f"{path} imports {b}, which stands no lower")
    done, todo = set(), {a: bs - {HANDS_OVER[1]} if f"{a}.py" == HANDS_OVER[0] else bs for a, bs in arrows.items()}
    while ready := {a for a in todo if a not in done and todo[a] <= done}:
        done |= ready
    if circle := sorted(todo.keys() - done):
        out.append(f"a circle runs through {', '.join(circle)}")
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True).stdout.split("\n")
    top = {path.split("/")[0] for path in tracked if path} or set(os.listdir(root))
    out += [f"{name} is not on the card" for name in sorted(top - CARD - USUAL)]
    for path in [*files, *(os.path.join("tests", n) for n in os.listdir(os.path.join(root, "tests")) if n.endswith(".py"))]:
        with open(os.path.join(root, path), encoding="utf-8") as f:
            lines = f.read().split("\n")
        most = LINES.get(path, LINES.get(os.path.dirname(path), len(lines)))
        if len(lines) - 1 > most:
            out.append(f"{path} has {len(lines) - 1} lines, {most} are the most")
        out += [f"{path}:{n} has {len(line)} columns" for n, line in enumerate(lines, 1) if len(line) > COLUMNS]
    return out


def test_the_house_is_in_order():
    """Catches an import that runs up, a circle, a stranger at the top level, a file that outgrows its size."""
    assert faults(ROOT) == []


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
def test_a_planted_fault_is_seen(path, line, says, tmp_path):
    """Catches a house test that would pass whatever is done to the house."""
    for name in os.listdir(ROOT):
        if name.endswith(".py") or name in ("plumbing", "bench"):
            copy = shutil.copytree if os.path.isdir(os.path.join(ROOT, name)) else shutil.copy
            copy(os.path.join(ROOT, name), tmp_path / name)
    (tmp_path / "tests").mkdir()
    assert not any(says in fault for fault in faults(tmp_path))
    with open(tmp_path / path, "a", encoding="utf-8") as f:
        f.write(line + "\n")
    assert any(says in fault for fault in faults(tmp_path)), faults(tmp_path)
