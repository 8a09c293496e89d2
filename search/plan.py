"""A search's answer as a plan that ``ksopt convert`` takes."""

from __future__ import annotations

from ksopt.conversion.plan import Plan, Rule
from ksopt.pattern import Chain
from ksopt.search.result import SearchResult, Verdict


def plan(result: SearchResult) -> Plan:
    """One rule for the layers of the search's dims.

    Of the budgets whose chain is faster than dense it takes the largest: of the chains worth having
    it keeps the most of a layer's weights. Where there is none the layers stay dense.
    """
    size = result.request.size
    return Plan(
        (Rule(_chains(result), "*", size.in_features, size.out_features),),
        made_by=result.request.command,
    )


def _chains(result: SearchResult) -> tuple[Chain, ...]:
    used = [a for a in result.recommendations if a.verdict is Verdict.USE and a.chosen is not None]
    if not used:
        return ()
    chosen = max(used, key=lambda answer: answer.budget.parameters).chosen
    assert chosen is not None
    return (chosen.facts.chain,)
