"""The report of a search of several layer sizes: one page, and the same as markdown."""

from __future__ import annotations

from collections.abc import Iterator

from ksopt.report import document, tables
from ksopt.report.document import Figure, Section
from ksopt.search.layers_result import LayersResult
from ksopt.search.report import layers_export, one_layer_sections
from ksopt.search.report.bars import bars
from ksopt.search.report.page import of_layers, where
from ksopt.search.report.sections import section


def html(result: LayersResult) -> str:
    """The page; what report.html holds."""
    return document.html(title(result), where(result.results[0]), of_layers(result, result.results))


def markdown(result: LayersResult) -> str:
    """The report as markdown; what report.md holds."""
    return document.markdown(title(result), of_layers(result, result.results))


def title(result: LayersResult) -> str:
    """The report's title."""
    if result.request.layers is None:
        return f"Chains for linear layers of {len(result.request.sizes)} sizes"
    return f"Chains for the linear layers of {result.request.name}"


@section(order=10, of="several layers")
def answer(result: LayersResult) -> Section:
    """The answer of all sizes."""
    return Section(
        "Answer",
        tuple(layers_export.lead(result)),
        _beside(result),
        layers_export.answers_table(result),
    )


def _beside(result: LayersResult) -> tuple[str, ...]:
    first = result.results[0].request
    return (
        f"Each size was measured by itself, on random input of {first.batch} rows of "
        f"{first.dtype}, in turns with its dense layer; a budget that is a share is of that size's "
        "own dense weights. The plan takes, of a size's budgets whose chain is faster than dense, "
        "that of the largest; where there is none, the layers stay dense. The evidence for each "
        "size is below.",
    )


def _is_of_a_model(result: LayersResult) -> bool:
    return result.request.layers is not None


@section(order=20, of="several layers", when=_is_of_a_model)
def plan(result: LayersResult) -> Iterator[Section]:
    """What becomes of a model's layers."""
    layers = result.request.layers
    assert layers is not None
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
    yield Section("Plan for the model", (), tuple(texts), layers_export.plan_table(result))
    effect = result.effect()
    if effect is not None and effect.dense_us > 0:
        text = "Above dense, below by the plan; all layers of a group together."
        figure = Figure(bars(effect, 800), bars(effect, 360))
        yield Section("Latency of the layers", (), (text,), figure=figure)
    if result.results:
        text = (
            "If every size took its chain of one budget, where that is faster than dense, and "
            "stayed dense elsewhere."
        )
        yield Section("By budget", (), (text,), layers_export.budgets_table(result))


def _is_used(result: LayersResult) -> bool:
    return any(rule.chains for rule in result.plan().rules)


@section(order=30, of="several layers", when=_is_used)
def use(result: LayersResult) -> Section:
    """How a model is converted."""
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
    return Section("Use it", (), (text,), code="\n".join(lines), language="python")


def _has_dense(result: LayersResult) -> bool:
    return result.request.layers is not None and bool(result.request.layers.dense)


@section(order=60, of="several layers", when=_has_dense)
def left_dense(result: LayersResult) -> Section:
    """The layers of a model that were not searched."""
    layers = result.request.layers
    assert layers is not None
    rows = [[name, reason] for name, reason in layers.dense.items()]
    text = "These linear layers are in no sum above, and the plan leaves them as they are."
    table = tables.of(("layer", "why"), rows)
    return Section("Layers that were not searched", (), (text,), table)


@section(order=70, of="several layers")
def device(result: LayersResult) -> Section:
    """Where they were measured."""
    return one_layer_sections.device(result.results[0])


@section(order=80, of="several layers")
def again(result: LayersResult) -> Section:
    """The command."""
    text = (
        "The same command with the same folder goes on with these studies, and times the finalists "
        "anew; with another folder it starts over."
    )
    return Section("Do it again", (), (text,), code=result.request.command, language="sh")
