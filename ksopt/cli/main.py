"""The command line: it reads arguments, calls the library, prints. Everything else is elsewhere.

Exit codes: 0 done, 1 failed, 2 misuse, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ksopt
from ksopt.cli import bench as bench_command
from ksopt.cli import bench_models, tune
from ksopt.cli import convert as convert_command
from ksopt.cli import doctor as doctor_command
from ksopt.cli import explain as explain_command
from ksopt.cli import report as report_command
from ksopt.cli import search as search_command
from ksopt.cli import show as show_command
from ksopt.cli import space as space_command
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.search.storage_url import without_password


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    Args:
        arguments: the words after ``ksopt``; None takes the process's own.

    Raises:
        SystemExit: for --help, --version and words that argparse refuses.
    """
    given = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        code = run(given)
        sys.stdout.flush()  # a reader that has gone is noticed here, not at exit
        return code
    except InvalidInputError as error:
        if given.traceback and error.__cause__ is not None:  # the user's own code raised
            raise
        return _fail(error, 2)
    except KsoptError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:  # `ksopt doctor | head -1`: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # a traceback is not an answer, unless it was asked for
        if given.traceback:
            raise
        return _fail(f"{type(error).__name__}: {error} (--traceback shows where)", 1)


def _fail(what: object, code: int) -> int:
    print(f"ksopt: {what}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Answers a misused argument with one line, not with the whole usage before it."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        for word in self._words:
            if "\0" in word:
                self.error(f"{word!r}: no argument can hold a NUL character")
            # argparse takes the value -- for an empty list.
            if word.startswith("--") and word.endswith("=--"):
                self.error(f"{word}: -- is no value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        # It may quote a storage's URL that it does not understand.
        for word in self._words:
            message = message.replace(word, without_password(word)) if word else message
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help says what is allowed)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ksopt",
        description="Kronecker-sparse linear layers: find the patterns that are fast on a device.",
        epilog="`ksopt COMMAND --help` describes a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ksopt {ksopt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = _add_command(
        commands, "search", search_command.run, search_command.SUMMARY, search_command.EPILOG
    )
    search_command.add_arguments(command)
    command = _add_command(
        commands, "report", report_command.run, report_command.SUMMARY, report_command.EPILOG
    )
    report_command.add_arguments(command)
    text = "Count and list the chains that a search of a layer chooses from."
    command = _add_command(commands, "space", space_command.run, text, space_command.EPILOG)
    space_command.add_arguments(command)
    command = _add_command(
        commands, "show", show_command.run, show_command.SUMMARY, show_command.EPILOG
    )
    show_command.add_arguments(command)
    command = _add_command(
        commands, "explain", explain_command.run, explain_command.SUMMARY, explain_command.EPILOG
    )
    explain_command.add_arguments(command)
    text = "Replace the linear layers of a trained model by chains, and say how near they come."
    command = _add_command(commands, "convert", convert_command.run, text, convert_command.EPILOG)
    convert_command.add_arguments(command)
    _add_command(
        commands, "doctor", doctor_command.run, doctor_command.SUMMARY, doctor_command.EPILOG
    )
    _add_bench(commands)
    command = _add_command(commands, "tune", tune.run, tune.SUMMARY, tune.EPILOG)
    tune.add_arguments(command)
    return parser


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = commands.add_parser("bench", help="measure ksopt itself", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    text = "Check and time single factors and chains beside PyTorch's ways to multiply by them."
    command = _add_command(kinds, "kernels", bench_command.run, text, bench_command.EPILOG)
    bench_command.add_arguments(command)
    command = _add_command(
        kinds, "models", bench_models.run, bench_models.SUMMARY, bench_models.EPILOG
    )
    bench_models.add_arguments(command)


def _add_command(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary[0].lower() + summary[1:].rstrip("."),
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print one JSON document to stdout")
    command.add_argument("--traceback", action="store_true", help="show where an error came from")
    return command
