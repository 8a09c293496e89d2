"""`ksopt.optimize`: search, convert, compile and time, in one call."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ksopt.conversion.apply import Conversion, convert
from ksopt.conversion.layers import find
from ksopt.conversion.model_call import ModelCall, evaluating
from ksopt.conversion.plan import Plan
from ksopt.conversion.resolve import resolve
from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Comparison
from ksopt.optimization.result import Optimized
from ksopt.optimization.selection import slight_layers, uncalled_layers
from ksopt.optimization.speed import Speed, measure_calls, measure_steps, own_loss
from ksopt.patterns.size import Dims
from ksopt.search.layers import words
from ksopt.search.model_layers import batch_of, layers_of_model, placement
from ksopt.search.one_call import search
from ksopt.search.plan import plan_of
from ksopt.search.progress import Progress, for_terminal
from ksopt.search.results import SearchResult
from ksopt.search.surroundings import reads_surroundings

MODES = ("inference", "training")
_FIXED = {
    "train": "mode='training' says it",
    "device": "it is the model's; move the model",
    "dtype": "it is the model's; convert the model",
}
_NOT_FASTER = {
    Comparison.SLOWER: "the whole model, compiled, was slower with chains than dense.",
    Comparison.WITHIN_NOISE: "the whole model, compiled, was not measurably faster with chains.",
}


def optimize(
    model: nn.Module,
    example_inputs: object,
    budget: str | float = "25%",
    mode: str = "inference",
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    max_error: float | None = None,
    refine: int = 0,
    loss: Callable[[Any], Tensor] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Optimized:
    """Speed up a model: search chains for its linear layers, convert a copy, compile and time it.

    The layers are searched on the model's device, with its dtype and with as many rows as the
    inputs give them. Layers whose chains are not faster stay dense. The model with chains, compiled
    by ksopt, is timed beside the dense one, compiled by Inductor; if it is not faster, the passed
    model is returned with the reason.

    The passed model does not change. The weights of chains are those nearest to the dense ones,
    which are seldom near: check and fine-tune the result, as `Optimized.next_steps` describes.

    Args:
        model: A model with linear layers, on the target device.
        example_inputs: Its inputs: a tensor, a tuple of arguments or a mapping of keyword
            arguments. Their size matters: chains are faster on many rows.
        budget: The most weights of a layer's chain: ``"25%"``, ``0.25`` or ``"600k"``.
        mode: "inference" times calls without gradients, "training" forward and backward.
        include: Names or patterns for names: only these layers may become chains.
        exclude: Names or patterns for names: these stay dense.
        max_error: Layers whose weights would have a larger relative error stay dense.
        refine: Steps of gradient refinement of chains of three factors or more.
        loss: In training, (the model's output) -> a scalar loss. By default the ``loss`` of the
            output, or else the mean square of all its tensors.
        quiet: Whether to show no progress; otherwise it goes to stderr.
        **options: Of the search, such as ``trials=30``, ``timeout_s=600`` or ``out="report"``
            (`ksopt.search.options.SearchOptions`).

    Returns:
        The model, the plan, the report, speeds before and after, errors, and what to do next.

    Raises:
        InvalidInputError: An argument is not allowed: a model without linear layers or values,
            inputs that it does not accept, an unknown mode, a budget that no layer can have.
        KsoptError: The model cannot be compiled.

    docs/optimize.md has examples that run.
    """
    began = time.monotonic()
    _check(model, mode, options)
    device = _device(model)
    call = ModelCall.of(example_inputs, device, None, "optimize")
    names = {"include": words(include), "exclude": words(exclude)}
    layers_of_model(
        model, "the model", names["include"], names["exclude"]
    )  # refused before the model is run
    with evaluating(model):
        rows = call.rows(model)
    uncalled = uncalled_layers(model, rows)
    slight = {} if names["include"] else slight_layers(model, rows)
    left_out = (*names["exclude"], *uncalled, *slight)
    reads_graph = reads_surroundings({"train": mode == "training"} | options)
    read = call if reads_graph else None
    layers = layers_of_model(model, type(model).__name__, names["include"], left_out, read)
    result = search(
        layers,
        budget if isinstance(budget, str) else repr(budget),
        quiet=quiet,
        **placement(model) | batch_of(model, rows) | {"train": mode == "training"} | options,
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    progress = for_terminal(sys.stderr, quiet)
    try:
        plan = plan_of(result)
        done = partial(
            Optimized, plan=plan, report=result.folder / "report.html", mode=mode, search=result
        )
        _, planned_dense = resolve(model, plan, (), (), call)
        dense = _reasons(model, result, planned_dense, uncalled) | slight
        conversion = _converted(model, plan, example_inputs, max_error, refine, progress)
        dense |= {name: why for name, why in conversion.dense.items() if name not in dense}
        compiled, reason = model, _why_none(result, conversion)
        speed: Speed | None = None
        if conversion.layers:
            _check_runs(conversion.model, call)
            progress.note("compiling the model, dense and with chains, and timing it")
            speed, compiled = _timed(model, conversion.model, call, device, mode, loss)
            reason = _NOT_FASTER.get(speed.comparison, "")
    finally:
        progress.close()
    return done(
        model=model if reason else compiled,
        reason=reason,
        speed=speed,
        conversion=None if reason else conversion,
        dense=dense,
        seconds=time.monotonic() - began,
    )


def _check(model: object, mode: str, options: Mapping[str, Any]) -> None:
    if mode not in MODES:
        raise InvalidInputError(
            f"optimize: mode {mode!r} is unknown: it must be 'inference' or 'training'"
        )
    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            f"optimize: the model must be a torch.nn.Module, and is {type(model).__name__}"
        )
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise InvalidInputError(
            "optimize: the model is compiled already: pass it as it was before torch.compile"
        )
    for name, hint in _FIXED.items():
        if name in options:
            raise InvalidInputError(f"optimize: leave {name} out: {hint}")
    if mode == "training" and not any(one.requires_grad for one in model.parameters()):
        raise InvalidInputError(
            "optimize: no parameter of the model requires a gradient, so there is no training step "
            "to time"
        )
    empty = next((name for name, one in model.named_parameters() if one.is_meta), None)
    if empty is not None:
        raise InvalidInputError(
            f"optimize: the parameter {empty} is on the meta device, which holds no values: load "
            "the model's weights first"
        )


def _device(model: nn.Module) -> torch.device:
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise InvalidInputError(
            f"optimize: the model is on several devices, {', '.join(sorted(devices))}: move it "
            "to one"
        )
    return torch.device(placement(model).get("device", "cpu"))


def _reasons(
    model: nn.Module,
    result: SearchResult,
    planned_dense: Mapping[str, str],
    uncalled: Sequence[str],
) -> dict[str, str]:
    """The reason each layer stays dense, by name: not searched, or no faster chain."""
    assert result.request.model is not None
    reasons = dict(result.request.model.dense)
    reasons |= dict.fromkeys(uncalled, "the inputs do not reach it as a layer")
    sizes = {place.name: Dims(place.in_features, place.out_features) for place in find(model)[0]}
    for name in planned_dense:
        if name in reasons:
            continue
        layer = result.of(sizes[name])
        answers = () if layer is None else layer.recommendations
        unmet = result.unmet.get(sizes[name], "nothing was measured")
        reasons[name] = answers[-1].sentence if answers else unmet
    return reasons


def _converted(
    model: nn.Module,
    plan: Plan,
    inputs: object,
    max_error: float | None,
    refine: int,
    progress: Progress,
) -> Conversion:
    """A copy with chains; it cannot be reverted, so that its dense weights can be freed."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise InvalidInputError(
            f"optimize: the model cannot be copied: {type(error).__name__}: {error}"
        ) from error
    done = convert(
        twin,
        plan,
        refine=refine,
        max_error=max_error,
        example_inputs=inputs,
        progress=lambda text: progress.note(f"projecting {text}"),
    )
    return replace(done, _undo=[])


def _why_none(result: SearchResult, conversion: Conversion) -> str:
    if conversion.layers:
        return ""
    if all(not rule.chains for rule in plan_of(result).rules):
        return "no chain that was measured is enough faster than its dense layer on this device."
    return "every chain that wins is left out for its error, or a weight that it shares."


def _check_runs(model: nn.Module, call: ModelCall) -> None:
    try:
        with evaluating(model):
            call.caller(model)()
    except Exception as error:
        raise InvalidInputError(
            "optimize: the model with chains does not run: "
            f"{type(error).__name__}: {error}. A module reads the weight of a layer that became a "
            "chain: keep that layer dense with exclude="
        ) from error


def _timed(
    model: nn.Module,
    converted: nn.Module,
    call: ModelCall,
    device: torch.device,
    mode: str,
    loss: Callable[[Any], Tensor] | None,
) -> tuple[Speed, nn.Module]:
    if mode == "training":
        return measure_steps(model, converted, call, device, loss or own_loss)
    return measure_calls(model, converted, call, device)
