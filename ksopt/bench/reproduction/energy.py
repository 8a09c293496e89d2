"""The energy of a product by kernel, bmm, einsum and bsr in both layouts, and the idle power."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ksopt.bench import results_log
from ksopt.bench.benchmark import Bench
from ksopt.bench.prepared_implementations import PreparedImplementations
from ksopt.bench.reproduction.products import NAMES, Product
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.results_folder import CODE
from ksopt.bench.results_log import LogFormat, ResultsLog
from ksopt.measure import energy as meters
from ksopt.measure.device import DeviceRecord
from ksopt.measure.energy import Meter, PerCall
from ksopt.patterns.chain import Chain

SECONDS = meters.TRIAL_SECONDS
"""The time for which each way is called, without the waits for a step of the counter."""
_FAR_BEHIND = "not measured: a call takes {:.0f} us, far more than another way's"


@dataclass(frozen=True)
class Energies:
    """The measured energies of one product.

    Attributes:
        subject: the chain and the rows of x.
        idle_w: power of the idle device just before, watts.
        calls: energy, idle draw included, and time of a call, by (the paper's name, layout).
        reasons: the reason a way has no energy.
    """

    subject: Subject
    idle_w: float
    calls: dict[tuple[str, str], PerCall]
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)

    def product(self) -> Product:
        """The product in the form that the figures use."""
        return Product(
            self.subject.chain[0],
            {},
            {key: one.millijoules for key, one in self.calls.items()},
            {
                key: one.millijoules - 1e3 * self.idle_w * one.seconds
                for key, one in self.calls.items()
            },
            self.subject.batch,
        )

    def to_json(self) -> dict[str, Any]:
        """The energies as plain values; `of_json` reads them."""
        return {
            "chain": str(self.subject.chain),
            "batch": self.subject.batch,
            "idle_w": self.idle_w,
            "calls": [[*key, asdict(one)] for key, one in self.calls.items()],
            "reasons": [[*key, reason] for key, reason in self.reasons.items()],
        }

    @classmethod
    def of_json(cls, value: Any) -> Energies:
        """The inverse of `to_json`."""
        return cls(
            Subject(Chain.parse(value["chain"]), int(value["batch"])),
            float(value["idle_w"]),
            {(name, layout): PerCall(**one) for name, layout, one in value["calls"]},
            {(name, layout): str(reason) for name, layout, reason in value["reasons"]},
        )


LOG_FORMAT: LogFormat[Subject, Energies] = LogFormat(
    "ksopt bench paper",
    "ksopt.bench.paper.energy/1",
    lambda one: one.subject,
    Energies.to_json,
    Energies.of_json,
)


@contextmanager
def opened(
    folder: Path, request: BenchRequest, record: DeviceRecord
) -> Generator[ResultsLog[Subject, Energies]]:
    """The folder's log; see `ksopt.bench.results_log.opened`. A longer sample may follow."""
    identity = request.identity()
    del identity["subjects"]
    with results_log.opened(
        folder, LOG_FORMAT, results_log.identity(identity, record, CODE)
    ) as results:
        yield results


class EnergyBench:
    """Measures the energy of products of one dtype on one device.

    Args:
        request: the ways, dtype, layouts and rows.
        meter: of the device; None opens it.
        device: of this process; None takes the request's.

    Raises:
        InvalidInputError: the device has no such counter; the sentence has the reason.
    """

    def __init__(
        self, request: BenchRequest, meter: Meter | None = None, device: str | None = None
    ) -> None:
        place = torch.device(device or request.device)
        self._meter = Meter(place) if meter is None else meter
        self._bench = Bench(request, str(place))

    def measure(self, subject: Subject) -> Energies:
        """Check each way, then measure its energy.

        Raises:
            EnergyError: the counter cannot be read.
            DeviceLostError: the device no longer works.
        """
        ready = PreparedImplementations()
        with self._bench.prepared(subject, ready):
            idle_w = meters.idle_watts(self._meter)
            keys = {f"{NAMES[way]} {layout}": (way, layout) for way, layout in ready.calls}
            energies = meters.per_call(
                {name: ready.calls[key] for name, key in keys.items()}, self._meter, SECONDS
            )
        calls = {(NAMES[keys[name][0]], keys[name][1]): one for name, one in energies.items()}
        slow = {key: _FAR_BEHIND.format(time.median_us) for key, time in ready.times.items()}
        whys = ready.reasons | slow
        reasons = {(NAMES[way], layout): why for (way, layout), why in whys.items()}
        return Energies(subject, idle_w, calls, reasons)
