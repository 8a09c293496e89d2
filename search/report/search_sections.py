"""Report sections of the whole search: the answer, its use, the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ksopt.patterns.chain import Chain
from ksopt.patterns.surroundings import ACTIVATIONS
from ksopt.report import tables
from ksopt.report.document import Figure, Section
from ksopt.search import surrounded
from ksopt.search.layer_request import LayerRequest
from ksopt.search.plan import effect_of, plan_of
from ksopt.search.recommend import least_speedup
from ksopt.search.report import headline, phrases, plan_tables, result_tables
from ksopt.search.report.bars import bars
from ksopt.search.report.sections import section
from ksopt.search.results import LayerResult, Recommendation, SearchResult, Verdict


def _has_several(result: SearchResult) -> bool:
    return not result.request.is_one_layer


@section(order=10, of="search", when=_has_several, is_folded=False)
def answer(result: SearchResult) -> Section:
    """The answer of all sizes."""
    return headline.of_search(result)


@section(order=18, of="search", when=_has_several, is_folded=False)
def every_size(result: SearchResult) -> Section:
    """The answer of each size and budget."""
    text = (
        f"Each size was measured by itself, on random input of "
        f"{phrases.rows(result.request)} of {result.request.dtype}. It took turns with "
        "its dense layer. A budget that is a share is of that size's own dense "
        "weights. The plan takes the largest budget with a chain worth "
        f"using, at least {least_speedup(result.request):g} times as fast as dense. Where there is "
        "none, the layers stay dense"
    )
    if any(surrounded.winners(layer) for layer in result.layers):
        text += ", but for surroundings in which a chain wins: see the size's own part"
    text += "."
    return Section("Sizes and budgets", (), (text,), result_tables.answers_table(result))


def _is_of_a_model(result: SearchResult) -> bool:
    return result.request.model is not None


@section(order=15, of="search", when=_is_of_a_model, is_folded=False)
def plan(result: SearchResult) -> Iterator[Section]:
    """The plan of a model's layers."""
    layers = result.request.model
    assert layers is not None
    texts = [f"{layers.sentence}. {layers.note}".strip()]
    texts.append(
        "Latencies are those of one layer, with cold caches. Every layer counts as if it saw "
        f"{phrases.rows(result.request)} and ran once in a pass. Their sum is a "
        "prediction for the linear layers alone. Attention, normalisation, activations, biases and "
        "what a compiler makes of it are not in it. A layer that sees fewer rows, such as a head "
        "on one token, weighs less than here."
    )
    if result.whole is None and "measure-model" not in result.request.model_options:
        texts.append(
            "The model was not timed whole. With --model, --measure-model does that at the end of "
            "a search."
        )
    yield Section("Plan for the model", (), tuple(texts), plan_tables.plan_table(result))
    effect = effect_of(result)
    if effect is not None and effect.dense_us > 0:
        text = "Above dense, below by the plan; all layers of a group together."
        figure = Figure(bars(effect, 800), bars(effect, 360), "latency-of-the-layers")
        yield Section("Latency of the layers", (), (text,), figure=figure)
    if result.layers:
        text = (
            "If every size took its chain of one budget, where that is faster than dense, and "
            "stayed dense elsewhere."
        )
        yield Section("By budget", (), (text,), plan_tables.budgets_table(result))


def _is_layer_used(result: SearchResult) -> bool:
    return result.request.is_one_layer and bool(_used(result.layers[0])[1])


def _used(layer: LayerResult) -> tuple[LayerRequest, list[Recommendation]]:
    """The answers of a layer that recommend a chain, and the request that they are for.

    If no chain wins alone, that is the one in whose surroundings a chain gains most.
    """
    used = [answer for answer in layer.recommendations if answer.verdict is Verdict.USE]
    won = surrounded.winners(layer)
    if used or not won:
        return layer.request, used
    around, answer = min(won, key=lambda one: one[1].chosen.ratio if one[1].chosen else 1.0)
    there = replace(layer.request, epilogue=around.epilogue, siblings=around.siblings)
    return there, [answer]


_GATE_CALLS = {
    "relu_gate": "F.relu(gate(x))",
    "gelu_gate": "F.gelu(gate(x))",
    "gelu_tanh_gate": 'F.gelu(gate(x), approximate="tanh")',
    "silu_gate": "F.silu(gate(x))",
}


@section(order=20, of="search", when=_is_layer_used, is_folded=False)
def use_in_layer(result: SearchResult) -> Section:
    """The code that replaces the layer by a chain."""
    (layer,) = result.layers
    request, used = _used(layer)
    options = [] if request.layout == "batch_first" else [f'layout="{request.layout}"']
    if request.dtype != "float32":
        options.append(f"dtype=torch.{request.dtype}")
    if layer.device.type != "cpu":
        options.append(f'device="{layer.device.type}"')
    around = ["bias=False"] if request.epilogue and "bias" not in request.epilogue else []
    around += [f'activation="{step}"' for step in request.epilogue if step in ACTIVATIONS]
    tail = "".join(f", {option}" for option in options)
    size = request.size
    others = [a for a in used if a.chosen and not isinstance(a.chosen.facts.chain, Chain)]
    lines = ["import torch", "", *(f"import {name}" for name in request.plugins if others)]
    gate = next((_GATE_CALLS[step] for step in request.epilogue if step in _GATE_CALLS), None)
    stacked = request.siblings > 1 and request.layout == "batch_first" and gate is None
    several = "KSStacked" if stacked else "torch.nn.ModuleList"
    names = "KSLinear, KSStacked" if stacked else "KSLinear"
    lines += [] if gate is None else ["import torch.nn.functional as F"]
    lines += [f"from ksopt.nn import {names}"] if len(others) < len(used) else []
    lines += ["from ksopt.operators.linear import StructuredLinear"] if others else []
    lines.append("")
    lines.append(f"# in place of torch.nn.Linear({size.in_features}, {size.out_features})")
    for answer in used:
        assert answer.chosen is not None
        chain = answer.chosen.facts.chain
        own = "".join(f", {option}" for option in [*around, *options])
        constructor = f'KSLinear({size.in_features}, {size.out_features}, "{chain}"{own})'
        if not isinstance(chain, Chain):
            constructor = f'StructuredLinear("{chain}"{tail})'
        elif request.siblings > 1 and gate is None:
            constructor = f"{several}([{constructor} for _ in range({request.siblings})])"
        share = phrases.percent(answer.chosen.facts.share)
        if gate is None:
            lines.append(f"layer = {constructor}  # {share} of the weights")
        else:
            lines.append(f"gate, up = ({constructor} for _ in range(2))  # {share} of the weights")
    lines += [] if gate is None else ["", "def layer(x):", f"    return {gate} * up(x)"]
    lines += [
        "",
        "# compiled, alone or with the model that it is part of",
        'compiled = torch.compile(layer, backend="ksopt")',
    ]
    inputs = " --inputs mymodel:inputs" if plan_of(result).has_conditions else ""
    text = (
        "A chain replaces the layer's matrix by a product of sparse factors, to be trained or "
        "fitted. This code begins with new weights. This search says nothing of the "
        "accuracy that a model reaches with it. For a trained model run ksopt convert "
        f"--model mymodel:build --plan plan.json{inputs} --out converted. It puts the nearest "
        "product in the place of each layer of this size. Then train it, or call ksopt.distil. "
        "Measure the accuracy."
    )
    return Section("Use it", (), (text,), code="\n".join(lines), language="python")


def _is_plan_used(result: SearchResult) -> bool:
    return _has_several(result) and any(rule.chains for rule in plan_of(result).rules)


@section(order=20, of="search", when=_is_plan_used, is_folded=False)
def use_plan(result: SearchResult) -> Section:
    """The code that converts a model."""
    model = result.request.model_options.get("model", "mymodel:build")
    module, _, factory = model.partition(":")
    has_conditions = plan_of(result).has_conditions
    # Its graph shows where a chain's condition is true.
    example = ", example_inputs=inputs()" if has_conditions else ""
    factory_inputs = ", inputs" if has_conditions else ""
    inputs = f" --inputs {module}:inputs" if has_conditions else ""
    lines = [
        "import ksopt",
        "import torch",
        f"from {module} import {factory}{factory_inputs}",
        "",
        f"model = {factory}()",
        f'done = ksopt.convert(model, "plan.json"{example})'
        "  # projects the weights; says how near they come",
        "print(done)",
        'model = torch.compile(model, backend="ksopt")',
    ]
    known = "nothing of the accuracy that the model keeps"
    if result.request.weights is not None:
        known = "how far they are from it (weight error), and nothing of the model's accuracy"
    text = (
        "plan.json, beside this page, holds the whole plan. On the command line: "
        f"ksopt convert --model {model} --plan plan.json{inputs} --out converted. It puts the "
        "nearest products in the place of the layers. Chains are not the trained weights: this "
        f"search says {known}. Most models need fine-tuning after it."
    )
    return Section("Use it", (), (text,), code="\n".join(lines), language="python")


def _has_no_error(result: SearchResult) -> bool:
    return result.request.weights is None and any(one.finalists for one in result.layers)


@section(order=28, of="search", when=_has_no_error)
def with_weights(result: SearchResult) -> Section:
    """The command for the error of trained weights."""
    text = (
        "Then each chain also has its weight error: how far the nearest product is from your "
        "weights. The file is a .safetensors file, such as a model's state_dict. It must hold a "
        "matrix of each searched size, [out_features, in_features]."
    )
    code = f"{result.request.command} --weights model.safetensors"
    return Section("With trained weights", (), (text,), code=code, language="sh")


def _has_dense(result: SearchResult) -> bool:
    return result.request.model is not None and bool(result.request.model.dense)


@section(order=105, of="search", when=_has_dense)
def left_dense(result: SearchResult) -> Section:
    """The layers of a model that were not searched."""
    layers = result.request.model
    assert layers is not None
    rows = [[name, reason] for name, reason in layers.dense.items()]
    text = "These linear layers are in no sum above, and the plan leaves them as they are."
    table = tables.of(("layer", "why"), rows)
    return Section("Layers that were not searched", (), (text,), table)


@section(order=110, of="search")
def device(result: SearchResult) -> Section:
    """The device of the measurement."""
    rows = result.layers[0].device.rows()
    return Section("Device", (), (), tables.of(("what", "value"), rows))


@section(order=120, of="search")
def again(result: SearchResult) -> Section:
    """The command that repeats the search."""
    these = "this study" if result.request.is_one_layer else "these studies"
    text = (
        f"The same command with the same folder goes on with {these}. It times the finalists "
        "anew. With another folder it starts over."
    )
    return Section("Do it again", (), (text,), code=result.request.command, language="sh")
