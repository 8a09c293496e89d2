"""Record of a run in a layer's study, besides trials: enough to report without the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import optuna

from ksopt.errors import InvalidInputError
from ksopt.measure.device import DeviceRecord
from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Measurement
from ksopt.operators import registry
from ksopt.patterns.size import Budget
from ksopt.search import recommend, study_store, surrounded, trial_records
from ksopt.search.layer_request import LayerRequest
from ksopt.search.lower_rank import LowerRank
from ksopt.search.results import SCHEMA, LayerResult, SpaceRecord
from ksopt.search.space.space import Space, Step
from ksopt.search.storage_url import without_password
from ksopt.search.surrounded import SurroundedTimes

_KEY = "report"


@dataclass(frozen=True)
class LayerRecord:
    """A run of a layer's study, as last saved.

    Args:
        request: With batch, device and output folder resolved.
        run: Its number in the study, from 1.
        device: The device it ran on.
        roofline: Of the device.
        space: Steps and sizes of the space; of its candidates only the smallest.
        candidates: Number of candidates.
        sampler: Name of the sampler.
        final: Times of the final; None if there was none.
        stopped: As in `LayerResult`.
        seconds: Duration of the run.
        final_seconds: Duration of its final; None if there was none.
        final_values: Metrics that were measured after the final, by their names: each by the
            finalist's chain, and of "dense".
        surrounded: Times of the best chains in other surroundings, if they were measured.
        lower_rank: A chain of lower rank that is predicted to be faster, if there is one.
    """

    request: LayerRequest
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
    surrounded: tuple[SurroundedTimes, ...] = ()
    lower_rank: LowerRank | None = None

    @classmethod
    def begin(
        cls,
        request: LayerRequest,
        run: int,
        device: DeviceRecord,
        roofline: Roofline,
        space: Space,
        sampler: str,
    ) -> LayerRecord:
        """The record of a run that begins; it counts as interrupted if it is killed."""
        few = replace(space, candidates=space.candidates[:1])
        return cls(request, run, device, roofline, few, len(space.candidates), sampler)

    def save(self, study: optuna.Study) -> None:
        """Store the record in the study, in place of the last one."""
        final = self.final or {}
        space = {
            "steps": [asdict(step) for step in self.space.steps],
            "unmet": [asdict(budget) for budget in self.space.unmet],
            "smallest": str(self.space.candidates[0]),
            "count": self.space.count,
            "exact": self.space.exact,
            "complete": self.space.complete,
            "left_out": dict(self.space.left_out),
        }
        value = {
            "schema": SCHEMA,
            "request": shown(self.request.to_json()),
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
            "surrounded": [one.to_json() for one in self.surrounded],
            "lower_rank": None if self.lower_rank is None else self.lower_rank.to_json(),
        }
        study.set_user_attr(_KEY, value)

    @classmethod
    def load(cls, study: optuna.Study) -> LayerRecord:
        """The last record saved in a study.

        Raises:
            InvalidInputError: There is none, or another version of ksopt wrote it in a format that
                this one cannot read.
        """
        value = study.user_attrs.get(_KEY)
        if value is None:
            raise InvalidInputError(
                f"the study {study.study_name!r} holds no run of ksopt search: nothing to report"
            )
        with readable(study, value):
            return cls._read(value)

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> LayerRecord:
        """The inverse of `save`."""
        request, space, final = LayerRequest.from_json(value["request"]), value["space"], None
        lower = value.get("lower_rank")  # studies of earlier versions have none
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
                (registry.parse(space["smallest"]),),
                space["count"],
                space["exact"],
                space["complete"],
                space["left_out"],
            ),
            value["candidates"],
            value["sampler"],
            final,
            value["stopped"],
            value["seconds"],
            value["final_seconds"],
            value["final_values"],
            # Studies of earlier versions have none.
            tuple(map(SurroundedTimes.from_json, value.get("surrounded", ()))),
            None if lower is None else LowerRank.from_json(lower),
        )


def shown(request: dict[str, Any]) -> dict[str, Any]:
    """A request's JSON values without the password of its storage."""
    storage = request["storage"]
    return request | {"storage": None if storage is None else without_password(storage)}


@contextmanager
def readable(study: optuna.Study, value: Mapping[str, Any]) -> Iterator[None]:
    """Context that turns errors of reading another version's record into InvalidInputError."""
    written = value.get("schema", "of no version")
    if _version(written) > _version(SCHEMA):
        raise InvalidInputError(
            f"the study {study.study_name!r} was written by a later ksopt, as {written}; this "
            f"one reads up to {SCHEMA}: update ksopt"
        )
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError(
            f"the study {study.study_name!r} was written by another ksopt, as {written}, and "
            f"this one cannot read its report ({type(error).__name__}: {error}). Its trials "
            "are kept: the search, run again, goes on with them and writes a new one"
        ) from None


def _version(schema: str) -> int:
    """The number of a schema's name; 0 if it has none.

    Example:
        >>> _version("ksopt.search/4"), _version("something")
        (4, 0)
    """
    number = schema.rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def layer_result(study: optuna.Study, record: LayerRecord, replayed: bool = False) -> LayerResult:
    """The result of a study's trials and a run's record."""
    request, space = record.request, record.space
    assert request.batch is not None
    trials = trial_records.records(study, record.roofline, request.batch)
    admitted = recommend.admitted(trials, request)
    elected = recommend.elect(admitted, space.steps, request.max_error)
    if record.final is not None:  # others may have measured more since
        elected = [trial for trial in elected if str(trial.facts.chain) in record.final]
    standing = recommend.finalists(elected, record.final, record.final_values)
    others = surrounded.results(record.surrounded, request, space, admitted, record.roofline)
    answers = recommend.recommend(
        space,
        standing,
        request.max_error,
        request.min_speedup,
        trial_records.dense_us(trials),
        not_admitted=len(trials) - len(admitted),
        trials=admitted,
    )
    return LayerResult(
        request=request,
        run=record.run,
        device=record.device,
        runs=study_store.runs(study),
        roofline=record.roofline,
        space=SpaceRecord(
            record.candidates, space.count, space.exact, space.complete, space.left_out
        ),
        sampler=record.sampler,
        trials=trials,
        finalists=standing,
        recommendations=surrounded.with_sentences(answers, standing, trials, others),
        stopped=record.stopped,
        seconds=record.seconds,
        replayed=replayed,
        final_seconds=record.final_seconds,
        surrounded=others,
        lower_rank=record.lower_rank,
    )
