"""The timed call of a layer: its product alone, or a step of its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""x -> y."""
Bind = Callable[[Sequence[Tensor]], Product]
"""weights -> product."""


def forward(bind: Bind, x: Tensor, weights: Sequence[Tensor]) -> Callable[[], Tensor]:
    """The call of a product without gradients."""
    product = bind(weights)
    return lambda: product(x)


def training_step(
    bind: Bind, x: Tensor, weights: Sequence[Tensor], gradient: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """The call of a product and of the gradients of its input and of every weight.

    The loss, the optimizer and the accumulation of gradients are not included. It is the cost of an
    inner layer of a model: the first layer needs no gradient of its input.

    Args:
        bind: The trained layer.
        x: Its input.
        weights: Its weights.
        gradient: Of the loss, by the product's output; of the output's shape and dtype.

    Example:
        >>> x, w = torch.randn(3, 4), torch.randn(2, 4)
        >>> step = training_step(lambda w: lambda x: x @ w[0].T, x, [w], torch.ones(3, 2))
        >>> [tuple(one.shape) for one in step()]
        [(3, 4), (2, 4)]
    """
    leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights)]
    product = bind(leaves[1:])

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(product(leaves[0]), leaves, gradient)

    return step
