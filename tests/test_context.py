"""bench/context.py: a row for each length."""
import json

import pytest

import context


def test_context(trained, text_file, capsys):
    """A context one token too long, a row for another length; lengths that do not fit end with a line."""
    import context
    args = ["--out", trained, "--data", text_file, "--new-tokens", "4", "--repeats", "1"]
    context.main([*args, "--lengths", "12,64"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [r["context"] for r in rows] == [12, 64] and rows[1]["cache"] / rows[0]["cache"] == 64 / 12
    assert all(r[k] > 0 for r in rows for k in ("plain", "inexact", "step", "draft", "speedup", "prompt"))
    for lengths in ("4", "65", "x", ""):
        with pytest.raises(SystemExit) as e:
            context.main([*args, "--lengths", lengths])
        assert e.value.code == 2 and "--lengths" in capsys.readouterr().err, lengths
