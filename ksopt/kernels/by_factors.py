"""A problem computed by one launch per factor, then PyTorch's operations.

Each is the factor's own choice, or two factors have the kernels that are the fastest together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ksopt.epilogue import GATES, After, activation_of, add_epilogue_, in_float32
from ksopt.kernels import dispatch, factor_epilogue
from ksopt.kernels.autotuner import Choice
from ksopt.kernels.problem import Problem

Product = Callable[..., Tensor]
"""(x, weight, batch_last, owner) -> y, or written into one more tensor that is last."""
Behind = Callable[[Tensor, Tensor | None, str, Tensor | None, bool], Tensor]
"""(y, bias, activation, residual, batch_last) -> act(y + bias) + residual."""
Within = Callable[..., Tensor | None]
"""(x, weight, batch_last, owner, after, out) -> y: the product and what is after it in one launch.

None where there is no such launch."""


def by_factors(
    product: Product,
    behind: Behind,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    batch_last: bool,
    siblings: int,
    owners: Sequence[Tensor] | None = None,
    out: Tensor | None = None,
    within: Within | None = None,
    casts: bool = False,
) -> Tensor:
    """The result of a layer, by one product per factor and PyTorch's operations after the last.

    Args:
        product: multiplies by one factor.
        behind: computes the epilogue; it is not called for an empty one.
        within: computes the last product and the epilogue, where it can; None: it never can.
        casts: whether the result of 16-bit operands is in float32; without ``out``.
        x, weights, bias, residual, activation, batch_last, siblings, owners: see `ksopt.ops`.
        out: where the last product, or that of all siblings, is written; None for new memory.
    """
    length = len(weights) // siblings
    after = After(bias, activation, residual, casts)
    if after.is_empty or siblings > 1:
        within = None
    parts = []
    for first in range(0, len(weights), length):
        part = x
        for at in range(first + length - 1, first - 1, -1):
            owner = None if owners is None else owners[at]
            if at == 0 and within is not None:
                y = within(part, weights[0], batch_last, owner, after, out)
                if y is not None:
                    return y
            if out is not None and at == 0 and siblings == 1:
                part = product(part, weights[at], batch_last, owner, out)
            else:
                part = product(part, weights[at], batch_last, owner)
        parts.append(part)
    if activation in GATES:
        y = _gated(behind, parts, bias, activation, batch_last, out)
        bias, activation = None, "none"
    else:
        y = parts[0] if siblings == 1 else torch.cat(parts, 0 if batch_last else -1, out=out)
    if bias is not None or residual is not None or activation != "none":
        y = behind(y, bias, activation, residual, batch_last)
    return in_float32(y) if casts else y


def _gated(
    behind: Behind,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    activation: str,
    batch_last: bool,
    out: Tensor | None,
) -> Tensor:
    """act(a) * b of the products of two siblings, each with its half of the bias."""
    first, second = parts
    if bias is not None:
        features = first.shape[0 if batch_last else -1]
        if bias.shape != (2 * features,):  # refused in words
            behind(
                torch.cat([first, second], 0 if batch_last else -1), bias, "none", None, batch_last
            )
        second = behind(second, bias[features:], "none", None, batch_last)
        bias = bias[:features]
    first = behind(first, bias, activation_of(activation), None, batch_last)
    return first * second if out is None else torch.mul(first, second, out=out)


@dataclass(frozen=True)
class ByFactors:
    """(x, weights, bias, residual, out) -> y: see `candidate.ChainCall`.

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
        p = self.problem
        around = (bias, residual, p.epilogue.activation, p.batch_last, p.siblings)
        how: dict[str, Any] = {"out": out, "within": _within, "casts": p.epilogue.in_float32}
        return by_factors(_multiply, add_epilogue_, x, weights, *around, **how)


def _multiply(
    x: Tensor, weight: Tensor, batch_last: bool, _owner: None, out: Tensor | None = None
) -> Tensor:
    return dispatch.multiply(x, weight, batch_last, out)


def _within(
    x: Tensor, weight: Tensor, batch_last: bool, _owner: None, after: After, out: Tensor | None
) -> Tensor | None:
    return dispatch.run_within(x, weight, batch_last, after, out)


@dataclass(frozen=True)
class ByPair:
    """`ByFactors` of two factors, by two kernels that stay the same.

    Attributes:
        problem: what is computed.
        first, second: the kernels, in the order in which they multiply.
    """

    problem: Problem
    first: Choice
    second: Choice

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor:
        left, right = weights
        between = self.first.call(x, right)
        epilogue = self.problem.epilogue
        after = After(bias, epilogue.activation, residual, epilogue.in_float32)
        y = None
        if not after.is_empty:
            y = factor_epilogue.run(self.second, between, left, after, out)
        if y is not None:
            return y
        y = self.second.call(between, left, out)
        y = add_epilogue_(y, bias, after.activation, residual)
        return in_float32(y) if after.in_float32 else y
