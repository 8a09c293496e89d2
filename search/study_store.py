"""The study on disk: its folder is locked, and the study created, resumed or rejected."""

from __future__ import annotations

import os
import shlex
import sqlite3
import warnings
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.trial import TrialState

from ksopt.errors import InvalidInputError
from ksopt.measure.device import DeviceRecord
from ksopt.search import metrics
from ksopt.search.layer_request import LayerRequest
from ksopt.search.options import SearchOptions
from ksopt.search.request import SearchRequest
from ksopt.search.storage import Storage
from ksopt.system import untrusted
from ksopt.system.atomic_files import make_folder, remove_empty
from ksopt.system.locks import Busy, Lock

FILE = "study.db"
SEVERAL = "of several layer sizes"
# Format of the attributes of studies and trials. Data of another format would be ignored.
_FORMAT = 2
_NEXT = "another --out folder, --storage or --study starts a new study"


@contextmanager
def folder(request: SearchRequest) -> Iterator[Path]:
    """The output folder, created if necessary, and locked until the end.

    If the search is rejected later, everything new is removed: the folders, the lock, and a study
    without trials.

    Raises:
        InvalidInputError: It cannot be created or written, or another search is using it.
    """
    assert isinstance(request.out, Path)
    out = request.out
    missing = [place for place in (out, *out.parents) if not os.path.lexists(place)]
    lock = Lock(out / ".lock", wait_s=0, mode=0o666)
    try:
        make_folder(out)
        lock.acquire()
    except Busy:
        raise InvalidInputError(
            f"another search is at work in {out}: wait for it, or choose another --out"
        ) from None
    except (OSError, ValueError) as error:
        remove_empty(missing)
        raise InvalidInputError(
            f"the output folder {out} cannot be written ({untrusted.reason(error)}): "
            "choose another with --out"
        ) from None
    has_study = os.path.lexists(out / FILE)
    try:
        yield out
    except InvalidInputError:
        if not has_study and not _has_trials(out / FILE):
            (out / FILE).unlink(missing_ok=True)
            (out / f".{FILE}.turn").unlink(missing_ok=True)
        lock.release(remove=lock.created)
        remove_empty(missing)
        raise
    except BaseException:
        lock.release()
        raise
    lock.release()


def _has_trials(file: Path) -> bool:
    """Whether a study file has trials, which must not be deleted."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as database:
            return database.execute("SELECT 1 FROM trials").fetchone() is not None
    except sqlite3.Error:
        return False  # no study, or one without tables


def check_report_kind(folder: Path, request: SearchRequest) -> None:
    """Reject a folder with another kind of report, which this one would overwrite.

    Args:
        folder: Of the report.
        request: Of the report.

    Raises:
        InvalidInputError: The folder has a report of one layer size for one of several, or the
            other way round.
    """
    try:
        report = untrusted.json_of(folder / "results.json", "the report")
        there_is_one = report["model"] is None and len(report["request"]["dims"]) == 1
    except (InvalidInputError, KeyError, TypeError):
        return  # no report
    if there_is_one != request.is_one_layer:
        there, here = ("one size", "several sizes")[:: 1 if there_is_one else -1]
        raise InvalidInputError(
            f"{folder} has the report of a search of {there}, and a search of {here} would "
            f"overwrite it: choose another --out{_resumed(folder, request)}"
        )


def _resumed(folder: Path, request: SearchRequest) -> str:
    """The options that resume the study of one size of a folder of several; else empty."""
    if not request.is_one_layer:
        return ""
    study, size = request.study, request.sizes[0]
    study = study if study.endswith(f" {size}") else f"{study} {size}"
    words = shlex.join(("--storage", f"sqlite:///{folder / FILE}", "--study", study))
    return f". {words} resumes {size} there"


def storage_of(request: SearchOptions) -> Storage:
    """The storage of a request with its output folder resolved.

    Raises:
        InvalidInputError: The storage has an unknown form.
    """
    assert isinstance(request.out, Path)
    return Storage(request.storage or f"sqlite:///{(request.out / FILE).absolute()}")


def open_study(
    storage: Storage, request: LayerRequest, device: DeviceRecord, weights: str | None = None
) -> optuna.Study:
    """The study of a request, new or resumed; ``weights`` is the digest of trained weights.

    Raises:
        InvalidInputError: The storage cannot be used, or holds a study of something else; the
            sentence names what differs.
    """
    objectives = metrics.objectives(request)
    study = storage.create(request.study, [metric.direction for metric in objectives])
    with storage.removing_new_locks(), storage.turn():
        _check_identity(
            study,
            _identity(request, str(request.size), device) | {"weights": weights},
            _limits(request),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names([metric.name for metric in objectives])
    return study


def open_index(storage: Storage, request: SearchRequest, device: DeviceRecord) -> optuna.Study:
    """The index of a search of several sizes: a study without trials.

    Raises:
        InvalidInputError: The storage cannot be used, or holds a study of something else.
    """
    study = storage.create(request.study)
    identity = _identity(request, SEVERAL, device)
    with storage.removing_new_locks(), storage.turn():
        _check_identity(study, identity, _limits(request))
    return study


def begin_run(storage: Storage, study: optuna.Study, device: DeviceRecord) -> int:
    """Record the begin and the device of a run; return its number, from 1."""
    with storage.turn():
        records = [*study.user_attrs.get("runs", []), asdict(device)]
        study.set_user_attr("runs", records)
    return len(records)


def runs(study: optuna.Study) -> tuple[DeviceRecord, ...]:
    """The devices of a study's runs."""
    known = {field.name for field in fields(DeviceRecord)}
    return tuple(
        DeviceRecord(**{key: value for key, value in one.items() if key in known})
        for one in study.user_attrs.get("runs", [])
    )


def fail_running(study: optuna.Study) -> None:
    """Fail the trials that dead processes left running, if no other process uses the study."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)


def _identity(request: SearchOptions, dims: str, device: DeviceRecord) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "dims": dims,
        "dtype": request.dtype,
        "batch": request.batch,
        "layout": request.layout,
        "objective": request.objective,
        "train": request.train,
        "epilogue": " ".join(request.epilogue) or "none",
        "siblings": request.siblings,
        "score": request.score,
        "energy": request.energy,
        "metrics": ", ".join(metric.name for metric in metrics.objectives(request)),
        **_limits(request),
        "device": device.type,
        "device name": device.name,
    }


def _limits(request: SearchOptions) -> dict[str, Any]:
    """The constraints on chains, which are fixed for a study."""
    return {
        "families": ",".join(request.families) or "any",
        "block sizes": request.block_sizes or "any",
        "chainable": request.chainable,
        "aligned": request.aligned,
        "structures": ",".join(request.structures),
    }


def check_format(study: optuna.Study) -> None:
    """Reject a study that stores its trials in another format.

    Raises:
        InvalidInputError: It has another format.
    """
    stored = study.user_attrs.get("identity")
    if stored is not None and stored.get("format") != _FORMAT:
        raise InvalidInputError(
            f"the study {study.study_name!r} was written by another ksopt, in format "
            f"{stored.get('format', 1)} where this one reads {_FORMAT}: {_NEXT}"
        )


def _check_identity(study: optuna.Study, identity: dict[str, Any], limits: Collection[str]) -> None:
    stored = study.user_attrs.get("identity")
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise InvalidInputError(
                f"the storage holds a study {study.study_name!r} that ksopt did not make: {_NEXT}"
            )
        study.set_user_attr("identity", identity)
        return
    check_format(study)
    differing = [name for name in identity if identity[name] != stored.get(name)]
    # Different metrics follow from other differences, which are more informative.
    differing = [name for name in differing if name != "metrics"] or differing
    if differing:
        pairs = ", ".join(f"{n} {stored.get(n)} there and {identity[n]} here" for n in differing)
        if set(differing) <= set(limits):
            raise InvalidInputError(
                f"the study to resume is limited to other chains ({pairs}): its answer would not "
                f"be of those that are asked for; {_NEXT}"
            )
        if differing == ["energy"]:
            has, requested = ("energy", "none") if stored["energy"] else ("no energy", "it")
            raise InvalidInputError(
                f"the trials of the study to resume have {has}, and {requested} is asked for here "
                f"({pairs}): what a study keeps low cannot change; {_NEXT}"
            )
        raise InvalidInputError(
            f"the study to resume measured something else ({pairs}): its times cannot be compared; "
            f"{_NEXT}"
        )
