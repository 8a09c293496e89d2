"""The report as sections, written once for the page and for markdown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ksopt.measure import energy
from ksopt.report import tables
from ksopt.report.document import Section
from ksopt.search import diagnostics, metrics, recommend, suspect_dense
from ksopt.search.metrics import ENERGY, LATENCY, Metric
from ksopt.search.report import bounds, phrases, result_tables
from ksopt.search.report.plots import figure, latency_plot, metric_plot, scatter
from ksopt.search.results import Finalist, Recommendation, SearchResult, Verdict
from ksopt.search.samplers import factor_times

_TRIALS_SHOWN = 40


def title(result: SearchResult) -> str:
    """The report's title."""
    size = result.request.size
    return f"Chains for a {size} linear layer ({phrases.layer(size)})"


def sections(result: SearchResult) -> list[Section]:
    """The whole report, the answer first."""
    answer, *evidence_for_it = of_size(result)
    return [answer, *_use(result), *evidence_for_it, device(result), _again(result)]


def of_size(result: SearchResult) -> list[Section]:
    """What a report says of one layer size: the answer first, then the evidence for it."""
    found = [_answer(result), *_why(result), _plot(result), *_metrics(result)]
    found += [*_front(result), _finalists(result)]
    return [*found, *_predictions(result), _method(result), _trials(result)]


def _answer(result: SearchResult) -> Section:
    lead = [answer.sentence for answer in result.recommendations]
    measured = [a for a in result.recommendations if a.chosen is not None]
    if len(measured) > 1 and all(a.verdict is Verdict.KEEP_DENSE for a in measured):
        lead.insert(0, "Keep the dense layer: no chain of any budget is faster here.")
    if result.replayed:
        lead.append(phrases.replayed(result))
    if result.stopped == "interrupted":
        lead.append("The search was interrupted; this is what it had measured.")
    if result.stopped == "timeout":
        lead.append("The time was up before all trials were measured.")
    dense = suspect_dense.dense_layer(result)
    lead += [dense.warning] if dense is not None and dense.warning else []
    failures = diagnostics.failures(result)
    lead += [failures] if failures else []
    if result.request.train:
        lead.append(phrases.TRAINING)
    beside = []
    for answer in measured:
        beside += [*_beside(answer), *best_in_final(answer, result.finalists)]
    found = diagnostics.drift(result)
    beside += [found.sentence] if found is not None else []
    return Section("Answer", tuple(lead), tuple(beside), result_tables.answers_table(result))


def _beside(answer: Recommendation) -> list[str]:
    """What else is to be known of a step: ties, and how the heuristic did."""
    assert answer.chosen is not None
    found = []
    if answer.ties:
        named = ", ".join(f"{tie.facts.chain} ({tie.facts.nnz:,} weights)" for tie in answer.ties)
        found.append(f"At {answer.budget.text}, within noise of the fastest chain: {named}.")
    heuristic = answer.heuristic
    if heuristic is not None:
        found.append(f"At {answer.budget.text}, {_heuristic(answer.chosen, heuristic)}")
    return found


def _heuristic(chosen: Finalist, heuristic: Finalist) -> str:
    if heuristic is chosen:
        return "the fastest chain is also the measured one with the largest rho."
    return (
        f"the largest rho of the chains in the final belongs to {heuristic.facts.chain} "
        f"(rho {heuristic.facts.rho:.4f} against {chosen.facts.rho:.4f}), which takes "
        f"{phrases.microseconds(heuristic.latency.median_us)} against "
        f"{phrases.microseconds(chosen.latency.median_us)}."
    )


def _why(result: SearchResult) -> list[Section]:
    found = bounds.sentences(result)
    if not found:
        return []
    note = (
        "What is moved is each factor's input, output and weights once, and what is computed two "
        "operations for each weight and row; the floor is the longer of the two at this device's "
        "measured ceilings, the sum of its factors' for a chain. A kernel that runs several "
        "factors in one pass, and on a CPU caches, move less."
    )
    return [Section("Where the time goes", (), (*found, note), bounds.table(result))]


def _use(result: SearchResult) -> list[Section]:
    used = [a for a in result.recommendations if a.verdict is Verdict.USE]
    if not used:
        return []
    request = result.request
    options = [] if request.layout == "batch_first" else [f'layout="{request.layout}"']
    if request.dtype != "float32":
        options.append(f"dtype=torch.{request.dtype}")
    if result.device.type != "cpu":
        options.append(f'device="{result.device.type}"')
    tail = "".join(f", {option}" for option in options)
    size = request.size
    lines = ["import torch", "", "from ksopt.nn import KSLinear", ""]
    lines.append(f"# in place of torch.nn.Linear({size.in_features}, {size.out_features})")
    for answer in used:
        assert answer.chosen is not None
        chain = answer.chosen.facts.chain
        lines.append(
            f'layer = KSLinear({size.in_features}, {size.out_features}, "{chain}"{tail})'
            f"  # {answer.budget.text}"
        )
    lines += [
        "",
        "# compiled, alone or with the model that it is part of",
        'compiled = torch.compile(layer, backend="ksopt")',
    ]
    text = (
        "A chain replaces the layer's matrix by a product of sparse factors, to be trained or "
        "fitted: it does not keep the dense layer's weights, and this search says nothing of the "
        "accuracy that a model reaches with it. plan.json is for a model that is trained already: "
        "ksopt convert --plan plan.json puts the nearest product in the place of each of its "
        "layers of this size."
    )
    return [Section("Use it", (), (text,), code="\n".join(lines), language="python")]


def _plot(result: SearchResult) -> Section:
    text = (
        "Circles are chains of two factors, triangles of three, squares of one; rings mark the "
        "fastest of each budget, the stepped line the chains that no other beats in both. Each "
        "point is its trial's latency over the dense layer's, timed in turns with it, on the scale "
        "of the dense layer's latency of the final."
    )
    drawing = figure(partial(latency_plot, result))
    return Section("Latency against weights", (), (text,), figure=drawing)


def _metrics(result: SearchResult) -> list[Section]:
    """Each metric besides latency and weights, plotted."""
    sections = []
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
            sections.append(Section(title, (), (text,), figure=drawing))
    return sections


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


def _front(result: SearchResult) -> list[Section]:
    """What is left to choose from, where more than latency was to be low."""
    titles = [metric.title for metric in metrics.objectives(result.request)]
    front = recommend.front_of(result.trials, result.request)
    if len(titles) < 2 or not front:
        return []
    *others, last = titles
    shown, count = front[:_TRIALS_SHOWN], f"{len(front)} chains"
    text = (
        f"Of all that was measured, what no other chain equals or beats in {', '.join(others)} and "
        f"{last} together: {'one chain' if len(front) == 1 else count}. Latency counts over the "
        "dense layer's, timed in turns with it; all values are of the trials."
    )
    if len(shown) < len(front):
        text += f" The fastest {len(shown)} are shown; results.json names all."
    return [Section("Pareto front", (), (text,), result_tables.front_table(shown))]


def _finalists(result: SearchResult) -> Section:
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


def _predictions(result: SearchResult) -> list[Section]:
    """What would have predicted the measured times, and how well."""
    found = diagnostics.correlations(result.trials)
    if not found:
        return []
    text = (
        "Spearman's rank correlation of each prediction with the measured latency over dense: 1 "
        "would rank all chains rightly, 0 none. Chains given up as hopeless count with the time "
        "seen, and are crosses in the plots. The largest rho is where a fused kernel gains most "
        "over PyTorch's ways, not a claim about latency."
    )
    if all(one.predictor.key != "predicted_us" for one in found):
        text += " The kernels' cost model is for GPUs: there is none here."
    heads = ["prediction", ">Spearman", ">chains"]
    rows = [[one.predictor.name, f"{one.spearman:+.2f}", str(one.chains)] for one in found]
    if any(one.energy_spearman is not None for one in found):
        text += " The largest d rho is where it saves most energy."
        heads.append(">Spearman with energy")
        for row, one in zip(rows, found, strict=True):
            known = one.energy_spearman
            row.append("" if known is None else f"{known:+.2f}")
    table = tables.of(heads, rows)
    sections = [Section("Measured against predicted", (), (text,), table)]
    shown = [one for one in found if one.predictor.key in ("rho", "predicted_us")]
    for one in shown:
        drawing = figure(partial(scatter, result, one.predictor))
        title = f"Measured latency against {one.predictor.name}"
        text = f"Spearman's correlation {one.spearman:+.2f}."
        sections.append(Section(title, (), (text,), figure=drawing))
    return sections


def _method(result: SearchResult) -> Section:
    request, space, roof = result.request, result.space, result.roofline
    count = f"{'' if space.exact else 'More than '}{phrases.chains(space.count)}"
    are = "is" if space.count == 1 and space.exact else "are"
    kept = "all that use a budget" if space.complete else "a seeded sample of those that use it"
    used = phrases.percent(request.min_use)
    what = "A training step of each chain" if request.train else "Each chain"
    paragraphs = [
        f"{what} was timed on random input of {request.batch} rows, {request.dtype}, "
        f"{request.layout}, without bias, in turns with the dense layer: caches overwritten before "
        "each repeat, median of all repeats. Its product was first checked against float64; a "
        "wrong one gets no time.",
        f"{count} of at most {request.max_factors} factors {are} within the largest budget, "
        "with every output depending on every input and a rank bound of at least "
        f"{request.rank}. {space.candidates:,} were candidates: {kept}. A chain uses a budget "
        f"when it has at least {used} of its weights; without that rule the smallest chain, which "
        "is nearly always the fastest, would be the answer to every budget.",
        f"Sampler: {result.sampler}, after the paper's families, the largest rho, the lowest "
        "roofline floor and, on a GPU, the kernels' cost model's picks of each budget"
        f"{_estimated(result)}. "
        f"{len(result.trials)} trials, "
        f"{sum(t.state == 'failed' for t in result.trials)} failed, "
        f"{sum(t.state == 'pruned' for t in result.trials)} given up after their first repeats as "
        "hopeless; "
        f"this run took {result.seconds:.0f} s{_held(result)}.",
        f"Roofline: {roof.bandwidth / 1e9:,.0f} GB/s (a copy of {roof.copy_bytes / 2**20:,.0f} MiB "
        f"read and written), {phrases.rate(roof.rate)} ({roof.rate_from}, side "
        f"{roof.gemm_side}), measured in the run that reports. It counts every factor's input, "
        "output and weights as moved once; on a CPU, whose caches keep what passes from factor to "
        "factor, efficiency can exceed 1.",
    ]
    limits = request.constraints.words
    if limits:
        paragraphs.append(f"The search was limited to chains {', '.join(limits)}.")
    if request.weights is not None:
        most = "" if request.max_error is None else f" of at most {request.max_error:g}"
        paragraphs.append(
            f"Each chain's nearest product to the weights of {request.weights} was found "
            "(ksopt.project); the weight error is ||W - W'|| / ||W|| in the Frobenius norm."
            + (f" Only chains with an error{most} are recommended." if most else "")
        )
    if request.train:
        paragraphs.append(
            "The roofline's floor of a training step is three times the product's; the cost "
            "model's prediction is of the product alone."
        )
    if request.score is not None:
        paragraphs.append(
            f"The score is {request.score}'s, of the user's own code; the lower the better."
        )
    paragraphs += _energy_method(result)
    if len(result.runs) > 1:
        timed = " Finalists and the dense layer were timed anew, in this one."
        paragraphs.append(
            f"The study was resumed: its trials come from {len(result.runs)} runs."
            + (timed if all(finalist.retimed for finalist in result.finalists) else "")
        )
    return Section("How it was measured", (), tuple(paragraphs))


def _energy_method(result: SearchResult) -> list[str]:
    """How energy was measured, where it was."""
    dense_mj = next((one.dense_values.get(ENERGY.name) for one in result.finalists), None)
    in_trials = any(ENERGY.name in trial.values for trial in result.trials)
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


def _held(result: SearchResult) -> str:
    """How much of a run's time its measurements took."""
    mine = [trial.seconds for trial in result.trials if trial.run == result.run and trial.seconds]
    if not mine:
        return ""
    final = result.final_seconds
    after = "" if final is None else f", the final for {final:.0f} s"
    return f", of which its {len(mine)} trials held the device for {sum(mine):.0f} s{after}"


def _estimated(result: SearchResult) -> str:
    """That an estimate took turns with the sampler, if it did."""
    if all(trial.origin != factor_times.ORIGIN for trial in result.trials):
        return ""
    return ", in turns with chains whose factors' times, measured or predicted, add up to the least"


def _trials(result: SearchResult) -> Section:
    ranked = sorted(result.trials, key=lambda t: (t.ratio is None, t.ratio or 0.0))
    shown = ranked[:_TRIALS_SHOWN]
    text = "Fastest over dense first; trials.csv has every column."
    if len(shown) < len(ranked):
        text = f"The fastest {len(shown)} of {len(ranked)} trials; trials.csv has all."
    return Section("Trials", (), (text,), result_tables.trials_table(shown))


def device(result: SearchResult) -> Section:
    """What it was measured on."""
    return Section("Device", (), (), tables.of(("what", "value"), result.device.rows()))


def _again(result: SearchResult) -> Section:
    text = (
        "The same command with the same folder goes on with this study, and times the finalists "
        "anew; with another folder it starts over."
    )
    return Section("Do it again", (), (text,), code=result.request.command, language="sh")
