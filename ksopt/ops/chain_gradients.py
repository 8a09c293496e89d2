"""The gradients of trained chains' weights and biases in one launch: ``ks_chain_weight_grads``.

``(Tensor[] grads, Tensor[] between, Tensor[] grad_between, Tensor x, SymInt left_a, SymInt left_d,
SymInt right_a, SymInt right_d, bool with_bias) -> Tensor[]``: of a chain, or of siblings, chains of
the same patterns on one x. Of grads, the gradients of each sibling's y, and between, which its left
factor was multiplied with, the left weight's; of grad_between and x the right one's: sibling after
sibling, and behind them, if with_bias, the sums of each of grads over all but its last dim. It has
no gradient of its own, and is no public operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.kernels import chain_gradients
from ksopt.kernels.chain_gradients import Factors, Gradients
from ksopt.kernels.operands import size_hint
from ksopt.kernels.validation import check_weight_grad
from ksopt.ops import weight_gradient
from ksopt.ops.schemas import LIBRARY, implement
from ksopt.patterns.chain import Pattern


def _kernel(
    grads: Sequence[Tensor],
    between: Sequence[Tensor],
    grad_between: Sequence[Tensor],
    x: Tensor,
    left_a: int,
    left_d: int,
    right_a: int,
    right_d: int,
    with_bias: bool,
) -> Gradients:
    """The Python kernel, for calls that the host library's kernel does not know."""
    of = Factors(left_a, left_d, right_a, right_d)
    operands = _checked(grads, between, grad_between, x, of)
    without = partial(_by_factors if len(grads) == 1 else _by_siblings, of, with_bias)
    gradients = None
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
        if all(one.shape[:-1] == x.shape[:-1] for one in operands):
            by_pytorch = partial(_by_pytorch, of, with_bias)
            gradients = chain_gradients.run(operands, of, with_bias, without, by_pytorch)
        return without(*operands) if gradients is None else gradients


def _checked(
    grads: Sequence[Tensor],
    between: Sequence[Tensor],
    grad_between: Sequence[Tensor],
    x: Tensor,
    of: Factors,
) -> list[Tensor]:
    """All operands, which fit together."""
    counts = [len(grads), len(between), len(grad_between)]
    if counts != counts[:1] * 3 or counts[0] == 0:
        raise InvalidInputError(
            "ks_chain_weight_grads: grads, between and grad_between have "
            f"{', '.join(map(str, counts))} tensors, but each sibling must have one of each"
        )
    for name, several in (("grads", grads), ("between", between), ("grad_between", grad_between)):
        if any(one.shape != several[0].shape for one in several):
            shapes = ", ".join(str(list(one.shape)) for one in several)
            raise InvalidInputError(
                f"ks_chain_weight_grads: {name} have the shapes {shapes}, but siblings must have "
                "the same"
            )
    for grad, values, grad_values in zip(grads, between, grad_between, strict=True):
        check_weight_grad(grad, values, of.left_a, of.left_d, False)
        check_weight_grad(grad_values, x, of.right_a, of.right_d, False)
    return [*grads, *between, *grad_between, x]


def _each(gradients: Callable[..., Gradients], operands: Sequence[Tensor]) -> Gradients:
    """The gradients of all siblings, by a function of one sibling's operands."""
    siblings = len(operands) // 3
    several = [gradients(*operands[at:-1:siblings], operands[-1]) for at in range(siblings)]
    return [gradient for one in several for gradient in one[:2]] + [
        bias for one in several for bias in one[2:]
    ]


def _by_siblings(of: Factors, with_bias: bool, *operands: Tensor) -> Gradients:
    def gradients(grad: Tensor, between: Tensor, grad_between: Tensor, x: Tensor) -> Gradients:
        sizes = (of.left_a, of.left_d, of.right_a, of.right_d)
        result: Gradients = ks_chain_weight_grads(
            [grad], [between], [grad_between], x, *sizes, with_bias
        )
        return result

    return _each(gradients, operands)


def _by_factors(
    of: Factors, with_bias: bool, grad: Tensor, between: Tensor, grad_between: Tensor, x: Tensor
) -> Gradients:
    right = weight_gradient.weight_grad(grad_between, x, of.right_a, of.right_d, False)
    if with_bias:
        left, bias = weight_gradient.weight_bias_grad(grad, between, of.left_a, of.left_d)
        return [left, right, bias]
    return [weight_gradient.weight_grad(grad, between, of.left_a, of.left_d, False), right]


def _by_pytorch(of: Factors, with_bias: bool, *operands: Tensor) -> Gradients:
    by_pytorch = weight_gradient.weight_grad_decomposed

    def gradients(grad: Tensor, between: Tensor, grad_between: Tensor, x: Tensor) -> Gradients:
        return [
            by_pytorch(grad, between, of.left_a, of.left_d, False),
            by_pytorch(grad_between, x, of.right_a, of.right_d, False),
            *([weight_gradient.bias_grad(grad)] if with_bias else []),
        ]

    return _each(gradients, operands)


def _fake(
    grads: Sequence[Tensor],
    between: Sequence[Tensor],
    grad_between: Sequence[Tensor],
    x: Tensor,
    left_a: int,
    left_d: int,
    right_a: int,
    right_d: int,
    with_bias: bool,
) -> Gradients:
    def gradients(grad: Tensor, between: Tensor, grad_between: Tensor, x: Tensor) -> Gradients:
        return [
            weight_gradient.weight_grad_fake(grad, between, left_a, left_d, False),
            weight_gradient.weight_grad_fake(grad_between, x, right_a, right_d, False),
            *([grad.new_empty(grad.shape[-1])] if with_bias else []),
        ]

    of = Factors(left_a, left_d, right_a, right_d)
    return _each(gradients, _checked(grads, between, grad_between, x, of))


LIBRARY.define(
    "ks_chain_weight_grads(Tensor[] grads, Tensor[] between, Tensor[] grad_between, Tensor x, "
    "SymInt left_a, SymInt left_d, SymInt right_a, SymInt right_d, bool with_bias) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
implement("ks_chain_weight_grads", _kernel)
torch.library.register_fake("ksopt::ks_chain_weight_grads", _fake, lib=LIBRARY)
ks_chain_weight_grads = torch.ops.ksopt.ks_chain_weight_grads.default


def are_together(
    x: Tensor, left: Tensor, right: Tensor, with_bias: bool, siblings: int = 1
) -> bool:
    """Whether one launch computes all weight gradients in this backward pass, of fakes too.

    Not where gradients are recorded: it has none of its own.
    """
    return not torch.is_grad_enabled() and is_faster(x, left, right, with_bias, siblings)


def is_faster(x: Tensor, left: Tensor, right: Tensor, with_bias: bool, siblings: int = 1) -> bool:
    """Whether one launch is expected to compute all weight gradients faster, of fakes too.

    Of a dynamic number of rows the one at hand decides. So many siblings have weights of these
    shapes.
    """
    if x.device.type != "cuda":
        return False
    sizes = [size_hint(size) for size in (*left.shape, *right.shape, *x.shape[:-1])]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) or 0 in known:
        return False
    chain = (Pattern(*known[:4]), Pattern(*known[4:8]))
    rows = math.prod(known[8:])
    return chain_gradients.is_by_kernel(chain, x.dtype, rows, x.device, with_bias, siblings)


def weight_grads(
    grads: Sequence[Tensor],
    between: Sequence[Tensor],
    grad_between: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    with_bias: bool,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """The gradients of all siblings' weights, in their order, and of their biases if ``with_bias``.

    Args:
        grads: [*batch, M] of each sibling, the gradients of y.
        between: what is between its factors; grad_between: its gradient.
        x: [*batch, N].
        weights: [a, b, c, d], left to right, sibling after sibling; their values are not read.
        with_bias: sum grads over the batch.
    """
    (left_a, _, _, left_d), (right_a, _, _, right_d) = (one.shape for one in weights[:2])
    lists = (list(grads), list(between), list(grad_between))
    gradients = ks_chain_weight_grads(*lists, x, left_a, left_d, right_a, right_d, with_bias)
    return gradients[: len(weights)], gradients[len(weights) :] if with_bias else None
