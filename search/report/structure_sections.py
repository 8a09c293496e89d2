"""Report section on other structures than chains at the same budget."""

from __future__ import annotations

from ksopt.operators.registry import KRONECKER, operator_of
from ksopt.report import tables
from ksopt.report.document import Section
from ksopt.search.metrics import WEIGHT_ERROR
from ksopt.search.report import phrases
from ksopt.search.report.sections import section
from ksopt.search.results import LayerResult
from ksopt.search.structures import StructureResult, best_of_each


def _has_others(result: LayerResult) -> bool:
    return result.request.structures != (KRONECKER,)


@section(order=28, when=_has_others)
def other_structures(result: LayerResult) -> Section:
    """The best of each structure at each budget."""
    request, best = result.request, best_of_each(result)
    texts = [
        "The fastest operator of each structure that uses a budget, fastest first. Those of the "
        "final were timed in turns with each other and the dense layer, the others in a trial, in "
        "turns with the dense layer alone. Weights are what the budget counts, bias not counted: "
        "2:4 counts the positions of its values, and FP8 counts its bytes, as numbers of 16 bit. "
        f"Operations are those of a product of {phrases.rows(request)}. The fastest is not "
        "the most accurate: a structure with few weights cannot express every matrix."
    ]
    if request.weights is None:
        texts.append("With --weights each has the error of its fit to trained weights, too.")
    texts += [
        f"{name} was left out: {obstacle}." for name, obstacle in result.space.left_out.items()
    ]
    mixing = dict.fromkeys(
        one.structure for one in best if operator_of(one.facts.chain).rows_together > 1
    )
    texts += [
        f"The rows of x take part in each other's results in {name}. Do not put it into a causal "
        "model, whose rows are tokens: a token would see those behind it."
        for name in mixing
    ]
    measured = {(one.budget, one.structure) for one in best}
    for answer in result.recommendations:
        missing = [
            name
            for name in request.structures
            if (answer.budget, name) not in measured and name not in result.space.left_out
        ]
        if missing:
            texts.append(
                f"At {answer.budget.text} nothing was measured of {' and '.join(missing)}."
            )
    heads = ["budget", "structure", "operator", ">latency over dense", ">weights", ">of dense"]
    heads += [">operations", ">latency", "timed in"]
    rows = [_cells(one) for one in best]
    if request.weights is not None:
        heads.insert(-2, f">{WEIGHT_ERROR.title}")
        for row, one in zip(rows, best, strict=True):
            row.insert(-2, "" if one.weight_error is None else f"{one.weight_error:.4f}")
    title = "Other structures at the same budget"
    return Section(title, (), tuple(texts), tables.of(heads, rows) if rows else None)


def _cells(one: StructureResult) -> list[str]:
    timed = "the final" if one.retimed else "a trial"
    return [
        one.budget.text,
        one.structure,
        str(one.facts.chain),
        f"{one.ratio:.2f}",
        f"{one.facts.nnz:,}",
        phrases.percent(one.facts.share),
        f"{one.flops:.3g}",
        phrases.microseconds(one.latency.median_us),
        "its first repeats" if one.given_up else timed,
    ]
