"""The final: the best chains timed against each other and dense, in a process that did no more.

What the trials before it left behind (memory, caches, clocks of a device at work, kernels kept for
weights that are gone) is no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ksopt.bench.timing import Measurement
from ksopt.pattern import Chain
from ksopt.search import locks, objective
from ksopt.search.processes import Spare
from ksopt.search.request import SearchRequest


def final(
    request: SearchRequest, device: torch.device, chains: Sequence[Chain], spare: Spare
) -> dict[str, Measurement]:
    """Time chains against each other and the dense layer in turns, in a fresh process.

    Args:
        request: With its batch resolved.
        device: Where.
        chains: The finalists.
        spare: The process.

    Returns:
        A Measurement by the chain's text, and one under "dense".

    Raises:
        KsoptError: The process failed.
    """
    task = {
        "task": "final",
        "request": request.to_json(),
        "device": str(device),
        "chains": [str(chain) for chain in chains],
        "seconds": objective.FINAL_SECONDS,
    }
    with locks.device(device):
        answer = spare.ask(task)
    return {name: Measurement(**found) for name, found in answer["times"].items()}
