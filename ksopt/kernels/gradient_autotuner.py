"""The choice of a gradient's kernel, by the rules of decisions.py.

The families that compute a gradient, and the way without them, race once on operands of the call's
shapes; the tuning cache stores the result. The operators ask before there is anything to time, too:
of fake tensors, while a graph is traced. What is recorded answers then, else the predicted times.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ksopt import precision, settings
from ksopt.errors import KsoptError
from ksopt.jit import host
from ksopt.kernels import decisions, registry, tuning_cache
from ksopt.kernels.autotuner import Source
from ksopt.kernels.backends.base import DeviceBackend, backend_of
from ksopt.kernels.decisions import Decider
from ksopt.kernels.families.gradient_base import (
    GradientFamily,
    GradientProblem,
    gradient_families,
)
from ksopt.kernels.gradient_record import GradientKey, GradientRecord
from ksopt.kernels.problem import SIXTEEN_BIT, DeviceSpec, bits_of
from ksopt.kernels.tuning_cache import Timed
from ksopt.measure.accuracy import fault_against
from ksopt.measure.benchmark_entry import BenchmarkEntry
from ksopt.measure.device_types import type_of
from ksopt.measure.interleaved import BUDGET_S, candidate_rules, race, winner

# How many kernels are compiled and timed, and how far their predicted times may be from the best:
# the cost models are within 24 % of what was measured (docs/development/training.md).
_MOST_KERNELS, _NEAR = 5, 1.5
_RANKED = 64  # tiles whose predictions are stored

Results = Sequence[Tensor | None]
Operand = Tensor | list[Tensor]
Size = tuple[int, ...]
"""Of a tensor."""


@dataclass(frozen=True)
class Without:
    """The way to compute a gradient without its kernels.

    Attributes:
        name: in records.
        predicted_us: microseconds.
        call: (the kernels' operands) -> their results.
        reference: the same by PyTorch alone, in any dtype.
    """

    name: str
    predicted_us: float
    call: Callable[..., Results]
    reference: Callable[..., Results]


@dataclass(frozen=True)
class GradientCandidate:
    """A launch of a family.

    Attributes:
        family: of kernels.
        launch: for a number of rows.
        predicted_us: by its cost model.
    """

    family: GradientFamily[Any]
    launch: Any
    predicted_us: float

    @property
    def tile(self) -> Any:
        """The tile of the launch."""
        return self.family.tile(self.launch)


@dataclass(frozen=True)
class GradientChoice:
    """The tile that computes a gradient, and why it was taken.

    Attributes:
        family: None: the way without kernels.
        tile: of the family.
        source: as of `autotuner.Choice`.
        record: what was measured, now or then; None if nothing was.
    """

    family: GradientFamily[Any] | None
    tile: Any
    source: Source
    record: GradientRecord | None = None


@dataclass(frozen=True)
class GradientQuestion:
    """A gradient to be decided on a device.

    Attributes:
        problem: the gradient.
        rows: of the operands.
        device: where it is computed, with its index.
        spec: of the device.
        without: the way without kernels.
        shapes: of the operands; of one that is several tensors, of each.
    """

    problem: GradientProblem
    rows: int
    device: torch.device
    spec: DeviceSpec
    without: Without
    shapes: tuple[Size | tuple[Size, ...], ...]

    @property
    def key(self) -> GradientKey:
        """The key of the decision's record."""
        return GradientKey(self.problem, bits_of(self.rows))

    @property
    def backend(self) -> DeviceBackend:
        """The backend of the device."""
        return backend_of(self.device.type)

    def is_open(self) -> bool:
        """Whether any kernel may be faster."""
        return bool(self._near())

    def rule(self) -> GradientChoice:
        """No kernel."""
        return GradientChoice(None, None, "rule")

    def predicted(self) -> GradientChoice:
        """The best predicted tile, if it is predicted to be faster."""
        best = fastest(self.problem, self.rows, self.spec, self.without.predicted_us)
        if best is None:
            return GradientChoice(None, None, "model")
        return GradientChoice(best.family, best.tile, "model")

    def recorded(self) -> GradientChoice | None:
        """The decision on disk; None if there is none, or its tile does not exist here."""
        return _recorded(self.key, self.device)

    def first(self) -> GradientChoice:
        """The recorded decision; else a measured one, unless another process measures meanwhile."""
        identity = decisions.identity_of(self.device, self.backend)
        return decisions.recorded_or_raced(
            identity, self.key, self.recorded, self._raced, _record_of
        )

    def _drawn(self, dtype: torch.dtype) -> list[Operand]:
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(size: Any) -> Operand:
            if size and isinstance(size[0], tuple):
                return [torch.randn(one, **how) for one in size]
            return torch.randn(size, **how)

        how: Any = {"generator": generator, "device": self.device, "dtype": dtype}
        return [draw(size) for size in self.shapes]

    def _near(self) -> list[GradientCandidate]:
        several = ranked(self.problem, self.rows, self.spec)
        limit = _NEAR * min([self.without.predicted_us, *(one.predicted_us for one in several)])
        return [one for one in several if one.predicted_us <= limit]

    def _raced(self) -> GradientChoice:
        """Time the kernels near the best whose results are right, and the way without if near.

        A launch for each factor has products of its own to decide on first: tens of kernels. The
        operands are drawn, because gradients may overflow, as the first ones of a scaled loss do.
        """
        dtype = getattr(torch, self.problem.dtype)
        operands = self._drawn(dtype)
        wide = torch.float32 if self.problem.dtype in SIXTEEN_BIT else torch.float64
        with precision.fp32_products("ieee"):
            truth = self.without.reference(*tree_map(lambda one: one.to(wide), operands))
        plain = self.without.reference(*operands)
        entries: list[BenchmarkEntry] = []
        competitors: list[GradientCandidate | None] = []
        near = self._near()
        for one, kernel in _built(self.problem, near[:_MOST_KERNELS], self.device.index):
            label = f"{one.family.name}({one.tile})"
            wrong = _fault(partial(kernel, *operands), plain, truth, torch.finfo(dtype).eps / 2)
            if wrong is None:
                entries.append(BenchmarkEntry(label, partial(kernel, *operands)))
                competitors.append(one)
            else:
                registry.warn_once(f"{label} for {self.problem} is left out: {wrong}")
        if not entries or self.without.predicted_us <= _NEAR * near[0].predicted_us:
            call = partial(self.without.call, *operands)
            call()  # what it decides itself is decided before it races
            entries.insert(0, BenchmarkEntry(self.without.name, call))
            competitors.insert(0, None)
        timer = type_of(self.device).race_timer(self.device)
        results = race(entries, timer, candidate_rules(BUDGET_S))
        ran = [it for it in zip(competitors, results, strict=True) if it[1].measurement is not None]
        timed = [
            Timed.of(result, self.without.name, "any", None, self.without.predicted_us)
            if one is None
            else Timed.of(result, one.family.name, "any", asdict(one.tile), one.predicted_us)
            for one, result in ran
        ]
        # The host's time is not compared: that of kernels is Python's here, and no call's later.
        chosen = winner([replace(result, host_us=math.inf) for _, result in ran], "all")
        record = GradientRecord(self.key, self.rows, tuple(timed), chosen)
        best = ran[chosen][0]
        family, tile = (None, None) if best is None else (best.family, best.tile)
        return GradientChoice(family, tile, "measured", record)


def _fault(
    call: Callable[[], Results], plain: Results, truth: Results, rounding: float
) -> str | None:
    try:
        results = call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"it does not run here: {error}"
    for result, pytorch, exact in zip(results, plain, truth, strict=True):
        if result is not None and pytorch is not None and exact is not None:
            wrong = fault_against(result, pytorch, exact.double(), rounding)
            if wrong is not None:
                return wrong
    return None


def _built(
    problem: GradientProblem, several: Sequence[GradientCandidate], device_index: int
) -> list[tuple[GradientCandidate, Callable[..., Results]]]:
    """The candidates that can be built here, compiled in parallel."""
    with ThreadPoolExecutor() as pool:
        kernels = list(pool.map(lambda one: loaded(problem, one, device_index), several))
    return [it for it in zip(several, kernels, strict=True) if it[1] is not None]


_decider: Decider[tuple[GradientKey, torch.device], GradientChoice] = Decider(threading.RLock())
# Its lock may be taken again: the gradients of factors are chosen before a launch for both races.


def kernel_of(question: GradientQuestion) -> tuple[Any, bool]:
    """The loaded kernel that is chosen, decided now if it is not yet.

    Returns:
        It, or None for the way without kernels; and whether later calls may use it.
    """
    choice, is_final = _decider.decide((question.key, question.device), question)
    launch = _launch_of(choice, question.problem, question.rows, question.spec)
    kernel = None if launch is None else loaded(question.problem, launch, question.device.index)
    return kernel, is_final


def expected(
    problem: GradientProblem, rows: int, device: torch.device, without_us: float
) -> GradientCandidate | None:
    """The launch that is expected to be chosen, of fakes too; None: the way without kernels.

    What was measured decides, else the predicted times.

    Args:
        problem: the gradient.
        rows: of the operands.
        device: where.
        without_us: predicted microseconds of the way without kernels.
    """
    spec = spec_of(device)
    if spec is None or rows == 0:
        return None
    key = GradientKey(problem, bits_of(rows))
    choice = _known(key, decisions.with_index(device)) if _is_measured() else None
    if choice is None:
        return fastest(problem, rows, spec, without_us)
    return _launch_of(choice, problem, rows, spec)


def spec_of(device: torch.device) -> DeviceSpec | None:
    """The spec that kernels must fit; None where no kernel may be used."""
    if device.type != "cuda" or settings.tuning() == "off":
        return None
    return backend_of("cuda").spec(device)


def fastest(
    problem: GradientProblem, rows: int, spec: DeviceSpec, without_us: float
) -> GradientCandidate | None:
    """The best predicted launch; None where the way without kernels is predicted to be faster."""
    several = ranked(problem, rows, spec)
    return several[0] if several and several[0].predicted_us < without_us else None


def ranked(problem: GradientProblem, rows: int, spec: DeviceSpec) -> tuple[GradientCandidate, ...]:
    """The best predicted launch of each tile of all families, the best first."""
    return _ranked(problem, rows, spec, gradient_families(problem.gradient))


@functools.lru_cache(maxsize=1024)
def _ranked(
    problem: GradientProblem,
    rows: int,
    spec: DeviceSpec,
    families: tuple[GradientFamily[Any], ...],
) -> tuple[GradientCandidate, ...]:
    best: dict[Any, GradientCandidate] = {}
    for family in families:
        if family.unsupported_reason(problem, spec) is not None:
            continue
        for launch in family.launches(problem, rows, spec):
            us = family.predicted_us(problem, launch, rows, spec)
            tile = (family.name, family.tile(launch))
            if tile not in best or us < best[tile].predicted_us:
                best[tile] = GradientCandidate(family, launch, us)
    return tuple(sorted(best.values(), key=lambda one: one.predicted_us)[:_RANKED])


@functools.lru_cache(maxsize=4096)
def _launch_at(
    family: GradientFamily[Any], tile: Any, problem: GradientProblem, rows: int, spec: DeviceSpec
) -> GradientCandidate | None:
    """The best predicted launch of a tile, which may have been chosen for other rows."""
    several = [
        GradientCandidate(family, launch, family.predicted_us(problem, launch, rows, spec))
        for launch in family.launches(problem, rows, spec)
        if family.tile(launch) == tile
    ]
    return min(several, key=lambda one: one.predicted_us, default=None)


def _launch_of(
    choice: GradientChoice, problem: GradientProblem, rows: int, spec: DeviceSpec
) -> GradientCandidate | None:
    if choice.family is None:
        return None
    return _launch_at(choice.family, choice.tile, problem, rows, spec)


@functools.lru_cache(maxsize=1024)
def loaded(problem: GradientProblem, candidate: GradientCandidate, device_index: int) -> Any:
    """The kernel of a launch, for `GradientFamily.launcher`'s operands.

    None, after a warning, where it cannot be built.
    """
    try:
        return candidate.family.launcher(problem, candidate.launch, device_index)
    except KsoptError as error:
        registry.warn_once(f"{candidate.family.name} for {problem} is left out: {error}")
        return None


def _is_measured() -> bool:
    """Whether measurements decide at all."""
    return settings.tuning() == "measure" and not torch.are_deterministic_algorithms_enabled()


def _known(key: GradientKey, device: torch.device) -> GradientChoice | None:
    """The choice of this process, or on disk."""
    decided = _decider.table.get((key, device))
    return decided if decided is not None else _read(key, device)


@functools.lru_cache(maxsize=4096)  # a graph asks several times, and an eager step each time
def _read(key: GradientKey, device: torch.device) -> GradientChoice | None:
    return _recorded(key, device)


def _recorded(key: GradientKey, device: torch.device) -> GradientChoice | None:
    """The choice on disk; None if there is none, or its tile does not exist here."""
    backend, problem = backend_of(device.type), key.problem
    identity, spec = decisions.identity_of(device, backend), backend.spec(device)
    if identity is None or spec is None:
        return None
    record = tuning_cache.load(identity, key, GradientRecord)
    if record is None:
        return None
    chosen = record.choice
    if chosen.config is None:
        return GradientChoice(None, None, "recorded", record)
    for family in gradient_families(problem.gradient):
        if family.name != chosen.way or family.unsupported_reason(problem, spec) is not None:
            continue
        launches = family.launches(problem, record.batch, spec)
        for tile in dict.fromkeys(map(family.tile, launches)):
            if asdict(tile) == chosen.config:
                return GradientChoice(family, tile, "recorded", record)
    return None


def _record_of(choice: GradientChoice) -> GradientRecord:
    assert choice.record is not None
    return choice.record


def forget() -> None:
    """Drop this process's choices (not those on disk): later calls choose or read again."""
    _decider.forget()
    if host.is_loaded():
        torch.ops.ksopt_host.forget_gradients()
    for cached in (_ranked, _launch_at, loaded, _read):
        cached.cache_clear()
