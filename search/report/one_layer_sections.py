"""The sections of a report of one layer alone: how its chain is used, and where it was measured."""

from __future__ import annotations

from ksopt.report import tables
from ksopt.report.document import Section
from ksopt.search.report.sections import section
from ksopt.search.results import SearchResult, Verdict


def _is_used(result: SearchResult) -> bool:
    return any(answer.verdict is Verdict.USE for answer in result.recommendations)


@section(order=20, of="one layer", when=_is_used)
def use(result: SearchResult) -> Section:
    """The code that puts a chain in the layer's place."""
    used = [a for a in result.recommendations if a.verdict is Verdict.USE]
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
    return Section("Use it", (), (text,), code="\n".join(lines), language="python")


@section(order=110, of="one layer")
def device(result: SearchResult) -> Section:
    """What it was measured on."""
    return Section("Device", (), (), tables.of(("what", "value"), result.device.rows()))


@section(order=120, of="one layer")
def again(result: SearchResult) -> Section:
    """The command."""
    text = (
        "The same command with the same folder goes on with this study, and times the finalists "
        "anew; with another folder it starts over."
    )
    return Section("Do it again", (), (text,), code=result.request.command, language="sh")
