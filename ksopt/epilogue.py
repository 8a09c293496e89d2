"""What may follow a chain's product, in PyTorch's own operations: bias, an activation, a residual.

A kernel may do it before it writes the product; this is what is done where none does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ksopt.errors import InvalidInputError

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
"""The activations that an epilogue may have; "gelu" is the exact one, by erf.

In the order of ``Activation`` in csrc/cuda/epilogue.cuh."""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "relu": torch.relu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "silu": F.silu,
    }
)
_aten = torch.ops.aten
_IN_PLACE: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "relu": torch.relu_,
        "gelu": _aten.gelu_.default,
        "gelu_tanh": partial(_aten.gelu_.default, approximate="tanh"),
        "silu": _aten.silu_.default,
    }
)


def check_activation(activation: str) -> None:
    """Refuse an unknown activation.

    Raises:
        InvalidInputError: it is none of `ACTIVATIONS`.
    """
    if activation not in ACTIVATIONS:
        raise InvalidInputError(
            f"activation {activation!r} is unknown: it must be one of {', '.join(ACTIVATIONS)}"
        )


def with_epilogue(
    y: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    batch_last: bool = False,
) -> Tensor:
    """act(y + bias) + residual.

    Args:
        y: (*batch, M), or (M, *batch) when batch_last.
        bias: (M,), or None.
        activation: one of `ACTIVATIONS`.
        residual: of y's shape, or None.
        batch_last: the layout.

    Returns:
        A new tensor; y itself where there is nothing to do.

    Example:
        >>> with_epilogue(torch.tensor([1.0, -3.0]), torch.ones(2), "relu")
        tensor([2., 0.])
    """
    if bias is not None:
        y = y + _along_features(bias, y, batch_last)
    if activation != "none":
        y = _FUNCTIONS[activation](y)
    return y if residual is None else y + residual


def add_epilogue_(
    y: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    batch_last: bool = False,
) -> Tensor:
    """`with_epilogue` in y's own memory, where no gradient is recorded: y with what was added."""
    if bias is not None:
        y.add_(_along_features(bias, y, batch_last) if batch_last else bias)
    if activation != "none":
        _IN_PLACE[activation](y)
    return y if residual is None else y.add_(residual)


def _along_features(bias: Tensor, y: Tensor, batch_last: bool) -> Tensor:
    return bias.view(-1, *(1,) * (y.dim() - 1)) if batch_last else bias
