"""The best operator of each structure at each budget, to compare with chains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ksopt.measure.timing import Measurement
from ksopt.operators.registry import name_of, operator_of
from ksopt.patterns.size import Budget
from ksopt.search import recommend
from ksopt.search.metrics import WEIGHT_ERROR
from ksopt.search.results import ChainFacts, LayerResult, Recommendation


@dataclass(frozen=True)
class StructureResult:
    """The fastest measured operator of a structure that uses a budget.

    Args:
        structure: Its name.
        budget: The step.
        facts: The operator and its properties.
        flops: Operations of its product: a multiplication and an addition count as two.
        latency: Its time, from the final if it took part, else from its trial.
        dense: The dense layer's, measured in turns with it.
        retimed: Whether both are from the final.
        given_up: Whether the trial was pruned after its first repeats.
        weight_error: Relative error of its fit to the trained weights; None without any.
    """

    structure: str
    budget: Budget
    facts: ChainFacts
    flops: int
    latency: Measurement
    dense: Measurement
    retimed: bool
    given_up: bool
    weight_error: float | None

    @property
    def ratio(self) -> float:
        """Latency over the dense layer's; below 1 is faster than dense."""
        return self.latency.median_us / self.dense.median_us


def best_of_each(layer: LayerResult) -> tuple[StructureResult, ...]:
    """For each budget, smallest first, the best of each structure, fastest first."""
    every = list(_measured(layer))
    best = []
    for answer in layer.recommendations:
        inside: dict[str, StructureResult] = {}
        for one in every:
            if one.budget == answer.budget:
                known = inside.get(one.structure)
                if known is None or _order(one) < _order(known):
                    inside[one.structure] = one
        best += sorted(inside.values(), key=lambda one: one.ratio)
    return tuple(best)


def _order(one: StructureResult) -> tuple[bool, bool, float]:
    """Sort key: times of the final before a trial's, and those before the first repeats'."""
    return one.given_up, not one.retimed, one.ratio


def _measured(layer: LayerResult) -> Iterable[StructureResult]:
    batch = layer.request.batch
    assert batch is not None
    retimed = {finalist.trial: finalist for finalist in layer.finalists if finalist.retimed}
    for trial in recommend.admitted(layer.trials, layer.request):
        of = retimed.get(trial.number, trial)
        if of.latency is None or of.dense is None:
            continue
        operator = operator_of(trial.facts.chain)
        for answer in layer.recommendations:
            if _uses(answer, trial.facts.nnz):
                yield StructureResult(
                    name_of(trial.facts.chain),
                    answer.budget,
                    trial.facts,
                    operator.flops(batch) * layer.request.siblings,
                    of.latency,
                    of.dense,
                    trial.number in retimed,
                    trial.state == "pruned",
                    trial.values.get(WEIGHT_ERROR.name),
                )


def _uses(answer: Recommendation, nnz: int) -> bool:
    return answer.least <= nnz <= answer.budget.parameters
