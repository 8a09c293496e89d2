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
from ksopt.search import device_locks, objectives, recommend
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective
from ksopt.search.problems import problem_of
from ksopt.search.results import Finalist, Recommendation, TrialRecord, Verdict
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.space.space import Step
from ksopt.search.surrounded import SurroundedTimes, is_won, placed
from ksopt.search.surroundings import USUAL, may_be_surrounded
from ksopt.search.worker_processes import SpareProcess

CHAINS_PER_STEP = 2
"""Chains of each step that are timed in other surroundings: the fastest alone."""
PREDICTED_CHAINS = 2
"""Chains that are timed in some surroundings because they are predicted to be fastest there."""
# For the predictions of one of the surroundings, which take about 10 ms each.
_SECONDS = 1.5


def chains_of(
    request: LayerRequest,
    device: torch.device,
    steps: Sequence[Step],
    answers: Sequence[Recommendation],
    standing: Sequence[Finalist],
    trials: Sequence[TrialRecord],
) -> dict[Surroundings, list[Chain]]:
    """The chains to time in each of `USUAL`.

    They are the fastest of each step, alone, and of all that were measured those that the cost
    model predicts to be fastest there: one launch of three siblings has other tiles than that of
    one layer, and other chains are fast with them.

    None if a chain is worth using alone, if something held back the dense layer, and for a layer
    that is not timed alone.

    Args:
        request: Of the layer, with its batch resolved.
        device: The device.
        steps: Of its space.
        answers: Of the layer alone.
        standing: Its finalists, fastest first.
        trials: The admitted trials.
    """
    is_settled = any(is_won(one) or one.verdict is Verdict.UNJUDGED for one in answers)
    if is_settled or not may_be_surrounded(request.options) or not computes_surroundings(device):
        return {}
    fastest: dict[Chain, None] = {}
    for step in steps:
        inside = [one.facts.chain for one in standing if step.holds(one.facts.nnz)]
        own = [chain for chain in inside if isinstance(chain, Chain)]
        fastest |= dict.fromkeys(own[:CHAINS_PER_STEP])
    if not fastest:
        return {}
    complete = [
        (trial.ratio, trial.number, trial.facts.chain)
        for trial in recommend.within_error(trials, request.max_error)
        if trial.ratio is not None and any(step.holds(trial.facts.nnz) for step in steps)
    ]
    # The fastest alone first: if the time is up, those are predicted that are probably fastest.
    ranked = [chain for *_, chain in sorted(complete) if isinstance(chain, Chain)]
    measured = list(dict.fromkeys(ranked))
    chains: dict[Surroundings, list[Chain]] = {}
    for around in USUAL:
        model = CostModel.of(_surrounded(request, around), device)
        there = [] if model is None else model.fastest(measured, PREDICTED_CHAINS, _SECONDS)
        own = [chain for chain in there if isinstance(chain, Chain)]
        chains[around] = list(fastest | dict.fromkeys(own))
    return chains


def computes_surroundings(device: torch.device) -> bool:
    """Whether kernels of a device compute a chain with its epilogue and siblings in one launch."""
    return backend_of(device.type).spec(device) is not None


def measure(
    request: LayerRequest,
    device: torch.device,
    chains: Mapping[Surroundings, Sequence[Chain]],
    compilers: Compilers,
    note: Callable[[str], None],
) -> tuple[SurroundedTimes, ...]:
    """Time chains in some surroundings, in one fresh process.

    A process that fails costs these times alone: the search has its answer without them.

    Args:
        request: Of the layer alone, with its batch resolved.
        device: The device.
        chains: The chains of each of the surroundings.
        compilers: Compile their kernels while the process begins, if possible.
        note: Called with a message if the process fails, and of each chain that is left out.

    Returns:
        The times in each of the surroundings; none if the process failed.
    """
    assert request.batch is not None
    for around, several in chains.items():
        problems = [problem_of(chain, _surrounded(request, around)) for chain in several]
        compilers.soon(problems, request.batch)
    task = {
        "task": "surrounded",
        "request": request.to_json(),
        "device": str(device),
        "surroundings": [
            {**around.to_json(), "chains": [str(chain) for chain in several]}
            for around, several in chains.items()
        ],
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
    every = []
    for value in task["surroundings"]:
        around = Surroundings.from_json(value)
        chains = [registry.parse(text) for text in value["chains"]]
        every.append(_times(request, around, device, chains, task["seconds"]).to_json())
    return every


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
