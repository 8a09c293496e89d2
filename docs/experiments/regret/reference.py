"""The chains that the reference measures: half drawn uniformly, half estimated to be fastest.

Where a space is too large to list, a search draws from a sample of it. The reference has samples of
its own, of other seeds, so that it can find chains that the search's sample lacks. The uniform
half, drawn from the first of them, shows how well predictions rank the whole space. The other half
looks for the best chains in all samples: a chain's time is estimated as the sum of its factors'
times, measured beside another chain if possible, else predicted and corrected by the ratio of
measurements to predictions. The estimate improves with each measurement, and needs no device.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Chain, Pattern
from ksopt.search.layer_request import LayerRequest
from ksopt.search.options import SEEDS
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.samplers.factor_times import estimates, factor_times, overlaps_us
from ksopt.search.space.space import Space, Step, build
from regret.rows import Measured

# Patterns that one process predicts at a time.
_PREDICTED_TOGETHER = 200
# Samples of the reference: with one, all candidates of 384x384 and 4096x4096 were measured before
# they had held the device for ten times as long as the search.
_SAMPLES = 3


def chains_of(candidates: Iterable[object]) -> tuple[Chain, ...]:
    """The chains among a space's candidates."""
    return tuple(one for one in candidates if isinstance(one, Chain))


def predicted(
    patterns: Sequence[Pattern], machine: DeviceSpec, dtype: str, batch: int, batch_last: bool
) -> list[float | None]:
    """The cost model's times in microseconds; runs in a separate process."""
    model = CostModel(machine, dtype, batch, batch_last)
    return [model.predicted_us(Chain((pattern,))) for pattern in patterns]


@dataclass
class Predictions:
    """The cost model's times of all factors of a space, computed by other processes."""

    _coming: list[tuple[Sequence[Pattern], Future[list[float | None]]]] = field(
        default_factory=list
    )
    _known: dict[Pattern, float | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # each device has a thread

    @classmethod
    def of(
        cls,
        chains: Iterable[Chain],
        request: LayerRequest,
        machine: DeviceSpec | None,
        pool: Executor | None,
    ) -> Predictions:
        """Submit the predictions to a pool; without a pool or machine, nothing is predicted."""
        if pool is None or machine is None:
            return cls()
        assert request.batch is not None
        patterns = sorted({pattern for chain in chains for pattern in chain})
        last = request.layout == "batch_last"
        parts = [
            patterns[at : at + _PREDICTED_TOGETHER]
            for at in range(0, len(patterns), _PREDICTED_TOGETHER)
        ]
        return cls(
            [
                (part, pool.submit(predicted, part, machine, request.dtype, request.batch, last))
                for part in parts
            ]
        )

    def factors_us(self) -> Mapping[Pattern, float | None]:
        """The times of all factors; waits for those that are not computed yet."""
        with self._lock:
            for part, future in self._coming:
                self._known.update(zip(part, future.result(), strict=True))
            self._coming.clear()
        return self._known

    def of_factors(self, chain: Chain) -> tuple[float | None, ...]:
        """The time of each factor; None if it was not predicted."""
        known = self.factors_us()
        return tuple(known.get(pattern) for pattern in chain)

    def of_chain(self, chain: Chain) -> float | None:
        """The time of a chain; None if it was not predicted."""
        times = self.of_factors(chain)
        return None if None in times else sum(us for us in times if us is not None)


@dataclass(frozen=True)
class Reference:
    """The reference of one layer size.

    Args:
        space: Of the search.
        predictions: Of all factors.
        size: Number of chains to measure, besides the search's own.
        seed: Of the uniform half.
        others: The candidates of another seed; the search's own if they are complete.
        more: The candidates of further seeds, used if those are not enough.
    """

    space: Space
    predictions: Predictions
    size: int
    seed: int
    others: tuple[Chain, ...]
    more: tuple[Chain, ...] = ()

    @classmethod
    def of(
        cls,
        request: LayerRequest,
        machine: DeviceSpec | None,
        pool: Executor | None,
        size: int,
        seed: int,
    ) -> Reference:
        """The reference for a request with its batch resolved."""
        ways = [request, *(replace(request, seed=(seed + n) % SEEDS) for n in range(_SAMPLES))]
        listed = map(build, ways) if pool is None else pool.map(build, ways)
        space, other, *further = listed
        others = chains_of(space.candidates if space.complete else other.candidates)
        more = () if space.complete else chains_of(c for one in further for c in one.candidates)
        chains = {*chains_of(space.candidates), *others, *more}
        predictions = Predictions.of(chains, request, machine, pool)
        return cls(space, predictions, size, seed, others, more)

    def step_of(self, chain: Chain) -> Step | None:
        """The smallest step of the ladder that a chain is a candidate of; None without one."""
        return next((step for step in self.space.steps if step.holds(chain.nnz)), None)

    @functools.cached_property
    def _all(self) -> tuple[Chain, ...]:
        """The candidates of all samples."""
        return tuple(dict.fromkeys([*chains_of(self.space.candidates), *self.others, *self.more]))

    def _strata(self, chains: Sequence[Chain]) -> list[list[Chain]]:
        """The chains of each step."""
        strata: dict[Step, list[Chain]] = {step: [] for step in self.space.steps}
        for chain in chains:
            step = self.step_of(chain)
            if step is not None:
                strata[step].append(chain)
        return list(strata.values())

    @functools.cached_property
    def uniform(self) -> list[Chain]:
        """Uniformly drawn chains, equally many of every step, the steps in turns."""
        rng = random.Random(self.seed)
        each = self.size // 2 // len(self.space.steps)
        drawn = [rng.sample(inside, min(each, len(inside))) for inside in self._strata(self.others)]
        longest = max(map(len, drawn), default=0)
        turns = [chains[at] for at in range(longest) for chains in drawn if at < len(chains)]
        return list(dict.fromkeys(turns))

    def guided(self, measured: Sequence[Measured], count: int) -> list[Chain]:
        """The chains estimated to be fastest among the remaining ones, the steps in turns."""
        done = {Chain.parse(row.chain) for row in measured}
        estimate = self._estimates(measured)
        ranked = []
        for inside in self._strata(self._all):
            left = [chain for chain in inside if chain not in done and chain in estimate]
            ranked.append(sorted(left, key=lambda chain: estimate[chain]))
        longest = max(map(len, ranked), default=0)
        turns = [chains[at] for at in range(longest) for chains in ranked if at < len(chains)]
        return turns[:count]

    def _estimates(self, measured: Sequence[Measured]) -> dict[Chain, float]:
        times = factor_times((Chain.parse(row.chain), row.factors_us) for row in measured)
        timed = [(row.latency_us, row.factors_us) for row in measured if row.latency_us is not None]
        times_us = estimates(self._all, times, self.predictions.factors_us(), overlaps_us(timed))
        if not times_us:  # no cost model, as on a CPU: rank by data moved and flops
            return {
                chain: chain.flops(1) + 8.0 * sum(sum(pattern.shape) for pattern in chain)
                for chain in self._all
            }
        return times_us
