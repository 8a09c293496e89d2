"""Fills the tuning cache ahead of time; the library behind `ksopt tune`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ksopt import precision
from ksopt.errors import InvalidInputError
from ksopt.kernels import factor_pairs, plan_autotuner, planner, tuning_cache
from ksopt.kernels.autotuner import Source
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.explain import ChoiceReport, from_record
from ksopt.kernels.operands import random_operands
from ksopt.kernels.problem import Problem
from ksopt.kernels.tuning_cache import Kind, Record
from ksopt.patterns.validate import checked_int
from ksopt.system import limits


@dataclass(frozen=True)
class TuneRequest:
    """The problems to tune, and the settings.

    Args:
        problems: chains with their epilogues and siblings, or single factors.
        batches: rows of x.
        device: a CPU or CUDA device.
        backward: whether to tune the products of the backward pass (the transposed factors) too.
        budget_s: seconds for timing one product; compilation comes on top.
        again: whether to measure products that are already recorded.

    Raises:
        InvalidInputError: a batch below 1, no time, nothing to tune, or TF32 of 16 bit or on a CPU.
    """

    problems: tuple[Problem, ...]
    batches: tuple[int, ...]
    device: torch.device
    backward: bool = False
    budget_s: float = 1.0
    again: bool = False

    def __post_init__(self) -> None:
        for batch in self.batches:
            checked_int(batch, "batch", "tune")
        if not self.problems or not self.batches:
            raise InvalidInputError("tune: give at least one problem and one batch")
        if not 0 < self.budget_s < float("inf"):
            raise InvalidInputError(f"tune: seconds {self.budget_s!r}: give more than 0")
        for problem in self.problems:
            if not problem.exact and (problem.dtype != "float32" or self.device.type != "cuda"):
                raise InvalidInputError(
                    f"tune: TF32 is a precision of float32 on CUDA, not of {problem.dtype} on "
                    f"{self.device.type}"
                )

    def products(self) -> list[tuple[Problem, int]]:
        """The factors to tune: (a factor's problem, batch), without duplicates.

        A launch a factor is a plan of every chain, and races with kernels of the whole chain.
        """
        factors = [
            Problem.of_factor(pattern, one.dtype, one.batch_last, one.exact)
            for one in self.problems
            for chain in one.chains
            for pattern in chain
        ]
        if self.backward:
            factors += [replace(one, chain=one.chain.transpose()) for one in factors]
        return [
            (factor, batch)
            for factor in dict.fromkeys(factors)
            for batch in dict.fromkeys(self.batches)
        ]

    def wholes(self) -> list[tuple[Problem, int]]:
        """The problems that kernels or pairs compute, with batches; tuned after their factors."""
        return [
            (problem, batch)
            for problem in dict.fromkeys(self.problems)
            for batch in dict.fromkeys(self.batches)
            if planner.whole_choice(problem, batch, self.device) is not None
            or self._has_pairs(problem, batch)
        ]

    def _has_pairs(self, problem: Problem, batch: int) -> bool:
        has_kernels = backend_of(self.device.type).spec(self.device) is not None
        return has_kernels and factor_pairs.may_race(problem, batch)


def tune(request: TuneRequest) -> Iterator[ChoiceReport]:
    """Tune the products in sequence; each choice is on disk before the next begins.

    Args:
        request: the products and settings.

    Yields:
        A report for each of ``request.products()``, then of ``request.wholes()``, as soon as it
        exists.

    Raises:
        InvalidInputError: an unrecorded product does not fit the device's memory; no product is
            then measured.
        UnavailableError: the CUDA driver's bindings are missing.

    Example:
        >>> from ksopt.patterns.chain import Pattern
        >>> factor = Problem.of_factor(Pattern(2, 16, 16, 2), "float32", batch_last=False)
        >>> request = TuneRequest((factor,), (8,), torch.device("cpu"), budget_s=0.01)
        >>> [report.batch for report in tune(request)]
        [8]
        >>> [report.source for report in tune(request)]
        ['recorded']
    """
    _check_memory(request)
    for problem, batch in (*request.products(), *request.wholes()):
        record = None if request.again else recorded(request, problem, batch)
        source: Source = "measured" if record is None else "recorded"
        record = record or _measured(request, problem, batch)
        if record is not None:
            yield from_record(record, source)


def _check_memory(request: TuneRequest) -> None:
    for problem, batch in request.wholes():
        features = (problem.chain.in_features, problem.out_features)
        if problem.epilogue.residual:
            features = (features[0], 2 * features[1])
        weights = problem.siblings * problem.chain.nnz
        sizes = (features, weights, batch, problem.dtype, request.device, f"layer {problem}")
        if request.again or recorded(request, problem, batch) is None:
            limits.check_product(*sizes)
    for problem, batch in request.products():
        pattern = problem.pattern
        features = (pattern.in_features, pattern.out_features)
        sizes = (features, pattern.nnz, batch, problem.dtype, request.device, f"factor {pattern}")
        if request.again or recorded(request, problem, batch) is None:
            limits.check_product(*sizes)


def recorded(request: TuneRequest, problem: Problem, batch: int) -> Record | None:
    """The record on disk for a product of the request; None if there is none."""
    backend = backend_of(request.device.type)
    return tuning_cache.load(backend.fingerprint(request.device), backend.key(problem, batch))


def all_recorded(device: torch.device, kind: type[Kind]) -> list[Kind]:
    """The records of a kind on disk for a device.

    Raises:
        UnavailableError: the CUDA driver's bindings are missing.
    """
    return tuning_cache.load_all(backend_of(device.type).fingerprint(device), kind)


def _measured(request: TuneRequest, problem: Problem, batch: int) -> Record | None:
    """The measurement of a product; None if there is nothing to choose from."""
    with _precision(request, problem):
        operands = random_operands(problem, batch, request.device)
        if not problem.is_factor:
            return plan_autotuner.tune(operands, problem, request.budget_s, alone=True)
        (weight,) = operands.weights
        backend = backend_of(request.device.type)
        return backend.tune(operands.x, weight, problem.batch_last, request.budget_s)


def _precision(request: TuneRequest, problem: Problem) -> contextlib.AbstractContextManager[None]:
    """Torch's precision of products as the problem has it."""
    if problem.dtype != "float32" or request.device.type != "cuda":
        return contextlib.nullcontext()
    return precision.fp32_products("ieee" if problem.exact else "tf32")


def summary(reports: Sequence[ChoiceReport]) -> str:
    """A sentence that summarizes the choices.

    Example:
        >>> summary([])
        'No choices.'
    """
    if not reports:
        return "No choices."
    ours = [report for report in reports if not report.is_pytorch]
    new = sum(report.source == "measured" for report in reports)
    return (
        f"{len(reports)} choice{'s' if len(reports) > 1 else ''}, {new} measured now: "
        f"{len(ours)} of ksopt's kernels, {len(reports) - len(ours)} of PyTorch's ways."
    )
