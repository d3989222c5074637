"""Decoding with forwards of one shape: the same text, one shape for all, whatever the method."""
import pytest
import torch

from conftest import tiny
from model import Attention
from plumbing.exact import same_rows_anywhere, same_shape
from plumbing.graphs import Graphs, use_graphs
from train import METHODS
from tree import Sampler, complete


def drafter_of(name, target):
    torch.manual_seed(1)
    module = METHODS[name]
    net = module.Net(module.Config(), target).to(target.wte.weight.dtype)
    return module.Drafter(net, target, None, 9)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("name", METHODS)
def test_one_cache_of_the_whole_context(name, style):
    """Rows behind the text that are seen, rows of a rejected tree, a second text that finds the first."""
    plain = [complete(tiny(style), prompt, 25, None, Sampler(T, seed=2))[0]
             for prompt, T in (([1, 2], 0), ([3], 1))]
    target = tiny(style)
    drafter = drafter_of(name, target)
    graphs = Graphs(target, 12)
    for (prompt, T), want in zip((([1, 2], 0), ([3], 1)), plain):
        text, stats = complete(target, prompt, 25, drafter, Sampler(T, seed=2))
        assert text == want
    assert target.new_cache(10) is graphs.cache and target.new_cache(10, 2).k[0].size(0) == 2


def test_a_batch_and_a_long_tree_go_the_old_way():
    """A graph that is asked for more rows than it has."""
    target, x = tiny(), torch.randint(23, (2, 5))
    want = target.hidden(x)
    Graphs(target, 2)
    assert torch.equal(target.hidden(x), want)
    drafter = drafter_of("medusa", target)                             # trees of nine nodes
    assert complete(target, [1], 20, drafter)[0] == complete(tiny(), [1], 20)[0]


@pytest.mark.parametrize("name", METHODS)
def test_all_decoding_forwards_have_one_shape(name, monkeypatch):
    """On a GPU a row is like another's only in products of one shape: plain decoding's too."""
    target = tiny(n_layer=4)
    plain = complete(target, [1, 2, 3], 25, None, Sampler(1.0))[0]
    target.exact, shapes, forward = same_shape(16), set(), Attention.forward

    def watched(self, x, *how, **more):
        if self in [block.attn for block in target.blocks] and len(how) > 5 and how[5]:        # an exact one
            shapes.add(x.size(1))
        return forward(self, x, *how, **more)
    monkeypatch.setattr(Attention, "forward", watched)
    for drafter in (None, drafter_of(name, target)):
        assert complete(target, [1, 2, 3], 25, drafter, Sampler(1.0))[0] == plain
    assert shapes == {16}


def test_a_product_that_looks_at_the_place_is_seen():
    """A probe that would call any machine exact."""
    assert same_rows_anywhere(lambda x: 2 * x, torch.randn(8, 3))
    assert not same_rows_anywhere(lambda x: x + torch.arange(8)[:, None], torch.randn(8, 3))


def test_graphs_need_a_gpu(capsys):
    """A traceback of CUDA's where there is none."""
    with pytest.raises(SystemExit) as stop:
        use_graphs(tiny(), 8)
    assert stop.value.code == 2 and "CUDA" in capsys.readouterr().err
