"""Families of gradients' kernels from outside the package, which call torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ksopt.kernels.chain_gradients import Factors
from ksopt.kernels.families import gradient_base
from ksopt.kernels.families.gradient_base import GradientFamily, GradientProblem
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops import chain_gradients, input_gradient
from ksopt.ops.weight_gradient import weight_grad_decomposed


@dataclass(frozen=True)
class ToyTile:
    """Any plain values."""

    size: int


@dataclass(frozen=True)
class ToyLaunch:
    """A tile, and a number that depends on the rows."""

    tile: ToyTile
    blocks: int


class ToyWeightGrad(GradientFamily[ToyLaunch]):
    """The weight gradient by torch."""

    name = "toy_weight_grad"
    computes = "weight"
    predicted = 1.0
    error = 0.0

    def unsupported_reason(self, problem: GradientProblem, device: DeviceSpec) -> str | None:
        return "d = 3" if problem.factors[0].d == 3 else None

    def launches(
        self, problem: GradientProblem, rows: int, device: DeviceSpec
    ) -> Iterator[ToyLaunch]:
        for size in (4, 8):
            for of_block in (16, 32):
                yield ToyLaunch(ToyTile(size), -(-rows // of_block))

    def predicted_us(
        self, problem: GradientProblem, launch: ToyLaunch, rows: int, device: DeviceSpec
    ) -> float:
        return self.predicted * (1 + launch.blocks / 1e6) * (1.0 if launch.tile.size == 8 else 1.1)

    def tile(self, launch: ToyLaunch) -> ToyTile:
        return launch.tile

    def launcher(
        self, problem: GradientProblem, launch: ToyLaunch, device_index: int
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]:
        (p,) = problem.factors

        def call(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
            of_weight = weight_grad_decomposed(grad, x, p.a, p.d, False)
            return of_weight + self.error, grad.sum(0) if problem.with_bias else None

        return call


class ToyChainGrads(ToyWeightGrad):
    """The weight gradients of chains, by torch."""

    name = "toy_chain_grads"
    computes = "chain_weights"

    def launcher(
        self, problem: GradientProblem, launch: ToyLaunch, device_index: int
    ) -> Callable[..., list[Tensor]]:
        left, right = problem.factors
        of = Factors(left.a, left.d, right.a, right.d)

        def call(*operands: Tensor) -> list[Tensor]:
            assert len(operands) == 3 * problem.siblings + 1
            return chain_gradients._by_pytorch(of, problem.with_bias, *operands)

        return call


class ToyInputGrad(ToyWeightGrad):
    """The gradient of what chains read, by torch."""

    name = "toy_input_grad"
    computes = "chain_input"

    def launcher(
        self, problem: GradientProblem, launch: ToyLaunch, device_index: int
    ) -> Callable[..., tuple[Tensor, ...]]:
        def call(
            grads: Sequence[Tensor], weights: Sequence[Tensor], *behind: Tensor
        ) -> tuple[Tensor, ...]:
            assert len(grads) == problem.siblings
            if not behind:
                return input_gradient._by_pytorch(grads, weights)
            activated = input_gradient.activated_by_pytorch
            return activated(grads, weights, *behind, activation=problem.activation)

        return call


@contextlib.contextmanager
def registered(
    predicted: float = 1.0,
    error: float = 0.0,
    of: type[GradientFamily[ToyLaunch]] = ToyWeightGrad,
    launcher: Callable[[Any], Any] | None = None,
) -> Iterator[type[GradientFamily[ToyLaunch]]]:
    """The family takes part inside the block.

    Args:
        predicted: microseconds of its better tile.
        error: added to its results.
        of: the family.
        launcher: takes the family's own launchers, and takes their place.
    """
    values: dict[str, Any] = {"predicted": predicted, "error": error}
    if launcher is not None:
        values["launcher"] = lambda self, *case: launcher(of.launcher(self, *case))
    family = type("Toy", (of,), values)
    gradient_base.register_gradient_family(family)
    try:
        yield family
    finally:
        gradient_base.unregister_gradient_family(of.name)


def drawn(rows: int) -> tuple[Tensor, Tensor]:
    """Operands of the factor (2,3,4,2)."""
    return torch.randn(rows, 12), torch.randn(rows, 16)
