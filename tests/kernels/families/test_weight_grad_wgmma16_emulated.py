"""The kernels of weight gradients, run on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from checks import H200
from packed_kernels import without_predicates
from torch import Tensor

from chain_kernels import _aligned, _emulate, _instance
from ksopt.kernels.families import weight_grad_wgmma16 as kernels
from ksopt.kernels.families.weight_grad_wgmma16 import Config, Launch
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns.chain import Pattern

# Every d that is taken; tiles that are filled up in both directions; several i; every tile.
PATTERNS = [
    Pattern(*sizes)
    for sizes in (
        (1, 64, 64, 1),
        (3, 40, 72, 1),
        (1, 40, 12, 2),
        (2, 20, 36, 2),
        (1, 8, 8, 3),
        (2, 10, 22, 4),
        (1, 24, 8, 6),
        (1, 5, 9, 8),
        (1, 136, 8, 2),
    )
]
TILES = list(kernels.configs())
CASES = [
    (p, TILES[at % len(TILES)], dtype, at % 3 > 0)
    for at, (p, dtype) in enumerate(
        (p, dtype) for p in PATTERNS for dtype in ("bfloat16", "float16")
    )
]


@pytest.fixture(scope="module")
def emulated(emulator):
    return emulator.on_demand(
        [
            _instance(
                p, _Tile(tile), kernels.source(p, tile, dtype, with_bias), dtype, tile.shared_bytes
            )
            for p, tile, dtype, with_bias in CASES
        ],
        without_predicates,
    )


@pytest.fixture(scope="module")
def adding(emulator):
    sources = [kernels.adding_source(dtype) for dtype in ("bfloat16", "float16")]
    p, tile = PATTERNS[0], _Tile(TILES[0])
    instances = [_instance(p, tile, source, "bfloat16", 0) for source in sources]
    built = emulator.build(instances, without_predicates)
    return dict(zip(("bfloat16", "float16"), built, strict=True))


class _Tile:
    """What `_instance` asks of a tile."""

    def __init__(self, tile: Config) -> None:
        self.threads, self.rows = tile.threads, kernels.ROWS


def operand(rows: int, features: int, dtype: str, seed: int) -> Tensor:
    """Rows that lie apart, with NaN between them."""
    values = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    memory = _aligned(torch.full((rows * (features + 24),), float("nan"), dtype=torch.float32))
    memory = _aligned(memory.to(getattr(torch, dtype)))
    created = memory.view(rows, features + 24)[:, 8 : 8 + features]
    created.copy_(values)
    return created


def computed(
    kernel, adding, case, launch: Launch, grad: Tensor, x: Tensor
) -> tuple[Tensor, Tensor | None]:
    p, tile, _, with_bias = case
    elements = p.nnz + (p.out_features if with_bias else 0)
    created = _aligned(torch.full((elements,), float("nan"), dtype=x.dtype))
    result, bias = created[: p.nnz], created[p.nnz :] if with_bias else None
    to = created
    if launch.shares > 1:
        to = _aligned(torch.full((launch.shares * elements,), float("nan")))
    arguments = kernels.arguments_of(grad, x, to, launch, bias)
    blocks = tile.tiles(p) * launch.shares
    memory = (grad._base.view(-1), x._base.view(-1), to)
    _emulate(kernel, arguments, (blocks, tile.threads, tile.shared_bytes), memory)
    if launch.shares > 1:
        added = kernels.adding_arguments(to, result, launch, bias)
        _emulate(adding, added, (kernels.adding_blocks(elements), 256, 0), (to, to[:0], created))
    return result.view(p.weight_shape), bias


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: f"{CASES[at][0]}-{CASES[at][2]}")
def test_it_is_the_gradient(emulated, adding, at):
    case = CASES[at]
    p, tile, dtype, with_bias = case
    for rows, of_share in ((1, 64), (100, 64), (64, 64), (390, 128)):
        grad = operand(rows, p.out_features, dtype, rows)
        x = operand(rows, p.in_features, dtype, rows + 1)
        launch = Launch(tile, -(-rows // of_share), of_share)
        dk, bias = computed(emulated[at], adding[dtype], case, launch, grad, x)
        truth = weight_grad_decomposed(grad.double(), x.double(), p.a, p.d, False)
        sizes = weight_grad_decomposed(grad.abs().double(), x.abs().double(), p.a, p.d, False)
        unit = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
        wrong = ~((dk.double() - truth).abs() <= unit * truth.abs() + 1e-6 * sizes + 1e-6)
        assert not wrong.any(), f"{rows} rows: {int(wrong.sum())} of {p.nnz} are wrong"
        assert (bias is not None) == with_bias
        if bias is not None:
            truth, sizes = grad.double().sum(0), grad.abs().double().sum(0)
            assert ((bias.double() - truth).abs() <= unit * truth.abs() + 1e-6 * sizes).all()


def test_infinities_stay_where_they_meet(emulated, adding):
    """Sums of other j are computed, and thrown away."""
    case = CASES[4]
    p, tile, dtype, _ = case
    grad, x = operand(70, p.out_features, dtype, 0), operand(70, p.in_features, dtype, 1)
    x[3, 5] = float("inf")
    dk, _ = computed(emulated[4], adding[dtype], case, Launch(tile, 2, 64), grad, x)
    expected = weight_grad_decomposed(grad.double(), x.double(), p.a, p.d, False)
    assert torch.equal(dk.isfinite(), expected.isfinite())
    assert not dk.isfinite().all()


def test_launches_fill_the_device_and_leave_no_share_empty():
    for p in (*PATTERNS, Pattern(1, 768, 64, 2), Pattern(8, 128, 128, 1)):
        for rows in (1, 64, 1000, 25_088, 10_000_000):
            launch = kernels.best(p, rows, H200)
            assert launch.rows_per_share % kernels.ROWS == 0
            assert (launch.shares - 1) * launch.rows_per_share < rows
            assert launch.shares * launch.rows_per_share >= rows
            assert kernels.predicted_us(launch, p, rows, H200) > 0
    assert kernels.best(Pattern(1, 768, 64, 2), 25_088, H200).shares > 4


def test_what_it_does_not_compute_has_a_reason():
    assert kernels.unsupported(Pattern(1, 64, 64, 2), "bfloat16", H200) is None
    for p, dtype, words in (
        (Pattern(1, 64, 64, 16), "bfloat16", "d = 16"),
        (Pattern(1, 65, 64, 2), "float16", "multiple of 8"),
        (Pattern(1, 64, 64, 2), "float32", "float32 is not one of float16, bfloat16"),
    ):
        assert words in str(kernels.unsupported(p, dtype, H200))
