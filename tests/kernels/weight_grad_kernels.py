"""Kernels of weight gradients in the emulator: operands, a launch, and the check by float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from emulated_chains import _aligned, _emulate, _instance
from packed_kernels import without_predicates
from torch import Tensor

from ksopt.kernels.families.common import weight_grad
from ksopt.kernels.families.common.weight_grad import Launch, Tile
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns.chain import Pattern

Case = tuple[Pattern, Tile, str, bool]
"""A pattern, a tile, a dtype, and whether the bias's gradient is computed."""
DTYPES = ("bfloat16", "float16")
UNIT = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-22}
"""Rounding of a result; in float32 of its sum, too."""
SHARED_ROWS = ((1, 64), (100, 64), (64, 64), (390, 128))
"""Numbers of rows, and those of a share: one share and several, whole and not."""


class _Block:
    """What `_instance` asks of a tile."""

    def __init__(self, threads: int) -> None:
        self.threads, self.rows = threads, weight_grad.ROWS


def build(emulator: Any, cases: Sequence[Case]) -> Any:
    """The emulated kernels of cases."""
    return emulator.on_demand(
        [
            _instance(
                p,
                _Block(tile.threads),
                weight_grad.source(p, tile, dtype, with_bias),
                dtype,
                tile.shared_bytes(p),
            )
            for p, tile, dtype, with_bias in cases
        ],
        without_predicates,
    )


def build_adding(emulator: Any) -> dict[str, Any]:
    """The emulated kernels that add shares."""
    block = _Block(weight_grad.ADDING_THREADS)
    p = Pattern(1, 64, 64, 1)
    instances = [_instance(p, block, weight_grad.adding_source(one), one, 0) for one in DTYPES]
    return dict(zip(DTYPES, emulator.build(instances, without_predicates), strict=True))


def operand(rows: int, features: int, dtype: str, seed: int) -> Tensor:
    """Rows that lie apart, with NaN between them."""
    values = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    memory = _aligned(torch.full((rows * (features + 24),), float("nan"), dtype=torch.float32))
    memory = _aligned(memory.to(getattr(torch, dtype)))
    created = memory.view(rows, features + 24)[:, 8 : 8 + features]
    created.copy_(values)
    return created


def computed(
    kernel: Any, adding: Any, case: Case, launch: Launch, grad: Tensor, x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the weight and of the bias, by emulated kernels."""
    p, tile, _, with_bias = case
    elements = p.nnz + (p.out_features if with_bias else 0)
    created = _aligned(torch.full((elements,), float("nan"), dtype=x.dtype))
    result, bias = created[: p.nnz], created[p.nnz :] if with_bias else None
    to = created
    if launch.shares > 1:
        to = _aligned(torch.full((launch.shares * elements,), float("nan")))
    arguments = weight_grad.arguments_of(grad, x, to, launch, bias)
    blocks = tile.tiles(p) * launch.shares
    memory = (grad._base.view(-1), x._base.view(-1), to)
    _emulate(kernel, arguments, (blocks, tile.threads, tile.shared_bytes(p)), memory)
    if launch.shares > 1:
        added = weight_grad.adding_arguments(to, result, launch, bias)
        _emulate(
            adding, added, (weight_grad.adding_blocks(elements), 256, 0), (to, to[:0], created)
        )
    return result.view(p.weight_shape), bias


def assert_right(
    kernel: Any,
    adding: Any,
    case: Case,
    shared_rows: Sequence[tuple[int, int]] = SHARED_ROWS,
) -> None:
    """Compare with float64, for numbers of rows and of those of a share."""
    p, tile, dtype, with_bias = case
    for rows, of_share in shared_rows:
        grad = operand(rows, p.out_features, dtype, rows)
        x = operand(rows, p.in_features, dtype, rows + 1)
        launch = Launch(tile, -(-rows // of_share), of_share)
        dk, bias = computed(kernel, adding.get(dtype), case, launch, grad, x)
        truth = weight_grad_decomposed(grad.double(), x.double(), p.a, p.d, False)
        sizes = weight_grad_decomposed(grad.abs().double(), x.abs().double(), p.a, p.d, False)
        unit = UNIT[dtype]
        wrong = ~((dk.double() - truth).abs() <= unit * truth.abs() + 1e-6 * sizes + 1e-6)
        assert not wrong.any(), f"{rows} rows: {int(wrong.sum())} of {p.nnz} are wrong"
        assert (bias is not None) == with_bias
        if bias is not None:
            truth, sizes = grad.double().sum(0), grad.abs().double().sum(0)
            assert ((bias.double() - truth).abs() <= unit * truth.abs() + 1e-6 * sizes).all()


def assert_infinities_stay(kernel: Any, adding: Any, case: Case) -> None:
    """Sums of other j are computed, and thrown away, or not computed."""
    p, tile, dtype, _ = case
    grad, x = operand(70, p.out_features, dtype, 0), operand(70, p.in_features, dtype, 1)
    x[3, 5] = float("inf")
    launch = Launch(tile, 2, 64) if dtype in adding else Launch(tile, 1, 128)
    dk, _ = computed(kernel, adding.get(dtype), case, launch, grad, x)
    expected = weight_grad_decomposed(grad.double(), x.double(), p.a, p.d, False)
    assert torch.equal(dk.isfinite(), expected.isfinite())
    assert not dk.isfinite().all()
