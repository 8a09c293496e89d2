"""Fills the tuning cache ahead of time; the library behind `ksopt tune`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ksopt import precision
from ksopt.errors import InvalidInputError
from ksopt.kernels import plan_autotuner, planner, tuning_cache
from ksopt.kernels.autotuner import Source
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.explain import ChoiceReport, from_record
from ksopt.kernels.operands import random_operands
from ksopt.kernels.problem import EMPTY, Epilogue, Problem
from ksopt.kernels.tuning_cache import Record
from ksopt.patterns.chain import Chain, Pattern
from ksopt.patterns.validate import checked_int
from ksopt.system import limits


@dataclass(frozen=True)
class TuneRequest:
    """The products to tune, and the settings.

    Args:
        patterns: of the factors, without duplicates.
        batches: rows of x.
        device: a CPU or CUDA device.
        dtype: "float32", "float16" or "bfloat16".
        batch_last: the layout.
        tf32: whether float32 products are at TF32's accuracy, on CUDA.
        backward: whether to tune the products of the backward pass (the transposed patterns) too.
        budget_s: seconds for timing one product; compilation comes on top.
        again: whether to measure products that are already recorded.
        chains: of patterns among those: a kernel of a whole chain races with the launches of the
            factors, for the forward pass.
        epilogue: of the products of ``chains``.

    Raises:
        InvalidInputError: a batch below 1, no time, nothing to tune, or TF32 of 16 bit.
    """

    patterns: tuple[Pattern, ...]
    batches: tuple[int, ...]
    device: torch.device
    dtype: str = "float32"
    batch_last: bool = False
    tf32: bool = False
    backward: bool = False
    budget_s: float = 1.0
    again: bool = False
    chains: tuple[Chain, ...] = ()
    epilogue: Epilogue = EMPTY

    def __post_init__(self) -> None:
        for batch in self.batches:
            checked_int(batch, "batch", "tune")
        if not self.patterns or not self.batches:
            raise InvalidInputError("tune: give at least one pattern and one batch")
        if not 0 < self.budget_s < float("inf"):
            raise InvalidInputError(f"tune: seconds {self.budget_s!r}: give more than 0")
        if self.tf32 and (self.dtype != "float32" or self.device.type != "cuda"):
            raise InvalidInputError(
                f"tune: TF32 is a precision of float32 on CUDA, not of {self.dtype} on "
                f"{self.device.type}"
            )

    def products(self) -> list[tuple[Pattern, int]]:
        """The products to tune: (pattern, batch), without duplicates."""
        patterns = [*self.patterns]
        if self.backward:
            patterns += [pattern.transpose() for pattern in self.patterns]
        return [
            (p, batch) for p in dict.fromkeys(patterns) for batch in dict.fromkeys(self.batches)
        ]

    def wholes(self) -> list[tuple[Problem, int]]:
        """The chains that one kernel computes, with batches; tuned after their factors."""
        exact = self.dtype != "float32" or not self.tf32
        problems = [
            Problem(chain, self.dtype, self.batch_last, exact, self.epilogue)
            for chain in dict.fromkeys(self.chains)
        ]
        return [
            (problem, batch)
            for problem in problems
            for batch in dict.fromkeys(self.batches)
            if planner.whole_choice(problem, batch, self.device) is not None
        ]


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
        >>> patterns = (Pattern(2, 16, 16, 2),)
        >>> request = TuneRequest(patterns, (8,), torch.device("cpu"), budget_s=0.01)
        >>> [report.batch for report in tune(request)]
        [8]
        >>> [report.source for report in tune(request)]
        ['recorded']
    """
    _check_memory(request)
    for pattern, batch in request.products():
        record = None if request.again else recorded(request, pattern, batch)
        source: Source = "measured" if record is None else "recorded"
        yield from_record(record or _measured(request, pattern, batch), source)
    for problem, batch in request.wholes():
        backend = backend_of(request.device.type)
        identity, key = backend.fingerprint(request.device), backend.key(problem, batch)
        known = None if request.again else tuning_cache.load(identity, key)
        if known is None:
            known, source = _measured_whole(request, problem, batch), "measured"
        else:
            source = "recorded"
        if known is not None:
            yield from_record(known, source)


def _check_memory(request: TuneRequest) -> None:
    for pattern, batch in request.products():
        features = (pattern.in_features, pattern.out_features)
        sizes = (features, pattern.nnz, batch, request.dtype, request.device, f"factor {pattern}")
        if request.again or recorded(request, pattern, batch) is None:
            limits.check_product(*sizes)


def recorded(request: TuneRequest, pattern: Pattern, batch: int) -> Record | None:
    """The record on disk for a product of the request; None if there is none."""
    exact = request.dtype != "float32" or not request.tf32
    backend = backend_of(request.device.type)
    problem = Problem.of_factor(pattern, request.dtype, request.batch_last, exact)
    key = backend.key(problem, batch)
    return tuning_cache.load(backend.fingerprint(request.device), key)


def all_recorded(device: torch.device) -> list[Record]:
    """The records on disk for a device.

    Raises:
        UnavailableError: the CUDA driver's bindings are missing.
    """
    return tuning_cache.load_all(backend_of(device.type).fingerprint(device))


def _measured(request: TuneRequest, pattern: Pattern, batch: int) -> Record:
    problem = Problem.of_factor(pattern, request.dtype, request.batch_last)
    operands = random_operands(problem, batch, request.device)
    backend = backend_of(request.device.type)
    with _precision(request):
        (weight,) = operands.weights
        return backend.tune(operands.x, weight, request.batch_last, request.budget_s)


def _measured_whole(request: TuneRequest, problem: Problem, batch: int) -> Record | None:
    with _precision(request):
        operands = random_operands(problem, batch, request.device)
        return plan_autotuner.tune(operands, problem, request.budget_s)


def _precision(request: TuneRequest) -> contextlib.AbstractContextManager[None]:
    """Torch's precision of products as the request has it."""
    if request.dtype != "float32" or request.device.type != "cuda":
        return contextlib.nullcontext()
    return precision.fp32_products("tf32" if request.tf32 else "ieee")


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
