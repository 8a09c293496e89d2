"""The command ``ksopt search``: its arguments and its output."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ksopt.cli import constraint_arguments
from ksopt.errors import InvalidInputError
from ksopt.search.request import SearchRequest
from ksopt.system import option_fields
from ksopt.system.user_code import import_plugins

if TYPE_CHECKING:
    from ksopt.search.results import SearchResult

SUMMARY = (
    "Measure chains of patterns for a linear layer, several, or those of a model, on this device, "
    "and recommend."
)
USAGE = "ksopt search INxOUT [INxOUT ...] [options]"
EPILOG = f"""\
units:
  dims     INxOUT as in nn.Linear(in, out): 768x3072 has 768 inputs and 3072 outputs
  budget   a share of the dense layer's IN*OUT weights (25%, 0.25) or a count (600k, 2.4M);
           the bias is not counted
  times    microseconds, the median of many repeats

{constraint_arguments.HELP}
examples:
  ksopt search 768x3072
  ksopt search 768x3072 --budget 25%
  ksopt search 4096x4096 --budget 10% 25% 2M --dtype bfloat16 --batch 8192 --device cuda
  ksopt search 4096x4096 --families monarch,low_rank --min-rank 64
  ksopt search 768x3072 --chainable --aligned --block-sizes multiple:16
  ksopt search 768x3072 --timeout 600 --out mlp      # the same command resumes it
  ksopt search 384x384 384x1536 1536x384 --budget 25%
  ksopt search --hf-config config.json --exclude lm_head --timeout 1800
  ksopt search --model mymodel:build --measure-model mymodel:inputs --budget 25% 50%
  ksopt convert --model mymodel:build --plan ksopt-report-.../plan.json --out converted

--model and --measure-model run code: MODULE is imported, from the current folder too, and FACTORY
is called without arguments. --hf-config reads JSON, and nothing else.

exit codes: 0 done, 1 failed (also where every trial did), 2 an argument is not allowed,
            130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds --json and --traceback."""
    what = command.add_argument_group("what is searched: one of these").add_argument
    what(
        "sizes",
        nargs="*",
        metavar="INxOUT",
        help="size of a layer, such as 768x3072; of several, each has its chain in one report",
    )
    what("--dims", nargs="+", action="extend", metavar="INxOUT", help="the same as an option")
    what(
        "--model",
        metavar="MODULE:FACTORY",
        help="the linear layers of the model that FACTORY() returns; runs its code",
    )
    what(
        "--hf-config",
        metavar="FILE",
        help="the linear layers that a transformers config.json describes; runs no code",
    )
    option_fields.add_arguments(command, SearchRequest, before={"study": _add_replay})
    of_model = command.add_argument_group("a model's layers").add_argument
    of_model(
        "--include",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="of a model's layers only these; * allowed",
    )
    of_model(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="of a model's layers not these; * allowed",
    )
    of_model(
        "--measure-model",
        nargs="?",
        const="",
        metavar="MODULE:FACTORY",
        help="at the end, time the whole --model dense and with the plan, on the inputs that "
        "FACTORY() returns (by default a transformers model's own dummy_inputs)",
    )


def _add_replay(add: Callable[..., Any]) -> None:
    add(
        "--replay",
        metavar="FOLDER",
        help="write the report of a search again, from its folder or storage, and measure nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Search, or report again, as the arguments specify; return the exit code."""
    if args.sizes:
        args.dims, args.sizes = [*args.sizes, *(args.dims or [])], []
    with options_named():
        return _run(args)


def in_options(sentence: str) -> str:
    """A sentence with the options named as on the command line.

    Example:
        >>> in_options("min_rank 9: a 8x12 layer has rank at most 8")
        '--min-rank 9: a 8x12 layer has rank at most 8'
    """
    return option_fields.in_flags(SearchRequest, sentence)


@contextlib.contextmanager
def options_named() -> Iterator[None]:
    """Make errors inside the block name the options as on the command line."""
    try:
        yield
    except InvalidInputError as error:
        text = in_options(str(error))
        if text == str(error):
            raise
        raise InvalidInputError(text) from error.__cause__


def _run(args: argparse.Namespace) -> int:
    import_plugins(args.plugins, sys.stderr)
    if args.replay is not None:
        return _replay(args)
    from ksopt.cli.search_layers import Subject

    subject = Subject.of(args)
    options = option_fields.values(SearchRequest, args)
    request = SearchRequest(subject.dims, model_options=subject.model_options, **options)
    from ksopt.search import for_terminal, run_search

    # Progress goes to stderr, so that stdout holds only the answer; --json shows none.
    progress = for_terminal(sys.stderr, quiet=args.json or args.quiet)
    if request.model is not None:
        progress.note(request.model.sentence)
    result = run_search(request, progress, subject.to_measure)
    _show(result, args.json)
    if not args.json:
        _show_next_step(result, args)
    return _exit_code(result)


def _show(result: SearchResult, as_json: bool) -> None:
    from ksopt.search import print_result, to_json

    if as_json:
        sys.stdout.write(to_json(result))
    else:
        print_result(result, sys.stdout)


def _show_next_step(result: SearchResult, args: argparse.Namespace) -> None:
    """Print the command that uses the plan, and report whether the search can be resumed."""
    from ksopt.search import plan_of

    rules = [rule for rule in plan_of(result).rules if rule.chains]
    if rules:
        words = ["ksopt", "convert", "--model", args.model or "MODULE:FACTORY"]
        has_conditions = any(rule.where is not None for rule in rules)
        inputs = args.measure_model or ("MODULE:FACTORY" if has_conditions else "")
        words += ["--inputs", inputs] if inputs else []
        words += ["--plan", str(result.folder / "plan.json"), "--out", "converted"]
        print(f"next:   {shlex.join(words)}")
    if result.stopped is None or args.quiet:
        return
    if result.stopped == "timeout" and not any(layer.trials for layer in result.layers):
        print("The --timeout was too short for one measurement: use a longer one.", file=sys.stderr)
    else:
        print("The same command resumes this search.", file=sys.stderr)


def _exit_code(result: SearchResult) -> int:
    """The exit code of a finished search: 1 if every trial failed, so that there is no answer."""
    if result.stopped == "interrupted":
        return 130
    trials = [trial for layer in result.layers for trial in layer.trials]
    if trials and not any(trial.state in ("complete", "pruned") for trial in trials):
        print("ksopt: no chain could be measured: every trial failed", file=sys.stderr)
        return 1
    return 0


def _replay(args: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    unset = vars(parser.parse_args([]))
    free = ("replay", "out", "study", "plugins")
    others = [name for name in unset if name not in free and getattr(args, name) != unset[name]]
    if others:
        named = ", ".join("--" + name.replace("_", "-") for name in others)
        raise InvalidInputError(
            f"search --replay measures nothing and does not take {named}: only --out, --study, "
            "--plugins and the options of every command"
        )
    from ksopt.search.saved_study import replay

    _show(replay(args.replay, args.study, args.out), args.json)
    return 0
