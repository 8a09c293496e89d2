"""Products by dense matrices that are Kronecker-sparse: made so, or found so by their values.

Such a product is recognised by the matrix's nonzero weights [a, b, c, d] alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ksopt.compile.contractions import (
    Dims,
    left_only,
    need_fixed,
    new_product,
    right_only,
    tied,
)
from ksopt.compile.index import Atom, Atoms, is_identity, permute, regroup, reshape
from ksopt.compile.recognition import NotKroneckerSparseError
from ksopt.compile.sizes import same_shape
from ksopt.compile.tracking import Tracker, rule
from ksopt.compile.values import Compact, Kind, Root, Stacked, Structured, View
from ksopt.pattern import Pattern

aten = torch.ops.aten


@rule(aten.block_diag)
def _block_diag(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    blocks: Sequence[Tensor] = args[0]
    views = [tracker.view(block) for block in blocks]
    alike = all(same_shape(block.shape, blocks[0].shape) for block in blocks)
    if len(blocks) < 2 or not alike or blocks[0].dim() != 2:
        return
    if any(view.root.kind is Kind.ACTIVATION for view in views):
        return
    kind = Kind.WEIGHT
    b, c = (int(size) for size in blocks[0].shape)
    pattern = Pattern(len(blocks), b, c, 1)
    dtype = blocks[0].dtype
    pieces = tuple(View(view.root, reshape(view.map, (b, c, 1))) for view in views)
    weight = tracker.root(pattern.weight_shape, dtype, kind, Stacked(pieces))
    tracker.fresh(result, kind, Structured(weight))


def structured_root(tracker: Tracker, view: View) -> Root | None:
    """The Kronecker-sparse matrix that a weight is, whole or transposed; None if it is none."""
    root = view.root
    if len(root.shape) != 2 or len(view.map.dims) != 2:
        return None
    if root not in tracker.structured:
        tracker.structured[root] = _by_values(tracker, root)
    return root if tracker.structured[root] is not None else None


def structured_product(
    tracker: Tracker, a: View, b: View, matrix: Root, right_is_weight: bool, result: Tensor
) -> View | None:
    """mm by a Kronecker-sparse matrix, by its nonzero weights alone."""
    weight = tracker.structured[matrix]
    x, w = (a, b) if right_is_weight else (b, a)
    if weight is None:
        return None
    # W [M, N] meets x along N, or, where it is used as it stands, along M.
    along, across = (0, 1) if right_is_weight else (1, 0)
    turned = is_identity(permute(w.map, (1, 0)), matrix.shape)
    if not turned and not is_identity(w.map, matrix.shape):
        return None
    meets_columns = turned if right_is_weight else not turned
    p = Pattern(*(int(size) for size in weight.shape))
    inputs, outputs = (p.c, p.b) if meets_columns else (p.b, p.c)
    axis_l, axis_k = (2, 1) if meets_columns else (1, 2)
    features = x.map.dims[1 if right_is_weight else 0]
    rows = x.map.dims[0 if right_is_weight else 1]
    need_fixed(x.root, features, rows)
    digits = regroup(features, (p.a, inputs, p.d))
    i = tied(digits[0], _axis(0, p.a))
    l = tied(digits[1], _axis(axis_l, inputs), summed=True)
    j = tied(digits[2], _axis(3, p.d))
    k = right_only(_axis(axis_k, outputs))
    dims: Dims = [[], []]
    dims[along], dims[across] = left_only(rows), [*i, *k, *j]
    try:
        return new_product(tracker, x.root, weight, dims, l, result.dtype, result)
    except NotKroneckerSparseError as error:
        tracker.miss(str(error), p)
        return None


def _by_values(tracker: Tracker, root: Root) -> Root | None:
    """The compact weight of a matrix: by how it was made, or by the values of a frozen weight."""
    if isinstance(root.origin, Structured):
        return root.origin.weight
    if tracker.frozen_pattern is None or root.holder is None or root.holder[0].op != "placeholder":
        return None
    pattern = tracker.frozen_pattern(root.holder[0])
    if pattern is None:
        return None
    origin = Compact(root, pattern)
    return tracker.root(pattern.weight_shape, root.dtype, Kind.WEIGHT, origin)


def _axis(axis: int, size: int) -> Atoms:
    return (Atom(axis, size, 1),) if size > 1 else ()
