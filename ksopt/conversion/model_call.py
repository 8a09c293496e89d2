"""Calls of a model on the user's inputs, and the rows that its layers see."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ksopt.conversion.layers import find
from ksopt.errors import InvalidInputError


@dataclass(frozen=True)
class ModelCall:
    """Inputs of a model, on its device.

    Args:
        args: By position.
        named: By name.
        source: Prefix of error messages, such as an option's name.
    """

    args: tuple[Any, ...]
    named: Mapping[str, Any]
    source: str

    @classmethod
    def of(
        cls, inputs: object, device: torch.device, dtype: torch.dtype | None, source: str
    ) -> ModelCall:
        """The call with some inputs, its tensors moved to the model's device.

        Args:
            inputs: A tensor, a list or tuple of arguments, or a mapping of keyword arguments.
            device: Device of the model.
            dtype: Of floating-point tensors; None does not cast them.
            source: As in the class.

        Raises:
            InvalidInputError: The inputs are something else.
        """

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else None)

        if isinstance(inputs, Tensor):
            return cls((moved(inputs),), {}, source)
        if isinstance(inputs, Mapping):
            named = {str(name): moved(value) for name, value in inputs.items()}
            return cls((), named, source)
        if isinstance(inputs, Sequence) and not isinstance(inputs, str):
            return cls(tuple(map(moved, inputs)), {}, source)
        raise InvalidInputError(
            f"{source}: the inputs must be a tensor, a tuple of arguments or a mapping of keyword "
            f"arguments, and are {type(inputs).__name__}"
        )

    @classmethod
    def of_model(cls, model: nn.Module, inputs: object, source: str) -> ModelCall | None:
        """The call of a model with some inputs, on the device of its first parameter.

        Args:
            model: The model.
            inputs: As in `of`; None is no call.
            source: As in the class.

        Raises:
            InvalidInputError: As `of`.
        """
        if inputs is None:
            return None
        first = next(model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        return cls.of(inputs, device, None, source)

    def caller(self, model: Callable[..., object]) -> Callable[[], object]:
        """A function that calls a model with the inputs."""
        return lambda: model(*self.args, **self.named)

    def run(self, model: nn.Module) -> object:
        """The model's output.

        Raises:
            InvalidInputError: The model raised something.
        """
        try:
            return self.caller(model)()
        except Exception as error:
            raise InvalidInputError(
                f"{self.source}: the model does not take these inputs: "
                f"{type(error).__name__}: {error}"
            ) from error

    def rows(self, model: nn.Module) -> dict[str, int]:
        """Rows that each linear layer sees in a pass, by name.

        Of a layer that is applied twice, those of the last call. A missing layer is not called:
        another branch is taken, or another module reads its weight.
        """
        seen: dict[str, int] = {}
        handles = []
        for place in find(model)[0]:

            def hook(
                module: nn.Module,
                args: tuple[Any, ...],
                named: dict[str, Any],
                name: str = place.name,
                width: int = place.in_features,
            ) -> None:
                (x, *_) = (*args, *named.values(), None)
                if isinstance(x, Tensor):
                    seen[name] = x.numel() // width

            handles.append(place.layer.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            self.run(model)
        finally:
            for handle in handles:
                handle.remove()
        return seen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context with the model in evaluation mode and without gradients; modes are restored.

    Output that the model prints goes to stderr, so that it does not mix with results.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.inference_mode(), redirect_stdout(sys.stderr):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
