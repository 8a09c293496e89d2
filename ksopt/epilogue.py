"""The epilogue of a chain's product in PyTorch's own operations: bias, activation, residual.

With two siblings the activation may be a gate: the activated first product times the second.

A kernel may fuse the epilogue into its product; this is the implementation without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ksopt.errors import InvalidInputError

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
"""The activations of an epilogue; "gelu" is the exact one, by erf.

In the order of ``Activation`` in csrc/cuda/common/epilogue.cuh."""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

Gate = Literal["relu_gate", "gelu_gate", "gelu_tanh_gate", "silu_gate"]
"""The gates: "silu_gate" of the products a and b of two siblings is silu(a) * b, as in SwiGLU.

In the order of ``ACTIVATIONS``, whose first has no gate."""

GATES: tuple[Gate, ...] = get_args(Gate)
_SUFFIX = "_gate"

_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "relu": torch.relu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "silu": F.silu,
    }
)
_aten = torch.ops.aten
_GRADIENTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "relu": lambda grad, h: _aten.threshold_backward.default(grad, h, 0),
        "gelu": _aten.gelu_backward.default,
        "gelu_tanh": partial(_aten.gelu_backward.default, approximate="tanh"),
        "silu": lambda grad, h: _silu_gradient(grad, h),
    }
)
_IN_PLACE: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "relu": torch.relu_,
        "gelu": _aten.gelu_.default,
        "gelu_tanh": partial(_aten.gelu_.default, approximate="tanh"),
        "silu": _aten.silu_.default,
    }
)


@dataclass(frozen=True)
class After:
    """The operations after a product y: act(y + bias) + residual.

    Attributes:
        bias: one value for each feature, or None.
        activation: one of `ACTIVATIONS`.
        residual: of y's shape, or None.
        in_float32: whether the result of 16-bit operands is in float32.
    """

    bias: Tensor | None = None
    activation: str = "none"
    residual: Tensor | None = None
    in_float32: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        is_bare = self.bias is None and self.residual is None and self.activation == "none"
        return is_bare and not self.in_float32


def in_float32(y: Tensor) -> Tensor:
    """A 16-bit tensor in float32; any other as it is."""
    return y.float() if y.dtype.itemsize == 2 else y


def check_activation(activation: str, siblings: int = 1) -> None:
    """Raise for an unknown activation, or for a gate without exactly two siblings.

    Args:
        activation: one of `ACTIVATIONS`; with two siblings, also of `GATES`.
        siblings: number of products that it is applied to.

    Raises:
        InvalidInputError: the activation is not allowed.
    """
    if activation in GATES and siblings != 2:
        raise InvalidInputError(
            f"activation {activation!r} multiplies the products of 2 siblings, not of {siblings}"
        )
    if activation not in ACTIVATIONS and activation not in GATES:
        names = (*ACTIVATIONS, *(GATES if siblings == 2 else ()))
        raise InvalidInputError(
            f"activation {activation!r} is unknown: it must be one of {', '.join(names)}"
        )


def parts_of_result(activation: str, siblings: int) -> int:
    """The number of products in a layer's result: with a gate one, from two siblings."""
    return 1 if activation in GATES else siblings


def activation_of(activation: str) -> Activation:
    """The elementwise activation; for a gate, that of the first sibling's product."""
    return cast(Activation, activation.removesuffix(_SUFFIX))


def gate_of(activation: Activation) -> Gate:
    """The gate that applies an activation to the first product.

    Example:
        >>> gate_of("silu")
        'silu_gate'
    """
    return GATES[ACTIVATIONS.index(activation) - 1]


def with_epilogue(
    y: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    batch_last: bool = False,
) -> Tensor:
    """act(y + bias) + residual; with a gate, act(a) * b + residual of the halves a, b of y + bias.

    Args:
        y: (*batch, M), or (M, *batch) when batch_last; with a gate, two products side by side.
        bias: (M,), or None.
        activation: one of `ACTIVATIONS` or `GATES`.
        residual: of the result's shape, or None.
        batch_last: the layout.

    Returns:
        A new tensor; y itself if there is nothing to do.

    Example:
        >>> with_epilogue(torch.tensor([1.0, -3.0]), torch.ones(2), "relu")
        tensor([2., 0.])
    """
    if bias is not None:
        y = y + _along_features(bias, y, batch_last)
    if activation in GATES:
        first, second = y.tensor_split(2, 0 if batch_last else -1)
        y = _FUNCTIONS[activation_of(activation)](first) * second
    elif activation != "none":
        y = _FUNCTIONS[activation](y)
    return y if residual is None else y + residual


def activation_gradient(grad: Tensor, h: Tensor, activation: str) -> Tensor:
    """The gradient of h from that of act(h).

    Example:
        >>> activation_gradient(torch.ones(2), torch.tensor([1.0, -3.0]), "relu")
        tensor([1., 0.])
    """
    return _GRADIENTS[activation](grad, h)


def _silu_gradient(grad: Tensor, h: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward.default(grad, h)
    sigmoid = torch.sigmoid(h)  # torch's operator has no gradient of its own
    return grad * sigmoid * (1 + h * (1 - sigmoid))


def add_epilogue_(
    y: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    batch_last: bool = False,
) -> Tensor:
    """`with_epilogue` in place, where no gradient is recorded; returns y.

    With a gate the result is a new tensor.
    """
    if bias is not None:
        y.add_(_along_features(bias, y, batch_last) if batch_last else bias)
    if activation in GATES:
        first, second = y.tensor_split(2, 0 if batch_last else -1)
        y = _FUNCTIONS[activation_of(activation)](first).mul_(second)
    elif activation != "none":
        _IN_PLACE[activation](y)
    return y if residual is None else y.add_(residual)


def _along_features(bias: Tensor, y: Tensor, batch_last: bool) -> Tensor:
    return bias.view(-1, *(1,) * (y.dim() - 1)) if batch_last else bias
