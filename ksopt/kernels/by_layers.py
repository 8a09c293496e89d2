"""Two layers, each computed by its own plan: one launch, or one per factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ksopt.kernels import host_plans, layer_plans
from ksopt.kernels.by_factors import ByFactors
from ksopt.kernels.operands import Operands
from ksopt.kernels.problem import Problem


@dataclass(frozen=True)
class ByLayers:
    """(x, weights, hidden bias, bias, residual, out) -> y: see `candidate.MlpCall`.

    Attributes:
        problem: what is computed; its layers are planned when they are first computed.
    """

    problem: Problem

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        hidden_bias: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor:
        first, second = self.problem.layers()
        own, others = weights[: len(first.chain)], weights[len(first.chain) :]
        hidden = _layer(first, Operands(x, tuple(own), hidden_bias))
        return _layer(second, Operands(hidden, tuple(others), bias, residual), out)


def _layer(problem: Problem, operands: Operands, out: Tensor | None = None) -> Tensor:
    """A layer's result by its plan."""
    x, weights = operands.x, operands.weights
    bias, residual = operands.bias, operands.residual
    around = (problem.epilogue.activation, problem.batch_last, 1)
    y = host_plans.run(x, weights, bias, residual, *around, out=out)
    if y is not None:
        return y
    call = layer_plans.whole_call(operands, *around) or ByFactors(problem)
    return call(x, weights, bias, residual, out)
