"""The folder of a part: what it holds, what it lacks, and the place to add more."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ksopt.bench import results_folder
from ksopt.bench.journal import Form, Journal
from ksopt.bench.reproduction import energy, models
from ksopt.bench.reproduction.catalogue import ENERGY, PRODUCTS
from ksopt.bench.reproduction.pieces import Piece, pieces_of
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.reproduction.station import Answer
from ksopt.bench.request import BenchRequest
from ksopt.measure.device import DeviceRecord
from ksopt.measure.roofline import Roofline


@dataclass(frozen=True)
class Book:
    """A part's journal; `opened` opens it.

    Attributes:
        request: of the run.
        part: whose results it holds.
        record: of the device.
        journal: of the folder.
        form: of the journal.
    """

    request: PaperRequest
    part: Part
    record: DeviceRecord
    journal: Journal[Any, Any]
    form: Form[Any, Any]

    @property
    def missing(self) -> list[Piece]:
        """The pieces that are not measured yet, in order."""
        pieces = pieces_of(self.part)
        return [piece for piece in pieces if self._subject(piece) not in self.journal.measured]

    @property
    def total(self) -> int:
        """The number of the part's pieces."""
        return len(pieces_of(self.part))

    @property
    def measured(self) -> int:
        """The number of its measured pieces."""
        return self.total - len(self.missing)

    def begin_run(self) -> None:
        """Record a run: its command and its device."""
        if self.part.kind == PRODUCTS:
            own = BenchRequest.of(self.request.bench_options(self.part))
            results_folder.begin_run(self.journal, own, self.record)
        else:
            self.journal.begin_run(self.request.command, self.record)

    def add(self, answer: Answer) -> None:
        """Store what was measured; it is on disk when this returns."""
        if answer.roofline is not None:
            results_folder.add_roofline(self.journal, Roofline(**answer.roofline))
        self.journal.add(self.form.of_json(answer.result))

    def _subject(self, piece: Piece) -> Hashable:
        if piece.is_product:
            return piece.product(self.request)
        return models.Subject(piece.name, self.part.dtype)


@contextmanager
def opened(request: PaperRequest, part: Part, record: DeviceRecord, out: Path) -> Generator[Book]:
    """The book of a part, locked until the end; see `ksopt.bench.journal.opened`.

    Args:
        request: of the run.
        part: of the request.
        record: of the device.
        out: the run's folder, which holds the part's own.
    """
    folder = out / part.name
    if part.kind == PRODUCTS:
        own = BenchRequest.of(request.bench_options(part))
        with results_folder.opened(folder, own, record) as journal:
            yield Book(request, part, record, journal, results_folder.FORM)
    elif part.kind == ENERGY:
        own = BenchRequest.of(request.bench_options(part))
        with energy.opened(folder, own, record) as energies:
            yield Book(request, part, record, energies, energy.FORM)
    else:
        with models.opened(folder, request, record) as cases:
            yield Book(request, part, record, cases, models.FORM)
