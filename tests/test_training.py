"""bench/training.py: every loop is timed."""
import json

import train
import training


def test_training_speed(capsys):
    """A loop that is left out, or trains nothing."""
    import training
    training.main(["--steps", "3", "--length", "12", "--batch-size", "1", "--device", "cpu"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [r["loop"] for r in rows] == ["plain loop", "backbone", *train.METHODS]
    assert all(r["trained"] > 1000 and r["tokens_per_second"] > 0 for r in rows)
