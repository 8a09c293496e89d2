"""What is timed of a layer: its product alone, or a step of its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Bind = Callable[[Sequence[Tensor]], Callable[[Tensor], Tensor]]
"""Of weights, the product as a function of x."""


def forward(bind: Bind, x: Tensor, weights: Sequence[Tensor]) -> Callable[[], Tensor]:
    """The product, to be called again and again, where no gradients are recorded."""
    product = bind(weights)
    return lambda: product(x)


def training_step(
    bind: Bind, x: Tensor, weights: Sequence[Tensor], gradient: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """The product, and the gradients of its input and of every weight.

    The loss, the optimizer and the accumulation of gradients are no part of it. It is what a layer
    in the midst of a model costs: the first layer of one needs no gradient of its input.

    Args:
        bind: What is trained.
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
