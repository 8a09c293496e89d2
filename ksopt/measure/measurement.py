"""Statistics of time samples: median, band, standard error, and comparison of two."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Quantile = Callable[[Sequence[float], float], float]
"""(ordered numbers, share) -> the value below which that share of them lies."""


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of ordered numbers lies, interpolated as numpy's default does.

    Example:
        >>> quantile([1.0, 2.0, 4.0], 0.75)
        3.0
    """
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quantile_sample(ordered: Sequence[float], share: float) -> float:
    """The quantile that is a sample itself, the one at or above the share.

    The rules by which candidates tie were fitted with it: between two samples, others would win.

    Example:
        >>> quantile_sample([1.0, 2.0, 4.0], 0.7)
        4.0
    """
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]


@dataclass(frozen=True)
class Measurement:
    """The time of one call with cold caches.

    Args:
        median_us: Median over the repeats, microseconds.
        p20_us: 20th percentile.
        p80_us: 80th percentile.
        repeats: Samples taken.
        calls_per_sample: Calls in one sample: more than 1 only where a call is too short for the
            clock; then all but the first find warm caches.
        given_up: Whether sampling stopped after the first rounds, because a rival was more than
            ``hopeless`` times as fast.
        is_host_late: Whether the host was late for the samples, so that they hold a part of its
            time; on CUDA alone.
    """

    median_us: float
    p20_us: float
    p80_us: float
    repeats: int
    calls_per_sample: int = 1
    given_up: bool = False
    is_host_late: bool = False

    @classmethod
    def of(
        cls,
        samples_us: Sequence[float],
        calls_per_sample: int = 1,
        *,
        given_up: bool = False,
        quantile: Quantile = quantile,
    ) -> Measurement:
        """The summary of samples in microseconds per call.

        Example:
            >>> Measurement.of([3.0, 1.0, 2.0, 5.0, 4.0]).median_us
            3.0
        """
        ordered = sorted(samples_us)
        return cls(
            median_us=quantile(ordered, 0.5),
            p20_us=quantile(ordered, 0.2),
            p80_us=quantile(ordered, 0.8),
            repeats=len(ordered),
            calls_per_sample=calls_per_sample,
            given_up=given_up,
        )

    @property
    def noise(self) -> float:
        """Width of the band that holds the middle 60 % of the samples, over the median."""
        return (self.p80_us - self.p20_us) / self.median_us if self.median_us > 0 else 0.0

    @property
    def standard_error(self) -> float:
        """The standard error of the median, as a share of it, for normal samples.

        Their middle 60 % would then span 1.683 standard deviations, and the median's own deviation
        would be 1.2533 / sqrt(n) of theirs.
        """
        return 1.2533 / 1.683 * self.noise / math.sqrt(self.repeats)

    def each_of(self, calls: int) -> Measurement:
        """The measurement of one call, where the timed function makes this many.

        Example:
            >>> Measurement(30.0, 20.0, 50.0, 9).each_of(10).median_us
            3.0
        """
        return replace(self.scaled(1 / calls), calls_per_sample=self.calls_per_sample * calls)

    def scaled(self, by: float) -> Measurement:
        """The measurement at a clock ``1 / by`` times as fast.

        Example:
            >>> Measurement(30.0, 20.0, 50.0, 9).scaled(2).p80_us
            100.0
        """
        return replace(
            self,
            median_us=by * self.median_us,
            p20_us=by * self.p20_us,
            p80_us=by * self.p80_us,
        )


class Comparison(enum.Enum):
    """The result of comparing two measurements; the value is a phrase for a sentence."""

    FASTER = "faster"
    SLOWER = "slower"
    WITHIN_NOISE = "within noise"


def compare(this: Measurement, other: Measurement) -> Comparison:
    """Whether ``this`` is faster or slower than ``other``, or cannot be distinguished from it.

    They are distinguished when each median lies outside the other's band from p20 to p80. That is
    stricter than a test of the medians, and meant to be: the band is what the next run will show.

    Example:
        >>> quick, slow = Measurement(10, 9, 11, 50), Measurement(12, 11.5, 13, 50)
        >>> compare(quick, slow), compare(slow, quick), compare(quick, quick)
        (<Comparison.FASTER: 'faster'>, <Comparison.SLOWER: 'slower'>, \
<Comparison.WITHIN_NOISE: 'within noise'>)
    """
    if this.median_us < other.p20_us and this.p80_us < other.median_us:
        return Comparison.FASTER
    if other.median_us < this.p20_us and other.p80_us < this.median_us:
        return Comparison.SLOWER
    return Comparison.WITHIN_NOISE
