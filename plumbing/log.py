"""
log.jsonl: what a training said of itself, one evaluation a line.
"""
import json
import os

from plumbing.checkpoint import DAMAGED
from plumbing.options import fail
from plumbing.text import read_lines


def read_log(path):
    """-> the evaluations of the last run in a log: dicts. A line torn by a kill or a full disk is none."""
    rows = []
    try:
        lines = read_lines(path, errors="replace")
    except OSError:
        lines = []
    for line in lines:
        try:
            row = dict(json.loads(line))
            row |= {"step": int(row["step"]), "seconds": float(row["seconds"])}
        except DAMAGED:
            continue
        if rows and (row["step"] <= rows[-1]["step"] or row["seconds"] < rows[-1]["seconds"]):
            rows = []                                                  # another run
        rows.append(row)
    return rows


def write_log(path, rows):
    """The whole log anew, and renamed: it is a dozen lines, and never a torn one."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".tmp", "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
        os.replace(path + ".tmp", path)
    except OSError as e:
        fail(f"cannot write {path}: {e}; --resume goes on from the last checkpoint")
