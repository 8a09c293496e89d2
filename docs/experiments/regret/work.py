"""What the devices' threads do: ask a device's process for one unit after the other."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ksopt.errors import KsoptError
from ksopt.search.layer_request import LayerRequest
from regret.asked import Asked, ProcessEndedError
from regret.rows import Searched, TimedWay
from regret.schedule import FINAL_S, Schedule, Unit

# Times that a device's process is replaced: a chain that ends one is not measured again.
_MOST_REPLACED = 5


@dataclass
class Work:
    """What the devices' threads do.

    Args:
        schedule: What comes next.
        timeout_s: Seconds after ``began`` in which something may begin; None for no limit.
        began: When the run began, of ``time.monotonic()``.
        devices: How many there are.
        failures: What went wrong, in sentences.
    """

    schedule: Schedule
    timeout_s: float | None
    began: float
    devices: int
    failures: list[str] = field(default_factory=list)

    def on(self, asked: Asked) -> None:
        """One device's thread."""
        replaced = 0
        try:
            while (left := self._seconds_left()) is None or left > 0:
                if left is not None and left < self.schedule.finals_take_s(self.devices) + FINAL_S:
                    self.schedule.end_early()
                unit = self.schedule.next(asked.device)
                if unit is None:
                    return
                try:
                    self._do(unit, asked)
                except ProcessEndedError as error:
                    if self.schedule.stopped:
                        return
                    self._note(str(error))
                    self.schedule.give_back(unit)
                    replaced += 1
                    if replaced > _MOST_REPLACED:
                        raise
                    asked.again()
                except KsoptError as error:
                    self._note(f"{unit.dims}, {unit.kind}: {error}")
                    self.failures.append(f"{unit.dims}, {unit.kind}: {error}")
                    self.schedule.failed(unit)
        except BaseException as error:  # the main thread tells it
            self.failures.append(f"{type(error).__name__}: {error}")
        self.schedule.stop()

    def _do(self, unit: Unit, asked: Asked) -> None:
        schedule, request = self.schedule, self.schedule.requests[unit.dims]
        if unit.kind == "search":
            left = self._seconds_left()
            if left is not None:  # what it measured until then is kept in its folder
                request = replace(request, timeout_s=max(left, 1e-3))
            answer = asked.ask({"task": "search", "request": request.to_json()})
            if "stopped" in answer:
                schedule.give_back(unit)
                schedule.stop()
                return
            rows = [schedule.row(unit.dims, "search", row) for row in answer.pop("trials")]
            ways = [TimedWay(**way) for way in answer.pop("ways")]
            found = Searched(unit.dims, trials=len(rows), **answer)
            schedule.done(unit, [row for row in rows if row is not None], found, ways)
            said = f"a search of {found.trials} chains"
        elif unit.kind == "chains":
            self._measure(unit, request, asked)
            said = f"{len(unit.chains)} chains, {unit.stage}"
        else:
            self._hold_final(unit, request, asked)
            said = f"{len(unit.chains)} chains, final"
        spent = time.monotonic() - self.began
        print(f"{spent:5.0f} s  {unit.dims}: {said}, on {asked.device}", flush=True)

    def _measure(self, unit: Unit, request: LayerRequest, asked: Asked) -> None:
        schedule, left = self.schedule, list(unit.chains)
        task = self._task("chains", unit, request) | {
            "next": [str(chain) for chain in schedule.soon(unit)],
            "seed": unit.seed,
        }
        try:
            for answer in asked.ask_for_some(task):
                row = schedule.row(unit.dims, unit.stage, answer["row"])
                ways = [TimedWay(**way) for way in answer["ways"]]
                schedule.keep([] if row is None else [row], ways)
                left.pop(0)
        except ProcessEndedError as error:
            if left and error.blames and not schedule.stopped:
                # It is not to end the next process, too.
                values = {"chain": str(left[0]), "device": asked.device, "reason": str(error)}
                row = schedule.row(unit.dims, unit.stage, values)
                schedule.keep([] if row is None else [row])
            raise
        schedule.done(unit)

    def _hold_final(self, unit: Unit, request: LayerRequest, asked: Asked) -> None:
        began = time.monotonic()
        after = len(self.schedule.book.reference(unit.dims))
        times = asked.ask(self._task("final", unit, request))["times"]
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
                    "device": asked.device,
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
