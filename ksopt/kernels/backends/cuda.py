"""The product on a CUDA device by the fastest of ksopt's kernels and PyTorch's implementations.

With ``KSOPT_TUNE=measure``, the default, the first product with a key (pattern, dtype, layout,
precision, alignment, batch to the next power of two) compares the kernels that the cost models rank
best with float64 and times them against PyTorch's ways, on the operands at hand; so nothing is
wrong, or slower than PyTorch by more than the noise of a few runs. It takes `interleaved.BUDGET_S`
seconds and the compilation of at most `registry.MOST_KERNELS` kernels. The choice is stored on
disk: the next process, or one that waits for this, uses it without timing. Where nothing is timed
decisions.py says what is taken instead.

Each way whose weight is prepared is timed with the preparation and without it, which makes two
choices: one for weights that are prepared once (weight_cache.py) and one for weights that change.

``KSOPT_TUNE=off`` takes PyTorch's batched product and neither compiles nor reads anything.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ksopt import precision
from ksopt.epilogue import After
from ksopt.errors import UnavailableError
from ksopt.jit import driver
from ksopt.kernels import factor_epilogue, host_products, registry, tuning_cache, weight_cache
from ksopt.kernels.autotuner import Choice, Decision, Source, measured
from ksopt.kernels.backends.base import DeviceBackend, Unmeasured, backend_of, register_backend
from ksopt.kernels.decisions import Decider, Question, by_rule, known_record, load
from ksopt.kernels.host_products import run_known, run_known_repacked
from ksopt.kernels.launcher import NO_PACKING, TORCH, Enterable
from ksopt.kernels.operands import Operands
from ksopt.kernels.packing_launcher import PreparingLauncher
from ksopt.kernels.problem import DeviceSpec, Problem, ProblemKey, Rows, bits_of, rows_of
from ksopt.kernels.tuning_cache import Fingerprint, Record
from ksopt.measure.accuracy import checking
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name

_Key = tuple[tuple[int, ...], torch.dtype, bool, bool, Rows, int, int]
_decider: Decider[_Key, Decision] = Decider(threading.Lock(), keeps_stopgaps=True)
_decisions = _decider.table
_predicted: dict[_Key, Decision] = {}  # under torch.use_deterministic_algorithms
_registered: set[_Key] = set()  # decisions registered with the host library


def _register_with_host(decision: Decision, x: Tensor, weight: Tensor, batch_last: bool) -> None:
    for repacked, choice in ((False, decision.cached), (True, decision.repacked)):
        call = (
            choice.call.for_rows(x) if isinstance(choice.call, PreparingLauncher) else choice.call
        )
        entry = call.entry() if isinstance(call, Enterable) else None
        if entry is not None and repacked:
            # No prepared form of a changing weight is cached: each call prepares it.
            entry = replace(entry, repacks=True) if entry.kind == TORCH else entry
            prepares = entry.repacks or entry.packing != NO_PACKING
            entry = entry if prepares or entry.form == 0 else None
        host_products.register(x, weight, batch_last, repacked, entry)


def run(x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None) -> Tensor:
    """y = x K^T.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last; any strides, on a CUDA device.
        weight: (a, b, c, d), of x's dtype and device, any strides.
        batch_last: the layout.
        out: where y is written, instead of into new memory: of y's shape and x's dtype and device,
            contiguous, aligned to 16 bytes, and sharing no memory with x and weight.

    Returns:
        y: (*batch, M) or (M, *batch), contiguous; new, or in ``out``.
    """
    call = choice_for(x, weight, batch_last).call
    return call(x, weight) if out is None else call(x, weight, out)


def run_within(
    x: Tensor, weight: Tensor, batch_last: bool, after: After, out: Tensor | None = None
) -> Tensor | None:
    """The product and what is after it in one launch: see `DeviceBackend.run_within`."""
    if x.numel() == 0:
        return None
    return factor_epilogue.run(choice_for(x, weight, batch_last), x, weight, after, out)


def choice_for(x: Tensor, weight: Tensor, batch_last: bool) -> Choice:
    """The choice that `run` takes for these operands, decided now if it is not yet."""
    shape, dtype = weight.shape, x.dtype
    batch = x.numel() // (shape[0] * shape[2] * shape[3])
    rows = rows_of(x, batch_last, batch)
    exact = dtype != torch.float32 or precision.is_exact()
    bits = bits_of(batch)
    key = (shape, dtype, batch_last, exact, rows, bits, x.get_device())
    decision = _table().get(key) or _decide(key, x, weight, batch)
    if key not in _registered and _decisions.get(key) is decision and x.is_contiguous():
        _registered.add(key)
        _register_with_host(decision, x, weight, batch_last)
    # The same object wherever the choice prepares no weight.
    if decision.cached is decision.repacked or not weight_cache.are_repacked(key[-1]):
        return decision.cached
    return decision.repacked


def forget() -> None:
    """Drop this process's choices (not those on disk): later calls choose or read again."""
    _decider.forget()
    _predicted.clear()
    _registered.clear()
    spec_of.cache_clear()
    host_products.forget()


def tune(x: Tensor, weight: Tensor, batch_last: bool, budget_s: float) -> Record:
    """Measure for these operands even if a choice exists; store the result here and on disk.

    Args:
        x, weight, batch_last: as for `run`.
        budget_s: seconds for the timing of the ways; compilation comes on top.

    Raises:
        UnavailableError: the CUDA driver's bindings are missing, so nothing could be stored.
    """
    key = _key_of(problem_key_of(x, weight, batch_last), x.get_device())
    question = _question(key, x, weight)
    register = partial(_register_with_host, x=x, weight=weight, batch_last=batch_last)
    return _decider.tune(key, question, budget_s, register)


def known(problem_key: ProblemKey, device: int) -> Decision | None:
    """The decision of this process for a key; None if there is none yet."""
    return _table().get(_key_of(problem_key, device))


def remember(problem_key: ProblemKey, device: int, decision: Decision) -> None:
    """Store a decision for a key in this process, and leave the disk alone."""
    _decisions[_key_of(problem_key, device)] = decision


def _table() -> dict[_Key, Decision]:
    return _predicted if torch.are_deterministic_algorithms_enabled() else _decisions


def _key_of(problem_key: ProblemKey, device: int) -> _Key:
    p = problem_key.problem
    dtype = getattr(torch, p.dtype)
    return (
        p.pattern.weight_shape,
        dtype,
        p.batch_last,
        p.exact,
        problem_key.rows,
        problem_key.bits,
        device,
    )


def problem_key_of(x: Tensor, weight: Tensor, batch_last: bool) -> ProblemKey:
    """The key of choices for these operands, at torch's present precision."""
    pattern, dtype = Pattern(*weight.shape), dtype_name(x.dtype)
    batch = x.numel() // pattern.in_features
    exact = dtype != "float32" or precision.is_exact()
    rows = rows_of(x, batch_last, batch)
    return ProblemKey(Problem.of_factor(pattern, dtype, batch_last, exact), rows, bits_of(batch))


@functools.cache
def spec_of(device: int) -> DeviceSpec | None:
    """The spec of a CUDA device, which kernels must fit; None, and a warning, without a driver."""
    try:
        return DeviceSpec.of_device(device)
    except UnavailableError as error:
        registry.warn_once(str(error))
        return None


def _decide(key: _Key, x: Tensor, weight: Tensor, batch: int) -> Decision:
    if batch == 0:  # not stored: its key is that of one row, which is to be timed
        return by_rule(problem_key_of(x, weight, key[2]).problem)
    decision, is_final = _decider.decide(key, _question(key, x, weight))
    return _table().setdefault(key, decision) if is_final else decision


def _question(key: _Key, x: Tensor, weight: Tensor) -> Question:
    problem_key, device = problem_key_of(x, weight, key[2]), key[-1]
    race = partial(_measured, problem_key, device, x, weight)
    return Question(problem_key, torch.device("cuda", device), backend_of("cuda"), race)


def _measured(
    problem_key: ProblemKey,
    device: int,
    x: Tensor,
    weight: Tensor,
    budget_s: float,
    previous: Record | None = None,
) -> Decision:
    with torch.no_grad():
        check, x, weight = checking(x.detach(), weight.detach(), problem_key.problem.batch_last)
    operands, place = Operands(x, (weight,)), torch.device("cuda", device)
    return measured(problem_key, operands, place, spec_of(device), budget_s, check.judge, previous)


def fingerprint(device: int) -> Fingerprint:
    """The facts that choices on CUDA device ``device`` depend on.

    Raises:
        UnavailableError: the driver or its bindings are missing.
    """
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "driver": driver.version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "code": tuning_cache.code_digest(),
    }


@register_backend
class CudaBackend(DeviceBackend):
    """The backend of CUDA devices: candidates are timed at the first product of a problem."""

    device_type = "cuda"

    # The functions themselves: a call more would show in the host's time of a product.
    run_known = staticmethod(run_known)
    run_known_repacked = staticmethod(run_known_repacked)
    run = staticmethod(run)
    run_within = staticmethod(run_within)
    choice_for = staticmethod(choice_for)
    tune = staticmethod(tune)
    forget = staticmethod(forget)

    def choose_quickly(self, x: Tensor, weight: Tensor, batch_last: bool, budget_s: float) -> None:
        """Choose in the fewest rounds, unless that was chosen before or is recorded."""
        device = x.get_device()
        problem_key = problem_key_of(x, weight, batch_last)
        if known(problem_key, device) is not None:
            return
        if load(problem_key, torch.device("cuda", device), self) is not None:
            return
        try:
            with torch.cuda.device(device):
                decision = _measured(problem_key, device, x, weight, budget_s)
        except torch.OutOfMemoryError:  # timing takes more than the product itself, which may fit
            return
        remember(problem_key, device, decision)

    def fingerprint(self, device: torch.device) -> Fingerprint:
        """The device's fingerprint (`fingerprint`)."""
        return fingerprint(_index(device))

    def spec(self, device: torch.device) -> DeviceSpec | None:
        """The limits of a device (`spec_of`)."""
        return spec_of(_index(device))

    def measured(
        self, key: ProblemKey, device: torch.device, mode: str, repacked: bool
    ) -> tuple[Record, Source] | None:
        """The measurement behind this process's decision, or a record that can still be built."""
        decision = None if mode == "off" else known(key, _index(device))
        if decision is None and mode != "measure":
            return None
        return known_record(decision, key, device, self)

    def unmeasured(
        self, key: ProblemKey, batch: int, spec: DeviceSpec | None, mode: str
    ) -> Unmeasured:
        """The candidate with the least predicted time."""
        if mode == "off":
            reason = "KSOPT_TUNE=off: always PyTorch's batched product"
            return Unmeasured("bmm", None, None, "rule", reason)
        # Chosen for the key, as a product would be, and predicted for the batch itself.
        several = registry.best_predicted(key.problem, key.largest_batch, spec, mode != "model")
        best, *others = several
        again = registry.restored(key.problem, best.name, best.config, batch, spec)
        us = best.predicted_us if again is None else again.predicted_us
        later = "" if mode == "model" else "; nothing was measured yet"
        against = f", the least of {1 + len(others)} predictions" if others else ""
        reason = f"predicted to take {us:.1f} us{against}{later}"
        return Unmeasured(best.name, best.config, us, "model", reason)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
