"""A search's answer as a plan that ``ksopt convert`` takes."""

from __future__ import annotations

from ksopt.conversion.plan import Plan, Rule
from ksopt.patterns.chain import Chain
from ksopt.search.results import Recommendation, SearchResult, Verdict


def plan(result: SearchResult) -> Plan:
    """One rule for the layers of the search's dims.

    Of the budgets whose chain is faster than dense it takes the largest: of the chains worth having
    it keeps the most of a layer's weights. Where there is none the layers stay dense.
    """
    size = result.request.size
    return Plan(
        (Rule(chains(chosen(result)), "*", size.in_features, size.out_features),),
        made_by=result.request.command,
    )


def chosen(result: SearchResult) -> Recommendation | None:
    """The step whose chain a plan takes; None where the layers stay dense."""
    used = [a for a in result.recommendations if a.verdict is Verdict.USE and a.chosen is not None]
    return max(used, key=lambda answer: answer.budget.parameters, default=None)


def chains(answer: Recommendation | None) -> tuple[Chain, ...]:
    """What a rule makes of the layers of an answer."""
    return () if answer is None or answer.chosen is None else (answer.chosen.facts.chain,)
