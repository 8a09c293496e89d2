"""The gradient of what chains read, in one launch: kernels run on the CPU, against float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from checks import H200
from cuda_emulator import EmulationError, OnDemand
from emulated_chains import ACTIVATIONS, _aligned, _emulate, _instance
from packed_kernels import without_predicates
from torch import Tensor

from ksopt.errors import UnavailableError
from ksopt.jit import nvrtc
from ksopt.kernels.families import input_grad_wgmma16 as kernels
from ksopt.kernels.families.common import input_grad_tile as tiles
from ksopt.kernels.families.common import weight_packer
from ksopt.kernels.families.common.input_grad_tile import Config, Shape
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import ks_reference

# Chain, tile, dtype, the number of siblings, or an activation and the factor of its product.
CASES = [
    # Two classes; one group and several; blocks that share the right factor, and their columns.
    ("(1,64,32,2)*(2,32,64,1)", (1, 1, 1, 1, 64, 64, 2), "bfloat16"),
    ("(1,64,32,2)*(2,32,64,1)", (2, 1, 2, 1, 64, 32, 3), "float16"),
    ("(1,96,64,2)*(2,64,192,1)", (3, 1, 2, 3, 64, 64, 4), "bfloat16"),
    # Features and columns that fill no tile: of the gradient, and of the result.
    ("(1,52,32,2)*(2,32,40,1)", (1, 1, 1, 1, 128, 64, 2), "bfloat16"),
    ("(1,36,48,2)*(3,32,72,1)", (1, 2, 3, 1, 64, 96, 3), "float16"),
    # One class, four, eight; three blocks of the right factor, an odd number of chunks.
    ("(1,72,96,1)*(3,32,40,1)", (2, 1, 1, 1, 64, 32, 2), "bfloat16"),
    ("(1,64,128,1)*(1,128,64,1)", (1, 1, 1, 1, 64, 64, 3), "float16"),
    ("(1,40,32,4)*(4,32,24,1)", (1, 1, 2, 1, 128, 32, 2), "bfloat16"),
    ("(1,64,64,4)*(2,128,96,1)", (2, 1, 2, 1, 256, 96, 2), "float16"),
    ("(1,19,16,8)*(2,64,72,1)", (1, 1, 2, 1, 256, 32, 2), "bfloat16"),
    ("(1,40,32,8)*(8,32,32,1)", (2, 1, 4, 1, 256, 32, 2), "float16"),
    # Siblings: blocks that share the right factors and their columns, shares of two, each class.
    ("(1,64,32,2)*(2,32,64,1)", (1, 1, 2, 1, 64, 64, 2), "bfloat16", 3),
    ("(1,96,64,2)*(2,64,192,1)", (2, 1, 1, 3, 64, 64, 4), "float16", 2),
    ("(1,36,48,2)*(3,32,72,1)", (1, 1, 1, 1, 64, 32, 2), "bfloat16", 4),
    ("(1,72,96,1)*(3,32,40,1)", (2, 1, 3, 1, 64, 32, 2), "float16", 2),
    ("(1,40,32,4)*(4,32,24,1)", (1, 1, 2, 1, 128, 32, 2), "bfloat16", 3),
    ("(1,40,32,8)*(8,32,32,1)", (1, 2, 4, 1, 256, 32, 2), "float16", 3),
    # What is read is an activation: columns that fill no chunk, parts, shares; each class below.
    ("(1,52,32,2)*(2,32,40,1)", (1, 1, 1, 1, 128, 64, 2), "bfloat16", "gelu", "(1,40,32,2)"),
    ("(1,96,64,2)*(2,64,192,1)", (2, 1, 1, 3, 64, 64, 4), "float16", "gelu_tanh", "(1,384,96,1)"),
    ("(1,40,32,4)*(4,32,24,1)", (1, 1, 2, 1, 128, 32, 2), "bfloat16", "silu", "(1,24,64,4)"),
    ("(1,72,96,1)*(3,32,40,1)", (2, 1, 1, 1, 64, 64, 2), "float16", "relu", "(1,15,32,8)"),
]


def shape(chain: str, *more: int | str) -> Shape:
    """Of a case's fields."""
    if len(more) < 2:
        return Shape(*Chain.parse(chain), *more)
    activation, below = more
    return Shape(*Chain.parse(chain), 1, activation, Pattern.parse(below))


ALL = [(shape(text, *more), Config(*tile), dtype) for text, tile, dtype, *more in CASES]


def build(emulator, cases, edit=without_predicates):
    """For each case the kernel that multiplies."""
    return emulator.build(
        [
            _instance(s.left, tile, kernels.source(s, tile, dtype), dtype, tile.shared_bytes(s))
            for s, tile, dtype in cases
        ],
        edit,
    )


@pytest.fixture(scope="module")
def multiply(emulator):
    return OnDemand(functools.partial(build, emulator), ALL)


@pytest.fixture(scope="module")
def pack(emulator):
    return emulator.on_demand(
        [_instance(s.left, tile, kernels.pack_source(s, tile), dtype, 0) for s, tile, dtype in ALL]
    )


def drawn(s: Shape, dtype: str, rows: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, whose rows lie apart with NaN between them, and all factors."""
    generator = torch.Generator().manual_seed(seed)
    kind, features = getattr(torch, dtype), s.left.out_features

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(kind)

    strides = [features + 24 + 8 * at for at in range(s.siblings)]
    memory = _aligned(torch.full((rows * sum(strides),), float("nan"), dtype=kind))
    planes = memory.split([rows * stride for stride in strides])
    grads = []
    for plane, stride in zip(planes, strides, strict=True):
        grads.append(plane.view(rows, stride)[:, 8 : 8 + features].copy_(draw(rows, features)))
    weights = []
    for _ in range(s.siblings):
        weights.append(draw(*s.left.weight_shape, scale=s.left.b**-0.5))
        weights.append(draw(*s.right.weight_shape, scale=s.right.b**-0.5))
    if s.below is not None:
        weights.append(draw(*s.below.weight_shape, scale=2 * s.below.c**-0.5))
    return grads, weights


def packed(kernel, s: Shape, tile: Config, weights: list[Tensor]) -> Tensor:
    """The weights as the kernel that packs makes them; the left ones have strides of their own."""
    result = _aligned(torch.full((tile.packed_elements(s),), float("nan"), dtype=weights[0].dtype))
    stored = [one.transpose(1, 2) if at % 2 == 0 else one for at, one in enumerate(weights)]
    memory = torch.cat([one.reshape(-1) for one in stored])
    parts = memory.split([one.numel() for one in stored])
    own = [part.view(one.shape) for part, one in zip(parts, stored, strict=True)]
    own = [one.transpose(1, 2) if at % 2 == 0 else one for at, one in enumerate(own)]
    arguments = weight_packer.arguments_of(own, s.siblings, result)
    launch = (kernels.pack_blocks(s, tile), kernels.PACK_THREADS, 0)
    _emulate(kernel, arguments, launch, (memory, memory[:0], result))
    return result


def computed(
    kernel, case, grads: list[Tensor], weights: Tensor, sms: int = 2, behind: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """The gradient of what is read and, [siblings, rows, middle], those of what is between.

    ``behind``: what the factor below read, and its bias or nothing.
    """
    s, tile, _ = case
    rows, features = grads[0].shape[0], s.right.in_features
    counts = [rows * features, rows * s.siblings * s.middle]
    result = _aligned(torch.full((sum(counts),), float("nan"), dtype=grads[0].dtype))
    to, between = result.split(counts)
    to = to.view(rows, features)
    blocks, of_block = tiles.launch_of(tile, rows, sms)
    parts = [weights, *(one.flatten() for one in behind)]
    read = _aligned(torch.cat(parts))
    in_order, *own = read.split([one.numel() for one in parts])
    arguments = kernels.arguments_of(grads, in_order, between, to, of_block, *own)
    memory = (grads[0]._base.view(-1), read, result)
    _emulate(kernel, arguments, (blocks, tile.threads, tile.shared_bytes(s)), memory)
    return to, between.view(s.siblings, rows, s.middle)


def assert_right(
    result, grads: list[Tensor], weights: list[Tensor], slope: Tensor | float = 1.0
) -> None:
    """Each within one rounding of its own, and the first within one of what is between, too."""
    unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[grads[0].dtype]
    allowed_sum, total = torch.zeros(()), torch.zeros(())
    for at, grad in enumerate(grads):
        left, right = (one.double().transpose(1, 2) for one in weights[2 * at : 2 * at + 2])
        between = ks_reference(grad.double(), left)
        size = ks_reference(grad.double().abs(), left.abs())
        allowed = unit * between.abs() + 1e-6 * size + 1e-6
        assert ((result[1][at].double() - between).abs() <= allowed).all()
        to, sizes = ks_reference(between, right), ks_reference(size, right.abs())
        spread = ks_reference(between.abs(), right.abs())
        allowed_sum = allowed_sum + unit * 1.01 * spread + 2e-6 * sizes
        total = total + to
    total = total * slope
    allowed = unit * total.abs() + allowed_sum * abs(slope) + 2e-6 * total.abs().max() + 1e-6
    assert ((result[0].double() - total).abs() <= allowed).all()


def activation_of(s: Shape, dtype: str, rows: int, weights: list[Tensor]):
    """What is below, and the activation's slope in float64; nothing, and 1, without one.

    There is no bias of one row.
    """
    if s.below is None:
        return (), 1.0
    generator = torch.Generator().manual_seed(rows + 1)
    kind = getattr(torch, dtype)
    below = torch.randn(rows, s.features_below, generator=generator).to(kind)
    bias = torch.randn(s.right.in_features, generator=generator).to(kind)
    behind = (below, bias)[: min(rows, 2)]
    h = sum(behind[1:], ks_reference(below.double(), weights[2].double())).requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[s.activation](h).sum(), h)
    return behind, slope


# One class and several, a group and several, siblings, an activation.
FAST = (0, 6, 7, 12, 15, 17, 19)


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(at, marks=() if at in FAST else pytest.mark.slow, id=f"{ALL[at][0]}-{at}")
        for at in range(len(ALL))
    ],
)
def test_both_gradients(multiply, pack, at):
    s, tile, dtype = ALL[at]
    for rows in (1, 200):
        grads, weights = drawn(s, dtype, rows, rows)
        behind, slope = activation_of(s, dtype, rows, weights)
        in_order = packed(pack[at], s, tile, weights)
        result = computed(multiply[at], ALL[at], grads, in_order, behind=behind)
        assert_right(result, grads, weights, slope)


@pytest.mark.parametrize("at", [*(pytest.param(at, marks=pytest.mark.slow) for at in (1, 5)), 12])
def test_one_block_takes_several_passes(multiply, pack, at):
    s, tile, dtype = ALL[at]
    grads, weights = drawn(s, dtype, 450)
    in_order = packed(pack[at], s, tile, weights)
    result = computed(multiply[at], ALL[at], grads, in_order, sms=1)
    assert_right(result, grads, weights)
    again = computed(multiply[at], ALL[at], grads, in_order, sms=8)
    for one, other in zip(result, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("at", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_what_is_not_finite_reaches_what_it_met(multiply, pack, at):
    """Also where rows are filled up: a zero times infinity is in no sum."""
    s, tile, dtype = ALL[at]
    (grad,), (left, right) = drawn(s, dtype, 40)
    grad[3, -1], grad[17, 0] = float("inf"), float("nan")
    in_order = packed(pack[at], s, tile, [left, right])
    to, (between,) = computed(multiply[at], ALL[at], [grad], in_order)
    truth = ks_reference(grad.double(), left.double().transpose(1, 2))
    assert torch.equal(between.isfinite(), truth.isfinite())
    assert torch.equal(between.isnan(), truth.isnan())
    truth = ks_reference(truth, right.double().transpose(1, 2))
    assert torch.equal(to.isfinite(), truth.isfinite())
    assert not to[17].isfinite().all()


@pytest.mark.parametrize(
    ("header", "cut", "left"),
    [
        ("common/warpgroup_ring.cuh", "{ full[slot].wait(parity); }", "{}"),
        ("common/warpgroup_ring.cuh", "{ empty[slot].wait(parity); }", "{}"),
    ],
)
def test_a_missing_wait_is_detected(emulator, pack, header, cut, left):
    """So the hand-over of slots is really checked."""

    def edit(name: str, text: str) -> str:
        if name == header:
            assert text.count(cut) == 1
            text = text.replace(cut, left)
        return without_predicates(name, text)

    (kernel,) = build(emulator, ALL[:1], edit)
    s, tile, dtype = ALL[0]
    grads, weights = drawn(s, dtype, 200)
    in_order = packed(pack[0], s, tile, weights)
    with pytest.raises(EmulationError):
        computed(kernel, ALL[0], grads, in_order)


CHAINS = [
    Shape(*Chain.parse(text), *siblings)
    for text, *siblings in (
        ("(1,192,64,2)*(2,64,768,1)",),
        ("(1,768,64,2)*(2,64,192,1)",),
        ("(1,512,128,2)*(2,128,512,1)",),
        ("(1,2048,128,2)*(2,128,512,1)",),
        ("(1,128,128,8)*(8,128,128,1)",),
        ("(1,768,96,1)*(1,96,768,1)",),
        ("(1,192,64,2)*(2,64,192,1)", 3),
        ("(1,512,128,2)*(2,128,512,1)", 3),
    )
]


@pytest.mark.parametrize("s", CHAINS, ids=str)
def test_launches_have_all_rows_and_fill_the_device(s):
    assert tiles.unsupported_reason(s, "bfloat16", H200) is None
    for rows in (1, 64, 1000, 4096, 25_216):
        tile = tiles.best(s, rows, H200)[0]
        blocks, of_block = tiles.launch_of(tile, rows, H200.multiprocessors)
        assert blocks // tile.of_rows * of_block >= rows
        assert (blocks // tile.of_rows - 1) * of_block < rows
        assert blocks <= H200.multiprocessors * tile.blocks
        assert tiles.predicted_us(s, tile, rows, H200) > 0
    assert (
        s.siblings > 1 or tile.rows >= 128
    )  # of many rows several warpgroups read one block's weights


@pytest.mark.parametrize(
    "s",
    [CHAINS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in CHAINS[2::2])],
    ids=str,
)
def test_the_real_compiler_takes_it(s):
    try:
        nvrtc.version()
    except UnavailableError as error:
        pytest.skip(str(error))
    for dtype in ("bfloat16", "float16"):
        tile = tiles.best(s, 4096, H200)[0]
        code = nvrtc.cubin(kernels.source(s, tile, dtype), "sm_90a").data
        assert f"ksopt_input_grad_wgmma16_{dtype}".encode() in code
    assert b"ksopt_input_grad_pack" in nvrtc.cubin(kernels.pack_source(s, tile), "sm_90a").data


def test_what_it_does_not_compute_has_a_reason():
    for text, dtype, words in (
        ("(1,64,32,2)*(2,32,64,1)", "float32", "float32 is not one of float16, bfloat16"),
        ("(2,64,32,2)*(4,32,64,1)", "bfloat16", "is not of the form"),
        ("(1,64,24,16)*(12,32,64,1)", "bfloat16", "d = 16"),
        ("(1,64,40,2)*(2,40,64,1)", "bfloat16", "b = 40"),
        ("(1,63,32,2)*(2,32,64,1)", "bfloat16", "16 bytes"),
        ("(1,64,512,1)*(1,512,64,1)", "bfloat16", "no tile fits"),
    ):
        assert words in str(tiles.unsupported_reason(Shape(*Chain.parse(text)), dtype, H200))
