"""What a search measured, as frozen data: the report, the JSON and the terminal all read this."""

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
from ksopt.search.layer_request import LayerRequest
from ksopt.search.request import SearchRequest

SCHEMA = "ksopt.search/4"
"""Version of results.json, and of what studies keep of their last run."""


@dataclass(frozen=True)
class ChainFacts:
    """What is known of a chain without measuring it, or of another operator in its place.

    Args:
        chain: The chain, or the operator.
        nnz: Its weights, bias not counted.
        share: nnz over the dense layer's weights.
        rho: (b + c)/(b c), averaged over the factors with their nnz as weight: features read and
            written over multiplications (paper, equation 2, for a chain). Of another operator the
            same, as if it were one factor.
        d_rho: d (b + c)/(b c), averaged likewise (paper, section 5).
        floor_us: The roofline's floor in microseconds: no run of it factor by factor is faster.
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
    """One trial of the study: a chain, and what came of it.

    Args:
        number: The trial's number in the study.
        state: "complete", "pruned" (given up as hopeless after its first repeats), "failed" or
            "lost" (left unfinished by a process that ended).
        facts: The chain and what is known of it.
        origin: What chose it: a prior ("monarch", "largest rho", "lowest floor", ...) or a sampler.
        latency: Its time, for a pruned one as far as it was seen; None unless measured.
        dense: The dense layer's, measured in turns with it; None unless measured.
        error: Relative error of its product against float64; None if not measured.
        reason: Why it failed; None if it did not.
        run: Which run of the study measured it, from 1.
        device: torch's name of where it was measured.
        seconds: For how long that held the device; None unless measured.
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
        """The same, for a pruned trial too, whose few repeats are less certain."""
        if self.latency is None or self.dense is None:
            return None
        return self.latency.median_us / self.dense.median_us


@dataclass(frozen=True)
class Finalist:
    """A chain that stands for election: timed again at the end, unless the search was stopped.

    Args:
        facts: The chain and what is known of it.
        latency: Its time.
        dense: The dense layer's, measured in turns with it.
        trial: Number of the trial that found it.
        origin: What chose it then.
        retimed: Whether both times come from the final, in which all finalists took turns.
        values: Its metrics besides latency and weights, by name: measured after the final where a
            metric is measured again then, its trial's otherwise.
        dense_values: The dense layer's, of those measured after the final.
        in_trial_us: Its latency in its trial; None where that is not known.
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
        """Whether it is faster or slower than dense, or has not been told apart from it."""
        return compare(self.latency, self.dense)

    @property
    def efficiency(self) -> float:
        """The roofline's floor over the measured time."""
        return self.facts.floor_us / self.latency.median_us


class Verdict(enum.Enum):
    """What to do with the layer."""

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
        verdict: What to do.
        chosen: The fastest finalist of the step; None where no chain was measured, none is within
            the request's ``max_error`` (the verdict is KEEP_DENSE then), or it cannot be judged.
        ties: Its other finalists that are within noise of the chosen one.
        heuristic: The chain that the largest rho would have chosen, if it was measured.
        sentence: The verdict with its evidence, for a person.
    """

    budget: Budget
    least: int
    verdict: Verdict
    chosen: Finalist | None
    ties: tuple[Finalist, ...]
    heuristic: Finalist | None
    sentence: str


@dataclass(frozen=True)
class SpaceRecord:
    """How many chains there were to choose from.

    Args:
        candidates: Chains that the study could draw.
        count: Chains that meet the constraints; a lower bound unless exact.
        exact: Whether count is exact.
        complete: Whether the candidates are all of them, or a sample.
        left_out: Why structures that were named have none, by name.
    """

    candidates: int
    count: int
    exact: bool
    complete: bool
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerResult:
    """What was measured of one layer size.

    Args:
        request: What was asked, with batch and device as they were resolved.
        run: The number of the study's run that reports, from 1.
        device: What it ran on.
        runs: The devices and versions of every run of the study, this one last.
        roofline: The measured ceilings of this run.
        space: How large the space was.
        sampler: What chose the trials.
        trials: Every trial of the study, in order.
        finalists: The best of each step, timed again in turns unless the search was interrupted.
        recommendations: One per step of the ladder.
        stopped: Why it ended before its trials were done ("timeout" or "interrupted"), or None.
        seconds: How long the run took until its end.
        replayed: Whether it was read from the study, without measuring.
        final_seconds: For how long the final held the device; None if there was none.
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

    @property
    def size(self) -> Dims:
        """The layer's."""
        return self.request.size

    def _repr_html_(self) -> str:
        """Its answer in a notebook."""
        from ksopt.report import document
        from ksopt.search.report import headline

        return document.fragment([headline.of_layer(self)])


@dataclass(frozen=True)
class WholeModel:
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
class SearchResult:
    """A finished or stopped search.

    Args:
        request: What was asked, with batch and device as they were resolved.
        layers: What was measured of each size that has a chain within a budget.
        unmet: Why the other sizes were not searched, in a sentence each.
        stopped: Why it ended before its trials were done ("timeout" or "interrupted"), or None.
        seconds: How long this run took.
        folder: Where the report is.
        whole: The model timed with the plan; None if that was not asked or did not come about.
        replayed: Whether it was written again from the studies, without measuring.
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
        """What was measured of a size; None if it was not searched."""
        return next((one for one in self.layers if one.size == dims), None)

    def __str__(self) -> str:
        from ksopt.search.report import terminal

        stream = io.StringIO()
        terminal.print_result(self, stream)
        return stream.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """The first screen of its report in a notebook."""
        from ksopt.search.report import page

        return page.fragment(self)
