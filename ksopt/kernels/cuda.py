"""The product on a CUDA device: the fastest of ksopt's kernels and PyTorch's own ways.

With ``KSOPT_TUNE=measure``, the default, the first product of a situation (pattern, dtype, layout,
precision, alignment, batch to the next power of two) times the ways that the cost models rank best
against PyTorch's, on the operands at hand; so nothing is slower than PyTorch by more than the noise
of a few runs. It takes `measure.BUDGET_S` seconds and the compilation of at most `families.TILES`
kernels. What was chosen is kept on disk (choices.py): the next process, or another one that waits
for this, takes it without timing.

Each way whose weight is prepared is timed with the preparation and without it, which makes two
choices: one for weights that are prepared once (packed.py) and one for weights that change.

The way predicted to be the fastest is taken, without timing, with ``KSOPT_TUNE=model``; under
``torch.use_deterministic_algorithms``, because it is the same in every process; and, where nothing
was recorded, while a CUDA graph is captured and while another thread is timing.
``KSOPT_TUNE=off`` takes PyTorch's batched product and neither compiles nor reads anything.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ksopt import settings
from ksopt.errors import KsoptError, UnavailableError
from ksopt.kernels import choices, lanes32, measure, packed, situation, ways
from ksopt.kernels.choices import Record, Timed
from ksopt.kernels.families import Machine
from ksopt.kernels.measure import Contender
from ksopt.kernels.problem import Problem
from ksopt.kernels.situation import Situation
from ksopt.kernels.ways import Call, Way
from ksopt.pattern import Pattern

Source = Literal["measured", "recorded", "model", "rule"]
Accept = Callable[[Tensor], str | None]


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


_Key = tuple[tuple[int, ...], torch.dtype, bool, bool, situation.Rows, int, int]
_decisions: dict[_Key, Decision] = {}
_stopgaps: dict[_Key, Decision] = {}  # where nothing may be timed at this moment
_timing = threading.Lock()


def run(x: Tensor, weight: Tensor, batch_last: bool) -> Tensor:
    """y = x K^T.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last; any strides, on a CUDA device.
        weight: (a, b, c, d), of x's dtype and device, any strides.
        batch_last: the layout.

    Returns:
        y: (*batch, M) or (M, *batch); new and contiguous.
    """
    return choice_for(x, weight, batch_last).call(x, weight)


def choice_for(x: Tensor, weight: Tensor, batch_last: bool) -> Choice:
    """The choice that `run` takes for these operands, made now if it was not yet."""
    shape, dtype = weight.shape, x.dtype
    batch = x.numel() // (shape[0] * shape[2] * shape[3])
    rows = situation.rows_of(x, batch_last, batch)
    exact = dtype != torch.float32 or lanes32.precise()
    bits = situation.bits_of(batch)
    key = (shape, dtype, batch_last, exact, rows, bits, x.get_device())
    decision = _decisions.get(key) or _decide(key, x, weight, batch)
    # The same object wherever the choice prepares no weight.
    if decision.kept is decision.changing or not packed.are_changing():
        return decision.kept
    return decision.changing


def forget() -> None:
    """Forget this process's choices (not those on disk), so that they are made or read anew."""
    _decisions.clear()
    _stopgaps.clear()
    _model.cache_clear()
    _rule.cache_clear()
    machine_of.cache_clear()


def tune(x: Tensor, weight: Tensor, batch_last: bool, budget_s: float, accept: Accept) -> Record:
    """Measure for these operands even if a choice exists; keep it here and on disk.

    Args:
        x, weight, batch_last: as for `run`.
        budget_s: seconds for the timing of the ways; compilation comes on top.
        accept: says what is wrong with a result, or None; a way with a wrong result is not timed.

    Raises:
        UnavailableError: the CUDA driver's bindings are missing, so nothing could be kept.
    """
    device = x.get_device()
    batch = x.numel() // (weight.shape[0] * weight.shape[2] * weight.shape[3])
    found = situation_of(x, weight, batch_last)
    identity = choices.cuda_machine(device)
    with _timing, choices.alone(identity, found), torch.cuda.device(device):
        previous = choices.load(identity, found)
        decision = _measured(found, x, weight, batch, budget_s, previous, accept)
        record = decision.kept.record
        assert record is not None
        choices.save(identity, record)
        _decisions[_key_of(found, device)] = decision
    return record


def known(found: Situation, device: int) -> Decision | None:
    """The decision that this process has taken for a situation; None if it has not yet."""
    return _decisions.get(_key_of(found, device))


def _key_of(found: Situation, device: int) -> _Key:
    p = found.problem
    dtype = getattr(torch, p.dtype)
    return (p.pattern.weight_shape, dtype, p.batch_last, p.exact, found.rows, found.bits, device)


def situation_of(x: Tensor, weight: Tensor, batch_last: bool) -> Situation:
    """What a choice for these operands is made for, at torch's present precision."""
    pattern, dtype = Pattern(*weight.shape), str(x.dtype).removeprefix("torch.")
    batch = x.numel() // pattern.in_features
    exact = dtype != "float32" or lanes32.precise()
    rows = situation.rows_of(x, batch_last, batch)
    return Situation(Problem(pattern, dtype, batch_last, exact), rows, situation.bits_of(batch))


@functools.cache
def machine_of(device: int) -> Machine | None:
    """What a kernel has to fit into on a CUDA device; None, and a warning, without a driver."""
    try:
        return Machine.of_device(device)
    except UnavailableError as error:
        ways.warn_once(str(error))
        return None


def _decide(key: _Key, x: Tensor, weight: Tensor, batch: int) -> Decision:
    device = key[-1]
    mode = settings.tuning()
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and key in _stopgaps:
        return _stopgaps[key]
    found = situation_of(x, weight, key[2])
    if batch == 0:
        return _rule(found.problem)
    if mode == "off":
        return _decisions.setdefault(key, _rule(found.problem))
    if mode == "model":
        return _decisions.setdefault(key, _model(found, device))
    if deterministic:
        return _stopgaps.setdefault(key, _model(found, device))
    may_time = not torch.cuda.is_current_stream_capturing() and _timing.acquire(blocking=False)
    if not may_time:
        if key not in _stopgaps:
            _stopgaps[key] = _recorded(found, device) or _model(found, device)
        return _stopgaps[key]
    try:
        if key not in _decisions:
            with torch.cuda.device(device):
                _decisions[key] = _first(found, device, x, weight, batch)
        return _decisions[key]
    finally:
        _timing.release()


def _first(found: Situation, device: int, x: Tensor, weight: Tensor, batch: int) -> Decision:
    """What is recorded; else measure, if no other process does so while this one waits."""
    identity = identity_of(device)
    if identity is None:
        return _measured(found, x, weight, batch, measure.BUDGET_S)
    decision = _recorded(found, device)
    if decision is not None:
        return decision
    with choices.alone(identity, found):
        decision = _recorded(found, device)
        if decision is None:
            decision = _measured(found, x, weight, batch, measure.BUDGET_S)
            assert decision.kept.record is not None
            choices.save(identity, decision.kept.record)
    return decision


def _measured(
    found: Situation,
    x: Tensor,
    weight: Tensor,
    batch: int,
    budget_s: float,
    previous: Record | None = None,
    accept: Accept | None = None,
) -> Decision:
    """Build and time the ways that are worth it."""
    device = x.get_device()
    candidates = ways.candidates(found.problem, batch, machine_of(device))
    built = ways.built(candidates, device)
    if accept is not None:
        built = [(way, call) for way, call in built if _is_right(way, call, x, weight, accept)]
    entries = [
        (way, _preparing(call, weight_is), weight_is)
        for way, call in built
        for weight_is in _weights_timed(way)
    ]
    contenders = [
        Contender(way.label, partial(call, x, weight), _LEAGUES[weight_is])
        for way, call, weight_is in entries
    ]
    measure.race(contenders, x.device, budget_s)
    ran = [index for index, contender in enumerate(contenders) if contender.samples_us]
    if not ran:
        raise UnavailableError(
            f"no way to multiply by {found.problem.pattern} ran on this device; the warnings above "
            "say why"
        )
    timed = tuple(_timed(entries[index][0], entries[index][2], contenders[index]) for index in ran)
    chosen = {
        league: ran.index(measure.winner(contenders, league, _previous(previous, league)))
        for league in ("kept", "changing")
    }
    record = Record(found, batch, timed, chosen["kept"], chosen["changing"])
    made = {
        index: Choice(entries[ran[index]][0], entries[ran[index]][1], "measured", record)
        for index in {record.kept, record.changing}
    }
    # One object for both where one way serves both, so that `choice_for` need not ask which.
    return Decision(made[record.kept], made[record.changing])


def _is_right(way: Way, call: Call, x: Tensor, weight: Tensor, accept: Accept) -> bool:
    try:
        wrong = accept(call(x, weight))
    except torch.OutOfMemoryError:
        return False
    except RuntimeError as error:
        wrong = f"it cannot run here: {error}"
    if wrong is not None:
        ways.warn_once(f"{way.label} for {way.problem.pattern} is left out: {wrong}")
    return wrong is None


# Nothing is kept where preparing anew is not told apart from it: it costs memory, and trust in
# torch's count of changes.
_LEAGUES: dict[choices.Weight, frozenset[str]] = {
    "any": frozenset({"kept", "changing"}),
    "fresh": frozenset({"kept", "changing"}),
    "kept": frozenset({"kept"}),
}


def _weights_timed(way: Way) -> Sequence[choices.Weight]:
    return ("fresh", "kept") if way.prepares else ("any",)


def _preparing(call: Call, weight_is: choices.Weight) -> Call:
    """The way as it was, or is to be, timed."""
    if weight_is != "fresh":
        return call

    def fresh(x: Tensor, weight: Tensor) -> Tensor:
        with packed.changing():
            return call(x, weight)

    return fresh


def _timed(way: Way, weight_is: choices.Weight, contender: Contender) -> Timed:
    quantiles = (contender.quantile_us(share) for share in (0.5, 0.2, 0.8))
    return Timed(way.name, way.config, weight_is, way.predicted_us, *quantiles)


def _previous(record: Record | None, league: str) -> str | None:
    return None if record is None else record.chosen(league == "changing").label


def _recorded(found: Situation, device: int) -> Decision | None:
    """What is on disk, built again without timing; None if it is missing or no longer possible."""
    identity = identity_of(device)
    record = None if identity is None else choices.load(identity, found)
    if record is None:
        return None
    made: dict[int, Choice] = {}
    for index in {record.kept, record.changing}:
        chosen = record.timed[index]
        way = ways.restored(
            found.problem, chosen.way, chosen.config, record.batch, machine_of(device)
        )
        if way is None:
            return None
        try:
            call = _preparing(way.build(device), chosen.weight)
        except KsoptError as error:
            ways.warn_once(str(error))
            return None
        made[index] = Choice(way, call, "recorded", record)
    return Decision(made[record.kept], made[record.changing])


def identity_of(device: int) -> choices.Machine | None:
    """What choices on a CUDA device depend on; None without a driver, and then nothing is kept."""
    try:
        return choices.cuda_machine(device)
    except UnavailableError:  # said already: without it there are no kernels to choose from
        return None


@functools.lru_cache(maxsize=4096)
def _model(found: Situation, device: int) -> Decision:
    """The best predicted way that can be built, for the situation's largest batch."""
    machine = machine_of(device)
    for way in ways.best_predicted(found.problem, found.largest_batch, machine):
        try:
            choice = Choice(way, way.build(device), "model")
        except KsoptError as error:
            ways.warn_once(str(error))
            continue
        return Decision(choice, choice)
    return _rule(found.problem)


@functools.lru_cache(maxsize=4096)
def _rule(problem: Problem) -> Decision:
    way = ways.rule(problem)
    choice = Choice(way, way.build(device=-1), "rule")  # PyTorch's ways need no device
    return Decision(choice, choice)
