"""``ksopt search`` of several sizes or a model: its arguments' part, and what it prints."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any

from ksopt.errors import InvalidInputError
from ksopt.search.hf_config import layers_of_config
from ksopt.search.layers_request import LayersRequest, quoted
from ksopt.search.request import Dims

if TYPE_CHECKING:
    from torch import nn

    from ksopt.search.layers_result import LayersResult


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the arguments name a model or several sizes, not one size.

    Raises:
        InvalidInputError: They name nothing, or two things at once, or options do not fit.
    """
    sources = {"--dims": args.dims, "--model": args.model, "--hf-config": args.hf_config}
    named = [name for name, value in sources.items() if value is not None]
    if not named:
        raise InvalidInputError(
            "search: say what to search: the layer's size, --dims INxOUT, or --model "
            "MODULE:FACTORY, or --hf-config FILE; or give a --replay"
        )
    if len(named) > 1:
        raise InvalidInputError(
            f"search: {' and '.join(named)} cannot be given together: search sizes, or a model"
        )
    if args.model is None and args.measure_model is not None:
        raise InvalidInputError("search: --measure-model times the model of --model: give that")
    if named == ["--dims"]:
        for name in ("include", "exclude"):
            if getattr(args, name):
                raise InvalidInputError(
                    f"search: --{name} names layers of a model: give --model or --hf-config, or "
                    "leave it out"
                )
        return len({Dims.parse(text) for text in args.dims}) > 1
    return True


def run(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Search as the arguments say; the exit code.

    Args:
        args: The arguments.
        options: Those that one size's search takes too.
    """
    model: nn.Module | None = None
    what: Any = args.dims
    asked_by = None
    if args.model is not None:
        from ksopt.search.model_layers import layers_of_model
        from ksopt.system.user_code import build_model

        model = build_model(args.model, sys.stderr)
        what = layers_of_model(model, args.model, args.include, args.exclude)
        asked_by = {"model": args.model}
    elif args.hf_config is not None:
        what = layers_of_config(args.hf_config, args.include, args.exclude)
        asked_by = {"hf-config": shlex.quote(args.hf_config)}
    if asked_by is not None:
        asked_by |= _names(args)
    request = LayersRequest.of(what, trials=args.trials, asked_by=asked_by, **options)
    from ksopt.cli.search import exit_code
    from ksopt.search import for_terminal
    from ksopt.search.layers_study import ToMeasure, run_layers

    to_measure = None
    if model is not None and args.measure_model is not None:
        to_measure = ToMeasure(model, _inputs(args.measure_model, model))
    progress = for_terminal(sys.stderr, quiet=args.json)
    if request.layers is not None:
        progress.note(request.layers.sentence)
    result = run_layers(request, progress, to_measure)
    show(result, args.json)
    return exit_code(result.results, result.stopped)


def show(result: LayersResult, as_json: bool) -> None:
    """Print a result."""
    from ksopt.search.report import layers_export

    if as_json:
        sys.stdout.write(layers_export.to_json(result))
    else:
        layers_export.print_result(result, sys.stdout)


def _names(args: argparse.Namespace) -> dict[str, str]:
    """The options that choose layers, as words of a command line."""
    options = {"include": quoted(args.include), "exclude": quoted(args.exclude)}
    if args.measure_model is not None:
        options["measure-model"] = args.measure_model
    return {name: words for name, words in options.items() if words is not None}


def _inputs(text: str, model: nn.Module) -> object:
    """What the model is timed on."""
    if text:
        from ksopt.system.user_code import call_factory

        return call_factory("--measure-model", text, sys.stderr)
    try:
        inputs = getattr(model, "dummy_inputs", None)
    except Exception as error:  # a property of the user's
        raise InvalidInputError(
            f"--measure-model: the model's dummy_inputs raised {type(error).__name__}: {error}"
        ) from error
    if inputs is None:
        raise InvalidInputError(
            "--measure-model: the model has no dummy_inputs of its own; write --measure-model "
            "MODULE:FACTORY, where FACTORY() returns its inputs: a tensor, a tuple of arguments "
            "or a mapping of keyword arguments"
        )
    return inputs
