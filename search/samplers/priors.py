"""Priors: the chains to measure first, from the paper's families, its heuristic and the roofline.

They are enqueued before the sampler learns anything, and each answer of the report compares the
heuristic's pick with the fastest measured chain.
"""

from __future__ import annotations

import itertools

from ksopt.measure.roofline import Roofline
from ksopt.operators.registry import KRONECKER, Replacement, name_of, operator_of
from ksopt.patterns.chain import Chain
from ksopt.search.layer_request import LayerRequest
from ksopt.search.results import ChainFacts
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.space.named_families import families
from ksopt.search.space.space import Space

HEURISTIC = "largest rho"
_MOST_FAMILY_PRIORS = 4
_COST_MODEL_PRIORS = 2
# With a cost model: estimates from the first trials find more (docs/searching.md).
_FAMILY_PRIORS_BESIDE = 1


def facts(
    chain: Replacement,
    roofline: Roofline,
    batch: int,
    predicted_us: float | None = None,
    train: bool = False,
    siblings: int = 1,
) -> ChainFacts:
    """Properties of a chain that are known without measuring it.

    A step of training moves and multiplies three times what the product does: the gradients of the
    input and of the weights each move two of input, weights and output in, and one out. The floor
    of siblings is that of as many products.
    """
    nnz = chain.nnz
    rho, d_rho = rhos(chain)
    return ChainFacts(
        chain=chain,
        nnz=nnz,
        share=nnz / (chain.in_features * chain.out_features),
        rho=rho,
        d_rho=d_rho,
        floor_us=floor_us(chain, roofline, batch) * (3 if train else 1) * siblings,
        predicted_us=predicted_us,
    )


def floor_us(chain: Replacement, roofline: Roofline, batch: int) -> float:
    """The roofline's floor of a product, in microseconds; of a chain, the sum of its factors'."""
    if isinstance(chain, Chain):
        return roofline.chain_floor_us(chain, batch)
    operator = operator_of(chain)
    return roofline.floor_us(operator.bytes_moved(batch, roofline.dtype), operator.flops(batch))


def rhos(chain: Replacement) -> tuple[float, float]:
    """rho and d rho (paper, equation 2 and section 5), averaged over the factors by their weights.

    Another operator counts as one factor with d = 1: features read and written over weights.

    Example:
        >>> rhos(Chain.parse("(1,4,4,2)*(2,4,4,1)"))
        (0.5, 0.75)
    """
    nnz = chain.nnz
    if not isinstance(chain, Chain):
        rho = (chain.in_features + chain.out_features) / nnz
        return rho, rho
    rho = sum(pattern.nnz * pattern.rho for pattern in chain) / nnz
    return rho, sum(pattern.nnz * pattern.d_rho for pattern in chain) / nnz


def enqueued(
    space: Space,
    request: LayerRequest,
    roofline: Roofline,
    model: CostModel | None,
    seconds: float = 3.0,
) -> list[tuple[str, Replacement]]:
    """(origin, chain) in the order to measure them, each chain once, all candidates of the space.

    For each step: the largest rho (paper, equation 2), the lowest roofline floor, the two that the
    cost model, if there is one, predicts to be fastest, then the families with the most weights, at
    most four of them, or one with a cost model, and of each other structure the lowest floor. The
    cost model predicts the lowest floors first, for ``seconds`` per step. The steps take turns, so
    that a search that is stopped early has an answer for each.
    """
    assert request.batch is not None
    known = {chain: facts(chain, roofline, request.batch) for chain in space.candidates}
    named: dict[Replacement, str] = {chain: origin for origin, chain in families(request)}
    most = _MOST_FAMILY_PRIORS if model is None else _FAMILY_PRIORS_BESIDE
    picks: list[list[tuple[str, Replacement]]] = []
    for step in space.steps:
        inside = [chain for chain in space.candidates if step.holds(chain.nnz)]
        by_floor = sorted(inside, key=lambda chain: known[chain].floor_us)
        family = sorted((c for c in inside if c in named), key=lambda c: -c.nnz)
        chains = [chain for chain in inside if isinstance(chain, Chain)]
        chains.sort(key=lambda chain: -known[chain].rho)  # rho is meaningless for other structures
        others = {name_of(one): one for one in reversed(by_floor)}  # of each the first
        fast = [] if model is None else model.fastest(by_floor, _COST_MODEL_PRIORS, seconds)
        picks.append(
            [
                *((HEURISTIC, chain) for chain in chains[:1]),
                ("lowest floor", by_floor[0]),
                *(("cost model", chain) for chain in fast),
                *((named[chain], chain) for chain in family[:most]),
                *((name, one) for name, one in others.items() if name != KRONECKER),
            ]
        )
    origins: dict[Replacement, str] = {}
    for turn in itertools.zip_longest(*picks):
        for pick in turn:
            if pick is not None:
                origins.setdefault(pick[1], pick[0])
    return [(origin, chain) for chain, origin in origins.items()]
