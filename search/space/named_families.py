"""Chains of the paper's named families (its Table 1) that a search admits."""

from __future__ import annotations

from collections.abc import Iterator

from ksopt.patterns.chain import Chain
from ksopt.patterns.divisors import divisors
from ksopt.search.layer_request import LayerRequest
from ksopt.search.space.enumerate import is_reducible
from ksopt.search.space.families import FAMILIES

_BUTTERFLIES = ("square_dyadic", "kaleidoscope", "block_butterfly")


def families(request: LayerRequest) -> Iterator[tuple[str, Chain]]:
    """The members of the families that meet a request's constraints, with the families' names.

    Monarch for every p, and mirrored (the transpose of a Monarch chain of the transposed layer);
    low rank at the largest rank that each step allows; dense. Butterflies (square dyadic, block,
    kaleidoscope) are included only if the request names them: two neighbouring 2t x 2t factors
    merge into one with no more weights, so a search has the merged chain instead.

    Example:
        >>> for name, chain in families(LayerRequest("64x64", budgets=("50%",), min_rank=16)):
        ...     print(name, chain)
        Monarch (1,16,16,4)*(4,16,16,1)
        mirrored Monarch (4,16,16,1)*(1,16,16,4)
        Monarch (1,8,8,8)*(8,8,8,1)
        mirrored Monarch (8,8,8,1)*(1,8,8,8)
        low rank (1,64,16,1)*(1,16,64,1)
    """
    for name, chain in _members(request):
        if (
            len(chain) <= request.max_factors
            and chain.nnz <= request.steps[-1].parameters
            and chain.rank_bound >= request.rank
            and chain.is_dense_support
            and request.constraints.admits(chain)
            and (request.constraints.names(chain) or not is_reducible(chain))
        ):
            yield name, chain


def _members(request: LayerRequest) -> Iterator[tuple[str, Chain]]:
    columns, rows = request.size.in_features, request.size.out_features
    for p in divisors(columns)[1:]:
        if rows % p == 0:
            yield "Monarch", Chain.monarch(columns, rows, p)
            yield "mirrored Monarch", Chain.monarch(rows, columns, p).transpose()
    for step in request.steps:
        rank = step.parameters // (rows + columns)
        if 1 <= rank <= min(rows, columns):
            yield "low rank", Chain.low_rank(columns, rows, rank)
    yield "dense", Chain.dense(columns, rows)
    for name in _BUTTERFLIES:
        if name in request.families:
            family = FAMILIES[name]
            for parameter in family.parameters(columns, rows, 1, request.steps[-1].parameters):
                yield name.replace("_", " "), family.chain(columns, rows, parameter)
