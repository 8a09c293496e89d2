"""Trained layers around an activation in compiled graphs: what is activated is never written.

The launch of the gradient of what the second layer reads computes it again, from the values between
the first layer's factors, and multiplies by the activation's slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ksopt.epilogue import Activation, activation_gradient, with_epilogue
from ksopt.kernels import trained_chain, weight_scopes
from ksopt.ops import input_gradient
from ksopt.ops.autograd import in_rows
from ksopt.ops.input_gradient import ks_chain_input_grad_activated
from ksopt.ops.schemas import ks_mm
from ksopt.ops.trained_chain import (
    Needed,
    input_grads,
    ks_chain_keeping,
    weight_and_bias_grads,
    without_autocast,
)


class _TrainedMlp(torch.autograd.Function):
    """(x, activation, bias of each layer or none, two weights of each) -> y, and what is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        activation: Activation,
        hidden_bias: Tensor | None,
        bias: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        up, down = weights[:2], weights[2:]
        elements = input_gradient.packed_elements(x, up) if ctx.needs_input_grad[0] else 0
        hidden, first, packed = ks_chain_keeping(x, up, hidden_bias, 1, activation, elements)
        y, second, _ = ks_chain_keeping(hidden, down, bias)
        ctx.activation = activation
        ctx.mark_non_differentiable(hidden, first, packed, second)
        ctx.save_for_backward(x, hidden_bias, hidden, first, packed, second, *weights)
        return y, hidden, first, packed, second

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = in_rows(grads[0])
        x, hidden_bias, hidden, first, packed, second, *weights = ctx.saved_tensors
        up, down = weights[:2], weights[2:]
        is_recorded = torch.is_grad_enabled()
        of_x, _, *of_biases, a, b, c, d = ctx.needs_input_grad
        of_chain = [*down, up[0]]
        if not is_recorded and input_gradient.is_one_launch(grad, of_chain, ctx.activation):
            of_h, of_second = ks_chain_input_grad_activated(
                [grad], of_chain, first, hidden_bias, ctx.activation
            )
        else:
            if is_recorded:  # gradients of gradients: through what is saved, too
                first = ks_mm(x, up[1])
            with weight_scopes.repacked():
                h = with_epilogue(ks_mm(first, up[0]), hidden_bias)
            if is_recorded:
                hidden = with_epilogue(h, activation=ctx.activation)
                second = ks_mm(hidden, down[1])
            of_hidden, (of_second,) = input_grads([grad], down, True, None)
            assert of_hidden is not None
            of_h = activation_gradient(of_hidden, h, ctx.activation)
        first_needs, second_needs = Needed(a, b, of_biases[0]), Needed(c, d, of_biases[1])
        (of_down,) = weight_and_bias_grads(
            [grad], [second], [of_second], hidden, down, [second_needs]
        )
        grad_x, of_first = input_grads([of_h], up, of_x, packed)
        (of_up,) = weight_and_bias_grads([of_h], [first], of_first, x, up, [first_needs])
        return grad_x, None, of_up[2], of_down[2], *of_up[:2], *of_down[:2]


def is_faster(
    x: Tensor,
    weights: Sequence[Tensor],
    hidden: Tensor,
    last_weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
) -> bool:
    """Whether a launch each computes both trained layers, the first one with its activation.

    Args:
        x, weights, last_weights: as for `trained_mlp`, or fakes.
        hidden: a fake of the activation.
        biases: of both layers.
        activation: between them.
    """
    first, second = biases
    return trained_chain.is_one_launch(
        x, weights, first, 1, activation
    ) and trained_chain.is_one_launch(hidden, last_weights, second, 1)


def trained_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    last_weights: Sequence[Tensor],
    hidden_bias: Tensor | None,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Both layers, with their gradients recorded.

    Args:
        x: [*batch, N].
        weights, last_weights: of two factors each, left to right, of x's dtype.
        hidden_bias, bias: one for each output, of x's dtype, or None.
        activation: between the layers.
    """
    y: Tensor = _TrainedMlp.apply(x, activation, hidden_bias, bias, *weights, *last_weights)[0]
    return y
