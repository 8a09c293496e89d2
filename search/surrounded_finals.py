"""Finals of a layer's best chains in the surroundings in which such layers usually occur.

They are held only where no chain is worth using alone, for a few chains, on a device whose kernels
compute a chain with its surroundings in one launch: elsewhere surroundings cost both sides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ksopt.errors import KsoptError
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.compile_ahead import Compilers
from ksopt.measure.device_health import DeviceLostError
from ksopt.operators import registry
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain
from ksopt.patterns.surroundings import Surroundings
from ksopt.search import device_locks, objectives
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective
from ksopt.search.problems import problem_of
from ksopt.search.results import Finalist, Recommendation, Verdict
from ksopt.search.space.space import Step
from ksopt.search.surrounded import SurroundedTimes, is_won, placed
from ksopt.search.surroundings import USUAL, may_be_surrounded
from ksopt.search.worker_processes import SpareProcess

CHAINS_PER_STEP = 2
"""Chains of each step that are timed in other surroundings."""


def chains_of(
    request: LayerRequest,
    device: torch.device,
    steps: Sequence[Step],
    answers: Sequence[Recommendation],
    standing: Sequence[Finalist],
) -> list[Chain]:
    """The chains to time in other surroundings: the fastest of each step, alone.

    None if a chain is worth using alone, if something held back the dense layer, and for a layer
    that is not timed alone.

    Args:
        request: Of the layer.
        device: The device.
        steps: Of its space.
        answers: Of the layer alone.
        standing: Its finalists, fastest first.
    """
    is_settled = any(is_won(one) or one.verdict is Verdict.UNJUDGED for one in answers)
    if is_settled or not may_be_surrounded(request.options) or not computes_surroundings(device):
        return []
    chains: dict[Chain, None] = {}
    for step in steps:
        inside = [one.facts.chain for one in standing if step.holds(one.facts.nnz)]
        own = [chain for chain in inside if isinstance(chain, Chain)]
        chains |= dict.fromkeys(own[:CHAINS_PER_STEP])
    return list(chains)


def computes_surroundings(device: torch.device) -> bool:
    """Whether kernels of a device compute a chain with its epilogue and siblings in one launch."""
    return backend_of(device.type).spec(device) is not None


def measure(
    request: LayerRequest,
    device: torch.device,
    chains: Sequence[Chain],
    compilers: Compilers,
    note: Callable[[str], None],
) -> tuple[SurroundedTimes, ...]:
    """Time chains in each of the usual surroundings, in one fresh process.

    A process that fails costs these times alone: the search has its answer without them.

    Args:
        request: Of the layer alone, with its batch resolved.
        device: The device.
        chains: The chains.
        compilers: Compile their kernels while the process begins, if possible.
        note: Called with a message if the process fails, and of each chain that is left out.

    Returns:
        The times in each of `USUAL`; none if the process failed.
    """
    assert request.batch is not None
    for around in USUAL:
        problems = [problem_of(chain, _surrounded(request, around)) for chain in chains]
        compilers.soon(problems, request.batch)
    task = {
        "task": "surrounded",
        "request": request.to_json(),
        "device": str(device),
        "chains": [str(chain) for chain in chains],
        "surroundings": [around.to_json() for around in USUAL],
        "seconds": objectives.FINAL_SECONDS,
    }
    try:
        with SpareProcess() as spare, device_locks.device(device):
            answer = spare.ask(task)
    except KsoptError as error:
        note(f"{request.size} was timed alone only: {error}")
        return ()
    times = tuple(map(SurroundedTimes.from_json, answer["surrounded"]))
    for one in times:
        for left_out in one.left_out:
            note(f"{request.size}, {placed(one.around)}: left out {left_out}")
    return times


def measured(task: Mapping[str, Any], request: LayerRequest) -> list[dict[str, Any]]:
    """The answer to the task of `measure`: in the process that measures.

    Args:
        task: The task.
        request: Its request.
    """
    device = torch.device(task["device"])
    chains = [registry.parse(text) for text in task["chains"]]
    every = map(Surroundings.from_json, task["surroundings"])
    return [_times(request, around, device, chains, task["seconds"]).to_json() for around in every]


def _times(
    request: LayerRequest,
    around: Surroundings,
    device: torch.device,
    chains: Sequence[Replacement],
    seconds: float,
) -> SurroundedTimes:
    """Times of the chains that are right in some surroundings: other kernels compute them there."""
    right, reasons = [], []
    try:
        objective = Objective(_surrounded(request, around), device)
        for chain in chains:
            try:
                objective.check(chain)
                right.append(chain)
            except (KsoptError, RuntimeError) as error:
                if isinstance(error, DeviceLostError):
                    raise
                reasons.append(f"{chain}: {_first_line(error)}")
        if not right:
            return SurroundedTimes(around, reason="; ".join(reasons))
        return SurroundedTimes(around, objective.final(right, seconds), left_out=tuple(reasons))
    except torch.OutOfMemoryError as error:
        return SurroundedTimes(around, reason=_first_line(error))


def _surrounded(request: LayerRequest, around: Surroundings) -> LayerRequest:
    return replace(request, epilogue=around.epilogue, siblings=around.siblings)


def _first_line(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {first}"
