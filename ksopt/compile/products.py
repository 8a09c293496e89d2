"""ATen operators that multiply: what they compute, as variables of a product.

mm, bmm, addmm, baddbmm, convolutions with kernels of size 1, and multiplications that are summed
afterwards. If one operand depends on parameters only and the other on the model's inputs, the
product is offered to `ksopt.compile.recognition`; what that refuses is an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ksopt import ops
from ksopt.compile.index import (
    Atom,
    Atoms,
    IndexMap,
    NotNestedError,
    align,
    compose,
    expand,
    is_identity,
    permute,
    regroup,
    reshape,
)
from ksopt.compile.recognition import NotKroneckerSparseError, places, recognise, y_shape
from ksopt.compile.sizes import Size, plain, product, same, same_shape
from ksopt.compile.tracking import FixedSizeNeeded, Tracker, rule
from ksopt.compile.values import (
    Biased,
    Compact,
    Contraction,
    Kind,
    Multiplied,
    Native,
    Root,
    Stacked,
    Structured,
    Variable,
    View,
)
from ksopt.pattern import Pattern

assert ops  # registers ksopt's operators

aten = torch.ops.aten

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What is lowered; float64 is left alone, because no kernel is made for it."""

Dims = list[list[Variable]]
"""The variables of each dim of a result."""


@rule(aten.mm, aten.bmm)
def _mm(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    if len(args) == 2:  # more: another dtype for the result
        view = matrix_product(tracker, args[0], args[1], result)
        if view is not None:
            tracker.note(result, view)


@rule(aten.addmm, aten.baddbmm)
def _addmm(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    view = matrix_product(tracker, args[1], args[2], result)
    if view is None or len(args) != 3:
        return
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        if is_sparse(view):
            tracker.miss(f"{func.overloadpacket} scales the product or the bias")
        return
    note_biased(tracker, view, args[0], result)


@rule(aten.convolution)
def _convolution(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    x, weight, bias, stride, padding, _, transposed, _, groups = args
    ones = all(same(size, 1) for size in weight.shape[2:])
    if not ones or transposed or any(q != 1 for q in stride) or any(p != 0 for p in padding):
        return
    # x: [B, g c, *S], weight: [g o, c, *1] -> result: [B, g o, *S]
    a, w = tracker.view(x), tracker.view(weight)
    x_groups, x_channels = regroup(a.map.dims[1], (groups, x.shape[1] // groups))
    w_groups, w_channels = regroup(w.map.dims[0], (groups, weight.shape[0] // groups))
    tied = _tied(x_groups, w_groups)
    summed = _tied(x_channels, w.map.dims[1], summed=True)
    dims = [_left(a.map.dims[0]), [*tied, *_right(w_channels)], *map(_left, a.map.dims[2:])]
    view = _product(tracker, a.root, w.root, dims, summed, result)
    if view is None:
        return
    if bias is None:
        tracker.note(result, view)
        return
    # The bias is broadcast along all dims but the channels.
    biases = tracker.view(bias)
    spread = IndexMap((biases.map.dims[0], *((),) * (result.dim() - 2)), biases.map.offsets)
    note_biased(tracker, view, View(biases.root, spread), result)


@rule(aten.mul)
def _mul(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    if not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
        return
    views = [tracker.view(argument) for argument in args[:2]]
    if _roles(*(view.root for view in views)) is None or result.dtype not in DTYPES:
        return
    if args[0].dtype != args[1].dtype:
        return
    variables: list[Variable] = []
    dims: list[tuple[int, ...]] = []
    for dim, size in enumerate(result.shape):
        left, right = (
            _broadcast(view.map, argument, result, dim, size)
            for view, argument in zip(views, args[:2], strict=True)
        )
        found = _tied(left, right)
        dims.append(tuple(range(len(variables), len(variables) + len(found))))
        variables += found
    origin = Multiplied(views[0].root, views[1].root, tuple(variables), tuple(dims))
    tracker.fresh(result, Kind.ACTIVATION, origin)


@rule(aten.sum)
def _sum(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    view = tracker.view(args[0])
    origin = view.root.origin
    if not isinstance(origin, Multiplied) or len(args) < 2 or args[0].dtype != result.dtype:
        return
    rank = args[0].dim()
    over = {dim % rank for dim in (args[1] or range(rank))}
    keep = bool(args[2]) if len(args) > 2 else False
    # The dims of the multiplied tensor as digits of its variables.
    inner = IndexMap(
        tuple(tuple(Atom(at, origin.variables[at].size, 1) for at in dim) for dim in origin.dims)
    )
    digits = compose(view.map, inner)
    dims: Dims = []
    summed: list[Variable] = []
    for dim, atoms in enumerate(digits.dims):
        found = [digit_of(origin.variables, atom, dim in over) for atom in atoms]
        if dim not in over:
            dims.append(found)
        else:
            summed += found
            if keep:
                dims.append([])
    product_view = _product(tracker, origin.left, origin.right, dims, summed, result)
    if product_view is not None:
        tracker.note(result, product_view)


@rule(torch.ops.ksopt.ks_mm, torch.ops.ksopt.ks_mm_inner)
def _ks_mm(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    x, weight = args[:2]
    kind = tracker.view(x).root.kind | tracker.view(weight).root.kind
    origin = Native(tracker.view(x), Pattern(*(int(size) for size in weight.shape)))
    tracker.trace.natives.append(tracker.fresh(result, kind, origin).root)
    a, b, _, d = weight.shape
    _count_flops(tracker, [weight.numel()], [result.numel() // (a * b * d)])


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


def matrix_product(tracker: Tracker, left: Tensor, right: Tensor, result: Tensor) -> View | None:
    """The result of mm or bmm as a view of a Kronecker-sparse product, or None."""
    a, b = tracker.view(left), tracker.view(right)
    roles = _roles(a.root, b.root)
    if roles is None:
        return None
    matrix = _structured(tracker, b if roles else a)
    if matrix is not None and left.dim() == 2:
        return _structured_product(tracker, a, b, matrix, right_is_weight=roles, result=result)
    tied = _tied(a.map.dims[0], b.map.dims[0]) if left.dim() == 3 else []
    summed = _tied(a.map.dims[-1], b.map.dims[-2], summed=True)
    dims = [_left(a.map.dims[-2]), _right(b.map.dims[-1])]
    if left.dim() == 3:
        dims.insert(0, tied)
    return _product(tracker, a.root, b.root, dims, summed, result)


def dense_layer(
    tracker: Tracker, x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor
) -> bool:
    """Note F.linear of a weight that is as dense as it looks; False if it must be looked into."""
    a, w = tracker.view(x), tracker.view(weight)
    if _roles(a.root, w.root) is not True or weight.dim() != 2 or _structured(tracker, w):
        return False
    dims = [*map(_left, a.map.dims[:-1]), _right(w.map.dims[0])]
    summed = _tied(a.map.dims[-1], w.map.dims[1], summed=True)
    view = _product(tracker, a.root, w.root, dims, summed, result)
    if view is None:
        tracker.fresh(result, Kind.ACTIVATION)
    elif bias is None:
        tracker.note(result, view)
    else:
        note_biased(tracker, view, bias, result)
    return True


def note_biased(tracker: Tracker, view: View, bias: Tensor | View, result: Tensor) -> None:
    """Note that a result is a product plus a bias that is broadcast to its shape."""
    biases = bias if isinstance(bias, View) else tracker.view(bias)
    spread = View(biases.root, expand(biases.map, result.shape))
    tracker.note(result, biased(tracker, view, spread, result))


def biased(tracker: Tracker, whole: View, bias: View, tensor: Tensor | None) -> View:
    """A view of the sum of a product and a bias of the same dims.

    The sum's root has an axis for each digit of the product, so that a dim that flattens several,
    a dynamic batch among them, need not be split again.

    Raises:
        NotNestedError: the bias does not nest with the digits of the product.
    """
    digits: list[Atoms] = []
    repeats: list[Atoms] = []
    dims: list[Atoms] = []
    for atoms, added in zip(whole.map.dims, bias.map.dims, strict=True):
        dims.append(tuple(Atom(len(digits) + at, atom.size, 1) for at, atom in enumerate(atoms)))
        repeats += regroup(added, [atom.size for atom in atoms])
        digits += [(atom,) for atom in atoms]
    axes = IndexMap(tuple(digits), whole.map.offsets)
    origin = Biased(
        View(whole.root, axes), View(bias.root, IndexMap(tuple(repeats), bias.map.offsets))
    )
    root = tracker.root(axes.shape, whole.root.dtype, Kind.ACTIVATION, origin, tensor)
    return View(root, IndexMap(tuple(dims)))


def contraction(view: View) -> Contraction | None:
    """The product that a view is of, bias apart, if it is one by a weight."""
    origin = view.root.origin
    if isinstance(origin, Biased):
        origin = origin.product.root.origin
    return origin if isinstance(origin, Contraction) else None


def is_sparse(view: View) -> bool:
    """Whether a view is of a product by a factor that is not just dense."""
    found = contraction(view)
    return found is not None and found.factor.pattern.a * found.factor.pattern.d > 1


def new_product(
    tracker: Tracker,
    x: Root,
    weight: Root,
    dims: Dims,
    summed: Sequence[Variable],
    dtype: torch.dtype,
    tensor: Tensor | None,
) -> View:
    """A view of the product of ``x``, to the left in all variables, and ``weight``.

    Raises:
        NotKroneckerSparseError: it is none.
    """
    new = [variable for dim in dims for variable in dim]
    factor = recognise([*new, *summed], x.shape, weight.shape)
    root = tracker.root(
        y_shape(factor), dtype, Kind.ACTIVATION, Contraction(x, weight, factor), tensor
    )
    at = places(factor)
    tracker.trace.contractions.append(root)
    return View(root, IndexMap(tuple(_joined(at[v] for v in dim if v in at) for dim in dims)))


def _product(
    tracker: Tracker,
    left: Root,
    right: Root,
    dims: Dims,
    summed: Sequence[Variable],
    result: Tensor,
) -> View | None:
    """A view of a product, whichever operand is the weight; None if it is not to be lowered."""
    roles = _roles(left, right)
    if roles is None:
        return None
    x, weight = (left, right) if roles else (right, left)
    if not roles:
        everything = [v for group in (*dims, summed) for v in group]
        turned = {v: Variable(v.size, v.right, v.left, v.summed) for v in everything}
        dims = [[turned[v] for v in dim] for dim in dims]
        summed = [turned[v] for v in summed]
    everything = [v for group in (*dims, summed) for v in group]
    need_fixed(x, [v.left for v in everything if v.left and v.right])
    _count_flops(
        tracker,
        [v.size for v in everything if v.right is not None],
        [v.size for v in everything if v.right is None],
    )
    # What is tied is what makes a product more than a dense one.
    is_tied = any(v.left and v.right and not v.summed for v in everything)
    if result.dtype not in DTYPES or not (x.dtype == weight.dtype == result.dtype):
        if is_tied:
            tracker.miss(f"it computes in {_name(result.dtype)}, for which there are no kernels")
        return None
    try:
        return new_product(tracker, x, weight, dims, summed, result.dtype, result)
    except NotKroneckerSparseError as error:
        if is_tied:
            tracker.miss(str(error))
        return None


def need_fixed(x: Root, features: Sequence[Atom]) -> None:
    """Have the axes of x that hold features fixed; ``dynamic=True`` makes them symbolic.

    Raises:
        FixedSizeNeeded: one is not.
    """
    for atom in features:
        if atom.axis is not None and not isinstance(x.shape[atom.axis], int):
            raise FixedSizeNeeded(x.shape[atom.axis])


def _structured(tracker: Tracker, view: View) -> Root | None:
    """The Kronecker-sparse matrix that a weight is, whole or transposed; None if it is none."""
    root = view.root
    if len(root.shape) != 2 or len(view.map.dims) != 2:
        return None
    if root not in tracker.structured:
        tracker.structured[root] = _by_values(tracker, root)
    return root if tracker.structured[root] is not None else None


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


def _structured_product(
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
    need_fixed(x.root, features)
    digits = regroup(features, (p.a, inputs, p.d))
    i = _tied(digits[0], _axis(0, p.a))
    l = _tied(digits[1], _axis(axis_l, inputs), summed=True)
    j = _tied(digits[2], _axis(3, p.d))
    k = _right(_axis(axis_k, outputs))
    rows = _left(x.map.dims[0 if right_is_weight else 1])
    dims: Dims = [[], []]
    dims[along], dims[across] = rows, [*i, *k, *j]
    try:
        return new_product(tracker, x.root, weight, dims, l, result.dtype, result)
    except NotKroneckerSparseError as error:
        tracker.miss(str(error), p)
        return None


def _roles(left: Root, right: Root) -> bool | None:
    """True if the right one is the weight, False if the left one is, None if neither or both."""
    if left.kind is Kind.ACTIVATION and right.kind is Kind.WEIGHT:
        return True
    if left.kind is Kind.WEIGHT and right.kind is Kind.ACTIVATION:
        return False
    return None


def _tied(left: Atoms, right: Atoms, summed: bool = False) -> list[Variable]:
    return [
        Variable(
            one.size if isinstance(one.size, int) else other.size, _real(one), _real(other), summed
        )
        for one, other in align(left, right)
    ]


def _left(atoms: Atoms) -> list[Variable]:
    return [Variable(atom.size, _real(atom), None) for atom in atoms]


def _right(atoms: Atoms) -> list[Variable]:
    return [Variable(atom.size, None, _real(atom)) for atom in atoms]


def _real(atom: Atom) -> Atom | None:
    """A digit that is there: a repetition depends on no element."""
    return None if atom.axis is None else atom


def _axis(axis: int, size: int) -> Atoms:
    return (Atom(axis, size, 1),) if size > 1 else ()


def _broadcast(
    index_map: IndexMap, argument: Tensor, result: Tensor, dim: int, size: Size
) -> Atoms:
    own = dim - (result.dim() - argument.dim())
    if own < 0 or (same(argument.shape[own], 1) and not same(size, 1)):
        return (Atom(None, plain(size), 0),)
    return index_map.dims[own]


def digit_of(variables: Sequence[Variable], atom: Atom, summed: bool) -> Variable:
    """A digit of a variable, as a variable."""
    if atom.axis is None:
        raise NotNestedError("the product is repeated along a dim")
    whole = variables[atom.axis]

    def part(digit: Atom | None) -> Atom | None:
        if digit is None:
            return None
        return Atom(digit.axis, atom.size, plain(digit.stride * atom.stride))

    return Variable(atom.size, part(whole.left), part(whole.right), summed)


def _joined(atoms: Any) -> Atoms:
    found = tuple(atoms)
    return regroup(found, (product(atom.size for atom in found),))[0]


def _count_flops(tracker: Tracker, weights: list[Size], rows: list[Size]) -> None:
    if tracker.node is None:
        return
    total = 2
    for size in (*weights, *rows):
        total *= size if isinstance(size, int) else size.node.hint or 1
    tracker.trace.flops[tracker.node] = tracker.trace.flops.get(tracker.node, 0) + total


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
