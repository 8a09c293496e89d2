"""The command ``ksopt bench models``: its arguments and its output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ksopt.bench.models.options import ModelsOptions
from ksopt.cli.progress_lines import print_left, progress_lines
from ksopt.system import option_fields

SUMMARY = "Check and time whole models with Kronecker-sparse layers beside the dense ones."
EPILOG = """\
examples:
  ksopt bench models --small --models gpt2 --dtypes float32          # on a CPU too
  ksopt bench models --models vit --dtypes bfloat16 --out vit        # on a GPU; again: goes on
  ksopt bench models --models llama --dtypes bfloat16 --passes forward --chain quarter
  ksopt bench models --train --dtypes bfloat16 --modes graphs
  ksopt bench models --models gpt2 --plan plan.json --out searched
  ksopt bench models --models llama --batch 16 --length 1 --passes forward --modes graphs

The models are of the library transformers (pip install transformers), with random weights.

exit codes: 0 done, or the time was up; 1 a result is wrong, a layer was missed, or a library is not
there; 2 an argument is not allowed; 130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds --json and --traceback."""
    option_fields.add_arguments(command, ModelsOptions)
    effort = command.add_argument_group("the run").add_argument
    effort(
        "--train",
        action="store_const",
        dest="passes",
        const="step",
        default=argparse.SUPPRESS,
        help="training steps alone: the same as --passes step",
    )
    effort("--timeout", type=float, metavar="SECONDS", help="begin no new case after so long")
    effort(
        "--out",
        type=Path,
        default=Path("ksopt-report-models"),
        metavar="FOLDER",
        help="where everything goes; the same command goes on where it stopped (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print the answer; return the exit code.

    Raises:
        KsoptError: see `ksopt.bench.models.run.run_models`.
    """
    from ksopt.bench import results_log
    from ksopt.bench.models import report
    from ksopt.bench.models import run as runs
    from ksopt.bench.models.request import ModelsRequest
    from ksopt.bench.models.results import Case, Subject
    from ksopt.bench.results_log import ResultsLog
    from ksopt.errors import InvalidInputError
    from ksopt.report import tables

    if args.timeout is not None and not args.timeout > 0:
        raise InvalidInputError(f"--timeout {args.timeout:g}: it must be above 0 seconds")
    request = ModelsRequest.of(ModelsOptions(**option_fields.values(ModelsOptions, args)))

    def report_stored(book: ResultsLog[Subject, Case]) -> None:
        setting = results_log.read_setting(args.out, runs.LOG_FORMAT)
        report.write(args.out, list(book.measured.values()), setting)

    for remark in request.remarks:
        print(remark, file=sys.stderr)
    progress = progress_lines(args.quiet)
    stopped = runs.run_models(
        request, args.out, timeout_s=args.timeout, progress=progress, on_stored=report_stored
    )
    measured = results_log.read_lines(args.out, runs.LOG_FORMAT)
    cases = list(measured.values())
    faults = [fault for case in cases for fault in case.faults]
    if args.json:
        sys.stdout.write(report.to_json(cases, results_log.read_setting(args.out, runs.LOG_FORMAT)))
    else:
        for table in report.main_tables(cases):
            tables.write(table)
            print()
        for sentence in report.sentences(cases):
            print(sentence)
        page, data = args.out / "models.md", args.out / "models.json"
        print(f"\nReport: {page}; all numbers: {data}")
    for fault in faults:
        print(fault, file=sys.stderr)
    if stopped:
        left = sum(subject not in measured for subject in request.subjects)
        print_left(left, "case")
    if stopped == "interrupted":
        return 130
    return 1 if faults else 0
