"""What each device does next: searches first, then the references, then the finals.

Sizes are independent, so several devices work on several sizes at once, and on chunks of one size's
reference. Times of different devices of one host are compared by their ratio to the dense layer
timed beside them; the verdict rests on a final, in one process on one device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ksopt.pattern import Chain
from ksopt.search import priors
from ksopt.search.regret.reference import Reference
from ksopt.search.regret.rows import Book, Measured, Searched, Stage, TimedWay
from ksopt.search.request import SearchRequest

CHUNK = 24
"""Chains that a device measures between two answers."""
FINALISTS = 3
"""Chains of each step, beside the recommended one, that the final times."""

Kind = Literal["search", "chains", "final"]


@dataclass(frozen=True)
class Unit:
    """Something that a device is to do.

    Args:
        kind: What.
        dims: Of which size.
        chains: Which; empty for a search.
        stage: Of the reference.
        seed: Of inputs and weights.
    """

    kind: Kind
    dims: str
    chains: tuple[Chain, ...] = ()
    stage: Stage = "search"
    seed: int = 0


@dataclass
class Schedule:
    """Hands out units to the devices' threads, and keeps what they find.

    Args:
        book: What was measured.
        requests: The search of each size, largest first, with batch resolved.
        references: Of each size.
    """

    book: Book
    requests: Mapping[str, SearchRequest]
    references: Mapping[str, Reference]
    _taken: set[Unit] = field(default_factory=set)
    _given: dict[str, set[Chain]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: bool = False

    def next(self) -> Unit | None:
        """What to do now; waits for what it depends on. None when all is done, or it was ended."""
        with self._changed:
            while not self._stopped:
                unit = self._ready()
                if unit is not None:
                    self._taken.add(unit)
                    self._given.setdefault(unit.dims, set()).update(
                        unit.chains if unit.kind == "chains" else ()
                    )
                    return unit
                if not self._taken:
                    return None
                self._changed.wait()
            return None

    def soon(self, unit: Unit) -> tuple[Chain, ...]:
        """Chains that are likely to come after a unit, to be compiled meanwhile."""
        with self._changed:
            return () if unit.kind != "chains" else self._chunk(unit.dims, 2 * CHUNK)[0]

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def keep(self, rows: Iterable[Measured], ways: Iterable[TimedWay] = ()) -> None:
        """Keep some of what comes of a unit that is under way."""
        with self._changed:
            self.book.add(rows, ways=ways)

    def done(
        self,
        unit: Unit,
        rows: Iterable[Measured] = (),
        found: Searched | None = None,
        ways: Iterable[TimedWay] = (),
    ) -> None:
        """Keep what came of a unit that has ended."""
        with self._changed:
            self.book.add(rows, found, ways)
            self._taken.discard(unit)
            self._changed.notify_all()

    def row(self, dims: str, stage: Stage, values: Mapping[str, Any]) -> Measured | None:
        """What a device says of a chain, with what is known of it; None outside of all steps."""
        reference, chain = self.references[dims], Chain.parse(values["chain"])
        step = reference.step_of(chain)
        if step is None:
            return None
        rho, d_rho = priors.rhos(chain)
        given = {**values, "factors_us": tuple(values.get("factors_us", ()))}
        return Measured(
            dims=dims,
            budget=step.budget.text,
            stage=stage,
            parameters=chain.nnz,
            rho=rho,
            d_rho=d_rho,
            predicted_us=reference.predictions.of_chain(chain),
            predicted_factors_us=reference.predictions.of_factors(chain),
            **given,
        )

    def _ready(self) -> Unit | None:
        busy = {unit.dims for unit in self._taken if unit.kind == "search"}
        for dims in self.requests:
            if dims not in self.book.searched and dims not in busy:
                return Unit("search", dims)
        # The size that is furthest from its end, so that the devices end together.
        # What a search measures is not to be measured twice, so it comes first.
        searched = [dims for dims in self.requests if dims in self.book.searched]
        for dims in sorted(searched, key=self._left, reverse=True):
            chains, stage = self._chunk(dims, CHUNK)
            if chains:
                seed = len(self._given.get(dims, ())) + len(self.book.of(dims, "uniform", "guided"))
                return Unit("chains", dims, chains, stage, seed)
        for dims in self.requests:
            pending = any(unit.dims == dims for unit in self._taken)
            if dims in self.book.searched and not pending and not self.book.of(dims, "final"):
                finalists = self.finalists(dims)
                if finalists and not self._chunk(dims, 1)[0]:
                    return Unit("final", dims, tuple(finalists), "final")
        return None

    def _left(self, dims: str) -> float:
        """What is left to measure, in the dense layer's work."""
        measured = len(self.book.of(dims, "uniform", "guided"))
        size = self.requests[dims].size
        # A constant for what does not depend on the size: choosing, checking, launching.
        return (self.references[dims].size - measured) * (size.dense_parameters + 2e6)

    def _chunk(self, dims: str, count: int) -> tuple[tuple[Chain, ...], Stage]:
        reference = self.references[dims]
        rows = self.book.of(dims, "search", "uniform", "guided")
        done = {Chain.parse(row.chain) for row in rows} | self._given.get(dims, set())
        uniform = [chain for chain in reference.uniform if chain not in done]
        if uniform:
            return tuple(uniform[:count]), "uniform"
        guided = {Chain.parse(row.chain) for row in self.book.of(dims, "guided")}
        under_way = [unit for unit in self._taken if unit.dims == dims and unit.stage == "guided"]
        begun = len(guided) + sum(len(unit.chains) for unit in under_way)
        left = reference.size - len(reference.uniform) - begun
        if left <= 0:
            return (), "guided"
        following = reference.guided(rows, count + len(self._given.get(dims, ())))
        chosen = [chain for chain in following if chain not in done]
        return tuple(chosen[: min(count, left)]), "guided"

    def finalists(self, dims: str) -> list[Chain]:
        """The search's answers, and the best of each step in all that was measured."""
        chosen = [Chain.parse(text) for text in self.book.searched[dims].chosen.values() if text]
        rows = self.book.of(dims, "search", "uniform", "guided")
        for step in self.references[dims].space.steps:
            inside = [row for row in rows if step.holds(row.parameters) and row.ratio]
            inside = [row for row in inside if row.reason is None]
            best = sorted(inside, key=lambda row: row.ratio or 0.0)[:FINALISTS]
            chosen += [Chain.parse(row.chain) for row in best]
        return list(dict.fromkeys(chosen))


def largest_first(requests: Sequence[SearchRequest]) -> dict[str, SearchRequest]:
    """Requests by their dims, the one that takes longest first."""
    ranked = sorted(requests, key=lambda request: -request.size.dense_parameters)
    return {str(request.size): request for request in ranked}
