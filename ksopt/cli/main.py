"""The command line: parses arguments, calls the library and prints.

Exit codes: 0 done, 1 failed, 2 misuse, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence

import ksopt
from ksopt.cli import bench as bench_command
from ksopt.cli import bench_crossover, bench_models, bench_paper, explain_kernel, tune
from ksopt.cli import completion as completion_command
from ksopt.cli import convert as convert_command
from ksopt.cli import doctor as doctor_command
from ksopt.cli import explain as explain_command
from ksopt.cli import report as report_command
from ksopt.cli import search as search_command
from ksopt.cli import show as show_command
from ksopt.cli import space as space_command
from ksopt.cli.parser import Parser, add_command
from ksopt.cli.verbosity import logged
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.system.device_names import refuse_absent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    Args:
        arguments: the words after ``ksopt``; None takes the process's own.

    Raises:
        SystemExit: for --help, --version and words that argparse refuses.
    """
    args = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        with logged(args.verbose, sys.stderr):
            if not getattr(args, "plugins", ()):  # which may add a type of devices
                refuse_absent(getattr(args, "device", "auto"))
            code = run(args)
            sys.stdout.flush()  # detects a closed pipe here, not at exit
            return code
    except InvalidInputError as error:
        if args.traceback and error.__cause__ is not None:  # the user's own code raised
            raise
        return _fail(error, 2)
    except KsoptError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:  # `ksopt doctor | head -1`: no reader is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # show a traceback only with --traceback
        if args.traceback:
            raise
        return _fail(f"{type(error).__name__}: {error} (--traceback shows where)", 1)


def _fail(what: object, code: int) -> int:
    print(f"ksopt: {what}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ksopt",
        description="Kronecker-sparse linear layers: find the patterns that are fast on a device.",
        epilog="`ksopt COMMAND --help` describes a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ksopt {ksopt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in (
        ("search", search_command),
        ("report", report_command),
        ("space", space_command),
        ("show", show_command),
        ("explain", explain_command),
        ("explain-kernel", explain_kernel),
        ("convert", convert_command),
        ("doctor", doctor_command),
        ("tune", tune),
    ):
        add_command(
            commands,
            name,
            command.run,
            command.SUMMARY,
            command.EPILOG,
            getattr(command, "add_arguments", None),
            getattr(command, "USAGE", None),
        )
    bench = commands.add_parser("bench", help="measure ksopt itself", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in (
        ("kernels", bench_command),
        ("models", bench_models),
        ("paper", bench_paper),
        ("crossover", bench_crossover),
    ):
        add_command(kinds, name, kind.run, kind.SUMMARY, kind.EPILOG, kind.add_arguments)
    add_command(
        commands,
        "completion",
        functools.partial(completion_command.run, parser=_parser),
        completion_command.SUMMARY,
        completion_command.EPILOG,
        completion_command.add_arguments,
    )
    return parser
