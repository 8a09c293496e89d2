"""The arguments that the launcher of `wgmma_tf32x3` passes to each of its kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import H200
from torch import Tensor

from ksopt.kernels.families.base import family_of
from ksopt.kernels.launcher import Launcher
from ksopt.kernels.packing_launcher import PackedLauncher
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern

wgmma_tf32x3 = family_of("wgmma_tf32x3")

PROBLEM = Problem.of_factor(Pattern(2, 8, 8, 4), "float32", batch_last=False)


class Recording(Launcher):
    """Stands in for a kernel: keeps what it is called with, returns what `result` makes of it."""

    def __init__(self, result: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(PROBLEM, Geometry(128, 0, 64, 1, 1), kernel=0, fallback=None)
        self.calls: list[tuple[Tensor, Tensor]] = []
        self.out: Tensor | None = None  # of the last call
        self._result = result

    def packed(self, weight: Tensor) -> Tensor:
        """As a kernel that packs: the weight twice over."""
        self.calls.append((weight, weight))
        return torch.cat([weight.reshape(1, 1, 1, -1)] * 2, dim=3)

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        self.calls.append((x, weight))
        self.out = out
        return self._result(x, weight)


class Kernels:
    """A launcher whose packed weight is the weight twice over."""

    def __init__(self) -> None:
        self.pack = Recording(lambda x, weight: x)
        self.multiply = Recording(lambda x, packed: x)
        self.general = Recording(lambda x, weight: x)
        self.launch = PackedLauncher("a form", self.pack, self.multiply, lambda: self.general)


@pytest.fixture
def kernels() -> Kernels:
    return Kernels()


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(PROBLEM.pattern.weight_shape)


def test_a_weight_is_packed_once_for_each_version(kernels: Kernels, weight: Tensor) -> None:
    x = torch.randn(3, 64)
    for _ in range(3):
        kernels.launch(x, weight)
    assert len(kernels.pack.calls) == 1
    assert len(kernels.multiply.calls) == 3
    twice = torch.cat([weight.reshape(1, -1)] * 2, dim=1)
    assert torch.equal(kernels.multiply.calls[-1][1].view(1, -1), twice)
    with torch.no_grad():
        weight.add_(1)
    kernels.launch(x, weight)
    assert len(kernels.pack.calls) == 2
    assert torch.equal(kernels.multiply.calls[-1][1].view(1, -1), twice + 1)


def test_the_packing_kernel_gets_weights_as_they_are_stored(
    kernels: Kernels, weight: Tensor
) -> None:
    transposed = weight.transpose(1, 2)
    shifted = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)
    for stored in (transposed, shifted):
        kernels.launch.pack(stored)
        assert kernels.pack.calls[-1][0] is stored


@pytest.mark.parametrize(
    ("make", "fit"),
    [
        (lambda: torch.randn(3, 64), True),
        (lambda: torch.randn(64), True),
        (lambda: torch.randn(2, 3, 64), True),
        (lambda: torch.randn(3, 68)[:, :64], True),
        (lambda: torch.randn(3, 128)[:, 4:68], True),
        (lambda: torch.randn(3, 65)[:, :64], False),  # rows begin anywhere
        (lambda: torch.randn(3, 128)[:, 1:65], False),
        (lambda: torch.randn(64, 3).T, False),
    ],
)
def test_rows_that_are_not_aligned_go_to_the_general_kernel(
    kernels: Kernels, weight: Tensor, make: Callable[[], Tensor], fit: bool
) -> None:
    x = make()
    out = torch.empty_like(x)
    kernels.launch(x, weight, out)
    used, unused = (kernels.multiply, kernels.general)[:: 1 if fit else -1]
    assert not unused.calls
    assert used.calls[0][0] is x
    assert used.out is out
    assert kernels.pack.out is None
    if not fit:
        assert used.calls[0][1] is weight
        assert not kernels.pack.calls


def test_tiles_that_read_weights_in_one_order_share_what_is_packed() -> None:
    problem = Problem.of_factor(Pattern(4, 64, 64, 16), "float32", batch_last=False)
    shapes: dict[tuple[object, ...], set[int]] = {}
    for config in wgmma_tf32x3.configs(problem, H200):
        layers = config.column_layers(problem.pattern)
        order = (config.warpgroups_j, config.nt, layers)
        shapes.setdefault(order, set()).add(config.packed_elements(problem.pattern))
    assert len(shapes) > 1
    assert all(len(sizes) == 1 for sizes in shapes.values())
