"""The gradients of a trained chain's weights and bias in one launch: ``ks_chain_weight_grads``.

``(Tensor grad, Tensor between, Tensor grad_between, Tensor x, SymInt left_a, SymInt left_d, SymInt
right_a, SymInt right_d, bool with_bias) -> (Tensor, Tensor, Tensor)``: of grad, the gradient of y,
and between, which the left factor was multiplied with, the left weight's; of grad_between and x the
right one's; and the sum of grad over all but its last dim, or nothing, [0], if not with_bias. It
has no gradient of its own, and is no public operator.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ksopt.kernels import chain_gradients
from ksopt.kernels.chain_gradients import Factors, Gradients
from ksopt.kernels.operands import size_hint
from ksopt.kernels.validation import check_weight_grad
from ksopt.ops import weight_gradient
from ksopt.ops.schemas import LIBRARY, implement
from ksopt.patterns.chain import Pattern

Three = tuple[Tensor, Tensor, Tensor]


def _kernel(
    grad: Tensor,
    between: Tensor,
    grad_between: Tensor,
    x: Tensor,
    left_a: int,
    left_d: int,
    right_a: int,
    right_d: int,
    with_bias: bool,
) -> Three:
    """The Python kernel, for calls that the host library's kernel does not know."""
    check_weight_grad(grad, between, left_a, left_d, False)
    check_weight_grad(grad_between, x, right_a, right_d, False)
    of = Factors(left_a, left_d, right_a, right_d)
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
        gradients = None
        if between.shape[:-1] == x.shape[:-1]:
            gradients = chain_gradients.run(
                *(grad, between, grad_between, x, of, with_bias),
                *(partial(_by_factors, of, with_bias), partial(_by_pytorch, of, with_bias)),
            )
    if gradients is None:
        gradients = _by_factors(of, with_bias, grad, between, grad_between, x)
    left, right, bias = gradients
    return left, right, grad.new_empty(0) if bias is None else bias


def _by_factors(
    of: Factors, with_bias: bool, grad: Tensor, between: Tensor, grad_between: Tensor, x: Tensor
) -> Gradients:
    right = weight_gradient.weight_grad(grad_between, x, of.right_a, of.right_d, False)
    if with_bias:
        left, bias = weight_gradient.weight_bias_grad(grad, between, of.left_a, of.left_d)
        return left, right, bias
    return weight_gradient.weight_grad(grad, between, of.left_a, of.left_d, False), right, None


def _by_pytorch(
    of: Factors, with_bias: bool, grad: Tensor, between: Tensor, grad_between: Tensor, x: Tensor
) -> Gradients:
    by_pytorch = weight_gradient.weight_grad_decomposed
    return (
        by_pytorch(grad, between, of.left_a, of.left_d, False),
        by_pytorch(grad_between, x, of.right_a, of.right_d, False),
        weight_gradient.bias_grad(grad) if with_bias else None,
    )


def _fake(
    grad: Tensor,
    between: Tensor,
    grad_between: Tensor,
    x: Tensor,
    left_a: int,
    left_d: int,
    right_a: int,
    right_d: int,
    with_bias: bool,
) -> Three:
    return (
        weight_gradient.weight_grad_fake(grad, between, left_a, left_d, False),
        weight_gradient.weight_grad_fake(grad_between, x, right_a, right_d, False),
        grad.new_empty(grad.shape[-1] if with_bias else 0),
    )


LIBRARY.define(
    "ks_chain_weight_grads(Tensor grad, Tensor between, Tensor grad_between, Tensor x, "
    "SymInt left_a, SymInt left_d, SymInt right_a, SymInt right_d, bool with_bias) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
implement("ks_chain_weight_grads", _kernel)
torch.library.register_fake("ksopt::ks_chain_weight_grads", _fake, lib=LIBRARY)
ks_chain_weight_grads = torch.ops.ksopt.ks_chain_weight_grads.default


def are_together(x: Tensor, left: Tensor, right: Tensor, with_bias: bool) -> bool:
    """Whether one launch computes a chain's weight gradients in this backward pass, of fakes too.

    Not where gradients are recorded: it has none of its own.
    """
    return not torch.is_grad_enabled() and is_faster(x, left, right, with_bias)


def is_faster(x: Tensor, left: Tensor, right: Tensor, with_bias: bool) -> bool:
    """Whether one launch is expected to compute a chain's weight gradients faster, of fakes too.

    Of a dynamic number of rows the one at hand decides.
    """
    if x.device.type != "cuda":
        return False
    sizes = [size_hint(size) for size in (*left.shape, *right.shape, *x.shape[:-1])]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) or 0 in known:
        return False
    chain = (Pattern(*known[:4]), Pattern(*known[4:8]))
    rows = math.prod(known[8:])
    return chain_gradients.is_by_kernel(chain, x.dtype, rows, x.device, with_bias)


def weight_grads(
    grad: Tensor,
    between: Tensor,
    grad_between: Tensor,
    x: Tensor,
    left: Tensor,
    right: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of the left weight, the right one and, if ``with_bias``, the bias.

    Args:
        grad: [*batch, M], the gradient of y.
        between: what is between the factors; grad_between: its gradient.
        x: [*batch, N].
        left: [a, b, c, d]; its values are not read. right: as left.
        with_bias: sum grad over the batch.
    """
    (left_a, _, _, left_d), (right_a, _, _, right_d) = left.shape, right.shape
    of_left, of_right, of_bias = ks_chain_weight_grads(
        grad, between, grad_between, x, left_a, left_d, right_a, right_d, with_bias
    )
    return of_left, of_right, of_bias if with_bias else None
