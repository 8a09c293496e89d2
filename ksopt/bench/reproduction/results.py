"""The contents of a run's folders, in the form that tables and figures use. Needs no hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ksopt.bench import results_folder, results_log
from ksopt.bench.reproduction import energy, models
from ksopt.bench.reproduction.missing_measurements import Absence
from ksopt.bench.reproduction.models import Case, Subject
from ksopt.bench.reproduction.products import KERNEL, NAMES, Product
from ksopt.bench.reproduction.request import DTYPES
from ksopt.bench.reproduction.tables_and_figures import ENERGY, PRODUCTS
from ksopt.bench.results import Row


@dataclass(frozen=True)
class Results:
    """The measurements of a run.

    Attributes:
        products: by dtype.
        energies: by dtype.
        idle_w: watts of the idle device beside each of the energies, by dtype.
        cases: modules and ViTs by name and dtype.
        runs: the commands and devices of the runs, from setting.json.
        faults: of ksopt, which computed a wrong result or could not compute, in sentences.
        absences: of ways without a time or energy, with the reasons.
        rows: of the products, as `ksopt bench kernels` stores them, by dtype.
    """

    products: Mapping[str, tuple[Product, ...]]
    energies: Mapping[str, tuple[Product, ...]]
    idle_w: Mapping[str, tuple[float, ...]]
    cases: Mapping[Subject, Case]
    runs: tuple[Mapping[str, Any], ...] = ()
    faults: tuple[str, ...] = ()
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    absences: tuple[Absence, ...] = ()

    @classmethod
    def read(cls, out: Path) -> Results:
        """Read the measurements of every dtype in a run's folder.

        Raises:
            InvalidInputError: a folder in it was not written by this command.
        """
        products, energies, idle, rows = {}, {}, {}, {}
        cases: dict[Subject, Case] = {}
        runs: list[Mapping[str, Any]] = []
        faults: list[str] = []
        absences: list[Absence] = []
        for dtype in DTYPES:
            folder = out / f"{PRODUCTS}-{dtype}"
            if (folder / results_log.ROWS).exists():
                by_subject = results_folder.read_rows(folder)
                products[dtype] = tuple(Product.of(one) for one in by_subject.values())
                rows[dtype] = tuple(row for one in by_subject.values() for row in one)
                faults += [
                    f"{row.subject} {dtype}: {row.way} {row.layout}: {row.reason}"
                    for row in rows[dtype]
                    if row.is_own_fault
                ]
                absences += [
                    Absence(dtype, NAMES[row.way], row.layout, str(row.subject.chain), row.reason)
                    for row in rows[dtype]
                    if row.latency is None and row.way in NAMES
                ]
                runs += results_folder.read_setting(folder).get("runs", [])
            folder = out / f"{ENERGY}-{dtype}"
            if (folder / results_log.ROWS).exists():
                measured = results_log.read_lines(folder, energy.LOG_FORMAT).values()
                lacking = [
                    Absence(f"energy in {dtype}", way, layout, str(one.subject.chain), reason)
                    for one in measured
                    for (way, layout), reason in one.reasons.items()
                ]
                absences += lacking
                faults += [
                    f"{one.pattern} {one.part}: {one.way} {one.layout}: {one.reason}"
                    for one in lacking
                    if one.way == KERNEL and one.is_fault
                ]
                energies[dtype] = tuple(one.product() for one in measured)
                idle[dtype] = tuple(one.idle_w for one in measured)
                runs += results_log.read_setting(folder, energy.LOG_FORMAT).get("runs", [])
            for kind in ("modules", "sizes"):
                folder = out / f"{kind}-{dtype}"
                if (folder / results_log.ROWS).exists():
                    stored = results_log.read_lines(folder, models.LOG_FORMAT)
                    cases |= stored
                    faults += [
                        f"{case.subject.name} {dtype}: {fault}"
                        for case in stored.values()
                        for fault in case.faults
                    ]
                    runs += results_log.read_setting(folder, models.LOG_FORMAT).get("runs", [])
        return cls(
            products, energies, idle, cases, tuple(runs), tuple(faults), rows, tuple(absences)
        )
