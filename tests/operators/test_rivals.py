"""Every structure that ksopt ships: its texts, counts, products, gradients and fits."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ksopt.errors import InvalidInputError
from ksopt.operators import fp8_product, two_four_product
from ksopt.operators.base import StructuredOperator
from ksopt.operators.linear import StructuredLinear
from ksopt.operators.registry import name_of, operator_of, parse

# Sizes that are odd multiples, wide and narrow.
TEXTS = (
    "low-rank(20x12,5)",
    "low-rank(7x13,1)",
    "block-diagonal(20x12,4)",
    "block-diagonal(15x9,3)",
    "strassen-tile(20x12,2,3)",
    "strassen-tile(20x12,4,8)",
    "strassen-tile(14x6,2,7)",
)
OWN_DEVICE = ("two-four(20x12)", "fp8-dense(20x12)")  # they run on some GPUs alone


def of(text: str) -> StructuredOperator:
    return operator_of(parse(text))


def weights_of(operator: StructuredOperator, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in operator.parameter_shapes()]


def turned(x: Tensor, layout: str) -> Tensor:
    """Features last to a layout; and back, for one dimension of batch."""
    return x if layout == "batch_first" else x.movedim(-1, 0)


def back(y: Tensor, layout: str) -> Tensor:
    return y if layout == "batch_first" else y.movedim(0, -1)


@pytest.mark.parametrize("text", [*TEXTS, *OWN_DEVICE])
def test_its_text_is_read_again(text: str) -> None:
    operator = of(text)
    assert str(operator) == text
    assert parse(f" {text} ") == operator
    assert hash(parse(text)) == hash(operator)
    assert name_of(operator) == text.partition("(")[0]


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("text", TEXTS)
def test_its_product_is_the_reference(text: str, layout: str) -> None:
    torch.manual_seed(0)
    operator = of(text)
    weights = weights_of(operator)
    for batch in ((9,), (1,), (0,), (2, 5)):
        x = torch.randn(*batch, operator.in_features, dtype=torch.float64)
        y = back(operator.bind(weights, layout)(turned(x, layout)), layout)
        expected = operator.reference(x.flatten(0, -2), weights)
        torch.testing.assert_close(y, expected.view(*batch, operator.out_features))


def gradients(
    product: Callable[[Tensor, Sequence[Tensor]], Tensor], x: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    leaves = [one.clone().requires_grad_() for one in (x, *weights)]
    y = product(leaves[0], leaves[1:])
    towards = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad(y, leaves, towards)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("text", TEXTS)
def test_its_gradients_are_the_references(text: str, layout: str) -> None:
    torch.manual_seed(0)
    operator = of(text)
    x = torch.randn(9, operator.in_features, dtype=torch.float64)

    def bound(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return back(operator.bind(weights, layout)(turned(x, layout)), layout)

    weights = weights_of(operator)
    for ours, expected in zip(
        gradients(bound, x, weights), gradients(operator.reference, x, weights), strict=True
    ):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("text", TEXTS)
def test_its_operations_are_those_that_torch_counts(text: str) -> None:
    operator, weights = of(text), weights_of(of(text))
    x = torch.randn(8, operator.in_features, dtype=torch.float64)
    blocks = text.startswith("block")
    with FlopCounterMode(display=False) as counter:
        if blocks:  # its kernels are none of torch's, and a zero is no operation
            torch.bmm(weights[0], x.view(8, len(weights[0]), -1).permute(1, 2, 0))
        else:
            operator.bind(weights, "batch_first")(x)
    assert operator.flops(8) == counter.get_total_flops()


@pytest.mark.parametrize("text", [*TEXTS, *OWN_DEVICE])
def test_its_fit_has_the_error_that_it_says(text: str) -> None:
    torch.manual_seed(0)
    operator = of(text)
    matrix = torch.randn(operator.out_features, operator.in_features, dtype=torch.float64)
    fit = operator.nearest(matrix)
    assert [weight.shape for weight in fit.weights] == [
        torch.Size(shape) for shape in operator.parameter_shapes()
    ]
    assert 0 <= fit.relative_error < 1
    if text.startswith("fp8"):  # its product rounds the input, too
        rounded = fp8_product.rounded(matrix)
        assert float((rounded - matrix).norm() / matrix.norm()) == fit.relative_error
        return
    # What t rows are mapped to, for every place of a one among them: of a tile, I ⊗ W.
    t, n = operator.rows_together, operator.in_features
    x = torch.eye(t * n, dtype=torch.float64).view(t * n * t, n)
    whole = x @ matrix.T
    error = (operator.reference(x, fit.weights) - whole).norm() / whole.norm()
    assert float(error) == pytest.approx(fit.relative_error, rel=1e-6, abs=1e-12)


def test_what_has_the_structure_is_fitted_exactly() -> None:
    torch.manual_seed(0)
    u, v = torch.randn(12, 3), torch.randn(3, 20)
    assert of("low-rank(20x12,3)").nearest(u @ v).relative_error < 1e-6
    assert of("low-rank(20x12,2)").nearest(u @ v).relative_error > 0.1
    blocks = torch.block_diag(*torch.randn(4, 3, 5))
    fit = of("block-diagonal(20x12,4)").nearest(blocks)
    assert fit.relative_error == 0
    assert torch.equal(torch.block_diag(*fit.weights[0]), blocks)
    halves = torch.randn(12, 20) * torch.tensor([0.0, 1.0, 1.0, 0.0]).repeat(5)
    assert of("two-four(20x12)").nearest(halves).relative_error == 0
    eighths = torch.randint(-8, 9, (12, 20)) / 8.0
    eighths[:, 0] = 448.0  # each row's scale is 1
    assert of("fp8-dense(20x12)").nearest(eighths).relative_error == 0
    for text in ("strassen-tile(20x12,2,7)", "strassen-tile(20x12,4,49)"):
        dense = torch.randn(12, 20)
        fit = of(text).nearest(dense)
        x = torch.randn(9, 20)
        torch.testing.assert_close(of(text).reference(x, fit.weights), x @ dense.T)


@pytest.mark.parametrize("text", [*TEXTS, *OWN_DEVICE])
def test_a_matrix_of_zeros_is_fitted(text: str) -> None:
    operator = of(text)
    fit = operator.nearest(torch.zeros(operator.out_features, operator.in_features))
    assert fit.relative_error == 0
    y = operator.reference(torch.randn(8, operator.in_features), fit.weights)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("text", ["low-rank(256x256,64)", "strassen-tile(256x256,4,49)"])
def test_a_new_layer_keeps_the_size_of_a_signal_as_a_dense_one(text: str) -> None:
    torch.manual_seed(0)
    layer, dense = StructuredLinear(text, bias=False), torch.nn.Linear(256, 256, bias=False)
    x = torch.randn(256, 256)
    with torch.no_grad():
        ratio = float(layer(x).square().mean() / dense(x).square().mean())
    assert 0.8 < ratio < 1.25  # two samples of 65,536 numbers
    layer(x).sum().backward()
    assert all(weight.grad is not None for weight in layer.weights)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("low-rank(20x12)", "write low-rank(INxOUT,RANK)"),
        ("low-rank(20,3)", "write INxOUT"),
        ("low-rank(20x12,13)", "the rank can be 1 to min(in, out) = 12"),
        ("block-diagonal(20x12,3)", "must divide both sizes, and so 4"),
        ("two-four(20x12,2)", "write two-four(INxOUT)"),
        ("two-four(6x12)", "in_features must be a multiple of 4"),
        ("strassen-tile(20x12,3,2)", "the tile can be 2 or 4"),
        ("strassen-tile(14x12,4,2)", "must divide both sizes"),
        ("strassen-tile(20x12,2,8)", "takes 1 to 7 multiplications, 7 where it is exact"),
        ("fp8-dens(20x12)", "did you mean 'fp8-dense'?"),
    ],
)
def test_what_is_none_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parse(text)
    assert sentence in str(refused.value)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("text", "device", "dtype", "sentence"),
    [
        ("two-four(64x32)", "cpu", "float16", "a CUDA device of compute capability 8.0, not cpu"),
        ("two-four(64x32)", "cuda", "float32", "it runs in float16 and bfloat16, not in float32"),
        ("two-four(60x32)", "cuda", "float16", "in_features to be a multiple of 64"),
        ("fp8-dense(64x32)", "cpu", "bfloat16", "a CUDA device of compute capability 8.9, not cpu"),
        ("fp8-dense(64x32)", "cuda", "float16", "its results are in bfloat16, not in float16"),
        ("fp8-dense(60x32)", "cuda", "bfloat16", "both sizes to be multiples of 16"),
    ],
)
def test_a_device_that_does_not_run_it_is_named(
    text: str, device: str, dtype: str, sentence: str
) -> None:
    assert sentence in (of(text).refusal(device, dtype) or "")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("text", ["two-four(64x32)", "fp8-dense(64x32)"])
def test_a_gpu_that_runs_it_is_not_refused(text: str) -> None:
    for device in ("cuda", "cuda:1", "auto"):
        assert of(text).refusal(device, "bfloat16") is None


@pytest.mark.parametrize(
    ("text", "has"), [("two-four(64x32)", (7, 5)), ("fp8-dense(64x32)", (8, 6))]
)
def test_an_older_gpu_is_refused(
    text: str, has: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: has)
    refusal = of(text).refusal("cuda:0", "bfloat16")
    assert refusal is not None
    assert refusal.endswith(f"this one has {has[0]}.{has[1]}")


@pytest.mark.parametrize("text", OWN_DEVICE)
def test_weights_on_a_cpu_are_not_bound(text: str) -> None:
    with pytest.raises(InvalidInputError, match="it needs a CUDA device of compute"):
        of(text).bind(weights_of(of(text)), "batch_first")


Bind = Callable[[Tensor, str], Callable[[Tensor], Tensor]]


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("text", ["two-four(64x32)", "fp8-dense(64x32)"])
def test_the_code_of_gpus_computes_the_reference(
    text: str, trained: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's packed tensor played by the dense one; torch._scaled_mm is there on CPUs."""
    torch.manual_seed(0)
    monkeypatch.setattr(two_four_product, "_packed", lambda pruned: pruned)
    bind: Bind = two_four_product.bind if text.startswith("two") else fp8_product.bind
    operator, dtype = of(text), torch.bfloat16
    weight, x = torch.randn(32, 64, dtype=dtype), torch.randn(2, 5, 64, dtype=dtype)
    weight.requires_grad_(trained)
    y = back(bind(weight, layout)(turned(x, layout)), layout)
    assert y.dtype == dtype
    expected = operator.reference(x.double().flatten(0, 1), [weight.detach().double()]).view(
        2, 5, 32
    )
    # One rounding to 8 bits of mantissa; sums of 64 products have more.
    assert float((y.detach().double() - expected).norm() / expected.norm()) < 2**-8
    if not trained:
        # By the cached form, until the weight changes: in another layer of the same weight, too.
        assert torch.equal(back(bind(weight, layout)(turned(x, layout)), layout), y)
        weight.neg_()
        assert torch.equal(back(bind(weight, layout)(turned(x, layout)), layout), -y)
        return
    x = x.flatten(0, 1)

    def bound(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return back(bind(weights[0], layout)(turned(x, layout)), layout)

    ours = gradients(bound, x, [weight.detach()])
    exact = gradients(operator.reference, x.double(), [weight.detach().double()])
    for one, expected in zip(ours, exact, strict=True):
        assert (
            float((one.double() - expected).norm() / expected.norm()) < 2**-7
        )  # operands and result


@pytest.mark.parametrize("text", ["two-four(64x32)", "fp8-dense(64x32)"])
def test_a_weight_is_prepared_once_for_each_version(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counted(weight: Tensor) -> Any:
        counts.append(1)
        return prepare(weight)

    if text.startswith("two"):
        monkeypatch.setattr(two_four_product, "_packed", lambda pruned: pruned)
        prepare: Callable[[Tensor], Any] = two_four_product.largest_two_mask
        monkeypatch.setattr(two_four_product, "largest_two_mask", counted)
        product, of_x = two_four_product.bind, 0
    else:
        prepare = fp8_product.quantized
        monkeypatch.setattr(fp8_product, "quantized", counted)
        product, of_x = fp8_product.bind, 1
    weight = torch.nn.Parameter(torch.randn(32, 64, dtype=torch.bfloat16))
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            product(weight, "batch_first")(x)
        once = len(counts) - 3 * of_x
        product(weight, "batch_first")(x)
        assert len(counts) - 4 * of_x == once
        weight.mul_(2)
        product(weight, "batch_first")(x)
        assert len(counts) - 5 * of_x == 2 * once
    product(weight, "batch_first")(x).sum().backward()
    assert weight.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("text", ["two-four(64x32)", "fp8-dense(64x32)"])
def test_a_compiled_function_calls_it(
    text: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_four_product, "_packed", lambda pruned: pruned)
    bind: Bind = two_four_product.bind if text.startswith("two") else fp8_product.bind
    weight = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=trained)
    x = torch.randn(5, 64, dtype=torch.bfloat16)

    def surrounded(x: Tensor) -> Tensor:
        return 2 * bind(weight, "batch_first")(x + 1)

    compiled = torch.compile(surrounded, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(x), surrounded(x))
        with torch.no_grad():
            weight.neg_()
    if trained:
        compiled(x).sum().backward()
        assert weight.grad is not None


def test_two_of_four_equals_the_first_stay() -> None:
    from ksopt.operators.structures.two_four import largest_two_mask

    weight = torch.tensor([[1.0, -1.0, 1.0, 1.0, 0.0, 3.0, -4.0, 5.0]])
    assert largest_two_mask(weight).tolist() == [
        [True, True, False, False, False, False, True, True]
    ]
    assert torch.equal(largest_two_mask(weight.double()), largest_two_mask(weight))


def test_a_chain_is_read_from_its_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ksopt.patterns.chain import Chain

    read, original = [], Chain.parse
    monkeypatch.setattr(Chain, "parse", lambda text: read.append(text) or original(text))
    text = "(1,6,35,2)*(2,35,6,1)"  # of no other test
    assert parse(text) == parse(text) == original(text)
    assert read == [text]
    for _ in range(2):  # an invalid one is refused each time
        with pytest.raises(InvalidInputError):
            parse("(1,6,35,2)*(3,35,6,1)")
