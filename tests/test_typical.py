"""bench/typical.py: what lossy acceptance costs."""
import json

import pytest
import torch

import sample
import train
import typical
from plumbing.drafters import setup


def test_bench_of_typical_acceptance(trained, text_file, capsys):
    """
    Catches a log p of other tokens than the text's, a table whose exact rows are lossy, or that cannot be
    made.
    """
    argv = ["--out", trained, "--data", text_file, "--prompts", "2", "--prompt-tokens", "8",
            "--new-tokens", "20", "--epsilons", "0.01,1", "--temperature", "1",
            "--device", "cpu", "--dtype", "float32"]
    typical.main(argv)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    names = ["exact, T = 0", "exact, T = 1", "LOSSY, epsilon 0.01", "LOSSY, epsilon 1"]
    assert [r["name"] for r in rows] == names
    assert rows[0]["greedy"] == 1 > rows[1]["greedy"]
    assert all(r["tau"] >= 1 and r["logp"] < 0 for r in rows)
    assert rows[2]["tau"] > rows[3]["tau"]                             # a higher limit accepts less
    for wrong, says in ((["--epsilons", "2"], "between 0 and 1"), (["--epsilons", "x"], "numbers"),
                        (["--prompt-tokens", "64"], "no room")):
        with pytest.raises(SystemExit) as e:
            typical.main([*argv, *wrong])
        err = capsys.readouterr().err
        assert e.value.code == 2 and says in err and err.count("\n") == 1
    opt = sample.Options(method="plain", out=trained, device="cpu", dtype="float32")
    target, _, _, _ = setup(opt, train.METHODS)
    logp, greedy = typical.score(target, [5, 6], [7, 8, 9])
    for i, token in enumerate([7, 8, 9]):
        row = target(torch.tensor([[5, 6, 7, 8, 9][:2 + i]]))[0][0, -1].log_softmax(-1)
        assert logp[i] == pytest.approx(row[token].item(), abs=1e-4)
        assert greedy[i] == (row.argmax() == token).item()
