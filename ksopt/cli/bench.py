"""The command ``ksopt bench kernels``: its arguments and its output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ksopt.bench.options import BenchOptions
from ksopt.cli.progress_lines import print_left
from ksopt.system import option_fields
from ksopt.system.user_code import import_plugins

if TYPE_CHECKING:  # the parser is built for every command: it must not load torch
    from ksopt.bench.result_tables import Series
    from ksopt.bench.results import Line

SUMMARY = "Check and time single factors and chains beside PyTorch's ways to multiply by them."
EPILOG = """\
examples:
  ksopt bench kernels --patterns "(4,64,64,16)" "(1,96,96,3)" --device cpu
  ksopt bench kernels --patterns sample:40 --dtype bfloat16 --against eager,inductor
  ksopt bench kernels --patterns paper --dtype float16 --timeout 600 --out fp16   # again: goes on
  ksopt bench kernels --chain "(1,64,64,64)*(64,64,64,1)" --batch 1,16,64 --graph
  ksopt bench kernels --chain "(1,64,64,64)*(64,64,64,1)" --epilogue bias gelu   # a whole layer
  ksopt bench kernels --report fp16 fp32 --out both                   # one page, no GPU needed

exit codes: 0 done, or the time was up; 1 a result of ksopt is wrong, or a device failed; 2 an
argument is not allowed; 130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds --json and --traceback."""
    option_fields.add_arguments(command, BenchOptions)
    effort = command.add_argument_group("the run").add_argument
    effort("--workers", type=int, default=1, metavar="N", help="GPUs to measure on (%(default)s)")
    effort("--timeout", type=float, metavar="SECONDS", help="begin no new product after so long")
    effort(
        "--out",
        type=Path,
        default=Path("ksopt-report-bench"),
        metavar="FOLDER",
        help="where everything goes; the same command goes on where it stopped (%(default)s)",
    )
    effort(
        "--report",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="measure nothing: make one report of these folders",
    )


def run(args: argparse.Namespace) -> int:
    """Measure or report, and print the answer; return the exit code.

    Raises:
        KsoptError: see `ksopt.bench.run.run_bench`.
    """
    from ksopt.bench import report, result_tables
    from ksopt.bench.request import BenchRequest
    from ksopt.bench.run import run_bench
    from ksopt.errors import InvalidInputError, KsoptError
    from ksopt.system import untrusted

    if args.report:
        if args.patterns or args.chain:
            raise InvalidInputError("--report measures nothing: leave out --patterns and --chain")
        named = " and ".join(map(str, args.report))
        form = "what is in it is not as `ksopt bench kernels` writes it"
        with untrusted.of_its_form(f"--report {named}", form):
            series = [result_tables.Series.read(folder) for folder in args.report]
            report.write(series, args.out)
            _show(args, series)
            return _exit_code(series)
    if args.timeout is not None and not args.timeout > 0:
        raise InvalidInputError(f"--timeout {args.timeout:g}: it must be above 0 seconds")
    import_plugins(args.plugins, sys.stderr)
    request = BenchRequest.of(BenchOptions(**option_fields.values(BenchOptions, args)))
    progress = None if args.json or args.quiet else _Progress(sys.stderr)
    try:
        outcome = run_bench(
            request, args.out, workers=args.workers, timeout_s=args.timeout, progress=progress
        )
    except InvalidInputError:
        raise
    except KsoptError:
        report.write([result_tables.Series.read(args.out)], args.out)
        raise
    series = [result_tables.Series.read(args.out)]
    report.write(series, args.out)
    _show(args, series)
    if outcome.stopped and not args.json:
        left = len(request.subjects) - len(series[0].lines)
        print_left(left, "product")
    if outcome.stopped == "interrupted":
        return 130
    return _exit_code(series)


def _exit_code(series: Sequence[Series]) -> int:
    """1 for a fault of ksopt; those of PyTorch's ways are only reported."""
    return 1 if any(row.is_own_fault for one in series for row in one.rows) else 0


def _show(args: argparse.Namespace, series: Sequence[Series]) -> None:
    from ksopt.bench import report, result_tables
    from ksopt.report import tables

    if args.json:
        sys.stdout.write(report.to_json(series))
        return
    lines = [line for one in series for line in one.lines]
    if 0 < len(lines) <= _LINES_SHOWN:
        tables.write(result_tables.lines_table(lines))
        print()
    chains = [
        line for line in lines if not line.subject.is_pattern and result_tables.dense_row(line)
    ]
    if chains:
        tables.write(result_tables.dense_table(chains))
        print()
    tables.write(result_tables.overall_table(series))
    for row in result_tables.faults(series):
        print(f"{row.subject}: {row.way} {row.layout}: {row.reason}", file=sys.stderr)
    print(f"\nPage: {args.out / 'bench.html'}; every measurement: {args.out / 'bench.csv'}")


_LINES_SHOWN = 60


class _Progress:
    """Progress: one line that is overwritten on a terminal, a line per product elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._over = stream.isatty()

    def __call__(self, done: int, total: int, line: Line) -> None:
        ours, ratio = line.ours, line.ratio(line.best)
        took = f"{ours.latency.median_us:,.1f} us" if ours.latency else ours.reason
        share = f", efficiency {ours.efficiency:.2f}" if ours.efficiency is not None else ""
        times = f", {ratio:.2f} times PyTorch's best" if ratio is not None else ""
        text = f"{done} of {total}: {line.subject}: {took}{share}{times}"
        if self._over:
            end = "\n" if done == total else ""
            print(f"\r\x1b[2K{text[:110]}", end=end, file=self._stream, flush=True)
        else:
            print(text, file=self._stream, flush=True)
