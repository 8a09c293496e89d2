"""Models from request to files: measure what is missing, keep each case, report."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ksopt.bench import journal
from ksopt.bench.journal import Form, Journal
from ksopt.bench.models import measuring
from ksopt.bench.models.build import build
from ksopt.bench.models.measuring import How
from ksopt.bench.models.request import ModelsRequest
from ksopt.bench.models.results import Case, Subject
from ksopt.jit import source_digest
from ksopt.measure import device as devices

SCHEMA = "ksopt.bench.models/1"
FORM: Form[Subject, Case] = Form(
    "ksopt bench models", SCHEMA, lambda case: case.subject, Case.to_json, Case.of_json
)
# What a time can depend on. A change anywhere else (reports, search, documents) changes none.
_CODE = (
    *("ksopt.csrc", "ksopt.kernels", "ksopt.jit", "ksopt.measure", "ksopt.ops", "ksopt.compile"),
    *("ksopt.baselines", "ksopt.batched", "ksopt.functional", "ksopt.nn.layers", "ksopt.epilogue"),
    *("ksopt.precision", "ksopt.bench.models.build", "ksopt.bench.models.chains"),
    *("ksopt.bench.models.accuracy", "ksopt.bench.models.measuring"),
    "ksopt.bench.models.spellings",
)

Progress = Callable[[str], None]


def run_models(
    request: ModelsRequest,
    out: Path,
    *,
    timeout_s: float | None = None,
    progress: Progress = lambda _: None,
    kept: Callable[[Journal[Subject, Case]], None] = lambda _: None,
) -> str:
    """Measure what the folder does not hold yet.

    Args:
        request: what to measure.
        out: the folder; a run of the same request in the same folder goes on.
        timeout_s: seconds after which no further case is begun.
        progress: called with a line of text before each thing that takes long.
        kept: called with all that is kept, first and after each case.

    Returns:
        "" if every case is measured, else "timeout" or "interrupted". Ctrl-C loses the case under
        way only.

    Raises:
        InvalidInputError: the folder holds something else, or a rule or plan does not fit a model.
        UnavailableError: the library ``transformers`` is not there.
    """
    began = time.monotonic()
    for model in dict.fromkeys(subject.model for subject in request.subjects):
        _check(request, model)
    record = devices.record(request.device)
    asked = journal.identity(request.identity(), record, source_digest.digest(*_CODE))
    with journal.opened(out, FORM, asked) as book:
        missing = [subject for subject in request.subjects if subject not in book.measured]
        if missing:
            book.begin_run(request.command, record)
        kept(book)
        try:
            for subject in missing:
                if timeout_s is not None and time.monotonic() - began >= timeout_s:
                    return "timeout"
                started = time.monotonic()
                book.add(_measured(request, subject, progress))
                progress(f"{subject}: {time.monotonic() - started:.0f} s")
                kept(book)
        except KeyboardInterrupt:
            return "interrupted"
    return ""


def _check(request: ModelsRequest, model: str) -> None:
    """Refuse before anything is written what a model does not fit: it is built without memory."""
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
        dynamic=options.dynamic,
        fresh_caches=options.fresh_caches,
        tune=options.tune,
        seconds=options.seconds,
        ways=request.ways,
    )
    found = measuring.measure_case(built, how, lambda what: progress(f"{subject}: {what}"))
    shape = tuple(built.inputs.shape)
    case = Case(subject, size.depth, built.chains, built.weights, shape, found)
    del built
    gc.collect()  # the next model may need the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return case
