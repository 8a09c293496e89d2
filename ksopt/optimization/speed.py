"""The time of a whole model, dense and with chains, each compiled, in turns."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ksopt.conversion.model_call import ModelCall, evaluating
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.measure.timing import Comparison, Measurement, compare, measure
from ksopt.search import device_locks

DENSE, CHAINS = "inductor", "ksopt"
"""The compiler of each model. Tests replace them by a faster one."""
_SECONDS = 4.0
_RECOMPILE_LIMIT = 64  # both models share the code that Dynamo compiles

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Speed:
    """The times of a call of the whole model, or of a training step.

    Args:
        dense: The dense model, compiled by Inductor.
        chains: The model with chains, compiled by ksopt.
    """

    dense: Measurement
    chains: Measurement

    @property
    def times(self) -> float:
        """The speed-up of the model with chains."""
        return self.dense.median_us / self.chains.median_us

    @property
    def comparison(self) -> Comparison:
        """Whether the model with chains is faster, slower, or within noise."""
        return compare(self.chains, self.dense)


def measure_calls(
    dense: nn.Module, converted: nn.Module, call: ModelCall, device: torch.device
) -> tuple[Speed, nn.Module]:
    """Time a call of both, in evaluation mode and without gradients.

    Returns:
        The times, and the converted model compiled.

    Raises:
        KsoptError: A model cannot be compiled.
    """
    compiled = {"dense": _compiled(dense, DENSE), "chains": _compiled(converted, CHAINS)}
    with evaluating(dense), evaluating(converted):
        times = _times({name: call.caller(one) for name, one in compiled.items()}, device)
    return Speed(times["dense"], times["chains"]), compiled["chains"]


def measure_steps(
    dense: nn.Module, converted: nn.Module, call: ModelCall, device: torch.device, loss: Loss
) -> tuple[Speed, nn.Module]:
    """Time a training step of both: forward, loss and backward, in training mode.

    The dense model is a copy of the passed one, because a step leaves gradients behind.

    Returns:
        The times, and the converted model compiled, with its state unchanged.

    Raises:
        InvalidInputError: The loss has no gradient.
        KsoptError: A model cannot be compiled.
    """
    twins = {"dense": copy.deepcopy(dense), "chains": converted}
    compiled = {"dense": _compiled(twins["dense"], DENSE), "chains": _compiled(converted, CHAINS)}
    with _training(twins["dense"]), _training(converted), redirect_stdout(sys.stderr):
        steps = {name: _step(twins[name], one, call, loss) for name, one in compiled.items()}
        times = _times(steps, device)
    return Speed(times["dense"], times["chains"]), compiled["chains"]


def own_loss(output: Any) -> Tensor:
    """The loss in a model's output, or else the mean square of the output.

    Example:
        >>> own_loss((torch.tensor([1.0, 3.0]), torch.tensor([2])))
        tensor(5.)
        >>> own_loss({"loss": torch.tensor(7.0), "logits": torch.ones(2)})
        tensor(7.)
    """
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(value, Tensor):
        return value
    tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
    squares = [one.square().mean() for one in tensors if one.is_floating_point()]
    if not squares:
        raise InvalidInputError(
            f"optimize: the model returns {type(output).__name__}, of which there is no loss: "
            "give loss=, a function of what it returns"
        )
    return torch.stack(squares).sum()


def _compiled(model: nn.Module, backend: str) -> nn.Module:
    compiled: Any = torch.compile(model, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def _step(
    model: nn.Module, compiled: nn.Module, call: ModelCall, loss: Loss
) -> Callable[[], object]:
    forward = call.caller(compiled)

    def step() -> None:
        value = loss(forward())
        if not value.requires_grad:
            raise InvalidInputError(
                "optimize: the loss has no gradient, so there is no training step to time: no "
                "parameter of the model requires one, or loss= detached it"
            )
        value.backward()
        model.zero_grad()

    return step


def _times(
    calls: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, Measurement]:
    settings: Any = torch._dynamo.config  # its patch() is added at run time
    with device_locks.device(device), settings.patch(recompile_limit=_RECOMPILE_LIMIT):
        for call in calls.values():
            _first(call)
        return measure(calls, device, max_seconds=_SECONDS, min_repeats=10)


def _first(call: Callable[[], object]) -> None:
    """Run the first call, which compiles."""
    try:
        call()
    except InvalidInputError:
        raise
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        raise KsoptError(
            f"optimize: the model cannot be compiled or run: {type(error).__name__}: {line}"
        ) from error


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """The model in training mode inside the block; modes and buffers are restored after it."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        model.train()
        yield
    finally:
        model.zero_grad()
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
