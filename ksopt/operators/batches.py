"""Products of two-dimensional inputs, extended to any batch dimensions."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torch import Tensor

from ksopt.reference import is_batch_last

Product = Callable[[Tensor], Tensor]


def of_any_batch(product: Product, layout: str) -> Product:
    """A product that accepts any batch dimensions, from one that accepts a single one.

    Args:
        product: Accepts [rows, in_features], or [in_features, rows] in batch_last.
        layout: "batch_first" or "batch_last".

    Returns:
        A product that accepts [*batch, in_features], or [in_features, *batch].
    """
    last = is_batch_last(layout)

    def whole(x: Tensor) -> Tensor:
        if x.dim() == 2:
            return product(x)
        batch = x.shape[1:] if last else x.shape[:-1]
        if last:
            y = product(x.reshape(x.shape[0], prod(batch)))
            return y.reshape(y.shape[0], *batch)
        y = product(x.reshape(prod(batch), x.shape[-1]))
        return y.reshape(*batch, y.shape[-1])

    return whole
