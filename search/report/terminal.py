"""Terminal output of a search."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TextIO

from ksopt.report import tables
from ksopt.report.tables import Table
from ksopt.search.report import answers, plan_tables, result_tables
from ksopt.search.results import SearchResult

# Columns that are omitted on narrower terminals, so that chains are not wrapped.
_WIDE = 130
_WIDE_ANSWERS = ("weights", "latency", "dense", "efficiency", "energy")
_WIDE_PLAN = ("budget", "weights", "latency", "dense")


def print_result(result: SearchResult, stream: TextIO) -> None:
    """Write the answer to a terminal or a pipe: sentences, tables, the report's path."""
    for sentence in answers.lead(result):
        print(sentence, file=stream)
    print(file=stream)
    folder = result.folder.resolve()
    if result.request.is_one_layer:
        tables.write(result_tables.answers_table(result), stream)
        print(f"\nreport: {folder / 'report.html'}", file=stream)
        return
    is_narrow = stream.isatty() and shutil.get_terminal_size().columns < _WIDE
    table = result_tables.answers_table(result)
    tables.write(_without(table, _WIDE_ANSWERS if is_narrow else ()), stream)
    if result.request.model is not None:
        print(file=stream)
        table = plan_tables.plan_table(result)
        tables.write(_without(table, _WIDE_PLAN if is_narrow else ()), stream)
    print(f"\nreport: {folder / 'report.html'}", file=stream)
    print(f"plan:   {folder / 'plan.json'}", file=stream)


def _without(table: Table, heads: Sequence[str]) -> Table:
    """A table without some columns."""
    columns = [i for i, head in enumerate(table.heads) if head not in heads]
    rows = [[row[i] for i in columns] for row in table.rows]
    return tables.of([table.columns[i] for i in columns], rows, table.title)
