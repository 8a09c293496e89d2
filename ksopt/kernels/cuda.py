"""The product on a CUDA device: the fastest of ksopt's kernels and PyTorch's own ways.

The first product of a problem (pattern, dtype, layout, batch to the next power of two, device)
times the tiles that the families' cost models rank best against PyTorch's ways, and keeps the
choice for the life of the process: so nothing is slower than PyTorch by more than the noise of a
few runs.
PyTorch's ways are timed with the preparation of their weights, which may change while training.

Nothing is timed with ``KSOPT_TUNE=off``, under ``torch.use_deterministic_algorithms``, while a
CUDA graph is captured and while another thread is timing: the rule decides, which takes the tile
ranked best, else bmm.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt import settings
from ksopt.baselines import BASELINES, Product
from ksopt.errors import UnavailableError
from ksopt.kernels import general
from ksopt.kernels.families import FAMILIES, Machine, Tile, ranked_tiles
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern

BUDGET_S = 0.5
"""Time for the timing of one problem, compilation apart; a round that has begun is finished."""

ROUNDS = 7
TILES = 3
"""How many of a family's tiles that its cost model ranks best are compiled and timed."""

# Dropped after the first timed round: what takes more than this many times the fastest.
_HOPELESS = 2.0
# An expanded product costs d times the flops: past this no saved copy pays for it.
_MAX_EXTRA_FLOPS = 16
_MAX_LOOP = 64


@dataclass(frozen=True)
class Choice:
    """A way to multiply, and why it was taken.

    Attributes:
        name: a kernel family's name, ``general`` or the name of a baseline.
        call: (x, weight) -> y.
        times_us: measured time of every candidate in microseconds; empty if none was timed.
    """

    name: str
    call: Callable[[Tensor, Tensor], Tensor]
    times_us: tuple[tuple[str, float], ...] = ()


_Key = tuple[tuple[int, ...], torch.dtype, bool, int, int]
_choices: dict[_Key, Choice] = {}
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
    shape = weight.shape
    batch = x.numel() // (shape[0] * shape[2] * shape[3])
    key = (shape, x.dtype, batch_last, batch.bit_length(), x.get_device())
    return _choices.get(key) or _decide(key, x, weight, batch)


def forget() -> None:
    """Forget every choice, so that the next product of each problem is chosen anew."""
    _choices.clear()
    _rule.cache_clear()


def _decide(key: _Key, x: Tensor, weight: Tensor, batch: int) -> Choice:
    shape, dtype, batch_last, bits, device = key
    problem = Problem(Pattern(*shape), str(dtype).removeprefix("torch."), batch_last)
    if (
        batch == 0
        or not settings.tuning()
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.is_current_stream_capturing()
        or not _timing.acquire(blocking=False)
    ):
        return _rule(problem, bits, device)
    try:
        if key not in _choices:
            with torch.cuda.device(device):
                candidates = _candidates(problem, batch, device)
                _choices[key] = _fastest(candidates, x, weight)
        return _choices[key]
    finally:
        _timing.release()


@functools.cache
def _rule(problem: Problem, bits: int, device: int) -> Choice:
    """The choice without timing, for batches below 2 ** bits."""
    best = _tiles(problem, max(1, 2**bits - 1), device, 1)
    return next(iter(_built(best, device)), _pytorch(problem, "bmm"))


def _candidates(problem: Problem, batch: int, device: int) -> list[Choice]:
    p = problem.pattern
    names = ["bmm", "bmm_paper", "einsum"]
    if min(p.a, p.d) <= _MAX_LOOP:
        names.append("bmm_loop")
    if 1 < p.d <= _MAX_EXTRA_FLOPS:
        names.append("expand")
    if p.a * p.d <= _MAX_EXTRA_FLOPS:
        names.append("dense")
    dtype = getattr(torch, problem.dtype)
    product = Product(p, dtype, "cuda", problem.batch_last)
    pytorch = [_pytorch(problem, n) for n in names if BASELINES[n].supports(product).ok]
    own = _built(_tiles(problem, batch, device, TILES), device)
    if general.supports(problem) is None:
        try:
            own.append(Choice("general", general.launcher(problem, device)))
        except UnavailableError as error:
            _warn_once(str(error))
    return [*own, *pytorch]


def _pytorch(problem: Problem, name: str) -> Choice:
    baseline, p, last = BASELINES[name], problem.pattern, problem.batch_last

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return baseline.multiply(x, baseline.prepare(weight, last), p, last)

    return Choice(name, call)


def _tiles(problem: Problem, batch: int, device: int, count: int) -> list[Tile]:
    """The ``count`` best predicted tiles of each family, best first; none without a driver."""
    try:
        machine = Machine.of_device(device)
    except UnavailableError as error:
        _warn_once(str(error))
        return []
    ranked = (ranked_tiles(family, problem, batch, machine) for family in FAMILIES)
    best = [tile for tiles in ranked for tile in tiles[:count]]
    return sorted(best, key=lambda tile: tile.predicted_us)


def _built(tiles: list[Tile], device: int) -> list[Choice]:
    """The tiles that can be built here; what stands in the way of others is a warning, once."""
    choices = []
    for tile in tiles:
        try:
            choices.append(Choice(tile.family.name, tile.launcher(device)))
        except UnavailableError as error:
            _warn_once(str(error))
    return choices


def _fastest(candidates: list[Choice], x: Tensor, weight: Tensor) -> Choice:
    """Time the candidates round by round and return the fastest, with all times."""
    times: dict[int, list[float]] = {index: [] for index in range(len(candidates))}
    alive = list(times)
    end = time.perf_counter() + BUDGET_S
    for round_ in range(ROUNDS + 1):  # round 0 warms up
        events = {}
        for index in list(alive):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            try:
                start.record()
                candidates[index].call(x, weight)
                stop.record()
            except torch.OutOfMemoryError:  # an expanded weight may not fit; its rivals do
                alive.remove(index)
                continue
            events[index] = (start, stop)
        torch.cuda.synchronize()
        taken = {index: start.elapsed_time(stop) * 1e3 for index, (start, stop) in events.items()}
        if round_ > 0:
            for index, us in taken.items():
                times[index].append(us)
        if round_ == 1:
            least = min(taken.values())
            alive = [index for index in alive if taken[index] <= _HOPELESS * least]
        if round_ > 0 and time.perf_counter() > end:
            break
    medians = {index: sorted(us)[len(us) // 2] for index, us in times.items() if us}
    best = min(alive, key=medians.__getitem__)
    report = tuple((candidates[index].name, us) for index, us in medians.items())
    return Choice(candidates[best].name, candidates[best].call, report)


_warned: set[str] = set()


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"ksopt: its CUDA kernels cannot be used, so PyTorch's slower way is taken. {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
