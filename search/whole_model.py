"""Timing of a whole model, dense and with a plan's chains."""

from __future__ import annotations

import copy
import sys
from contextlib import redirect_stdout

import torch
from torch import nn

from ksopt.conversion.empty_chains import insert_empty_chains
from ksopt.conversion.model_call import ModelCall
from ksopt.conversion.plan import Plan
from ksopt.conversion.resolve import resolve
from ksopt.errors import InvalidInputError
from ksopt.measure import timing
from ksopt.nn import KSLinear
from ksopt.operators.linear import StructuredLinear
from ksopt.search import device_locks
from ksopt.search.results import WholeModel

_SECONDS = 4.0
_OPTION = "measure-model"


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
        device: The device.
        dtype: Of the floating-point parameters and inputs.
        seconds: Approximate duration of the timing.

    Raises:
        InvalidInputError: The model cannot be copied, does not take the inputs, or the plan does
            not fit it.
    """
    call = ModelCall.of(inputs, device, dtype, _OPTION)
    model = _placed(model, device, dtype)
    try:
        planned = copy.deepcopy(model)
    except Exception as error:
        raise InvalidInputError(
            f"{_OPTION}: the model cannot be copied: {type(error).__name__}: {error}"
        ) from error
    converted = at_random(planned, plan, call)
    # Output of the model must not mix with the lines of a result.
    with torch.inference_mode(), device_locks.device(device), redirect_stdout(sys.stderr):
        rows = call.rows(model)
        for one in (model, planned):
            call.run(one)
        times = timing.measure(
            {"dense": call.caller(model), "plan": call.caller(planned)},
            device,
            max_seconds=seconds,
            min_repeats=10,
        )
    return WholeModel(times["dense"], times["plan"], converted, rows)


def check(model: nn.Module, inputs: object, device: torch.device, dtype: torch.dtype) -> None:
    """Run the model once, so that errors of `measure` occur before a long search.

    The model is then on the CPU, so that the search has all of the device's memory.

    Raises:
        InvalidInputError: As `measure`.
    """
    call = ModelCall.of(inputs, device, dtype, _OPTION)
    try:
        with torch.inference_mode(), redirect_stdout(sys.stderr):
            call.run(_placed(model, device, dtype))
    finally:
        if device.type != "cpu":
            model.to("cpu")


def at_random(model: nn.Module, plan: Plan, call: ModelCall | None = None) -> int:
    """Replace a model's layers by chains with random weights; return their number.

    Args:
        model: The model; changed in place.
        plan: Which layers become which chains.
        call: Inputs of the model, for a plan with conditions.
    """
    choices, _ = resolve(model, plan, (), (), call)
    for new in insert_empty_chains(model, choices):
        for part in new.modules():
            if isinstance(part, (KSLinear, StructuredLinear)):
                part.reset_parameters()
    return len(choices)


def _placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    try:
        return model.to(device=device, dtype=dtype).eval()
    except Exception as error:
        raise InvalidInputError(
            f"{_OPTION}: the model cannot be moved to {device}: {type(error).__name__}: {error}"
        ) from error
