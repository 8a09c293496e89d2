"""``python -m ksopt.search.worker``: a process that measures for a search.

It reads one JSON document, the task, from stdin and answers with JSON lines. Tasks are: a share of
the trials of studies; the final, and after it the finalists' energy and the times of the best in
other surroundings, each in its own process. It
ends with stdin, so it does not outlive its parent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from types import FrameType
from typing import Any

import optuna
import torch

from ksopt.errors import KsoptError
from ksopt.kernels.compile_ahead import Compilers, Target, affordable
from ksopt.measure.device_health import DeviceLostError
from ksopt.measure.energy import Meter
from ksopt.measure.roofline import Roofline
from ksopt.operators import registry
from ksopt.patterns.size import Budget
from ksopt.search import keyboard_interrupts, study_store, surrounded_finals, write_errors
from ksopt.search.device_locks import Presence
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.space.space import Step
from ksopt.search.trained_weights import TrainedWeights
from ksopt.search.trial_loop import TrialRun, Workplace, take_turns
from ksopt.system import user_code, worker_process
from ksopt.system.worker_process import Answer

# Time to record that a trial was interrupted.
_LAST_WORDS_S = 3.0
# Time for a destructor to end.
_AGAIN_S = 0.01


def trials(task: Mapping[str, Any], answer: Answer) -> None:
    """Measure a share of the trials of each study.

    Answers ``{"trial": number, "share": place}`` after each, and ``{"in_time": bool}`` at the end.
    """
    device, roofline = torch.device(task["device"]), Roofline(**task["roofline"])
    limit = task["seconds"]
    deadline = None if limit is None else time.monotonic() + limit
    count = affordable(task["workers"])
    # The shares are of one search and have this in common.
    request = _request(task["shares"][0])
    storage = study_store.storage_of(request)
    in_words = write_errors.in_words(storage.url, storage.file)
    with in_words, Presence() as presence, Compilers(Target.of(device), count) as compilers:
        meter = Meter(device) if request.energy else None
        workplace = Workplace(device, roofline, storage, presence, compilers, meter)
        trial_runs = [_trial_run(share, workplace) for share in task["shares"]]
        in_time = take_turns(
            trial_runs, lambda place, number: answer({"trial": number, "share": place}), deadline
        )
    answer({"in_time": in_time})


def _trial_run(share: Mapping[str, Any], workplace: Workplace) -> TrialRun:
    request, device = _request(share), workplace.device
    return TrialRun.of(
        request,
        workplace.storage.load(request.study),
        workplace,
        run=share["run"],
        candidates=[registry.parse(text) for text in share["candidates"]],
        steps=[_step(step) for step in share["steps"]],
        priors=[(origin, registry.parse(text)) for origin, text in share["priors"]],
        weights=TrainedWeights.of(request, device),
        seed=share["seed"],
        operand_seed=share["seed"],
        model=CostModel.of(request, device),
    )


def _request(task: Mapping[str, Any]) -> LayerRequest:
    """The request of a task; the user's modules that it names are imported first."""
    user_code.import_plugins(task["request"]["plugins"], sys.stderr)
    return LayerRequest.from_json(task["request"])


def _step(value: Mapping[str, Any]) -> Step:
    return Step(Budget(**value["budget"]), value["least"], value["requested"])


def final(task: Mapping[str, Any], answer: Answer) -> None:
    """Time chains against each other and dense; answers ``{"times": {name: Measurement}}``."""
    request = _request(task)
    objective = Objective(request, torch.device(task["device"]))
    times = objective.final([registry.parse(text) for text in task["chains"]], task["seconds"])
    answer({"times": {name: asdict(one) for name, one in times.items()}})


def energy(task: Mapping[str, Any], answer: Answer) -> None:
    """Energy of chains and dense; answers ``{"millijoules": {name: value}}``."""
    request, device = _request(task), torch.device(task["device"])
    objective = Objective(request, device, meter=Meter(device))
    chains = [registry.parse(text) for text in task["chains"]]
    answer({"millijoules": objective.energy(chains)})


def surrounded(task: Mapping[str, Any], answer: Answer) -> None:
    """Time chains in several surroundings; answers ``{"surrounded": [SurroundedTimes]}``."""
    answer({"surrounded": surrounded_finals.measured(task, _request(task))})


TASKS = {"trials": trials, "final": final, "energy": energy, "surrounded": surrounded}


def main() -> int:
    """Run the task from stdin."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the parent handles Ctrl-C, and then ends this process
    answer = worker_process.answers()
    task = worker_process.first_task()
    if task is None:
        return 0  # this process was not needed
    signal.signal(signal.SIGTERM, _interrupt)
    worker_process.listen(code=1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with keyboard_interrupts.dropped(_interrupt_again):
            return _done(task, answer)
    except KeyboardInterrupt:  # also while it answers with an error
        return 130
    finally:
        _ended.append(True)


def _done(task: Mapping[str, Any], answer: Answer) -> int:
    """Run a task; return the exit code."""
    try:
        if task["device"].startswith("cuda"):
            torch.cuda.set_device(task["device"])  # memory and streams of no other device
        TASKS[task["task"]](task, answer)
    except DeviceLostError as error:  # another process takes its place
        print(f"ksopt: {error}", file=sys.stderr)
        return 1
    except KsoptError as error:  # the parent reports it
        answer({"error": str(error)})
        return 1
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


_interrupted: list[bool] = []
# No signal arrives between the end of a task and this: Python checks for signals after calls only.
_ended: list[bool] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _ended:  # an exception would print a traceback now
        os._exit(130)
    if _interrupted:
        return
    _interrupted.append(True)
    # Long-running C code does not react: then this ends the process.
    timer = threading.Timer(_LAST_WORDS_S, os._exit, [130])
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt


def _interrupt_again() -> None:
    """Repeat soon an interrupt that was raised in a destructor."""
    _interrupted.clear()
    timer = threading.Timer(_AGAIN_S, os.kill, [os.getpid(), signal.SIGTERM])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
