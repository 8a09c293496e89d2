"""The command ``ksopt bench crossover``: its arguments and its output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ksopt.bench.crossover.options import CrossoverOptions
from ksopt.cli.progress_lines import print_left, progress_lines
from ksopt.system import option_fields

SUMMARY = "Map from which budget on a Kronecker-sparse layer is faster than a dense one here."
EPILOG = """\
examples:
  ksopt bench crossover                                   # ten minutes, on a GPU if there is one
  ksopt bench crossover --minutes 3 --precisions bfloat16 --passes inference
  ksopt bench crossover --widths 4096 --rows 1,16,256 --budgets 25%,12.5%

The most informative layers are measured first, and the map says what lies between them. The same
command goes on with the others.

exit codes: 0 done, or the time was up; 1 a result is wrong; 2 an argument is not allowed;
130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds --json and --traceback."""
    option_fields.add_arguments(command, CrossoverOptions)
    effort = command.add_argument_group("the run").add_argument
    effort(
        "--out",
        type=Path,
        default=Path("ksopt-report-crossover"),
        metavar="FOLDER",
        help="where everything goes; the same command goes on where it stopped (%(default)s)",
    )
    effort(
        "--report",
        action="store_true",
        help="measure nothing: write the report of what --out holds",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print the answer; return the exit code.

    Raises:
        KsoptError: see `ksopt.bench.crossover.run.run_crossover`.
    """
    from ksopt.bench import results_log
    from ksopt.bench.crossover import report, views
    from ksopt.bench.crossover import run as runs
    from ksopt.bench.crossover.request import CrossoverRequest
    from ksopt.bench.crossover.results import LOG_FORMAT
    from ksopt.report import tables

    request = CrossoverRequest.of(CrossoverOptions(**option_fields.values(CrossoverOptions, args)))
    for remark in request.remarks:
        print(remark, file=sys.stderr)
    stopped = ""
    if not args.report:
        stopped = runs.run_crossover(request, args.out, progress_lines(args.quiet))
    noted = results_log.read_setting(args.out, LOG_FORMAT).get("runs", [])
    measured = results_log.read_lines(args.out, LOG_FORMAT)
    left = sum(site not in measured for site in request.sites)
    # The page covers all runs in the folder.
    request = request.with_grids([run["grid"] for run in noted])
    report.write(request, measured, noted, args.out)
    cells = views.cells(request, measured)
    if args.json:
        sys.stdout.write(views.to_json(cells))
    else:
        for plane in request.planes:
            print(str(plane))
            tables.write(views.map_table(plane, cells, request))
            print()
        tables.write(views.counts_table(cells, request))
        print(f"\nPage: {args.out / 'crossover.html'}; numbers: {args.out / 'crossover.csv'}")
    faults = [fault for result in measured.values() for fault in result.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    if stopped:
        print_left(left, "layer")
    if stopped == "interrupted":
        return 130
    return 1 if faults else 0
