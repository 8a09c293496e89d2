"""The command line: it reads arguments, calls the library, prints. Everything else is elsewhere.

Exit codes: 0 done, 1 failed, 2 misuse, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

import ksopt
from ksopt.errors import InvalidInputError, KsoptError

_SEARCH_EPILOG = """\
units:
  dims     INxOUT as in nn.Linear(in, out): 768x3072 has 768 inputs and 3072 outputs
  budget   a share of the dense layer's IN*OUT weights (25%%, 0.25), or a count (600k, 2.4M);
           the bias is not counted
  times    microseconds in every output, the median of many repeats

examples:
  ksopt search --dims 768x3072
  ksopt search --dims 768x3072 --budget 25%%
  ksopt search --dims 4096x4096 --budget 10%% 25%% 2M --dtype bfloat16 --batch 8192 --device cuda
  ksopt search --dims 768x3072 --timeout 600 --out mlp      (again with the same --out: it goes on)
"""

_DOCTOR_EPILOG = """\
exit code: 0, or 1 when something keeps ksopt from working at all
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    Args:
        arguments: the words after ``ksopt``; None takes the process's own.

    Raises:
        SystemExit: for --help, --version and words that argparse refuses.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        return run(given)
    except InvalidInputError as error:
        return _fail(given, error, 2)
    except KsoptError as error:
        return _fail(given, error, 1)
    except KeyboardInterrupt:
        print(f"\nksopt {given.command}: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`ksopt doctor | head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # whatever a user did, a traceback is not an answer
        if given.traceback:
            raise
        text = f"{type(error).__name__}: {error} (--traceback shows where it happened)"
        return _fail(given, text, 1)


def _fail(given: argparse.Namespace, what: object, code: int) -> int:
    print(f"ksopt {given.command}: {what}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ksopt",
        description="Kronecker-sparse linear layers: find the patterns that are fast on your device.",
    )
    parser.add_argument("--version", action="version", version=f"ksopt {ksopt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_search(commands)
    _add_doctor(commands)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
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
    command.add_argument("--json", action="store_true", help="print one JSON document, nothing else")
    command.add_argument("--traceback", action="store_true", help="do not shorten unexpected errors")
    return command


def _add_search(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = _add_command(
        commands,
        "search",
        _search,
        "Measure chains of patterns for a linear layer on this device, and recommend.",
        _SEARCH_EPILOG,
    ).add_argument
    whole = _whole_number
    add("--dims", required=True, metavar="INxOUT", help="size of the layer")
    add(
        "--budget",
        nargs="*",
        metavar="SIZE",
        help="most weights that a chain may have; several make a ladder (10%% 25%% 50%%)",
    )
    add("--batch", type=whole(1), metavar="ROWS", help="rows of the input")
    add("--dtype", help="float32, float16 or bfloat16")
    add("--layout", help="batch_first (rows, features), PyTorch's own, or batch_last")
    add("--device", help="cpu, cuda, cuda:1, ... (the first GPU if there is one)")
    add("--factors", type=whole(1), metavar="MOST", help="most factors of a chain")
    add("--min-rank", type=whole(1), metavar="RANK", help="least rank bound of a chain")
    add("--trials", type=whole(1), metavar="COUNT", help="most chains to measure, each budget")
    add("--timeout", type=float, metavar="SECONDS", help="stop measuring after so long")
    add("--seed", type=whole(0), help="seed of the sampler and of the inputs (0)")
    add("--storage", metavar="URL", help="Optuna storage (SQLite in the output folder)")
    add("--out", metavar="FOLDER", help="where the report goes (a new folder ksopt-report-...)")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_command(
        commands,
        "doctor",
        _doctor,
        "Say what ksopt finds on this machine, what will be slow, and how to fix it.",
        _DOCTOR_EPILOG,
    )


def _whole_number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least {least}")
        return value

    return parse
