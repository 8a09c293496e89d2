"""The threads of the devices, which run units of work in the devices' processes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ksopt.errors import KsoptError
from ksopt.search.layer_request import LayerRequest
from regret.device_process import DeviceProcess, ProcessEndedError
from regret.rows import Searched, TimedWay
from regret.schedule import FINAL_S, Schedule, Unit

# Replacements of a device's process: a chain that ends one is not measured again.
_MOST_REPLACED = 5


@dataclass
class Work:
    """The work of the devices' threads.

    Args:
        schedule: Assigns the units.
        timeout_s: Seconds after ``began`` in which a unit may start; None for no limit.
        began: The start of the run, by ``time.monotonic()``.
        devices: Number of devices.
        failures: In sentences.
    """

    schedule: Schedule
    timeout_s: float | None
    began: float
    devices: int
    failures: list[str] = field(default_factory=list)

    def on(self, process: DeviceProcess) -> None:
        """Run the thread of one device."""
        replaced = 0
        try:
            while (left := self._seconds_left()) is None or left > 0:
                if left is not None and left < self.schedule.finals_take_s(self.devices) + FINAL_S:
                    self.schedule.end_early()
                unit = self.schedule.next(process.device)
                if unit is None:
                    return
                try:
                    self._do(unit, process)
                except ProcessEndedError as error:
                    if self.schedule.stopped:
                        return
                    self._note(str(error))
                    self.schedule.give_back(unit)
                    replaced += 1
                    if replaced > _MOST_REPLACED:
                        raise
                    process.again()
                except KsoptError as error:
                    self._note(f"{unit.dims}, {unit.kind}: {error}")
                    self.failures.append(f"{unit.dims}, {unit.kind}: {error}")
                    self.schedule.failed(unit)
        except BaseException as error:  # the main thread reports it
            self.failures.append(f"{type(error).__name__}: {error}")
        self.schedule.stop()

    def _do(self, unit: Unit, process: DeviceProcess) -> None:
        schedule, request = self.schedule, self.schedule.requests[unit.dims]
        if unit.kind == "search":
            left = self._seconds_left()
            if left is not None:  # its folder stores the measurements so far
                request = replace(request, timeout_s=max(left, 1e-3))
            answer = process.ask({"task": "search", "request": request.to_json()})
            if "stopped" in answer:
                schedule.give_back(unit)
                schedule.stop()
                return
            rows = [schedule.row(unit.dims, "search", row) for row in answer.pop("trials")]
            ways = [TimedWay(**way) for way in answer.pop("ways")]
            searched = Searched(unit.dims, trials=len(rows), **answer)
            schedule.done(unit, [row for row in rows if row is not None], searched, ways)
            summary = f"a search of {searched.trials} chains"
        elif unit.kind == "chains":
            self._measure(unit, request, process)
            summary = f"{len(unit.chains)} chains, {unit.stage}"
        else:
            self._hold_final(unit, request, process)
            summary = f"{len(unit.chains)} chains, final"
        spent = time.monotonic() - self.began
        print(f"{spent:5.0f} s  {unit.dims}: {summary}, on {process.device}", flush=True)

    def _measure(self, unit: Unit, request: LayerRequest, process: DeviceProcess) -> None:
        schedule, left = self.schedule, list(unit.chains)
        task = self._task("chains", unit, request) | {
            "next": [str(chain) for chain in schedule.soon(unit)],
            "seed": unit.seed,
        }
        try:
            for answer in process.ask_for_some(task):
                row = schedule.row(unit.dims, unit.stage, answer["row"])
                ways = [TimedWay(**way) for way in answer["ways"]]
                schedule.store([] if row is None else [row], ways)
                left.pop(0)
        except ProcessEndedError as error:
            if left and error.blames and not schedule.stopped:
                # Stored as failed, so that it does not end the next process, too.
                values = {"chain": str(left[0]), "device": process.device, "reason": str(error)}
                row = schedule.row(unit.dims, unit.stage, values)
                schedule.store([] if row is None else [row])
            raise
        schedule.done(unit)

    def _hold_final(self, unit: Unit, request: LayerRequest, process: DeviceProcess) -> None:
        began = time.monotonic()
        after = len(self.schedule.book.reference(unit.dims))
        times = process.ask(self._task("final", unit, request))["times"]
        each = (time.monotonic() - began) / len(unit.chains)
        dense = times.pop("dense")
        rows = [
            self.schedule.row(
                unit.dims,
                "final",
                {
                    "chain": name,
                    "latency_us": one["median_us"],
                    "p20_us": one["p20_us"],
                    "p80_us": one["p80_us"],
                    "dense_us": dense["median_us"],
                    "repeats": one["repeats"],
                    "seconds": each,
                    "device": process.device,
                    "after": after,
                },
            )
            for name, one in times.items()
        ]
        self.schedule.done(unit, [row for row in rows if row is not None])

    @staticmethod
    def _task(kind: str, unit: Unit, request: LayerRequest) -> dict[str, Any]:
        chains = [str(chain) for chain in unit.chains]
        return {"task": kind, "request": request.to_json(), "chains": chains}

    def _seconds_left(self) -> float | None:
        if self.timeout_s is None:
            return None
        return self.timeout_s - (time.monotonic() - self.began)

    @staticmethod
    def _note(sentence: str) -> None:
        print(f"search_regret.py: {sentence}", file=sys.stderr, flush=True)
