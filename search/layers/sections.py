"""The report of a search of several layer sizes: one page, and the same as markdown."""

from __future__ import annotations

from dataclasses import replace

from ksopt.report import document, tables
from ksopt.report.document import Figure, Section
from ksopt.search.layers import export
from ksopt.search.layers.bars import bars
from ksopt.search.layers.results import ShapesResult
from ksopt.search.report import sections as one_size
from ksopt.search.report.page import where
from ksopt.search.results import SearchResult


def html(result: ShapesResult) -> str:
    """The page; what report.html holds."""
    return document.html(title(result), where(result.results[0]), sections(result))


def markdown(result: ShapesResult) -> str:
    """The report as markdown; what report.md holds."""
    return document.markdown(title(result), sections(result))


def title(result: ShapesResult) -> str:
    """The report's title."""
    if result.request.layers is None:
        return f"Chains for linear layers of {len(result.request.shapes)} sizes"
    return f"Chains for the linear layers of {result.request.name}"


def sections(result: ShapesResult) -> list[Section]:
    """The whole report: the answer and the plan first, then each size, then what they share."""
    found = [
        Section(
            "Answer", tuple(export.lead(result)), _beside(result), export.answers_table(result)
        ),
        *_plan(result),
        *_use(result),
    ]
    for one in result.results:
        found += _of_size(one)
    first = result.results[0]
    return [*found, *_left_dense(result), one_size.device(first), _again(result)]


def _beside(result: ShapesResult) -> tuple[str, ...]:
    first = result.results[0].request
    return (
        f"Each size was measured by itself, on random input of {first.batch} rows of "
        f"{first.dtype}, in turns with its dense layer; a budget that is a share is of that size's "
        "own dense weights. The plan takes, of a size's budgets whose chain is faster than dense, "
        "that of the largest; where there is none, the layers stay dense. The evidence for each "
        "size is below.",
    )


def _plan(result: ShapesResult) -> list[Section]:
    layers = result.request.layers
    if layers is None:
        return []
    texts = [f"{layers.sentence}. {layers.note}".strip()]
    texts.append(
        "Latencies are those of one layer, with cold caches, as if every layer saw "
        f"{result.request.each.batch} rows and ran once in a pass. Their sum is a prediction for "
        "the linear layers alone: attention, normalisation, activations, biases and what a "
        "compiler makes of it all are not in it, and a layer that sees fewer rows, such as a head "
        "on one token, weighs less than here."
    )
    if result.whole is None and "measure-model" not in result.request.asked_by:
        texts.append(
            "The model was not timed whole. With --model, --measure-model does that at the end of "
            "a search."
        )
    found = [Section("Plan for the model", (), tuple(texts), export.plan_table(result))]
    effect = result.effect()
    if effect is not None and effect.dense_us > 0:
        text = "Above dense, below by the plan; all layers of a group together."
        figure = Figure(bars(effect, 800), bars(effect, 360))
        found.append(Section("Latency of the layers", (), (text,), figure=figure))
    if result.results:
        text = (
            "If every size took its chain of one budget, where that is faster than dense, and "
            "stayed dense elsewhere."
        )
        found.append(Section("By budget", (), (text,), export.budgets_table(result)))
    return found


def _use(result: ShapesResult) -> list[Section]:
    if not any(rule.chains for rule in result.plan().rules):
        return []
    model = result.request.asked_by.get("model", "mymodel:build")
    module, _, factory = model.partition(":")
    lines = [
        "import ksopt",
        "import torch",
        f"from {module} import {factory}",
        "",
        f"model = {factory}()",
        'done = ksopt.convert(model, "plan.json")  # projects the weights; says how near they come',
        "print(done.table().plain())",
        'model = torch.compile(model, backend="ksopt")',
    ]
    each = result.request.each
    known = "nothing of the accuracy that the model keeps"
    if each.weights is not None:
        known = "how far they are from it (weight error), and nothing of the model's accuracy"
    text = (
        "plan.json, beside this page, holds the whole plan. ksopt.convert, or on the command line "
        f"ksopt convert --model {model} --plan plan.json --out converted, puts the nearest "
        f"products in the place of the layers. Chains are not the trained weights: this search "
        f"says {known}, and most models need fine-tuning after it."
    )
    return [Section("Use it", (), (text,), code="\n".join(lines), language="python")]


def _of_size(result: SearchResult) -> list[Section]:
    """The sections of one size's own report, with the size in their titles."""
    size = result.request.size
    return [
        replace(section, title=f"{size}: {section.title[0].lower()}{section.title[1:]}")
        for section in one_size.of_size(result)
    ]


def _left_dense(result: ShapesResult) -> list[Section]:
    layers = result.request.layers
    if layers is None or not layers.dense:
        return []
    rows = [[name, reason] for name, reason in layers.dense.items()]
    text = "These linear layers are in no sum above, and the plan leaves them as they are."
    table = tables.of(("layer", "why"), rows)
    return [Section("Layers that were not searched", (), (text,), table)]


def _again(result: ShapesResult) -> Section:
    text = (
        "The same command with the same folder goes on with these studies, and times the finalists "
        "anew; with another folder it starts over."
    )
    return Section("Do it again", (), (text,), code=result.request.command, language="sh")
