"""The energy of a product by kernel, bmm, einsum and bsr in both layouts, and idle power."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ksopt.bench import journal
from ksopt.bench.benchmark import Bench
from ksopt.bench.journal import Form, Journal
from ksopt.bench.prepared_ways import PreparedWays
from ksopt.bench.reproduction.products import NAMES, Product
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.results_folder import code_digest
from ksopt.measure import device as devices
from ksopt.measure import energy as meters
from ksopt.measure.energy import Meter, PerCall
from ksopt.patterns.chain import Chain

SECONDS = 1.0
"""How long each way is called, besides the waits for a step of the counter."""


@dataclass(frozen=True)
class Energies:
    """What was measured of one product.

    Attributes:
        subject: what was multiplied by.
        idle_w: what the idle device drew just before, watts.
        calls: energy, idle draw included, and time of a call, by (the paper's name, layout).
        reasons: why a way has none.
    """

    subject: Subject
    idle_w: float
    calls: dict[tuple[str, str], PerCall]
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)

    def product(self) -> Product:
        """The same as the figures take it."""
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
        """As plain values; `of_json` reads it."""
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


FORM: Form[Subject, Energies] = Form(
    "ksopt bench paper",
    "ksopt.bench.paper.energy/1",
    lambda one: one.subject,
    Energies.to_json,
    Energies.of_json,
)


@contextmanager
def opened(folder: Path, request: BenchRequest) -> Generator[Journal[Subject, Energies]]:
    """The folder's journal; see `ksopt.bench.journal.opened`. A longer sample may follow."""
    record = devices.record(request.device)
    asked = request.identity()
    del asked["subjects"]
    with journal.opened(folder, FORM, journal.identity(asked, record, code_digest())) as book:
        yield book


class EnergyBench:
    """Measures products of one dtype on one device.

    Args:
        request: which ways, dtype, layouts and rows.
        meter: of the device; None opens it.

    Raises:
        InvalidInputError: the device has no such counter; the sentence says why.
    """

    def __init__(self, request: BenchRequest, meter: Meter | None = None) -> None:
        self._meter = Meter(torch.device(request.device)) if meter is None else meter
        self._bench = Bench(request)

    def measure(self, subject: Subject) -> Energies:
        """Check each way, then measure its energy.

        Raises:
            EnergyError: the counter cannot be read.
            DeviceLost: the device no longer works.
        """
        ready = PreparedWays()
        with self._bench.prepared(subject, ready):
            idle_w = meters.idle_watts(self._meter)
            keys = {f"{NAMES[way]} {layout}": (way, layout) for way, layout in ready.calls}
            found = meters.per_call(
                {name: ready.calls[key] for name, key in keys.items()}, self._meter, SECONDS
            )
        calls = {(NAMES[keys[name][0]], keys[name][1]): one for name, one in found.items()}
        reasons = {(NAMES[way], layout): why for (way, layout), why in ready.reasons.items()}
        return Energies(subject, idle_w, calls, reasons)
