"""The choice of the operator that represents a structure at a budget."""

from __future__ import annotations

from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.operators import registry
from ksopt.operators.base import StructuredOperator
from ksopt.patterns.size import Budget, Dims
from ksopt.search.layer_request import LayerRequest
from ksopt.search.space.space import build

MOST_FITTED = 16
"""The number of operators, those with the most weights, that are fitted."""


def chosen(structure: str, budget: str, dims: Dims, matrix: Tensor) -> StructuredOperator | None:
    """The operator nearest to a matrix among those with the most weights within a budget.

    It may be one that the device does not run. None if no operator is within the budget.
    """
    most = Budget.parse(budget, dims).parameters
    inside = [one for one in _candidates(structure, budget, dims) if one.nnz <= most]
    inside.sort(key=lambda one: -one.nnz)
    if not inside:
        return None
    return min(inside[:MOST_FITTED], key=lambda one: one.nearest(matrix).relative_error)


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
