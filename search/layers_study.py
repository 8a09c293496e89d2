"""A search of several layer sizes from request to report: a study for each, measured in turns."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import optuna
import torch

from ksopt.errors import InvalidInputError
from ksopt.kernels.compile_ahead import Compilers, Target
from ksopt.measure import device as devices
from ksopt.measure import energy
from ksopt.measure.roofline import measure_roofline
from ksopt.search import device_locks, feasibility, study_store, whole_model, write_errors
from ksopt.search.layers_record import LayersRecord
from ksopt.search.layers_request import LayersRequest, shared
from ksopt.search.layers_result import LayersResult
from ksopt.search.progress import Progress, Silent
from ksopt.search.report import layers_export, phrases
from ksopt.search.request import Dims, SearchRequest
from ksopt.search.run_record import RunRecord, result_of
from ksopt.search.space.space import Space, build
from ksopt.search.study import DEFAULT_BATCH, concluded, quiet_optuna
from ksopt.search.trained_weights import TrainedWeights
from ksopt.search.user_score import Score
from ksopt.search.worker_pool import Crew, Share, sampler_name
from ksopt.search.worker_processes import Spare

if TYPE_CHECKING:
    from torch import nn

# Of a folder's name that lists the sizes.
_LONGEST_NAME = 80


@dataclass(frozen=True)
class ToMeasure:
    """A model to be timed whole at the end.

    Args:
        model: The model.
        inputs: What it takes: see `ksopt.search.whole_model.measure`.
    """

    model: nn.Module
    inputs: object


def run_layers(
    request: LayersRequest, progress: Progress | None = None, to_measure: ToMeasure | None = None
) -> LayersResult:
    """Measure chains for several layer sizes on this device, recommend, and write one report.

    The sizes are measured in turns, that which is furthest from its trials next, so that whenever
    time is up all have come equally far. Run again with the same output folder it goes on, as
    `ksopt.search.run_search` does.

    Args:
        request: What to search.
        progress: Told how far it is; None shows nothing.
        to_measure: A model to be timed whole, dense and with the plan, at the end.

    Returns:
        What was found. ``result.folder`` holds report.html, report.md, results.json, plan.json,
        trials.csv and (unless another storage was given) study.db.

    Raises:
        InvalidInputError: As `run_search`; no size has a chain within any budget.

    Example:
        >>> import tempfile
        >>> request = LayersRequest.of(
        ...     ("32x64", "64x32"),
        ...     budgets=("50%",), batch=16, device="cpu", trials=4, out=tempfile.mkdtemp(),
        ... )
        >>> result = run_layers(request)
        >>> [(str(one.request.size), len(one.trials)) for one in result.results]
        [('32x64', 2), ('64x32', 2)]
    """
    began = time.monotonic()
    progress = progress or Silent()
    try:
        with quiet_optuna():
            return _run(request, progress, to_measure, began)
    finally:
        progress.close()


def _run(
    request: LayersRequest, progress: Progress, to_measure: ToMeasure | None, began: float
) -> LayersResult:
    Score.of(request.each)  # refused before anything is written or measured
    device = devices.resolve(request.each.device)
    batch = request.each.batch or DEFAULT_BATCH[device.type]
    each = replace(request.each, device=str(device), batch=batch)
    each = replace(each, out=each.out or _default_folder(request, each))
    request = replace(request, each=each)
    feasibility.check(request.requests, device)  # refused before anything is listed
    storage = study_store.storage_of(each)
    meter = energy.Meter(device) if each.energy else None  # refused before anything is measured
    record = devices.record(device)
    target = Target.of(device) if each.workers == 1 else None
    if to_measure is not None:
        dtype = getattr(torch, each.dtype)
        whole_model.check(to_measure.model, to_measure.inputs, device, dtype)
    trained = _trained_weights(request.requests, device, progress)
    in_words = write_errors.in_words(storage.url, storage.file)
    with study_store.folder(each) as folder, Compilers(target) as compilers, in_words:
        study_store.refuse_another_report(folder, several=True)
        spaces, unmet = _spaces(request, progress)
        index = study_store.open_index(storage, each, record)
        kept = LayersRecord(request, unmet)
        kept.keep(index)
        progress.note(f"measuring the roofline of {record.name}")
        with device_locks.device(device):
            roofline = measure_roofline(device, each.dtype)
        shares, runs = [], []
        for one, space in spaces:
            weights = trained.get(one.size)
            study = study_store.open_study(
                storage, one, record, None if weights is None else weights.digest
            )
            number = study_store.begin_run(storage, study, record)
            name = sampler_name(space, one)
            runs.append(RunRecord.begin(one, number, record, roofline, space, name))
            runs[-1].keep(study)
            shares.append(Share(one, study, number, space, weights))
        stopped = Crew(shares, device, storage, roofline, compilers, meter).run(progress, began)
        results = []
        for share, run in zip(shares, runs, strict=True):
            with Spare.of(device) as spare:
                ended = concluded(share, run, device, spare, stopped, progress, began)
            stopped = ended.stopped
            results.append(result_of(share.study, ended, folder))
        result = LayersResult(
            request, tuple(results), unmet, stopped, time.monotonic() - began, folder
        )
        if to_measure is not None and stopped != "interrupted":
            # Whatever becomes of the model timed whole, what was measured is reported.
            _concluded(result, kept, index)
            result = _measured_whole(result, to_measure, device, progress)
            result = replace(result, seconds=time.monotonic() - began)
        _concluded(result, kept, index)
        return result


def _concluded(result: LayersResult, kept: LayersRecord, index: optuna.Study) -> None:
    """Keep a result, and write its report."""
    replace(kept, whole=result.whole, stopped=result.stopped, seconds=result.seconds).keep(index)
    layers_export.write(result, result.folder)


def _spaces(
    request: LayersRequest, progress: Progress
) -> tuple[list[tuple[SearchRequest, Space]], dict[Dims, str]]:
    """Each size's request, its trials shared out, and space; why other sizes have none.

    Raises:
        InvalidInputError: No size has a chain within any budget.
    """
    spaces: list[tuple[SearchRequest, Space]] = []
    unmet = request.impossible
    for note in request.notes:
        progress.note(note)
    for one in request.requests:
        progress.note(f"listing the chains of {phrases.layer(one.size)} within the budget")
        try:
            spaces.append((one, build(one)))
        except InvalidInputError as error:
            unmet[one.size] = str(error)
    if not spaces:
        raise InvalidInputError(next(iter(unmet.values())))
    if request.trials is None:
        return spaces, unmet
    parts = shared(request.trials, [len(space.candidates) for _, space in spaces])
    return [
        (replace(one, trials=part), space) for (one, space), part in zip(spaces, parts, strict=True)
    ], unmet


def _trained_weights(
    requests: Sequence[SearchRequest], device: torch.device, progress: Progress
) -> dict[Dims, TrainedWeights]:
    """The trained weights of each size, where there are any.

    Raises:
        InvalidInputError: As `TrainedWeights.of`.
    """
    trained = {}
    for one in requests:
        weights = TrainedWeights.of(one, device)
        if weights is not None:
            trained[one.size] = weights
            if weights.sentence:
                progress.note(weights.sentence)
    return trained


def _measured_whole(
    result: LayersResult, to_measure: ToMeasure, device: torch.device, progress: Progress
) -> LayersResult:
    effect = result.effect()
    if effect is None or effect.converted == 0:
        return result  # the plan changes nothing
    progress.note("timing the model whole, dense and with the plan")
    dtype = getattr(torch, result.request.each.dtype)
    try:
        whole = whole_model.measure(
            to_measure.model, to_measure.inputs, result.plan(), device, dtype
        )
    except KeyboardInterrupt:
        return replace(result, stopped="interrupted")
    return replace(result, whole=whole)


def _default_folder(request: LayersRequest, each: SearchRequest) -> Path:
    """Of a request with its device and batch resolved; the same for the same words."""
    what = "-".join(map(str, request.sizes))
    if request.layers is not None:
        source = request.asked_by.get("model") or request.asked_by.get("hf-config") or ""
        what = re.sub(r"[^A-Za-z0-9]+", "-", source).strip("-") or "model"
    if len(what) > _LONGEST_NAME:
        what = f"{what[:_LONGEST_NAME]}-{crc32(what.encode()):08x}"
    device = each.device.replace(":", "")
    return Path(f"ksopt-report-{what}-{device}-{each.dtype}-{each.layout}-{each.batch}")
