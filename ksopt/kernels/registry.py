"""The candidates proposed for a problem, by predicted time, and those that can be built here.

A chain, or a product with an epilogue, has the kernels that compute all of it, `FACTORS` and
`MERGED`; a chain of two factors also a `PAIR` of any two of their candidates (factor_pairs.py). Two
layers have the kernels that compute both, and `LAYERS`.
"""

from __future__ import annotations

import functools
import heapq
import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from ksopt.errors import KsoptError, UnavailableError
from ksopt.kernels import mergeable
from ksopt.kernels.candidate import FACTORS, LAYERS, MERGED, Candidate, Pair
from ksopt.kernels.families.base import KernelFamily, families
from ksopt.kernels.families.common import pytorch_cost, pytorch_ops
from ksopt.kernels.labels import PAIR, is_pair
from ksopt.kernels.problem import EMPTY, SIXTEEN_BIT, DeviceSpec, Epilogue, Problem, Rows

MOST_KERNELS = 11
"""How many kernels, of all families together, are compiled and timed for a problem."""

_KERNELS_OF_ONE = 4
_FAR = 3.0  # a family whose best tile is predicted to take this many times the best has no chance
# The fallback is left out where it is predicted to take this many times the best tile: without
# tensor cores it takes up to 40 times as long, and timing it would take longer than all other work.
_FALLBACK_FAR = 2.0
_COMPILERS = 8
# The product of a chain's factors is computed and timed only if predicted to be close: it
# takes memory. Two predictions that are off by 1.3 either way are 1.7 apart.
_MERGED_FAR = 2.0
# The same for kernels of a whole chain, against one launch per factor: each takes seconds to
# compile.
# For few rows the launches of factors are predicted in a series, those of chains alone, which adds
# the time of a launch: this many microseconds.
_WHOLE_FAR, _ALONE_US = 1.3, 7.0

_by_prediction = attrgetter("predicted_us")


def candidates(problem: Problem, batch: int, device: DeviceSpec | None) -> list[Candidate]:
    """The candidates to time: PyTorch's, the simplest first, then kernels by predicted time.

    Of a problem of more than a factor, `FACTORS` is the first, or `LAYERS`.

    Args:
        problem: the problem to compute.
        batch: rows of x.
        device: None where its driver cannot be queried, which leaves PyTorch's candidates.
    """
    if device is None:
        return plain(problem, batch, None)
    kernels = best_kernels(problem, batch, device)
    far_us = _FALLBACK_FAR * min((one.predicted_us for one in kernels), default=math.inf)
    slow = [one for one in _fallbacks(problem, batch, device) if one.predicted_us <= far_us]
    others = [*plain(problem, batch, device), *kernels, *slow]
    return [*others, *_merged_near(others, problem, batch, device)]


def best_predicted(
    problem: Problem, batch: int, device: DeviceSpec | None, is_judged: bool = True
) -> list[Candidate]:
    """The candidates for use without timing, by predicted time: the first that builds is used.

    Args:
        problem, batch, device: as for `candidates`.
        is_judged: whether results are compared before one is taken, as a race does.
    """
    if device is None:
        return plain(problem, batch, None)[:1]
    rivals = [
        *plain(problem, batch, device),
        *best_kernels(problem, batch, device, 2, is_judged),
        *_fallbacks(problem, batch, device),
    ]
    rivals += _merged_near(rivals, problem, batch, device)
    return sorted(rivals, key=_by_prediction)


def are_rivals(problem: Problem, batch: int, device: DeviceSpec) -> bool:
    """Whether anything may compute all of a problem of more than a factor.

    Args:
        problem, batch, device: as for `candidates`.
    """
    if best_kernels(problem, batch, device, most=1):
        return True
    return bool(_merged_near(plain(problem, batch, device), problem, batch, device))


def best_kernels(
    problem: Problem,
    batch: int,
    device: DeviceSpec,
    most: int = MOST_KERNELS,
    is_judged: bool = True,
) -> list[Candidate]:
    """The kernels worth compiling, best predicted first, fallbacks apart.

    The best of every family that is predicted to come near the best of all, for no cost model is
    exact; then the next best of whatever family, a few of each.

    Args:
        problem: the problem to compute.
        batch: rows of x.
        device: the device that they run on.
        most: how many at most; 1 gives the best predicted of all.
        is_judged: as for `best_predicted`.
    """
    trusts = is_judged or problem.dtype not in SIXTEEN_BIT
    ranks = [
        _best_of(family, problem, batch, device)
        for family in families()
        if not family.is_fallback and (trusts or not family.is_judged_first)
    ]
    limit = _FAR * min((kernels[0].predicted_us for kernels in ranks if kernels), default=0.0)
    if limit and (len(problem.chain) > 1 or problem.second is not None):
        (apart,) = plain(problem, batch, device)
        limit = min(limit, _WHOLE_FAR * apart.predicted_us + _ALONE_US)
    near = [[one for one in kernels if one.predicted_us <= limit] for kernels in ranks]
    leaders = sorted((kernels[0] for kernels in near if kernels), key=_by_prediction)[:most]
    others = (one for kernels in near for one in kernels[1:])
    rest = heapq.nsmallest(most - len(leaders), others, key=_by_prediction)
    return sorted([*leaders, *rest], key=_by_prediction)


def ranked(
    family: KernelFamily[Any], problem: Problem, batch: int, device: DeviceSpec
) -> list[Candidate]:
    """The tiles of a family that fit a device, by predicted time; none if it is unsupported.

    Args:
        family: of kernels.
        problem: the problem to compute.
        batch: rows of x.
        device: the device that they run on.
    """
    too_many = family.max_batch is not None and batch > family.max_batch
    if too_many or family.unsupported_reason(problem, device) is not None:
        return []
    kernels = (
        _kernel(family, problem, tile, batch, device) for tile in _fitting(family, problem, device)
    )
    return sorted((one for one in kernels if one.predicted_us < math.inf), key=_by_prediction)


# A compiled model asks for the same several times for each of its layers.
@functools.lru_cache(maxsize=4096)
def _best_of(
    family: KernelFamily[Any], problem: Problem, batch: int, device: DeviceSpec
) -> tuple[Candidate, ...]:
    return tuple(ranked(family, problem, batch, device)[:_KERNELS_OF_ONE])


@functools.lru_cache(maxsize=64)  # the same for every batch; hundreds of tiles a family
def _fitting(family: KernelFamily[Any], problem: Problem, device: DeviceSpec) -> tuple[Any, ...]:
    every = family.configs(problem, device)
    return tuple(tile for tile in every if family.fits(problem, tile, device))


def _fallbacks(problem: Problem, batch: int, device: DeviceSpec) -> list[Candidate]:
    return [
        candidate
        for family in families()
        if family.is_fallback
        for candidate in _best_of(family, problem, batch, device)
    ]


def _kernel(
    family: KernelFamily[Any], problem: Problem, tile: Any, batch: int, device: DeviceSpec
) -> Candidate:
    us = family.predicted_us(problem, tile, batch, device)
    return Candidate(family.name, problem, us, family, tile)


def pytorch(problem: Problem, batch: int, multiprocessors: int) -> list[Candidate]:
    """PyTorch's applicable products by one factor, the simplest first."""
    return [
        _pytorch(name, problem, batch, multiprocessors)
        for name in pytorch_ops.names(problem, "cuda")
    ]


def _pytorch(name: str, problem: Problem, batch: int, multiprocessors: int) -> Candidate:
    us = pytorch_ops.predicted_us(name, problem, batch, multiprocessors)
    return Candidate(name, problem, us)


def rule(problem: Problem) -> Candidate:
    """The candidate where nothing is chosen: PyTorch's batched product, factors, or layers."""
    if problem.second is not None:
        return Candidate(LAYERS, problem, math.inf)
    if not problem.is_factor:
        return Candidate(FACTORS, problem, math.inf)
    return _pytorch("bmm", problem, 1, 1)


def plain(problem: Problem, batch: int, device: DeviceSpec | None) -> list[Candidate]:
    """The candidates without a kernel family, the simplest first."""
    if problem.second is not None:
        return [_by_layers(problem, batch, device)]
    if not problem.is_factor:
        return [_by_factors(problem, batch, device)]
    return pytorch(problem, batch, 1 if device is None else device.multiprocessors)


def _by_factors(problem: Problem, batch: int, device: DeviceSpec | None) -> Candidate:
    """One launch per factor, each the best predicted, and PyTorch's operations after the last."""
    best = [best_predicted(one, batch, device)[0] for one in problem.factors()]
    us = sum(one.predicted_us for one in best) * problem.siblings
    behind = replace(problem, epilogue=within(problem, best[0].name)[1])
    us += behind_us(behind, batch, 1 if device is None else device.multiprocessors)
    return Candidate(FACTORS, problem, us)


def within(problem: Problem, last_way: str) -> tuple[Epilogue, Epilogue]:
    """The parts of a layer's epilogue in its last factor's launch, and of PyTorch's operations.

    Args:
        problem: a layer, by a launch per factor.
        last_way: the candidate of its last factor.
    """
    after = problem.epilogue
    takes = any(one.name == last_way and one.takes(after) for one in families())
    return (after, EMPTY) if takes and problem.siblings == 1 else (EMPTY, after)


def behind_us(problem: Problem, batch: int, multiprocessors: int) -> float:
    """Predicted microseconds of PyTorch's operations after a problem's last launch."""
    if problem.epilogue.is_empty:
        return 0.0
    after = problem.epilogue
    size = getattr(torch, problem.dtype).itemsize * batch * problem.out_features
    moved = 2 + after.is_gated + after.residual + after.in_float32
    return pytorch_cost.elementwise_us(size * moved, multiprocessors)


def by_merging(problem: Problem, batch: int, device: DeviceSpec | None) -> list[Candidate]:
    """The product by the merged factors of a problem, if they can be merged."""
    if not mergeable.can_merge(problem):
        return []
    is_repaired = mergeable.holds_zeros(problem.chain.patterns)
    if device is None and is_repaired:
        return []
    multiprocessors = 1 if device is None else device.multiprocessors
    factor = mergeable.factor_of(problem)
    if factor is None:
        us = pytorch_cost.matrix_us(problem, batch, multiprocessors)
        us += pytorch_cost.NEXT_LAUNCH_US if is_repaired else 0.0
    else:
        us = best_predicted(factor, batch, device)[0].predicted_us
        us += behind_us(problem, batch, multiprocessors)
    return [Candidate(MERGED, problem, us)]


def _merged_near(
    others: Sequence[Candidate], problem: Problem, batch: int, device: DeviceSpec
) -> list[Candidate]:
    """`by_merging`, where it is predicted to come near the best of others."""
    limit = _MERGED_FAR * min(one.predicted_us for one in others)
    several = by_merging(problem, batch, device)
    return [one for one in several if one.predicted_us <= limit]


def _by_layers(problem: Problem, batch: int, device: DeviceSpec | None) -> Candidate:
    """One plan per layer, each the best predicted."""
    best = [best_predicted(one, batch, device)[0] for one in problem.layers()]
    return Candidate(LAYERS, problem, sum(one.with_epilogue_us(batch, device) for one in best))


def restored(
    problem: Problem,
    name: str,
    config: dict[str, Any] | None,
    batch: int,
    device: DeviceSpec | None,
) -> Candidate | None:
    """The candidate that a record names, if it still exists here; otherwise None.

    Args:
        problem: the problem to compute.
        name: the candidate's name.
        config: its tile as plain values, None where it has none.
        batch: rows of x, for the predicted time.
        device: as for `candidates`.
    """
    if name == PAIR:
        return _restored_pair(problem, config, batch, device)
    if config is None:
        several = plain(problem, batch, device)
        if name == MERGED:
            several = by_merging(problem, batch, device)
        return next((candidate for candidate in several if candidate.name == name), None)
    family = next((family for family in families() if family.name == name), None)
    if family is None or device is None or family.unsupported_reason(problem, device) is not None:
        return None
    for tile in family.configs(problem, device):
        if vars(tile) == config:  # plain values all: a tenth of what asdict takes
            return _kernel(family, problem, tile, batch, device)
    return None


def takes_pair(problem: Problem) -> bool:
    """Whether a `PAIR` may compute a problem: one chain of two factors, batch first."""
    is_layer = problem.siblings == 1 and problem.second is None
    return is_layer and len(problem.chain) == 2 and not problem.batch_last


def pair(problem: Problem, tile: Pair, batch: int, device: DeviceSpec | None) -> Candidate:
    """The candidate of two factors' candidates.

    Args:
        problem: one that `takes_pair`.
        tile: the factors' candidates.
        batch: rows of x.
        device: as for `candidates`.
    """
    us = tile.first.predicted_us + tile.second.predicted_us
    behind = replace(problem, epilogue=within(problem, tile.second.name)[1])
    us += behind_us(behind, batch, 1 if device is None else device.multiprocessors)
    return Candidate(PAIR, problem, us, tile=tile)


def _restored_pair(
    problem: Problem, config: dict[str, Any] | None, batch: int, device: DeviceSpec | None
) -> Candidate | None:
    if config is None or not is_pair(config) or not takes_pair(problem):
        return None
    right, left = (
        restored(factor, one["way"], one["config"], batch, device)
        for factor, one in zip(reversed(problem.factors()), config.values(), strict=True)
    )
    if right is None or left is None:
        return None
    return pair(problem, Pair(right, left), batch, device)


def built(
    several: Sequence[Candidate], device_index: int, rows: Rows = "aligned"
) -> list[tuple[Candidate, Any]]:
    """The candidates that can be built here, compiled in parallel; one warning for each other.

    Args:
        several: to build.
        device_index, rows: as for `Candidate.build`.
    """

    def build(candidate: Candidate) -> Any:
        try:
            return candidate.build(device_index, rows)
        except KsoptError as error:
            return error

    with ThreadPoolExecutor(_COMPILERS) as pool:
        results = list(pool.map(build, several))
    calls: list[tuple[Candidate, Any]] = []
    for candidate, result in zip(several, results, strict=True):
        if isinstance(result, UnavailableError):
            warn_once(str(result))
        elif isinstance(result, KsoptError):
            chain = candidate.problem.chain
            warn_once(f"{candidate.label} for {chain} does not compile: {result}")
        else:
            calls.append((candidate, result))
    return calls


_warned: set[str] = set()


def warn_once(reason: str) -> None:
    """Warn that a kernel cannot be used; the same reason once in a process."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"ksopt: its CUDA kernels cannot be used, so PyTorch's slower way is taken. {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
