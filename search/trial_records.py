"""What a study's trials hold: which chains were tried, and each as the report has it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
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
# Processes that end in the midst of one chain before it is tried no more.
_MOST_ENDS = 3


def lost(trials: Sequence[FrozenTrial]) -> list[tuple[str, Replacement]]:
    """(origin, chain) of what was begun, not ended, and not redone since."""
    done = tried(trials)
    origins = {}
    for trial in trials:
        chain = chain_of(trial)
        if trial.state == TrialState.FAIL and chain is not None and chain not in done:
            origins[chain] = str(trial.user_attrs["origin"])
    return [(origin, chain) for chain, origin in origins.items()]


def chain_of(trial: FrozenTrial) -> Replacement | None:
    """The chain of a trial; None if its process ended before it had one."""
    text = trial.user_attrs.get("chain")
    return None if text is None else registry.parse(text)


def tried(trials: Sequence[FrozenTrial]) -> set[Replacement]:
    """Chains that are not to be drawn again.

    They were measured, or failed, or are under way; or the processes that measured them were
    killed so often that they may be what kills them. What was only drawn is nobody's fault: a trial
    knows its device from when it is measured.
    """
    tried_chains: set[Replacement] = set()
    ends: Counter[Replacement] = Counter()
    for trial in trials:
        chain = chain_of(trial)
        if chain is None:
            continue
        if trial.state != TrialState.FAIL or "reason" in trial.user_attrs:
            tried_chains.add(chain)
        elif "interrupted" not in trial.user_attrs and "device" in trial.user_attrs:
            ends[chain] += 1
    return tried_chains | {chain for chain, count in ends.items() if count >= _MOST_ENDS}


def begun(trials: Sequence[FrozenTrial]) -> int:
    """How many chains were measured, failed for a reason of their own, or are under way."""
    return len(tried([trial for trial in trials if trial.state != TrialState.WAITING]))


def settled(trials: Sequence[FrozenTrial]) -> int:
    """How many were measured or failed for a reason of their own."""
    return begun([trial for trial in trials if trial.state != TrialState.RUNNING])


def records(study: optuna.Study, roofline: Roofline, batch: int) -> tuple[TrialRecord, ...]:
    """Every trial that was begun with a chain and has ended, in order."""
    ended = (record(trial, roofline, batch) for trial in study.get_trials(deepcopy=False))
    return tuple(one for one in ended if one is not None)


def dense_us(trials: Sequence[TrialRecord]) -> float | None:
    """Median of the dense layer's latencies in the trials; None without any."""
    latencies = [trial.dense.median_us for trial in trials if trial.dense is not None]
    return statistics.median(latencies) if latencies else None


def record(trial: FrozenTrial, roofline: Roofline, batch: int) -> TrialRecord | None:
    """A trial as the report has it; None if it has no chain, was not begun, or has not ended."""
    chain, attrs = chain_of(trial), trial.user_attrs
    if chain is None or "device" not in attrs or not trial.state.is_finished():
        return None
    complete = trial.state == TrialState.COMPLETE
    measured = complete or trial.state == TrialState.PRUNED
    state = "complete" if complete else "pruned" if measured else "failed"
    if not measured and "reason" not in attrs:
        state = "lost"
    return TrialRecord(
        number=trial.number,
        state=state,
        facts=facts(
            chain,
            roofline,
            batch,
            attrs.get("predicted_us"),
            train=attrs.get("train", False),
            siblings=attrs.get("siblings", 1),
        ),
        origin=attrs["origin"],
        latency=_measurement(attrs.get("latency")) if measured else None,
        dense=_measurement(attrs.get("dense")) if measured else None,
        error=attrs.get("error"),
        reason=None if complete else attrs.get("pruned", attrs.get("reason", LOST)),
        run=attrs.get("run", 1),
        device=attrs.get("device"),
        seconds=attrs.get("seconds"),
        values={
            metric.name: value
            for metric in metrics.stored()
            if (value := attrs.get(metric.name)) is not None
        },
    )


def _measurement(stored: dict[str, Any] | None) -> Measurement | None:
    return None if stored is None else Measurement(**stored)
