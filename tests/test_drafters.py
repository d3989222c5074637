"""Checkpoints -> drafters: numbers that make no sense are refused where they are read; draft vocabularies."""
import os
import shutil

import pytest
import torch

import sample
import train
from conftest import tiny
from model import DraftLMHead
from plumbing.budget import accuracy
from plumbing.checkpoint import load, load_model, save
from plumbing.drafters import load_drafter
from test_pretrained import refused
from tree import Sampler, complete


# --------------------------------------------------------------------------------------------------
# Numbers

def test_accuracy():
    """Catches counts that cannot be a calibration's, taken for one."""
    fine = {"hits": [[6, 2], [4, 0]], "samples": [8, 7]}
    assert accuracy(fine) == accuracy(fine, 2) == [[0.75, 0.25], [4 / 7, 0]]
    assert accuracy({"hits": [[0, 0]], "samples": [0]}) == [[0, 0]]
    nan = float("nan")
    for hits in ([[6, 2], []], [[], []], [[6, 3], [4, 0]], [[6, -1], [4, 0]], [[6, 2.0], [4, 0]], [[6, 2]],
                 [[6, nan], [4, 0]], [[6, True], [4, 0]], 3, None):
        with pytest.raises((ValueError, TypeError)):
            accuracy({"hits": hits, "samples": [8, 7]}, 2)
    for K, wrong in ((3, fine), (2, fine | {"samples": [8, None]}), (2, fine | {"samples": [8]}), (2, []),
                     (2, {"hits": fine["hits"]})):
        with pytest.raises((ValueError, TypeError, KeyError)):
            accuracy(wrong, K)


@pytest.fixture
def drafter(trained, tmp_path, request):
    """What a checkpoint of trained holds, and a function that loads a changed one -> its drafter."""
    name = request.param
    path = str(tmp_path / name / "model.safetensors")
    tensors, meta = load(os.path.join(trained, name, "model.safetensors"), "", "")
    shutil.copytree(os.path.join(trained, "backbone"), tmp_path / "backbone")
    target = load_model(str(tmp_path / "backbone" / "model.safetensors"))[0]

    def again(tree="best", tensors=tensors, **more):
        save(path, tensors, meta | more)
        opt = sample.Options(method=name, out=str(tmp_path), device="cpu", tree=tree, nodes="12")
        return load_drafter(opt, target, train.METHODS[name])
    return tensors, meta, again


@pytest.mark.parametrize("drafter", train.METHODS, indirect=True)
def test_numbers_that_make_no_sense(drafter, capsys):
    """Catches an IndexError in the middle of a text, or trees grown from nonsense, for a file that lies."""
    tensors, meta, again = drafter
    hits, samples = meta["calibration"]["hits"], meta["calibration"]["samples"]
    for tree in ("best", "sparse"):
        for wrong in ([], hits[:-1], [*hits[:-1], []], [hits[0][:1], *hits[1:]], 7, None,
                      [[7 * n for n in row] for row in hits], [[-1, *row[1:]] for row in hits],
                      [[0.5, *row[1:]] for row in hits]):
            refused(capsys, lambda: again(tree, calibration={"hits": wrong, "samples": samples}))
        refused(capsys, lambda: again(tree, calibration={"hits": hits, "samples": samples[:-1]}))
        refused(capsys, lambda: again(tree, calibration=[1]))
        assert again(tree)
    place = "depth" if "depth" in meta["config"] else "n_heads"
    for config in ({place: 0}, {place: -1}, {place: 1.5}, {place: "4"}, {place: True}, {"batch_size": None}):
        refused(capsys, lambda: again(config=meta["config"] | config))
    refused(capsys, lambda: again(metrics={"tau": "high"}))
    refused(capsys, lambda: again(parameters=-3))
    assert again(metrics={}).net.meta["metrics"] == {}
    fewer = dict(meta["config"])
    fewer.pop("steps")                                                 # options come and go
    assert again(config=fewer)


@pytest.mark.parametrize("drafter", train.METHODS, indirect=True)
def test_a_draft_vocabulary_of_another_backbone(drafter, capsys):
    """Catches ids that the backbone has no row for, or has twice: an IndexError, or words never drafted."""
    tensors, meta, again = drafter
    for ids in ([1, 2, 300], [-1, 2, 3], [2, 2, 3], [[1, 2, 3]], [1.0, 2.0, 3.0], []):
        ids = torch.tensor(ids) if ids else torch.zeros(0, dtype=torch.long)
        refused(capsys, lambda: again(tensors=tensors | {"head.ids": ids}))


# --------------------------------------------------------------------------------------------------
# Draft vocabulary

@pytest.mark.parametrize("kind", train.METHODS)
def test_loss_in_a_draft_vocabulary(kind):
    """Catches a loss over other tokens than can be drafted, labels outside that count, top-1 without them."""
    method, target = train.METHODS[kind], tiny()
    V, keep = 23, torch.tensor([1, 3, 4, 8, 9, 15, 22])
    torch.manual_seed(0)
    whole = method.Net(method.Config(), target).double()
    torch.manual_seed(0)
    net = method.Net(method.Config(), target, keep).double()
    net.load_state_dict(whole.state_dict(), strict=False)
    x = torch.randint(V, (2, 20), generator=torch.Generator().manual_seed(1))
    whole.eval(), net.eval()
    outside = 0
    pairs = zip(method.predictions(whole, target, x), method.predictions(net, target, x), strict=True)
    for (a, truth, own), (b, place, q) in pairs:
        torch.testing.assert_close(b, a[:, keep])
        p = own.softmax(-1)[:, keep]
        torch.testing.assert_close(q.softmax(-1), p / p.sum(-1, keepdim=True))
        for t, at in zip(truth.tolist(), place.tolist()):
            assert at == (keep.tolist().index(t) if t in keep else -100)
            outside += at == -100
        wide = net.head.full_vocab(b)
        assert torch.equal(wide[:, keep], b) and (wide.isinf().sum(-1) == V - len(keep)).all()
    assert outside
    total, top1 = method.loss(net, target, x)
    assert total.isfinite() and ((0 <= top1) & (top1 <= 1)).all()
    all_outside = torch.full_like(x, 2)
    total, top1 = method.loss(net, target, all_outside)
    assert total.isfinite() and not top1.any()


@pytest.mark.parametrize("kind", ["medusa", "amphista", "hidden_transfer"])
def test_hard_labels_outside_are_ignored(kind):
    """Catches the text's tokens outside the draft vocabulary that pull at the heads."""
    method, target, keep = train.METHODS[kind], tiny(), torch.tensor([1, 3, 4, 8])
    options = dict(hard=1.0) if kind == "hidden_transfer" else dict(hard=1.0, soft=0.0)
    net = method.Net(method.Config(**options), target, keep).double().eval()
    x = torch.full((1, 12), 2)
    assert method.loss(net, target, x)[0] == 0
    x[0, 6] = 3
    want = sum(method.Config().decay**k * -(g.log_softmax(-1)[truth >= 0, 1].sum() / len(truth))
               for k, (g, truth, _) in enumerate(method.predictions(net, target, x), 1))
    torch.testing.assert_close(method.loss(net, target, x)[0], want)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", train.METHODS)
def test_text_and_drafts_in_a_draft_vocabulary(kind, temperature):
    """Catches ids that are not mapped back (the text stays right, drafts never are), others in drafts."""
    method, target, keep = train.METHODS[kind], tiny(), torch.tensor([1, 3, 4, 8, 9, 15, 17, 18, 20, 22])
    torch.manual_seed(0)
    drafter = method.Drafter(method.Net(method.Config(), target, keep).double(), target, max_nodes=12)
    real, drafted = drafter.draft, set()

    def watched(*args):
        tree = real(*args)
        drafted.update(tree.tokens[1:])
        return tree
    drafter.draft = watched
    sampler = lambda: Sampler(temperature, seed=4)
    plain = complete(target, [1, 2, 3], 37, sampler=sampler())[0]
    text, stats = complete(target, [1, 2, 3], 37, drafter, sampler())
    assert text == plain and not set(plain) <= set(keep.tolist())
    assert len(drafted) > 3 and drafted <= set(keep.tolist())


def test_rows_and_ids_of_a_draft_vocabulary_belong_together():
    """Catches a map back that is not the inverse of the cut."""
    target, keep = tiny(), torch.tensor([1, 3, 4, 8, 9, 15, 17, 18, 20, 22])
    head = DraftLMHead(target, keep)
    z = torch.randn(50, 16, dtype=torch.float64)
    full = target.lm_head(z)
    best = full[:, keep].argmax(-1)
    few = head(z, target)
    assert torch.equal(head.full_vocab(few).argmax(-1), keep[best]) and torch.equal(few.argmax(-1), best)
