"""The contract of a method: all methods keep it, and each clause that is broken gets its line."""
import os
import sys
import types

import pytest
import torch

import medusa
from plumbing.contract import check_method
from train import METHODS
from tree import Tree

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bench"))
import eagle2  # noqa: E402
import self_speculative  # noqa: E402


@pytest.mark.parametrize("name", [*METHODS, "eagle2", "self_speculative"])
def test_methods_keep_it(name):
    """A contract that the methods themselves do not keep."""
    module = {**METHODS, "eagle2": eagle2, "self_speculative": self_speculative}[name]
    before = torch.get_rng_state()
    check_method.__wrapped__(name, module)
    assert torch.equal(before, torch.get_rng_state())


def broken(**parts):
    """Medusa with other parts."""
    module = types.ModuleType("broken")
    for part in ("Config", "Net", "predictions", "loss", "Drafter", "train"):
        setattr(module, part, parts[part] if part in parts else getattr(medusa, part))
    for part, value in parts.items():
        if value is None:
            delattr(module, part)
        else:
            setattr(module, part, value)
    return module


class Config(medusa.Config):
    min_tokens = None


class Headless(medusa.Net):
    def __init__(self, cfg, target, vocab=None):
        super().__init__(cfg, target)


class Uncounted(medusa.Net):
    def __init__(self, cfg, target, vocab=None):
        super().__init__(cfg, target, vocab)
        self.K = None


def fewer(net, target, x):
    yield from list(medusa.predictions(net, target, x))[1:]


def random_anchors(net, target, x):
    for logits, truth, p in medusa.predictions(net, target, x):
        yield logits[::2], truth[::2], p[::2]


def shifted(net, target, x):
    for logits, truth, p in medusa.predictions(net, target, x):
        yield logits, truth.roll(1), p


class Small(medusa.Drafter):
    def __init__(self, *args):
        super().__init__(*args)
        self.cache_rows = 1


class Deaf(medusa.Drafter):
    def draft(self, root, sampler, limit=None):
        return super().draft(root, sampler, None)


class Rootless(medusa.Drafter):
    def draft(self, root, sampler, limit=None):
        tree = super().draft(root, sampler, limit)
        tree.tokens[0] = (root + 1) % 40
        return tree


class Childish(medusa.Drafter):
    def draft(self, root, sampler, limit=None):
        return Tree([root, 1], [-1, 0]) if limit < 3 else types.SimpleNamespace(
            tokens=[root, 1, 2], parent=[-1, 2, 0], depth=[0, 1, 1], __len__=lambda: 3)


class Greedy(medusa.Drafter):
    def observe(self, tokens, hidden, cache):
        super().observe(tokens, hidden, cache)
        cache.k[0].zero_()


class OneArgument(medusa.Drafter):
    def draft(self, root):
        return Tree([root], [-1])


class NoCapacity(medusa.Drafter):
    def __init__(self, net, target):
        super().__init__(net, target)


class Valueless(medusa.Drafter):
    def draft(self, root, sampler, limit=None):
        tree = super().draft(root, sampler, limit)
        return Tree(tree.tokens, tree.parent)


class Netless:
    cache_rows, start, observe, draft = 6, None, None, None

    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0):
        pass


class Shapeless(medusa.Drafter):
    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0):
        super().__init__(net, target, None, max_nodes, floor)


class Floorless(medusa.Drafter):
    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0):
        super().__init__(net, target, shape, max_nodes)


class Keeper(medusa.Net):
    def __init__(self, cfg, target, vocab=None):
        super().__init__(cfg, target, vocab)
        self.target = target


def forgetful(cfg, target, run):
    sync, run.sync = run.sync, lambda net, loss: None
    net = medusa.train(cfg, target, run)
    run.sync = sync
    return net


def blind(cfg, target, run):
    steps = run.steps
    one = lambda evaluate: lambda x: (evaluate(x)[0], torch.tensor(0.5))
    run.steps = lambda net, optimisers, evaluate: steps(net, optimisers, one(evaluate))
    return medusa.train(cfg, target, run)


BREACHES = {
    "no Drafter": (dict(Drafter=None), "has no Drafter"),
    "no predictions": (dict(predictions=None), "has no predictions"),
    "Config is a class": (dict(Config=type("Config", (), {})), "no dataclass"),
    "no length": (dict(Config=Config), "min_tokens"),
    "no K": (dict(Net=Uncounted), "no K"), "no head for a vocabulary": (dict(Net=Headless), "DraftLMHead"),
    "too few positions": (dict(predictions=fewer), "predictions yields 3 times"),
    "anchors drawn in evaluation": (dict(predictions=random_anchors), "B (T - k - 1) rows"),
    "other tokens": (dict(predictions=shifted), "other tokens"),
    "an option of nobody": (dict(OPTIONS={"height": "of the tree"}), "OPTIONS names height"),
    "other arguments": (dict(Drafter=NoCapacity), "cannot be made"),
    "too few rows": (dict(Drafter=Small), "cache_rows is smaller"),
    "the limit ignored": (dict(Drafter=Deaf), "where the limit is"),
    "another root": (dict(Drafter=Rootless), "no Tree of root"),
    "one argument": (dict(Drafter=OneArgument), "root, sampler and limit"),
    "no net": (dict(Drafter=Netless), "Drafter has no net"),
    "no values": (dict(Drafter=Valueless), "the value of every node"),
    "a shape ignored": (dict(Drafter=Shapeless), "does not follow shape"),
    "a floor ignored": (dict(Drafter=Floorless), "not above floor"),
    "the target kept": (dict(Net=Keeper), "Net keeps the target"),
    "writes to the target's cache": (dict(Drafter=Greedy), "changes the target's text"),
    "no sync": (dict(train=forgetful), "run.sync"), "one top-1 for all": (dict(train=blind), "top-1 (K,)"),
    "nothing returned": (dict(train=lambda *args: medusa.train(*args) and None), "returns the Net"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_broken_clause_gets_its_line(breach, capsys):
    """A breach that ends in a traceback, in silently wrong figures, or in another text."""
    parts, says = BREACHES[breach]
    with pytest.raises(SystemExit) as stop:
        check_method.__wrapped__("broken", broken(**parts))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1, err
    assert err.startswith("error: broken.py") and says in err, err
