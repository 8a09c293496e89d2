"""Which operator of a structure stands for it at a budget."""

from __future__ import annotations

from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.operators import registry
from ksopt.operators.base import StructuredOperator
from ksopt.patterns.size import Budget, Dims
from ksopt.search.layer_request import LayerRequest
from ksopt.search.space.space import build

MOST_FITTED = 16
"""Of the operators with the most weights, so many are fitted."""


def chosen(structure: str, budget: str, dims: Dims, matrix: Tensor) -> StructuredOperator | None:
    """Of the operators with the most weights within a budget the one that is nearest to a matrix.

    A device that does not run it is no matter here. None where no operator has so few weights.
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
        # Two factors: what a search recommends most, and what is fitted in closed form.
        space = build(LayerRequest(dims, budgets=(budget,), max_factors=2, device="cpu"))
    except InvalidInputError:
        return []
    return [registry.operator_of(one) for one in space.candidates]
