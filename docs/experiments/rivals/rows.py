"""The rows of a comparison, as JSON and as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.operators.base import StructuredOperator
from ksopt.operators.registry import operator_of, parse
from ksopt.patterns.size import Dims
from ksopt.report import tables
from ksopt.system.atomic_files import write_whole

SCHEMA = "ksopt.rivals/1"
DENSE = "dense"


@dataclass(frozen=True)
class Speed:
    """The product of a structure's operator for one layer size, beside the dense layer's.

    Args:
        dims: INxOUT.
        layers: Number of layers of that size in the network.
        operator: Its text.
        parameters: Weights of one layer, as a budget counts them.
        flops: Of one layer's product.
        latency_us: Of one layer's product; None if it does not run.
        dense_us: The dense layer's, measured in turns with it; None if it does not run.
        refusal: The reason it was not timed; None if it was.
    """

    dims: str
    layers: int
    operator: str
    parameters: int
    flops: int
    latency_us: float | None
    dense_us: float | None
    refusal: str | None = None


@dataclass(frozen=True)
class Row:
    """The results of a structure at a budget in place of the network's large layers.

    Args:
        structure: Its name, or "dense".
        budget: As in a search's options; empty for operators above every budget.
        speeds: One for each layer size.
        fit_error: Of all fitted matrices together, in the Frobenius norm.
        fitted_accuracy: On held-out data, right after the fit.
        lr: The best rate in the sweep.
        accuracies: On held-out data, after each fine-tuning.
        losses: On held-out data, after each fine-tuning, in nats.
        commit: Of ksopt.
    """

    structure: str
    budget: str
    speeds: tuple[Speed, ...]
    fit_error: float
    fitted_accuracy: float
    lr: float
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    commit: str | None

    @property
    def ratio(self) -> float | None:
        """The time of all layers' products over the dense layers'; None if one does not run."""
        if any(one.latency_us is None or one.dense_us is None for one in self.speeds):
            return None
        ours = sum(one.layers * (one.latency_us or 0.0) for one in self.speeds)
        return ours / sum(one.layers * (one.dense_us or 0.0) for one in self.speeds)


@dataclass(frozen=True)
class Timed:
    """A row whose products are timed, and whose network is not trained yet.

    Args:
        structure, budget, speeds, commit: As of `Row`.
    """

    structure: str
    budget: str
    speeds: tuple[Speed, ...]
    commit: str | None

    @property
    def operators(self) -> dict[Dims, StructuredOperator] | None:
        """By size; None for the dense network."""
        if self.structure == DENSE:
            return None
        return {Dims.parse(one.dims): operator_of(parse(one.operator)) for one in self.speeds}


@dataclass(frozen=True)
class Table:
    """A comparison.

    Args:
        machine: The device of the measurements (`ksopt.measure.device.record`).
        settings: The options.
        task: The name and the data of the task, and the rows of a batch.
        rows: The rows so far.
        timed: The rows that are to be trained.
    """

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    task: Mapping[str, Any]
    rows: tuple[Row, ...] = ()
    timed: tuple[Timed, ...] = ()

    def write(self, file: Path) -> None:
        """Write the table atomically."""
        write_whole(file, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> Table:
        """The table that `write` stored.

        Raises:
            InvalidInputError: The file is of another schema.
        """
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("schema", None) != SCHEMA:
            raise InvalidInputError(f"{file} is none of {SCHEMA}")
        rows = tuple(_row(**row) for row in content.pop("rows"))
        timed = tuple(_timed(**row) for row in content.pop("timed", ()))
        return cls(**content, rows=rows, timed=timed)


def _row(speeds: Any, accuracies: Any, losses: Any, **rest: Any) -> Row:
    return Row(
        speeds=tuple(Speed(**one) for one in speeds),
        accuracies=tuple(accuracies),
        losses=tuple(losses),
        **rest,
    )


def _timed(speeds: Any, **rest: Any) -> Timed:
    return Timed(speeds=tuple(Speed(**one) for one in speeds), **rest)


def markdown(table: Table) -> str:
    """The table with the device of the measurements and the reasons for empty cells."""
    dense = next((row for row in table.rows if row.structure == DENSE), None)
    cells = [_cells(row, dense) for row in table.rows]
    heads = ["budget", "structure", "operator of the first layer", ">weights", ">operations"]
    heads += [">time", ">error of the fit", ">fitted", ">fine-tuned", ">over the seeds", ">lr"]
    machine, task = table.machine, table.task
    commits = sorted({row.commit or "unknown" for row in table.rows})
    lines = [
        f"{task['name']} ({task['data']}). {table.settings['steps']} steps of fine-tuning after "
        f"{table.settings['dense_steps']} of the dense network, {table.settings['seeds']} seeds. "
        f"Measured on {machine['name']} ({machine['threads']} threads of torch {machine['torch']}) "
        f"in {table.settings['dtype']}, {task['rows']:,} rows, commit {', '.join(commits)}.",
        "",
        tables.of(heads, cells).markdown(),
    ]
    refused = {
        f"{row.structure} was not timed: {one.refusal}."
        for row in table.rows
        for one in row.speeds
        if one.refusal is not None
    }
    return "\n".join([*lines, *(["", " ".join(sorted(refused))] if refused else [])]) + "\n"


def _cells(row: Row, dense: Row | None) -> list[str]:
    weights = operations = "100%"
    if dense is not None:
        weights = _share([one.layers * one.parameters for one in row.speeds], dense, "parameters")
        operations = _share([one.layers * one.flops for one in row.speeds], dense, "flops")
    low, high = min(row.accuracies), max(row.accuracies)
    return [
        row.budget or "-",
        row.structure,
        row.speeds[0].operator,
        weights,
        operations,
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.fit_error:.3f}",
        _percent(row.fitted_accuracy),
        _percent(statistics.mean(row.accuracies)),
        f"{100 * low:.1f} to {100 * high:.1f}",
        f"{row.lr:g}",
    ]


def _share(counts: Sequence[int], dense: Row, of: str) -> str:
    whole = sum(one.layers * getattr(one, of) for one in dense.speeds)
    return f"{100 * sum(counts) / whole:.1f}%"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
