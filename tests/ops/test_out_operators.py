"""Products written into a given tensor: the operators that do it, and PyTorch's ways below them."""

import contextlib

import pytest
import torch
from seen_products import without_library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ksopt import ops
from ksopt.baselines import BASELINES, Product
from ksopt.errors import InvalidInputError
from ksopt.kernels import dispatch
from ksopt.kernels.backends import cpu
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

OPS = [ops.ks_mm_inner_out, ops.ks_mm_repacked_out]
# With b = 1, c = 1, d = 1 or a*d = 1 some ways permute nothing, or multiply otherwise.
SHAPES = [
    *[(1, 1, 1, 1), (2, 3, 4, 5), (1, 7, 3, 2), (3, 4, 5, 1), (1, 9, 8, 1), (2, 1, 3, 4)],
    *[(2, 3, 1, 4), (4, 2, 2, 3), (1, 3, 5, 6)],
]
BATCHES = [(), (0,), (1,), (7,), (2, 3), (0, 3)]
LAYOUTS = ["batch_first", "batch_last"]


@pytest.fixture(autouse=True)
def no_old_choices():
    cpu.forget()
    yield
    cpu.forget()


def operands(shape, layout="batch_first", batch=(7,), dtype=torch.float32):
    """x, weight and a poisoned result."""
    a, b, c, d = shape
    sizes = [(a * n * d, *batch) if layout == "batch_last" else (*batch, a * n * d) for n in (c, b)]
    out = torch.full(sizes[1], torch.nan, dtype=dtype)
    return torch.randn(sizes[0]).to(dtype), torch.randn(shape).to(dtype), out


class Moves(TorchDispatchMode):
    """Counts the operators that do nothing but move elements."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pytorchs_ways_write_into_it_and_copy_no_more_than_without(name, shape, layout):
    baseline, pattern, last = BASELINES[name], Pattern(*shape), layout == "batch_last"
    support = baseline.supports(Product(pattern, torch.float32, "cpu", last))
    if not support.ok:
        pytest.skip(support.reason)
    timed = pytorch_ops.names(Problem.of_factor(pattern, "float32", last), "cpu")
    for batch in BATCHES:
        x, weight, out = operands(shape, layout, batch)
        prepared = baseline.prepare(weight, last)
        with Moves() as without:
            expected = baseline.multiply(x, prepared, pattern, last)
        with Moves() as with_out:
            y = baseline.multiply(x, prepared, pattern, last, out)
        assert y.data_ptr() == out.data_ptr()
        assert y.shape == out.shape
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(out, ks_reference(x, weight, layout), rtol=1e-4, atol=1e-5)
        # einsum's y is in order for b = 1, and then small beside x; for c = 1 it orders the weight.
        if name in timed and (name != "einsum" or (pattern.b > 1 and pattern.c > 1)):
            assert with_out.count <= without.count, (name, batch)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_it_holds_what_the_operator_would_return(op, layout, dtype):
    last = layout == "batch_last"
    for shape in SHAPES:
        for batch in BATCHES:
            x, weight, out = operands(shape, layout, batch, dtype)
            assert op(x, weight, None, last, out=out) is None
            torch.testing.assert_close(out, ops.ks_mm(x, weight, last))


@pytest.mark.parametrize("op", OPS)
def test_the_owner_comes_before_the_layout(op):
    owner = torch.randn(5, 2, 3, 4)
    weight = owner.permute(1, 2, 3, 0)
    x, _, out = operands(weight.shape, "batch_last", dtype=torch.bfloat16)
    op(x, weight, owner, True, out=out)
    torch.testing.assert_close(out, ops.ks_mm(x, weight, True, owner))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(op, layout):
    x, weight, out = operands((2, 3, 4, 5), layout)
    torch.library.opcheck(op, (x, weight, None, layout == "batch_last"), {"out": out})
    torch.library.opcheck(op, (x, weight, weight, layout == "batch_last"), {"out": out})


@pytest.fixture
def written(monkeypatch):
    """The tensors that kernels write into."""
    requested, run = [], dispatch.run

    def seen(x, weight, batch_last, out=None):
        requested.append(out)
        return run(x, weight, batch_last, out)

    without_library(monkeypatch)
    monkeypatch.setattr(dispatch, "run", seen)
    return requested


def test_a_contiguous_one_is_written_at_once(written):
    x, weight, out = operands((2, 3, 4, 5))
    ops.ks_mm_inner_out(x, weight, out=out)
    assert written[0].data_ptr() == out.data_ptr()


def transposed(x, weight):
    return torch.full((30, 7), torch.nan).T


def among_others(x, weight):
    return torch.full((7, 40), torch.nan)[:, 4:34]


def misaligned(x, weight):
    return torch.full((7 * 30 + 1,), torch.nan)[1:].view(7, 30)


def in_x(x, weight):
    return x.as_strided((7, 30), (30, 1), 8)


def in_the_weight(x, weight):
    return weight.as_strided((7, 30), (30, 1), 60)


@pytest.mark.parametrize("where", [transposed, among_others, misaligned, in_x, in_the_weight])
def test_any_other_memory_is_copied_into(where, written):
    x, weight = torch.randn(7, 40), torch.randn(400)[:120].view(2, 3, 4, 5)
    out, expected = where(x, weight), ks_reference(x, weight)
    ops.ks_mm_inner_out(x, weight, out=out)
    assert written == [None]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_memory_between_the_rows_of_x_is_not_x_but_counts_as_such(written):
    """What shares no byte with x, but lies in its reach, is written by way of a copy."""
    memory = torch.full((7, 40 + 32), torch.nan)
    x, weight, out = memory[:, :40].normal_(), torch.randn(2, 3, 4, 5), memory[:, 40:70]
    expected = ks_reference(x, weight)
    ops.ks_mm_inner_out(x, weight, out=out)
    assert written == [None]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("which", range(3))
def test_lazily_negated_tensors(op, which):
    memory = operands((2, 3, 4, 5))
    x, weight, out = (
        torch._neg_view(tensor) if at == which else tensor for at, tensor in enumerate(memory)
    )
    op(x, weight, out=out)
    torch.testing.assert_close(out + 0, ks_reference(x + 0, weight + 0), rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidInputError, match="out has shape"):
        op(x, weight, out=torch._neg_view(torch.zeros(7, 31)))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(7, 31), r"out has shape \[7, 31\], but the product .* has shape \[7, 30\]"),
        (torch.zeros(7, 1, 30), r"out has shape \[7, 1, 30\]"),
        (torch.zeros(0), r"out has shape \[0\]"),
        (torch.zeros(7, 30).double(), "out is float64 on cpu, but .*: float32 on cpu"),
    ],
)
@pytest.mark.parametrize("fake", [False, True])
def test_what_cannot_hold_the_product_is_refused_in_words(out, message, fake):
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext():
        x, weight = torch.randn(7, 40), torch.randn(2, 3, 4, 5)
        with pytest.raises(InvalidInputError, match=message):
            ops.ks_mm_inner_out(x, weight, out=out)


def test_another_device_is_refused_in_words():
    x, weight, out = operands((2, 3, 4, 5))
    with pytest.raises(InvalidInputError, match="out is float32 on meta"):
        ops.ks_mm_inner_out(x, weight, out=out.to("meta"))


def test_elements_that_share_memory_are_refused_by_torch():
    x, weight, _ = operands((2, 3, 4, 5))
    with pytest.raises(RuntimeError, match="single memory location"):
        ops.ks_mm_inner_out(x, weight, out=torch.zeros(1, 30).expand(7, 30))


@pytest.mark.parametrize("which", range(3))
def test_no_gradient_is_lost_without_a_word(which):
    inputs = operands((2, 3, 4, 5))
    inputs[which].requires_grad_()
    x, weight, out = inputs
    with pytest.raises(InvalidInputError, match=r"torch\.no_grad"):
        ops.ks_mm_inner_out(x, weight, out=out)
    with torch.no_grad():
        ops.ks_mm_inner_out(x, weight, out=out)
        torch.testing.assert_close(out, ks_reference(x, weight), rtol=1e-4, atol=1e-5)


def test_autograd_notices_that_it_was_written():
    x, weight, out = operands((2, 3, 4, 5))
    y = out.zero_() * torch.ones(7, 30, requires_grad=True)
    ops.ks_mm_inner_out(x, weight, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_inference_mode():
    with torch.inference_mode():
        x, weight, out = operands((2, 3, 4, 5))
        ops.ks_mm_inner_out(x, weight, out=out)
        torch.testing.assert_close(out, ks_reference(x, weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("ksopt", marks=pytest.mark.slow)])
def test_a_users_own_call_compiles(backend):
    def step(x, weight):
        out = torch.empty(7, 30)
        before = out.fill_(1.0) + 1
        ops.ks_mm_inner_out(x.relu(), weight, out=out)
        return before, out * 2

    x, weight, _ = operands((2, 3, 4, 5))
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), step(x, weight), rtol=1e-4, atol=1e-5)
