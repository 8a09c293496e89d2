"""The plan of a search's result for ``ksopt convert``, and its effect on a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ksopt.conversion.plan import Plan, Rule
from ksopt.errors import InvalidInputError
from ksopt.operators.registry import Replacement
from ksopt.patterns.size import Budget, Dims
from ksopt.patterns.surroundings import Surroundings
from ksopt.search import surrounded
from ksopt.search.layers import Group
from ksopt.search.results import Finalist, LayerResult, Recommendation, SearchResult, Verdict


@dataclass(frozen=True)
class PlannedGroup:
    """A group of layers in a plan.

    Args:
        group: The layers.
        answer: The step whose chain they become; None if they stay dense.
        dense_us: Microseconds of one dense layer, for siblings its share of the time of all; None
            if it was not measured.
        latency_us: Microseconds of one layer by the plan; None if it was not measured.
    """

    group: Group
    answer: Recommendation | None
    dense_us: float | None
    latency_us: float | None

    @property
    def finalist(self) -> Finalist | None:
        """The chain and its times; None where the layers stay dense."""
        return None if self.answer is None else self.answer.chosen

    @property
    def parameters(self) -> int:
        """Number of weights of all the layers by the plan, shared ones once, without bias."""
        if self.finalist is None:
            return self.group.dense_parameters
        return self.group.weights * self.finalist.facts.nnz


@dataclass(frozen=True)
class Effect:
    """Predicted effect of a plan on the layers of a model: a sum of layers that were timed alone.

    Args:
        groups: Each group in the plan.
        dense_us: Sum of the measured latencies of the dense layers.
        latency_us: Sum of the latencies by the plan.
        unmeasured: Sizes whose layers are in no sum of latencies.
    """

    groups: tuple[PlannedGroup, ...]
    dense_us: float
    latency_us: float
    unmeasured: tuple[Dims, ...]

    @property
    def ratio(self) -> float | None:
        """Latency by the plan over dense; None if nothing was measured."""
        return self.latency_us / self.dense_us if self.dense_us > 0 else None

    @property
    def dense_parameters(self) -> int:
        """Number of weights of the dense layers, without bias."""
        return sum(one.group.dense_parameters for one in self.groups)

    @property
    def parameters(self) -> int:
        """Number of weights by the plan, without bias."""
        return sum(one.parameters for one in self.groups)

    @property
    def converted(self) -> int:
        """Number of layers that become chains."""
        return sum(one.group.count for one in self.groups if one.finalist is not None)


def plan_of(result: SearchResult) -> Plan:
    """The plan of a result: a rule for each group of a model's layers, or for each size.

    Of a size's budgets whose chain is faster than dense it takes the largest, which preserves the
    most of a layer's weights. If there is none the layers stay dense, except in surroundings in
    which a chain was measured to be faster: a rule with that condition precedes.
    """
    model = result.request.model
    if model is None:
        named = [(dims, "*") for dims in result.request.sizes]
    else:
        named = [(group.dims, match) for group in model.groups for match in group.matches]
    rules: list[Rule] = []
    for dims, match in dict.fromkeys(named):
        rules += _conditional_rules(result, dims, match)
        chains = _chains(choice(result, dims))
        rules.append(Rule(chains, match, dims.in_features, dims.out_features))
    return Plan(tuple(rules), made_by=result.request.command)


def _conditional_rules(result: SearchResult, dims: Dims, match: str) -> list[Rule]:
    """The rules for layers that are surrounded as a chain that wins there was timed.

    Siblings were timed against one dense product of all their outputs. One layer of that size, a
    fused q, k and v, is that product: its rule has a chain for each part, unless the size was
    searched by itself, or it is one of a model, whose layers are all searched.
    """
    layer, rules = result.of(dims), []
    n_in, n_out = dims.in_features, dims.out_features
    for around, answer in () if layer is None else surrounded.winners(layer):
        chains, count = _chains(answer), around.siblings
        rules.append(Rule(chains, match, n_in, n_out, where=around))
        fused = Dims(n_in, count * n_out)
        if count > 1 and result.request.model is None and fused not in result.request.sizes:
            where = Surroundings(around.epilogue)
            rules.append(Rule(chains * count, match, n_in, count * n_out, where=where))
    return rules


def choice(result: SearchResult, dims: Dims) -> Recommendation | None:
    """The step whose chain the plan takes for a size; None where its layers stay dense."""
    layer = result.of(dims)
    return None if layer is None else choice_of_layer(layer)


def choice_of_layer(layer: LayerResult) -> Recommendation | None:
    """The step whose chain the plan takes for a layer's result; None if the layer stays dense."""
    return max(_used(layer), key=lambda answer: answer.budget.parameters, default=None)


def effect_of(result: SearchResult) -> Effect | None:
    """Effect of the plan on the model's layers; None without a model."""
    return _effect(result, lambda dims: choice(result, dims))


def effects_of(result: SearchResult) -> dict[str, Effect]:
    """Effects by the text of a budget: with the chain of that step if it is faster than dense.

    Texts that are equal for every size (25% and 0.25) count once; smaller budgets first.
    """
    texts: dict[tuple[int, ...], str] = {}
    for text in result.request.budgets:
        counts = (_within(text, one) or one.size.dense_parameters for one in result.layers)
        texts.setdefault(tuple(counts), text)
    effects = {
        texts[counts]: _effect(result, _at(result, texts[counts])) for counts in sorted(texts)
    }
    return {text: effect for text, effect in effects.items() if effect is not None}


def _used(layer: LayerResult) -> list[Recommendation]:
    return [a for a in layer.recommendations if a.verdict is Verdict.USE and a.chosen is not None]


def _chains(answer: Recommendation | None) -> tuple[Replacement, ...]:
    """The chains of a rule for an answer."""
    return () if answer is None or answer.chosen is None else (answer.chosen.facts.chain,)


def _within(text: str, layer: LayerResult) -> int | None:
    """Number of weights that a budget allows for a size; its step there may have another text.

    None if it is more than the dense layer has.
    """
    most = layer.request.max_params
    texts = (text,) if most is None else (text, most)
    try:
        return min(Budget.parse(one, layer.size).parameters for one in texts)
    except InvalidInputError:
        return None


def _at(result: SearchResult, text: str) -> Callable[[Dims], Recommendation | None]:
    def pick(dims: Dims) -> Recommendation | None:
        layer = result.of(dims)
        if layer is None:
            return None
        count = _within(text, layer)
        return next((a for a in _used(layer) if a.budget.parameters == count), None)

    return pick


def _effect(result: SearchResult, pick: Callable[[Dims], Recommendation | None]) -> Effect | None:
    if result.request.model is None:
        return None
    planned = []
    for group in result.request.model.groups:
        answer, layer = pick(group.dims), result.of(group.dims)
        dense = None if layer is None else _dense_us(layer)
        latency = dense
        if answer is not None and answer.chosen is not None:
            # Relative to the final's dense layer, if there was a final.
            dense = answer.chosen.dense.median_us
            latency = answer.chosen.latency.median_us
        if layer is not None and dense is not None and latency is not None:
            together = layer.request.siblings  # whose time is of all of them
            dense, latency = dense / together, latency / together
        planned.append(PlannedGroup(group, answer, dense, latency))
    known = [one for one in planned if one.dense_us is not None]
    missing = dict.fromkeys(one.group.dims for one in planned if one.dense_us is None)
    return Effect(
        tuple(planned),
        sum(one.group.count * (one.dense_us or 0.0) for one in known),
        sum(one.group.count * (one.latency_us or 0.0) for one in known),
        tuple(missing),
    )


def _dense_us(layer: LayerResult) -> float | None:
    """The dense layer's latency: of the final, or else of the fastest finalist's trial."""
    return layer.finalists[0].dense.median_us if layer.finalists else None
