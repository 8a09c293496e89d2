"""Fill the cache of choices ahead of time: what `ksopt tune` does, as a library."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

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
    """Which products are tuned, and how.

    Args:
        patterns: supports of the factors, each once.
        batches: rows of x.
        device: a CPU or CUDA device.
        dtype: "float32", "float16" or "bfloat16".
        batch_last: the layout.
        tf32: whether float32 products are at TF32's accuracy, on CUDA.
        backward: whether to tune the products of the backward pass (the transposed patterns) too.
        budget_s: seconds for timing one product; compilation comes on top.
        again: whether to measure what is recorded already.
        chains: whose patterns are among those: where a kernel takes a whole chain, it races with
            the launches of the factors, for the forward pass.
        epilogue: what follows the products of ``chains``.

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
        """What is tuned: (pattern, batch), each once."""
        patterns = [*self.patterns]
        if self.backward:
            patterns += [pattern.transpose() for pattern in self.patterns]
        return [
            (p, batch) for p in dict.fromkeys(patterns) for batch in dict.fromkeys(self.batches)
        ]

    def wholes(self) -> list[tuple[Problem, int]]:
        """The chains that a kernel computes at once, and batches: tuned after their factors."""
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
    """Tune one product after the other; each choice is on disk before the next begins.

    Args:
        request: what is tuned.

    Yields:
        A report for each of ``request.products()``, then of ``request.wholes()``, as soon as it is
        there.

    Raises:
        InvalidInputError: a product that is not recorded does not fit the device's memory; then
            none is measured.
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
    """What is on disk for a product of the request."""
    exact = request.dtype != "float32" or not request.tf32
    backend = backend_of(request.device.type)
    problem = Problem.of_factor(pattern, request.dtype, request.batch_last, exact)
    key = backend.key(problem, batch)
    return tuning_cache.load(backend.fingerprint(request.device), key)


def all_recorded(device: torch.device) -> list[Record]:
    """Everything on disk for a device.

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


@contextlib.contextmanager
def _precision(request: TuneRequest) -> Iterator[None]:
    """Torch multiplies by the request's precision inside the block."""
    before = torch.backends.cuda.matmul.fp32_precision
    if request.dtype == "float32" and request.device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if request.tf32 else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def summary(reports: Sequence[ChoiceReport]) -> str:
    """One sentence about all of them.

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
