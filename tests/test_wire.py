"""What goes over the network: numbers that come back, and stay finite."""
import pytest
import torch

from plumbing.wire import WIRE_DTYPES, pack, unpack


@pytest.mark.parametrize("wire, bound", [("float32", 1e-6), ("float16", 1e-3), ("int8", 1 / 250)])
def test_what_is_packed_comes_back(wire, bound):
    """Catches a scale that belongs to another vector, and a wire that is no smaller than it says."""
    torch.manual_seed(0)
    s = torch.randn(1, 5, 16).double() * torch.logspace(-3, 3, 5).double()[:, None]  # vectors of all sizes
    sent = dict(s=s, k=torch.randn(2, 1, 2, 5, 4).double(), v=torch.zeros(0, 1, 2, 5, 4).double())
    data = pack({"path": [0, 2], "bonus": 7}, sent, wire)
    answer, got = unpack(data, s)
    assert answer == {"path": [0, 2], "bonus": 7} and got.keys() == sent.keys()
    for name, x in sent.items():
        assert got[name].shape == x.shape and got[name].dtype == x.dtype
        if x.numel():
            assert ((got[name] - x).abs() / x.abs().amax(-1, keepdim=True)).max() < bound, name
    assert len(data) < 900 + (s.numel() + 80) * {"float32": 4, "float16": 2, "int8": 1.6}[wire]


def test_extreme_states_stay_finite():
    """Catches an overflow of fp16 and a division by an all-zero vector."""
    x = torch.tensor([[[1e9, -1e9], [0.0, 0.0]]])
    for wire in WIRE_DTYPES:
        got = unpack(pack({}, dict(s=x), wire), x)[1]["s"]
        assert got.isfinite().all() and (got[0, 1] == 0).all() and got[0, 0, 0] > 6e4
