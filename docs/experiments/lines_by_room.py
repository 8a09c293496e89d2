"""Files and lines by room at some commits, for the change note of CONTRIBUTING.md.

python docs/experiments/lines_by_room.py 792ddf8 HEAD
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = (
    *("system", "report", "patterns", "jit", "doctor", "measure", "kernels", "ops", "projection"),
    *("nn", "operators", "conversion", "integrations", "compile", "bench", "optimization", "cli"),
)
ROOMS = {
    "`ksopt/*.py`": ("ksopt/*.py",),
    **{f"`ksopt/{folder}/`": (f"ksopt/{folder}/**.py",) for folder in _FOLDERS},
    "`search/`": ("search/**.py",),
    "the wheel": ("ksopt/**.py", "search/**.py", "csrc/*.py"),
    "schema of results.json": ("search/*.json", "search/**.schema.json"),
    "the report's page and style": ("ksopt/report/*.css", "ksopt/report/*.j2"),
    "`csrc/`": ("csrc/**.cuh", "csrc/**.cu", "csrc/**.hpp", "csrc/**.cpp", "csrc/**.h"),
    "`docs/experiments/`": ("docs/experiments/**.py",),
    "`tests/`": ("tests/**.py",),
}


def sizes(commit: str) -> dict[str, int]:
    """The lines of each file of a commit."""
    command = ["git", "-C", str(ROOT), "grep", "-c", "", commit]
    counted = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files = {}
    for line in counted.splitlines():
        name, _, count = line.removeprefix(f"{commit}:").rpartition(":")
        files[name] = int(count)
    return files


def cells(files: dict[str, int], patterns: Sequence[str]) -> tuple[int, int]:
    """The number of files that match any of some patterns, and their lines.

    Example:
        >>> cells({"a/b.py": 3, "a/c/d.py": 4, "a/e.txt": 5}, ["a/*.py"])
        (1, 3)
        >>> cells({"a/b.py": 3, "a/c/d.py": 4, "a/e.txt": 5}, ["a/**.py"])
        (2, 7)
    """
    chosen = [
        name
        for name in files
        if any(
            fnmatchcase(name, one) and ("**" in one or name.count("/") == one.count("/"))
            for one in patterns
        )
    ]
    return len(chosen), sum(files[name] for name in chosen)


def code_lines(source: str) -> int:
    """The lines of Python without blank lines, comments and docstrings."""
    kinds = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*kinds, tokenize.ENDMARKER):
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def wheel_code(commit: str, files: dict[str, int]) -> tuple[int, int]:
    """The number of the wheel's files, and their lines of code."""
    names = [name for name in files if any(fnmatchcase(name, one) for one in ROOMS["the wheel"])]
    show = ["git", "-C", str(ROOT), "show"]
    texts = (
        subprocess.run([*show, f"{commit}:{name}"], capture_output=True, text=True, check=True)
        for name in names
    )
    return len(names), sum(code_lines(text.stdout) for text in texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commits", nargs="+")
    commits = parser.parse_args(arguments).commits
    print("| room |", " | ".join(f"files {c} | lines {c}" for c in commits), "|")
    print("|---|", "|".join(["---|---"] * len(commits)), "|", sep="")
    every = [sizes(commit) for commit in commits]
    for room, patterns in ROOMS.items():
        row = [f"{count:,}" for files in every for count in cells(files, patterns)]
        print(f"| {room} |", " | ".join(row), "|")
    code = [wheel_code(commit, files) for commit, files in zip(commits, every, strict=True)]
    row = [f"{count:,}" for pair in code for count in pair]
    print("| the wheel without docstrings, comments and blank lines |", " | ".join(row), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
