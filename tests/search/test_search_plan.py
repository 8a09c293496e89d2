"""plan.json: the answer of a search, as a conversion takes it."""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

import ksopt
from ksopt import Chain
from ksopt.conversion.plan import Plan
from ksopt.search import SearchResult
from ksopt.search.plan import plan_of
from ksopt.search.results import Verdict

from one_layer import with_layer  # isort: skip

Search = Callable[..., SearchResult]


def with_verdicts(result: SearchResult, verdicts: list[Verdict]) -> SearchResult:
    """The same search, as if it had come to these verdicts."""
    answers = tuple(
        replace(answer, verdict=verdict)
        for answer, verdict in zip(result.layers[0].recommendations, verdicts, strict=True)
    )
    return with_layer(result, recommendations=answers)


def test_the_plan_is_the_largest_budget_that_is_worth_it(search: Search) -> None:
    result = search(budgets=("30%", "60%"), trials=6)
    small, large = (answer.chosen.facts.chain for answer in result.layers[0].recommendations)
    keep, use = Verdict.KEEP_DENSE, Verdict.USE
    for verdicts, chain in [
        ([use, use], large),
        ([use, keep], small),
        ([keep, use], large),
        ([keep, Verdict.NO_DIFFERENCE], None),
    ]:
        plan = plan_of(with_verdicts(result, verdicts))
        (rule,) = plan.rules
        assert rule.chains == (() if chain is None else (chain,))
        assert (rule.match, rule.in_features, rule.out_features) == ("*", 32, 64)
        assert plan.made_by == result.request.command
    assert Plan.read(result.folder / "plan.json") == plan_of(result)


def test_a_model_is_converted_by_it(search: Search) -> None:
    result = with_verdicts(search(budgets=("50%",)), [Verdict.USE])
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    done = ksopt.convert(model, plan_of(result))
    assert [layer.name for layer in done.layers] == ["0"]
    assert isinstance(model[0].chain, Chain)
    assert model[0].chain == result.layers[0].recommendations[0].chosen.facts.chain
