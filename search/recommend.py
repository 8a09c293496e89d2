"""Recommendations: from measured trials to one answer for each step of the ladder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ksopt.measure.timing import Comparison, Measurement, compare
from ksopt.operators.registry import name_of
from ksopt.patterns.chain import Chain
from ksopt.patterns.size import Budget
from ksopt.search import metrics, suspect_dense, timing_noise
from ksopt.search.layer_request import LayerRequest
from ksopt.search.metrics import WEIGHT_ERROR
from ksopt.search.objectives import DENSE
from ksopt.search.options import SearchOptions
from ksopt.search.pareto import pareto_front
from ksopt.search.report import phrases
from ksopt.search.results import Finalist, Recommendation, TrialRecord, Verdict
from ksopt.search.space.space import Space, Step
from ksopt.system.plurals import counted

FINALISTS_PER_STEP = 3
"""Chains of each step that are timed again at the end, besides the heuristic's."""
LEAST_SPEEDUP = 1.1
"""Default of the minimal speedup of a recommended chain over dense: less is not worth the error
that a chain costs."""


def least_speedup(request: SearchOptions) -> float:
    """The minimal speedup over dense of chains that a request recommends.

    Example:
        >>> least_speedup(LayerRequest("8x8")), least_speedup(LayerRequest("8x8", min_speedup=1.0))
        (1.1, 1.0)
    """
    return request.min_speedup or LEAST_SPEEDUP


def admitted(trials: Sequence[TrialRecord], request: LayerRequest) -> list[TrialRecord]:
    """The trials whose chains a request admits: others are of earlier runs of its study."""
    return [trial for trial in trials if request.admits(trial.facts.chain)]


def front_of(trials: Sequence[TrialRecord], request: LayerRequest) -> list[TrialRecord]:
    """The trials on the Pareto front of a request's objectives within its limits, fastest first."""
    most, times = request.max_error, request.min_speedup
    within = [
        trial
        for trial in admitted(trials, request)
        if (most is None or _is_near(trial, most))
        and (times is None or (trial.ratio is not None and trial.ratio * times <= 1))
    ]
    return pareto_front(within, metrics.objectives(request))


def within_error(trials: Sequence[TrialRecord], max_error: float | None) -> list[TrialRecord]:
    """The trials whose chains are within an error of the trained weights; all if it is None."""
    return [trial for trial in trials if max_error is None or _is_near(trial, max_error)]


def _is_near(trial: TrialRecord, max_error: float) -> bool:
    """Whether a trial's chain is within an error of the trained weights."""
    error = WEIGHT_ERROR.of(trial)
    return error is not None and error <= max_error


def elect(
    trials: Sequence[TrialRecord], steps: Sequence[Step], max_error: float | None = None
) -> list[TrialRecord]:
    """The trials whose chains go into the final.

    They are, of each step, the three fastest, the fastest of each structure, the one with the
    largest rho and, of each metric besides the latency, the best.

    With ``max_error`` only chains within that error of the trained weights count. Trials are ranked
    by their latency over the dense layer's, measured in turns within the trial, so that trials of
    different runs and different states of the machine can be compared.
    """
    trials = within_error(trials, max_error)
    chosen: dict[int, TrialRecord] = {}
    for step in steps:
        ranked = _ranked(trials, step)
        of_structures = {name_of(one.facts.chain): one for one in reversed(ranked)}.values()
        others = [*of_structures, *_heuristic(trials, step), *_best(ranked)]
        for trial in [*ranked[:FINALISTS_PER_STEP], *others]:
            chosen[trial.number] = trial
    return [chosen[number] for number in sorted(chosen)]


def finalists(
    elected: Sequence[TrialRecord],
    final: Mapping[str, Measurement] | None,
    values: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[Finalist, ...]:
    """The elected trials with their times from the final, or from their trials if there was none.

    Args:
        elected: The trials.
        final: Times of the final.
        values: Metrics that were measured after the final: by the metric's name, then by the
            chain's text and "dense".
    """
    standing, values = [], values or {}
    dense_values = {name: of_each[DENSE] for name, of_each in values.items()}
    for trial in elected:
        latency, dense = trial.latency, trial.dense
        if final is not None:
            latency, dense = final[str(trial.facts.chain)], final[DENSE]
        assert latency is not None
        assert dense is not None
        again = {name: of_each[str(trial.facts.chain)] for name, of_each in values.items()}
        standing.append(
            Finalist(
                trial.facts,
                latency,
                dense,
                trial.number,
                trial.origin,
                retimed=final is not None,
                values={**trial.values, **again},
                dense_values=dense_values,
                in_trial_us=None if trial.latency is None else trial.latency.median_us,
            )
        )
    return tuple(sorted(standing, key=lambda f: f.latency.median_us if f.retimed else f.ratio))


def recommend(
    space: Space,
    standing: Sequence[Finalist],
    max_error: float | None = None,
    min_speedup: float | None = None,
    dense_in_trials_us: float | None = None,
    not_admitted: int = 0,
    trials: Sequence[TrialRecord] = (),
) -> tuple[Recommendation, ...]:
    """One recommendation for each step, unmet ones too, in rising order.

    Args:
        space: The searched space.
        standing: The finalists.
        max_error: The request's.
        min_speedup: The request's; None for `LEAST_SPEEDUP`.
        dense_in_trials_us: The dense layer's latency in the trials. If it was suspiciously slow in
            a final, a chain has to be faster than this, too.
        not_admitted: Number of trials that no step may recommend: see `admitted`.
        trials: The admitted trials: with ``max_error``, they show that chains of a step were
            measured although none is a finalist.
    """
    answers = [
        _for_step(step, standing, max_error, min_speedup, dense_in_trials_us, not_admitted, trials)
        for step in space.steps
    ]
    answers += [_unmet(budget, space) for budget in space.unmet]
    return tuple(sorted(answers, key=lambda answer: answer.budget.parameters))


def _ranked(trials: Sequence[TrialRecord], step: Step) -> list[TrialRecord]:
    inside = [t for t in trials if t.ratio is not None and step.holds(t.facts.nnz)]
    return sorted(inside, key=lambda trial: trial.ratio or 0.0)


def _heuristic(trials: Sequence[TrialRecord], step: Step) -> list[TrialRecord]:
    inside = [trial for trial in _ranked(trials, step) if isinstance(trial.facts.chain, Chain)]
    return [max(inside, key=lambda trial: trial.facts.rho)] if inside else []


def _best(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The best trial in each metric besides latency and weights."""
    best = []
    for metric in metrics.stored():
        costs = [(cost, trial) for trial in trials if (cost := metric.cost(trial)) is not None]
        best += [min(costs, key=lambda one: one[0])[1]] if costs else []
    return best


def _unmet(budget: Budget, space: Space) -> Recommendation:
    least = min(chain.nnz for chain in space.candidates)
    sentence = (
        f"No chain meets the budget of {budget.text} ({counted(budget.parameters, 'weight')}): the "
        f"smallest one of this search has {least:,}. A smaller --min-rank or fewer limits may "
        "allow smaller ones."
    )
    return Recommendation(budget, 0, Verdict.UNMET, None, (), None, sentence)


def _for_step(
    step: Step,
    standing: Sequence[Finalist],
    max_error: float | None,
    min_speedup: float | None,
    dense_in_trials_us: float | None,
    not_admitted: int,
    trials: Sequence[TrialRecord],
) -> Recommendation:
    inside = [f for f in standing if step.holds(f.facts.nnz)]
    if not inside:
        verdict = Verdict.UNKNOWN
        sentence = f"No chain for the budget of {step.budget.text} was measured."
        if max_error is not None and _ranked(trials, step):
            verdict = Verdict.KEEP_DENSE
            sentence = (
                f"No measured chain for the budget of {step.budget.text} comes within a relative "
                f"error of {max_error:g} of the given weights: keep the dense layer."
            )
        if not_admitted:
            are = "is of a chain that is" if not_admitted == 1 else "are of chains that are"
            sentence += (
                f" {counted(not_admitted, 'trial')} of earlier runs {are} not asked for any more "
                "(by rank, factors or sizes). Such trials count, too: give more of them."
            )
        return Recommendation(step.budget, step.least, verdict, None, (), None, sentence)
    # In a final all were timed together; otherwise only ratios to dense can be compared.
    chosen = min(inside, key=lambda f: f.latency.median_us if f.retimed else f.ratio)
    others = [f for f in inside if f is not chosen]
    verdict = {
        Comparison.FASTER: Verdict.USE,
        Comparison.SLOWER: Verdict.KEEP_DENSE,
        Comparison.WITHIN_NOISE: Verdict.NO_DIFFERENCE,
    }[chosen.versus_dense]
    if verdict is Verdict.USE and chosen.retimed and dense_in_trials_us is not None:
        strange = suspect_dense.is_suspect(chosen.dense.median_us, dense_in_trials_us)
        if strange and chosen.latency.median_us > dense_in_trials_us:
            sentence = _unjudged(step, chosen, dense_in_trials_us)
            unjudged = Verdict.UNJUDGED
            return Recommendation(step.budget, step.least, unjudged, None, (), None, sentence)
    if verdict is Verdict.USE and chosen.ratio * (min_speedup or LEAST_SPEEDUP) > 1:
        verdict = Verdict.NOT_ENOUGH
    ties = tuple(f for f in others if compare(f.latency, chosen.latency) is Comparison.WITHIN_NOISE)
    chains = [f for f in inside if isinstance(f.facts.chain, Chain)]
    heuristic = max(chains, key=lambda f: f.facts.rho, default=None)
    return Recommendation(
        step.budget,
        step.least,
        verdict,
        chosen,
        ties,
        heuristic,
        _sentence(step, verdict, chosen, min_speedup),
    )


def _at(step: Step) -> str:
    return f"At a budget of {step.budget.text} ({counted(step.budget.parameters, 'weight')})"


def _unjudged(step: Step, fastest: Finalist, in_trials_us: float) -> str:
    return (
        f"{_at(step)}, the fastest chain, {fastest.facts.chain}, cannot be judged. In the final it "
        f"took {phrases.timed(fastest.latency)}, but something held back the dense layer: it took "
        f"{phrases.timed(fastest.dense)}, and {phrases.microseconds(in_trials_us)} in the trials. "
        "Measure again on an idle machine."
    )


def _sentence(step: Step, verdict: Verdict, chosen: Finalist, min_speedup: float | None) -> str:
    budget, chain = _at(step), chosen.facts.chain
    evidence = (
        f"It has {phrases.weights(chosen.facts)}. It takes {phrases.timed(chosen.latency)}. "
        f"The dense layer takes {phrases.timed(chosen.dense)}."
    )
    speed = f"It is {phrases.times(chosen.ratio)} the dense layer."
    if verdict is Verdict.NO_DIFFERENCE and timing_noise.is_noisy(chosen.latency, chosen.dense):
        text = (
            f"{budget}, the fastest chain is {chain}. The times are too noisy to tell it from the "
            f"dense layer. {evidence}"
        )
    elif verdict is Verdict.USE and timing_noise.warning(chosen):
        text = f"{budget}, {chain} looks fastest, but that is not settled. {speed} {evidence}"
    elif verdict is Verdict.USE:
        text = f"{budget}, use {chain}. {speed} {evidence}"
    elif verdict is Verdict.NOT_ENOUGH:
        required = f"{LEAST_SPEEDUP:g} times, and no chain keeps all that a dense layer can do"
        if min_speedup is not None:
            required = f"the {min_speedup:g} times that were asked for"
        text = (
            f"{budget}, keep the dense layer. The fastest chain is {chain}. {speed} That is less "
            f"than {required}. {evidence}"
        )
    elif verdict is Verdict.KEEP_DENSE:
        text = f"{budget}, keep the dense layer. The fastest chain is {chain}. {speed} {evidence}"
    else:
        text = (
            f"{budget}, no chain is measurably faster than the dense layer. The fastest, {chain}, "
            f"is within noise of it. {evidence} Keep the dense layer, unless fewer weights are "
            "worth having by themselves."
        )
    for metric in metrics.stored():
        if metric.remark is not None and metric.name in chosen.values:
            text += f" {metric.remark(chosen)}"
    if step.least < step.requested:
        text += (
            f" No chain uses {counted(step.requested, 'weight')} or more within this budget. "
            f"Those of {step.least:,} come closest."
        )
    if warning := timing_noise.warning(chosen):
        text += f" {warning}"
    if not chosen.retimed:
        text += " These are the trials' times: the search was stopped before the final."
    return text
