"""A model timed whole: as it is built, and with a plan's chains in the place of its layers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from ksopt.conversion.apply import share_weights, swap
from ksopt.conversion.layers import New, Place, find, replacement
from ksopt.conversion.plan import Plan
from ksopt.conversion.resolve import resolve
from ksopt.errors import InvalidInputError
from ksopt.measure import timing
from ksopt.nn import KSLinear
from ksopt.operators.linear import StructuredLinear
from ksopt.search import device_locks
from ksopt.search.results import WholeModel

_SECONDS = 4.0
Call = tuple[tuple[Any, ...], dict[str, Any]]


def measure(
    model: nn.Module,
    inputs: object,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float = _SECONDS,
) -> WholeModel:
    """Time a model, and a copy of it with the plan's chains, in turns.

    Both are in evaluation mode, run eagerly (not compiled) and without gradients. The chains have
    random weights: a time does not depend on them.

    Args:
        model: The model; it is moved to the device and dtype.
        inputs: A tensor, a list or tuple of arguments, or a mapping of keyword arguments.
        plan: Which layers become which chains.
        device: Where.
        dtype: Of the floating-point parameters and inputs.
        seconds: About how long the timing takes.

    Raises:
        InvalidInputError: The model cannot be copied, does not take the inputs, or the plan does
            not fit it.
    """
    call = _call(inputs, device, dtype)
    model = _placed(model, device, dtype)
    try:
        planned = copy.deepcopy(model)
    except Exception as error:
        raise InvalidInputError(
            f"measure-model: the model cannot be copied: {type(error).__name__}: {error}"
        ) from error
    converted = at_random(planned, plan)
    # What the model prints must not come between the lines of a result.
    with torch.inference_mode(), device_locks.device(device), redirect_stdout(sys.stderr):
        rows = _rows(model, call)
        for one in (model, planned):
            _run(one, call)
        times = timing.measure(
            {"dense": _caller(model, call), "plan": _caller(planned, call)},
            device,
            max_seconds=seconds,
            min_repeats=10,
        )
    return WholeModel(times["dense"], times["plan"], converted, rows)


def check(model: nn.Module, inputs: object, device: torch.device, dtype: torch.dtype) -> None:
    """Run the model once, so that what `measure` would refuse is refused before a long search.

    The model is left on the CPU: the search has the device's memory to itself.

    Raises:
        InvalidInputError: As `measure`.
    """
    call = _call(inputs, device, dtype)
    try:
        with torch.inference_mode(), redirect_stdout(sys.stderr):
            _run(_placed(model, device, dtype), call)
    finally:
        if device.type != "cpu":
            model.to("cpu")


def at_random(model: nn.Module, plan: Plan) -> int:
    """Put chains with random weights in the place of a model's layers; how many."""
    choices, _ = resolve(model, plan, (), ())
    known: dict[int, New] = {}
    swaps: list[tuple[Place, New]] = []
    for choice in choices:
        new = replacement(choice.place, choice.chains)
        first = known.setdefault(id(choice.place.parameter), new)
        if first is not new:
            share_weights(first, new)
        else:
            for part in new.modules():
                if isinstance(part, (KSLinear, StructuredLinear)):
                    part.reset_parameters()
        swaps.append((choice.place, new))
    swap(model, swaps)
    return len(swaps)


def _placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    try:
        return model.to(device=device, dtype=dtype).eval()
    except Exception as error:
        raise InvalidInputError(
            f"measure-model: the model cannot be moved to {device}: {type(error).__name__}: {error}"
        ) from error


def _call(inputs: object, device: torch.device, dtype: torch.dtype) -> Call:
    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    if isinstance(inputs, Tensor):
        return (moved(inputs),), {}
    if isinstance(inputs, Mapping):
        return (), {str(name): moved(value) for name, value in inputs.items()}
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(map(moved, inputs)), {}
    raise InvalidInputError(
        "measure-model: the inputs must be a tensor, a tuple of arguments or a mapping of keyword "
        f"arguments, and are {type(inputs).__name__}"
    )


def _caller(model: nn.Module, call: Call) -> Callable[[], object]:
    args, named = call
    return lambda: model(*args, **named)


def _run(model: nn.Module, call: Call) -> None:
    try:
        _caller(model, call)()
    except Exception as error:
        raise InvalidInputError(
            f"measure-model: the model does not take these inputs: {type(error).__name__}: {error}"
        ) from error


def _rows(model: nn.Module, call: Call) -> dict[str, int]:
    """Rows that each linear layer sees in a pass; the last one's where it is applied twice."""
    seen: dict[str, int] = {}
    handles = []
    for place in find(model)[0]:

        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            name: str = place.name,
            width: int = place.in_features,
        ) -> None:
            if args and isinstance(args[0], Tensor):
                seen[name] = args[0].numel() // width

        handles.append(place.layer.register_forward_pre_hook(hook))
    try:
        _run(model, call)
    finally:
        for handle in handles:
            handle.remove()
    return seen
