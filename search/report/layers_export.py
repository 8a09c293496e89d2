"""What a search of several layer sizes leaves behind, and prints.

results.json has the schema that `results_schema` returns, described in docs/search.md; each size in
it is a document of `ksopt.search.report.export`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from ksopt.report import tables
from ksopt.report.tables import Table
from ksopt.search import diagnostics, suspect_dense
from ksopt.search.layers_result import Effect, LayersResult, PlannedGroup, Whole
from ksopt.search.report import export, phrases, result_tables
from ksopt.search.request import without_password
from ksopt.search.results import Recommendation, Verdict

SCHEMA = "ksopt.layers/1"

# Columns that a terminal of fewer characters does without, so that chains are not cut into pieces.
_WIDE = 130
_WIDE_ANSWERS = ("weights", "latency", "dense", "rho", "efficiency", "energy")
_WIDE_PLAN = ("budget", "weights", "latency", "dense")


def write(result: LayersResult, folder: Path) -> None:
    """Write report.html, report.md, results.json, plan.json and trials.csv into the folder.

    Raises:
        InvalidInputError: The folder cannot be written.
    """
    from ksopt.search.report import several_layers_sections as page

    trials = [trial for one in result.results for trial in one.trials]
    texts = {
        "results.json": to_json(result),
        "plan.json": result.plan().to_json(),
        "trials.csv": export.csv_of(trials),
        "report.md": page.markdown(result),
        "report.html": page.html(result),
    }
    export.put(folder, texts)


def results_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of results.json; it refers to that of one size.

    Example:
        >>> results_schema()["$id"]
        'ksopt.layers/1'
    """
    return export.schema_of("ksopt.search", SCHEMA, "layers")


def to_json(result: LayersResult) -> str:
    """The result as JSON; what results.json holds."""
    request, each = result.request, result.request.each
    layers, effect = request.layers, result.effect()
    value = {
        "schema": SCHEMA,
        "request": {
            "command": request.command,
            "dims": [str(dims) for dims in request.sizes],
            "budgets": list(each.budgets),
            "trials": request.trials,
            "timeout_s": each.timeout_s,
            "storage": None if each.storage is None else without_password(each.storage),
            "study": each.study,
            "workers": each.workers,
        },
        "model": None
        if layers is None
        else {
            "source": layers.source,
            "layers": layers.count,
            "parameters": layers.parameters,
            "dense": dict(layers.dense),
            "note": layers.note,
        },
        "plan": None if effect is None else _effect(effect),
        "budgets": [{"budget": text, **_sums(one)} for text, one in result.effects().items()],
        "whole": None if result.whole is None else _whole(result.whole),
        "sizes": [export.to_value(one) for one in result.results],
        "unmet": {str(dims): sentence for dims, sentence in result.unmet.items()},
        "notes": list(result.request.notes),
        "warnings": warnings(result),
        "replayed": result.replayed,
        "stopped": result.stopped,
        "seconds": result.seconds,
        "folder": str(result.folder.resolve()),
    }
    return export.dumped(value)


def print_result(result: LayersResult, stream: TextIO) -> None:
    """Write the answer to a terminal or a pipe: sentences, tables, where the report is."""
    for sentence in lead(result):
        print(sentence, file=stream)
    is_narrow = stream.isatty() and shutil.get_terminal_size().columns < _WIDE
    print(file=stream)
    tables.write(_without(answers_table(result), _WIDE_ANSWERS if is_narrow else ()), stream)
    if result.request.layers is not None:
        print(file=stream)
        tables.write(_without(plan_table(result), _WIDE_PLAN if is_narrow else ()), stream)
    print(f"\nreport: {result.folder.resolve() / 'report.html'}", file=stream)
    print(f"plan:   {result.folder.resolve() / 'plan.json'}", file=stream)


def lead(result: LayersResult) -> list[str]:
    """The answer in sentences, and what makes it less certain than it looks."""
    sentences = [*effect_sentences(result), *whole_sentences(result)]
    if result.request.each.train:
        sentences.append(phrases.TRAINING)
    if result.request.layers is None:
        sentences.append(_sizes_sentence(result))
    sentences += [
        f"The layers of {dims} stay dense: {text}." for dims, text in result.unmet.items()
    ]
    sentences += result.request.notes
    if result.replayed and result.results:
        sentences.append(phrases.replayed(result.results[0]))
    if result.stopped == "interrupted":
        sentences.append("The search was interrupted: this is what it had measured.")
    if result.stopped == "timeout":
        sentences.append("The time was up before all trials were measured.")
    return sentences + warnings(result)


def warnings(result: LayersResult) -> list[str]:
    """What makes the times less certain than they look, in a sentence each."""
    beside = {str(one.request.size): suspect_dense.dense_layer(one) for one in result.results}
    strange = suspect_dense.warning_of({size: dense for size, dense in beside.items() if dense})
    sentences = [strange] if strange else []
    failures = [(one.request.size, diagnostics.failures(one)) for one in result.results]
    sentences += [f"{size}: {sentence}" for size, sentence in failures if sentence]
    drifts = [(one.request.size, diagnostics.drift(one)) for one in result.results]
    drifted = [str(size) for size, drift in drifts if drift and drift.beyond_noise]
    if drifted:
        sentences.append(
            f"The dense layers of {', '.join(drifted)} took another time in the final than at the "
            "beginning, beyond their noise: clocks, throttling or another process changed the "
            "machine meanwhile. Ratios to dense, measured in turns, allow for that, absolute times "
            "do not."
        )
    return sentences


def effect_sentences(result: LayersResult) -> list[str]:
    """What the plan would do to the model, predicted; nothing where no model was given."""
    effect, layers = result.effect(), result.request.layers
    if effect is None or layers is None:
        return []
    if not effect.converted:
        why = "no chain that was measured is measurably faster than they are"
        least = result.request.each.min_speedup
        if least is not None:
            why = f"no chain that was measured is measurably {least:g} times as fast as they are"
        if not effect.dense_us:
            why = "nothing was measured"
            answers = [answer for one in result.results for answer in one.recommendations]
            if any(answer.verdict is Verdict.KEEP_DENSE for answer in answers):
                why = (  # there is no finalist of any size
                    "no chain that was measured comes within a relative error of "
                    f"{result.request.each.max_error:g} of their weights"
                )
        return [f"Keep the dense layers of {layers.source}: {why}."]
    share = effect.parameters / effect.dense_parameters
    text = (
        f"With the plan {effect.converted} of the {layers.count} linear layers of {layers.source} "
        f"become chains: {effect.dense_parameters:,} weights become {effect.parameters:,} "
        f"({phrases.percent(share)})"
    )
    if effect.ratio is not None:
        rows = result.request.each.batch
        text += (
            f", and their latencies, measured layer by layer on {rows} rows, add up to "
            f"{phrases.microseconds(effect.latency_us)} in place of "
            f"{phrases.microseconds(effect.dense_us)}: predicted, the linear layers are "
            f"{phrases.times(effect.ratio)} the dense ones"
        )
    sentences = [f"{text}."]
    doubtful = _doubtful(result, effect)
    if doubtful:
        sentences.append(
            f"Do not rely on that yet: the dense layers of {', '.join(doubtful)} were strangely "
            "slow, see below."
        )
    if layers.parameters is not None:
        left = layers.parameters - effect.dense_parameters + effect.parameters
        sentences.append(
            f"The whole model, with what is not linear, goes from {layers.parameters:,} parameters "
            f"to {left:,} ({phrases.percent(left / layers.parameters)})."
        )
    if effect.unmeasured:
        sizes = ", ".join(map(str, effect.unmeasured))
        sentences.append(f"The latencies of the layers of {sizes} are not known, and in no sum.")
    return sentences


def whole_sentences(result: LayersResult) -> list[str]:
    """What the model took as a whole; nothing if it was not timed."""
    whole, effect = result.whole, result.effect()
    if whole is None:
        is_wanted = "measure-model" in result.request.asked_by and result.stopped != "interrupted"
        if is_wanted and effect is not None and effect.converted == 0:
            return ["The model was not timed whole: with this plan nothing in it would change."]
        return []
    what = "a forward pass" if result.request.each.train else "a pass"
    text = (
        f"Timed whole and eagerly, with random weights in the chains, {what} took "
        f"{phrases.timed(whole.planned)} with the plan and {phrases.timed(whole.dense)} dense: "
        f"{whole.against_dense}."
    )
    rows = sorted(set(whole.rows.values()))
    if not rows:
        return [text]
    seen = f"{rows[0]:,}" if len(rows) == 1 else f"{rows[0]:,} to {rows[-1]:,}"
    return [
        f"{text} Its layers saw {seen} rows; the search measured them on "
        f"{result.request.each.batch:,}."
    ]


def answers_table(result: LayersResult) -> Table:
    """The fastest chain of each size and budget beside the dense layer."""
    rows = []
    for one in result.results:
        table = result_tables.answers_table(one)
        rows += [[str(one.request.size), *row] for row in table.rows]
        columns = table.columns
    return tables.of(
        ("INxOUT", *columns), rows, title="Fastest chain of each layer size and budget"
    )


def plan_table(result: LayersResult) -> Table:
    """What becomes of each group of the model's layers."""
    effect = result.effect()
    groups = () if effect is None else effect.groups
    return tables.of(
        (
            "layers",
            ">count",
            "INxOUT",
            "becomes",
            "budget",
            ">weights",
            ">of dense",
            ">latency",
            ">dense",
            ">saved, all",
        ),
        [_plan_row(one) for one in groups],
        title="Plan, with the latency of one layer",
    )


def budgets_table(result: LayersResult) -> Table:
    """What each budget would do to the model, beside the plan."""
    plan = result.effect()
    effects = list(result.effects().items())
    effects += [] if plan is None else [("the plan", plan)]
    rows = [
        [
            text,
            f"{one.converted}",
            f"{one.parameters:,}",
            phrases.percent(one.parameters / one.dense_parameters),
            phrases.microseconds(one.latency_us) if one.dense_us else "",
            phrases.microseconds(one.dense_us) if one.dense_us else "",
            f"{1 / one.ratio:.2f}x" if one.ratio else "",
        ]
        for text, one in effects
    ]
    heads = (
        "budget",
        ">chains",
        ">weights",
        ">of dense",
        ">sum of latencies",
        ">dense",
        ">dense / plan",
    )
    return tables.of(heads, rows)


def _doubtful(result: LayersResult, effect: Effect) -> list[str]:
    """The sizes whose dense layers are too slow to be true."""
    sizes = dict.fromkeys(one.group.dims for one in effect.groups)
    beside = {dims: result.of(dims) for dims in sizes}
    dense = {
        dims: suspect_dense.dense_layer(one) for dims, one in beside.items() if one is not None
    }
    return [str(dims) for dims, one in dense.items() if one is not None and one.is_strange]


def _without(table: Table, heads: Sequence[str]) -> Table:
    """A table without some columns."""
    kept = [i for i, head in enumerate(table.heads) if head not in heads]
    rows = [[row[i] for i in kept] for row in table.rows]
    return tables.of([table.columns[i] for i in kept], rows, table.title)


def _sizes_sentence(result: LayersResult) -> str:
    chosen = [(one.request.size, result.choice(one.request.size)) for one in result.results]
    parts = [f"{dims} {_choice(answer)}" for dims, answer in chosen]
    return f"The plan: {'; '.join(parts)}."


def _choice(answer: Recommendation | None) -> str:
    if answer is None or answer.chosen is None:
        return "stays dense"
    chosen = answer.chosen
    return (
        f"becomes {chosen.facts.chain} ({phrases.percent(chosen.facts.share)} of the weights, "
        f"{phrases.times(chosen.ratio)} dense)"
    )


def _plan_row(one: PlannedGroup) -> list[str]:
    group, finalist = one.group, one.finalist
    saved = None
    if finalist is not None and one.dense_us is not None and one.latency_us is not None:
        saved = group.count * (one.dense_us - one.latency_us)
    per_layer = group.dims.dense_parameters if finalist is None else finalist.facts.nnz
    return [
        group.role,
        f"{group.count}",
        str(group.dims),
        "dense" if finalist is None else str(finalist.facts.chain),
        "" if one.answer is None else one.answer.budget.text,
        f"{per_layer:,}",
        phrases.percent(per_layer / group.dims.dense_parameters),
        "" if one.latency_us is None else phrases.microseconds(one.latency_us),
        "" if one.dense_us is None else phrases.microseconds(one.dense_us),
        "" if saved is None else phrases.microseconds(saved),
    ]


def _sums(effect: Effect) -> dict[str, Any]:
    return {
        "converted": effect.converted,
        "dense_parameters": effect.dense_parameters,
        "parameters": effect.parameters,
        "dense_us": effect.dense_us,
        "latency_us": effect.latency_us,
        "latency_over_dense": effect.ratio,
        "unmeasured": [str(dims) for dims in effect.unmeasured],
    }


def _effect(effect: Effect) -> dict[str, Any]:
    return {**_sums(effect), "groups": [_group(one) for one in effect.groups]}


def _group(one: PlannedGroup) -> dict[str, Any]:
    return {
        **one.group.to_json(),
        "matches": list(one.group.matches),
        "chain": None if one.finalist is None else str(one.finalist.facts.chain),
        "budget": None if one.answer is None else one.answer.budget.text,
        "dense_parameters": one.group.dense_parameters,
        "parameters": one.parameters,
        "dense_us": one.dense_us,
        "latency_us": one.latency_us,
    }


def _whole(whole: Whole) -> dict[str, Any]:
    return {
        "dense": {**asdict(whole.dense), "noise": whole.dense.noise},
        "planned": {**asdict(whole.planned), "noise": whole.planned.noise},
        "latency_over_dense": whole.ratio,
        "against_dense": whole.against_dense,
        "converted": whole.converted,
        "rows": dict(whole.rows),
    }
