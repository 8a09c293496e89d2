"""The study on disk: opened or resumed, locked, and read back as records."""

from __future__ import annotations

import fcntl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from ksopt.bench.device import DeviceRecord
from ksopt.bench.roofline import Roofline
from ksopt.bench.timing import Measurement
from ksopt.errors import InvalidInputError
from ksopt.pattern import Chain
from ksopt.search.priors import facts
from ksopt.search.request import SearchRequest
from ksopt.search.result import TrialRecord

STUDY = "ksopt-search"
FILE = "study.db"
LOST = "cut off: the search was stopped or its process ended"
_NEXT = "another --out folder, or another --storage, starts a new study"


@contextmanager
def folder(request: SearchRequest) -> Iterator[Path]:
    """The output folder, made if need be, and ours alone until the end.

    Raises:
        InvalidInputError: It cannot be made or written, or another search is at work in it.
    """
    assert isinstance(request.out, Path)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        lock = (request.out / ".lock").open("w")
    except OSError as error:
        raise InvalidInputError(
            f"the output folder {request.out} cannot be written ({error.strerror}): "
            "choose another with --out"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInputError(
                f"another search is at work in {request.out}: wait for it, or choose another --out"
            ) from None
        yield request.out


def open_study(
    request: SearchRequest, device: DeviceRecord, weights: str | None = None
) -> optuna.Study:
    """The study of a request, new or resumed; ``weights`` tells given weights from others.

    Raises:
        InvalidInputError: The storage cannot be used, or holds a study of something else; the
            sentence names what differs.
    """
    assert isinstance(request.out, Path)
    if request.storage is not None and "://" not in request.storage:
        raise InvalidInputError(
            f"storage {request.storage!r}: give a URL that Optuna knows, such as "
            "sqlite:///study.db, or leave it out"
        )
    url = request.storage or f"sqlite:///{(request.out / FILE).resolve()}"
    try:
        study = optuna.create_study(
            study_name=STUDY,
            storage=url,
            directions=["minimize", "minimize"],
            load_if_exists=True,
        )
    except (SQLAlchemyError, ImportError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInputError(f"storage {url!r} cannot be used: {reason}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(["latency_us", "parameters"])
    _refuse_another_study(study, _identity(request, device) | {"weights": weights})
    return study


def begin_run(study: optuna.Study, device: DeviceRecord) -> int:
    """Note that a run begins, and on what; its number, from 1."""
    records = [*study.user_attrs.get("runs", []), asdict(device)]
    study.set_user_attr("runs", records)
    return len(records)


def runs(study: optuna.Study) -> tuple[DeviceRecord, ...]:
    """What the runs of a study ran on."""
    known = {field.name for field in fields(DeviceRecord)}
    return tuple(
        DeviceRecord(**{key: value for key, value in one.items() if key in known})
        for one in study.user_attrs.get("runs", [])
    )


def give_up_running(study: optuna.Study) -> None:
    """Close the trials that an ended process left running."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)


def lost(study: optuna.Study) -> list[tuple[str, Chain]]:
    """(origin, chain) of what was begun, not ended, and not redone since."""
    done = tried(study)
    found = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.FAIL,)):
        chain = chain_of(trial)
        if chain is not None and chain not in done:
            found[chain] = str(trial.user_attrs["origin"])
    return [(origin, chain) for chain, origin in found.items()]


def chain_of(trial: FrozenTrial) -> Chain | None:
    """The chain of a trial; None if its process ended before it had one."""
    text = trial.user_attrs.get("chain")
    return None if text is None else Chain.parse(text)


def tried(study: optuna.Study) -> set[Chain]:
    """Chains that were measured, failed, or wait to be: not to be drawn again."""
    found = (chain_of(t) for t in study.get_trials(deepcopy=False) if _is_settled(t))
    return {chain for chain in found if chain is not None}


def settled(study: optuna.Study) -> int:
    """Trials that were measured or failed for a reason of their own."""
    ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
    return sum(_is_settled(trial) for trial in ended)


def records(study: optuna.Study, roofline: Roofline, batch: int) -> tuple[TrialRecord, ...]:
    """Every trial that was begun with a chain, in order."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        chain = chain_of(trial)
        if chain is None or trial.state == TrialState.WAITING:
            continue
        found.append(_record(trial, chain, roofline, batch))
    return tuple(found)


def _record(trial: FrozenTrial, chain: Chain, roofline: Roofline, batch: int) -> TrialRecord:
    attrs = trial.user_attrs
    state = "complete" if trial.state == TrialState.COMPLETE else "failed"
    return TrialRecord(
        number=trial.number,
        state=state if _is_settled(trial) else "lost",
        facts=facts(chain, roofline, batch),
        origin=attrs["origin"],
        latency=_measurement(attrs.get("latency")) if state == "complete" else None,
        dense=_measurement(attrs.get("dense")) if state == "complete" else None,
        error=attrs.get("error"),
        reason=None if state == "complete" else attrs.get("reason", LOST),
        run=attrs.get("run", 1),
        weight_error=attrs.get("weight_error"),
    )


def _measurement(stored: dict[str, Any] | None) -> Measurement | None:
    return None if stored is None else Measurement(**stored)


def _is_settled(trial: FrozenTrial) -> bool:
    return trial.state in (TrialState.COMPLETE, TrialState.WAITING) or (
        # A trial that failed by itself says why; one that was cut off has no time to.
        trial.state == TrialState.FAIL and "reason" in trial.user_attrs
    )


def _identity(request: SearchRequest, device: DeviceRecord) -> dict[str, Any]:
    return {
        "dims": str(request.size),
        "dtype": request.dtype,
        "batch": request.batch,
        "layout": request.layout,
        "device": device.type,
        "device name": device.name,
    }


def _refuse_another_study(study: optuna.Study, asked: dict[str, Any]) -> None:
    stored = study.user_attrs.get("identity")
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise InvalidInputError(
                f"the storage holds a study {STUDY!r} that ksopt did not make: {_NEXT}"
            )
        study.set_user_attr("identity", asked)
        return
    differing = [name for name in asked if asked[name] != stored.get(name)]
    if differing:
        pairs = ", ".join(f"{n} {stored.get(n)} there and {asked[n]} here" for n in differing)
        raise InvalidInputError(
            f"the study to resume measured something else ({pairs}): its times cannot be compared; "
            f"{_NEXT}"
        )
