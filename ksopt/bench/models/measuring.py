"""Checks one model in one dtype, pass and mode, then times all ways in turns.

The truth is the model in float64 (as far as its library computes in float64); accuracy.py has the
allowed error.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ksopt.bench.models.accuracy import (
    Outputs,
    faults_of,
    relative_errors,
    with_worst_gradient,
)
from ksopt.bench.models.build import Built, gradients_of, loss
from ksopt.bench.models.results import (
    DENSE,
    DENSE_AUTOTUNED,
    IMPLEMENTATIONS,
    KS_INDUCTOR,
    KS_KSOPT,
    KS_UNCOMPILED,
    LINEAR_AUTOTUNED,
    LINEAR_KSOPT,
    ImplementationResult,
    Sites,
)
from ksopt.compile import backend
from ksopt.compile.sites import Report, Verdict
from ksopt.errors import first_line
from ksopt.kernels.cuda_graph_weights import prepared_weights
from ksopt.measure.cuda_graphs import Replay
from ksopt.measure.timed_call import TimedCall
from ksopt.measure.timing import Measurement, measure
from ksopt.system.plurals import counted

_LEARNING_RATE = 1e-6  # a step changes the weights, as in training, and the loss hardly
# The first call compiles, the second records a CUDA graph, the third replays it.
_CALLS = 3

Progress = Callable[[str], None]
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Implementation:
    """An implementation of a model: one of its versions, and what compiles it.

    Args:
        name: of `ksopt.bench.models.results.IMPLEMENTATIONS`.
        twin: the version of the model: "dense", "ks", "linear".
        backend: "" (uncompiled), "inductor" or "ksopt".
        mode: of torch.compile.
        tune: ksopt's option; None is its default.
    """

    name: str
    twin: str
    backend: str
    mode: str = "default"
    tune: str | None = None


@dataclass(frozen=True)
class How:
    """The settings of a case's measurement.

    Args:
        is_step: a training step rather than a forward pass.
        is_graphs: whether to run in CUDA graphs of torch.compile's.
        is_recorded: whether to record the whole call, an optimizer's step too, in one CUDA graph.
        dynamic: whether to compile for any batch and length.
        fresh_caches: whether to compile each way with empty caches of torch.
        tune: ksopt's option.
        seconds: approximate time for timing the ways.
        ways: names of the ways to measure.
    """

    is_step: bool
    is_graphs: bool = False
    is_recorded: bool = False
    dynamic: bool = False
    fresh_caches: bool = False
    tune: str | None = None
    seconds: float = 1.0
    ways: tuple[str, ...] = IMPLEMENTATIONS


def implementations(how: How) -> list[Implementation]:
    """The implementations of a case. Uncompiled models have no CUDA graphs of torch.compile's."""
    mode = "reduce-overhead" if how.is_graphs else "default"
    most = "max-autotune" if how.is_graphs else "max-autotune-no-cudagraphs"
    all_ways = [
        Implementation(DENSE, "dense", "inductor", mode),
        Implementation(DENSE_AUTOTUNED, "dense", "inductor", most),
        *([] if how.is_graphs else [Implementation(KS_UNCOMPILED, "ks", "")]),
        Implementation(KS_INDUCTOR, "ks", "inductor", mode),
        Implementation(KS_KSOPT, "ks", "ksopt", mode, how.tune),
        Implementation(LINEAR_KSOPT, "linear", "ksopt", mode, how.tune),
        Implementation(LINEAR_AUTOTUNED, "linear", "ksopt", most, how.tune),
    ]
    return [way for way in all_ways if way.name in how.ways]


def measure_case(
    built: Built, how: How, progress: Progress = lambda _: None
) -> tuple[ImplementationResult, ...]:
    """Compile, check and time every way of a case.

    Args:
        built: the model and its inputs.
        how: the settings.
        progress: called with a phrase before each long step.
    """
    device = built.inputs.device
    progress("float64")
    truths, uncompiled = {}, {}
    for name in ("dense", "ks"):
        truths[name] = _truth(built, name, how)
        call = _call(built, name, _eager(built, name), how)
        uncompiled[name] = relative_errors(call(), truths[name])
    results: list[ImplementationResult] = []
    timed: dict[str, Callable[[], object]] = {}
    with _alone(device):
        inductors: dict[str, float] = {}
        for way in implementations(how):
            progress(f"first calls: {way.name}")
            truth_of = "dense" if way.twin == "dense" else "ks"
            model = built.twin(way.twin)
            result = ImplementationResult(way.name, sum(one.numel() for one in model.parameters()))
            try:
                run = _compiled(model, way, how)
                result, outputs = _first_calls(built, way, run, how, result)
            except RuntimeError as error:  # torch's compiler, a device without memory
                reason = f"failed: {first_line(error)[:300]}"
                results.append(replace(result, faults=(reason,)))
                continue
            errors = relative_errors(outputs, truths[truth_of])
            del outputs
            if way.name == KS_INDUCTOR:
                inductors = errors
            known = [uncompiled[truth_of], *([inductors] if inductors else [])]
            faults = faults_of(errors, known, _eps(built), is_pytorch=way.backend != "ksopt")
            faults = [*result.faults, *faults]
            result = replace(result, errors=with_worst_gradient(errors), faults=tuple(faults))
            results.append(result)
            if not faults:
                timed[way.name] = _timed_call(built, way.twin, run, how)
        progress("timing")
        truths.clear()
        times: dict[str, Measurement] = {}
        if timed:
            with _pass(how):
                times = measure(timed, device, max_seconds=how.seconds, min_repeats=5)
    return tuple(replace(one, time=times.get(one.name)) for one in results)


def _pass(how: How) -> contextlib.AbstractContextManager[object]:
    """The gradient mode of a pass."""
    return contextlib.nullcontext() if how.is_step else torch.inference_mode()


def _eager(built: Built, twin: str) -> Run:
    return built.twin(twin)


def _call(built: Built, twin: str, run: Run, how: How) -> Callable[[], Outputs]:
    """A pass that returns its results."""
    return lambda: _outputs(built.twin(twin), run, built.inputs, built.targets, how)


def _outputs(model: nn.Module, run: Run, inputs: Tensor, targets: Tensor, how: How) -> Outputs:
    model.train(how.is_step)
    if how.is_graphs:
        torch.compiler.cudagraph_mark_step_begin()
    with _pass(how):
        logits = run(inputs)
    if not how.is_step:
        return Outputs(logits.clone())
    value = loss(logits, targets)
    value.backward()
    # A recorded graph writes the next step's results into the same memory.
    gradients = {name: one.clone() for name, one in gradients_of(model).items()}
    model.zero_grad()
    return Outputs(logits.detach().clone(), value.detach(), gradients)


def _timed_call(built: Built, twin: str, run: Run, how: How) -> Callable[[], object]:
    """The timed form of a pass: a step ends with plain SGD."""
    optimizer = torch.optim.SGD(built.twin(twin).parameters(), lr=_LEARNING_RATE)
    call = _plain_call(built, twin, run, how, optimizer.step)
    return _recorded(call, built.inputs, how) if how.is_recorded else call


def _recorded(call: Callable[[], object], inputs: Tensor, how: How) -> Replay:
    """A call as one CUDA graph. In inference it reads weights that were prepared before."""
    with ExitStack() as stack, warnings.catch_warnings():
        # Steps before it ran on another stream; the replay's gradients are compared with float64.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
        if not how.is_step:
            stack.enter_context(prepared_weights())
            stack.enter_context(torch.inference_mode())
        return Replay([lambda _: call()], inputs)


def _replayed(built: Built, twin: str, run: Run, how: How) -> Outputs:
    """The results of a replay of a recorded pass."""
    model, inputs, targets = built.twin(twin).train(how.is_step), built.inputs, built.targets
    results: dict[str, Any] = {}

    def whole() -> None:
        model.zero_grad()
        results["logits"] = run(inputs)
        if how.is_step:
            results["loss"] = loss(results["logits"], targets)
            results["loss"].backward()
            results["gradients"] = gradients_of(model)

    _recorded(whole, inputs, how)()
    _wait(inputs.device)
    logits = results["logits"].detach().clone()
    if not how.is_step:
        return Outputs(logits)
    gradients = {name: one.clone() for name, one in results["gradients"].items()}
    model.zero_grad()
    return Outputs(logits, results["loss"].detach().clone(), gradients)


def _plain_call(
    built: Built, twin: str, run: Run, how: How, update: Callable[[], object]
) -> Callable[[], object]:
    """A pass that drops its results."""
    model = built.twin(twin).train(how.is_step)
    inputs, targets = built.inputs, built.targets
    begin = torch.compiler.cudagraph_mark_step_begin if how.is_graphs else _do_nothing
    if not how.is_step:

        def forward() -> None:
            begin()
            run(inputs)

        return forward

    def step() -> None:
        begin()
        loss(run(inputs), targets).backward()
        update()
        # Not before the next step: another way's step, in the same memory, runs between the two.
        model.zero_grad()

    return step


def _do_nothing() -> None:
    return None


def _truth(built: Built, twin: str, how: How) -> Outputs:
    model = copy.deepcopy(built.twin(twin)).double()
    inputs = built.inputs.double() if built.inputs.is_floating_point() else built.inputs
    return _outputs(model, model, inputs, built.targets, replace(how, is_graphs=False))


def _first_calls(
    built: Built, way: Implementation, run: Run, how: How, result: ImplementationResult
) -> tuple[ImplementationResult, Outputs]:
    """Time the first call, then record the memory and the results of later calls."""
    device, model = built.inputs.device, built.twin(way.twin)
    call = _call(built, way.twin, run, how)
    _free_workspaces(device)
    before = _allocated(device)
    with ExitStack() as stack:
        reports = stack.enter_context(backend.collected())
        if how.fresh_caches:
            stack.enter_context(_fresh_caches())
        first = TimedCall(call, device)
        first()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        plain = _plain_call(built, way.twin, run, how, _do_nothing)
        with _pass(how):
            plain = _recorded(plain, built.inputs, how) if how.is_recorded else plain
            for _ in range(_CALLS - 1):
                plain()
        _wait(device)
    peak = None
    if device.type == "cuda":  # the same memory holds other models
        own = sum(one.numel() * one.element_size() for one in model.parameters())
        peak = torch.cuda.max_memory_allocated(device) - before + own
    outputs = _replayed(built, way.twin, run, how) if how.is_recorded else call()
    result = replace(result, first_s=first.us / 1e6, peak_bytes=peak)
    if way.backend == "ksopt":
        total = _sum(reports)
        # A KSLinear need not be recognised.
        chains = built.chains if way.twin == "ks" else None
        faults = tuple(_missing(total, chains))
        result = replace(result, sites=_sites(total), faults=faults)
    return result, outputs


def _sum(reports: Sequence[Report]) -> Report:
    total = Report()
    for report in reports:
        total.add(report)
    return total


def _sites(report: Report) -> Sites:
    return Sites(
        report.count(Verdict.LOWERED),
        report.count(Verdict.NOT_LOWERED),
        report.count(Verdict.NOT_RECOGNISED),
        report.covered,
        report.pass_s,
        report.deciding_s,
        tuple(site.to_json() for site in report.sites),
    )


def _missing(report: Report, chains: int | None) -> list[str]:
    """The faults of the backend's report, such as chains that it did not recognise."""
    if not report.graphs:
        return ["the backend saw no graph"]
    faults = list(report.notes)
    done = report.count(Verdict.LOWERED) + report.count(Verdict.NOT_LOWERED)
    if chains is not None and done != chains:
        faults.append(f"{counted(done, 'site')} for {counted(chains, 'Kronecker-sparse chain')}")
    faults += [
        f"{site.place} is not recognised: {site.reason}"
        for site in report.sites
        if site.verdict is Verdict.NOT_RECOGNISED
    ]
    return faults


def _eps(built: Built) -> float:
    return torch.finfo(next(built.dense.parameters()).dtype).eps


def _compiled(model: nn.Module, way: Implementation, how: How) -> Run:
    if not way.backend:
        return model
    run: Run = torch.compile(model, fullgraph=True, dynamic=how.dynamic, **_words(way))
    return run


def _words(way: Implementation) -> dict[str, Any]:
    """torch.compile's arguments for a way. Tests replace this to use a faster compiler."""
    if way.tune is None:
        return {"backend": way.backend, "mode": way.mode}
    return {"backend": way.backend, "options": {"mode": way.mode, "tune": way.tune}}


def _nothing(x: Tensor) -> Tensor:
    return x.sin() + 1


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Isolates compilation: no compiled code before or after, no silent eager fallback."""
    torch._dynamo.reset()
    torch.compile(_nothing)(torch.ones(8, device=device))  # Inductor's workers start untimed
    try:
        # All ways share the model's code, which Dynamo compiles again for each.
        with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            yield
    finally:
        torch._dynamo.reset()


@contextmanager
def _fresh_caches() -> Iterator[None]:
    """Empty caches of torch: an entry in them would take no time to compile."""
    from torch._inductor.utils import fresh_cache  # its import creates a folder

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        fresh_cache(dir=folder),
    ):
        yield


def _free_workspaces(device: torch.device) -> None:
    """Free cuBLAS's workspaces before memory is counted, as recording a CUDA graph does."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
