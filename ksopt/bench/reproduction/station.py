"""Measures pieces of a run on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ksopt.bench import worker as kernels_worker
from ksopt.bench.benchmark import Bench
from ksopt.bench.reproduction import models
from ksopt.bench.reproduction.catalogue import ENERGY
from ksopt.bench.reproduction.energy import EnergyBench
from ksopt.bench.reproduction.pieces import Piece
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.request import BenchRequest
from ksopt.kernels.compile_ahead import Compilers


@dataclass(frozen=True)
class Answer:
    """The measurements of a piece, as a process hands them over.

    Attributes:
        piece: what was measured.
        result: as the journal of its part stores it.
        roofline: of the device, beside the first product in a dtype.
    """

    piece: Piece
    result: Any
    roofline: dict[str, Any] | None = None


class Station:
    """Measures pieces on one device, one after the other.

    Args:
        request: of the run.
        device: torch's name of the device.
    """

    def __init__(self, request: PaperRequest, device: str) -> None:
        self._request, self._device = request, device
        # Of the part measured last: each holds an input as large as the largest so far.
        self._bench: tuple[Part, Bench | EnergyBench] | None = None
        self._rooflines: set[str] = set()

    def measure(self, piece: Piece) -> Answer:
        """Check and measure a piece.

        Raises:
            EnergyError: the energy counter cannot be read.
            DeviceLost: the device no longer works.
        """
        part = piece.part
        if not piece.is_product:
            self._bench = None
            subject = models.Subject(piece.name, part.dtype)
            return Answer(
                piece, models.measure_case(self._request, subject, self._device).to_json()
            )
        bench, subject = self._bench_of(part), piece.product(self._request)
        if isinstance(bench, EnergyBench):
            return Answer(piece, bench.measure(subject).to_json())
        roofline = None
        if part.dtype not in self._rooflines:
            self._rooflines.add(part.dtype)
            roofline = asdict(bench.roofline)
        return Answer(piece, [row.to_json() for row in bench.measure(subject)], roofline)

    def _bench_of(self, part: Part) -> Bench | EnergyBench:
        if self._bench is None or self._bench[0] != part:
            self._bench = None  # frees its memory first
            request = BenchRequest.of(self._request.bench_options(part))
            if part.kind == ENERGY:
                self._bench = (part, EnergyBench(request, device=self._device))
            else:
                self._bench = (part, Bench(request, self._device))
        return self._bench[1]


def compile_for(request: PaperRequest, pieces: Sequence[Piece], compilers: Compilers) -> None:
    """Queue the kernels of products for compilation, in order."""
    requests = {
        part: BenchRequest.of(request.bench_options(part))
        for part in dict.fromkeys(piece.part for piece in pieces if piece.is_product)
    }
    for piece in pieces:
        if piece.is_product:
            kernels_worker.compile_for([piece.product(request)], requests[piece.part], compilers)
