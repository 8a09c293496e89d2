"""Trials of a study whose measurements sleep: the cost of drawing, storing and sharing alone.

Each worker is a process with its own device that measures a chain in a fixed time. All else is
the search's own: its space, sampler, turns, heartbeats and storage. Workers are forked, because 64
processes that import torch would dominate the time. Their own work shares the machine's cores.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optuna
import torch

from ksopt.measure.measurement import Measurement
from ksopt.measure.roofline import Roofline
from ksopt.search import device_locks, metrics
from ksopt.search.device_locks import Presence
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective, Outcome
from ksopt.search.space import space
from ksopt.search.storage import Storage
from ksopt.search.trial_loop import TrialRun, Workplace, take_turns

_STUDY = "growth"
_DIMS = "768x3072"  # has enough chains for any study here
_ROOFLINE = Roofline("cpu", "float32", 1e10, 1e11, 2**27, 1024, "float32 GEMM")


@contextmanager
def _of_its_own(place: torch.device) -> Iterator[None]:
    """A stand-in for a device's lock: no other worker uses the device."""
    yield


class Sleeping(Objective):
    """An objective that sleeps and measures nothing."""

    def __init__(self, request: LayerRequest, sleep_s: float) -> None:
        self._request, self._sleep_s = request, sleep_s

    def measure(self, chain: Any, limit: float | None = None) -> Outcome:
        """Return a time proportional to the weights."""
        time.sleep(self._sleep_s)
        one = Measurement(chain.nnz / 1e3, chain.nnz / 1e3, chain.nnz / 1e3, 10)
        dense = Measurement(1e3, 1e3, 1e3, 10)
        values = {
            "latency_us": one.median_us,
            "dense_ratio": one.median_us / dense.median_us,
            "nnz": float(chain.nnz),
        }
        values |= dict.fromkeys(
            (metric.name for metric in metrics.objectives(self._request)), one.median_us
        )
        return Outcome(one, dense, 0.0, 0.0, self._sleep_s, values)


def of(url: str, trials: int, workers: int, sleep_s: float) -> Callable[[], str]:
    """The work of a study of ``trials`` trials by ``workers`` workers."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Each worker has its own device, so that none waits for another.
    device_locks.device = _of_its_own
    request = LayerRequest(_DIMS, batch=256, trials=trials, device="cpu")
    chains = space.build(request)
    names = [metric.direction for metric in metrics.objectives(request)]
    Storage(url).create(_STUDY, names)

    def worker(seed: int) -> int:
        ended = 0

        def on_trial(place: int, number: int) -> None:
            nonlocal ended
            ended += 1

        storage = Storage(url)
        with Presence() as presence:
            trial_run = TrialRun.of(
                request,
                storage.load(_STUDY),
                Workplace(torch.device("cpu"), _ROOFLINE, storage, presence),
                run=1,
                candidates=chains.candidates,
                steps=chains.steps,
                priors=[],
                weights=None,
                seed=seed,
            )
            trial_run.objective = Sleeping(request, sleep_s)
            take_turns([trial_run], on_trial, None)
        return ended

    def work() -> str:
        if workers == 1:
            worker(0)
        else:
            processes = [
                multiprocessing.get_context("fork").Process(target=worker, args=(seed,))
                for seed in range(workers)
            ]
            for one in processes:
                one.start()
            for one in processes:
                one.join()
            if any(one.exitcode for one in processes):
                raise RuntimeError("a worker failed")
        done = Storage(url).load(_STUDY).get_trials(deepcopy=False)
        complete = sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in done)
        return f"{complete} trials of {len(chains.candidates)} candidates"

    return work
