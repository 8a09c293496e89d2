"""The results of trainings as JSON, as a table, and as curves."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ksopt.report import drawing_style, svg
from ksopt.search.report.axes import Axes, Scale
from recipes.training import Point, Result, Run, Trial

SCHEMA = "ksopt.training-recipes/1"
_COLOURS = ("s1", "s0", "s2", "s3", "s4", "s5")  # the first is the colour of dense layers


@dataclass(frozen=True)
class Learned:
    """The results of one task.

    Args:
        name, data: Of the task.
        steps: Of each training except the longer dense one.
        settings: Sizes and batches.
        sweep: The trainings that selected the learning rates.
        results: One for each way.
    """

    name: str
    data: str
    steps: int
    settings: dict[str, Any]
    sweep: tuple[Trial, ...]
    results: tuple[Result, ...]


def write(file: Path, machine: dict[str, Any], tasks: Sequence[Learned]) -> None:
    """Write all results as JSON."""
    content = {"schema": SCHEMA, "machine": machine, "tasks": [asdict(task) for task in tasks]}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> tuple[dict[str, Any], list[Learned]]:
    """The results that `write` stored.

    Raises:
        ValueError: The file is of another schema.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["schema"] != SCHEMA:
        raise ValueError(f"{file} has the schema {content['schema']}, not {SCHEMA}")
    return content["machine"], [_learned(**task) for task in content["tasks"]]


def _learned(sweep: Any, results: Any, **rest: Any) -> Learned:
    return Learned(
        sweep=tuple(Trial(**trial) for trial in sweep),
        results=tuple(_result(**result) for result in results),
        **rest,
    )


def _result(runs: Any, **rest: Any) -> Result:
    stored = (Run(one["seed"], tuple(Point(**point) for point in one["points"])) for one in runs)
    return Result(runs=tuple(stored), **rest)


def table(task: Learned) -> str:
    """The final results of all trainings, as markdown."""
    heads = ("", "parameters", "lr", "steps", "seconds", "loss", "over the seeds", "accuracy")
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for result in task.results:
        ends = [run.points[-1] for run in result.runs]
        losses = [end.loss for end in ends]
        cells = (
            result.way,
            f"{result.parameters:,}",
            f"{result.lr:g}",
            str(ends[0].step),
            f"{statistics.median(end.seconds for end in ends):.1f}",
            f"{statistics.mean(losses):.4f}",
            f"{min(losses):.4f} to {max(losses):.4f}",
            f"{100 * statistics.mean(end.accuracy for end in ends):.2f} %",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sweep_table(task: Learned) -> str:
    """The final losses of the sweep's trainings, as markdown."""
    rates = sorted({trial.lr for trial in task.sweep})
    losses = {(trial.way, trial.lr): trial.loss for trial in task.sweep}
    lines = [
        "| lr | " + " | ".join(f"{lr:g}" for lr in rates) + " |",
        "|---" * (len(rates) + 1) + "|",
    ]
    for way in dict.fromkeys(trial.way for trial in task.sweep):
        row = (f"{losses[way, lr]:.4f}" for lr in rates)
        lines.append(f"| {way} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def picture(task: Learned) -> str:
    """The held-out loss against steps, and against seconds, as a standalone SVG.

    A line is the mean over the seeds; the band around it is the range.
    """
    width, height, top = 480, 340, 46
    parts = []
    for place, (result, colour) in enumerate(zip(task.results, _COLOURS, strict=True)):
        x, y = 62 + 300 * (place % 3), 16 + 18 * (place // 3)
        parts.append(f'<path class="line {colour}" d="M{x} {y - 4}h20"/>')
        parts.append(svg.text(x + 26, y, result.way, "start", f"label {colour}"))
    panels: list[tuple[str, Callable[[Point], float]]] = [
        ("steps", lambda point: float(point.step)),
        ("seconds of training", lambda point: point.seconds),
    ]
    for panel, (name, of) in enumerate(panels):
        inner = _panel(task.results, name, of, width, height)
        parts.append(
            f'<g transform="translate({panel * width} {top})">' + "\n".join(inner) + "</g>"
        )
    label = f"Held-out loss of {len(task.results)} ways to train on {task.name}"
    return drawing_style.standalone(svg.svg(parts, 2 * width, height + top, label))


def _panel(
    results: Iterable[Result], name: str, of: Callable[[Point], float], width: int, height: int
) -> list[str]:
    curves = [_curve(result, of) for result in results]
    # Without the first point, of the untrained network.
    losses = [loss for curve in curves for _, *three in curve[1:] for loss in three]
    most = max(x for curve in curves for x, *_ in curve)
    axes = Axes(
        width,
        height,
        Scale(name, 0.0, most),
        Scale("held-out loss (nats)", min(losses) / 1.05, max(losses) * 1.05, is_log=True),
    )
    parts = axes.drawn()
    for curve, colour in zip(curves, _COLOURS, strict=True):
        shown = [(axes.x(x), *map(axes.y, three)) for x, *three in curve[1:]]
        upper = " ".join(f"{x:.1f},{high:.1f}" for x, _, _, high in shown)
        lower = " ".join(f"{x:.1f},{low:.1f}" for x, low, _, _ in reversed(shown))
        parts.append(f'<path class="box {colour}" style="stroke:none" d="M{upper} L{lower}z"/>')
        middle = " ".join(f"{x:.1f},{mean:.1f}" for x, _, mean, _ in shown)
        parts.append(f'<path class="line {colour}" d="M{middle}"/>')
    return parts


def _curve(result: Result, of: Callable[[Point], float]) -> list[tuple[float, float, float, float]]:
    """The points of a curve: the mean x over the seeds, and the least, mean and largest loss."""
    curve = []
    for points in zip(*(run.points for run in result.runs), strict=True):
        losses = [point.loss for point in points]
        x = statistics.mean(map(of, points))
        curve.append((x, min(losses), statistics.mean(losses), max(losses)))
    return curve
