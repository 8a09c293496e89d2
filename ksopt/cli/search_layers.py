"""The layers that the arguments of ``ksopt search`` name."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ksopt.cli.parser import SIZE
from ksopt.errors import InvalidInputError
from ksopt.search.hf_config import layers_of_config
from ksopt.search.layers import Layers
from ksopt.search.surroundings import reads_surroundings

if TYPE_CHECKING:
    from torch import nn

    from ksopt.conversion.model_call import ModelCall
    from ksopt.search.study import ToMeasure


@dataclass(frozen=True)
class Subject:
    """The layers to search.

    Args:
        dims: Sizes, or a model's layers.
        model_options: The options that name the model, as words of a command line.
        to_measure: The model to time as a whole.
    """

    dims: Sequence[str] | Layers
    model_options: dict[str, str] = field(default_factory=dict)
    to_measure: ToMeasure | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Subject:
        """The layers that the arguments name; builds the model.

        Raises:
            InvalidInputError: They name no layers, or two sources at once, or options do not fit.
        """
        _check(args)
        if args.model is not None:
            from ksopt.search.model_layers import layers_of_model
            from ksopt.search.study import ToMeasure
            from ksopt.system.user_code import build_model

            model = build_model(args.model, sys.stderr)
            layers = layers_of_model(model, args.model, args.include, args.exclude)
            model_options = {"model": args.model, **_names(args)}
            if args.measure_model is None:
                return cls(layers, model_options)
            inputs = _inputs(args.measure_model, model)
            if args.epilogue == ["none"]:  # a request stores it as empty, like a missing option
                model_options["epilogue"] = "none"
            call = _call(model, inputs) if reads_surroundings(vars(args)) else None
            if call is not None:
                layers = layers_of_model(model, args.model, args.include, args.exclude, call)
            return cls(layers, model_options, ToMeasure(model, inputs))
        if args.hf_config is not None:
            layers = layers_of_config(args.hf_config, args.include, args.exclude)
            return cls(layers, {"hf-config": shlex.quote(args.hf_config), **_names(args)})
        return cls(args.dims)


def _call(model: nn.Module, inputs: object) -> ModelCall | None:
    """A call of the model on its own device; None if the model has no values."""
    import torch

    from ksopt.conversion.model_call import ModelCall
    from ksopt.search.model_layers import placement

    placed = placement(model)
    if "device" not in placed:
        return None
    device, dtype = torch.device(placed["device"]), getattr(torch, placed["dtype"])
    return ModelCall.of(inputs, device, dtype, "measure-model")


def _check(args: argparse.Namespace) -> None:
    sources = {"--dims": args.dims, "--model": args.model, "--hf-config": args.hf_config}
    named = [name for name, value in sources.items() if value is not None]
    if not named:
        sizes = [word for word in args.budget or () if SIZE.fullmatch(word)]
        if sizes:
            raise InvalidInputError(
                f"search: --budget took {sizes[0]} for a budget: write the size first, as in "
                f"ksopt search {sizes[0]} --budget 25%"
            )
        raise InvalidInputError(
            "search: say what to search, as in ksopt search 768x3072: the layer's size, also as "
            "--dims INxOUT, or --model MODULE:FACTORY, or --hf-config FILE; or give a --replay"
        )
    if len(named) > 1:
        raise InvalidInputError(
            f"search: {' and '.join(named)} exclude each other: search sizes, or a model"
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


def _names(args: argparse.Namespace) -> dict[str, str]:
    """The options that choose layers, as words of a command line."""
    names = {"include": args.include, "exclude": args.exclude}
    options = {name: " ".join(map(shlex.quote, words)) for name, words in names.items() if words}
    if args.measure_model is not None:
        options["measure-model"] = args.measure_model
    return options


def _inputs(text: str, model: nn.Module) -> object:
    """The inputs that the model is timed on."""
    if text:
        from ksopt.system.user_code import call_factory

        return call_factory("--measure-model", text, sys.stderr)
    try:
        inputs = getattr(model, "dummy_inputs", None)
    except Exception as error:  # dummy_inputs may be a property of the user's class
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
