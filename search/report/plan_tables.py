"""Tables of a plan's effect on a model's layers."""

from __future__ import annotations

from ksopt.report import tables
from ksopt.report.tables import Table
from ksopt.search.plan import PlannedGroup, effect_of, effects_of
from ksopt.search.report import phrases
from ksopt.search.results import SearchResult


def plan_table(result: SearchResult) -> Table:
    """Table of each group of the model's layers in the plan."""
    effect = effect_of(result)
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
            ">dense",
            ">latency",
            ">saved, all",
        ),
        [_plan_row(one) for one in groups],
        title="Plan, with the latency of one layer (of siblings on one input, its share)",
    )


def budgets_table(result: SearchResult) -> Table:
    """Table of each budget's effect on the model, beside the plan's."""
    plan = effect_of(result)
    effects = list(effects_of(result).items())
    effects += [] if plan is None else [("the plan", plan)]
    rows = [
        [
            text,
            f"{1 / one.ratio:.2f}x" if one.ratio else "",
            f"{one.converted}",
            f"{one.parameters:,}",
            phrases.percent(one.parameters / one.dense_parameters),
            phrases.microseconds(one.dense_us) if one.dense_us else "",
            phrases.microseconds(one.latency_us) if one.dense_us else "",
        ]
        for text, one in effects
    ]
    heads = (
        "budget",
        ">speedup",
        ">chains",
        ">weights",
        ">of dense",
        ">dense",
        ">sum of latencies",
    )
    return tables.of(heads, rows)


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
        "" if one.dense_us is None else phrases.microseconds(one.dense_us),
        "" if one.latency_us is None else phrases.microseconds(one.latency_us),
        "" if saved is None else phrases.microseconds(saved),
    ]
