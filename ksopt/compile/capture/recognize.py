"""Recognition of Kronecker-sparse products and their patterns.

A product out[...] = sum x[...] w[...] is described by its variables
(`ksopt.compile.capture.values`): each is a digit of x, of w, or of both. With x's features in
memory order, it is the product by a factor (a, b, c, d) if the variables are of four classes:

=========  ====  ====  ======  ============================================
class      in x  in w  summed
=========  ====  ====  ======  ============================================
batch      yes   no    no      makes up the batch
tied       yes   yes   no      i if it is above some of l in x, else j
summed     yes   yes   yes     l
new        no    yes   no      k
=========  ====  ====  ======  ============================================

Then a is the product of the sizes of i, and so on. The result does not depend on the spelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ksopt.compile.capture.index_map import Atom, runs_on
from ksopt.compile.capture.symbolic import Size, product, same
from ksopt.compile.capture.values import Factor, Variable
from ksopt.patterns.chain import Pattern


class NotKroneckerSparseError(Exception):
    """The product is not Kronecker-sparse; the text is a clause with the reason."""


def recognise(
    variables: Sequence[Variable], x_shape: Sequence[Size], w_shape: Sequence[Size]
) -> Factor:
    """The Kronecker-sparse form of a product.

    Args:
        variables: of the product, x to the left; new ones in the order of the result's dims.
        x_shape: sizes of x's root; its memory order decides between i and j.
        w_shape: sizes of the weight's root.

    Raises:
        NotKroneckerSparseError: it has no such form.
    """
    variables = [variable for variable in variables if not same(variable.size, 1)]
    if any(same(variable.size, 0) for variable in variables):
        raise NotKroneckerSparseError("it has no elements")
    for variable in variables:
        if variable.summed and (variable.left is None or variable.right is None):
            raise NotKroneckerSparseError("one operand alone is summed over an index")
        if variable.left is None and variable.right is None:
            raise NotKroneckerSparseError("the result is repeated along a dim")
    ordered = _in_order([v for v in variables if v.left], x_shape, "input")
    _in_order([_swapped(v) for v in variables if v.right], w_shape, "weight")
    batch = [v for v in ordered if v.right is None]
    features = [v for v in ordered if v.right is not None]
    summed = [v for v in features if v.summed]
    new = [v for v in variables if v.left is None]
    if not summed:
        raise NotKroneckerSparseError("nothing is summed")
    for variable in (*features, *new):
        if not isinstance(variable.size, int):
            raise NotKroneckerSparseError("the number of features is not fixed")
    # Above the last summed variable: i. If one is between two summed ones, x is permuted anyway.
    last = features.index(summed[-1])
    outer = [v for v in features[:last] if not v.summed]
    inner = features[last + 1 :]
    pattern = Pattern(*(product(v.size for v in group) for group in (outer, new, summed, inner)))
    features_in_order = [*outer, *summed, *inner]
    batch_last = bool(batch) and [*features_in_order, *batch] == ordered
    return Factor(
        pattern=pattern,
        batch=_batch_dims(batch),
        i=tuple(outer),
        k=tuple(new),
        l=tuple(summed),
        j=tuple(inner),
        batch_last=batch_last,
        direct=batch_last or [*batch, *features_in_order] == ordered,
    )


def places(factor: Factor) -> dict[Variable, Atom]:
    """Position of each variable of the result on the axes of y: [*batch, M] or [M, *batch]."""
    first_batch = 1 if factor.batch_last else 0
    features = 0 if factor.batch_last else len(factor.batch)
    atoms = {}
    for axis, group in enumerate(factor.batch):
        atoms.update(_on_axis(first_batch + axis, group))
    atoms.update(_on_axis(features, (*factor.i, *factor.k, *factor.j)))
    return atoms


def y_shape(factor: Factor) -> tuple[Size, ...]:
    """Sizes of y: [*batch, M], or [M, *batch] when batch_last."""
    batch = tuple(product(v.size for v in group) for group in factor.batch)
    features = factor.pattern.out_features
    return (features, *batch) if factor.batch_last else (*batch, features)


def x_dims(factor: Factor) -> list[tuple[Atom, ...]]:
    """The dims of x: [*batch, N], or [N, *batch] when batch_last, as digits of its root."""
    batch = [_digits(group) for group in factor.batch]
    features = _digits((*factor.i, *factor.l, *factor.j))
    return [features, *batch] if factor.batch_last else [*batch, features]


def weight_dims(factor: Factor) -> list[tuple[Atom, ...]]:
    """The dims of the canonical weight [a, b, c, d], as digits of its root."""
    return [
        tuple(v.right for v in group if v.right)
        for group in (factor.i, factor.k, factor.l, factor.j)
    ]


def _digits(group: Iterable[Variable]) -> tuple[Atom, ...]:
    return tuple(variable.left for variable in group if variable.left)


def _on_axis(axis: int, group: Sequence[Variable]) -> dict[Variable, Atom]:
    atoms, stride = {}, 1
    for variable in reversed(group):
        atoms[variable] = Atom(axis, variable.size, stride)
        stride = stride * variable.size
    return atoms


def _swapped(variable: Variable) -> Variable:
    return Variable(variable.size, variable.right, variable.left, variable.summed)


def _in_order(variables: Sequence[Variable], shape: Sequence[Size], what: str) -> list[Variable]:
    """Variables in memory order of the left operand, each element of which they must read once."""
    ordered: list[Variable] = []
    for axis, size in enumerate(shape):
        left = {v: v.left for v in variables if v.left and v.left.axis == axis}
        low_to_high: list[Variable] = []
        reached: Size = 1
        while left:
            following = [v for v, atom in left.items() if same(atom.stride, reached)]
            if len(following) != 1:
                raise NotKroneckerSparseError(f"it reads elements of its {what} twice, or not all")
            low_to_high.append(following[0])
            reached = left.pop(following[0]).span
        if not same(reached, size):
            raise NotKroneckerSparseError(f"it reads only part of its {what}")
        ordered += reversed(low_to_high)
    return ordered


def _batch_dims(batch: Sequence[Variable]) -> tuple[tuple[Variable, ...], ...]:
    """Batch variables grouped into dims: variables contiguous in x form one dim."""
    dims: list[list[Variable]] = []
    for variable in batch:
        last = dims[-1][-1] if dims else None
        if last and last.left and variable.left and runs_on(last.left, variable.left):
            dims[-1].append(variable)
        else:
            dims.append([variable])
    return tuple(tuple(dim) for dim in dims)


__all__ = [
    "NotKroneckerSparseError",
    "places",
    "recognise",
    "weight_dims",
    "x_dims",
    "y_shape",
]
