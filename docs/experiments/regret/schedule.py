"""The order of work: all searches, then the reference and the final of each size in turn.

So as many sizes as possible are complete whenever a run is cut off. Devices take different sizes
while there are any, then chunks of the same size's reference. Times of different devices of one
host are compared by their ratio to the dense layer timed beside them; the verdict rests on a final,
in one process on one device. When time runs out, incomplete sizes have an early final of the
measurements so far, which is repeated when there are more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

from ksopt.patterns.chain import Chain
from ksopt.search.layer_request import LayerRequest
from ksopt.search.samplers import priors
from regret.reference import Reference
from regret.rows import Book, Measured, Searched, Stage, TimedWay

CHUNK = 24
"""Chains that a device measures between two answers."""
FINALISTS = 3
"""The number of chains of each step, besides the recommended one, in the final."""

FINAL_S = 20.0
"""The approximate time of a final with the choice of its kernels, reserved at the end."""

Kind = Literal["search", "chains", "final"]


@dataclass(frozen=True)
class Unit:
    """A unit of work for a device.

    Args:
        kind: Of the work.
        dims: The size of the layer.
        chains: The chains to measure; empty for a search.
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
    """Assigns units to the devices' threads, and stores their results.

    Args:
        book: The measurements.
        requests: The search of each size, with batch resolved, in order.
        references: Of each size.
        times: A reference continues until it has held the device this many times as long as its
            search, or the space has no more chains.
    """

    book: Book
    requests: Mapping[str, LayerRequest]
    references: Mapping[str, Reference]
    times: float = 0.0
    _taken: set[Unit] = field(default_factory=set)
    _assigned: dict[str, set[Chain]] = field(default_factory=dict)
    _failed: set[tuple[Kind, str]] = field(default_factory=set)
    _at: dict[str, str] = field(default_factory=dict)  # the size that each device works on
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: bool = False
    _ending: bool = False

    def next(self, device: str = "") -> Unit | None:
        """The next unit of a device; waits for its prerequisites. None when all work has ended."""
        with self._changed:
            while not self._stopped:
                unit = self._ready(device)
                if unit is not None:
                    self._taken.add(unit)
                    if unit.kind != "search":
                        self._at[device] = unit.dims
                    self._assigned.setdefault(unit.dims, set()).update(
                        unit.chains if unit.kind == "chains" else ()
                    )
                    return unit
                if not self._taken:
                    return None
                self._changed.wait()
            return None

    def soon(self, unit: Unit) -> tuple[Chain, ...]:
        """The chains that are likely to follow a unit, to compile ahead."""
        with self._changed:
            return () if unit.kind != "chains" else self._chunk(unit.dims, 2 * CHUNK)[0]

    def stop(self) -> None:
        """Assign no further units."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def end_early(self) -> None:
        """Start no further search or chains, only finals of the measurements so far."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def finals_take_s(self, devices: int) -> float:
        """The approximate time that ``devices`` devices need for the remaining finals."""
        with self._changed:
            left = sum(
                bool(self.book.reference(dims)) and self._is_due(dims) for dims in self.requests
            )
            return ceil(left / devices) * FINAL_S

    def give_back(self, unit: Unit) -> None:
        """Return a unit that ended early; its remaining work is assigned again."""
        with self._changed:
            self._taken.discard(unit)
            self._assigned.get(unit.dims, set()).difference_update(unit.chains)
            self._changed.notify_all()

    def failed(self, unit: Unit) -> None:
        """Record a failed unit; it is repeated in the next run, not in this one."""
        with self._changed:
            self._taken.discard(unit)
            if unit.kind != "chains":  # assigned chains are not assigned again
                self._failed.add((unit.kind, unit.dims))
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether no further units are assigned."""
        return self._stopped

    def store(self, rows: Iterable[Measured], ways: Iterable[TimedWay] = ()) -> None:
        """Store partial results of a running unit."""
        with self._changed:
            self.book.add(rows, ways=ways)

    def done(
        self,
        unit: Unit,
        rows: Iterable[Measured] = (),
        searched: Searched | None = None,
        ways: Iterable[TimedWay] = (),
    ) -> None:
        """Store the results of a unit that has ended."""
        with self._changed:
            self.book.add(rows, searched, ways)
            self._taken.discard(unit)
            self._changed.notify_all()

    def row(self, dims: str, stage: Stage, values: Mapping[str, Any]) -> Measured | None:
        """The row of a device's answer for a chain; None if it is outside of all steps."""
        reference, chain = self.references[dims], Chain.parse(values["chain"])
        step = reference.step_of(chain)
        if step is None:
            return None
        rho, d_rho = priors.rhos(chain)
        fields = {**values, "factors_us": tuple(values.get("factors_us", ()))}
        return Measured(
            dims=dims,
            budget=step.budget.text,
            stage=stage,
            parameters=chain.nnz,
            rho=rho,
            d_rho=d_rho,
            predicted_us=reference.predictions.of_chain(chain),
            predicted_factors_us=reference.predictions.of_factors(chain),
            **fields,
        )

    def _ready(self, device: str) -> Unit | None:
        busy = {unit.dims for unit in self._taken if unit.kind == "search"}
        for dims in () if self._ending else self.requests:
            done = dims in self.book.searched or ("search", dims) in self._failed
            if not done and dims not in busy:
                return Unit("search", dims)
        for dims in self._order(device):
            chains, stage = self._chunk(dims, CHUNK)
            if chains and not self._ending:
                assigned = len(self._assigned.get(dims, ()))
                seed = assigned + len(self.book.reference(dims))
                return Unit("chains", dims, chains, stage, seed)
            pending = any(unit.dims == dims for unit in self._taken)
            if not pending and self._is_due(dims):
                finalists = self.finalists(dims)
                if finalists:
                    return Unit("final", dims, tuple(finalists), "final")
        return None

    def _order(self, device: str) -> list[str]:
        """The searched sizes: the device's own first, then those without another device."""
        own = self._at.get(device)
        others = {dims for other, dims in self._at.items() if other != device}
        searched = [dims for dims in self.requests if dims in self.book.searched]
        return sorted(searched, key=lambda dims: (dims != own, dims in others))

    def _is_due(self, dims: str) -> bool:
        """Whether a final would add to the last one."""
        if ("final", dims) in self._failed:
            return False
        measured, held = len(self.book.reference(dims)), self.book.final(dims)
        return measured > held[0].after if held else measured > 0 or not self._ending

    def _chunk(self, dims: str, count: int) -> tuple[tuple[Chain, ...], Stage]:
        reference = self.references[dims]
        rows = self.book.of(dims, "search", "uniform", "guided")
        done = {Chain.parse(row.chain) for row in rows} | self._assigned.get(dims, set())
        uniform = [chain for chain in reference.uniform if chain not in done]
        if uniform:
            return tuple(uniform[:count]), "uniform"
        left = self._left(dims)
        if left <= 0:
            return (), "guided"
        following = reference.guided(rows, count + len(self._assigned.get(dims, ())))
        chosen = [chain for chain in following if chain not in done]
        return tuple(chosen[: min(count, left)]), "guided"

    def _left(self, dims: str) -> int:
        """The number of chains that the guided half still needs, by its size and by its time.

        Running chains count as measured, at the mean time of a chain so far.
        """
        reference, rows = self.references[dims], self.book.reference(dims)
        known = {row.chain for row in rows}
        units = [unit for unit in self._taken if unit.dims == dims and unit.kind == "chains"]
        coming = sum(str(chain) not in known for unit in units for chain in unit.chains)
        guided = len(self.book.of(dims, "guided"))
        coming_guided = sum(
            str(chain) not in known
            for unit in units
            for chain in unit.chains
            if unit.stage == "guided"
        )
        left = reference.size - len(reference.uniform) - guided - coming_guided
        held = sum(row.seconds for row in rows)
        if self.times <= 0 or held <= 0:
            return left
        short_s = self.times * self.book.searched[dims].device_seconds - held
        return max(left, ceil(short_s / (held / len(rows))) - coming)

    def finalists(self, dims: str) -> list[Chain]:
        """The search's answers, and the best measured chains of each step."""
        chosen = [Chain.parse(text) for text in self.book.searched[dims].chosen.values() if text]
        rows = self.book.of(dims, "search", "uniform", "guided")
        for step in self.references[dims].space.steps:
            inside = [row for row in rows if step.holds(row.parameters) and row.ratio]
            inside = [row for row in inside if row.reason is None]
            best = sorted(inside, key=lambda row: row.ratio or 0.0)[:FINALISTS]
            chosen += [Chain.parse(row.chain) for row in best]
        return list(dict.fromkeys(chosen))
