"""The result of `ksopt.optimize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ksopt.conversion.apply import Conversion, ConvertedLayer
from ksopt.conversion.plan import Plan
from ksopt.optimization.speed import Speed
from ksopt.report import document
from ksopt.report.document import Fact, Section
from ksopt.search.report import phrases
from ksopt.search.results import SearchResult
from ksopt.search.timing_noise import is_noisy

_IDLE = (
    "Call it again when the machine is idle: something else was using it, for the model's times "
    "spread widely."
)
# Dense layers that a printed result lists.
_SHOWN = 8


@dataclass(frozen=True)
class Optimized:
    """A model with chains where they are faster, and the gain and the cost.

    Args:
        model: The model with chains, compiled; or the passed model itself, if nothing is gained.
        plan: The chain of each replaced layer, by the search; `ksopt.convert` accepts it.
        report: The page of the search, for a browser.
        mode: The timed mode: "inference" or "training".
        reason: The reason the model is unchanged; empty if it is changed.
        speed: The times of the whole model, dense and with chains; None if no layer became a chain.
        conversion: The model with chains before it was compiled, for `ksopt.save_converted`; None
            if the model is unchanged. It cannot be reverted: the passed model is dense.
        dense: The reason each other linear layer stayed dense, by name.
        search: The measurements of the layers.
        seconds: Total time.
    """

    model: nn.Module
    plan: Plan
    report: Path
    mode: str
    reason: str
    speed: Speed | None
    conversion: Conversion | None = field(repr=False)
    dense: Mapping[str, str] = field(repr=False)
    search: SearchResult = field(repr=False)
    seconds: float

    @property
    def is_changed(self) -> bool:
        """Whether layers became chains."""
        return self.conversion is not None

    @property
    def layers(self) -> tuple[ConvertedLayer, ...]:
        """The layers that became chains, with the weights and the error of each."""
        return () if self.conversion is None else self.conversion.layers

    @property
    def sentence(self) -> str:
        """The result in one or two sentences."""
        if self.conversion is None or self.speed is None:
            return f"The model is unchanged: {self.reason}"
        return f"{self._speed_sentence} {self.conversion.sentence}"

    @property
    def next_steps(self) -> tuple[str, ...]:
        """The recommended next steps, a sentence each."""
        if self.conversion is None:
            busy = self.speed is not None and is_noisy(self.speed.dense, self.speed.chains)
            return (
                *((_IDLE,) if busy else ()),
                f"Read why, layer by layer: {self.report}",
                "Try a smaller budget, larger inputs or lower precision: chains win where layers "
                "are large.",
            )
        worst = max(self.layers, key=lambda layer: layer.relative_error)
        return (
            "Check what the model still can do: its weights are changed. The largest error is "
            f"{worst.relative_error:.2f}, that of layer {worst.name}.",
            "Distil it from the model that you passed, which is still dense: "
            "ksopt.distil(optimized.model, model, batches). For a sentence encoder of 23 million "
            "parameters 300 steps took ten minutes on two CPU cores.",
            "Make the optimizer after this call: the parameters are new.",
            'Keep it: ksopt.save_converted(optimized.conversion, "FOLDER").',
        )

    @property
    def _speed_sentence(self) -> str:
        assert self.speed is not None
        what = "A training step" if self.mode == "training" else "A call"
        return (
            f"{what} of the model took {phrases.timed(self.speed.chains)} with chains and "
            f"{phrases.timed(self.speed.dense)} dense, compiled by Inductor: "
            f"{phrases.times(1 / self.speed.times)} dense."
        )

    def _repr_html_(self) -> str:
        """The gain, the cost and the next steps as HTML for a notebook."""
        facts = []
        if self.speed is not None:
            both = f"{phrases.microseconds(self.speed.chains.median_us)} against "
            both += phrases.microseconds(self.speed.dense.median_us)
            facts.append(Fact(f"{self.speed.times:.2f}x", "speedup over the dense model", both))
        if self.conversion is None:
            answer = Section("Optimized", (self.sentence,), self.next_steps, facts=tuple(facts))
            return document.fragment([answer])
        share = phrases.percent(self.conversion.parameters / self.conversion.dense_parameters)
        errors = sorted(layer.relative_error for layer in self.layers)
        facts += [
            Fact(share, "of the model's parameters"),
            Fact(f"{errors[0]:.2f} to {errors[-1]:.2f}", "weight error, before training"),
        ]
        table = self.conversion.table()
        answer = Section("Optimized", (self.sentence,), self.next_steps, table, facts=tuple(facts))
        return document.fragment([answer])

    def __str__(self) -> str:
        parts = [self.sentence]
        if self.conversion is None and self.speed is not None:
            parts.append(self._speed_sentence)
        if self.conversion is not None:
            parts.append(self.conversion.table().plain())
        if self.dense:
            lines = [f"{name} stays dense: {why}" for name, why in self.dense.items()]
            more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            parts.append("\n".join([*lines[:_SHOWN], *more]))
        steps = [f"{at}. {step}" for at, step in enumerate(self.next_steps, start=1)]
        parts += ["\n".join(["Next:", *steps]), f"report: {self.report}"]
        return "\n\n".join(parts)
