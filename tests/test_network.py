"""bench/network.py: both tables can be made."""
import json

import bench.network


def test_the_bench_runs_and_ends_with_json(trained, text_file, capsys):
    """
    Catches tables that cannot be made;
    a drafter that ends after K tokens has no figures beyond, MoA has.
    """
    argv = ["--out", trained, "--data", text_file, "--rtts", "1", "--prompts", "1", "--chains", "3",
            "--prompt-tokens", "8", "--new-tokens", "12", "--distances", "1,9", "--texts", "2",
            "--guessed", "10"]
    bench.network.main(argv)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    trips = {r["way"]: r for r in result["round_trips"]}
    assert list(trips) == ["plain API", "MoA trees", "MoA chain 3"] and trips["plain API"]["calls"] == 100
    assert trips["MoA trees"]["calls"] <= 100 and trips["MoA trees"]["down"] > trips["plain API"]["down"] > 50
    table = {r["drafter"]: r["distances"] for r in result["cut_off"]}
    assert table["medusa"]["9"] is None
    assert table["moa"]["9"]["tokens"] == table["medusa"]["1"]["tokens"] == 20
    assert table["target"]["1"] == table["target"]["9"]
    assert table["target"]["1"]["perplexity"] < table["medusa"]["1"]["perplexity"]
