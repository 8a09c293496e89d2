"""A search from request to report: an Optuna study for each layer size, measured in turns."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from ksopt.patterns.size import Dims
from ksopt.search import device_locks, feasibility, plan, study_store, whole_model, write_errors
from ksopt.search.layer_finals import run_final
from ksopt.search.layer_record import LayerRecord, layer_result
from ksopt.search.layer_request import LayerRequest
from ksopt.search.progress import Progress, Silent
from ksopt.search.report import export, phrases
from ksopt.search.request import SearchRequest, shared
from ksopt.search.results import LayerResult, SearchResult
from ksopt.search.search_record import SearchRecord
from ksopt.search.space.space import Space, build
from ksopt.search.trained_weights import TrainedWeights
from ksopt.search.user_score import Score
from ksopt.search.worker_pool import Share, TrialPool, sampler_name
from ksopt.search.worker_processes import SpareProcess

if TYPE_CHECKING:
    from torch import nn

# Large enough that a GPU is busy and a CPU answers in milliseconds.
DEFAULT_BATCH = {"cpu": 256, "cuda": 8192}
# Maximal length of a folder's name that lists the sizes.
_LONGEST_NAME = 80


@dataclass(frozen=True)
class ToMeasure:
    """A model to time as a whole at the end of a search.

    Args:
        model: The model.
        inputs: Its inputs: see `ksopt.search.whole_model.measure`.
    """

    model: nn.Module
    inputs: object


def run_search(
    request: SearchRequest, progress: Progress | None = None, to_measure: ToMeasure | None = None
) -> SearchResult:
    """Measure chains for one layer size or several on this device, recommend, and write the report.

    With the same output folder it resumes the existing studies: nothing is measured twice, except
    that the finalists and the dense layer are always timed again and together, so that no verdict
    rests on times of two processes. Ctrl-C ends it early, with a report of the measurements so far.

    Several sizes are measured in turns, the one that is furthest from its trials next, so that all
    have made equal progress when time is up.

    Args:
        request: The request.
        progress: Receives the progress; None shows nothing.
        to_measure: A model to time as a whole, dense and with the plan, at the end.

    Returns:
        The result. ``result.folder`` holds report.html, report.md, results.json, plan.json,
        trials.csv and (unless another storage is used) study.db.

    Raises:
        InvalidInputError: No such device, or no such function of a score; no size has a chain
            within any budget; an output folder or storage that cannot be used, or that holds a
            study of something else.
        KsoptError: A study can no longer be written; a worker failed.

    Example:
        >>> import tempfile
        >>> request = SearchRequest(
        ...     ("32x64", "64x32"),
        ...     budgets=("50%",), batch=16, device="cpu", trials=4, out=tempfile.mkdtemp(),
        ... )
        >>> result = run_search(request)
        >>> [(str(layer.size), len(layer.trials)) for layer in result.layers]
        [('32x64', 2), ('64x32', 2)]
    """
    began = time.monotonic()
    progress = progress or Silent()
    try:
        with _quiet_optuna():
            return _run(request, progress, to_measure, began)
    finally:
        progress.close()


def _run(
    request: SearchRequest, progress: Progress, to_measure: ToMeasure | None, began: float
) -> SearchResult:
    Score.of(request)  # rejected before anything is written or measured
    device = devices.resolve(request.device)
    batch = request.batch or DEFAULT_BATCH.get(device.type, DEFAULT_BATCH["cuda"])
    request = replace(request, device=str(device), batch=batch)
    request = replace(request, out=request.out or _default_folder(request))
    feasibility.check(request.layers, device)  # rejected before anything is listed
    storage = study_store.storage_of(request)
    meter = energy.Meter(device) if request.energy else None  # rejected before anything is measured
    record = devices.record(device)
    if to_measure is not None:
        dtype = getattr(torch, request.dtype)
        whole_model.check(to_measure.model, to_measure.inputs, device, dtype)
    trained = _trained_weights(request, device, progress)
    # Several workers have their own compilers.
    target = Target.of(device) if request.workers == 1 else None
    with (
        Compilers(target) as compilers,
        SpareProcess.of(device) as spare,
        study_store.folder(request) as folder,
        write_errors.in_words(storage.url, storage.file),
    ):
        study_store.check_report_kind(folder, request)
        spaces, unmet = _spaces(request, progress)
        search_record = SearchRecord(request, unmet)
        index = None
        if not request.is_one_layer:
            index = study_store.open_index(storage, request, record)
            search_record.save(index)
        studies = [
            study_store.open_study(storage, one, record, _digest(trained.get(one.size)))
            for one, _ in spaces
        ]
        progress.note(f"measuring the roofline of {record.name}")
        with device_locks.device(device):
            roofline = measure_roofline(device, request.dtype)
        shares, runs = [], []
        for (one, space), study in zip(spaces, studies, strict=True):
            number = study_store.begin_run(storage, study, record)
            shares.append(Share(one, study, number, space, trained.get(one.size)))
            name = sampler_name(space, one)
            runs.append(LayerRecord.begin(one, number, record, roofline, space, name))
            runs[-1].save(study)
        trial_pool = TrialPool(shares, device, storage, roofline, compilers, meter)
        stopped = trial_pool.run(progress, began)
        layers: list[LayerResult] = []
        for share, run in zip(shares, runs, strict=True):
            with spare if not layers else SpareProcess.of(device) as fresh:
                ended = run_final(share, run, device, fresh, compilers, stopped, progress, began)
            stopped = ended.stopped
            layers.append(layer_result(share.study, ended))
        search_record = replace(search_record, stopped=stopped, seconds=layers[-1].seconds)
        if to_measure is not None and stopped != "interrupted":
            # The results so far are reported even if timing the model fails.
            _reported(search_record.result(layers, folder), search_record, index)
            search_record = _with_whole_model(
                search_record, search_record.result(layers, folder), to_measure, progress
            )
            search_record = replace(search_record, seconds=time.monotonic() - began)
        return _reported(search_record.result(layers, folder), search_record, index)


def _spaces(
    request: SearchRequest, progress: Progress
) -> tuple[list[tuple[LayerRequest, Space]], dict[Dims, str]]:
    """Requests with distributed trials, and spaces; and why other sizes have none.

    Raises:
        InvalidInputError: No size has a chain within any budget.
    """
    spaces: list[tuple[LayerRequest, Space]] = []
    unmet = request.impossible
    for note in request.notes:
        progress.note(note)
    for one in request.layers:
        progress.note(f"listing the chains of {phrases.layer(one.size)} within the budget")
        try:
            spaces.append((one, build(one)))
        except InvalidInputError as error:
            unmet[one.size] = str(error)
            continue
        for name, obstacle in spaces[-1][1].left_out.items():
            progress.note(f"{name} is left out of {one.size}: {obstacle}")
    if not spaces:
        raise InvalidInputError(next(iter(unmet.values())))
    if request.trials is None or request.is_one_layer:
        return spaces, unmet
    parts = shared(request.trials, [len(space.candidates) for _, space in spaces])
    return [
        (replace(one, trials=part), space) for (one, space), part in zip(spaces, parts, strict=True)
    ], unmet


def _trained_weights(
    request: SearchRequest, device: torch.device, progress: Progress
) -> dict[Dims, TrainedWeights]:
    """The trained weights by size, if there are any.

    Raises:
        InvalidInputError: As `TrainedWeights.of`.
    """
    trained = {}
    for one in request.layers:
        weights = TrainedWeights.of(one, device)
        if weights is not None:
            trained[one.size] = weights
            if weights.sentence:
                progress.note(weights.sentence)
    return trained


def _digest(weights: TrainedWeights | None) -> str | None:
    return None if weights is None else weights.digest


def _reported(
    result: SearchResult, search_record: SearchRecord, index: optuna.Study | None
) -> SearchResult:
    """Save the record and write the report of a result; return the result."""
    if index is not None:
        search_record.save(index)
    export.write(result, result.folder)
    return result


def _with_whole_model(
    search_record: SearchRecord, result: SearchResult, to_measure: ToMeasure, progress: Progress
) -> SearchRecord:
    """The record with the times of the whole model; unchanged if the plan changes nothing."""
    effect = plan.effect_of(result)
    if effect is None or effect.converted == 0:
        return search_record
    progress.note("timing the model whole, dense and with the plan")
    device, dtype = (
        torch.device(search_record.request.device),
        getattr(torch, search_record.request.dtype),
    )
    try:
        whole = whole_model.measure(
            to_measure.model, to_measure.inputs, plan.plan_of(result), device, dtype
        )
    except KeyboardInterrupt:
        return replace(search_record, stopped="interrupted")
    return replace(search_record, whole=whole)


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Silence Optuna's log, which would break the progress bar; failures are in the report."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _default_folder(request: SearchRequest) -> Path:
    """Default folder of a request with its device and batch; equal for equal requests."""
    what = "-".join(map(str, request.sizes))
    if request.model is not None:
        source = request.model_options.get("model") or request.model_options.get("hf-config")
        # Several models in memory may be of one class.
        source = source or f"{request.model.source}-{what}"
        what = re.sub(r"[^A-Za-z0-9]+", "-", source).strip("-") or "model"
    if len(what) > _LONGEST_NAME:
        what = f"{what[:_LONGEST_NAME]}-{crc32(what.encode()):08x}"
    device = request.device.replace(":", "")
    return Path(f"ksopt-report-{what}-{device}-{request.dtype}-{request.layout}-{request.batch}")
