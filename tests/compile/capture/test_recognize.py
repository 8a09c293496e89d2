"""Recognition of Kronecker-sparse products: random factors, and refused products."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ksopt.compile.capture.index_map import Atom
from ksopt.compile.capture.recognize import (
    NotKroneckerSparseError,
    places,
    recognise,
    weight_dims,
    x_dims,
    y_shape,
)
from ksopt.compile.capture.values import Variable


def laid_out(order, sizes):
    """A tensor with one axis for each letter of ``order``: the atoms, and the shape."""
    atoms = {letter: Atom(axis, sizes[letter], 1) for axis, letter in enumerate(order)}
    return atoms, [sizes[letter] for letter in order]


def product(x_order, w_order, sizes, y_order):
    """out[y_order] = sum over l of x[x_order] w[w_order], each letter an axis of its own."""
    x, x_shape = laid_out(x_order, sizes)
    w, w_shape = laid_out(w_order, sizes)
    variables = [Variable(sizes[v], x.get(v), w.get(v)) for v in y_order]
    variables += [
        Variable(sizes[v], x.get(v), w.get(v), summed=True)
        for v in x_order
        if v in w_order and v not in y_order
    ]
    return variables, x_shape, w_shape


@given(
    st.permutations("nmilj"),
    st.permutations("ilkj"),
    st.permutations("nmikj"),
    st.tuples(*[st.integers(1, 4)] * 6),
)
def test_any_order_of_the_axes_is_the_same_product(x_order, w_order, y_order, numbers):
    sizes = dict(zip("nmilkj", numbers, strict=True))
    if sizes["l"] == 1:
        return
    variables, x_shape, w_shape = product(x_order, w_order, sizes, y_order)
    factor = recognise(variables, x_shape, w_shape)
    pattern = factor.pattern
    assert (pattern.b, pattern.c) == (sizes["k"], sizes["l"])
    assert pattern.a * pattern.d == sizes["i"] * sizes["j"]
    # By the definition, on integers: the canonical operands are views of x and w.
    x = torch.randint(-9, 9, x_shape).double()
    w = torch.randint(-9, 9, w_shape).double()
    expected = torch.einsum(f"{''.join(x_order)},{''.join(w_order)}->{''.join(y_order)}", x, w)
    rows = gathered(x, x_dims(factor))
    weight = gathered(w, weight_dims(factor)).reshape(pattern.weight_shape)
    if factor.batch_last:
        rows = rows.movedim(0, -1)
    grouped = rows.reshape(*rows.shape[:-1], pattern.a, pattern.c, pattern.d)
    y = torch.einsum("...alj,aklj->...akj", grouped, weight).flatten(-3)
    if factor.batch_last:
        y = y.movedim(-1, 0)
    assert tuple(y.shape) == y_shape(factor)
    at = places(factor)
    dims = [(at[v],) if v in at else () for v in variables if not v.summed]
    assert torch.equal(gathered(y, dims), expected)


def gathered(root, dims):
    """The tensor with dims of a root's atoms, element by element."""
    shape = [torch.Size([atom.size for atom in atoms]).numel() for atoms in dims]
    atoms = [atom for group in dims for atom in group]
    values = []
    for digits in itertools.product(*(range(atom.size) for atom in atoms)):
        index = [0] * root.dim()
        for digit, atom in zip(digits, atoms, strict=True):
            index[atom.axis] += digit * atom.stride
        values.append(root[tuple(index)])
    return torch.stack(values).reshape(shape)


SIZES = {"n": 5, "m": 3, "i": 2, "l": 4, "k": 6, "j": 3}


def patterns_of(x_order, w_order="iklj", y_order="nikj"):
    variables, x_shape, w_shape = product(x_order, w_order, SIZES, y_order)
    factor = recognise(variables, x_shape, w_shape)
    return str(factor.pattern), factor.direct, factor.batch_last


def test_the_order_of_x_decides_between_a_and_d():
    assert patterns_of("nilj") == ("(2,6,4,3)", True, False)
    assert patterns_of("nijl") == ("(6,6,4,1)", True, False)
    assert patterns_of("nlij") == ("(1,6,4,6)", True, False)
    assert patterns_of("iljn") == ("(2,6,4,3)", True, True)
    assert patterns_of("inlj") == ("(2,6,4,3)", False, False)


def test_batch_dims_that_run_on_are_one():
    x = [Variable(2, Atom(0, 2, 3), None), Variable(3, Atom(0, 3, 1), None)]
    rest = [
        Variable(4, Atom(1, 4, 1), Atom(0, 4, 1)),
        Variable(5, Atom(2, 5, 1), Atom(1, 5, 1), summed=True),
    ]
    assert y_shape(recognise([*x, *rest], (6, 4, 5), (4, 5))) == (6, 4)


@pytest.mark.parametrize(
    ("variables", "x_shape", "w_shape", "reason"),
    [
        ([(4, 0, 0, False)], (4,), (4,), "nothing is summed"),
        ([(4, 0, None, True), (3, 1, 0, True)], (4, 3), (3,), "one operand alone is summed"),
        ([(4, None, None, False), (3, 0, 0, True)], (3,), (3,), "repeated along a dim"),
        ([(3, 0, 0, True)], (3, 2), (3,), "it reads only part of its input"),
        ([(3, 0, 0, True)], (3,), (3, 2), "it reads only part of its weight"),
        ([(3, 0, 0, True), (3, 0, 1, False)], (9,), (3, 3), "twice, or not all"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(variables, x_shape, w_shape, reason):
    created = [
        Variable(
            size,
            None if x is None else Atom(x, size, 1),
            None if w is None else Atom(w, size, 1),
            summed,
        )
        for size, x, w, summed in variables
    ]
    with pytest.raises(NotKroneckerSparseError, match=reason):
        recognise(created, x_shape, w_shape)
