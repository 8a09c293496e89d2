"""Detection of suspiciously slow dense layers, for which a faster chain proves little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain
from ksopt.search.report import phrases
from ksopt.search.results import LayerResult

_TIMES_THE_FLOOR = 4.0
# Allowed overhead of a call: on a CPU a 32x64 layer of 16 rows with a floor of 0.6 us took 76 us
# with cold caches; on a GPU it is a launch.
_OVERHEAD_US = {"cpu": 200.0, "cuda": 20.0}

# In a final the dense layer is suspiciously slow if it takes this many times its time in the
# trials, plus this many microseconds: the slack is for very fast layers.
_SUSPECT, _SLACK_US = 2.0, 20.0

# Caches are overwritten before each repeat, so that they hold little of the data of the floor.
_LEAST_OF_FLOOR = 0.5

_WHY = (
    "The ceilings of this device, measured just before, allow far more. Something held it back: "
    "other work, its threads, or a library without a fast path for this size. A speedup may say "
    "more of that than of the chain. Measure again on an idle machine before you rely on it."
)


def is_suspect(dense_us: float, in_trials_us: float) -> bool:
    """Whether a dense layer's time in a final is implausibly far above that in the trials.

    Example:
        >>> is_suspect(13_838.0, in_trials_us=147.0), is_suspect(180.0, in_trials_us=147.0)
        (True, False)
    """
    return dense_us > _SUSPECT * in_trials_us + _SLACK_US


@dataclass(frozen=True)
class DenseLayer:
    """The dense layer's time beside the device's ceilings.

    Args:
        measured: In the final, or in the first trial if there was none.
        floor_us: The roofline's floor: input, output and weights moved once, or the
            multiplications done, whichever takes longer.
        type: Of the device.
    """

    measured: Measurement
    floor_us: float
    type: str

    @property
    def over_floor(self) -> float:
        """The median over the floor."""
        return self.measured.median_us / self.floor_us

    @property
    def warning(self) -> str:
        """Sentence if the time is far above the floor; else empty."""
        if not self.is_strange:
            return ""
        return (
            f"The dense layer took {phrases.timed(self.measured)}, {self.over_floor:.0f} times its "
            f"roofline floor of {phrases.microseconds(self.floor_us)}. {_WHY}"
        )

    @property
    def beats_floor(self) -> str:
        """Sentence if the time is far below the floor, so that the floor is wrong; else empty."""
        if self.over_floor > _LEAST_OF_FLOOR:
            return ""
        return (
            f"The dense layer took {phrases.timed(self.measured)}. That is far less than its "
            f"roofline floor of {phrases.microseconds(self.floor_us)}. Something else was using "
            "the machine while its ceilings were measured. Take no floor and no efficiency here "
            "for a fact."
        )

    @property
    def is_strange(self) -> bool:
        """Whether the time is far above the floor."""
        overhead = _OVERHEAD_US.get(self.type, max(_OVERHEAD_US.values()))
        return self.measured.median_us > _TIMES_THE_FLOOR * self.floor_us + overhead


def warning_of(layers: Mapping[str, DenseLayer]) -> str:
    """One sentence for dense layers of several sizes, by name; empty if none is suspicious."""
    strange = {name: dense for name, dense in layers.items() if dense.is_strange}
    if len(strange) < 2:
        return "".join(f"{name}: {dense.warning}" for name, dense in strange.items())
    listed = ", ".join(
        f"{name} ({phrases.microseconds(dense.measured.median_us)}, {dense.over_floor:.0f} times)"
        for name, dense in strange.items()
    )
    return f"Far above their roofline floors were the dense layers of {listed}. {_WHY}"


def dense_layer(result: LayerResult) -> DenseLayer | None:
    """The dense layer of a result; None if nothing was measured."""
    measured = next((f.dense for f in result.finalists if f.retimed), None)
    if measured is None:
        measured = next((t.dense for t in result.trials if t.state == "complete"), None)
    if measured is None:
        return None
    request = result.request
    assert request.batch is not None
    dense = Chain.dense(request.size.in_features, request.size.out_features)
    floor_us = result.roofline.chain_floor_us(dense, request.batch) * request.siblings
    if request.train:  # as for a chain: see `ksopt.search.samplers.priors.facts`
        floor_us *= 3
    return DenseLayer(measured, floor_us, result.device.type)
