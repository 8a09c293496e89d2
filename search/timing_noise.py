"""Whether other work of the machine held back what was timed."""

from __future__ import annotations

from ksopt.measure.timing import Measurement
from ksopt.search import suspect_dense
from ksopt.search.report import phrases
from ksopt.search.results import Finalist

_MOST_NOISE = 0.5
"""Spread over the median at which a reader is warned."""


def is_noisy(*times: Measurement) -> bool:
    """Whether the repeats of any of them spread widely."""
    return max(one.noise for one in times) > _MOST_NOISE


def why(finalist: Finalist) -> str:
    """What a reader is told where a time cannot be trusted; empty where both can.

    It spreads widely, or a chain takes it in the final and took far less in its trial.
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
