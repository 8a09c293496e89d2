"""Attributes of a study's trials, and their records for the report.

Of a trial's attributes, ``chain`` and ``origin`` are set at the start, ``claim`` identifies its
process, ``facts`` are the properties before the measurement, and ``outcome`` is its result. They
are few, because the disk or the server of a storage confirms each of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Measurement
from ksopt.operators import registry
from ksopt.operators.registry import Replacement
from ksopt.search import metrics
from ksopt.search.results import TrialRecord
from ksopt.search.samplers.priors import facts

LOST = "cut off: the search was stopped or its process ended"


def facts_of(trial: FrozenTrial) -> Mapping[str, Any]:
    """Properties of a trial's chain when its measurement began; empty if it was only drawn."""
    return dict(trial.user_attrs.get("facts", {}))


def outcome_of(trial: FrozenTrial) -> Mapping[str, Any]:
    """The measurements of a trial, or the ``reason`` of its failure; empty if it was cut off."""
    return dict(trial.user_attrs.get("outcome", {}))


def chain_of(trial: FrozenTrial) -> Replacement | None:
    """The chain of a trial; None if its process ended before it had one."""
    text = trial.user_attrs.get("chain")
    return None if text is None else registry.parse(text)


def records(study: optuna.Study, roofline: Roofline, batch: int) -> tuple[TrialRecord, ...]:
    """Records of all trials that were begun with a chain and have ended, in order."""
    ended = (record(trial, roofline, batch) for trial in study.get_trials(deepcopy=False))
    return tuple(one for one in ended if one is not None)


def dense_us(trials: Sequence[TrialRecord]) -> float | None:
    """Median of the dense layer's latencies in the trials; None without any."""
    latencies = [trial.dense.median_us for trial in trials if trial.dense is not None]
    return statistics.median(latencies) if latencies else None


def record(trial: FrozenTrial, roofline: Roofline, batch: int) -> TrialRecord | None:
    """The record of a trial; None if it has no chain, was not begun, or has not ended."""
    chain, known, outcome = chain_of(trial), facts_of(trial), outcome_of(trial)
    if chain is None or not known or not trial.state.is_finished():
        return None
    complete = trial.state == TrialState.COMPLETE
    measured = complete or trial.state == TrialState.PRUNED
    state = "complete" if complete else "pruned" if measured else "failed"
    if not measured and "reason" not in outcome:
        state = "lost"
    return TrialRecord(
        number=trial.number,
        state=state,
        facts=facts(
            chain,
            roofline,
            batch,
            known.get("predicted_us"),
            train=known.get("train", False),
            siblings=known.get("siblings", 1),
        ),
        origin=trial.user_attrs["origin"],
        latency=_measurement(outcome.get("latency")) if measured else None,
        dense=_measurement(outcome.get("dense")) if measured else None,
        error=outcome.get("error"),
        reason=None if complete else outcome.get("pruned", outcome.get("reason", LOST)),
        run=trial.user_attrs["claim"]["run"],
        device=known["device"],
        seconds=outcome.get("seconds"),
        values={
            metric.name: value
            for metric in metrics.stored()
            if (value := outcome.get(metric.name)) is not None
        },
    )


def _measurement(stored: dict[str, Any] | None) -> Measurement | None:
    return None if stored is None else Measurement(**stored)
