"""What the report says of energy, where it was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from ksopt.measure import energy
from ksopt.report.document import Figure, Section
from ksopt.search.report import phrases
from ksopt.search.report.energy_plot import energy_plot
from ksopt.search.results import Finalist, Recommendation, SearchResult


def plot(result: SearchResult) -> list[Section]:
    """Energy against latency."""
    wide = energy_plot(result, 800, 340)
    if not wide:
        return []
    text = (
        "Each point is a trial: the energy of a call, and its latency over the dense layer's. The "
        "stepped line is the least energy that the latency allows, of what was measured; rings "
        "mark the fastest of each budget. Left of the upright line chains are faster than dense."
    )
    figure = Figure(wide, energy_plot(result, 360, 320))
    return [Section("Energy against latency", (), (text,), figure=figure)]


def least(answer: Recommendation, finalists: Sequence[Finalist]) -> list[str]:
    """That another chain of a step's final uses less energy than its fastest, if one does."""
    chosen, most = answer.chosen, answer.budget.parameters
    if chosen is None or chosen.energy_mj is None:
        return []
    known = [
        (one.energy_mj, one)
        for one in finalists
        if one.energy_mj is not None and answer.least <= one.facts.nnz <= most
    ]
    used_mj, found = min(known, key=lambda pair: pair[0])
    if used_mj >= chosen.energy_mj:
        return []
    return [
        f"At {answer.budget.text}, the least energy of the chains in the final is that of "
        f"{found.facts.chain}: {phrases.millijoules(used_mj)} a call against "
        f"{phrases.millijoules(chosen.energy_mj)} of the fastest, at a latency of "
        f"{phrases.microseconds(found.latency.median_us)} against "
        f"{phrases.microseconds(chosen.latency.median_us)}."
    ]


def method(result: SearchResult) -> list[str]:
    """How energy was measured."""
    dense_mj = next((one.dense_energy_mj for one in result.finalists), None)
    in_trials = any(trial.energy_mj is not None for trial in result.trials)
    if dense_mj is None and not in_trials:
        return []
    text = (
        "Energy is that of the whole board, by its own counter (NVML), idle draw included: of "
        "calls without a pause, caches warm, shared out over the calls."
    )
    if in_trials:
        text += f" In a trial it is taken over {energy.TRIAL_SECONDS:g} s, right after its timing."
    if dense_mj is not None:
        text += (
            f" That of the finalists and of dense was taken after the final, over "
            f"{energy.FINAL_SECONDS:g} s each; the dense layer uses "
            f"{phrases.millijoules(dense_mj)} a call."
        )
    return [text]
