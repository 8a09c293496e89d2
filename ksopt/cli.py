"""The command line: it reads arguments, calls the library, prints. Everything else is elsewhere.

Exit codes: 0 done, 1 failed, 2 misuse, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import ksopt
from ksopt import tune_command
from ksopt.bench import command as bench_command
from ksopt.compile import command as explain_command
from ksopt.conversion import command as convert_command
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.search import listing_command as space_command
from ksopt.search.request import SearchRequest

_SEARCH_EPILOG = """\
units:
  dims     INxOUT as in nn.Linear(in, out): 768x3072 has 768 inputs and 3072 outputs
  budget   a share of the dense layer's IN*OUT weights (25%, 0.25) or a count (600k, 2.4M);
           the bias is not counted
  times    microseconds, the median of many repeats

examples:
  ksopt search --dims 768x3072
  ksopt search --dims 768x3072 --budget 25%
  ksopt search --dims 4096x4096 --budget 10% 25% 2M --dtype bfloat16 --batch 8192 --device cuda
  ksopt search --dims 768x3072 --timeout 600 --out mlp      # the same again goes on from there

exit codes: 0 done, 1 failed, 2 an argument is not allowed, 130 stopped with Ctrl-C
"""

_DOCTOR_EPILOG = """\
exit codes: 0, or 1 when something keeps ksopt from working at all
"""


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


def _search(given: argparse.Namespace) -> int:
    if given.replay is not None:
        return _replay(given)
    if given.dims is None:
        raise InvalidInputError("search: give the layer's size, --dims INxOUT, or a --replay")
    request = SearchRequest(
        dims=given.dims,
        budgets=tuple(given.budget or ()),
        batch=given.batch,
        dtype=given.dtype,
        layout=given.layout,
        device=given.device,
        max_factors=given.factors,
        trials=given.trials,
        timeout_s=given.timeout,
        seed=given.seed,
        storage=given.storage,
        study=given.study,
        workers=given.workers,
        out=given.out,
        min_rank=given.min_rank,
        min_use=given.min_use,
        weights=given.weights,
        max_error=given.max_error,
        max_params=given.max_params,
        min_speedup=given.min_speedup,
        objective=given.objective,
    )
    from ksopt.search import for_terminal, print_result, run_search, to_json

    # Progress goes to stderr, so that stdout holds the answer alone; a program wants none of it.
    result = run_search(request, for_terminal(sys.stderr, quiet=given.json))
    if given.json:
        sys.stdout.write(to_json(result))
    else:
        print_result(result, sys.stdout)
    return 130 if result.stopped == "interrupted" else 0


def _replay(given: argparse.Namespace) -> int:
    unset = vars(_parser().parse_args(["search"]))
    free = ("replay", "out", "study", "json", "traceback")
    others = [name for name in unset if name not in free and getattr(given, name) != unset[name]]
    if others:
        named = ", ".join("--" + name.replace("_", "-") for name in others)
        raise InvalidInputError(
            f"search --replay measures nothing, so {named} cannot be given with it: only --out, "
            "--study and --json can"
        )
    from ksopt.search import print_result, to_json
    from ksopt.search.again import replay

    result = replay(given.replay, given.study, given.out)
    if given.json:
        sys.stdout.write(to_json(result))
    else:
        print_result(result, sys.stdout)
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from ksopt.doctor import diagnose, print_diagnosis

    diagnosis = diagnose()
    if given.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        print_diagnosis(diagnosis)
    return 1 if diagnosis.is_broken else 0


class _Parser(argparse.ArgumentParser):
    """Answers a misused argument with one line, not with the whole usage before it."""

    def error(self, message: str) -> NoReturn:
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
    _add_search(commands)
    text = "Count and list the chains that a search of a layer chooses from."
    command = _add_command(commands, "space", space_command.run, text, space_command.EPILOG)
    space_command.add_arguments(command)
    command = _add_command(
        commands, "explain", explain_command.run, explain_command.SUMMARY, explain_command.EPILOG
    )
    explain_command.add_arguments(command)
    text = "Replace the linear layers of a trained model by chains, and say how near they come."
    command = _add_command(commands, "convert", convert_command.run, text, convert_command.EPILOG)
    convert_command.add_arguments(command)
    _add_command(
        commands,
        "doctor",
        _doctor,
        "Say what ksopt finds on this machine, what will be slow, and how to fix it.",
        _DOCTOR_EPILOG,
    )
    _add_bench(commands)
    command = _add_command(
        commands, "tune", tune_command.run, tune_command.SUMMARY, tune_command.EPILOG
    )
    tune_command.add_arguments(command)
    return parser


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = commands.add_parser("bench", help="measure ksopt itself", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    text = "Check and time single factors and chains beside PyTorch's ways to multiply by them."
    command = _add_command(kinds, "kernels", bench_command.run, text, bench_command.EPILOG)
    bench_command.add_arguments(command)


def _add_search(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add_command(
        commands,
        "search",
        _search,
        "Measure chains of patterns for a linear layer on this device, and recommend.",
        _SEARCH_EPILOG,
    )
    layer = command.add_argument_group("the layer").add_argument
    layer("--dims", metavar="INxOUT", help="its size, such as 768x3072")
    layer("--batch", type=_integer, metavar="ROWS", help="rows of its input (256, on a GPU 8192)")
    layer("--dtype", default=SearchRequest.dtype, help="float32 (default), float16 or bfloat16")
    layer(
        "--layout",
        default=SearchRequest.layout,
        help="batch_first (default): input (rows, features); batch_last: (features, rows)",
    )
    layer(
        "--device",
        default=SearchRequest.device,
        help="cpu, cuda, cuda:1, ...; auto (default) is the first GPU, or the CPU without one",
    )

    chains = command.add_argument_group("the chains").add_argument
    chains(
        "--budget",
        nargs="*",
        metavar="SIZE",
        help="the most weights, such as 25%% or 600k; several are steps of a ladder, and none "
        "given means 10%% 25%% 50%%",
    )
    chains(
        "--min-use",
        type=_number,
        default=SearchRequest.min_use,
        metavar="SHARE",
        help="least share of a step's budget that its chain must use, 0 to 1 (%(default)s)",
    )
    chains(
        "--min-rank",
        type=_integer,
        metavar="RANK",
        help="least rank that the product can have (full: the smaller of IN and OUT)",
    )
    chains(
        "--factors",
        type=_integer,
        default=SearchRequest.max_factors,
        metavar="MOST",
        help="most factors, 1 to 3 (%(default)s)",
    )

    trained = command.add_argument_group("a trained layer").add_argument
    trained(
        "--weights",
        metavar="FILE[:NAME]",
        help="its weight (.safetensors): how near each chain comes to it is reported",
    )
    trained(
        "--max-error",
        type=_number,
        metavar="SHARE",
        help="most relative error to it that a recommended chain may have (no limit)",
    )

    wanted = command.add_argument_group("what is wanted").add_argument
    wanted(
        "--objective",
        default=SearchRequest.objective,
        help="pareto (default): low latency and few weights; latency: low latency alone",
    )
    wanted("--max-params", metavar="SIZE", help="the most weights of any step, such as 600k")
    wanted(
        "--min-speedup",
        type=_number,
        metavar="TIMES",
        help="how many times as fast as dense a recommended chain must be, such as 1.2",
    )

    effort = command.add_argument_group("the search").add_argument
    effort(
        "--trials",
        type=_integer,
        default=SearchRequest.trials,
        metavar="COUNT",
        help="chains to measure, those of an earlier run counted (%(default)s)",
    )
    effort(
        "--timeout",
        type=_number,
        metavar="SECONDS",
        help="start no new measurement after so long (no limit)",
    )
    effort(
        "--seed",
        type=_integer,
        default=SearchRequest.seed,
        help="of the sampler, the inputs and the weights (%(default)s)",
    )
    effort(
        "--storage",
        metavar="URL",
        help="Optuna storage, such as sqlite:///study.db, postgresql://user@host/name or "
        "journal:FILE; searches that are given the same share its study, also from several "
        "machines (a SQLite file in the output folder)",
    )
    effort(
        "--replay",
        metavar="FOLDER",
        help="write the report of a search again, from its folder or storage, and measure nothing",
    )
    effort(
        "--study",
        default=SearchRequest.study,
        metavar="NAME",
        help="name of the study in the storage (%(default)s)",
    )
    effort(
        "--workers",
        type=_integer,
        default=SearchRequest.workers,
        metavar="COUNT",
        help="processes that measure, one for each GPU (%(default)s)",
    )
    effort(
        "--out",
        metavar="FOLDER",
        help="where the report goes; a search in the same folder goes on where it stopped "
        "(ksopt-report-...)",
    )


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


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
