"""What the folders of a run hold, as tables and figures take it. No hardware is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ksopt.bench import journal, results_folder
from ksopt.bench.reproduction import energy, models
from ksopt.bench.reproduction.catalogue import ENERGY, PRODUCTS
from ksopt.bench.reproduction.models import Case, Subject
from ksopt.bench.reproduction.products import Product
from ksopt.bench.reproduction.request import DTYPES
from ksopt.bench.rows import Row


@dataclass(frozen=True)
class Measured:
    """All that was measured.

    Attributes:
        products: by dtype.
        energies: by dtype.
        idle_w: watts of the idle device beside each of the energies, by dtype.
        cases: modules and ViTs by name and dtype.
        runs: what the runs were asked for and ran on, as setting.json has it.
        faults: what computed something wrong or could not compute, in sentences.
        rows: of the products, as `ksopt bench kernels` keeps them, by dtype.
    """

    products: Mapping[str, tuple[Product, ...]]
    energies: Mapping[str, tuple[Product, ...]]
    idle_w: Mapping[str, tuple[float, ...]]
    cases: Mapping[Subject, Case]
    runs: tuple[Mapping[str, Any], ...] = ()
    faults: tuple[str, ...] = ()
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)


def read(out: Path) -> Measured:
    """What a run's folder holds of each dtype, asked for or not.

    Raises:
        InvalidInputError: a folder in it is not one of this command.
    """
    products, energies, idle, rows = {}, {}, {}, {}
    cases: dict[Subject, Case] = {}
    runs: list[Mapping[str, Any]] = []
    faults: list[str] = []
    for dtype in DTYPES:
        folder = out / f"{PRODUCTS}-{dtype}"
        if (folder / journal.ROWS).exists():
            found = results_folder.read_rows(folder)
            products[dtype] = tuple(Product.of(one) for one in found.values())
            rows[dtype] = tuple(row for one in found.values() for row in one)
            faults += [
                f"{row.subject} {dtype}: {row.way} {row.layout}: {row.reason}"
                for row in rows[dtype]
                if row.is_fault
            ]
            runs += results_folder.read_setting(folder).get("runs", [])
        folder = out / f"{ENERGY}-{dtype}"
        if (folder / journal.ROWS).exists():
            measured = journal.read_lines(folder, energy.FORM).values()
            energies[dtype] = tuple(one.product() for one in measured)
            idle[dtype] = tuple(one.idle_w for one in measured)
            runs += journal.read_setting(folder, energy.FORM).get("runs", [])
        for kind in ("modules", "sizes"):
            folder = out / f"{kind}-{dtype}"
            if (folder / journal.ROWS).exists():
                kept = journal.read_lines(folder, models.FORM)
                cases |= kept
                faults += [
                    f"{case.subject.name} {dtype}: {fault}"
                    for case in kept.values()
                    for fault in case.faults
                ]
                runs += journal.read_setting(folder, models.FORM).get("runs", [])
    return Measured(products, energies, idle, cases, tuple(runs), tuple(faults), rows)
