"""In-place writes of the graph are followed, also by functions that need not be run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ksopt.compile.sites import Verdict


def by_silu(y):
    F.silu(y, inplace=True)


def by_out(y):
    torch.tanh(y + 1, out=y)


def by_relu(y):
    F.relu(y, True)


class SeenThroughAView(nn.Module):
    """The product is written, and read through an earlier view."""

    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 5))
        self.write = write

    def forward(self, x):
        y = torch.bmm(x.view(-1, 4, 6).transpose(0, 1), self.weight)
        seen = y.transpose(0, 1)
        self.write(y)
        return seen.reshape(-1, 20)


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("write", [by_silu, by_out, by_relu])
def test_a_write_is_seen_through_older_views(write, dynamic, compiled_by_eager):
    model, x = SeenThroughAView(write), torch.randn(7, 24)
    with torch.no_grad():
        expected = model(x)
        actual = torch.compile(model, backend="ksopt", dynamic=dynamic)(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def by_squeeze(y):
    return y.squeeze_(2)


def by_transpose(y):
    y.transpose_(1, 3)
    return y


def by_unsqueeze(y):
    return (y + 1).unsqueeze_(0)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (by_squeeze, "another shape in place"),
        (by_transpose, "another shape in place"),
        (by_unsqueeze, None),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_shape_that_is_changed_in_place(turn, reason, dynamic, compiled_by_eager):
    weight = nn.Parameter(torch.randn(4, 8, 6))

    def layer(x):
        return turn(x.view(-1, 4, 1, 8) @ weight).flatten(1)

    x = torch.randn(5, 32)
    actual = torch.compile(layer, backend="ksopt", dynamic=dynamic)(x)
    torch.testing.assert_close(actual, layer(x), rtol=1e-4, atol=1e-5)
    (site,) = compiled_by_eager.reports[-1].sites
    assert site.verdict is (Verdict.LOWERED if reason is None else Verdict.NOT_RECOGNISED)
    assert (reason or "") in site.reason
