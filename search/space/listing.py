"""Counting and listing of the chains of a space, without measuring."""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.patterns.pattern import Pattern
from ksopt.patterns.size import Budget
from ksopt.patterns.validate import checked_int
from ksopt.report import tables
from ksopt.report.tables import Table
from ksopt.search.layer_request import LayerRequest
from ksopt.search.report import phrases
from ksopt.search.space.enumerate import Factors, TooManyError, Walk
from ksopt.system.plurals import counted
from ksopt.system.suggest import nearest

SCHEMA = "ksopt.space/1"
ORDERS = ("weights", "most-weights", "rho")

# Only listed chains are stored in memory.
MOST_LISTED = 100_000


@dataclass(frozen=True)
class Count:
    """Number of chains with a number of factors.

    Args:
        factors: Number of factors.
        chains: Number of chains, as far as they were enumerated.
        exact: Whether the enumeration was complete.
    """

    factors: int
    chains: int
    exact: bool


@dataclass(frozen=True)
class Listing:
    """Size of a space, and its first chains in some order.

    Args:
        request: The constraints; of its budgets only the largest counts.
        order: The order of the chains.
        counts: One for each number of factors.
        chains: The first chains of those that were counted.
    """

    request: LayerRequest
    order: str
    counts: tuple[Count, ...]
    chains: tuple[Chain, ...]

    @property
    def budget(self) -> Budget:
        """The largest budget, which is the limit."""
        return self.request.steps[-1]

    @property
    def total(self) -> int:
        """Number of counted chains."""
        return sum(count.chains for count in self.counts)

    @property
    def exact(self) -> bool:
        """Whether all chains were counted."""
        return all(count.exact for count in self.counts)

    @property
    def sentence(self) -> str:
        """The count as a sentence."""
        request = self.request
        more = "" if self.exact else "more than "
        text = (
            f"{phrases.layer(request.size)}: {more}{counted(self.total, 'chain')} of at most "
            f"{counted(request.max_factors, 'factor')}, "
            f"{counted(self.budget.parameters, 'weight')} "
            f"({self.budget.text}) and rank bound {request.rank} or more"
        )
        parts = [
            f"{'' if count.exact else 'more than '}{count.chains:,} of {count.factors}"
            for count in self.counts
        ]
        text = ", ".join([text, *request.constraints.words])
        return f"{text} ({', '.join(parts)})."

    def table(self) -> Table:
        """Table of the listed chains; those with equal properties share a line."""
        alike: dict[tuple[object, ...], list[Chain]] = {}
        for chain in self.chains:
            known = (len(chain), chain.nnz, f"{_rho(chain.patterns):.4f}", chain.rank_bound)
            alike.setdefault(known, []).append(chain)
        rows = [
            [
                str(chains[0]),
                f"{len(chains) - 1:,}" if len(chains) > 1 else "",
                f"{chains[0].nnz:,}",
                phrases.percent(chains[0].nnz / self.request.size.dense_parameters),
                f"{_rho(chains[0].patterns):.4f}",
                f"{chains[0].rank_bound:,}",
            ]
            for chains in alike.values()
        ]
        heads = ("chain", ">others alike", ">weights", ">of dense", ">rho", ">rank bound")
        return tables.of(heads, rows)

    def to_json(self) -> str:
        """The listing as JSON, with the schema "ksopt.space/1"."""
        size = self.request.size
        value = {
            "schema": SCHEMA,
            "in_features": size.in_features,
            "out_features": size.out_features,
            "parameters": self.budget.parameters,
            "min_rank": self.request.rank,
            "families": list(self.request.families),
            "block_sizes": self.request.block_sizes,
            "chainable": self.request.chainable,
            "aligned": self.request.aligned,
            "dtype": self.request.dtype,
            "layout": self.request.layout,
            "train": self.request.train,
            "count": self.total,
            "exact": self.exact,
            "counts": [vars(count) for count in self.counts],
            "order": self.order,
            "chains": [
                {
                    "chain": str(chain),
                    "patterns": [list(pattern.weight_shape) for pattern in chain],
                    "parameters": chain.nnz,
                    "share_of_dense": chain.nnz / size.dense_parameters,
                    "rho": _rho(chain.patterns),
                    "rank_bound": chain.rank_bound,
                }
                for chain in self.chains
            ],
        }
        return json.dumps(value, indent=2) + "\n"


def listing(
    request: LayerRequest, limit: int = 20, order: str = "weights", visits: int = 500_000
) -> Listing:
    """Count the chains of a space, and list the first of them.

    Args:
        request: dims, budgets (the largest is the limit), max_factors, min_rank, families,
            block_sizes and chainable; aligned, which depends on dtype, layout and train.
        limit: Maximal number of listed chains; no more are ever in memory.
        order: "weights" (fewest first), "most-weights" or "rho" (largest first).
        visits: Maximal number of choices of the enumeration for each number of factors. If they do
            not suffice the count is a lower bound, and the list is of counted chains.

    Raises:
        InvalidInputError: A value is not allowed.

    Example:
        >>> space = listing(LayerRequest("12x8", budgets=("60%",), max_factors=2))
        >>> space.total, space.exact, [str(chain) for chain in space.chains]
        (2, True, ['(1,4,4,2)*(4,2,3,1)', '(2,4,4,1)*(1,2,3,4)'])
    """
    checked_int(limit, "limit", "space", minimum=0)
    checked_int(visits, "visits", "space")
    if limit > MOST_LISTED:
        raise InvalidInputError(f"limit {limit}: at most {MOST_LISTED:,} chains are listed")
    if order not in ORDERS:
        raise InvalidInputError(
            f"order {order!r} is unknown: it can be {', '.join(ORDERS)}{nearest(order, ORDERS)}"
        )
    first: list[tuple[float, Factors]] = []
    counts = []
    for factors in range(1, request.max_factors + 1):
        walk = Walk(
            request.size,
            request.steps[-1].parameters,
            request.rank,
            visits=visits,
            constraints=request.constraints,
        )
        count, exact = 0, True
        # Runs of chains are merged into the list of the first ones, so that it stays short.
        run: list[tuple[float, Factors]] = []
        try:
            for chain in walk.factors(factors):
                count += 1
                run.append((_key(chain, order), chain))
                if len(run) > 2 * limit + 1000:
                    first, run = heapq.nsmallest(limit, first + run), []
        except TooManyError:
            exact = False
        first = heapq.nsmallest(limit, first + run)
        counts.append(Count(factors, count, exact))
    return Listing(request, order, tuple(counts), tuple(Chain(chain) for _, chain in first))


def _key(factors: Factors, order: str) -> float:
    if order == "rho":
        return -_rho(factors)
    weights = sum(pattern.nnz for pattern in factors)
    return weights if order == "weights" else -weights


def _rho(factors: tuple[Pattern, ...]) -> float:
    weights = sum(pattern.nnz for pattern in factors)
    return sum(pattern.nnz * pattern.rho for pattern in factors) / weights
