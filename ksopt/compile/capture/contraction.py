"""Products described by variables, contractions built from them, and sums with a bias.

If one operand depends on parameters only and the other on the model's inputs, a product is offered
to `ksopt.compile.capture.recognize`; a product that it refuses is an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ksopt.compile.capture.diagonal_axes import merged
from ksopt.compile.capture.index_map import (
    Atom,
    Atoms,
    IndexMap,
    NotNestedError,
    align,
    expand,
    regroup,
)
from ksopt.compile.capture.recognize import NotKroneckerSparseError, places, recognise, y_shape
from ksopt.compile.capture.symbolic import Size, plain, product
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import Biased, Contraction, Kind, Root, Variable, View
from ksopt.kernels.operands import size_hint
from ksopt.precision import dtype_name

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that are lowered; there are no kernels for float64."""

Dims = list[list[Variable]]
"""The variables of each dim of a result."""


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
        NotKroneckerSparseError: the product is not Kronecker-sparse.
    """
    new = [variable for dim in dims for variable in dim]
    factor = recognise([*new, *summed], x.shape, weight.shape)
    root = tracker.root(
        y_shape(factor), dtype, Kind.ACTIVATION, Contraction(x, weight, factor), tensor
    )
    at = places(factor)
    tracker.trace.contractions.append(root)
    return View(root, IndexMap(tuple(_joined(at[v] for v in dim if v in at) for dim in dims)))


def offered(
    tracker: Tracker,
    left: Root,
    right: Root,
    dims: Dims,
    summed: Sequence[Variable],
    result: Tensor,
    repeats: bool = False,
) -> View | None:
    """A view of a product, whichever operand is the weight; None if it cannot be lowered.

    With ``repeats`` the weight may have repeated digits, see `diagonal_axes`.
    """
    roles = right_is_weight(left, right)
    if roles is None:
        return None
    x, weight = (left, right) if roles else (right, left)
    if not roles:
        everything = [v for group in (*dims, summed) for v in group]
        turned = {v: Variable(v.size, v.right, v.left, v.summed) for v in everything}
        dims = [[turned[v] for v in dim] for dim in dims]
        summed = [turned[v] for v in summed]
    if repeats:
        try:
            dims, summed = merged(dims, summed)
        except NotKroneckerSparseError as error:
            tracker.miss(str(error))
            return None
    everything = [v for group in (*dims, summed) for v in group]
    features = [v.left for v in everything if v.left and v.right]
    need_fixed(tracker, x, features, [v.left for v in everything if v.left and not v.right])
    count_flops(
        tracker,
        [v.size for v in everything if v.right is not None],
        [v.size for v in everything if v.right is None],
    )
    # Only a product with tied variables is more than a dense one.
    is_tied = any(v.left and v.right and not v.summed for v in everything)
    if result.dtype not in DTYPES or not (x.dtype == weight.dtype == result.dtype):
        if is_tied:
            tracker.miss(
                f"it computes in {dtype_name(result.dtype)}, for which there are no kernels"
            )
        return None
    try:
        return new_product(tracker, x, weight, dims, summed, result.dtype, result)
    except NotKroneckerSparseError as error:
        if is_tied:
            tracker.miss(str(error))
        return None


def contraction(view: View) -> Contraction | None:
    """The product by a weight that a view holds, without its bias; None if there is none."""
    origin = view.root.origin
    if isinstance(origin, Biased):
        origin = origin.product.root.origin
    return origin if isinstance(origin, Contraction) else None


def is_sparse(view: View) -> bool:
    """Whether a view holds a product by a factor that is not dense."""
    origin = contraction(view)
    return origin is not None and origin.factor.pattern.a * origin.factor.pattern.d > 1


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
    dtype = torch.promote_types(whole.root.dtype, bias.root.dtype)
    root = tracker.root(axes.shape, dtype, Kind.ACTIVATION, origin, tensor)
    return View(root, IndexMap(tuple(dims)))


def need_fixed(tracker: Tracker, x: Root, features: Sequence[Atom], batch: Sequence[Atom]) -> None:
    """Fix the sizes of the axes of x that hold features only; ``dynamic=True`` makes them symbolic.

    An axis that holds a part of the batch too, as a flattened [batch * heads], stays dynamic.

    Raises:
        FixedSizeNeeded: a size is not fixed.
        NotNestedError: a size cannot be fixed.
    """
    of_batch = {atom.axis for atom in batch}
    for atom in features:
        if atom.axis is None or atom.axis in of_batch:
            continue
        if not isinstance(x.shape[atom.axis], int):
            tracker.fix(x.shape[atom.axis])


def right_is_weight(left: Root, right: Root) -> bool | None:
    """True if the right operand is the weight, False if the left is, None if neither or both."""
    if left.kind is Kind.ACTIVATION and right.kind is Kind.WEIGHT:
        return True
    if left.kind is Kind.WEIGHT and right.kind is Kind.ACTIVATION:
        return False
    return None


def tied(left: Atoms, right: Atoms, summed: bool = False) -> list[Variable]:
    return [
        Variable(
            one.size if isinstance(one.size, int) else other.size, _real(one), _real(other), summed
        )
        for one, other in align(left, right)
    ]


def left_only(atoms: Atoms) -> list[Variable]:
    return [Variable(atom.size, _real(atom), None) for atom in atoms]


def right_only(atoms: Atoms) -> list[Variable]:
    return [Variable(atom.size, None, _real(atom)) for atom in atoms]


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


def count_flops(tracker: Tracker, weights: list[Size], rows: list[Size]) -> None:
    if tracker.node is None:
        return
    total = 2
    for size in (*weights, *rows):
        total *= size_hint(size) or 1
    tracker.trace.flops[tracker.node] = tracker.trace.flops.get(tracker.node, 0) + total


def _real(atom: Atom) -> Atom | None:
    """The digit, or None for a repetition, which depends on no element."""
    return None if atom.axis is None else atom


def _joined(atoms: Any) -> Atoms:
    digits = tuple(atoms)
    return regroup(digits, (product(atom.size for atom in digits),))[0]


def of_one_dtype(*tensors: Any) -> bool:
    """Whether all are tensors, of one dtype."""
    return all(isinstance(one, Tensor) and one.dtype == tensors[0].dtype for one in tensors)
