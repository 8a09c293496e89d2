"""What a search of several layer sizes found, the plan that follows, and what the plan would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ksopt.conversion.plan import Plan, Rule
from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Measurement, compare
from ksopt.search import plan as one_plan
from ksopt.search.layers import Group
from ksopt.search.layers_request import LayersRequest
from ksopt.search.request import Budget, Dims
from ksopt.search.results import Finalist, Recommendation, SearchResult, Verdict


@dataclass(frozen=True)
class Whole:
    """The model itself, timed dense and with the plan in turns.

    Its chains have random weights: what the model computes is of no use, what it takes is.

    Args:
        dense: A pass of the model as it is built, in evaluation mode, without gradients.
        planned: The same with the plan's chains in the place of its layers.
        converted: How many layers became chains.
        rows: Rows of input that a layer saw in a pass, by the names of those in the plan.
    """

    dense: Measurement
    planned: Measurement
    converted: int
    rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Time with the plan over the dense model's."""
        return self.planned.median_us / self.dense.median_us

    @property
    def against_dense(self) -> str:
        """Faster, slower or within noise."""
        return compare(self.planned, self.dense).value


@dataclass(frozen=True)
class PlannedGroup:
    """What a plan makes of a group of layers.

    Args:
        group: The layers.
        answer: The step whose chain they become; None where they stay dense.
        dense_us: What one dense layer took, in microseconds; None if it was not measured.
        latency_us: What one layer takes by the plan; None if it was not measured.
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
        """Weights of all the layers by the plan, shared ones once; bias not counted."""
        if self.finalist is None:
            return self.group.dense_parameters
        return self.group.weights * self.finalist.facts.nnz


@dataclass(frozen=True)
class Effect:
    """What a plan does to the layers of a model, predicted: a sum of layers that were timed alone.

    Args:
        groups: What becomes of each group.
        dense_us: Sum of the dense layers' latencies, of those that were measured.
        latency_us: The same by the plan.
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
        """Weights of the dense layers; bias not counted."""
        return sum(one.group.dense_parameters for one in self.groups)

    @property
    def parameters(self) -> int:
        """Weights by the plan; bias not counted."""
        return sum(one.parameters for one in self.groups)

    @property
    def converted(self) -> int:
        """How many layers become chains."""
        return sum(one.group.count for one in self.groups if one.finalist is not None)


@dataclass(frozen=True)
class LayersResult:
    """A finished or stopped search of several layer sizes.

    Args:
        request: What was asked, with batch and device as they were resolved.
        results: What was found for each size that has a chain within a budget.
        unmet: Why the other sizes were not searched, in a sentence each.
        stopped: Why it ended before its trials were done ("timeout" or "interrupted"), or None.
        seconds: How long this run took.
        folder: Where the report is.
        whole: The model timed with the plan; None if that was not asked or did not come about.
        replayed: Whether it was written again from the studies, without measuring.
    """

    request: LayersRequest
    results: tuple[SearchResult, ...]
    unmet: Mapping[Dims, str]
    stopped: str | None
    seconds: float
    folder: Path
    whole: Whole | None = None
    replayed: bool = False

    def of(self, dims: Dims) -> SearchResult | None:
        """What was found for a size; None if it was not searched."""
        return next((one for one in self.results if one.request.size == dims), None)

    def plan(self) -> Plan:
        """One rule for each group of layers, or for each size where no model was given.

        For each size it takes the chain that `ksopt.search.plan` takes: of the budgets whose chain
        is faster than dense, that of the largest; where there is none the layers stay dense.
        """
        groups = [] if self.request.layers is None else self.request.layers.groups
        named = [(group.dims, match) for group in groups for match in group.matches]
        if self.request.layers is None:
            named = [(dims, "*") for dims in self.request.sizes]
        rules = [
            Rule(one_plan.chains(self.choice(dims)), match, dims.in_features, dims.out_features)
            for dims, match in dict.fromkeys(named)
        ]
        return Plan(tuple(rules), made_by=self.request.command)

    def choice(self, dims: Dims) -> Recommendation | None:
        """The step whose chain the plan takes for a size; None where its layers stay dense."""
        result = self.of(dims)
        return None if result is None else one_plan.chosen(result)

    def effect(self) -> Effect | None:
        """What the plan does to the model's layers; None where no model was given."""
        return self._effect(self.choice)

    def effects(self) -> dict[str, Effect]:
        """The same by budget, as its text: the chain of that step where it is faster than dense.

        Two texts that come to the same for every size (25% and 0.25) are one, the smaller first.
        """
        sizes = [one.request.size for one in self.results]
        texts: dict[tuple[int, ...], str] = {}
        for text in self.request.each.budgets:
            counts = (self._within(text, dims) or dims.dense_parameters for dims in sizes)
            texts.setdefault(tuple(counts), text)
        effects = {texts[counts]: self._effect(self._at(texts[counts])) for counts in sorted(texts)}
        return {text: effect for text, effect in effects.items() if effect is not None}

    def _within(self, text: str, dims: Dims) -> int | None:
        """The weights that a budget allows a size; its step there may have another text.

        None where it is more than the dense layer has, which it then allows.
        """
        result = self.of(dims)
        most = None if result is None else result.request.max_params
        texts = (text,) if most is None else (text, most)
        try:
            return min(Budget.parse(one, dims).parameters for one in texts)
        except InvalidInputError:
            return None

    def _at(self, text: str) -> Callable[[Dims], Recommendation | None]:
        def pick(dims: Dims) -> Recommendation | None:
            result = self.of(dims)
            if result is None:
                return None
            count = self._within(text, dims)
            used = (a for a in result.recommendations if a.verdict is Verdict.USE)
            return next((a for a in used if a.budget.parameters == count), None)

        return pick

    def _effect(self, pick: Callable[[Dims], Recommendation | None]) -> Effect | None:
        if self.request.layers is None:
            return None
        planned = []
        for group in self.request.layers.groups:
            answer, result = pick(group.dims), self.of(group.dims)
            dense = None if result is None else dense_us(result)
            latency = dense
            if answer is not None and answer.chosen is not None:
                # On the scale of the final's dense layer, where there was a final.
                dense = answer.chosen.dense.median_us
                latency = answer.chosen.latency.median_us
            planned.append(PlannedGroup(group, answer, dense, latency))
        known = [one for one in planned if one.dense_us is not None]
        missing = dict.fromkeys(one.group.dims for one in planned if one.dense_us is None)
        return Effect(
            tuple(planned),
            sum(one.group.count * (one.dense_us or 0.0) for one in known),
            sum(one.group.count * (one.latency_us or 0.0) for one in known),
            tuple(missing),
        )


def dense_us(result: SearchResult) -> float | None:
    """The dense layer's latency: of the final, or else of the fastest finalist's trial."""
    return result.finalists[0].dense.median_us if result.finalists else None
