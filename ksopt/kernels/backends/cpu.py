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
from functools import partial

import torch
from torch import Tensor

from ksopt.baselines import BASELINES, Baseline
from ksopt.jit import host
from ksopt.kernels import host_products, tuning_cache
from ksopt.kernels.autotuner import Choice, Competitor, Decision, Source, raced
from ksopt.kernels.backends.base import DeviceBackend, Unmeasured, backend_of, register_backend
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.decisions import Decider, Question, load
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.host_products import run_known, run_known_repacked
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
class _Product:
    """The product by one of PyTorch's implementations."""

    pattern: Pattern
    baseline: Baseline
    batch_last: bool

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """A `candidate.Call`."""
        baseline, pattern, batch_last = self.baseline, self.pattern, self.batch_last
        prepared = baseline.prepare(weight, batch_last)
        y = baseline.multiply(x, prepared, pattern, batch_last, out)
        if baseline.name in pytorch_ops.FILLED and not _is_finite(y):
            exact = BASELINES["bmm"]
            prepared = exact.prepare(weight, batch_last)
            y = exact.multiply(x, prepared, pattern, batch_last, out)
        return y


def _is_finite(y: Tensor) -> bool:
    """Whether all numbers are finite, by their sum, which is the fastest check.

    A sum of finite numbers may overflow, which costs a product more.
    """
    wide = torch.float32 if y.dtype.itemsize < 4 else y.dtype
    return math.isfinite(y.sum(dtype=wide).item())


_Key = tuple[tuple[int, ...], torch.dtype, bool, int, int]
_decider: Decider[_Key, Decision] = Decider(threading.Lock())
_decisions = _decider.table


def _after_fork() -> None:
    # The thread that held it is not in the child.
    _decider.timing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _register_with_host(decision: Decision, x: Tensor, weight: Tensor, batch_last: bool) -> None:
    name, p = decision.repacked.name, decision.repacked.candidate.problem.pattern
    by_groups = name == "bmm" and p.a > 1  # as batched.py does on a CPU
    entry = pytorch_ops.entry(name, p, batch_last, 0, by_groups)
    if entry is not None:
        entry = replace(entry, repacks=True)
        for repacked in (False, True):
            host_products.register(x, weight, batch_last, repacked, entry)


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
    decision = None if deterministic else _decisions.get(key)
    if decision is None:
        decision = _decide(key, x, weight, batch)
    if _decisions.get(key) is decision and x.is_contiguous() and host.load_built():
        _register_with_host(decision, x, weight, batch_last)
        # By what computes the next product of the same tensors, so that it has the same bits.
        y = run_known(x, weight, batch_last, out)
        if y is not None:
            return y
    result: Tensor = decision.repacked.call(x, weight, out)
    return result


def _decide(key: _Key, x: Tensor, weight: Tensor, batch: int) -> Decision:
    question = _question(x, weight, key[2], ROUNDS)
    if batch == 0:  # not stored: its key is that of one row, which is to be timed
        return question.rule()
    decision, is_final = _decider.decide(key, question)
    if is_final and not torch.are_deterministic_algorithms_enabled():
        _decisions.setdefault(key, decision)
    return decision


@dataclass(frozen=True)
class _Question(Question):
    """A product on the CPU. No cost model predicts, and no first measurement goes to disk."""

    def rule(self) -> Decision:
        """The fixed rule's product."""
        return _decision(self.key.problem, rule(self.key.problem.pattern), "rule")

    predicted = rule

    def recorded(self) -> Decision | None:
        """The product that ``ksopt tune`` chose, if there is one and it still exists."""
        record = load(self.key, self.device, self.backend)
        name = None if record is None else record.chosen(repacked=True).way
        if name not in pytorch_ops.names(self.key.problem, "cpu"):
            return None
        return _decision(self.key.problem, name, "recorded", record)

    def first(self) -> Decision:
        """The recorded product; else the one that is measured now, for this process."""
        return self.recorded() or self.race(BUDGET_S, None)


def _question(x: Tensor, weight: Tensor, batch_last: bool, rounds: int) -> _Question:
    pattern = Pattern(*weight.shape)
    batch = x.numel() // pattern.in_features
    key = ProblemKey.of(pattern, dtype_name(x.dtype), batch, batch_last, exact=True)
    race = partial(_fastest, key, x, weight, rounds)
    return _Question(key, torch.device("cpu"), backend_of("cpu"), race)


def _decision(
    problem: Problem, name: str, source: Source, record: Record | None = None
) -> Decision:
    """One choice for all weights: no prepared form is cached here."""
    product = _Product(problem.pattern, BASELINES[name], problem.batch_last)
    choice = Choice(Candidate(name, problem, math.inf), product.multiply, source, record)
    return Decision(choice, choice)


def multiply_by_bmm(x: Tensor, weight: Tensor, batch_last: bool) -> Tensor:
    """y = x Kᵀ by one batched GEMM, on any device: `run` without a choice."""
    return _bmm(weight.shape, batch_last).multiply(x, weight)


@functools.lru_cache(maxsize=1024)
def _bmm(shape: tuple[int, int, int, int], batch_last: bool) -> _Product:
    return _Product(Pattern(*shape), BASELINES["bmm"], batch_last)


def rule(pattern: Pattern) -> str:
    """Name of the baseline that the fixed rule takes (see the top of this file)."""
    small = max(pattern.b, pattern.c) * pattern.d <= _MAX_EXPANDED
    return "expand" if pattern.d > 1 and small else "bmm"


def chosen() -> dict[str, str]:
    """The choices of this process: problem -> baseline, both as text."""
    return {
        f"{Pattern(*shape)} {dtype_name(dtype)} "
        f"{'batch_last' if batch_last else 'batch_first'} batch<={2**bits} threads={threads}": (
            decision.repacked.name
        )
        for (shape, dtype, batch_last, bits, threads), decision in sorted(
            _decisions.items(), key=lambda item: str(item[0])
        )
    }


def forget() -> None:
    """Drop every choice, so that the next product of each problem chooses again."""
    _decider.forget()
    host_products.forget()


def tune(x: Tensor, weight: Tensor, batch_last: bool, budget_s: float) -> Record:
    """Measure for these operands even if a choice exists, and store the choice on disk.

    Args:
        x, weight, batch_last: as for `run`.
        budget_s: seconds for the timing.
    """
    question = _question(x, weight, batch_last, _TUNING_ROUNDS)
    key = (weight.shape, x.dtype, batch_last, question.key.bits, torch.get_num_threads())

    def register(decision: Decision) -> None:
        if x.is_contiguous() and host.load_built():
            _register_with_host(decision, x, weight, batch_last)

    return _decider.tune(key, question, budget_s, register)


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


def _fastest(
    key: ProblemKey,
    x: Tensor,
    weight: Tensor,
    rounds: int,
    budget_s: float,
    previous: Record | None = None,
) -> Decision:
    """The fastest product as it is now, whatever was recorded before."""
    problem = key.problem
    competitors = [
        Competitor(
            Candidate(name, problem, math.inf),
            _Product(problem.pattern, BASELINES[name], problem.batch_last).multiply,
            "repacked" if pytorch_ops.prepares(name, problem) else "any",
            [(x, weight)],
        )
        for name in pytorch_ops.names(problem, "cpu")
    ]
    warm_up = warm_up_calls(1, long_us=budget_s * 1e6)
    rules = Rules(warm_up, budget_s, rounds, budget_with_warm_up=True)
    rows = x.numel() // problem.chain.in_features
    record, _ = raced(
        key, rows, competitors, x.device, rules, lambda results, *_: quickest(results)
    )
    return _decision(problem, record.chosen(repacked=True).way, "measured", record)


@register_backend
class CpuBackend(DeviceBackend):
    """The backend of CPUs: PyTorch's implementations, timed at the first product of a problem."""

    device_type = "cpu"

    run_known = staticmethod(run_known)
    run_known_repacked = staticmethod(run_known_repacked)
    run = staticmethod(run)
    tune = staticmethod(tune)
    forget = staticmethod(forget)

    def fingerprint(self, device: torch.device) -> Fingerprint:
        """The device's fingerprint (`fingerprint`)."""
        return fingerprint()

    def key(self, problem: Problem, batch: int) -> ProblemKey:
        """A CPU has one precision."""
        return ProblemKey.of_problem(replace(problem, exact=True), batch)

    def measured(
        self, key: ProblemKey, device: torch.device, mode: str, repacked: bool
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
