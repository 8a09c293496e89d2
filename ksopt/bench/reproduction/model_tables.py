"""Tables 4, 6 and 7: the time of modules with Kronecker-sparse layers, and of linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ksopt.bench.reproduction import module_cases
from ksopt.bench.reproduction.models import Case, Subject
from ksopt.bench.reproduction.module_cases import BMM, COMPLETE, DENSE, KERNEL, LINEAR
from ksopt.bench.reproduction.paper_comparison import Cell, cell
from ksopt.bench.reproduction.statistics import Estimate


def modules(
    item: str, measured: Mapping[Subject, Case], dtypes: Sequence[str], is_small: bool
) -> list[Cell]:
    """Table 4 or 7: the times of bmm's and ksopt's versions over the dense version's.

    Args:
        item: "Table 4" or "Table 7".
        measured: the results by subject.
        dtypes: to show; float32 is the paper's.
        is_small: whether the modules are small ones, which the paper's numbers are not shown for.
    """
    cells = []
    for dtype in dtypes:
        for row in module_cases.TABLE_4 if item == "Table 4" else module_cases.TABLE_7:
            case = measured.get(Subject(row, dtype))
            for way in (BMM, KERNEL):
                cells.append(
                    cell(
                        item,
                        row,
                        way,
                        dtype,
                        _ratio(case, way, DENSE),
                        unit="",
                        is_papers=dtype == "float32" and not is_small,
                        absent=_why(case),
                    )
                )
    return cells


def sizes(
    item: str, measured: Mapping[Subject, Case], dtypes: Sequence[str], is_small: bool
) -> list[Cell]:
    """Table 6: seconds of a whole ViT and of its feed-forward layers, and their share.

    Args:
        item: "Table 6".
        measured, dtypes, is_small: as for `modules`; float16 and float32 are the paper's.
    """
    cells = []
    for dtype in dtypes:
        is_papers = dtype in ("float16", "float32") and not is_small
        for row in module_cases.TABLE_6:
            case = measured.get(Subject(row, dtype))
            for name in (COMPLETE, LINEAR):
                seconds = None if case is None else case.seconds(name)
                ours = None if seconds is None else _one(seconds)
                cells.append(
                    cell(
                        item,
                        row,
                        f"{dtype} {name}",
                        dtype,
                        ours,
                        unit="s",
                        is_papers=is_papers,
                        absent=_why(case),
                    )
                )
            cells.append(
                cell(
                    item,
                    row,
                    f"{dtype} share",
                    dtype,
                    _ratio(case, LINEAR, COMPLETE),
                    unit="%",
                    is_papers=is_papers,
                    absent=_why(case),
                )
            )
    return cells


def _ratio(case: Case | None, name: str, other: str) -> Estimate | None:
    if case is None:
        return None
    ours, theirs = case.seconds(name), case.seconds(other)
    return None if ours is None or theirs is None else _one(ours / theirs)


def _one(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


def _why(case: Case | None) -> str:
    if case is None:
        return "nothing was measured for it"
    return "; ".join(case.faults) or "it has no time"
