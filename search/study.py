"""A search from request to report: an Optuna study over the chains of a space."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import optuna
import torch

from ksopt.kernels.compile_ahead import Compilers, Target
from ksopt.measure import device as devices
from ksopt.measure import energy
from ksopt.measure.roofline import measure_roofline
from ksopt.search import (
    device_locks,
    feasibility,
    finals,
    metrics,
    recommend,
    study_store,
    write_errors,
)
from ksopt.search.progress import Progress, Silent
from ksopt.search.report import export, phrases
from ksopt.search.request import SearchRequest
from ksopt.search.results import SearchResult
from ksopt.search.run_record import RunRecord, result_of
from ksopt.search.space.space import build
from ksopt.search.trained_weights import TrainedWeights
from ksopt.search.user_score import Score
from ksopt.search.worker_pool import Crew, Share, sampler_name
from ksopt.search.worker_processes import Spare

# Large enough that a GPU is busy and a CPU answers in milliseconds.
DEFAULT_BATCH = {"cpu": 256, "cuda": 8192}


def run_search(request: SearchRequest, progress: Progress | None = None) -> SearchResult:
    """Measure chains for a layer on this device, recommend, and write the report.

    Run again with the same output folder, it goes on with the study that is there: nothing that was
    measured is measured again, except that the finalists and the dense layer are always timed anew
    and together, so that no verdict rests on times of two processes. Ctrl-C ends it early, with a
    report of what was measured.

    Args:
        request: What to search.
        progress: Told how far it is; None shows nothing.

    Returns:
        What was found. ``result.folder`` holds report.html, report.md, results.json, plan.json,
        trials.csv and (unless another storage was given) study.db.

    Raises:
        InvalidInputError: No such device, or no such function of a score; no chain within any
            budget; an output folder or storage that cannot be used, or that holds a study of
            something else.
        KsoptError: The study cannot be written any more; a worker failed.

    Example:
        >>> import tempfile
        >>> request = SearchRequest(
        ...     "32x64", budgets=("50%",), batch=16, device="cpu", trials=3, out=tempfile.mkdtemp()
        ... )
        >>> result = run_search(request)
        >>> [trial.state for trial in result.trials], result.recommendations[0].chosen is not None
        (['complete', 'complete', 'complete'], True)
    """
    began = time.monotonic()
    progress = progress or Silent()
    try:
        with quiet_optuna():
            return _run(request, progress, began)
    finally:
        progress.close()


def _run(request: SearchRequest, progress: Progress, began: float) -> SearchResult:
    Score.of(request)  # refused before anything is written or measured
    device = devices.resolve(request.device)
    request = replace(
        request,
        device=str(device),
        batch=request.batch or DEFAULT_BATCH[device.type],
    )
    request = replace(request, out=request.out or _default_folder(request))
    feasibility.check([request], device)  # refused before anything is listed
    storage = study_store.storage_of(request)
    meter = energy.Meter(device) if request.energy else None  # refused before anything is measured
    record = devices.record(device)
    weights = TrainedWeights.of(request, device)
    if weights is not None and weights.sentence:
        progress.note(weights.sentence)
    progress.note(f"listing the chains of {phrases.layer(request.size)} within the budget")
    # Several workers have compilers of their own.
    target = Target.of(device) if request.workers == 1 else None
    with Compilers(target) as compilers, Spare.of(device) as spare:
        space = build(request)
        with (
            study_store.folder(request) as folder,
            write_errors.in_words(storage.url, storage.file),
        ):
            study_store.refuse_another_report(folder, several=False)
            study = study_store.open_study(
                storage, request, record, None if weights is None else weights.digest
            )
            progress.note(f"measuring the roofline of {record.name}")
            with device_locks.device(device):
                roofline = measure_roofline(device, request.dtype)
            number = study_store.begin_run(storage, study, record)
            sampler = sampler_name(space, request)
            kept = RunRecord.begin(request, number, record, roofline, space, sampler)
            kept.keep(study)
            share = Share(request, study, number, space, weights)
            stopped = Crew([share], device, storage, roofline, compilers, meter).run(
                progress, began
            )
            kept = concluded(share, kept, device, spare, stopped, progress, began)
            result = result_of(study, kept, folder)
            export.write(result, folder)
            return result


def concluded(
    share: Share,
    kept: RunRecord,
    device: torch.device,
    spare: Spare,
    stopped: str | None,
    progress: Progress,
    began: float,
) -> RunRecord:
    """A run at its end: its finalists timed in the spare process unless it was interrupted."""
    request = share.request
    assert request.batch is not None
    trials = study_store.records(share.study, kept.roofline, request.batch)
    elected = recommend.elect(
        recommend.admitted(trials, request), share.space.steps, request.max_error
    )
    if elected and stopped != "interrupted":
        progress.note(
            f"timing {len(elected)} finalists of {request.size} against each other and dense"
        )
        try:
            chains = [trial.facts.chain for trial in elected]
            final_began = time.monotonic()
            dense_us = study_store.dense_us(trials)
            assert dense_us is not None  # every elected trial has it
            final = finals.trusted(request, device, chains, spare, dense_us, progress.note)
            kept = replace(kept, final=final, final_seconds=time.monotonic() - final_began)
            for metric in metrics.measured(request):
                if metric.final is not None:
                    # Should it fail now, the final is not lost.
                    until_now = time.monotonic() - began
                    replace(kept, stopped=stopped, seconds=until_now).keep(share.study)
                    progress.note(f"measuring the {metric.title} of the finalists and of dense")
                    again = metric.final(request, device, chains)
                    kept = replace(kept, final_values={**kept.final_values, metric.name: again})
        except KeyboardInterrupt:
            stopped = "interrupted"
    kept = replace(kept, stopped=stopped, seconds=time.monotonic() - began)
    kept.keep(share.study)
    return kept


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna's log would break the progress bar; failures are in the report."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _default_folder(request: SearchRequest) -> Path:
    device = request.device.replace(":", "")
    name = f"ksopt-report-{request.size}-{device}-{request.dtype}-{request.layout}-{request.batch}"
    return Path(name)
