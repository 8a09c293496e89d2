"""Metrics that a trial measures of a chain, one entry each.

All objectives of a study, and all values in its tables, plots, CSV and JSON beside the latency, are
entries of `METRICS`. `register` adds one: storage, Pareto front, finalists, report and schema read
the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ksopt.errors import InvalidInputError
from ksopt.search.report import phrases

if TYPE_CHECKING:
    import torch

    from ksopt.measure.energy import Meter
    from ksopt.measure.timing import Measurement
    from ksopt.operators.registry import Replacement
    from ksopt.search.layer_request import LayerRequest
    from ksopt.search.options import SearchOptions
    from ksopt.search.results import Finalist, TrialRecord
    from ksopt.search.trained_weights import TrainedWeights


@dataclass(frozen=True)
class TimedChain:
    """Input of a metric: a chain that was checked and timed in a trial.

    Args:
        chain: The chain, or another operator in its place.
        request: With its batch resolved.
        device: Device of the timing.
        latency: Its time.
        dense: The dense layer's, measured in turns with it.
        call: The timed call, on random input and weights.
        weights: The trained weights to approximate; None without them.
        meter: Of the device's energy; None unless the request measures it.
        values: The metrics measured before this one, by name.
    """

    chain: Replacement
    request: LayerRequest
    device: torch.device
    latency: Measurement
    dense: Measurement
    call: Callable[[], object]
    weights: TrainedWeights | None = None
    meter: Meter | None = None
    values: Mapping[str, float] = field(default_factory=dict)


FinalMeasure = Callable[
    ["LayerRequest", "torch.device", "Sequence[Replacement]"], Mapping[str, float]
]
"""(request, device, finalists) -> a value by each one's text, and by "dense"."""


def _always(request: SearchOptions) -> bool:
    return True


@dataclass(frozen=True)
class Metric:
    """One metric of a chain.

    Args:
        name: Its key in studies, JSON and CSV, with its unit where it has one: ``energy_mj``.
        title: Its display name, the head of its column.
        axis: Its name beside an axis of a plot, with the unit.
        measure: Measures it in a trial; returns None if the request does not include it.
        shown: Formats a value.
        direction: Whether smaller or larger values are better.
        is_measured: Whether the trials of a request have it.
        is_objective: Whether a study of the request optimises it.
        read: Its value for the Pareto front, from a trial that stores it in other fields; None if
            it is one of the trial's ``values``.
        of_pruned: Whether it is measured of pruned chains, too.
        final: Measures it again after the final, of chains and the dense layer; None if the trial's
            value is final.
        remark: Sentence on it in a recommendation, after the verdict.
        plotted_against: The metric on the x axis of its plot; None for no plot.
        is_log: Whether its axis is logarithmic.
        schema: Its JSON schema, besides the type.
    """

    name: str
    title: str
    axis: str
    measure: Callable[[TimedChain], float | None]
    shown: Callable[[float], str]
    direction: Literal["minimize", "maximize"] = "minimize"
    is_measured: Callable[[SearchOptions], bool] = _always
    is_objective: Callable[[SearchOptions], bool] = _always
    read: Callable[[TrialRecord], float | None] | None = None
    of_pruned: bool = False
    final: FinalMeasure | None = None
    remark: Callable[[Finalist], str] | None = None
    plotted_against: str | None = "latency_us"
    is_log: bool = False
    schema: Mapping[str, object] = field(default_factory=dict, hash=False)

    def of(self, trial: TrialRecord) -> float | None:
        """The trial's value; None if it has none."""
        return trial.values.get(self.name) if self.read is None else self.read(trial)

    def cost(self, trial: TrialRecord) -> float | None:
        """The value, negated if larger is better."""
        value = self.of(trial)
        return value if value is None or self.direction == "minimize" else -value

    def cell(self, values: Mapping[str, float]) -> str:
        """The formatted value for a table; empty if there is none."""
        value = values.get(self.name)
        return "" if value is None else self.shown(value)


def _weight_error(timed: TimedChain) -> float | None:
    return None if timed.weights is None else timed.weights.error(timed.chain)


def _energy_mj(timed: TimedChain) -> float | None:
    import torch

    from ksopt.measure import energy

    if timed.meter is None:
        return None
    with torch.inference_mode(not timed.request.train):
        calls = {"chain": timed.call}
        return energy.millijoules(calls, timed.meter, energy.TRIAL_SECONDS)["chain"]


def _final_energy_mj(
    request: LayerRequest, device: torch.device, chains: Sequence[Replacement]
) -> Mapping[str, float]:
    from ksopt.search import finals

    return finals.energy(request, device, chains)


def _score(timed: TimedChain) -> float | None:
    from ksopt.search.user_score import Score, Scored

    score = Score.of(timed.request)
    return None if score is None else score(Scored.of(timed))


def _weight_error_remark(finalist: Finalist) -> str:
    return (
        "The nearest product of that chain has a relative error of "
        f"{finalist.values['weight_error']:.3f} to the given weights."
    )


def _energy_remark(finalist: Finalist) -> str:
    text = f"A call of it uses {phrases.millijoules(finalist.values['energy_mj'])}"
    dense_mj = finalist.dense_values.get("energy_mj")
    if dense_mj is not None:
        text += f", one of the dense layer {phrases.millijoules(dense_mj)}"
    return f"{text}."


LATENCY = Metric(
    "latency_us",
    "latency",
    axis="latency, us",
    measure=lambda timed: timed.latency.median_us,
    shown=phrases.microseconds,
    # Relative to the dense layer, so that trials of several runs can be compared.
    read=lambda trial: trial.ratio,
    plotted_against=None,
    is_log=True,
)
PARAMETERS = Metric(
    "parameters",
    "weights",
    axis="weights",
    measure=lambda timed: float(timed.chain.nnz),
    shown="{:,.0f}".format,
    is_objective=lambda request: request.objective == "pareto",
    read=lambda trial: float(trial.facts.nnz),
    plotted_against=None,
)
WEIGHT_ERROR = Metric(
    "weight_error",
    "weight error",
    axis="relative error to the given weights",
    measure=_weight_error,
    shown="{:.3f}".format,
    is_measured=lambda request: request.weights is not None,
    is_objective=lambda request: request.objective == "pareto-error",
    of_pruned=True,
    remark=_weight_error_remark,
    plotted_against="parameters",
    schema={
        "minimum": 0,
        "description": "relative error (Frobenius norm) of the nearest product to request.weights",
    },
)
ENERGY = Metric(
    "energy_mj",
    "energy",
    axis="energy of a call, mJ",
    measure=_energy_mj,
    shown=phrases.millijoules,
    is_measured=lambda request: request.energy,
    is_objective=lambda request: request.energy,
    final=_final_energy_mj,
    remark=_energy_remark,
    is_log=True,
    schema={
        "minimum": 0,
        "description": "of a call, a finalist's measured after the final (its trial's if that did "
        "not come about); null without request.energy",
    },
)
SCORE = Metric(
    "score",
    "score",
    axis="score",
    measure=_score,
    shown="{:.4g}".format,
    is_measured=lambda request: request.score is not None,
    is_objective=lambda request: request.score is not None,
    schema={"description": "by request.score"},
)

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (LATENCY, PARAMETERS, WEIGHT_ERROR, ENERGY, SCORE)
}
"""By name, in the order in which they are measured, stored and shown."""


def register(metric: Metric) -> Metric:
    """Register a metric; it is measured after the others, in later searches of this process.

    Worker processes have the metrics that they import.

    Raises:
        InvalidInputError: A metric has that name already.

    Example:
        >>> def count(timed: TimedChain) -> float:
        ...     return float(len(timed.chain))
        >>> factors = Metric("factors", "factors", "factors", measure=count, shown="{:.0f}".format)
        >>> register(factors).name in METRICS
        True
        >>> del METRICS["factors"]
    """
    if metric.name in METRICS:
        raise InvalidInputError(f"metric {metric.name!r}: there is one of that name")
    METRICS[metric.name] = metric
    return metric


def stored() -> tuple[Metric, ...]:
    """The metrics that a trial stores in its ``values``."""
    return tuple(metric for metric in METRICS.values() if metric.read is None)


def measured(request: SearchOptions) -> tuple[Metric, ...]:
    """The stored metrics that the trials of a request have."""
    return tuple(metric for metric in stored() if metric.is_measured(request))


def objectives(request: SearchOptions) -> tuple[Metric, ...]:
    """The metrics that a study of a request optimises, the latency first.

    Example:
        >>> from ksopt.search import SearchRequest
        >>> [metric.name for metric in objectives(SearchRequest("8x8", score="mine:cost"))]
        ['latency_us', 'parameters', 'score']
        >>> request = SearchRequest("8x8", objective="latency", energy=True)
        >>> [metric.name for metric in objectives(request)]
        ['latency_us', 'energy_mj']
    """
    return tuple(metric for metric in METRICS.values() if metric.is_objective(request))


def knows_only_latency(request: SearchOptions) -> bool:
    """Whether a study optimises only latency and size."""
    known = (LATENCY.name, PARAMETERS.name)
    return all(metric.name in known for metric in objectives(request))
