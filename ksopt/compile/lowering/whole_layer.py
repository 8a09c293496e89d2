"""Decision whether a layer is faster as a whole than by a launch per factor with Inductor's fusion.

As a whole it is one launch, or the product by one matrix or factor, with its bias; or a launch per
factor, the last of which computes the epilogue, too, as kernels for few rows do; or two launches
that were tuned as a pair. Behind separate launches, and behind such a product, Inductor computes
the epilogue in one kernel, where the race of the autotuner calls PyTorch's operations one after
another: their extra time is subtracted. What a kernel that reads the result can compute, too, is no
gain of the layer's. So a layer whose product by one matrix is the fastest keeps its bias, and
Inductor computes the rest, as it does behind the dense layer that the author might have written.
Siblings are also compared with a launch each, a gate also with one launch before it, and two layers
with the faster implementation of each.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch

from ksopt import settings
from ksopt.compile.sites import LaunchTimes
from ksopt.errors import KsoptError
from ksopt.kernels import plan_autotuner, planner, registry, trained_chain
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import APART, FACTORS, MERGED
from ksopt.kernels.explain import from_record
from ksopt.kernels.families.common.pytorch_cost import NEXT_LAUNCH_US, elementwise_us
from ksopt.kernels.labels import PAIR
from ksopt.kernels.mergeable import product_in_words
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem

Weights = Literal["stored", "computed", "trained"]


def is_whole(
    problem: Problem,
    batch: int,
    device: torch.device,
    weights: Weights = "stored",
    beside_reader: Epilogue | None = None,
    tune: str | None = None,
) -> bool:
    """Whether one launch, or one per factor and none behind them, computes a problem fastest.

    Args:
        problem: a layer, or two.
        batch: rows of x.
        device: of the operands.
        weights: "stored" ones are inputs of the graph; others are prepared at each call: those that
            are "computed" in the graph, and "trained" ones, for which the intermediate results
            between the factors are saved, too.
        beside_reader: what the layer keeps of its epilogue where a kernel of Inductor's reads the
            result in any case and can compute the rest: that is compared with, too. None where
            there is no such kernel.
        tune: "measure" times it on random operands where nothing is recorded; "model" predicts;
            "off" returns False. None takes the value of ``KSOPT_TUNE``.
    """
    tune = settings.tuning() if tune is None else tune
    spec = backend_of(device.type).spec(device)
    if spec is None or batch == 0 or tune == "off":
        return False
    repacked = weights != "stored"
    trains = weights == "trained"
    if planner.whole_choice(problem, batch, device, repacked) is None and (
        trains or not _is_within(problem, batch, device, repacked)
    ):
        return False
    if trains and not trained_chain.has_kernel(
        planner.plan_of(problem, batch, device=device, repacked=True), device
    ):
        return False

    def times(one: Problem, alone: bool = False) -> tuple[float, float]:
        is_within = _is_within(one, batch, device, repacked)
        if tune == "measure" and not torch.are_deterministic_algorithms_enabled():
            whole, apart = _measured(one, batch, device, spec, repacked, is_within, alone)
        else:
            whole, apart = _predicted(one, batch, spec, repacked)
        if not is_within:
            return whole, apart
        # The launches together are one operator; apart one kernel more is behind the last.
        after_us = registry.behind_us(one, batch, spec.multiprocessors)
        return whole if trains else min(whole, apart), apart + after_us

    whole, apart = times(problem)
    if problem.siblings > 1:
        several = problem.siblings * min(times(problem.one()))
        if problem.epilogue.is_gated:
            several = min(several, *times(problem.ungated()))
            several += _gate_us(problem, batch, spec.multiprocessors)
        apart = min(apart, several)
    # Biases and residuals only where the last of several launches adds them: kernels of whole
    # layers have raced with theirs.
    if beside_reader is not None and (
        beside_reader.activation != problem.epilogue.activation
        or _is_within(problem, batch, device, repacked)
    ):
        least = min(times(replace(problem, epilogue=beside_reader), alone=True))
        apart = min(apart, least + _reader_us(problem, beside_reader, batch, spec.multiprocessors))
    if problem.epilogue.in_float32:  # Inductor may have a kernel for the cast
        bare = replace(problem, epilogue=replace(problem.epilogue, in_float32=False))
        size = getattr(torch, problem.dtype).itemsize * batch * problem.out_features
        cast_us = elementwise_us(3 * size, spec.multiprocessors)
        apart = min(apart, min(times(bare, alone=True)) + cast_us)
    if (
        problem.second is not None and tune == "measure"
    ):  # predictions assume the best implementations
        apart = min(apart, sum(min(times(layer)) for layer in problem.layers()))
    return whole < apart


def in_words(problem: Problem, batch: int, device: torch.device, weights: Weights) -> str:
    """Description of what computes a problem as a whole.

    Args:
        problem, batch, device, weights: as for `is_whole`, which must be true.
    """
    choice = planner.whole_choice(problem, batch, device, weights != "stored")
    if choice is None or choice.way == FACTORS:
        return "One launch per factor"
    if choice.way == PAIR:
        return f"One launch per factor, tuned as a {choice.name},"
    if choice.way != MERGED:
        return "One launch"
    product = product_in_words(problem)
    return f"{product[0].upper()}{product[1:]} beside its factors"


def _is_within(problem: Problem, batch: int, device: torch.device, repacked: bool) -> bool:
    """Whether a layer by a launch per factor has its epilogue in the last one."""
    if problem.second is not None or problem.siblings > 1 or problem.epilogue.is_empty:
        return False
    way = planner.choice_of_factor(problem.factors()[0], batch, device, repacked).way
    _, behind = registry.within(problem, way)
    return behind.is_empty


def launch_times(
    problem: Problem, batch: int, device: torch.device, weights: Weights
) -> LaunchTimes | None:
    """Times of what computes a problem as a whole; None where nothing does.

    Args:
        problem, batch, device, weights: as for `is_whole`.
    """
    repacked = weights != "stored"
    choice = planner.whole_choice(problem, batch, device, repacked)
    if choice is not None:
        return LaunchTimes(choice.predicted_us, choice.measured_us)
    backend = backend_of(device.type)
    spec = backend.spec(device)
    if spec is None or not _is_within(problem, batch, device, repacked):
        return None
    # Nothing competes with a launch per factor.
    (parts,) = registry.plain(problem, batch, spec)
    known = plan_autotuner.known_record(backend.key(problem, batch), device)
    measured_us = None if known is None else from_record(*known, repacked).measured_us
    return LaunchTimes(parts.predicted_us, measured_us)


def _predicted(
    problem: Problem, batch: int, spec: DeviceSpec, repacked: bool
) -> tuple[float, float]:
    """Predicted us as a whole, and of several launches with one kernel behind those of a layer."""
    several = registry.best_kernels(problem, batch, spec)
    several += [] if repacked else registry.by_merging(problem, batch, spec)
    (parts,) = registry.plain(problem, batch, spec)
    times = [(one.name, one.predicted_us) for one in several]
    whole, merged = _least(times, merging=False), _least(times, merging=True)
    if _has_bias_at_most(problem):
        return min(whole, merged), parts.predicted_us
    # Of the others one kernel behind the product is predicted already.
    gain = _fused_gain_us(problem, batch, spec.multiprocessors, behind_bias=True)
    by_torch = min((us - gain for way, us in times if way == MERGED), default=math.inf)
    return whole, min(parts.predicted_us, merged, by_torch)


def _measured(
    problem: Problem,
    batch: int,
    device: torch.device,
    spec: DeviceSpec,
    repacked: bool,
    is_within: bool,
    alone: bool = False,
) -> tuple[float, float]:
    """Measured us as a whole and of several launches; infinite if there are none.

    ``is_within`` says whether the last of several launches computes the epilogue. Then, and with
    ``alone``, they are measured where nothing competes with them, too.
    """
    try:
        record = plan_autotuner.tuned(problem, batch, device, alone=alone or is_within)
    except (KsoptError, torch.OutOfMemoryError):
        record = None
    others = ("cached", "stored") if repacked else ("repacked",)
    timed = [] if record is None else [one for one in record.timed if one.weight not in others]

    parts = min((one.median_us for one in timed if one.way in APART), default=math.inf)
    times = [(one.way, one.median_us) for one in timed if one.way not in APART]
    whole, merged = _least(times, merging=False), _least(times, merging=True)
    if problem.second is not None:  # each layer alone is compared with, too
        return whole, parts
    if not is_within:
        parts -= _fused_gain_us(problem, batch, spec.multiprocessors)
    if _has_bias_at_most(problem):
        return min(whole, merged), parts
    gain = _fused_gain_us(problem, batch, spec.multiprocessors, behind_bias=True)
    return whole, min(parts, merged - gain)


def _least(times: list[tuple[str, float]], *, merging: bool) -> float:
    """The least time of products by one matrix or factor, or of kernels of whole layers."""
    return min((us for way, us in times if (way == MERGED) == merging), default=math.inf)


def _has_bias_at_most(problem: Problem) -> bool:
    """Whether the product by one matrix computes all of a layer in one launch."""
    after = problem.epilogue
    return after.activation == "none" and not after.residual and not after.in_float32


def _gate_us(problem: Problem, batch: int, multiprocessors: int) -> float:
    """Microseconds of Inductor's kernel that multiplies two siblings' results."""
    size = getattr(torch, problem.dtype).itemsize * batch * problem.out_features
    return elementwise_us((3 + problem.epilogue.residual) * size, multiprocessors)


def _reader_us(problem: Problem, beside: Epilogue, batch: int, multiprocessors: int) -> float:
    """Microseconds that a reader takes longer for the rest of an epilogue, in a kernel it has.

    It reads the residual and writes the sum, which others read.
    """
    if not problem.epilogue.residual or beside.residual:
        return 0.0
    size = getattr(torch, problem.dtype).itemsize * batch * problem.out_features
    return elementwise_us(2 * size, multiprocessors) - NEXT_LAUNCH_US


def _fused_gain_us(
    problem: Problem, batch: int, multiprocessors: int, behind_bias: bool = False
) -> float:
    """Microseconds that one kernel for all steps of the epilogue saves over one per step.

    Args:
        problem, batch, multiprocessors: of the layer.
        behind_bias: whether its product adds the bias.
    """
    after = replace(problem.epilogue, bias=problem.epilogue.bias and not behind_bias)
    size = getattr(torch, problem.dtype).itemsize * batch * problem.out_features
    parts = 1 + after.is_gated  # a bias is added to each
    passes = [2] * (parts * after.bias + (after.activation != "none")) + [3] * after.residual
    passes += [3] * (after.is_gated + after.in_float32)
    apart = sum(elementwise_us(n * size, multiprocessors) for n in passes)
    fused = (1 + parts + after.residual + after.in_float32) * size
    fused_us = elementwise_us(fused, multiprocessors) if passes else 0.0
    return max(apart - fused_us, 0.0)
