"""Report sections of each layer: the answer, and its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ksopt import drawing
from ksopt.patterns.chain import Chain
from ksopt.report.document import Section
from ksopt.search import diagnostics, metrics, surrounded
from ksopt.search.metrics import LATENCY, Metric
from ksopt.search.plan import choice_of_layer
from ksopt.search.report import headline, phrases, result_tables, roofline
from ksopt.search.report.plots import figure, metric_plot
from ksopt.search.report.reported_latency import ReportedLatencies
from ksopt.search.report.sections import section
from ksopt.search.results import Finalist, LayerResult, Recommendation, Verdict

_TRIALS_SHOWN = 40


@section(order=10, is_folded=False)
def answer(result: LayerResult) -> Section:
    """The recommendation, with reservations."""
    return headline.of_layer(result)


def _drawn(result: LayerResult) -> Chain | None:
    """The chain that is used, if there is one and it can be drawn."""
    answer = choice_of_layer(result)
    chain = None if answer is None or answer.chosen is None else answer.chosen.facts.chain
    return chain if isinstance(chain, Chain) and drawing.can_draw(chain) else None


@section(order=22, when=lambda result: _drawn(result) is not None)
def picture(result: LayerResult) -> Section:
    """A drawing of the chain that is used."""
    chain = _drawn(result)
    assert chain is not None
    text = (
        "Coloured is what may be nonzero, paler where a cell is partly so. The last factor meets "
        "the input first."
    )
    shown = drawing.figure_of(chain, f"chain-{result.size}")
    return Section(f"{chain}, drawn", (), (text,), figure=shown)


@section(order=25)
def evidence(result: LayerResult) -> Section:
    """The answer of each budget in sentences, with remarks."""
    texts = [answer.sentence for answer in result.recommendations]
    for answer in result.recommendations:
        if answer.chosen is not None:
            texts += [*_beside(answer), *best_in_final(answer, result.finalists)]
    drift = diagnostics.drift(result)
    texts += [drift.sentence] if drift is not None else []
    return Section("Evidence for each budget", (), tuple(texts))


@section(order=24, when=lambda result: bool(result.surrounded))
def in_surroundings(result: LayerResult) -> Section:
    """The best chains in the surroundings in which such layers usually occur."""
    text = (
        "Alone no chain is worth using, so the fastest of each budget, and the chains that are "
        "predicted to be fastest there, were also timed as layers of a model often are: one launch "
        "then computes the siblings, the bias and what follows. The "
        "dense layer has the same: siblings are one product of all their outputs. The times are of "
        "all siblings. plan.json has each chain that is worth using with its condition, and ksopt "
        "convert uses it where the condition is true in the model: --inputs shows it the model."
    )
    return Section(
        "In other surroundings",
        tuple(surrounded.judged(result)),
        (text,),
        result_tables.surrounded_table(result),
    )


def _beside(answer: Recommendation) -> list[str]:
    """Remarks on a step: ties, and the quality of the heuristic."""
    assert answer.chosen is not None
    sentences = []
    if answer.ties:
        named = ", ".join(str(tie.facts.chain) for tie in answer.ties)
        sentences.append(f"At {answer.budget.text}, within noise of the fastest chain: {named}.")
    heuristic = answer.heuristic
    if heuristic is not None:
        sentences.append(f"At {answer.budget.text}, {_heuristic(answer.chosen, heuristic)}")
    return sentences


def _heuristic(chosen: Finalist, heuristic: Finalist) -> str:
    if heuristic is chosen:
        return "the fastest chain is also the measured one with the largest rho."
    return (
        f"the largest rho of the final belongs to {heuristic.facts.chain}: "
        f"{heuristic.facts.rho:.4f} against {chosen.facts.rho:.4f}. It takes "
        f"{phrases.microseconds(heuristic.latency.median_us)} against "
        f"{phrases.microseconds(chosen.latency.median_us)}."
    )


def best_in_final(answer: Recommendation, finalists: Sequence[Finalist]) -> list[str]:
    """Sentences on chains of a step's final that are better than its fastest in a metric."""
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
        f"{best.facts.chain}. It has {metric.cell(best.values)} against "
        f"{metric.cell(chosen.values)} of the fastest. Its latency is "
        f"{phrases.microseconds(best.latency.median_us)} against "
        f"{phrases.microseconds(chosen.latency.median_us)}."
    )


def _has_choice(result: LayerResult) -> bool:
    return any(answer.chosen is not None for answer in result.recommendations)


@section(order=30, when=_has_choice)
def time(result: LayerResult) -> Section:
    """Data movement and operations of each chosen chain, and which of the two binds it."""
    note = (
        "Moved: each factor's input, output and weights, once. Computed: two operations for each "
        "weight and row. A chain's floor is the sum of its factors' floors. A kernel that runs "
        "several factors in one pass moves less, and so do the caches of a CPU."
    )
    return Section(
        "Where the time goes", (), (*roofline.sentences(result), note), roofline.table(result)
    )


@section(order=50)
def other_metrics(result: LayerResult) -> Iterator[Section]:
    """Plots of each metric besides latency and weights."""
    for metric in metrics.stored():
        name = f"{metric.name}-{result.size}"
        drawing = figure(partial(metric_plot, result, metric), name)
        if drawing.wide:
            assert metric.plotted_against is not None
            against = metrics.METRICS[metric.plotted_against]
            text = (
                "Each point is a trial, each ring the fastest of a budget. The stepped line is the "
                f"best {metric.title} that the {against.title} allows, of what was measured."
            )
            if against is LATENCY:
                text += " Left of the upright line chains are faster than dense."
            title = f"{metric.title.capitalize()} against {against.title}"
            yield Section(title, (), (text,), figure=drawing)


_WHOSE_TIMES = (
    "Finalists have the times of the final. The others are scaled to the final's dense time."
)


@section(order=60)
def front(result: LayerResult) -> Iterator[Section]:
    """The Pareto front, if there are several objectives."""
    titles = [metric.title for metric in metrics.objectives(result.request)]
    front = ReportedLatencies(result).front()
    if len(titles) < 2 or not front:
        return
    *others, last = titles
    shown, count = front[:_TRIALS_SHOWN], f"{len(front)} chains"
    text = (
        f"What no other chain equals or beats in {', '.join(others)} and {last} together: "
        f"{'one chain' if len(front) == 1 else count}. Chains are ranked by their latency over "
        f"the dense layer's, timed in turns. {_WHOSE_TIMES}"
    )
    if len(shown) < len(front):
        text += f" The fastest {len(shown)} are shown. results.json names all."
    yield Section("Pareto front", (), (text,), result_tables.front_table(shown))


@section(order=70)
def finalists(result: LayerResult) -> Section:
    """The results of the final."""
    if not result.finalists:
        none = "No chain was measured."
        if any(answer.verdict is Verdict.KEEP_DENSE for answer in result.recommendations):
            # No measured chain is near enough.
            none = (
                "No measured chain comes within a relative error of "
                f"{result.request.max_error:g} of the given weights, so there is none."
            )
        return Section("Finalists", (), (none,))
    if result.finalists[0].retimed:
        text = (
            "The best chains of every budget, and the one of the largest rho, timed again. They "
            "took turns with each other and the dense layer, in a fresh process of their own. The "
            f"dense layer took {phrases.timed(result.finalists[0].dense)}."
        )
    else:
        text = "The search was stopped before the final: these are the times of the trials."
    text += (
        " A chain ties with those that are within noise of it. The glossary below has the words. "
        "rho is (b + c)/(b c): where it is large, moving data costs more than computing."
    )
    return Section("Finalists", (), (text,), result_tables.finalists_table(result))


@section(order=100)
def trials(result: LayerResult) -> Section:
    """All trials."""
    times = ReportedLatencies(result)
    ranked = sorted(result.trials, key=lambda t: (t.ratio is None, times.ratio(t) or 0.0))
    shown = ranked[:_TRIALS_SHOWN]
    text = "The fastest over dense come first. trials.csv has every column."
    if len(shown) < len(ranked):
        text = f"The fastest {len(shown)} of {len(ranked)} trials. trials.csv has all."
    text += f" {_WHOSE_TIMES} trials.csv has the times as they were measured."
    return Section("Trials", (), (text,), result_tables.trials_table(shown, times))
