"""The search as one function, ``ksopt.search(...)``."""

from __future__ import annotations

import copy
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ksopt.errors import InvalidInputError
from ksopt.patterns.size import Dims
from ksopt.search.layers import Layers, words
from ksopt.search.options import LADDER, SearchOptions
from ksopt.search.progress import for_terminal
from ksopt.search.request import SearchRequest
from ksopt.search.results import SearchResult
from ksopt.search.surroundings import reads_surroundings

if TYPE_CHECKING:  # a search of sizes checks its words before torch is imported
    from torch import nn

    from ksopt.search.study import ToMeasure


def search(
    model_or_dims: Dims | str | Sequence[Dims | str] | Layers | nn.Module,
    budget: str | Sequence[str] = LADDER,
    *,
    example_inputs: object = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    quiet: bool = False,
    **options: Any,
) -> SearchResult:
    """Search fast chains for a layer, several layers or a model, and write the report.

    ``ksopt.search(...)`` is this function; ``ksopt search`` is the same on the command line.

    Args:
        model_or_dims: ``"768x3072"``, several sizes, a model, or its layers (`layers_of_model`).
        budget: The most weights of a chain: ``"25%"``, ``"600k"``, or several.
        example_inputs: Inputs of a model: a tensor, a tuple of arguments or a mapping of keyword
            arguments. They determine how many rows its layers see, and by the graph of a call the
            epilogue of each layer, such as a GELU; at the end a copy of the model is timed.
        include: Names or patterns for names: only these layers of a model are searched.
        exclude: Names or patterns for names: these are not.
        quiet: Shows no progress; it goes to stderr otherwise.
        **options: Options of `SearchOptions` by name, such as ``batch=4096``. A model's device and
            dtype are taken from its parameters.

    Returns:
        The result. ``result.folder`` holds the report; `plan_of` creates a plan from it.

    Raises:
        InvalidInputError: An option is unknown or not allowed, or the model has no linear layer or
            does not take the inputs.

    Example:
        >>> import tempfile, ksopt
        >>> result = ksopt.search(
        ...     "32x64", "50%", batch=16, device="cpu", trials=2, out=tempfile.mkdtemp(), quiet=True
        ... )
        >>> (layer,) = result.layers
        >>> layer.recommendations[0].budget.parameters
        1024
    """
    _check_names(options)
    budgets = (budget,) if isinstance(budget, str) else tuple(budget)
    names = {"include": words(include), "exclude": words(exclude)}
    subject: Any = model_or_dims
    to_measure = None
    if not isinstance(model_or_dims, (Dims, str, Sequence, Layers)):
        subject, of_model, to_measure = _of_model(
            model_or_dims, example_inputs, **names, reads_graph=reads_surroundings(options)
        )
        options = of_model | options
    else:
        model_options = {**names, "example_inputs": example_inputs is not None}
        wrong = [name for name, value in model_options.items() if value]
        if wrong:
            raise InvalidInputError(f"search: {wrong[0]} is of a model: give one, or leave it out")
    request = SearchRequest(subject, budgets=budgets, **options)
    from ksopt.search.study import run_search  # imports torch

    return run_search(request, for_terminal(sys.stderr, quiet), to_measure)


def _check_names(options: Mapping[str, Any]) -> None:
    known = [one.name for one in fields(SearchOptions) if one.name != "budgets"]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "budget"], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise InvalidInputError(f"search: there is no option {name!r}: {hint}")


def _of_model(
    model: nn.Module,
    inputs: object,
    include: Sequence[str],
    exclude: Sequence[str],
    reads_graph: bool,
) -> tuple[Layers, dict[str, Any], ToMeasure | None]:
    """A model's layers, the options that follow from it, and the copy that is timed."""
    import torch
    from torch import nn

    from ksopt.conversion.model_call import ModelCall, evaluating
    from ksopt.search.model_layers import batch_of, layers_of_model, placement
    from ksopt.search.study import ToMeasure

    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            f"search: give a model, or a layer's size such as '768x3072'; got "
            f"{type(model).__name__}"
        )
    name = type(model).__name__
    layers = layers_of_model(model, name, include, exclude)
    known: dict[str, Any] = dict(placement(model))
    if inputs is None:
        return layers, known, None
    device = torch.device(known.get("device", "cpu"))
    call = ModelCall.of(inputs, device, None, "search")
    with evaluating(model):
        rows = call.rows(model)
    known |= batch_of(model, rows)
    if reads_graph:
        layers = layers_of_model(model, name, include, exclude, call)
    try:
        whole = copy.deepcopy(model)  # timing moves the copy, and leaves it in evaluation mode
    except Exception as error:
        raise InvalidInputError(
            f"search: the model cannot be copied: {type(error).__name__}: {error}"
        ) from error
    return layers, known, ToMeasure(whole, inputs)
