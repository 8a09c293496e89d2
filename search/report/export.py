"""Files of a search: report.html, report.md, results.json, plan.json, trials.csv, plots.

Files are written whole or not at all.
"""

from __future__ import annotations

import csv
import io
from dataclasses import fields
from pathlib import Path
from typing import Any

from ksopt.measure.timing import Measurement
from ksopt.patterns.size import Dims
from ksopt.report import document, output_folder
from ksopt.search import metrics
from ksopt.search.plan import plan_of
from ksopt.search.report import results_json
from ksopt.search.results import SearchResult, TrialRecord


def write(result: SearchResult, folder: Path) -> None:
    """Write the five files into the folder, and the plots into a subfolder.

    Raises:
        InvalidInputError: The folder cannot be written.
    """
    from ksopt.search.report import page, sections

    texts = {
        "results.json": results_json.to_json(result),
        "plan.json": plan_of(result).to_json(),
        "trials.csv": to_csv(result),
        "report.md": page.markdown(result),
        "report.html": page.html(result),
    }
    drawings = document.figures(sections.written(result))
    remedy = "what was measured is kept, run the search again to write the report"
    output_folder.write(folder, texts, drawings, "plots", remedy)


def to_csv(result: SearchResult) -> str:
    """The text of trials.csv, one row a trial."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, fieldnames=_csv_columns(), extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(_csv_row(trial) for layer in result.layers for trial in layer.trials)
    return text.getvalue()


def _csv_columns() -> list[str]:
    return [
        *("number", "state", "origin", "run", "device", "dims", "in_features", "out_features"),
        *("chain", "parameters", "share_of_dense", "rho", "d_rho", "floor_us", "predicted_us"),
        *(f"latency_{field.name}" for field in fields(Measurement)),
        *(f"dense_{field.name}" for field in fields(Measurement)),
        *("latency_over_dense", "error"),
        *(metric.name for metric in metrics.stored()),
        *("seconds", "reason"),
    ]


def _csv_row(trial: TrialRecord) -> dict[str, Any]:
    row = results_json.trial(trial)
    chain = trial.facts.chain
    row |= {
        "dims": str(Dims(chain.in_features, chain.out_features)),
        "in_features": chain.in_features,
        "out_features": chain.out_features,
    }
    for name in ("latency", "dense"):
        row |= {f"{name}_{key}": value for key, value in (row[name] or {}).items()}
    return row
