"""Places that have the same lines of code: a search for what is written twice.

    python docs/experiments/equal_lines.py

Compares lines without their indentation, and leaves out blank lines, comments, docstrings, imports,
functions' signatures and lines without a letter. Prints each pair of places that share a run of at
least ``--lines``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("ksopt", "search")


@dataclass(frozen=True)
class Line:
    """A line of code.

    Attributes:
        file: of the line.
        number: in the file, from 1.
        text: without indentation.
    """

    file: Path
    number: int
    text: str


def code(file: Path) -> list[Line]:
    """The compared lines of a file."""
    source = file.read_text(encoding="utf-8")
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            skipped |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            skipped |= {*range(node.lineno, node.body[0].lineno)}
    lines = []
    for number, text in enumerate(map(str.strip, source.splitlines()), 1):
        has_letters = any(letter.isalpha() for letter in text)
        if has_letters and not text.startswith("#") and number not in skipped:
            lines.append(Line(file, number, text))
    return lines


def equal_runs(files: Sequence[Path], least: int) -> Iterator[tuple[Line, Line, int]]:
    """Each two places with equal lines: the first line of both, and the length of the run."""
    lines = [line for file in files for line in code(file)]
    starts = defaultdict(list)
    for at in range(len(lines) - least + 1):
        run = lines[at : at + least]
        if run[0].file == run[-1].file:
            starts[tuple(line.text for line in run)].append(at)
    pairs = {
        (first, second)
        for places in starts.values()
        for index, first in enumerate(places)
        for second in places[index + 1 :]
        if second - first >= least
    }
    for first, second in sorted(pairs):
        if (first - 1, second - 1) not in pairs:  # else a part of the run before
            length = least
            while (first + length - least + 1, second + length - least + 1) in pairs:
                length += 1
            yield lines[first], lines[second], length


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the pairs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=5, help="of a run, at least (%(default)s)")
    least = parser.parse_args(arguments).lines
    files = [file for name in FOLDERS for file in sorted((ROOT / name).rglob("*.py"))]
    runs = list(equal_runs(files, least))
    for first, second, length in runs:
        places = [f"{one.file.relative_to(ROOT)}:{one.number}" for one in (first, second)]
        print(f"{length} lines: {' and '.join(places)}: {first.text}")
    print(f"{len(runs)} pairs of places")
    return 0


if __name__ == "__main__":
    sys.exit(main())
