"""What a run leaves in its study besides trials: enough to write its report without the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna

from ksopt.errors import InvalidInputError
from ksopt.measure.device import DeviceRecord
from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain
from ksopt.search import recommend, study_store
from ksopt.search.request import Budget, SearchRequest, without_password
from ksopt.search.results import SCHEMA, SearchResult, SpaceRecord
from ksopt.search.space.space import Space, Step

_KEY = "report"
# What was written before versions were.
_FIRST_SCHEMA = "ksopt.search/2"


@dataclass(frozen=True)
class RunRecord:
    """A run of a study, as it was when it was last kept.

    Args:
        request: What was asked, with batch, device and output folder resolved.
        run: Its number in the study, from 1.
        device: What it ran on.
        roofline: Of the device.
        space: Steps and sizes of the space; of its candidates only the smallest.
        candidates: How many there were.
        sampler: What chose the trials.
        final: Times of the final; None if there was none.
        stopped: As in `SearchResult`.
        seconds: How long it took.
        final_seconds: How long its final took; None if there was none.
        final_values: Metrics that were measured after the final, by their names: each by the
            finalist's chain, and of "dense".
    """

    request: SearchRequest
    run: int
    device: DeviceRecord
    roofline: Roofline
    space: Space
    candidates: int
    sampler: str
    final: Mapping[str, Measurement] | None = None
    stopped: str | None = "interrupted"
    seconds: float = 0.0
    final_seconds: float | None = None
    final_values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        request: SearchRequest,
        run: int,
        device: DeviceRecord,
        roofline: Roofline,
        space: Space,
        sampler: str,
    ) -> RunRecord:
        """Of a run that begins: should it be killed, it was interrupted."""
        few = replace(space, candidates=space.candidates[:1])
        return cls(request, run, device, roofline, few, len(space.candidates), sampler)

    def keep(self, study: optuna.Study) -> None:
        """Write it into the study, in place of the last one."""
        storage = self.request.storage
        shown = replace(
            self.request, storage=None if storage is None else without_password(storage)
        )
        final = self.final or {}
        space = {
            "steps": [asdict(step) for step in self.space.steps],
            "unmet": [asdict(budget) for budget in self.space.unmet],
            "smallest": str(self.space.candidates[0]),
            "count": self.space.count,
            "exact": self.space.exact,
            "complete": self.space.complete,
        }
        value = {
            "schema": SCHEMA,
            "request": shown.to_json(),
            "run": self.run,
            "device": asdict(self.device),
            "roofline": asdict(self.roofline),
            "space": space,
            "candidates": self.candidates,
            "sampler": self.sampler,
            "final": {name: asdict(one) for name, one in final.items()} or None,
            "stopped": self.stopped,
            "seconds": self.seconds,
            "final_seconds": self.final_seconds,
            "final_values": self.final_values,
        }
        study.set_user_attr(_KEY, value)

    @classmethod
    def kept(cls, study: optuna.Study) -> RunRecord:
        """The last one that was kept.

        Raises:
            InvalidInputError: There is none, or another version of ksopt wrote it in a way that
                this one cannot read.
        """
        value = study.user_attrs.get(_KEY)
        if value is None:
            raise InvalidInputError(
                f"the study {study.study_name!r} holds no run of ksopt search: nothing to report"
            )
        written = value.get("schema", _FIRST_SCHEMA)
        if _version(written) > _version(SCHEMA):
            raise InvalidInputError(
                f"the study {study.study_name!r} was written by a later ksopt, as {written}; this "
                f"one reads up to {SCHEMA}: update ksopt"
            )
        try:
            return cls._read(value)
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError(
                f"the study {study.study_name!r} was written by another ksopt, as {written}, and "
                f"this one cannot read its report ({type(error).__name__}: {error}). Its trials "
                "are kept: the search, run again, goes on with them and writes a new one"
            ) from None

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> RunRecord:
        """What `keep` wrote."""
        request, space, final = SearchRequest.from_json(value["request"]), value["space"], None
        if value["final"] is not None:
            final = {name: Measurement(**times) for name, times in value["final"].items()}
        steps = (Step(Budget(**s["budget"]), s["least"], s["requested"]) for s in space["steps"])
        return cls(
            request,
            value["run"],
            DeviceRecord(**value["device"]),
            Roofline(**value["roofline"]),
            Space(
                request.size,
                tuple(steps),
                tuple(Budget(**budget) for budget in space["unmet"]),
                (Chain.parse(space["smallest"]),),
                space["count"],
                space["exact"],
                space["complete"],
            ),
            value["candidates"],
            value["sampler"],
            final,
            value["stopped"],
            value["seconds"],
            value["final_seconds"],
            value["final_values"],
        )


def _version(schema: str) -> int:
    """The number of a schema's name; 0 if it has none.

    Example:
        >>> _version("ksopt.search/3"), _version("something")
        (3, 0)
    """
    number = schema.rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def result_of(
    study: optuna.Study, record: RunRecord, folder: Path, replayed: bool = False
) -> SearchResult:
    """What a study's trials and a run's record come to."""
    request, space = record.request, record.space
    assert request.batch is not None
    trials = study_store.records(study, record.roofline, request.batch)
    admitted = recommend.admitted(trials, request)
    elected = recommend.elect(admitted, space.steps, request.max_error)
    if record.final is not None:  # others may have measured more since
        elected = [trial for trial in elected if str(trial.facts.chain) in record.final]
    standing = recommend.finalists(elected, record.final, record.final_values)
    return SearchResult(
        request=request,
        run=record.run,
        device=record.device,
        runs=study_store.runs(study),
        roofline=record.roofline,
        space=SpaceRecord(record.candidates, space.count, space.exact, space.complete),
        sampler=record.sampler,
        trials=trials,
        finalists=standing,
        recommendations=recommend.recommend(
            space,
            standing,
            request.max_error,
            request.min_speedup,
            study_store.dense_us(trials),
            not_admitted=len(trials) - len(admitted),
            trials=admitted,
        ),
        stopped=record.stopped,
        seconds=record.seconds,
        folder=folder,
        replayed=replayed,
        final_seconds=record.final_seconds,
    )
