"""The product on CPU by the fastest of PyTorch's implementations for the problem.

At the first product of a problem (pattern, dtype, layout, batch to the next power of two, threads)
the few candidates are timed on the call's tensors; the choice lasts for the life of the process.
Each candidate is run once to warm up, then in at most ``ROUNDS`` rounds that stop after the first
one to end past ``BUDGET_S`` seconds: a first call costs that, or two runs of each candidate if they
are longer (one of those that are slow and far behind). Weights change while training, so nothing
that depends on their values is cached, and every candidate is timed with the preparation of its
weight.

Where the host library was built before (`ksopt doctor` builds it), it multiplies in the way that
was chosen, with less of Python. Building takes some seconds, which no product here waits for.

A choice of ``ksopt tune``, measured for longer, is taken from disk without timing; what a first
product measures in a moment, on a machine that may be busy, is not written there.

Candidates sum in different orders, so two processes that choose differently differ in the last
bits. Under ``torch.use_deterministic_algorithms``, with ``KSOPT_TUNE=off`` or ``model`` (the CPU
has no other model) and while another thread is timing, nothing is timed and a fixed rule decides:

expand for d > 1 with blocks of at most 32 rows and columns (b*d and c*d), where d times the flops
cost less than the copies; bmm for all other factors.

The expanded and dense candidates multiply by stored zeros too, and zero times infinity is NaN: what
is not finite in one feature would reach outputs which do not depend on it. So the sum of what they
return is looked at (and timed with them): where it is not finite, bmm computes the product again.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ksopt import settings
from ksopt.baselines import BASELINES, Baseline
from ksopt.jit import host
from ksopt.kernels import host_products, tuning_cache
from ksopt.kernels.autotuner import Competitor, Source, raced
from ksopt.kernels.backends.base import DeviceBackend, Unmeasured, register_backend
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families import pytorch_ops
from ksopt.kernels.host_products import run_known, run_known_changing
from ksopt.kernels.problem import DeviceSpec, Problem, ProblemKey, bits_of
from ksopt.kernels.tuning_cache import Fingerprint, Record
from ksopt.measure.interleaved import Rules, quickest, warm_up_calls
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name
from ksopt.system.cpu import cpu_name

BUDGET_S = 0.02
ROUNDS = 5
_TUNING_ROUNDS = 100

# The fixed rule's largest expanded block. Measured with one thread and batches of 4, 16 and 256 on
# an AVX-512 CPU: up to 32 x 32, expand beat bmm in most cases (by up to 9.8x at batch 256, and lost
# by at most 1.9x at batch 4); at 64 x 64 they were within 1.7x of each other, and beyond bmm won.
_MAX_EXPANDED = 32


@dataclass(frozen=True)
class _Choice:
    pattern: Pattern
    baseline: Baseline

    def multiply(
        self, x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None
    ) -> Tensor:
        prepared = self.baseline.prepare(weight, batch_last)
        y = self.baseline.multiply(x, prepared, self.pattern, batch_last, out)
        if self.baseline.name in pytorch_ops.FILLED and not _is_finite(y):
            exact = BASELINES["bmm"]
            prepared = exact.prepare(weight, batch_last)
            y = exact.multiply(x, prepared, self.pattern, batch_last, out)
        return y


def _is_finite(y: Tensor) -> bool:
    """Whether all numbers are finite, by their sum, which is the fastest check.

    A sum of finite numbers may overflow, which costs a product more.
    """
    wide = torch.float32 if y.dtype.itemsize < 4 else y.dtype
    return math.isfinite(y.sum(dtype=wide).item())


_Key = tuple[tuple[int, ...], torch.dtype, bool, int, int]
_choices: dict[_Key, _Choice] = {}
_timing = threading.Lock()


def _after_fork() -> None:
    # The thread that held it is not in the child.
    global _timing
    _timing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _register_with_host(choice: _Choice, x: Tensor, weight: Tensor, batch_last: bool) -> None:
    name, p = choice.baseline.name, choice.pattern
    by_groups = name == "bmm" and p.a > 1  # as batched.py does on a CPU
    entry = pytorch_ops.entry(name, p, batch_last, 0, by_groups)
    if entry is not None:
        entry = replace(entry, repacks=True, any_rows=True)
        for changing in (False, True):
            host_products.know(x, weight, batch_last, changing, entry)


def run(x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None) -> Tensor:
    """y = x Kᵀ.

    Args:
        x: [*batch, N], or [N, *batch] when batch_last; any strides, float dtype.
        weight: [a, b, c, d], of x's dtype, any strides.
        batch_last: the layout.
        out: where y is written, instead of into new memory: of y's shape and x's dtype, contiguous,
            and sharing no memory with x and weight.

    Returns:
        y: [*batch, M], or [M, *batch], contiguous; new, or in ``out``.
    """
    shape = weight.shape
    batch = x.numel() // (shape[0] * shape[2] * shape[3])
    key = (shape, x.dtype, batch_last, bits_of(batch), torch.get_num_threads())
    deterministic = torch.are_deterministic_algorithms_enabled()
    choice = None if deterministic else _choices.get(key)
    if choice is None:
        pattern = Pattern(*shape)
        choice = _Choice(pattern, BASELINES[rule(pattern)])
        if batch > 0 and not deterministic:
            if settings.tuning() != "measure":
                _choices[key] = choice
            elif (tuned := _tuned(pattern, x.dtype, batch_last, batch)) is not None:
                choice = _choices[key] = tuned
            elif _timing.acquire(blocking=False):
                try:
                    choice = _choices[key] = _fastest(pattern, x, weight, batch_last)
                finally:
                    _timing.release()
    if _choices.get(key) is choice and x.is_contiguous() and host.load_built():
        _register_with_host(choice, x, weight, batch_last)
        # By what computes the next product of the same tensors, so that it has the same bits.
        y = run_known(x, weight, batch_last, out)
        if y is not None:
            return y
    return choice.multiply(x, weight, batch_last, out)


def multiply_by_bmm(x: Tensor, weight: Tensor, batch_last: bool) -> Tensor:
    """y = x Kᵀ by one batched GEMM, on any device: `run` without a choice."""
    return _bmm(weight.shape).multiply(x, weight, batch_last)


@functools.lru_cache(maxsize=1024)
def _bmm(shape: tuple[int, int, int, int]) -> _Choice:
    return _Choice(Pattern(*shape), BASELINES["bmm"])


def rule(pattern: Pattern) -> str:
    """Name of the baseline that the fixed rule takes (see the top of this file)."""
    small = max(pattern.b, pattern.c) * pattern.d <= _MAX_EXPANDED
    return "expand" if pattern.d > 1 and small else "bmm"


def chosen() -> dict[str, str]:
    """The choices of this process: problem -> baseline, both as text."""
    return {
        f"{Pattern(*shape)} {dtype_name(dtype)} "
        f"{'batch_last' if batch_last else 'batch_first'} batch<={2**bits} threads={threads}": (
            choice.baseline.name
        )
        for (shape, dtype, batch_last, bits, threads), choice in sorted(
            _choices.items(), key=lambda item: str(item[0])
        )
    }


def forget() -> None:
    """Drop every choice, so that the next product of each problem chooses again."""
    _choices.clear()
    host_products.forget()


def tune(x: Tensor, weight: Tensor, batch_last: bool, budget_s: float) -> Record:
    """Measure for these operands even if a choice exists, and store the choice on disk.

    Args:
        x, weight, batch_last: as for `run`.
        budget_s: seconds for the timing.
    """
    pattern = Pattern(*weight.shape)
    batch = x.numel() // pattern.in_features
    problem_key = ProblemKey.of(pattern, dtype_name(x.dtype), batch, batch_last, exact=True)
    ours = fingerprint()
    with _timing, tuning_cache.alone(ours, problem_key):
        record = _raced(problem_key, x, weight, budget_s, _TUNING_ROUNDS)
        tuning_cache.save(ours, record)
    key = (tuple(weight.shape), x.dtype, batch_last, problem_key.bits, torch.get_num_threads())
    _choices[key] = _Choice(pattern, BASELINES[record.chosen(changing=True).way])
    if x.is_contiguous() and host.load_built():
        _register_with_host(_choices[key], x, weight, batch_last)
    return record


def fingerprint() -> Fingerprint:
    """The facts that choices on this CPU depend on."""
    return {
        "device": _cpu_name(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "code": tuning_cache.code_digest(),
    }


@functools.cache
def _cpu_name() -> str:
    return cpu_name()


def _tuned(pattern: Pattern, dtype: torch.dtype, batch_last: bool, batch: int) -> _Choice | None:
    """The baseline that ``ksopt tune`` chose, if there is one and it still exists."""
    problem_key = ProblemKey.of(pattern, dtype_name(dtype), batch, batch_last, exact=True)
    record = tuning_cache.load(fingerprint(), problem_key)
    name = None if record is None else record.chosen(changing=True).way
    if name not in pytorch_ops.names(problem_key.problem, "cpu"):
        return None
    return _Choice(pattern, BASELINES[name])


def _fastest(pattern: Pattern, x: Tensor, weight: Tensor, batch_last: bool) -> _Choice:
    batch = x.numel() // pattern.in_features
    key = ProblemKey.of(pattern, dtype_name(x.dtype), batch, batch_last, exact=True)
    record = _raced(key, x, weight, BUDGET_S, ROUNDS)
    return _Choice(pattern, BASELINES[record.chosen(changing=True).way])


def _raced(key: ProblemKey, x: Tensor, weight: Tensor, budget_s: float, rounds: int) -> Record:
    """The time of each candidate: no prepared weight is cached here, and the fastest is taken."""
    problem = key.problem
    competitors = [
        Competitor(
            Candidate(name, problem, math.inf),
            _Choice(problem.pattern, BASELINES[name]).multiply,
            "repacked" if pytorch_ops.prepares(name, problem) else "any",
            [(x, weight, problem.batch_last)],
        )
        for name in pytorch_ops.names(problem, "cpu")
    ]
    warm_up = warm_up_calls(1, long_us=budget_s * 1e6)
    rules = Rules(warm_up, budget_s, rounds, budget_with_warm_up=True)
    rows = x.numel() // problem.chain.in_features
    record, _ = raced(
        key, rows, competitors, x.device, rules, lambda results, *_: quickest(results)
    )
    return record


@register_backend
class CpuBackend(DeviceBackend):
    """The backend of CPUs: PyTorch's implementations, timed at the first product of a problem."""

    device_type = "cpu"

    run_known = staticmethod(run_known)
    run_known_changing = staticmethod(run_known_changing)
    run = staticmethod(run)
    tune = staticmethod(tune)
    forget = staticmethod(forget)

    def fingerprint(self, device: torch.device) -> Fingerprint:
        """See `fingerprint`."""
        return fingerprint()

    def key(self, problem: Problem, batch: int) -> ProblemKey:
        """A CPU has one precision."""
        return ProblemKey.of_problem(replace(problem, exact=True), batch)

    def measured(
        self, key: ProblemKey, device: torch.device, mode: str, changing: bool
    ) -> tuple[Record, Source] | None:
        """The record of `tune`: measurements of a first product stay in the process."""
        record = tuning_cache.load(fingerprint(), key) if mode == "measure" else None
        return None if record is None else (record, "recorded")

    def unmeasured(
        self, key: ProblemKey, batch: int, spec: DeviceSpec | None, mode: str
    ) -> Unmeasured:
        """The fixed rule's choice."""
        if mode == "measure":
            reason = (
                "the rule's choice; the first product times PyTorch's ways and may take another"
            )
        else:
            unmeasured = torch.are_deterministic_algorithms_enabled()
            why = "torch.use_deterministic_algorithms" if unmeasured else f"KSOPT_TUNE={mode}"
            reason = f"{why}: the CPU's fixed rule"
        return Unmeasured(rule(key.problem.pattern), None, None, "rule", reason)
