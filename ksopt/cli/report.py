"""The command ``ksopt report``: its arguments and its output."""

from __future__ import annotations

import argparse
import sys

SUMMARY = "Write the report of a search again, or compare several searches."
EPILOG = """\
Nothing is measured. One search has its report written again, as `ksopt search --replay` does it.
Several have one page: comparison.html, with a plot, a table, and the differences of their requests.

examples:
  ksopt report ksopt-report-768x3072-cpu-float32-batch_first-256
  ksopt report before after --out before-and-after

exit codes: 0 done, 1 failed, 2 an argument is not allowed, 130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds those of every command."""
    command.add_argument(
        "searches",
        nargs="+",
        metavar="FOLDER",
        help="a search's output folder, or the storage of its study",
    )
    command.add_argument(
        "--out",
        metavar="FOLDER",
        help="where the report goes (a search's own folder; ksopt-comparison for several)",
    )
    command.add_argument(
        "--study", metavar="NAME", help="name of the study in the storages (ksopt-search)"
    )
    command.add_argument(
        "--plugins",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules to import first, which register structures, metrics or sections of the "
        "report; this runs their code",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report and print its answer; return the exit code."""
    from ksopt.search.options import STUDY
    from ksopt.system.user_code import import_plugins

    import_plugins(args.plugins, sys.stderr)
    study = args.study or STUDY
    if len(args.searches) == 1:
        from ksopt.search import print_result, replay, to_json

        result = replay(args.searches[0], study, args.out)
        if args.json:
            sys.stdout.write(to_json(result))
        else:
            print_result(result, sys.stdout)
        return 0
    _compare(args, study)
    return 0


def _compare(args: argparse.Namespace, study: str) -> None:
    from pathlib import Path

    from ksopt.report import tables
    from ksopt.search.comparison import compare
    from ksopt.search.report import comparison

    out = Path(args.out or "ksopt-comparison")
    searches = compare(args.searches, out, study)
    if args.json:
        sys.stdout.write(comparison.to_json(searches))
        return
    for sentence in (*comparison.lead(searches), *comparison.warnings(searches)):
        print(sentence)
    print()
    tables.write(comparison.table(searches), sys.stdout)
    print(f"\nreport: {out.resolve() / 'comparison.html'}")
