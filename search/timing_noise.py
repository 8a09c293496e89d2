"""Detection of timings that other work of the machine disturbed."""

from __future__ import annotations

from ksopt.measure.timing import Measurement
from ksopt.search import suspect_dense
from ksopt.search.report import phrases
from ksopt.search.results import Finalist

_MOST_NOISE = 0.5
"""Spread over the median above which reports warn."""


def is_noisy(*times: Measurement) -> bool:
    """Whether the repeats of any measurement spread widely."""
    return max(one.noise for one in times) > _MOST_NOISE


def warning(finalist: Finalist) -> str:
    """Warning if a finalist's time or its dense layer's is doubtful; else empty.

    A time is doubtful if it spreads widely, or if a chain took far less in its trial.
    """
    alone_us = finalist.in_trial_us
    if is_noisy(finalist.latency, finalist.dense):
        noise = max(finalist.latency.noise, finalist.dense.noise)
        seen = f"The middle 60% of the times spread over {100 * noise:.0f}% of their median."
    elif alone_us and suspect_dense.is_suspect(finalist.latency.median_us, alone_us):
        seen = f"In its trial the chain took {phrases.microseconds(alone_us)}."
    else:
        return ""
    return f"{seen} Other work may have used the machine: measure again when it is idle."
