"""Writes all tables: rich on a terminal, plain lines in pipes, markdown and HTML in reports.

A `Table` is data, so that terminals and documents show the same rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from ksopt.errors import InvalidInputError


@dataclass(frozen=True)
class Table:
    """Columns and rows of text.

    Args:
        columns: Heads. A head that starts with ``>`` marks a right-aligned column of numbers.
        rows: As many cells each as there are columns.
        title: Printed above the table; empty for none.

    Raises:
        InvalidInputError: A row has another number of cells.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise InvalidInputError(
                    f"a table of {len(self.columns)} columns got a row of {len(row)} cells: {row!r}"
                )

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads without alignment marks."""
        return tuple(column.removeprefix(">") for column in self.columns)

    def is_right(self, index: int) -> bool:
        """Whether a column is right-aligned."""
        return self.columns[index].startswith(">")

    def plain(self) -> str:
        """The table as aligned lines, with two spaces between columns.

        Example:
            >>> print(Table(("chain", ">us"), (("(1,2,3,4)", "7"), ("(1,1,1,1)", "12"))).plain())
            chain      us
            (1,2,3,4)   7
            (1,1,1,1)  12
        """
        lines = [self.heads, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(
                cell.rjust(width) if self.is_right(i) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *text] if self.title else text)

    def markdown(self) -> str:
        """The table as markdown, without its title.

        Example:
            >>> print(Table(("chain", ">us"), (("(1,2,3,4)", "7"),)).markdown())
            | chain | us |
            |---|--:|
            | (1,2,3,4) | 7 |
        """
        # A bar would end the cell; a star would start emphasis in a chain's text.
        rows = [[cell.replace("|", r"\|").replace("*", r"\*") for cell in row] for row in self.rows]
        rule = "|".join("--:" if self.is_right(i) else "---" for i in range(len(self.columns)))
        lines = [f"| {' | '.join(self.heads)} |", f"|{rule}|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def write(table: Table, stream: TextIO | None = None) -> None:
    """Write a table: with rich on a terminal, as plain lines to a file or pipe."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        stream.write(table.plain() + "\n")
        return
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    shown = rich.table.Table(
        title=table.title or None, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False
    )
    for i, head in enumerate(table.heads):
        # Chains are copied from the terminal: fold them, never cut them.
        shown.add_column(head, justify="right" if table.is_right(i) else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(rich.text.Text(cell) for cell in row))
    rich.console.Console(file=stream).print(shown)


def of(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    """A `Table` from any sequences."""
    return Table(tuple(columns), tuple(tuple(row) for row in rows), title)


__all__ = ["Table", "of", "write"]
