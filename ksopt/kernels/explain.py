"""The choice for a product and the reason, as text: without operands, and without computing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ksopt import settings
from ksopt.baselines import BASELINES
from ksopt.kernels.autotuner import Source
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import APART, MERGED
from ksopt.kernels.labels import PAIR, name_of
from ksopt.kernels.mergeable import product_in_words
from ksopt.kernels.problem import DeviceSpec, Problem, ProblemKey, is_exact
from ksopt.kernels.tuning_cache import Record, Timed
from ksopt.patterns.chain import Pattern


@dataclass(frozen=True)
class ChoiceReport:
    """The choice for a problem, and the reason.

    Attributes:
        key: problem, alignment and range of batches that it is for.
        batch: rows that the times are for.
        way: a kernel family, or one of PyTorch's ways (a baseline's name).
        config: the tile's configuration; None where there is none.
        predicted_us: by the cost model; None where there is none for it.
        measured_us: median; None if nothing was measured.
        timed: every way that was measured.
        source: "measured" in this process, "recorded" on disk, "model" or "rule".
        reason: a sentence.
    """

    key: ProblemKey
    batch: int
    way: str
    config: dict[str, Any] | None
    predicted_us: float | None
    measured_us: float | None
    timed: tuple[Timed, ...]
    source: Source
    reason: str

    @property
    def name(self) -> str:
        """The way, of a pair with those of its kernels."""
        return name_of(self.way, self.config)

    @property
    def is_pytorch(self) -> bool:
        """Whether PyTorch alone multiplies."""
        return self.way in BASELINES or self.way == MERGED

    @property
    def best_pytorch_us(self) -> float | None:
        """The fastest measured time of PyTorch alone; None if it was not measured."""
        return min((one.median_us for one in self.timed if one.way in BASELINES), default=None)

    @property
    def rivals(self) -> dict[str, float]:
        """Every measured candidate with its best time in microseconds, the fastest first."""
        best: dict[str, float] = {}
        for one in sorted(self.timed, key=lambda one: one.median_us):
            best.setdefault(one.way, one.median_us)
        return best

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        values = {name: getattr(self, name) for name in ("batch", "way", "config")}
        return {
            "key": self.key.to_json(),
            **values,
            "predicted_us": self.predicted_us,
            "measured_us": self.measured_us,
            "best_pytorch_us": self.best_pytorch_us,
            "source": self.source,
            "reason": self.reason,
            "timed": [asdict(one) for one in self.timed],
        }


def choice_report(
    pattern: Pattern,
    dtype: str,
    batch: int,
    *,
    batch_last: bool = False,
    device: torch.device | str = "cuda",
    repacked: bool = False,
    exact: bool | None = None,
    spec: DeviceSpec | None = None,
) -> ChoiceReport:
    """The choice for a product of contiguous operands, as far as it is known without computing.

    It is what was measured in this process or is recorded on disk; else what the cost models
    predict, which with ``KSOPT_TUNE=measure`` the first product may overrule.

    Args:
        pattern: support of K.
        dtype: such as "float16".
        batch: rows of x.
        batch_last: the layout.
        device: where it is computed.
        repacked: whether the weight changes from call to call, as in training.
        exact: for float32, whether to FP32 accuracy; None takes torch's setting at this moment.
        spec: predict for this device, which need not be here, and look up nothing.

    Raises:
        InvalidInputError: ``KSOPT_TUNE`` has an unknown value.

    Example:
        >>> h200 = DeviceSpec((9, 0), 132, 228 * 1024)
        >>> report = choice_report(Pattern(4, 64, 64, 16), "float16", 25_088, spec=h200)
        >>> report.way, report.measured_us
        ('wgmma16_streamed', None)
    """
    mode = settings.tuning()
    if mode == "measure" and torch.are_deterministic_algorithms_enabled():
        mode = "model"  # nothing that was measured is taken then, here or on a CPU
    place = torch.device(device)
    backend = backend_of(place.type if spec is None else "cuda")
    problem = Problem.of_factor(pattern, dtype, batch_last, is_exact(dtype, exact))
    key = backend.key(problem, batch)
    if spec is None:
        known = backend.measured(key, place, mode, repacked)
        if known is not None:
            return from_record(*known, repacked)
        spec = None if mode == "off" else backend.spec(place)
    chosen = backend.unmeasured(key, batch, spec, mode)
    return ChoiceReport(
        key,
        batch,
        chosen.way,
        chosen.config,
        chosen.predicted_us,
        None,
        (),
        chosen.source,
        chosen.reason,
    )


def from_record(record: Record, source: Source, repacked: bool = False) -> ChoiceReport:
    """The report of a measured choice.

    Args:
        record: what was.
        source: "measured" or "recorded".
        repacked: whether the weight changes from call to call.
    """
    chosen = record.chosen(repacked)
    return ChoiceReport(
        record.key,
        record.batch,
        chosen.way,
        chosen.config,
        chosen.predicted_us,
        chosen.median_us,
        record.timed,
        source,
        _why(record, chosen, repacked),
    )


def _why(record: Record, chosen: Timed, repacked: bool) -> str:
    reused = ("cached", "stored")
    rivals = [one for one in record.timed if not (repacked and one.weight in reused)]
    fastest = min(rivals, key=lambda one: one.median_us)
    words = [f"measured {chosen.median_us:.1f} us at batch {record.batch}"]
    if not record.key.problem.is_factor:
        apart = (
            "one launch per factor" if record.key.problem.second is None else "one plan per layer"
        )
        if chosen.way == PAIR:
            words.append(chosen.label)
            apart = "the kernels that are the fastest of each factor alone"
        words.append(_against_parts(rivals, chosen, apart))
        if chosen.way == MERGED:
            product = product_in_words(record.key.problem)
            words.append(f"its factors are multiplied to {product}")
        return "; ".join(words)
    pytorch = [one for one in rivals if one.way in BASELINES]
    ours = [one for one in rivals if one.way not in BASELINES]
    slower = chosen.median_us > fastest.median_us and fastest.way != chosen.way
    theirs_us, its_us = fastest.host_us or 0.0, chosen.host_us or math.inf
    if slower and its_us < theirs_us > fastest.median_us:
        words.append(
            f"{fastest.way} takes the device hardly less ({fastest.median_us:.1f} us), and the "
            f"host {theirs_us:.1f} us a call, where this takes {its_us:.1f}"
        )
    elif slower:
        words.append(
            f"not told apart from {fastest.way} ({fastest.median_us:.1f} us), and simpler or "
            "chosen before"
        )
    elif chosen.way not in BASELINES and pytorch:
        best = min(pytorch, key=lambda one: one.median_us)
        ratio = best.median_us / chosen.median_us if chosen.median_us > 0 else float("inf")
        words.append(
            f"{ratio:.2f} times as fast as the best of PyTorch, {best.way} "
            f"({best.median_us:.1f} us)"
        )
    elif ours:
        best = min(ours, key=lambda one: one.median_us)
        words.append(f"the best of ksopt's kernels, {best.way}, takes {best.median_us:.1f} us")
    else:
        words.append(f"the fastest of {len({one.way for one in rivals})} ways")
    if chosen.weight == "cached":
        words.append("its weight is prepared once a version")
    return "; ".join(words)


def _against_parts(rivals: Sequence[Timed], chosen: Timed, apart: str) -> str:
    """A sentence that compares one launch of a whole problem with several launches."""
    apart_us = min(one.median_us for one in rivals if one.way in APART)
    kernels = [one for one in rivals if one.way not in APART]
    if chosen.way not in APART:
        ratio = apart_us / chosen.median_us if chosen.median_us > 0 else math.inf
        return f"{ratio:.2f} times as fast as {apart} ({apart_us:.1f} us)"
    if not kernels:
        return "no kernel computes all of it"
    best = min(kernels, key=lambda one: one.median_us)
    return f"the best of the ways for all of it, {best.name}, takes {best.median_us:.1f} us"
