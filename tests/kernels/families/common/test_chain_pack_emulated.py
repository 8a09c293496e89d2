"""The kernel that packs chains' weights, run on the CPU, against the packing by PyTorch."""

from __future__ import annotations

import chain_packing
import pytest
import torch
from checks import H200
from emulated_chains import build_packers, run_packer
from torch import Tensor

from ksopt.kernels.families.common import chain_tile
from ksopt.kernels.families.common.chain_tile import Shape
from ksopt.patterns.chain import Chain

# Every form of a class's outputs; blocks, classes and chunks that are filled up; siblings.
SHAPES = [
    Shape.of(Chain.parse(text), siblings)
    for text, siblings in (
        ("(1,32,16,4)*(2,32,32,1)", 1),
        ("(1,24,72,2)*(3,48,48,1)", 2),
        ("(1,24,48,8)*(4,96,40,1)", 1),
        ("(1,22,24,4)*(4,24,24,1)", 3),
        ("(1,72,40,1)*(1,40,32,1)", 4),
        ("(1,16,16,16)*(1,256,32,1)", 1),
    )
]
CASES = [
    (s, tile)
    for s in SHAPES
    for tile in {tile.packing: tile for tile in chain_tile.configs(s, H200)}.values()
]


@pytest.fixture(scope="module")
def kernels(emulator):
    return build_packers(emulator, CASES)


def with_strides(memory: Tensor, shape: tuple[int, ...], order: tuple[int, ...], at: int) -> Tensor:
    """A view whose dimensions lie in memory in this order, with gaps, from element ``at`` on."""
    strides, stride = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride = stride * shape[dim] + (3 if shape[dim] > 1 else 0)
    return memory.as_strided(shape, strides, at)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: f"{CASES[at][0]}-{at}")
def test_it_packs_as_pytorch_does(kernels, at):
    s, tile = CASES[at]
    # Every value has bits of its own, as far as 16 bits go.
    memory = torch.randint(-(2**15), 2**15, (60_000 * s.siblings,), dtype=torch.int16)
    index = chain_packing.pack_index(s, tile)
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 0, 2, 1)):
        weights, place = [], at % 2  # from addresses that are no multiples of 16 bytes, too
        for _ in range(s.siblings):
            for p in (s.left, s.right):
                weights.append(with_strides(memory, p.weight_shape, order, place))
                place += 30_000
        expected = chain_packing.pack(weights[0::2], weights[1::2], index)
        assert torch.equal(
            run_packer(kernels[at], tile.packed_elements(s), memory, weights), expected
        )


def test_contiguous_and_shared_weights(kernels):
    """Rows of 16 bytes that are loaded at once, and one memory for all features."""
    s, tile = CASES[0]
    index = chain_packing.pack_index(s, tile)
    memory = torch.randint(-(2**15), 2**15, (s.left.nnz + s.right.nnz,), dtype=torch.int16)
    left = memory[: s.left.nnz].view(s.left.weight_shape)
    right = memory[s.left.nnz :].view(s.right.weight_shape)
    for weights in (
        [left, right],
        [left[:, :, :1].expand(s.left.weight_shape), right[:1, :1].expand(s.right.weight_shape)],
    ):
        expected = chain_packing.pack(weights[0::2], weights[1::2], index)
        assert torch.equal(
            run_packer(kernels[0], tile.packed_elements(s), memory, weights), expected
        )


def test_two_layers_of_a_factor_each(emulator):
    """The first layer's factor is the right one, and comes first."""
    s, tile = CASES[0]
    kernel = build_packers(emulator, [CASES[0]], are_layers=True)[0]
    memory = torch.randint(-(2**15), 2**15, (s.left.nnz + s.right.nnz,), dtype=torch.int16)
    left = memory[: s.left.nnz].view(s.left.weight_shape)
    right = memory[s.left.nnz :].view(s.right.weight_shape)
    packed = run_packer(kernel, tile.packed_elements(s), memory, [right, left], chains=2)
    expected = chain_packing.pack([left], [right], chain_packing.pack_index(s, tile))
    assert torch.equal(packed, expected)


def test_tiles_of_one_packing_share_their_weights():
    s = SHAPES[1]
    by_packing: dict[object, list[Tensor]] = {}
    for tile in list(chain_tile.configs(s, H200))[::3]:
        index = chain_packing.pack_index(s, tile)
        by_packing.setdefault(tile.packing, []).append(index)
    assert any(len(same) > 1 for same in by_packing.values())
    for first, *others in by_packing.values():
        assert all(torch.equal(first, other) for other in others)
