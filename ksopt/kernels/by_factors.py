"""A problem by a launch a factor, each the fastest for it, and PyTorch's operations behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.epilogue import add_epilogue_
from ksopt.kernels import dispatch
from ksopt.kernels.problem import Problem


@dataclass(frozen=True)
class ByFactors:
    """(x, weights, bias, residual, out) -> y: see `registry.ChainCall`.

    Attributes:
        problem: what is computed; its factors are chosen for when they are first multiplied.
    """

    problem: Problem

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor:
        last, length = self.problem.batch_last, len(self.problem.chain)
        siblings = [weights[at : at + length] for at in range(0, len(weights), length)]
        direct = out if len(siblings) == 1 else None
        parts = [_product(x, own, last, direct) for own in siblings]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 0 if last else -1, out=out)
        return add_epilogue_(y, bias, self.problem.epilogue.activation, residual, last)


def _product(x: Tensor, weights: Sequence[Tensor], batch_last: bool, out: Tensor | None) -> Tensor:
    for weight in reversed(weights[1:]):
        x = dispatch.multiply(x, weight, batch_last)
    return dispatch.multiply(x, weights[0], batch_last, out)
