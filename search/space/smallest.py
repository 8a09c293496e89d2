"""The smallest chain of a space, and the error message for a request that no chain meets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from ksopt.patterns.chain import Chain
from ksopt.patterns.size import Dims
from ksopt.search.layer_request import LayerRequest
from ksopt.search.options import MOST_FACTORS
from ksopt.search.space.block_sizes import ANY_SIZE
from ksopt.search.space.constraints import NONE, Constraints
from ksopt.search.space.enumerate import TooManyError, Walk
from ksopt.search.space.families import obstacle
from ksopt.system.plurals import counted

# Choices for each number of factors: about ten seconds for the answer, one for each remedy.
_MOST_VISITS = 1_000_000
_REMEDY_VISITS = 100_000


def smallest(
    dims: Dims,
    least_inner: int,
    max_factors: int,
    constraints: Constraints = NONE,
    visits: int = _MOST_VISITS,
) -> tuple[Chain | None, bool]:
    """The chain with the fewest weights, and whether it is certain that none has fewer.

    The chain is None if there is none with at most the dense layer's weights.

    Example:
        >>> chain, certain = smallest(Dims(64, 64), least_inner=64, max_factors=2)
        >>> str(chain), chain.nnz, certain
        ('(1,8,8,8)*(8,8,8,1)', 1024, True)
    """
    best, most, certain = None, dims.dense_parameters, True
    for factors in range(1, max_factors + 1):
        walk = Walk(dims, most, least_inner, visits=visits, constraints=constraints)
        try:
            for chain in walk.factors(factors):
                best = Chain(chain)
                most = walk.most = best.nnz - 1
        except TooManyError:
            certain = False
    return best, certain


def no_chain(request: LayerRequest) -> str:
    """The reason why no chain meets a request, and the changes that would help."""
    constraints, size = request.constraints, request.size
    best, certain = smallest(size, request.rank, request.max_factors, constraints)
    steps = " or ".join(step.text for step in request.steps)
    limits = f"of at most {counted(request.max_factors, 'factor')} and rank bound {request.rank}"
    limits = ", ".join([limits, *constraints.words])
    if best is None:
        # There may be a chain that the walk did not reach.
        exists = "exists" if certain else "was found"
        reasons = [
            why
            for name in constraints.families
            if (why := obstacle(name, size.in_features, size.out_features, MOST_FACTORS))
        ]
        parts = [
            f"budget {steps}: no chain {limits}, {exists} for dims {size}, whatever the budget",
            *reasons,
        ]
        remedies = _remedies(request, size.dense_parameters)
        if not remedies:
            changes = ", ".join(change for change, _ in _loosened(request))
            remedies = f"Not one of these alone helps: {changes}"
        return f"{'; '.join(parts)}. {remedies}"
    works = "the smallest budget that works is" if certain else "a budget that works is"
    comma = "," if constraints.words else ""
    text = (
        f"budget {steps}: no chain {limits}{comma} has so few weights for dims {size}; {works} "
        f"{counted(best.nnz, 'weight')} ({_share(best, size)}), the chain {best}. "
    )
    remedies = "" if constraints == NONE else _remedies(request, request.steps[-1].parameters)
    return text + (remedies or "A smaller min_rank allows smaller chains")


def _remedies(request: LayerRequest, most: int) -> str:
    """Single changes of options that allow a chain of at most ``most`` weights; may be empty."""
    ways = []
    for change, loosened in _loosened(request):
        chain, _ = smallest(
            request.size,
            loosened.rank,
            loosened.max_factors,
            loosened.constraints,
            visits=_REMEDY_VISITS,
        )
        if chain is not None and chain.nnz <= most:
            ways.append(
                f"{change} there is {chain} with {counted(chain.nnz, 'weight')} "
                f"({_share(chain, request.size)})"
            )
    text = "; ".join(ways)
    return text[:1].upper() + text[1:]


def _loosened(request: LayerRequest) -> Iterator[tuple[str, LayerRequest]]:
    """Descriptions of single loosened constraints, with the loosened requests."""
    if request.families:
        yield "without families", replace(request, families=())
    if request.constraints.block_sizes != ANY_SIZE:
        yield "without block_sizes", replace(request, block_sizes=None)
    if request.chainable:
        yield "without chainable=True", replace(request, chainable=False)
    if request.aligned:
        yield "without aligned=True", replace(request, aligned=False)
    if request.rank > 1:
        yield "with min_rank 1", replace(request, min_rank=1)
    if request.max_factors < MOST_FACTORS:
        yield f"with max_factors {MOST_FACTORS}", replace(request, max_factors=MOST_FACTORS)


def _share(chain: Chain, dims: Dims) -> str:
    # Rounded up: the suggested budget must suffice.
    percent = ceil(100 * 100 * chain.nnz / dims.dense_parameters) / 100
    return f"{percent:g}% of the dense layer"
