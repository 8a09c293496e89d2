"""Strides beyond 32 bits, ten million rows, 100,000 features: on a CPU, against float64."""

import os

import pytest
import torch

from ksopt import KSLinear, ks_linear
from ksopt.reference import chain_reference

FAR = 2**31 + 24
"""A stride beyond what 32 bits hold."""


@pytest.fixture(params=["off", "model"])
def tune(request, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", request.param)


def far_apart(values, path, dim=0):
    """The same values, those of one dim far apart in a file of which nothing else is stored."""
    strides = list(values.stride())
    strides[dim] = FAR
    reach = 1 + sum((size - 1) * step for size, step in zip(values.shape, strides, strict=True))
    try:
        with path.open("wb") as file:
            os.truncate(file.fileno(), reach * values.element_size())
        memory = torch.from_file(str(path), shared=True, size=reach, dtype=values.dtype)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"this machine has no such files: {error}")
    apart = memory.as_strided(values.shape, strides)
    return apart.copy_(values)


def assert_right(y, x, weights, layout="batch_first"):
    exact = chain_reference(x.double(), [one.double() for one in weights], layout)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("tune")
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_what_lies_far_apart_is_read(layout, tmp_path):
    torch.manual_seed(0)
    weights = [torch.randn(1, 5, 3, 2), torch.randn(2, 3, 4, 1)]
    x = torch.randn((8, 3) if layout == "batch_last" else (3, 8))
    far = far_apart(x, tmp_path / "x")
    assert_right(ks_linear(far, weights, layout=layout), x, weights, layout)
    far_weight = far_apart(weights[1], tmp_path / "weight")
    assert_right(ks_linear(x, [weights[0], far_weight], layout=layout), x, weights, layout)


def test_gradients_of_what_lies_far_apart(tmp_path):
    torch.manual_seed(0)
    layer = KSLinear(8, 10, "(1,5,3,2)*(2,3,4,1)")
    x = torch.randn(3, 8)
    far = far_apart(x, tmp_path / "x")
    grads = []
    for rows in (far, x):
        y = layer(rows)
        grads.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_ten_million_rows(layout):
    rows = 10_000_000
    last = layout == "batch_last"
    torch.manual_seed(0)
    weights = [torch.randn(1, 2, 2, 2), torch.randn(2, 2, 2, 1)]
    x = torch.randn((4, rows) if last else (rows, 4))
    y = ks_linear(x, weights, layout=layout)
    for some in (slice(0, 5), slice(rows - 5, rows)):
        part = (slice(None), some) if last else some
        assert_right(y[part], x[part], weights, layout)


@pytest.mark.usefixtures("tune")
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize(
    "shape", [(1, 3, 2, 50_000), (50_000, 3, 2, 1), (250, 3, 2, 200), (1, 100_003, 2, 1)], ids=str
)
def test_a_hundred_thousand_features(shape, layout):
    torch.manual_seed(0)
    a, _, c, d = shape
    weight = torch.randn(shape)
    x = torch.randn((a * c * d, 3) if layout == "batch_last" else (3, a * c * d))
    assert_right(ks_linear(x, [weight], layout=layout), x, [weight], layout)
