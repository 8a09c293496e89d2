"""Runs `ksopt bench models`: measures the missing cases and stores each one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ksopt.bench import results_log
from ksopt.bench.models import measuring
from ksopt.bench.models.build import build
from ksopt.bench.models.measuring import How
from ksopt.bench.models.request import ModelsRequest
from ksopt.bench.models.results import Case, Subject
from ksopt.bench.results_log import LogFormat, ResultsLog
from ksopt.measure import device as devices

SCHEMA = "ksopt.bench.models/1"
LOG_FORMAT: LogFormat[Subject, Case] = LogFormat(
    "ksopt bench models", SCHEMA, lambda case: case.subject, Case.to_json, Case.of_json
)
# Beside those of every benchmark, the modules that a time can depend on.
_CODE = (
    *("ksopt.compile", "ksopt.nn.layers", "ksopt.bench.models.build", "ksopt.bench.models.chains"),
    *("ksopt.bench.models.plain_layers", "ksopt.bench.models.accuracy"),
    "ksopt.bench.models.measuring",
)

Progress = Callable[[str], None]


def run_models(
    request: ModelsRequest,
    out: Path,
    *,
    timeout_s: float | None = None,
    progress: Progress = lambda _: None,
    on_stored: Callable[[ResultsLog[Subject, Case]], None] = lambda _: None,
) -> str:
    """Measure the cases that the folder does not hold yet.

    Args:
        request: the cases to measure.
        out: the folder; another run of the same request in it continues.
        timeout_s: seconds after which no further case starts.
        progress: called with a line of text before each long step.
        on_stored: called with the log, first and after each case.

    Returns:
        "" if every case is measured, else "timeout" or "interrupted". Ctrl-C loses only the case
        being measured.

    Raises:
        InvalidInputError: the folder holds other measurements, or a rule or plan fits no model.
        UnavailableError: the library ``transformers`` is not installed.
    """
    began = time.monotonic()
    for model in dict.fromkeys(subject.model for subject in request.subjects):
        _check(request, model)
    record = devices.record(request.device)
    identity = results_log.identity(request.identity(), record, _CODE)
    with results_log.opened(out, LOG_FORMAT, identity) as results:
        missing = [subject for subject in request.subjects if subject not in results.measured]
        if missing:
            results.begin_run(request.command, record)
        on_stored(results)
        try:
            for subject in missing:
                if timeout_s is not None and time.monotonic() - began >= timeout_s:
                    return "timeout"
                started = time.monotonic()
                results.add(_measured(request, subject, progress))
                progress(f"{subject}: {time.monotonic() - started:.0f} s")
                on_stored(results)
        except KeyboardInterrupt:
            return "interrupted"
    return ""


def _check(request: ModelsRequest, model: str) -> None:
    """Raise before any file is written if a rule or plan does not fit; allocates no memory."""
    subject = next(subject for subject in request.subjects if subject.model == model)
    rule, nowhere = request.options.chain, torch.device("meta")
    build(request.size(subject), torch.float32, nowhere, rule=rule, plan=request.plan)


def _measured(request: ModelsRequest, subject: Subject, progress: Progress) -> Case:
    options, size, device = request.options, request.size(subject), torch.device(request.device)
    dtype: torch.dtype = getattr(torch, subject.dtype)
    built = build(size, dtype, device, rule=options.chain, plan=request.plan)
    how = How(
        is_step=subject.pass_ == "step",
        is_graphs=subject.mode == "graphs",
        is_recorded=subject.mode == "recorded",
        dynamic=options.dynamic,
        fresh_caches=options.fresh_caches,
        tune=options.tune,
        seconds=options.seconds,
        ways=request.ways,
    )
    ways = measuring.measure_case(built, how, lambda what: progress(f"{subject}: {what}"))
    shape = tuple(built.inputs.shape)
    case = Case(subject, size.depth, built.chains, built.weights, shape, ways)
    del built
    gc.collect()  # the next model may need the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return case
