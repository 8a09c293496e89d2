"""Sizes of dims: integers, or torch's symbolic ones where a batch is dynamic.

Nothing here adds a guard: a relation that is not certain counts as unknown. A symbolic size has a
hint, its value in the current call. A relation that is false for hints is not known to be true, and
checking hints costs nothing, while torch's own reasoning takes a tenth of a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ksopt.kernels.operands import size_hint

Size: TypeAlias = Any
"""An int, or a `torch.SymInt`."""


def plain(size: Size) -> Size:
    """The size as an int if it is known, else the symbolic size."""
    if isinstance(size, int):
        return size
    known = size.node.maybe_as_int()
    return size if known is None else known


def is_multiple_of_a_size(size: Size) -> bool:
    """Whether a symbolic size is an input's size times or plus numbers: one value fixes both.

    Of ``s // 16`` no value would: a guard on it would hold for many batches, but not for others.
    """
    expression = size.node.expr
    symbols = expression.free_symbols
    return len(symbols) == 1 and bool(expression.is_polynomial(*symbols))


def is_marked_dynamic(size: Size) -> bool:
    """Whether a dim of an input that the size depends on is marked by the caller as dynamic.

    `torch._dynamo.mark_dynamic` and the dims of an export do so; torch raises an error where such a
    size is fixed.
    """
    symbols = size.node.expr.free_symbols
    for tracked in getattr(size.node.shape_env, "tracked_fakes", None) or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for of_input, constraint in zip(
            getattr(tracked.fake, "shape", ()), constraints, strict=False
        ):
            if constraint is None or constraint.warn_only or isinstance(of_input, int):
                continue
            if symbols & of_input.node.expr.free_symbols:
                return True
    return False


def same(left: Size, right: Size) -> bool:
    """Whether two sizes are known to be equal."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if left is right:
        return True
    ours, theirs = size_hint(left), size_hint(right)
    if ours is not None and theirs is not None and ours != theirs:
        return False
    if not isinstance(left, int) and not isinstance(right, int):
        one, other = left.node.expr, right.node.expr
        if one == other:
            return True
    return statically_known_true(left == right)


def same_shape(left: Sequence[Size], right: Sequence[Size]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(left) == len(right) and all(map(same, left, right))


def is_contiguous(tensor: Tensor) -> bool:
    """Whether a tensor's elements are known to lie in memory in their order."""
    stride: Size = 1
    for size, own in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same(size, 1) and not same(own, stride):
            return False
        stride = stride * size
    return True


def divides(divisor: Size, size: Size) -> bool:
    """Whether ``size`` is known to be a multiple of ``divisor``."""
    if isinstance(divisor, int) and isinstance(size, int):
        return divisor > 0 and size % divisor == 0
    ours, theirs = size_hint(divisor), size_hint(size)
    if ours is not None and theirs is not None and (ours == 0 or theirs % ours):
        return False
    return same(divisor, size) or statically_known_true(size % divisor == 0)


def quotient(size: Size, divisor: Size) -> Size:
    """``size / divisor``, for sizes of which `divides` is true."""
    return 1 if same(size, divisor) else plain(size // divisor)


def product(sizes: Iterable[Size]) -> Size:
    """Product of sizes; 1 for none."""
    return math.prod(sizes)
