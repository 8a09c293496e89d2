"""The candidates of a study: all chains that a request allows, or a sample if there are too many.

`ksopt.search.space.enumerate` defines the space.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from ksopt.errors import InvalidInputError
from ksopt.operators import registry
from ksopt.operators.base import StructuredOperator
from ksopt.operators.registry import KRONECKER, Replacement
from ksopt.patterns.chain import Chain
from ksopt.patterns.size import Budget, Dims
from ksopt.search.layer_request import LayerRequest
from ksopt.search.space.enumerate import Factors, TooManyError, Walk
from ksopt.search.space.named_families import families
from ksopt.search.space.smallest import no_chain
from ksopt.system.plurals import counted

# Maximal candidates for each number of factors and step: far more than a study measures. The
# fastest chains usually have two factors, and a GPU's search can estimate all of those.
_MOST_PER_STRATUM = 500
_MOST_OF_TWO_FACTORS = 20_000
# Choices in an enumeration before random descents replace it: about a second.
_MOST_VISITS = 100_000
# Random descents for each number of factors and step, and the maximal number of choices in one.
_MOST_DESCENTS = 1500
_MOST_VISITS_PER_DESCENT = 500


@dataclass(frozen=True)
class Step:
    """A step of the ladder, and the weights that count as using it.

    Args:
        budget: The step.
        least: The fewest weights of a chain that the step may recommend.
        requested: The fewest by the request's ``min_use``: more than ``least`` if no chain has that
            many, and the largest chains below are used instead.
    """

    budget: Budget
    least: int
    requested: int

    def holds(self, nnz: int) -> bool:
        """Whether a chain with ``nnz`` weights may be recommended for this step."""
        return self.least <= nnz <= self.budget.parameters


@dataclass(frozen=True)
class Space:
    """The chains that a study may draw, and operators of other structures.

    Args:
        dims: Size of the layer.
        steps: The steps that some chain meets.
        unmet: The other budgets.
        candidates: Chains that a step may recommend, fewest weights first.
        count: Chains within the largest budget, as far as they were enumerated.
        exact: Whether the enumeration was complete.
        complete: Whether the candidates are all that the steps may recommend, or a sample.
        left_out: Reasons why requested structures have no candidates, by name.
    """

    dims: Dims
    steps: tuple[Step, ...]
    unmet: tuple[Budget, ...]
    candidates: tuple[Replacement, ...]
    count: int
    exact: bool
    complete: bool
    left_out: Mapping[str, str] = field(default_factory=dict)


def build(request: LayerRequest) -> Space:
    """The space of a request.

    Chains are enumerated, and those that a step may recommend are candidates: up to 20,000 with two
    factors and 500 of each other number, drawn uniformly with the request's seed if there are more.
    If an enumeration would take more than about a second (three factors of dims with many divisors)
    they are drawn by random descents through the same tree of choices: every chain is possible, but
    not all are equally likely. No other chains are ever in memory. The named families are always
    included. Of each structure besides chains, up to 500 operators that run on the device and have
    the requested rank are candidates.

    Raises:
        InvalidInputError: No chain meets any step; the sentence names the smallest sufficient
            budget, or the constraints that exclude all chains.

    Example:
        >>> space = build(LayerRequest("64x64", budgets=("50%",), max_factors=2))
        >>> len(space.candidates), space.exact, str(space.candidates[0])
        (12, True, '(1,8,8,8)*(8,8,8,1)')
    """
    rng = random.Random(request.seed)
    pools = [_Pool(budget, request.min_use, rng) for budget in request.steps]
    count, exact = 0, True
    for factors in range(1, request.max_factors + 1 if KRONECKER in request.structures else 1):
        for pool in pools:
            pool.open_stratum(_most(factors))
        walk = Walk(
            request.size,
            request.steps[-1].parameters,
            request.rank,
            visits=_MOST_VISITS,
            constraints=request.constraints,
        )
        try:
            for patterns in walk.factors(factors):
                count += 1
                for pool in pools:
                    pool.offer(patterns)
        except TooManyError:
            exact = False
            for pool in pools:
                # The chains so far are the beginning of the tree, not a fair sample.
                pool.open_stratum(_MOST_PER_STRATUM)
                pool.draw(request, factors)
        for pool in pools:
            pool.close_stratum()
    if KRONECKER in request.structures:
        for _, chain in families(request):
            for pool in pools:
                pool.add(chain.patterns)
    left_out: dict[str, str] = {}
    for name in request.structures:
        if name != KRONECKER:
            offered, obstacle = _offer_structure(name, request, pools)
            count += offered
            left_out |= {name: obstacle} if obstacle else {}
    steps = tuple(step for pool in pools if (step := pool.step()) is not None)
    if not steps:
        if KRONECKER in request.structures:
            raise InvalidInputError(no_chain(request))
        raise InvalidInputError(
            f"budget {' or '.join(step.text for step in request.steps)}, dims {request.size}: "
            f"there is nothing to choose from; {'; '.join(_sentences(left_out))}"
        )
    selected = dict.fromkeys(
        map(_replacement, (one for pool in pools for one in pool.candidates()))
    )
    return Space(
        dims=request.size,
        steps=steps,
        unmet=tuple(pool.budget for pool in pools if pool.step() is None),
        candidates=tuple(sorted(selected, key=_order)),
        count=count,
        exact=exact,
        complete=exact and not any(pool.overflowed for pool in pools),
        left_out=left_out,
    )


def _sentences(left_out: Mapping[str, str]) -> list[str]:
    return [f"{name}: {obstacle}" for name, obstacle in left_out.items()]


def _offer_structure(
    name: str, request: LayerRequest, pools: Sequence[_Pool]
) -> tuple[int, str | None]:
    """Offer the operators of a structure that a request admits.

    Returns:
        Their number, and the reason if there are none.
    """
    size, count = request.size, 0
    for pool in pools:
        pool.open_stratum(_MOST_PER_STRATUM)
    every = list(registry.structure_of(name).candidates(size.in_features, size.out_features))
    refusals = {one: one.refusal(request.device, request.dtype) for one in every}
    running = [one for one, refusal in refusals.items() if refusal is None]
    admitted = [one for one in running if request.admits(one)]
    for operator in admitted:
        if operator.nnz <= request.steps[-1].parameters:
            count += 1
            for pool in pools:
                pool.offer(operator)
    for pool in pools:
        pool.close_stratum()
    if count:
        return count, None
    if admitted:
        least = min(one.nnz for one in admitted)
        share = 100 * least / size.dense_parameters
        counts = f"its smallest operator counts {counted(least, 'weight')}"
        return 0, f"{counts}, {share:.4g}% of the dense ones"
    if running:
        return 0, f"it has no operator of rank {request.min_rank} or more"
    return 0, next(iter(refusals.values()), f"it has no operator for a {size} layer")


def _replacement(candidate: Factors | StructuredOperator) -> Replacement:
    return Chain(candidate) if isinstance(candidate, tuple) else candidate


def _order(candidate: Replacement) -> tuple[int, bool, Chain | str]:
    """Sort key: fewest weights first; of equal ones, chains first."""
    if isinstance(candidate, Chain):
        return candidate.nnz, False, candidate
    return candidate.nnz, True, str(candidate)


def _nnz(candidate: Factors | StructuredOperator) -> int:
    if isinstance(candidate, tuple):
        return sum(pattern.nnz for pattern in candidate)
    return candidate.nnz


def _most(factors: int) -> int:
    return _MOST_OF_TWO_FACTORS if factors == 2 else _MOST_PER_STRATUM


class _Pool:
    """Collector of the candidates of one step, one stratum after the other.

    A stratum is the chains of one number of factors, or the operators of another structure.
    """

    def __init__(self, budget: Budget, min_use: float, rng: random.Random) -> None:
        self.budget = budget
        self.overflowed = False
        self._requested = ceil(min_use * budget.parameters)
        self._rng = rng
        self._selected: list[Factors | StructuredOperator] = []
        # The largest chains below the requested use, in case none reaches it.
        self._below: list[Factors | StructuredOperator] = []
        self._below_nnz = 0
        self.open_stratum(_MOST_PER_STRATUM)

    def open_stratum(self, most: int) -> None:
        self._most = most
        self._stratum: list[Factors | StructuredOperator] = []
        self._seen = 0

    def close_stratum(self) -> None:
        self._selected += self._stratum
        self.overflowed |= self._seen > len(self._stratum)
        self._stratum = []

    def offer(self, factors: Factors | StructuredOperator) -> None:
        """Select a chain with the same probability as all others of its stratum."""
        nnz = _nnz(factors)
        if nnz > self.budget.parameters:
            return
        if nnz < self._requested:
            if nnz > self._below_nnz:
                self._below, self._below_nnz = [], nnz
            if nnz == self._below_nnz and len(self._below) < self._most:
                self._below.append(factors)
            return
        self._seen += 1
        if len(self._stratum) < self._most:
            self._stratum.append(factors)
        elif (place := self._rng.randrange(self._seen)) < self._most:
            self._stratum[place] = factors

    def add(self, factors: Factors) -> None:
        """Select a chain, if the step may recommend it."""
        if (
            self._requested <= _nnz(factors) <= self.budget.parameters
            and factors not in self._selected
        ):
            self._selected.append(factors)

    def draw(self, request: LayerRequest, factors: int) -> None:
        """Offer chains that random descents find, each once."""
        drawn: set[Factors] = set()
        for _ in range(_MOST_DESCENTS):
            walk = Walk(
                request.size,
                self.budget.parameters,
                request.rank,
                rng=self._rng,
                visits=_MOST_VISITS_PER_DESCENT,
                constraints=request.constraints,
            )
            try:
                chain = next(walk.factors(factors), None)
            except TooManyError:
                continue
            if chain is not None and chain not in drawn:
                drawn.add(chain)
                self.offer(chain)
            if len(self._stratum) == self._most:
                break

    def candidates(self) -> Iterable[Factors | StructuredOperator]:
        return self._selected or self._below

    def step(self) -> Step | None:
        if self._selected:
            return Step(self.budget, self._requested, self._requested)
        if self._below:
            return Step(self.budget, self._below_nnz, self._requested)
        return None
