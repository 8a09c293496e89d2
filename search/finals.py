"""The final: the best chains timed against each other and dense, in a fresh process.

It is unaffected by the trials before it (memory, caches, clocks of a busy device, cached kernels of
old weights).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ksopt.measure.timing import Measurement
from ksopt.operators.registry import Replacement
from ksopt.search import device_locks, objectives, suspect_dense
from ksopt.search.layer_request import LayerRequest
from ksopt.search.report import phrases
from ksopt.search.worker_processes import SpareProcess

_MOST_FINALS = 3


def energy(
    request: LayerRequest, device: torch.device, chains: Sequence[Replacement]
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
    with SpareProcess() as spare, device_locks.device(device):
        used_mj: dict[str, float] = spare.ask(task)["millijoules"]
    return used_mj


def final(
    request: LayerRequest, device: torch.device, chains: Sequence[Replacement], spare: SpareProcess
) -> dict[str, Measurement]:
    """Time chains against each other and the dense layer in turns, in a fresh process.

    Args:
        request: With its batch resolved.
        device: The device.
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
        "seconds": objectives.FINAL_SECONDS,
    }
    with device_locks.device(device):
        answer = spare.ask(task)
    return {name: Measurement(**times) for name, times in answer["times"].items()}


def trusted(
    request: LayerRequest,
    device: torch.device,
    chains: Sequence[Replacement],
    spare: SpareProcess,
    expected_us: float,
    note: Callable[[str], None],
) -> dict[str, Measurement]:
    """The final; repeated in another process if its dense layer was suspiciously slow.

    On a busy machine all threads of a process can stay on one core. Work that waits for threads,
    the dense layer above all, then takes many times as long, steadily, and any chain looks fast. Of
    at most three finals the one with the fastest dense layer counts: it is the hardest for chains.

    Args:
        request: As in `final`.
        device: As in `final`.
        chains: As in `final`.
        spare: Of the first final.
        expected_us: The dense layer's latency in the trials.
        note: Called with a message before another final.
    """
    times = final(request, device, chains, spare)
    for _ in range(_MOST_FINALS - 1):
        dense_us = times[objectives.DENSE].median_us
        if not suspect_dense.is_suspect(dense_us, expected_us):
            break
        note(
            f"the dense layer took {phrases.microseconds(dense_us)} in the final and "
            f"{phrases.microseconds(expected_us)} in the trials: the final is held again"
        )
        with SpareProcess() as another:
            again = final(request, device, chains, another)
        times = min(times, again, key=lambda one: one[objectives.DENSE].median_us)
    return times
