"""Projection of a matrix to a chain: the public function and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.patterns.chain_texts import chain_of
from ksopt.patterns.validate import checked_int
from ksopt.precision import dtype_name
from ksopt.projection.alternating import alternate
from ksopt.projection.hierarchical import left_to_right, preserves_optimum
from ksopt.projection.products import balanced, chain_error, product
from ksopt.projection.refine import refine as refined
from ksopt.projection.scale import exponent_of, scaled, shares

# A relative error at the level of rounding.
_EXACT = 1e-13


@dataclass(frozen=True)
class Projection:
    """Weights of a chain whose product is near a matrix.

    Args:
        chain: The chain.
        weights: One [a, b, c, d] for each factor, left to right.
        relative_error: ||W - K_1 ... K_L|| / ||W|| in the Frobenius norm, of these weights in their
            dtype; computed in float64.
        lower_bound: A relative error that no weights of this chain go below.
        guarantee: Bound of the error relative to the best possible, up to rounding; None if
            unknown.
        method: "hierarchical" (in closed form, factor by factor) or "alternating" (least squares
            for one factor after the other).
        iterations: Passes of alternating least squares and steps of the refinement.
        rows: The permutation of the outputs, if any.
        columns: The permutation of the inputs, if any.
    """

    chain: Chain
    weights: tuple[Tensor, ...]
    relative_error: float
    lower_bound: float
    guarantee: float | None
    method: str
    iterations: int
    rows: Tensor | None = None
    columns: Tensor | None = None

    def to_dense(self) -> Tensor:
        """The approximation as a dense matrix, with rows and columns in the original order."""
        dense = product(self.weights)
        if self.rows is not None:
            dense = dense[torch.argsort(self.rows)]
        if self.columns is not None:
            dense = dense[:, torch.argsort(self.columns)]
        return dense


def project(
    matrix: Tensor,
    chain: Chain | str,
    *,
    refine: int = 0,
    rows: Tensor | Sequence[int] | None = None,
    columns: Tensor | Sequence[int] | None = None,
    iterations: int = 10,
    tolerance: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Projection:
    """Weights of a chain whose product equals ``matrix`` if possible, and is near it if not.

    - One or two factors with any patterns: the optimum, in closed form.
    - Three factors or more, if the chain or its transpose is chainable (or at least each split
      leaves the best product within reach, see `ksopt.projection.hierarchical`): one factor after
      the other is split off, from either end, and the better result is taken. Its error is at most
      sqrt(L - 1) times the best possible, and zero (but for rounding) where the matrix is a product
      of the chain.
    - Other chains: alternating least squares, starting at such splits. There is no
      guarantee, not even that a product is recovered; `Projection.lower_bound` bounds the possible
      improvement.

    Computed in float64 on the matrix's device, with its largest entry scaled near 1 by a power of
    two: squares of very large and very small entries neither overflow nor vanish. For a matrix of a
    narrower dtype the splits are exact to about 1e-8 of the matrix's norm.

    Args:
        matrix: [out_features, in_features], floating point.
        chain: a chain of that shape, its text, or the name of a family, such as "monarch".
        refine: steps of L-BFGS on all factors together afterwards; they only lower the error.
        rows: a permutation of the outputs: the chain is fitted to ``matrix[rows][:, columns]``.
        columns: a permutation of the inputs.
        iterations: maximal passes of alternating least squares, where it is used. Each takes some
            tenths of a second on a CPU where the sizes are in the thousands.
        tolerance: it stops when a pass lowers the error by less than this share of it.
        dtype: of the weights; None takes the matrix's.

    Raises:
        InvalidInputError: the shapes differ, the matrix is not of floating point, is on the meta
            device, or has NaN or infinity in it; the weights are too large for their dtype; or
            another argument is not allowed.

    Source: Le, Zheng, Riccietti, Gribonval, "Butterfly factorization with error guarantees", 2024
    (arXiv 2411.04506).

    Example:
        >>> projection = project(torch.ones(4, 6), Chain.low_rank(6, 4, rank=1))
        >>> [tuple(weight.shape) for weight in projection.weights], projection.relative_error < 1e-6
        ([(1, 4, 1, 1), (1, 1, 6, 1)], True)
        >>> torch.allclose(projection.to_dense(), torch.ones(4, 6))
        True
    """
    if isinstance(chain, str):
        sized = isinstance(matrix, Tensor) and matrix.ndim == 2  # others are refused below
        chain = chain_of(chain, *matrix.shape[::-1]) if sized else Chain.parse(chain)
    _check(matrix, chain)
    for name, value in (("refine", refine), ("iterations", iterations)):
        checked_int(value, name, "project", minimum=0)
    row_order = _permutation(rows, "rows", chain.out_features, matrix.device)
    column_order = _permutation(columns, "columns", chain.in_features, matrix.device)
    with torch.no_grad():
        target = matrix.detach().to(torch.float64)
        target = target if row_order is None else target[row_order]
        target = target if column_order is None else target[:, column_order]
        exponent = exponent_of(target)
        target = scaled(target, -exponent)
        weights, lost = _split(target, chain, double=matrix.dtype == torch.float64)
        guarantee = _guarantee(chain)
        method, iterations_done = "hierarchical", 0
        if guarantee is None and chain_error(target, weights) > _EXACT:
            method = "alternating"
            weights, iterations_done = alternate(target, chain, weights, iterations, tolerance)
        # One factor and two are already optimal.
        if refine and len(chain) > 2 and chain_error(target, weights) > _EXACT:
            weights, steps = refined(target, weights, refine)
            iterations_done += steps
        rounded = _rescaled(balanced(weights), exponent, dtype or matrix.dtype)
        # Exactly of these weights, because a power of two changes none of their digits.
        parts = shares(exponent, len(rounded))
        near_1 = [scaled(w.double(), -part) for w, part in zip(rounded, parts, strict=True)]
        error = chain_error(target, near_1)
        norm = target.norm().item()
    return Projection(
        chain=chain,
        weights=rounded,
        relative_error=error,
        lower_bound=min(error, lost / norm if norm > 0 else 0.0),
        guarantee=guarantee,
        method=method,
        iterations=iterations_done,
        rows=row_order,
        columns=column_order,
    )


def _rescaled(weights: Sequence[Tensor], exponent: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The weights of a product that is 2**exponent times as large, distributed evenly."""
    rescaled = []
    for weight in weights:
        large = scaled(weight, exponent / len(weights))
        rescaled.append(large.to(dtype).contiguous())
        if not rescaled[-1].isfinite().all():
            name = dtype_name(dtype)
            raise InvalidInputError(
                f"project: the weights reach {large.abs().max().item():.1e}, but {name} holds "
                f"{torch.finfo(dtype).max:.1e} at most: give a wider dtype"
            )
    return tuple(rescaled)


def _split(target: Tensor, chain: Chain, double: bool) -> tuple[list[Tensor], float]:
    """The better split from either end, and the norm of the part that no weights can represent."""
    weights, lost = left_to_right(target, chain, double)
    if len(chain) <= 2:  # optimal, from either end
        return weights, lost
    flipped, lost_too = left_to_right(target.mT, chain.T, double)
    other = [weight.transpose(1, 2) for weight in reversed(flipped)]
    if chain_error(target, other) < chain_error(target, weights):
        weights = other
    return weights, max(lost, lost_too)


def _guarantee(chain: Chain) -> float | None:
    if preserves_optimum(chain) or preserves_optimum(chain.T):
        return math.sqrt(max(len(chain) - 1, 1))
    return None


def _check(matrix: Tensor, chain: Chain) -> None:
    if not isinstance(matrix, Tensor):
        raise InvalidInputError(f"project: the matrix is a {type(matrix).__name__}, not a tensor")
    if not isinstance(chain, Chain):
        raise InvalidInputError(f"project: chain is {chain!r}: give a Chain or its text")
    if tuple(matrix.shape) != chain.shape:
        raise InvalidInputError(
            f"the matrix has shape {list(matrix.shape)}, but the chain {chain} has shape "
            f"{list(chain.shape)}"
        )
    if not matrix.is_floating_point():
        name = dtype_name(matrix.dtype)
        raise InvalidInputError(f"project: the matrix is {name}, but must be of floating point")
    if matrix.is_meta:
        raise InvalidInputError("project: the matrix is on the meta device and has no values")
    if not matrix.isfinite().all():
        raise InvalidInputError("the matrix has NaN or infinity in it: there is nothing near it")


def _permutation(
    permutation: Tensor | Sequence[int] | None, name: str, size: int, device: torch.device
) -> Tensor | None:
    if permutation is None:
        return None
    order = torch.as_tensor(permutation, device=device)
    if order.shape != (size,) or not torch.equal(
        order.sort().values, torch.arange(size, device=device).to(order.dtype)
    ):
        raise InvalidInputError(
            f"project: {name} must be a permutation of 0 ... {size - 1}: each number once"
        )
    return order.to(torch.int64)
