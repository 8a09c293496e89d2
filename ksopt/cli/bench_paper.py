"""The command ``ksopt bench paper``: its arguments and its output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ksopt.bench.reproduction.options import PaperOptions
from ksopt.cli.progress_lines import progress_lines
from ksopt.system import option_fields

SUMMARY = "Measure the paper's tables and figures anew, with ksopt's kernels beside its own ways."
EPILOG = """\
examples:
  ksopt bench paper --figure 6 --quick                   # a sample, on a GPU some minutes
  ksopt bench paper --table 3 5 --quick --minutes 10     # again: goes on where it stopped
  ksopt bench paper --all --out paper                    # all patterns, on all GPUs
  ksopt bench paper --table 7 --device cpu               # small stand-ins

Tables: 3, 4, 5, 6, 7, 8. Figures: 4, 6, 7, 9 to 17.

exit codes: 0 done, or the time was up; 1 a result of ksopt is wrong, or a device failed; 2 an
argument is not allowed; 130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds --json and --traceback."""
    option_fields.add_arguments(command, PaperOptions)
    effort = command.add_argument_group("the run").add_argument
    effort(
        "--workers", type=int, metavar="N",
        help="GPUs to measure on at once (all, unless --device names one)",
    )  # fmt: skip
    effort(
        "--minutes", type=float, metavar="M",
        help="begin nothing new after so long",
    )  # fmt: skip
    effort(
        "--out",
        type=Path,
        default=Path("ksopt-report-paper"),
        metavar="FOLDER",
        help="where everything goes; the same command goes on where it stopped (%(default)s)",
    )
    effort(
        "--report", action="store_true",
        help="measure nothing: write the report of what --out holds",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and print the answer; return the exit code.

    Raises:
        KsoptError: see `ksopt.bench.reproduction.run.run_paper`.
    """
    from ksopt.bench.reproduction import missing_measurements, paper_comparison, report
    from ksopt.bench.reproduction import run as runs
    from ksopt.bench.reproduction.products import KERNEL
    from ksopt.bench.reproduction.request import PaperRequest
    from ksopt.bench.reproduction.results import Results
    from ksopt.bench.reproduction.saved_request import SavedRequest
    from ksopt.errors import InvalidInputError, KsoptError
    from ksopt.report import tables

    if args.minutes is not None and not args.minutes > 0:
        raise InvalidInputError(f"--minutes {args.minutes:g}: it must be above 0")
    outcome = runs.Outcome((), False, ())
    if args.report:
        saved = SavedRequest.read(args.out)
    else:
        request = PaperRequest.of(PaperOptions(**option_fields.values(PaperOptions, args)))
        for remark in request.remarks:
            print(remark, file=sys.stderr)
        saved = SavedRequest.of(request).merge_into(args.out)
        progress = progress_lines(args.quiet)
        workers = runs.gpus_of(args.device) if args.workers is None else args.workers
        try:
            outcome = runs.run_paper(
                request, args.out, workers=workers, minutes=args.minutes, progress=progress
            )
        except InvalidInputError:
            raise
        except KsoptError:  # report the earlier measurements
            report.write(Results.read(args.out), saved, args.out)
            raise
    measurements = Results.read(args.out)
    every = report.write(measurements, saved, args.out)
    if args.json:
        sys.stdout.write(paper_comparison.to_json(every))
    else:
        for item in saved.items:
            of_item = [one for one in every if one.item == item.name]
            print(f"{item.name}: {item.title}")
            tables.write(paper_comparison.table(of_item))
            print()
        print(f"Page: {args.out / 'paper.html'}; every number: {args.out / 'paper.csv'}")
    rivals = [one for one in measurements.absences if one.is_fault and one.way != KERNEL]
    groups = map(str, missing_measurements.grouped(rivals))
    for sentence in (*outcome.remarks, *outcome.failures, *measurements.faults, *groups):
        print(sentence, file=sys.stderr)
    if outcome.left:
        names = ", ".join(outcome.left)
        print(f"not complete: {names}; the same command goes on with them", file=sys.stderr)
    if outcome.is_interrupted:
        return 130
    return 1 if measurements.faults or outcome.failures else 0
