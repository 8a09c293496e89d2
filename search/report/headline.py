"""The first screen of a report: the recommendation, its gain, its cost and its certainty."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ksopt.measure.timing import Comparison, compare
from ksopt.patterns.chain import Chain
from ksopt.report.document import Fact, Section
from ksopt.search import diagnostics, metrics, surrounded, suspect_dense, timing_noise
from ksopt.search.metrics import WEIGHT_ERROR
from ksopt.search.plan import Effect, choice, choice_of_layer, effect_of
from ksopt.search.recommend import least_speedup
from ksopt.search.report import answers, phrases, result_tables
from ksopt.search.report.overview import Series, overview_plot
from ksopt.search.report.plots import beyond, figure, latency_plot
from ksopt.search.report.reported_latency import ReportedLatencies
from ksopt.search.request import SearchRequest
from ksopt.search.results import Finalist, LayerResult, Recommendation, SearchResult, Verdict
from ksopt.system.plurals import counted


def of_layer(layer: LayerResult) -> Section:
    """The headline of one layer: its answer, with the plot of its chains."""
    answer = choice_of_layer(layer)
    used = None if answer is None else answer.chosen
    shown = used or _fastest(layer)
    paragraphs = [*phrases.what_is_timed(layer.request), *answers.layer_notes(layer)]
    if layer.replayed:
        paragraphs.append(phrases.replayed(layer.device))
    caption = f"{_marks(layer)} {beyond(layer)}".rstrip()
    name = f"latency-{layer.size}"
    return Section(
        "Answer",
        tuple(_lead(layer)),
        (*paragraphs, caption),
        result_tables.layer_answers_table(layer),
        figure=figure(partial(latency_plot, layer, answer), name),
        facts=() if shown is None else (*_surrounded_facts(layer), *_facts(layer, shown)),
        command=SearchRequest.of_layer(layer.request).command if _is_unsettled(layer) else "",
        warnings=tuple(_warnings(layer, shown)),
    )


_HOW_ERROR = "To know it, add --weights FILE, your trained weights: the command is below."
_USED_UP = 0.9  # of a budget: chains that use less leave room, which is mentioned
_SHAPES = {1: "squares have one factor", 2: "circles two factors", 3: "triangles three factors"}


def _marks(layer: LayerResult) -> str:
    """Caption of the marks in the plot."""
    drawn = [trial.facts.chain for trial in layer.trials if trial.ratio is not None]
    counts = {len(chain) for chain in drawn if isinstance(chain, Chain)}
    shapes = [words for count, words in _SHAPES.items() if count in counts]
    text = f"Each point is a chain{': ' if len(shapes) > 1 else ''}"
    text += f"{', '.join(shapes)}." if len(shapes) > 1 else "."
    if not all(isinstance(chain, Chain) for chain in drawn):
        text += " Diamonds are operators of other structures."
    rings = {one.chosen.trial for one in layer.recommendations if one.chosen is not None}
    text += " The ring is the fastest." if len(rings) == 1 else ""
    text += " Each ring is the fastest of a budget." if len(rings) > 1 else ""
    text += " The stepped line joins the chains that no other beats in both weights and latency."
    if any(one.retimed for one in layer.finalists):
        text += " Finalists have the times of the final, which decides. The other points are "
        text += "scaled to its dense time."
    pruned = sum(trial.state == "pruned" for trial in layer.trials)
    if pruned:
        text += f" {counted(pruned, 'chain')} given up early {'is' if pruned == 1 else 'are'} not "
        text += "drawn."
    return text


def _lead(layer: LayerResult) -> list[str]:
    """The recommendation for the layer, and its reasons."""
    size, answer = layer.size, choice_of_layer(layer)
    linear = f"nn.Linear({size.in_features}, {size.out_features})"
    if answer is None or answer.chosen is None:
        where = [surrounded.placed(around) for around, _ in surrounded.winners(layer)]
        but = f", but not {', or '.join(where)}" if where else ""
        return [f"Keep {linear} dense{but}.", _why_dense(layer) + _alone(layer)]
    tried = sum(trial.ratio_seen is not None for trial in layer.trials)
    whole = sum(trial.ratio is not None for trial in layer.trials)
    to_the_end = f", {whole} of them to the end" if whole < tried else ""
    dense = layer.size.dense_parameters
    least, most = (phrases.percent(n / dense) for n in (answer.least, answer.budget.parameters))
    why = (
        f"Of {counted(tried, 'chain')} measured on this device{to_the_end}, it is the fastest with "
        f"{least} to {most} of the dense layer's weights."
    )
    is_settled = not _doubt(layer, answer.chosen)
    if answer.ties and is_settled:
        others = "1 other is" if len(answer.ties) == 1 else f"{len(answer.ties)} others are"
        why += f" {others} as fast within noise."
    elif answer.ties:
        others = "1 other" if len(answer.ties) == 1 else f"{len(answer.ties)} others"
        why += f" The times spread too widely to tell {others} from it."
    if len(layer.recommendations) > 1:
        why += (
            f" {answer.budget.text} is the largest budget with a chain worth using, and so the "
            "nearest to what the dense layer can express."
        )
    why += _room_left(layer, answer)
    why += _faster_one(layer, answer.chosen)
    if "bias" not in layer.request.epilogue:
        why += " The dense layer and the chains were timed without a bias."
    if not is_settled:
        return [f"Measure again: {answer.chosen.facts.chain} looks faster than {linear}.", why]
    return [f"Use {answer.chosen.facts.chain} in place of {linear}.", why]


def _room_left(layer: LayerResult, answer: Recommendation) -> str:
    """Sentence on chains that use the whole budget; empty if the chosen one does."""
    most, times = answer.budget.parameters, ReportedLatencies(layer)
    if answer.chosen is None or answer.chosen.facts.nnz >= _USED_UP * most:
        return ""
    fuller = [
        (ratio, trial)
        for trial in layer.trials
        if trial.ratio is not None
        and _USED_UP * most <= trial.facts.nnz <= most
        and (ratio := times.ratio(trial)) is not None
    ]
    share = phrases.percent(answer.chosen.facts.nnz / most)
    if not fuller:
        return (
            f" It uses {share} of the budget. --min-use {_USED_UP} searches chains that use more."
        )
    ratio, best = min(fuller, key=lambda one: one[0])
    return (
        f" It uses {share} of the budget. The fastest measured that uses {_USED_UP:.0%} or more is "
        f"{best.facts.chain}, {1 / ratio:.2f}x."
    )


def _is_unsettled(layer: LayerResult) -> bool:
    """Whether the answer recommends another measurement."""
    if any(one.verdict is Verdict.UNJUDGED for one in layer.recommendations):
        return True
    answer = choice_of_layer(layer)
    return answer is not None and answer.chosen is not None and _doubt(layer, answer.chosen)


def _doubt(layer: LayerResult, chosen: Finalist) -> bool:
    """Whether a chain's time, or the dense layer's, cannot be trusted."""
    dense = suspect_dense.dense_layer(layer)
    return bool((dense is not None and dense.is_strange) or timing_noise.warning(chosen))


def _faster_one(layer: LayerResult, chosen: Finalist) -> str:
    """Sentence on the gain of a smaller budget over the chosen chain; empty if there is none."""
    others = [
        (answer, answer.chosen)
        for answer in layer.recommendations
        if answer.verdict is Verdict.USE and answer.chosen is not None
    ]
    answer, fastest = min(others, key=lambda one: one[1].latency.median_us)
    is_faster = compare(fastest.latency, chosen.latency) is Comparison.FASTER
    if not is_faster or timing_noise.warning(fastest):
        return ""
    return (
        f" The chain of {answer.budget.text} is faster, {1 / fastest.ratio:.2f}x against "
        f"{1 / chosen.ratio:.2f}x, and has fewer weights: take it where accuracy allows."
    )


def _fastest(layer: LayerResult) -> Finalist | None:
    """The fastest chain of a layer that stays dense, if it can be judged."""
    if any(answer.verdict is Verdict.UNJUDGED for answer in layer.recommendations):
        return None
    return min(layer.finalists, key=lambda one: one.ratio, default=None)


def _alone(layer: LayerResult) -> str:
    """Sentence on what surrounds a layer in a model, if it may change the answer; else empty.

    On a GPU one launch computes several chains of one input, and what follows a product.
    """
    if layer.surrounded:
        return " ".join([" It was timed alone.", *surrounded.judged(layer)])
    request = layer.request
    if layer.device.type != "cuda" or request.siblings > 1 or set(request.epilogue) - {"bias"}:
        return ""
    return (
        " It was timed alone. Chains gain more where several read one input, as q, k and v do "
        "(--siblings 3), or where an activation follows (--epilogue bias gelu); --model reads "
        "both from a model."
    )


def _why_dense(layer: LayerResult) -> str:
    request, verdicts = layer.request, {answer.verdict for answer in layer.recommendations}
    if Verdict.UNJUDGED in verdicts:
        return (
            "That is not certain: something held back the dense layer in the final, so no chain "
            "can be judged. Measure again on an idle machine."
        )
    if Verdict.NOT_ENOUGH in verdicts:
        return f"No measured chain is {least_speedup(request):g} times as fast."
    if not layer.finalists and Verdict.KEEP_DENSE in verdicts:
        return f"No measured chain comes within a weight error of {request.max_error:g}."
    if not layer.finalists:
        return "No chain was measured, so there is no answer yet."
    return "None of the measured chains is measurably faster here."


def _surrounded_facts(layer: LayerResult) -> list[Fact]:
    """The speedup in each of the surroundings in which a chain wins that loses alone."""
    facts = []
    for around, answer in surrounded.winners(layer):
        assert answer.chosen is not None
        times = (answer.chosen.latency, answer.chosen.dense)
        latency, dense = (phrases.microseconds(one.median_us) for one in times)
        name = f"speedup over dense, {surrounded.placed(around)}"
        facts.append(Fact(f"{1 / answer.chosen.ratio:.2f}x", name, f"{latency} against {dense}"))
    return facts


def _facts(layer: LayerResult, shown: Finalist) -> list[Fact]:
    """Facts on speed, weights and error of a chain, and their certainty."""
    dense = layer.size.dense_parameters
    latency, beside = (phrases.microseconds(one.median_us) for one in (shown.latency, shown.dense))
    speed = f"{1 / shown.ratio:.2f}x"
    if _doubt(layer, shown):
        speed = phrases.speed_span(shown.latency, shown.dense)
    answer = choice_of_layer(layer)
    is_used = answer is not None and answer.chosen == shown
    whose = "" if is_used else ", of the fastest chain"
    share, counts = phrases.percent(shown.facts.share), f"{shown.facts.nnz:,} of {dense:,}"
    facts = [
        Fact(speed, f"speedup over dense{whose}", f"{latency} against {beside}"),
        Fact(share, f"of the weights{whose}", counts),
    ]
    for metric in metrics.stored():
        if metric.name in shown.values:
            known = metric.cell(shown.dense_values)
            facts.append(Fact(metric.cell(shown.values), metric.title, known and f"dense: {known}"))
        elif metric is WEIGHT_ERROR:
            facts.append(Fact("unknown", metric.title, _HOW_ERROR))
    return [*facts, _certainty(layer, shown)]


def _certainty(layer: LayerResult, shown: Finalist) -> Fact:
    drift = diagnostics.drift(layer)
    name = "how sure"
    if _doubt(layer, shown):
        return Fact("doubtful", name, "the warning below says why")
    if not shown.retimed:
        return Fact("a first guess", name, "stopped before the final")
    if shown.versus_dense.value == "within noise":
        return Fact("within noise", name, "not told apart from dense")
    if drift is not None and drift.beyond_noise:
        return Fact("fairly", name, "the machine changed meanwhile")
    return Fact("clear", name, "faster than dense, beyond noise")


def _warnings(layer: LayerResult, shown: Finalist | None) -> list[str]:
    warnings = [*answers.stopped(layer), *answers.layer_warnings(layer)]
    return [*warnings, *(() if shown is None else filter(None, [timing_noise.warning(shown)]))]


def of_search(result: SearchResult) -> Section:
    """The headline of several sizes, or a model: its plan, with a plot of all finalists."""
    effect = effect_of(result)
    chosen = [(one, choice(result, one.size)) for one in result.layers]
    series = [Series.of(str(layer.size), layer, answer) for layer, answer in chosen]
    caption = (
        "Each point is a chain of a final, each ring one that the plan uses. Above the line, "
        "chains are faster than dense."
    )
    used = [answer.chosen for _, answer in chosen if answer is not None and answer.chosen]
    # A size whose chain wins in some surroundings only; the plan of a model does not count on it.
    elsewhere = [_best_surrounded(one) for one in result.layers] if effect is None else []
    used += [finalist for finalist in elsewhere if finalist is not None]
    facts = _of_sizes(result, used) if effect is None else _of_model(result, effect, used)
    return Section(
        "Answer",
        tuple(_lead_of_search(result, effect, len(used))),
        (*answers.beside(result), caption),
        figure=figure(partial(overview_plot, series), "latency"),
        facts=tuple(facts),
        command=result.request.command if any(map(_is_unsettled, result.layers)) else "",
        warnings=(*answers.stopped(result), *answers.warnings(result)),
    )


def _best_surrounded(layer: LayerResult) -> Finalist | None:
    """The chain with the largest speedup in surroundings; None if none wins there alone."""
    won = [answer.chosen for _, answer in surrounded.winners(layer) if answer.chosen is not None]
    return min(won, key=lambda one: one.ratio, default=None)


def _lead_of_search(result: SearchResult, effect: Effect | None, used: int) -> list[str]:
    if effect is not None:
        return answers.effect_sentences(result)[:1]
    sizes = len(result.request.sizes)
    if not used:
        return [f"Keep the layers of all {sizes} sizes dense: no chain is measurably faster."]
    conditional = [str(one.size) for one in result.layers if surrounded.winners(one)]
    some = f", of {', '.join(conditional)} only in some surroundings" if conditional else ""
    return [f"Use chains for {used} of {sizes} layer sizes{some}. plan.json holds which."]


def _of_model(result: SearchResult, effect: Effect, used: Sequence[Finalist]) -> list[Fact]:
    layers = result.request.model
    assert layers is not None
    facts = []
    if result.whole is not None:
        whole = result.whole
        detail = f"{phrases.microseconds(whole.planned.median_us)} against "
        detail += phrases.microseconds(whole.dense.median_us)
        facts.append(Fact(f"{1 / whole.ratio:.2f}x", "speedup of the model, measured", detail))
    if effect.ratio is not None:
        detail = f"{phrases.microseconds(effect.latency_us)} against "
        detail += phrases.microseconds(effect.dense_us)
        name = "speedup of its linear layers, predicted"
        facts.append(Fact(f"{1 / effect.ratio:.2f}x", name, detail))
    share = effect.parameters / effect.dense_parameters
    detail = f"{effect.parameters:,} of {effect.dense_parameters:,}"
    facts.append(Fact(phrases.percent(share), "of their weights", detail))
    facts.append(Fact(f"{effect.converted} of {layers.count}", "layers become chains"))
    return [*facts, *_errors(used)]


def _of_sizes(result: SearchResult, used: Sequence[Finalist]) -> list[Fact]:
    facts = [Fact(f"{len(used)} of {len(result.request.sizes)}", "sizes have a faster chain")]
    if used:
        speeds = [1 / one.ratio for one in used]
        shares = [one.facts.share for one in used]
        shown = _span([f"{speed:.2f}x" for speed in sorted(speeds)])
        facts.append(Fact(shown, "speedup over dense"))
        shown = _span([phrases.percent(share) for share in sorted(shares)])
        facts.append(Fact(shown, "of the weights"))
    return [*facts, *_errors(used)]


def _errors(used: Sequence[Finalist]) -> list[Fact]:
    """The weight errors of the chains that are used; empty if none is."""
    if not used:
        return []
    errors = sorted(WEIGHT_ERROR.cell(one.values) for one in used)
    known = _span([error for error in errors if error])
    if not known:
        return [Fact("unknown", WEIGHT_ERROR.title, _HOW_ERROR)]
    return [Fact(known, WEIGHT_ERROR.title)]


def _span(values: Sequence[str]) -> str:
    """The range of some sorted values as text."""
    if len(values) < 2 or values[0] == values[-1]:
        return "".join(values[:1])
    return f"{values[0]} to {values[-1]}"
