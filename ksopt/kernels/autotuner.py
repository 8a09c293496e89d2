"""From a situation to a decision: ways timed against each other, or built again from a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ksopt.errors import KsoptError, UnavailableError
from ksopt.kernels import registry, tuning_cache, weight_scopes
from ksopt.kernels.families.base import Machine
from ksopt.kernels.launcher import Enterable, Entry
from ksopt.kernels.problem_key import Situation
from ksopt.kernels.registry import Call, Way
from ksopt.kernels.tuning_cache import Record, Timed
from ksopt.measure import interleaved
from ksopt.measure.interleaved import Contender

Source = Literal["measured", "recorded", "model", "rule"]
Accept = Callable[[Tensor], str | None]

_FEW_ROWS = 128
# Of these cuBLAS may add partial sums in 16 bit, in some shapes: PyTorch's ways are checked, too.
_16_BIT = ("float16", "bfloat16")
# Products of a few rows in a sample, and what their weights may take together as dense matrices,
# which is the most that preparing makes of them.
_SERIES, _SERIES_BYTES = 8, 2**28


@dataclass(frozen=True)
class Choice:
    """A way to multiply, and why it was taken.

    Attributes:
        way: which, with its configuration.
        call: (x, weight) -> y.
        source: measured just now, recorded on disk, predicted by the model, or by a fixed rule.
        record: what was measured, now or then; None if nothing was.
    """

    way: Way
    call: Call
    source: Source
    record: Record | None = None

    @property
    def name(self) -> str:
        """A kernel family's name, ``general`` or the name of one of PyTorch's ways."""
        return self.way.name

    @property
    def times_us(self) -> tuple[tuple[str, float], ...]:
        """Measured median of every way in microseconds; empty if none was timed."""
        timed = () if self.record is None else self.record.timed
        return tuple((one.way, one.median_us) for one in timed)


@dataclass(frozen=True)
class Decision:
    """The choice for weights whose preparation is kept, and the one for weights that change."""

    kept: Choice
    changing: Choice


def measured(
    found: Situation,
    x: Tensor,
    weight: Tensor,
    machine: Machine | None,
    budget_s: float,
    accept: Accept,
    previous: Record | None = None,
) -> Decision:
    """Build and time the ways that are worth it.

    Args:
        found: the situation.
        x: (*batch, N), or (N, *batch) when batch_last, of that situation.
        weight: (a, b, c, d).
        machine: the device; None where its driver cannot be asked.
        budget_s: seconds for the timing; compilation comes on top.
        accept: says what is wrong with a result, or None; a kernel with a wrong result is not
            timed and cannot be chosen.
        previous: what was recorded before: its choice stays where it is not beaten.

    Raises:
        UnavailableError: no way could be built and run.
    """
    candidates = registry.candidates(found.problem, _rows(found, x), machine)
    built = registry.built(candidates, x.get_device(), found.rows)
    # Copies, whose prepared forms go with them; ordinary ones, also where the weight is not.
    with torch.inference_mode(False), torch.no_grad():
        copies = [weight.detach().clone() for _ in range(_products(found, weight))]
    built = [(way, call) for way, call in built if _is_right(way, call, x, copies[0], accept)]
    entries = [
        _Entry(way, call, weight_is, x, copies)
        for way, call in built
        for weight_is in _weights_timed(way, copies[0])
    ]
    with weight_scopes.changing(False):
        interleaved.race([entry.contender for entry in entries], x.device, budget_s)
    entries = [entry for entry in entries if entry.contender.samples_us]
    if not entries:
        raise UnavailableError(
            f"no way to multiply by {found.problem.pattern} ran on this device; the warnings above "
            "say why"
        )
    ran = [entry.contender for entry in entries]
    record = Record(
        found,
        _rows(found, x),
        tuple(entry.timed() for entry in entries),
        kept=interleaved.winner(ran, "kept", _previous(previous, "kept")),
        changing=interleaved.winner(ran, "changing", _previous(previous, "changing")),
    )
    made = {
        index: Choice(entries[index].way, entries[index].call, "measured", record)
        for index in {record.kept, record.changing}
    }
    # One object for both where one way serves both, so that nobody need ask which.
    return Decision(made[record.kept], made[record.changing])


class _Entry:
    """A way in the race, with its weight kept or prepared anew."""

    def __init__(
        self,
        way: Way,
        call: Call,
        weight_is: tuning_cache.Weight,
        x: Tensor,
        weights: Sequence[Tensor],
    ) -> None:
        self.way = way
        self.call = _preparing(call, weight_is)
        series = partial(_multiply, self.call, x, weights)
        self.contender = Contender(way.label, series, _LEAGUES[weight_is], products=len(weights))
        self._weight_is = weight_is

    def timed(self) -> Timed:
        raced, way = self.contender, self.way
        p20_us, p80_us = raced.quantile_us(0.2), raced.quantile_us(0.8)
        return Timed(
            way=way.name,
            config=way.config,
            weight=self._weight_is,
            predicted_us=way.predicted_us,
            median_us=raced.median_us,
            p20_us=p20_us,
            p80_us=p80_us,
            host_us=raced.host_us if raced.launches_us else None,
        )


def _multiply(call: Call, x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        call(x, weight)


def _products(found: Situation, weight: Tensor) -> int:
    """How many products by weights of their own make a sample: see measure.py."""
    if found.largest_batch > _FEW_ROWS:
        return 1
    p = found.problem.pattern
    dense_bytes = p.in_features * p.out_features * weight.element_size()
    return max(1, min(_SERIES, _SERIES_BYTES // dense_bytes))


def _rows(found: Situation, x: Tensor) -> int:
    return x.numel() // found.problem.pattern.in_features


def _is_right(way: Way, call: Call, x: Tensor, weight: Tensor, accept: Accept) -> bool:
    if (
        way.name == registry.rule(way.problem).name
    ):  # the last resort, and the measure of what is right
        return True
    if way.is_pytorch and way.problem.dtype not in _16_BIT:
        return True
    try:
        y = call(x, weight)
    except RuntimeError:  # no memory, too many registers: the race says so
        return True
    wrong = accept(y)
    if wrong is not None and not way.is_pytorch:
        registry.warn_once(f"{way.label} for {way.problem.pattern} is left out: {wrong}")
    return wrong is None


_LEAGUES: dict[tuning_cache.Weight, frozenset[str]] = {
    "any": frozenset({"kept", "changing"}),
    "fresh": frozenset({"kept", "changing"}),
    "kept": frozenset({"kept"}),
}


def _weights_timed(way: Way, weight: Tensor) -> Sequence[tuning_cache.Weight]:
    # Of two that are not told apart the first is taken: kept, for what preparing takes is paid at
    # every product: with fresh first (2,768,768,16) took 5 % longer in fp16, batch last.
    puts_in_order = way.tile is not None and not weight.is_contiguous()
    return ("kept", "fresh") if way.prepares or puts_in_order else ("any",)


def _preparing(call: Call, weight_is: tuning_cache.Weight) -> Call:
    """The way as it was, or is to be, timed."""
    return _Fresh(call) if weight_is == "fresh" else call


@dataclass(frozen=True)
class _Fresh:
    """A way that prepares its weight at each call."""

    call: Call

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        with weight_scopes.changing():
            return self.call(x, weight) if out is None else self.call(x, weight, out)

    def entry(self) -> Entry | None:
        """What the host library needs to do so: it makes matrices, and puts elements in order."""
        entry = self.call.entry() if isinstance(self.call, Enterable) else None
        if entry is not None and entry.batched:
            return replace(entry, anew=True)
        return entry if entry is not None and entry.anew else None


def _previous(record: Record | None, league: str) -> str | None:
    return None if record is None else record.chosen(league == "changing").label


def rebuilt(record: Record, device: int, machine: Machine | None) -> Decision | None:
    """What was recorded, built again without timing; None if it is no longer possible.

    Args:
        record: of this device.
        device: CUDA device index.
        machine: the device; None where its driver cannot be asked.
    """
    problem = record.situation.problem
    made: dict[int, Choice] = {}
    for index in {record.kept, record.changing}:
        chosen = record.timed[index]
        way = registry.restored(problem, chosen.way, chosen.config, record.batch, machine)
        if way is None:
            return None
        try:
            call = _preparing(way.build(device, record.situation.rows), chosen.weight)
        except KsoptError as error:
            registry.warn_once(str(error))
            return None
        made[index] = Choice(way, call, "recorded", record)
    return Decision(made[record.kept], made[record.changing])
