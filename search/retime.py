"""The final: the best chains timed against each other and dense, in a process that did no more.

What the trials before it left behind (memory, caches, clocks of a device at work, kernels kept for
weights that are gone) is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ksopt.bench.timing import Measurement
from ksopt.pattern import Chain
from ksopt.search import doubt, locks, objective, words
from ksopt.search.processes import Spare
from ksopt.search.request import SearchRequest

_MOST_FINALS = 3


def energy(
    request: SearchRequest, device: torch.device, chains: Sequence[Chain]
) -> dict[str, float]:
    """Energy of a call of each chain and of the dense layer, in a fresh process.

    Returns:
        Millijoules by the chain's text, and under "dense".

    Raises:
        KsoptError: The process failed.
    """
    task = {
        "task": "energy",
        "request": request.to_json(),
        "device": str(device),
        "chains": [str(chain) for chain in chains],
    }
    with Spare() as spare, locks.device(device):
        found: dict[str, float] = spare.ask(task)["millijoules"]
    return found


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


def trusted(
    request: SearchRequest,
    device: torch.device,
    chains: Sequence[Chain],
    spare: Spare,
    expected_us: float,
    note: Callable[[str], None],
) -> dict[str, Measurement]:
    """The final; held again, in another process, where its dense layer was strangely slow.

    On a busy machine a process can find its threads on one core for all of its life. Whatever waits
    for threads, the dense layer above all, then takes many times as long, steadily, and any chain
    looks fast. Of at most three finals that whose dense layer was fastest counts: it is the one
    that is hardest on the chains.

    Args:
        request: As in `final`.
        device: As in `final`.
        chains: As in `final`.
        spare: Of the first final.
        expected_us: The dense layer's latency in the trials.
        note: Told of another final.
    """
    found = final(request, device, chains, spare)
    for _ in range(_MOST_FINALS - 1):
        dense_us = found[objective.DENSE].median_us
        if not doubt.is_suspect(dense_us, expected_us):
            break
        note(
            f"the dense layer took {words.microseconds(dense_us)} in the final and "
            f"{words.microseconds(expected_us)} in the trials: the final is held again"
        )
        with Spare() as another:
            again = final(request, device, chains, another)
        found = min(found, again, key=lambda one: one[objective.DENSE].median_us)
    return found
