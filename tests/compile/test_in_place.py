"""What the graph writes in place stays seen, also by functions that need not be run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def by_silu(y):
    F.silu(y, inplace=True)


def by_out(y):
    torch.tanh(y + 1, out=y)


def by_relu(y):
    F.relu(y, True)


class SeenThroughAView(nn.Module):
    """The product is written, and read through a view that was made before."""

    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 5))
        self.write = write

    def forward(self, x):
        y = torch.bmm(x.view(-1, 4, 6).transpose(0, 1), self.weight)
        seen = y.transpose(0, 1)
        self.write(y)
        return seen.reshape(-1, 20)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("write", [by_silu, by_out, by_relu])
def test_a_write_is_seen_through_older_views(write, dynamic, compiled_by_eager):
    model, x = SeenThroughAView(write), torch.randn(7, 24)
    with torch.no_grad():
        expected = model(x)
        found = torch.compile(model, backend="ksopt", dynamic=dynamic)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
