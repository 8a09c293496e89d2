"""Report sections on the method of measurement, and on the predictors of latency."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ksopt.measure import energy
from ksopt.operators.registry import KRONECKER
from ksopt.patterns.surroundings import in_words
from ksopt.report import tables
from ksopt.report.document import Section
from ksopt.search import diagnostics
from ksopt.search.layer_request import LayerRequest
from ksopt.search.metrics import ENERGY
from ksopt.search.report import phrases
from ksopt.search.report.plots import beyond, figure, scatter
from ksopt.search.report.sections import section
from ksopt.search.results import LayerResult
from ksopt.search.samplers import factor_times
from ksopt.system.plurals import counted


@section(order=80)
def predictions(result: LayerResult) -> Iterator[Section]:
    """The correlations of predictors with the measured times."""
    correlations = diagnostics.correlations(result.trials)
    if not correlations:
        return
    text = (
        "Spearman's rank correlation of each prediction with the measured latency. "
        "Chains given up early count with the time seen, and are crosses in the plots. rho ranks "
        "what a fused kernel gains over PyTorch's ways, not latency."
    )
    if all(one.predictor.key != "predicted_us" for one in correlations):
        text += " The kernels' cost model is for GPUs: there is none here."
    heads = ["prediction", ">Spearman", ">chains"]
    rows = [[one.predictor.name, f"{one.spearman:+.2f}", str(one.chains)] for one in correlations]
    if any(one.energy_spearman is not None for one in correlations):
        text += " The largest d rho is where it saves most energy."
        heads.append(">Spearman with energy")
        for row, one in zip(rows, correlations, strict=True):
            known = one.energy_spearman
            row.append("" if known is None else f"{known:+.2f}")
    table = tables.of(heads, rows)
    yield Section("Measured against predicted", (), (text,), table)
    shown = [one for one in correlations if one.predictor.key in ("rho", "predicted_us")]
    for one in shown:
        name = f"{one.predictor.key}-{result.size}"
        drawing = figure(partial(scatter, result, one.predictor), name)
        title = f"Measured latency against {one.predictor.name}"
        text = f"Spearman's correlation {one.spearman:+.2f}. {beyond(result, pruned=True)}".rstrip()
        yield Section(title, (), (text,), figure=drawing)


@section(order=90)
def method(result: LayerResult) -> Section:
    """The method of measurement."""
    request, space, roof = result.request, result.space, result.roofline
    count = f"{'' if space.exact else 'More than '}{counted(space.count, 'chain')}"
    are = "is" if space.count == 1 and space.exact else "are"
    sample = "all that use" if space.complete else "a seeded sample of those that use"
    used = phrases.percent(request.min_use)
    what = "A training step of each chain" if request.train else "Each chain"
    if request.siblings > 1:
        what = f"Each chain, {request.siblings} times on one input,"
    behind = in_words(request.epilogue)
    after = f"It is followed by {behind}." if behind else "It has no bias."
    pruned = sum(trial.state == "pruned" for trial in result.trials)
    paragraphs = [
        f"{what} was timed on random input of {phrases.rows(request)}: "
        f"{request.dtype}, {request.layout}. {after} It took turns with the dense layer. Caches "
        "were overwritten before each repeat, and the median of all repeats counts. Its result was "
        "first checked against float64. A wrong one gets no time.",
        f"{count} of at most {counted(request.max_factors, 'factor')} {are} within the largest "
        f"budget. {_limits(request)} {space.candidates:,} were candidates: {sample} at least "
        f"{used} of a budget. Without that rule the smallest chain would be nearly every budget's "
        "answer.",
        f"Sampler: {result.sampler}. Before it come the paper's families, the largest rho and the "
        "lowest roofline floor. On a GPU the picks of the kernels' cost model come too."
        f"{_estimated(result)} Of {counted(len(result.trials), 'trial')}, "
        f"{sum(t.state == 'failed' for t in result.trials)} failed, and "
        f"{pruned} {'was' if pruned == 1 else 'were'} given up early. "
        f"This run took {result.seconds:.0f} s.{_held(result)}",
        f"Roofline: {roof.bandwidth / 1e9:,.0f} GB/s (a copy of {roof.copy_bytes / 2**20:,.0f} MiB "
        f"read and written), {phrases.rate(roof.rate)} ({roof.rate_from}, side "
        f"{roof.gemm_side}). It was measured in the latest run. It counts every factor's "
        "input, output and weights once, and nothing of what follows the product. Efficiency can "
        "exceed 1 where one launch computes a chain, or where a CPU's caches hold what passes "
        "between factors.",
    ]
    limits = request.constraints.words
    if limits:
        paragraphs.append(f"The search was limited to chains {', '.join(limits)}.")
    if request.weights is not None:
        most = "" if request.max_error is None else f" of at most {request.max_error:g}"
        paragraphs.append(
            f"ksopt.project fitted each chain to the weights of {request.weights}. The weight "
            "error is that of the nearest product, in the Frobenius norm."
            + (f" Only chains with an error{most} are recommended." if most else "")
        )
    if request.train:
        paragraphs.append(
            "The roofline's floor of a training step is three times the product's. The cost "
            "model's prediction is of the product alone."
        )
    if request.score is not None:
        paragraphs.append(
            f"The score is {request.score}'s, of the user's own code. Lower is better."
        )
    paragraphs += _energy_method(result)
    if len(result.runs) > 1:
        timed = " Finalists and the dense layer were timed anew, in this one."
        paragraphs.append(
            f"The study was resumed: its trials come from {len(result.runs)} runs."
            + (timed if all(finalist.retimed for finalist in result.finalists) else "")
        )
    return Section("How it was measured", (), tuple(paragraphs))


def _limits(request: LayerRequest) -> str:
    """Common properties of the candidates besides the budget."""
    text = (
        f"Each has every output depend on every input, and a rank bound of at least {request.rank}."
    )
    others = [name for name in request.structures if name != KRONECKER]
    if not others:
        return text
    rank = "" if request.min_rank is None else f" That rank holds for {' and '.join(others)}, too."
    counted = f"Operators of {' and '.join(others)} are counted among the chains."
    if KRONECKER not in request.structures:
        return f"{counted}{rank}"
    return f"{text} {counted} Only chains are so limited.{rank}"


def _energy_method(result: LayerResult) -> list[str]:
    """The method of energy measurement; empty if there was none."""
    dense_mj = next((one.dense_values.get(ENERGY.name) for one in result.finalists), None)
    in_trials = any(ENERGY.name in trial.values for trial in result.trials)
    if dense_mj is None and not in_trials:
        return []
    text = (
        "Energy is that of the whole board, by its own counter (NVML), idle draw included. Calls "
        "follow each other without a pause, caches are warm, and the sum is shared out."
    )
    if in_trials:
        text += f" In a trial it is taken over {energy.TRIAL_SECONDS:g} s, right after its timing."
    if dense_mj is not None:
        text += (
            f" That of the finalists and of dense was taken after the final, over "
            f"{energy.FINAL_SECONDS:g} s each. In it the dense layer uses "
            f"{phrases.millijoules(dense_mj)} a call."
        )
    return [text]


def _held(result: LayerResult) -> str:
    """Share of a run's time in which its measurements held the device."""
    mine = [trial.seconds for trial in result.trials if trial.run == result.run and trial.seconds]
    if not mine:
        return ""
    final = result.final_seconds
    after = "" if final is None else f", the final for {final:.0f} s"
    return f" Its {counted(len(mine), 'trial')} held the device for {sum(mine):.0f} s{after}."


def _estimated(result: LayerResult) -> str:
    """Sentence on an estimate that took turns with the sampler, if it did."""
    if all(trial.origin != factor_times.ORIGIN for trial in result.trials):
        return ""
    return " In turns come chains whose factors' times, measured or predicted, add up to the least."
