"""2^31 elements and more, far strides, ten million rows, 100,000 features, on a GPU.

Every family that takes such a product multiplies it once, by its best predicted tile, and so does
what is chosen. Some rows are compared with float64: the first, the last, and those around element
2^31.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
from devices import H200
from torch import Tensor

from ksopt import Chain, KSLinear, Pattern, ks_linear, precision
from ksopt.kernels import registry
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import Call
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.naive import launcher
from ksopt.kernels.problem import Problem, rows_of
from ksopt.reference import chain_reference, ks_reference

FAR = 2**31 + 64
"""A stride beyond what 32 bits hold; rows still begin at multiples of 16 bytes."""
BYTES = 60 * 2**30
"""The free memory that these tests need: no other process may use the device."""
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6}
"""Of the relative error: twice a rounding of each result, and of what is between two factors."""

PRODUCTS = [
    # More than 2^31 elements of x and of y: by rows, by features, in odd sizes, in float32.
    ("bfloat16", "(4,16,16,4)", 10_000_000),
    ("float16", "(1,16,16,16)", 10_000_000),
    ("bfloat16", "(5,16,16,1250)", 25_000),
    ("bfloat16", "(7,9,11,13)", 2_200_000),
    ("float32", "(8,32,32,1)", 9_000_000),
    ("float32", "(1,16,16,8)", 17_000_000),
    ("bfloat16", "(1,3,2,50000)", 21_500),
    ("bfloat16", "(1,256,64,4)*(4,64,256,1)", 2_200_000),
    ("float32", "(1,256,64,4)*(4,64,256,1)", 2_200_000),
]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def much_memory(monkeypatch):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < BYTES:  # the rest may be another process's
        pytest.skip("the device has too little free memory")
    monkeypatch.setenv("KSOPT_TUNE", "model")
    yield
    torch.cuda.empty_cache()


def some_rows(rows: int, widest: int) -> Tensor:
    """Rows at the ends, and where an index or an offset leaves 31 or 32 bits."""
    starts = {0, rows - 4, *(2**bits // widest - 2 for bits in (30, 31, 32))}
    inside = sorted(max(0, min(start, rows - 4)) for start in starts)
    return torch.tensor(sorted({start + n for start in inside for n in range(4)}), device="cuda")


def operands(
    chain: Chain, dtype: torch.dtype, rows: int, last: bool
) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (chain.in_features, rows) if last else (rows, chain.in_features)
    x = torch.empty(shape, dtype=dtype, device="cuda").uniform_(-1, 1, generator=generator)
    weights = [
        torch.empty(one.weight_shape, dtype=dtype, device="cuda").uniform_(
            -1, 1, generator=generator
        )
        for one in chain
    ]
    return x, weights


def poison(elements: int, dtype: torch.dtype) -> None:
    """NaN in the memory that a result is likely to get."""
    torch.full((elements,), float("nan"), dtype=dtype, device="cuda")


def multiply(call: Call, weight: Tensor, x: Tensor) -> Tensor:
    return call(x, weight)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_products_of_many_elements(product, layout):
    name, text, rows = product
    chain, dtype, last = Chain.parse(text), getattr(torch, name), layout == "batch_last"
    x, weights = operands(chain, dtype, rows, last)
    assert x.numel() > 2**31 or rows * chain.out_features > 2**31
    dim, widest = int(last), max(chain.in_features, chain.out_features)
    some = some_rows(rows, widest)
    picked = x.index_select(dim, some).double()
    exact = chain_reference(picked, [one.double() for one in weights], layout)

    def check(y: Tensor, label: str) -> None:
        error = (y.index_select(dim, some).double() - exact).norm() / exact.norm()
        assert error <= TOLERANCE[name], (label, float(error))

    with torch.no_grad(), precision.fp32_products("ieee"):
        poison(rows * chain.out_features, dtype)
        check(ks_linear(x, weights, layout=layout), "as chosen")
        spec = backend_of("cuda").spec(x.device)
        assert spec is not None
        problem = Problem(chain, name, last)
        tried = set()
        for one in registry.candidates(problem, rows, spec):
            if one.family is None or one.name in tried:
                continue
            tried.add(one.name)
            call = one.build(0, rows_of(x, last, rows))
            poison(rows * chain.out_features, dtype)
            check(
                call(x, *(weights if problem.is_factor else (tuple(weights), None, None))),
                one.label,
            )
    print(f"{text}, {rows} rows, {layout}: {', '.join(sorted(tried))}")


BATCH_LAST = {
    "batch_last_mma16": "float16",
    "batch_last_wgmma16": "float16",
    "batch_last_mma_tf32x3": "float32",
    "batch_last_wgmma_tf32x3": "float32",
}


@pytest.mark.parametrize("more", [1000, 1001], ids=["aligned", "shifted"])
@pytest.mark.parametrize("name", BATCH_LAST)
def test_batch_last_families_count_beyond_32_bits(name, more):
    """Narrow patterns too, for which another family is predicted to be faster."""
    if "wgmma" in name and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup products exist on sm_90 alone")
    family, pattern, rows = family_of(name), Pattern(1, 16, 3, 1), 2**27 + more
    problem = Problem.of_factor(pattern, BATCH_LAST[name], batch_last=True)
    x = torch.empty(3, rows, dtype=getattr(torch, BATCH_LAST[name]), device="cuda")
    x[:] = torch.tensor([[1.0], [2.0], [3.0]], device="cuda")
    x[:, -1] = 7.0
    weight = torch.ones(pattern.weight_shape, dtype=x.dtype, device="cuda")
    configs = sorted(
        family.configs(problem, H200), key=lambda config: (config.outputs, config.rows)
    )
    for config in (configs[0], configs[-1]):
        poison(16 * rows, x.dtype)
        y = family.launcher(problem, config, 0)(x, weight)
        assert y.numel() > 2**31
        assert bool((y[:, -1] == 21.0).all())
        assert bool((y[:, :-1] == 6.0).all())
        del y


def test_the_general_kernel_counts_beyond_32_bits():
    rows = 2**31 // 3 + 1000
    x = torch.empty(rows, 3, dtype=torch.float16, device="cuda")
    x[:] = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    x[-1] = 7.0
    weight = torch.ones(1, 1, 3, 1, dtype=torch.float16, device="cuda")
    y = launcher(Problem.of_factor(Pattern(1, 1, 3, 1), "float16", False), 0)(x, weight)
    assert y[0].item() == 6.0
    assert y[-2].item() == 6.0
    assert y[-1].item() == 21.0
    assert int((y != 6.0).sum()) == 1


@pytest.mark.parametrize("text", ["(2,16,16,2)", "(1,24,16,4)", "(3,5,7,3)", "(1,64,32,1)"])
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_rows_that_lie_far_apart(name, text):
    pattern, dtype = Chain.parse(text).patterns[0], getattr(torch, name)
    x, (weight,) = operands(Chain((pattern,)), dtype, 3, False)
    far = torch.empty(2 * FAR + x.shape[1], dtype=dtype, device="cuda")
    far = far.as_strided(x.shape, (FAR, 1)).copy_(x)
    exact = ks_reference(x.double(), weight.double())
    spec = backend_of("cuda").spec(x.device)
    assert spec is not None
    problem = Problem.of_factor(pattern, name, False)
    with torch.no_grad(), precision.fp32_products("ieee"):
        calls = {"as chosen": lambda rows: ks_linear(rows, [weight])}
        for one in registry.candidates(problem, 3, spec):
            if one.family is not None and one.name not in calls:
                calls[one.name] = partial(multiply, one.build(0, 3), weight)
        for label, call in calls.items():
            error = (call(far).double() - exact).norm() / exact.norm()
            assert error <= TOLERANCE[name], (label, float(error))


@pytest.mark.parametrize(
    "shape", [(1, 46_400, 46_400, 1), (2, 24_000, 24_000, 2), (40, 8192, 6600, 1)], ids=str
)
def test_a_factor_of_many_weights(shape):
    """Right, or refused with a sentence."""
    a, _, c, d = shape
    weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1)
    assert weight.numel() > 2**31
    x = torch.empty(64, a * c * d, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1)
    i, j = a - 1, d - 1  # the last weights
    theirs = x.view(64, a, c, d)[:, i, :, j].double() @ weight[i, -50:, :, j].double().t()
    spec = backend_of("cuda").spec(x.device)
    assert spec is not None
    problem = Problem.of_factor(Pattern(*shape), "bfloat16", False)
    with torch.no_grad():
        calls = {"as chosen": lambda: ks_linear(x, [weight])}
        for one in registry.candidates(problem, 64, spec):
            if one.family is not None and one.name not in calls:
                calls[one.name] = partial(one.build(0, 64), x, weight)
        for label, call in calls.items():
            mine = call().view(64, a, -1, d)[:, i, -50:, j].double()
            assert (mine - theirs).norm() <= TOLERANCE["bfloat16"] * theirs.norm(), label


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
@pytest.mark.parametrize("text", ["(1,64,32,4)*(4,32,64,1)", "(4,16,16,4)"])
def test_a_step_of_training_of_ten_million_rows(text, name):
    """Sums over all rows, against float64, in parts of a million rows."""
    rows, features = (10_000_000 if name == "bfloat16" else 8_500_000), 256
    torch.manual_seed(0)
    layer = KSLinear(features, features, text, device="cuda", dtype=getattr(torch, name))
    x = torch.empty(rows, features, dtype=getattr(torch, name), device="cuda").uniform_(-1, 1)
    x.requires_grad_()
    grad = torch.empty_like(x).uniform_(-1, 1)
    assert x.numel() > 2**31
    layer(x).backward(grad)
    weights = [one.detach().double().requires_grad_() for one in layer.weights]
    bias = torch.zeros(features, dtype=torch.float64, device="cuda")
    ends = [*range(0, rows, 1_000_000), rows]
    for first, end in pairwise(ends):
        part = x.detach()[first:end].double().requires_grad_()
        part_grad = grad[first:end].double()
        chain_reference(part, weights).backward(part_grad)
        bias += part_grad.sum(0)
        some = slice(-4, None)
        error = (x.grad[first:end][some].double() - part.grad[some]).norm() / part.grad[some].norm()
        assert error <= TOLERANCE[name] * 2
    for mine, theirs in zip((*layer.weights, layer.bias), (*weights, None), strict=True):
        exact = bias if theirs is None else theirs.grad
        error = (mine.grad.double() - exact).norm() / exact.norm()
        # Sums of so many products are in float32, in parts; torch's of a bias are rounded once.
        assert error <= 2 * TOLERANCE[name] + 1e-4, (tuple(mine.shape), float(error))
