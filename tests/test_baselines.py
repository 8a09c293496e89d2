"""Every baseline returns the reference's result, and copies no more than documented."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ksopt.baselines import BASELINES, Product
from ksopt.batched import Matrices
from ksopt.bench.request import EAGER
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.problem import Problem
from ksopt.ops import ks_mm_weight_grad
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference, to_dense

PATTERNS = [
    Pattern(1, 1, 1, 1),
    Pattern(2, 3, 4, 1),
    Pattern(1, 3, 4, 5),
    Pattern(3, 4, 2, 5),
    Pattern(3, 4, 6, 2),
    Pattern(3, 1, 4, 2),
    Pattern(3, 4, 1, 2),
    Pattern(1, 6, 5, 1),
    Pattern(7, 1, 1, 3),
    Pattern(2, 8, 8, 16),
    Pattern(1, 4, 1, 1),  # one column: the sparse forms have strides of 0 to get rid of
    Pattern(1, 8, 2, 1),
]
BATCHES = [(), (0,), (1,), (7,), (63,), (2, 3), (0, 3), (2, 1, 3)]
LAYOUTS = ["batch_first", "batch_last"]


@pytest.fixture(autouse=True)
def poison():
    """Fill every uninitialised tensor with NaN, so that unwritten elements are detected."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_x(pattern, layout, batch, dtype=torch.float64):
    n = pattern.in_features
    return torch.randn((n, *batch) if layout == "batch_last" else (*batch, n), dtype=dtype)


# bmm_loop names the few cases it is for; all others apply everywhere, if torch can do them at all.
EVERYWHERE = [
    (name, pattern, layout)
    for name, baseline in BASELINES.items()
    for pattern in PATTERNS
    for layout in LAYOUTS
    if name != "bmm_loop"
    or baseline.supports(Product(pattern, torch.float64, "cpu", layout == "batch_last")).ok
]
NAMES_AND_LAYOUTS = [case[::2] for case in EVERYWHERE if case[1] == Pattern(3, 4, 6, 2)]


def skip_unless_supported(baseline, pattern, dtype, layout):
    support = baseline.supports(Product(pattern, dtype, "cpu", layout == "batch_last"))
    if not support.ok:
        assert support.reason.endswith(".") or "refuses it: " in support.reason
        pytest.skip(f"{baseline.name} {pattern}: {support.reason}")


@pytest.mark.parametrize(("name", "pattern", "layout"), EVERYWHERE, ids=str)
def test_equals_the_reference_in_float64(name, pattern, layout):
    baseline = BASELINES[name]
    skip_unless_supported(baseline, pattern, torch.float64, layout)
    weight = torch.randn(pattern.weight_shape, dtype=torch.float64)
    product = baseline.bind(weight, layout)
    for batch in BATCHES:
        x = make_x(pattern, layout, batch)
        before = x.clone()
        y = product(x)
        expected = ks_reference(x, weight, layout)
        # 1e-13: sums of at most 8 terms of size 1, in another order.
        torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
        assert y.is_contiguous()
        assert y.numel() == 0 or y.data_ptr() != x.data_ptr()
        assert torch.equal(x, before)


@pytest.mark.parametrize(("name", "layout"), NAMES_AND_LAYOUTS)
def test_takes_any_strides(name, layout):
    pattern = Pattern(3, 4, 6, 2)
    baseline = BASELINES[name]
    skip_unless_supported(baseline, pattern, torch.float64, layout)
    weight = torch.randn(2, 6, 4, 3, dtype=torch.float64).permute(3, 2, 1, 0)
    product = baseline.bind(weight, layout)
    x = make_x(pattern, layout, (7,))
    sliced = torch.randn(*(2 * size + 1 for size in x.shape), dtype=torch.float64)
    for view in (x.t().contiguous().t(), sliced[1::2, 1::2], x[:1].expand_as(x)):
        expected = ks_reference(view, weight, layout)
        torch.testing.assert_close(product(view), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "layout"), NAMES_AND_LAYOUTS)
def test_every_dtype_is_right_or_refused_with_a_reason(name, dtype, layout):
    pattern = Pattern(3, 4, 6, 2)
    baseline = BASELINES[name]
    skip_unless_supported(baseline, pattern, dtype, layout)
    weight = torch.randn(pattern.weight_shape).to(dtype)
    x = make_x(pattern, layout, (63,), dtype)
    exact = ks_reference(x.double(), weight.double(), layout)
    sizes = ks_reference(x.double().abs(), weight.double().abs(), layout)
    # Sums of 6 terms: each addition rounds once, and the result once more.
    wrong = (baseline.bind(weight, layout)(x) - exact).abs() > 4 * torch.finfo(dtype).eps * sizes
    assert not wrong.any()


def takes_as_it_is(matrices):
    """Whether torch.bmm hands these strides to the GEMM library (its own rule), or copies first."""
    (_, rows, columns), (_, down, across) = matrices.shape, matrices.stride()
    return (across == 1 and down >= columns) or (down == 1 and across >= rows)


class CopiesSeen(TorchDispatchMode):
    """Counts the elements that copying operators write, and those that torch.bmm would copy."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (
            torch.ops.aten.clone.default,
            torch.ops.aten.copy_.default,
            torch.ops.aten._to_copy.default,
        ):
            self.elements += out.numel()
        if func is torch.ops.aten.bmm.out:
            for matrices in (*args, out):
                self.elements += 0 if takes_as_it_is(matrices) else matrices.numel()
        return out


@pytest.mark.parametrize(
    ("name", "pattern", "layout", "batch", "copies"),
    [
        # bmm: nothing is copied where d = 1, for one sample, and in batch_last where a = 1.
        ("bmm", Pattern(3, 8, 8, 1), "batch_first", 64, 0),
        ("bmm", Pattern(3, 8, 8, 1), "batch_last", 64, 0),
        ("bmm", Pattern(1, 8, 8, 3), "batch_last", 64, 0),
        ("bmm", Pattern(1, 8, 8, 3), "batch_first", 1, 0),
        # Otherwise x and y once each, and not even those where c is 1 or, in batch_last, b is 1.
        ("bmm", Pattern(3, 8, 4, 2), "batch_first", 64, 64 * (24 + 48)),
        ("bmm", Pattern(3, 8, 4, 2), "batch_last", 64, 64 * (24 + 48)),
        ("bmm", Pattern(3, 8, 1, 2), "batch_first", 64, 0),
        ("bmm", Pattern(3, 8, 1, 2), "batch_last", 64, 0),
        ("bmm", Pattern(3, 1, 8, 2), "batch_last", 64, 64 * 48),
        ("bmm_loop", Pattern(3, 8, 4, 2), "batch_last", 64, 0),
        ("bmm_loop", Pattern(2, 8, 4, 3), "batch_last", 64, 0),
        ("expand", Pattern(3, 8, 4, 2), "batch_first", 64, 0),
        ("expand", Pattern(3, 8, 4, 2), "batch_last", 64, 0),
        ("bmm_paper", Pattern(3, 8, 4, 2), "batch_first", 64, 64 * (24 + 48)),
    ],
    ids=str,
)
def test_copies_no_more_than_it_says(name, pattern, layout, batch, copies):
    product = BASELINES[name].bind(torch.randn(pattern.weight_shape), layout)
    x = make_x(pattern, layout, (batch,), torch.float32)
    with CopiesSeen() as seen:
        product(x)
    assert seen.elements == copies


class Products(TorchDispatchMode):
    """Records the batched products of a block: their operands' shapes, and which are contiguous."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            *_, left, right = (one for one in args if isinstance(one, torch.Tensor))
            self.seen.add((tuple(left.shape), tuple(right.shape)))
        return func(*args, **(kwargs or {}))


def products_of(call):
    with Products() as products:
        y = call()
    return y, products.seen


def spellings(x, weight, pattern):
    """Ways to write the product in batch_first, each with the baseline that is the same product."""
    a, b, c, d = pattern.weight_shape
    rows = x.shape[0]
    groups = x.view(rows, a, c, d).permute(1, 3, 0, 2)  # [a, d, B, c]
    matrices = weight.permute(0, 3, 1, 2)  # [a, d, b, c]

    def in_rows(y):  # [a*d, B, b] -> [B, a*b*d]
        return y.reshape(a, d, rows, b).permute(2, 0, 3, 1).reshape(rows, -1)

    flat, flat_matrices = groups.reshape(a * d, rows, c), matrices.reshape(a * d, b, c)
    nothing = torch.zeros(a * d, 1, b, dtype=x.dtype)
    return {
        "matmul by broadcasting": ("bmm", lambda: in_rows(groups @ matrices.mT)),
        "bmm": ("bmm", lambda: in_rows(torch.bmm(flat, flat_matrices.mT))),
        "baddbmm": ("bmm", lambda: in_rows(torch.baddbmm(nothing, flat, flat_matrices.mT))),
        "bmm, weight first": (
            "einsum_weight_first" if d == 1 else "bmm_weight_first",
            lambda: in_rows(torch.bmm(flat_matrices, flat.mT).mT),
        ),
    }


@pytest.mark.parametrize(
    "spelling", ["matmul by broadcasting", "bmm", "baddbmm", "bmm, weight first"]
)
@pytest.mark.parametrize("pattern", [Pattern(3, 5, 4, 1), Pattern(3, 5, 4, 2)], ids=str)
def test_how_authors_write_it_is_a_product_that_is_timed(pattern, spelling):
    x, weight = make_x(pattern, "batch_first", (7,)), torch.randn(pattern.weight_shape).double()
    name, write = spellings(x, weight, pattern)[spelling]
    baseline = BASELINES[name]
    y, written = products_of(write)
    prepared = baseline.prepare(weight, False)
    ours, timed = products_of(lambda: baseline.multiply(x, prepared, pattern, False))
    torch.testing.assert_close(y, ours)
    assert written == timed
    assert name in EAGER
    assert name in pytorch_ops.names(Problem.of_factor(pattern, "float32", False), "cuda")


def test_bmm_loop_says_when_it_does_not_apply():
    def reason(pattern, batch_last):
        return BASELINES["bmm_loop"].supports(Product(pattern, torch.float32, "cpu", batch_last))

    assert "batch_last only" in reason(Pattern(3, 4, 2, 5), False).reason
    assert "a = 1 or d = 1" in reason(Pattern(3, 4, 2, 1), True).reason
    assert reason(Pattern(3, 4, 2, 5), True).ok


def test_sparse_formats_give_torchs_reason_for_a_dtype_that_they_lack():
    for name in ("bsr", "sparse"):
        support = BASELINES[name].supports(Product(Pattern(2, 4, 4, 2), torch.int8, "cpu", False))
        print(name, support.reason)
        assert not support.ok
        assert "refuses it: " in support.reason


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_weight_gradient_is_that_of_the_reference(pattern, layout):
    for batch in BATCHES:
        x = make_x(pattern, layout, batch)
        weight = torch.randn(pattern.weight_shape, dtype=torch.float64, requires_grad=True)
        y = ks_reference(x, weight, layout)
        grad = torch.randn_like(y)
        (expected,) = torch.autograd.grad(y, weight, grad)
        gradient = ks_mm_weight_grad(grad, x, pattern.a, pattern.d, layout == "batch_last")
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
        assert gradient.is_contiguous()


@pytest.mark.parametrize("p", PATTERNS, ids=str)
def test_matrices_are_the_weights(p):
    weight = torch.randn(p.weight_shape)
    stored = weight.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    for one in (weight, stored):
        dense = to_dense(one)
        assert torch.equal(Matrices.of_all(p).prepare(one), dense[None])
        assert torch.equal(torch.block_diag(*Matrices.of_blocks(p).prepare(one)), dense)
        groups = Matrices.of(p).prepare(one)
        assert torch.equal(groups.view(p.a, p.d, p.b, p.c), one.permute(0, 3, 1, 2))


def test_matrices_that_lie_in_a_weights_memory_are_not_copied():
    p = Pattern(2, 3, 4, 5)
    by_groups = torch.randn(3, p.a, p.d, p.b, p.c)[1].permute(0, 2, 3, 1)
    matrices = Matrices.of(p)
    prepared = matrices.prepare(by_groups)
    assert prepared.data_ptr() == by_groups.data_ptr()
    assert torch.equal(prepared.view(p.a, p.d, p.b, p.c), by_groups.permute(0, 3, 1, 2))
    assert matrices.prepare(by_groups.contiguous()).data_ptr() != by_groups.data_ptr()
    for other in (Matrices.of_blocks(p), Matrices.of_all(p)):
        prepared = other.prepare(by_groups)
        assert prepared.untyped_storage().data_ptr() != by_groups.untyped_storage().data_ptr()
