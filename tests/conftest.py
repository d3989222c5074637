"""
What every test file shares: the import path, one thread, tiny random targets,
and the marker of the long test.
"""
import functools
import os
import random
import sys
import time
import types

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "bench")]  # bench/: its files import each other by name
os.environ.setdefault("HF_HUB_OFFLINE", "1")                           # no test may need the network
torch.set_num_threads(1)  # for models this small more threads are slower

from model import GPT, GPTConfig  # noqa: E402
from tree import Tree  # noqa: E402


def tiny(style="llama", seed=0, dtype=torch.float64, scale=20, **shape):
    """
    A random target, norms and biases random too. Matrices are scale times the usual, embeddings are
    small beside them: the text depends on the context and seldom loops.
    """
    cfg = dict(n_layer=2, n_head=4, n_kv_head=2 if style == "llama" else 4, n_embd=16, n_ffn=24,
               vocab_size=23, block_size=40)
    target = GPT(GPTConfig(style=style, **{**cfg, **shape}))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in target.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(0.02 * scale * noise if p.dim() > 1 else p + 0.1 * noise)
            if name in ("wte.weight", "norm.weight"):
                p.mul_(0.3 if p.dim() > 1 else 3.0)                    # and back to logits of size 1
    return target.to(dtype).eval().requires_grad_(False)


def read(target, x):
    """What the target's final norm and lm_head say of states x (B, T, C)."""
    return target.lm_head(target.norm(x))


class Watching:
    """
    For a drafter: remembers what it drafted after which text.
    force: hand out other trees, of which 0..4 tokens will be accepted.
    """
    force = None

    def start(self, target, max_len):
        super().start(target, max_len)
        self.seen = []

    def draft(self, root, sampler, limit=None):
        tree = super().draft(root, sampler, limit)
        self.seen.append((list(self.text), tree))
        if self.force is None:
            return tree
        (plain, n_prompt), V = self.force, self.target.cfg.vocab_size
        at = len(self.text) + 1 - n_prompt
        right = plain[at:at + len(self.seen) % 5]  # a wrong sibling stands before each right token
        tokens, parent, up = [root], [-1], 0
        for token in right:
            tokens += [(token + 1) % V, token]
            parent += [up, up]
            up = len(tokens) - 1
        return Tree(tokens, parent)


def pytest_configure(config):
    config.addinivalue_line("markers", "long: minutes of random cases; skipped unless asked for with -m long")


def pytest_collection_modifyitems(config, items):
    if "long" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: run with -m long"))


@pytest.fixture(scope="session", autouse=True)
def short_trials():
    """
    The tau at the end of a training comes from 16 tokens after two prompts, not 64 after eight:
    in many tests that was most of the time.
    """
    import train
    real = train.mean_tau

    def shorter(target, drafter, prompts, new_tokens, **kwargs):
        return real(target, drafter, prompts[:2], min(new_tokens, 16), **kwargs)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, "mean_tau", shorter)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_look_at_the_machine():
    """
    How many rows make a target exact is a matter of its shape and dtype: tried once for each kind.
    What that costs is not timed, so that a busy machine decides nothing. For a command at this size
    both are most of the time. (test_exact.py has the real ones.)
    """
    import plumbing.exact
    real, known = plumbing.exact.find_exact_rows, {}

    def once(target):
        w = target.wte.weight
        kind = str(target.cfg), w.dtype, w.device, torch.get_num_threads(), type(target.lm_head)
        if kind not in known:
            known[kind] = real(target), [block.mlp.wide for block in target.blocks]
        exact, wide = known[kind]
        for block, wish in zip(target.blocks, wide):
            block.mlp.wide = wish
        return exact
    with pytest.MonkeyPatch.context() as m:
        m.setattr(plumbing.exact, "find_exact_rows", once)
        m.setattr(plumbing.exact, "step_seconds", lambda target, nodes: 1.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_round():
    """
    A command that compares takes one turn of each method, not the median of three;
    one that looks for a number of nodes times the target twice, not seven times.
    (test_compare.py and test_budget.py have the real ones.)
    """
    import plumbing.budget
    import sample
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sample, "compare", functools.partial(sample.compare, repeats=1))
        m.setattr(plumbing.budget, "forward_seconds",
                  functools.partial(plumbing.budget.forward_seconds, rounds=2))
        yield


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Sentences from a tiny grammar, some of their characters more than one byte long."""
    rng = random.Random(0)
    words = ["the", "a", "cat", "dog", "sees", "likes", "big", "small", "house", "tree", "and", "é€", "not"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    sentences = [" ".join(rng.choices(words, k=rng.randint(3, 9))) + ".\n" for _ in range(600)]
    path.write_text("".join(sentences), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, text_file):
    """
    A folder of checkpoints as train.py leaves it:
    a tiny backbone and a drafter of every method, a few steps each.
    """
    import train
    out = str(tmp_path_factory.mktemp("trained"))
    common = ["--out", out, "--data", text_file, "--device", "cpu"]
    tiny = "--n-layer 2 --n-embd 32 --n-ffn 64 --n-head 2 --n-kv-head 1 --vocab-size 300 --block-size 64"
    steps = "--first-length 32 --steps 60 --batch-size 4"
    train.main(["--method", "backbone", *common, *tiny.split(), *steps.split()])
    for method in train.METHODS:
        train.main(["--method", method, *common, "--steps", "6", "--batch-size", "2"])
    return out


@pytest.fixture
def impatient(monkeypatch):
    """
    A client whose pauses between its tries are a tenth as long.
    -> their lengths as they would have been.
    """
    import plumbing.client
    pauses = []

    def shorter(seconds):
        pauses.append(seconds)
        time.sleep(seconds / 10)
    monkeypatch.setattr(plumbing.client, "time", types.SimpleNamespace(**{**vars(time), "sleep": shorter}))
    return pauses
