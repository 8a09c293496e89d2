"""A process on one device that runs the tasks of its parent.

It reads one JSON document per line from stdin and answers each with one on stdout: a search, some
chains of the reference (each reported in a separate line before the answer), or a final. It ends
when stdin does, and by itself if the device has failed: another process can continue there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ksopt.errors import KsoptError
from ksopt.kernels.compile_ahead import Compilers, Target
from ksopt.measure import device as devices
from ksopt.measure import device_health
from ksopt.patterns.chain import Chain, Pattern
from ksopt.search import device_locks, finals
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective
from ksopt.search.problems import problem_of
from ksopt.search.request import SearchRequest
from ksopt.search.study import DEFAULT_BATCH, run_search
from ksopt.search.worker_processes import SpareProcess
from ksopt.system import worker_process

# A chain of the reference that is slower than this many times the dense layer gets two repeats.
_HOPELESS = 3.0


class Bench:
    """The tasks of a device.

    Args:
        device: torch's name.
    """

    def __init__(self, device: str) -> None:
        self.device = devices.resolve(device)
        self._compilers = Compilers(Target.of(self.device))
        self._spare = SpareProcess.of(self.device)
        self._reported: set[Pattern] = set()  # patterns whose ways were reported

    def hello(self) -> dict[str, Any]:
        """The device's name, and the parameters of its cost model."""
        target = Target.of(self.device)
        return {
            "device": devices.record(self.device).name,
            "batch": DEFAULT_BATCH[self.device.type],
            "target": None if target is None else asdict(target),
        }

    def search(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Run a search as a user would, in a separate folder; an earlier one is continued."""
        searched = run_search(SearchRequest.of_layer(self._request(task)))
        if searched.stopped is not None:
            return {"stopped": searched.stopped}
        (result,) = searched.layers
        trials = [
            trial for trial in result.trials if trial.state != "lost"
        ]  # lost ones were redone
        held = sum(trial.seconds or 0.0 for trial in trials)
        return {
            "chosen": {
                answer.budget.text: None
                if answer.chosen is None
                else str(answer.chosen.facts.chain)
                for answer in result.recommendations
            },
            "trials": [_trial_row(trial, str(self.device)) for trial in trials],
            "ways": self._ways(
                Objective(result.request, self.device),
                [t.facts.chain for t in trials if isinstance(t.facts.chain, Chain)],
            ),
            "device_seconds": held + (result.final_seconds or 0.0),
            "final_seconds": result.final_seconds,
            "seconds": searched.seconds if result.run == 1 else None,
            "device_name": result.device.name,
            "versions": {"ksopt": result.device.ksopt, "torch": result.device.torch},
        }

    def chains(
        self, task: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        """Measure chains, each in turns with the dense layer; compile ``next`` meanwhile.

        Each is reported at once, so that a killed process loses one at most.
        """
        request = self._request(task)
        chains = [Chain.parse(text) for text in task["chains"]]
        ahead = [*chains, *map(Chain.parse, task["next"])]
        assert request.batch is not None
        self._compilers.soon([problem_of(chain, request) for chain in ahead], request.batch)
        objective = Objective(request, self.device, seed=task["seed"])
        for chain in chains:
            row = self._measured(objective, chain)
            ways = self._ways(objective, [chain]) if row.get("reason") is None else []
            say({"row": row, "ways": ways})
            if row.get("reason") is not None:
                device_health.raise_if_lost(self.device, chain)
        return {"measured": len(chains)}

    def final(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Time chains and the dense layer in turns, in a process that did nothing else."""
        chains = [Chain.parse(text) for text in task["chains"]]
        times = finals.final(self._request(task), self.device, chains, self._spare)
        self._spare.close()
        self._spare = SpareProcess.of(self.device)
        return {"times": {name: asdict(one) for name, one in times.items()}}

    def _request(self, task: Mapping[str, Any]) -> LayerRequest:
        return LayerRequest.from_json({**task["request"], "device": str(self.device)})

    def _measured(self, objective: Objective, chain: Chain) -> dict[str, Any]:
        row: dict[str, Any] = {"chain": str(chain), "device": str(self.device)}
        try:
            with device_locks.device(self.device):
                outcome = objective.measure(chain, _HOPELESS)
        except (KsoptError, RuntimeError) as error:
            return {**row, "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
        stopped_early = outcome.latency.given_up
        return {
            **row,
            "latency_us": outcome.latency.median_us,
            "p20_us": outcome.latency.p20_us,
            "p80_us": outcome.latency.p80_us,
            "dense_us": outcome.dense.median_us,
            "repeats": outcome.latency.repeats,
            "factors_us": outcome.factors_us,
            "reason": "given up after its first repeats" if stopped_early else None,
            "seconds": outcome.seconds,
        }

    def _ways(self, objective: Objective, chains: Iterable[Chain]) -> list[dict[str, Any]]:
        """The timings of the choice of the factors' kernels, once per factor."""
        ways = []
        for chain in chains:
            for pattern, record in zip(chain, objective.choices(chain), strict=False):
                if record is None or pattern in self._reported:
                    continue
                self._reported.add(pattern)
                ways += [
                    {
                        "pattern": str(pattern),
                        "way": timed.label,
                        "predicted_us": timed.predicted_us,
                        "us": timed.median_us,
                        "chosen": place == record.cached,
                        "device": str(self.device),
                    }
                    for place, timed in enumerate(record.timed)
                ]
        return ways


def _trial_row(trial: Any, device: str) -> dict[str, Any]:
    latency, dense = trial.latency, trial.dense
    return {
        "chain": str(trial.facts.chain),
        "latency_us": None if latency is None else latency.median_us,
        "p20_us": None if latency is None else latency.p20_us,
        "p80_us": None if latency is None else latency.p80_us,
        "dense_us": None if dense is None else dense.median_us,
        "repeats": 0 if latency is None else latency.repeats,
        "reason": trial.reason,
        "seconds": trial.seconds or 0.0,
        "device": device,
    }


def main() -> int:
    """Run the tasks from stdin until it ends."""
    say = worker_process.answers()
    first = worker_process.first_task()
    if first is None:
        return 0  # the parent has ended
    queue = worker_process.listen()  # this process now ends with its parent
    if first["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, first["cores"])  # inherited by its compilers: each device's share
    if first["device"].startswith("cuda"):
        torch.cuda.set_device(first["device"])
    Path(first["folder"]).mkdir(parents=True, exist_ok=True)
    bench = Bench(first["device"])
    tasks = {
        "search": bench.search,
        "chains": lambda task: bench.chains(task, say),
        "final": bench.final,
    }
    say(bench.hello())
    while True:
        task = queue.get()
        try:
            say(tasks[task["task"]](task))
        except device_health.DeviceLostError as error:
            say({"lost": str(error)})
            os._exit(1)
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    sys.exit(main())
