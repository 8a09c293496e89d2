"""Results of a search as frozen data, which the report, the JSON and the terminal read."""

from __future__ import annotations

import enum
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ksopt.measure.device import DeviceRecord
from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Comparison, Measurement, compare
from ksopt.operators.registry import Replacement
from ksopt.patterns.size import Budget, Dims
from ksopt.patterns.surroundings import Surroundings
from ksopt.search.layer_request import LayerRequest
from ksopt.search.lower_rank import LowerRank
from ksopt.search.request import SearchRequest

SCHEMA = "ksopt.search/4"
"""Version of results.json, and of the record of the last run in studies."""


@dataclass(frozen=True)
class ChainFacts:
    """Properties of a chain, or of another operator, that are known without measuring it.

    Args:
        chain: The chain, or the operator.
        nnz: Its number of weights, without bias.
        share: nnz over the dense layer's weights.
        rho: (b + c)/(b c), averaged over the factors with their nnz as weight: features read and
            written over multiplications (paper, equation 2, for a chain). Of another operator the
            same, as if it were one factor.
        d_rho: d (b + c)/(b c), averaged likewise (paper, section 5).
        floor_us: The roofline's floor in microseconds, for running it factor by factor.
        predicted_us: By the kernels' cost models; None where there is none.
    """

    chain: Replacement
    nnz: int
    share: float
    rho: float
    d_rho: float
    floor_us: float
    predicted_us: float | None = None


@dataclass(frozen=True)
class TrialRecord:
    """One trial of the study: a chain and its outcome.

    Args:
        number: The trial's number in the study.
        state: "complete", "pruned" (stopped as hopeless after its first repeats), "failed" or
            "lost" (left unfinished by a process that ended).
        facts: The chain and its properties.
        origin: What proposed it: a prior ("monarch", "largest rho", "lowest floor", ...) or a
        sampler.
        latency: Its time, of a pruned one the provisional time; None unless measured.
        dense: The dense layer's, measured in turns with it; None unless measured.
        error: Relative error of its product against float64; None if not measured.
        reason: Why it failed; None if it did not.
        run: The run of the study that measured it, from 1.
        device: torch's name of the device.
        seconds: For how long it held the device; None unless measured.
        values: Its metrics besides latency and weights, by name (`ksopt.search.metrics`).
    """

    number: int
    state: str
    facts: ChainFacts
    origin: str
    latency: Measurement | None
    dense: Measurement | None
    error: float | None
    reason: str | None
    run: int
    device: str | None = None
    seconds: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Latency over the dense layer's, measured together; below 1 is faster than dense.

        None unless complete.
        """
        return self.ratio_seen if self.state == "complete" else None

    @property
    def ratio_seen(self) -> float | None:
        """Latency over the dense layer's, also of pruned trials, with fewer repeats."""
        if self.latency is None or self.dense is None:
            return None
        return self.latency.median_us / self.dense.median_us


@dataclass(frozen=True)
class Finalist:
    """A finalist of a search: timed again at the end, unless the search was stopped.

    Args:
        facts: The chain and its properties.
        latency: Its time.
        dense: The dense layer's, measured in turns with it.
        trial: Number of its trial.
        origin: What proposed it.
        retimed: Whether both times come from the final, in which all finalists took turns.
        values: Its metrics besides latency and weights, by name: from the final if the metric is
            measured again then, else from its trial.
        dense_values: The dense layer's, of those measured after the final.
        in_trial_us: Its latency in its trial; None if unknown.
    """

    facts: ChainFacts
    latency: Measurement
    dense: Measurement
    trial: int
    origin: str
    retimed: bool
    values: Mapping[str, float] = field(default_factory=dict)
    dense_values: Mapping[str, float] = field(default_factory=dict)
    in_trial_us: float | None = None

    @property
    def ratio(self) -> float:
        """Latency over the dense layer's; below 1 is faster than dense."""
        return self.latency.median_us / self.dense.median_us

    @property
    def versus_dense(self) -> Comparison:
        """Whether it is faster or slower than dense, or within noise of it."""
        return compare(self.latency, self.dense)

    @property
    def efficiency(self) -> float:
        """The roofline's floor over the measured time."""
        return self.facts.floor_us / self.latency.median_us


class Verdict(enum.Enum):
    """Recommended action for the layer."""

    USE = "use the chain"
    KEEP_DENSE = "keep the dense layer"
    NOT_ENOUGH = "not as much faster as asked"
    NO_DIFFERENCE = "no measurable difference"
    UNJUDGED = "cannot be judged"
    UNKNOWN = "nothing was measured"
    UNMET = "no chain has so few weights"


@dataclass(frozen=True)
class Recommendation:
    """The answer for one step of the ladder.

    Args:
        budget: The step.
        least: The fewest weights that count as using it.
        verdict: The recommended action.
        chosen: The fastest finalist of the step; None if no chain was measured, none is within the
            request's ``max_error`` (the verdict is KEEP_DENSE then), or it cannot be judged.
        ties: The other finalists of the step that are within noise of the chosen one.
        heuristic: The chain that the largest rho would have chosen, if it was measured.
        sentence: The verdict with its evidence, as text.
    """

    budget: Budget
    least: int
    verdict: Verdict
    chosen: Finalist | None
    ties: tuple[Finalist, ...]
    heuristic: Finalist | None
    sentence: str


@dataclass(frozen=True)
class SurroundedResult:
    """The best chains of a layer in other surroundings than those it was searched in.

    Args:
        around: The surroundings, in which dense layer and chains were timed.
        finalists: The chains, with times of all siblings.
        recommendations: One for each step of the ladder that has such a chain.
        reason: Why nothing was measured; empty if something was.
    """

    around: Surroundings
    finalists: tuple[Finalist, ...]
    recommendations: tuple[Recommendation, ...]
    reason: str = ""


@dataclass(frozen=True)
class SpaceRecord:
    """Size of the searched space.

    Args:
        candidates: Chains that the study could draw.
        count: Chains that meet the constraints; a lower bound unless exact.
        exact: Whether count is exact.
        complete: Whether the candidates are all of them, or a sample.
        left_out: Reasons why requested structures have no chains, by name.
    """

    candidates: int
    count: int
    exact: bool
    complete: bool
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerResult:
    """Result of one layer size.

    Args:
        request: With batch and device resolved.
        run: The number of the reported run of the study, from 1.
        device: The device it ran on.
        runs: The devices and versions of every run of the study, this one last.
        roofline: The measured ceilings of this run.
        space: The size of the space.
        sampler: Name of the sampler.
        trials: Every trial of the study, in order.
        finalists: The best of each step, timed again in turns unless the search was interrupted.
        recommendations: One per step of the ladder.
        stopped: Why it ended before its trials were done ("timeout" or "interrupted"), or None.
        seconds: Duration of the run.
        replayed: Whether it was read from the study, without measuring.
        final_seconds: For how long the final held the device; None if there was none.
        surrounded: Its best chains in the surroundings in which such layers usually occur; empty if
            a chain wins without, or this was not measured.
        lower_rank: A chain of lower rank than the default admits that is predicted to be clearly
            faster than its finalists; None if there is none, or this was not predicted.
    """

    request: LayerRequest
    run: int
    device: DeviceRecord
    runs: tuple[DeviceRecord, ...]
    roofline: Roofline
    space: SpaceRecord
    sampler: str
    trials: tuple[TrialRecord, ...]
    finalists: tuple[Finalist, ...]
    recommendations: tuple[Recommendation, ...]
    stopped: str | None
    seconds: float
    replayed: bool = False
    final_seconds: float | None = None
    surrounded: tuple[SurroundedResult, ...] = ()
    lower_rank: LowerRank | None = None

    @property
    def size(self) -> Dims:
        """Size of the layer."""
        return self.request.size

    def _repr_html_(self) -> str:
        """The answer for a notebook."""
        from ksopt.report import document
        from ksopt.search.report import headline

        return document.fragment([headline.of_layer(self)])


@dataclass(frozen=True)
class WholeModel:
    """Times of the model itself, dense and with the plan, in turns.

    Its chains have random weights: the outputs are meaningless, the times are valid.

    Args:
        dense: A pass of the model as built, in evaluation mode, without gradients.
        planned: A pass with the plan's chains.
        converted: Number of layers that became chains.
        rows: Rows of input of each layer of the plan in a pass, by name.
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
        """Comparison with the dense model: faster, slower or within noise."""
        return compare(self.planned, self.dense).value


@dataclass(frozen=True)
class SearchResult:
    """A finished or stopped search.

    Args:
        request: With batch and device resolved.
        layers: Results of all sizes that have a chain within a budget.
        unmet: Reasons why the other sizes were not searched, in a sentence each.
        stopped: Why it ended before its trials were done ("timeout" or "interrupted"), or None.
        seconds: Duration of this run.
        folder: Folder of the report.
        whole: Times of the model with the plan; None if it was not timed.
        replayed: Whether it was read from the studies, without measuring.
    """

    request: SearchRequest
    layers: tuple[LayerResult, ...]
    unmet: Mapping[Dims, str]
    stopped: str | None
    seconds: float
    folder: Path
    whole: WholeModel | None = None
    replayed: bool = False

    def of(self, dims: Dims) -> LayerResult | None:
        """The result of a size; None if it was not searched."""
        return next((one for one in self.layers if one.size == dims), None)

    def __str__(self) -> str:
        from ksopt.search.report import terminal

        stream = io.StringIO()
        terminal.print_result(self, stream)
        return stream.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """The first screen of the report for a notebook."""
        from ksopt.search.report import page

        return page.fragment(self)
