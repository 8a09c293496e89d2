"""The sections that a report has of each layer: the answer, and the evidence for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ksopt.patterns.chain import Chain
from ksopt.report.document import Section
from ksopt.search import diagnostics, metrics, recommend
from ksopt.search.metrics import LATENCY, Metric
from ksopt.search.report import answers, bounds, phrases, result_tables
from ksopt.search.report.plots import figure, latency_plot, metric_plot
from ksopt.search.report.sections import section
from ksopt.search.results import Finalist, LayerResult, Recommendation, Verdict

_TRIALS_SHOWN = 40


@section(order=10)
def answer(result: LayerResult) -> Section:
    """The recommendation of each budget, and what makes it less certain than it looks."""
    measured = [a for a in result.recommendations if a.chosen is not None]
    beside = []
    for answer in measured:
        beside += [*_beside(answer), *best_in_final(answer, result.finalists)]
    drift = diagnostics.drift(result)
    beside += [drift.sentence] if drift is not None else []
    lead = answers.layer_lead(result)
    table = result_tables.layer_answers_table(result)
    return Section("Answer", tuple(lead), tuple(beside), table)


def _beside(answer: Recommendation) -> list[str]:
    """What else is to be known of a step: ties, and how the heuristic did."""
    assert answer.chosen is not None
    sentences = []
    if answer.ties:
        named = ", ".join(f"{tie.facts.chain} ({tie.facts.nnz:,} weights)" for tie in answer.ties)
        sentences.append(f"At {answer.budget.text}, within noise of the fastest chain: {named}.")
    heuristic = answer.heuristic
    if heuristic is not None:
        sentences.append(f"At {answer.budget.text}, {_heuristic(answer.chosen, heuristic)}")
    return sentences


def _heuristic(chosen: Finalist, heuristic: Finalist) -> str:
    if heuristic is chosen:
        return "the fastest chain is also the measured one with the largest rho."
    return (
        f"the largest rho of the chains in the final belongs to {heuristic.facts.chain} "
        f"(rho {heuristic.facts.rho:.4f} against {chosen.facts.rho:.4f}), which takes "
        f"{phrases.microseconds(heuristic.latency.median_us)} against "
        f"{phrases.microseconds(chosen.latency.median_us)}."
    )


def best_in_final(answer: Recommendation, finalists: Sequence[Finalist]) -> list[str]:
    """The chains of a step's final that are better than its fastest, each in a metric."""
    chosen, sentences = answer.chosen, []
    if chosen is None:
        return []
    for metric in metrics.stored():
        of_chosen = chosen.values.get(metric.name)
        others = [
            one
            for one in finalists
            if metric.name in one.values
            and answer.least <= one.facts.nnz <= answer.budget.parameters
        ]
        if of_chosen is None or not others:
            continue
        pick = min if metric.direction == "minimize" else max
        best = pick(others, key=lambda one: one.values[metric.name])
        if pick(best.values[metric.name], of_chosen) != of_chosen:
            sentences.append(_better(answer, metric, best, chosen))
    return sentences


def _better(answer: Recommendation, metric: Metric, best: Finalist, chosen: Finalist) -> str:
    return (
        f"At {answer.budget.text}, the best {metric.title} of the chains in the final is that of "
        f"{best.facts.chain}: {metric.cell(best.values)} against {metric.cell(chosen.values)} of "
        f"the fastest, at a latency of {phrases.microseconds(best.latency.median_us)} against "
        f"{phrases.microseconds(chosen.latency.median_us)}."
    )


def _has_choice(result: LayerResult) -> bool:
    return any(answer.chosen is not None for answer in result.recommendations)


@section(order=30, when=_has_choice)
def time(result: LayerResult) -> Section:
    """What each chosen chain moves and computes, and which of the two binds it."""
    note = (
        "What is moved is each factor's input, output and weights once, and what is computed two "
        "operations for each weight and row; the floor is the longer of the two at this device's "
        "measured ceilings, the sum of its factors' for a chain. A kernel that runs several "
        "factors in one pass, and on a CPU caches, move less."
    )
    return Section(
        "Where the time goes", (), (*bounds.sentences(result), note), bounds.table(result)
    )


@section(order=40)
def latency(result: LayerResult) -> Section:
    """Latency against weights, plotted."""
    text = (
        "Circles are chains of two factors, triangles of three, squares of one; rings mark the "
        "fastest of each budget, the stepped line the chains that no other beats in both. Each "
        "point is its trial's latency over the dense layer's, timed in turns with it, on the scale "
        "of the dense layer's latency of the final."
    )
    if any(not isinstance(trial.facts.chain, Chain) for trial in result.trials):
        text += " Diamonds are operators of other structures."
    drawing = figure(partial(latency_plot, result))
    return Section("Latency against weights", (), (text,), figure=drawing)


@section(order=50)
def other_metrics(result: LayerResult) -> Iterator[Section]:
    """Each metric besides latency and weights, plotted."""
    for metric in metrics.stored():
        drawing = figure(partial(metric_plot, result, metric))
        if drawing.wide:
            assert metric.plotted_against is not None
            against = metrics.METRICS[metric.plotted_against]
            text = (
                f"Each point is a trial: its {metric.axis}, and its {against.axis}. The stepped "
                f"line is the best {metric.title} that the {against.title} allows, of what was "
                "measured; rings mark the fastest of each budget."
            )
            if against is LATENCY:
                text += " Left of the upright line chains are faster than dense."
            title = f"{metric.title.capitalize()} against {against.title}"
            yield Section(title, (), (text,), figure=drawing)


@section(order=60)
def front(result: LayerResult) -> Iterator[Section]:
    """What is left to choose from, where more than latency was to be low."""
    titles = [metric.title for metric in metrics.objectives(result.request)]
    front = recommend.front_of(result.trials, result.request)
    if len(titles) < 2 or not front:
        return
    *others, last = titles
    shown, count = front[:_TRIALS_SHOWN], f"{len(front)} chains"
    text = (
        f"Of all that was measured, what no other chain equals or beats in {', '.join(others)} and "
        f"{last} together: {'one chain' if len(front) == 1 else count}. Latency counts over the "
        "dense layer's, timed in turns with it; all values are of the trials."
    )
    if len(shown) < len(front):
        text += f" The fastest {len(shown)} are shown; results.json names all."
    yield Section("Pareto front", (), (text,), result_tables.front_table(shown))


@section(order=70)
def finalists(result: LayerResult) -> Section:
    """The final."""
    if not result.finalists:
        none = "No chain was measured."
        if any(answer.verdict is Verdict.KEEP_DENSE for answer in result.recommendations):
            # Of what was measured, then, nothing is near enough.
            none = (
                "No measured chain comes within a relative error of "
                f"{result.request.max_error:g} of the given weights, so there is none."
            )
        return Section("Finalists", (), (none,))
    if result.finalists[0].retimed:
        text = (
            "The best chains of every budget, and the one of the largest rho, timed again in turns "
            "with each other and with the dense layer, in a process of their own that did nothing "
            "else before; the dense layer took "
            f"{phrases.timed(result.finalists[0].dense)}."
        )
    else:
        text = "The search was stopped before the final: these are the times of the trials."
    text += (
        " Two times are told apart when each median lies outside the other's band from the 20th to "
        "the 80th percentile; a chain ties with those that it was not told apart from. Efficiency "
        "is the roofline's floor over the time; rho is (b + c)/(b c), larger where moving data "
        "costs more than computing, averaged over the factors by their weights."
    )
    return Section("Finalists", (), (text,), result_tables.finalists_table(result))


@section(order=100)
def trials(result: LayerResult) -> Section:
    """Every trial."""
    ranked = sorted(result.trials, key=lambda t: (t.ratio is None, t.ratio or 0.0))
    shown = ranked[:_TRIALS_SHOWN]
    text = "Fastest over dense first; trials.csv has every column."
    if len(shown) < len(ranked):
        text = f"The fastest {len(shown)} of {len(ranked)} trials; trials.csv has all."
    return Section("Trials", (), (text,), result_tables.trials_table(shown))
