"""The choice of the operator that represents a structure at a budget."""

from __future__ import annotations

from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.operators import registry
from ksopt.operators.base import StructuredOperator
from ksopt.operators.kronecker import KroneckerOperator
from ksopt.patterns.size import Budget, Dims
from ksopt.search.layer_request import LayerRequest
from ksopt.search.space.space import build

MOST_FITTED = 16
"""The number of operators, those with the most weights, that are fitted."""


_ALIGNED, _ENOUGH = 16, 0.9
"""Tensor cores multiply blocks of this size; chains of such blocks need this share of weights."""


def chosen(structure: str, budget: str, dims: Dims, matrix: Tensor) -> StructuredOperator | None:
    """The operator nearest to a matrix among those with the most weights within a budget.

    Of chains, only those whose blocks are multiples of 16 count, if one of them has nine tenths of
    the most weights: others are slower on a GPU. It may be one that the device does not run. None
    if no operator is within the budget.
    """
    most = Budget.parse(budget, dims).parameters
    inside = [one for one in _candidates(structure, budget, dims) if one.nnz <= most]
    inside.sort(key=lambda one: -one.nnz)
    if not inside:
        return None
    enough = [one for one in inside if _is_aligned(one) and one.nnz >= _ENOUGH * inside[0].nnz]
    inside = enough or inside
    return min(inside[:MOST_FITTED], key=lambda one: one.nearest(matrix).relative_error)


def _is_aligned(operator: StructuredOperator) -> bool:
    if not isinstance(operator, KroneckerOperator):
        return False
    return all(size % _ALIGNED == 0 for p in operator.chain.patterns for size in (p.b, p.c))


def _candidates(structure: str, budget: str, dims: Dims) -> list[StructuredOperator]:
    if structure != registry.KRONECKER:
        sizes = (dims.in_features, dims.out_features)
        return list(registry.structure_of(structure).candidates(*sizes))
    try:
        # Two factors: most common in recommendations, and fitted in closed form.
        space = build(LayerRequest(dims, budgets=(budget,), max_factors=2, device="cpu"))
    except InvalidInputError:
        return []
    return [registry.operator_of(one) for one in space.candidates]
