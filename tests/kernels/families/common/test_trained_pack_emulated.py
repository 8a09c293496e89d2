"""The kernel that packs a trained chain's weights for both passes, run on the CPU."""

from __future__ import annotations

import chain_packing
import pytest
import torch
from checks import H200
from emulated_chains import _aligned, _emulate, _instance
from packed_kernels import without_predicates

from ksopt.errors import UnavailableError
from ksopt.jit import nvrtc
from ksopt.kernels.families import input_grad_wgmma16 as input_grads
from ksopt.kernels.families.common import (
    chain_pack_launcher,
    chain_tile,
    input_grad_tile,
    weight_packer,
)
from ksopt.kernels.families.common import trained_pack_launcher as packs
from ksopt.kernels.families.common.chain_tile import Shape
from ksopt.patterns.chain import Chain

# One class, two, four and eight; outputs and columns that fill no tile; siblings.
CHAINS = (
    ("(1,64,32,2)*(2,32,64,1)", 1),
    ("(1,72,96,1)*(3,32,40,1)", 1),
    ("(1,40,32,4)*(4,32,24,1)", 1),
    ("(1,24,16,8)*(2,64,72,1)", 1),
    ("(1,64,32,2)*(2,32,64,1)", 3),
)
SHAPES = [Shape.of(Chain.parse(text), siblings) for text, siblings in CHAINS]


def of_gradient(s: Shape) -> input_grad_tile.Shape:
    return input_grad_tile.Shape(s.left, s.right, s.siblings)


def tiles_of(s: Shape):
    of_grad = next(input_grad_tile.configs(of_gradient(s), H200))
    return next(iter(chain_tile.configs(s, H200))), of_grad


@pytest.fixture(scope="module")
def kernels(emulator):
    """For each chain the kernel of both passes, and that of the gradient alone."""
    instances = []
    for s in SHAPES:
        tile, of_grad = tiles_of(s)
        alone = input_grads.pack_source(of_gradient(s), of_grad)
        for text in (packs.source(s, tile, of_grad), alone):
            instances.append(_instance(s.left, tile, text, "bfloat16", 0))
    return emulator.build(instances, without_predicates)


@pytest.mark.parametrize("at", range(len(SHAPES)), ids=lambda at: str(SHAPES[at]))
def test_it_packs_as_a_launch_for_each_pass(kernels, at):
    s = SHAPES[at]
    tile, of_grad = tiles_of(s)
    grad_shape = of_gradient(s)
    torch.manual_seed(at)
    sizes = [s.left.nnz, s.right.nnz] * s.siblings
    memory = torch.randint(-(2**15), 2**15, (sum(sizes),), dtype=torch.int16)
    parts = memory.split(sizes)
    a, b, c, d = s.left.weight_shape
    lefts = [own.view(a, c, b, d).transpose(1, 2) for own in parts[::2]]  # strides of their own
    rights = [own.view(s.right.weight_shape) for own in parts[1::2]]
    weights = [one for both in zip(lefts, rights, strict=True) for one in both]
    counts = (tile.packed_elements(s), of_grad.packed_elements(grad_shape))
    both = _aligned(torch.full((sum(counts),), 77, dtype=torch.int16))
    packed, packed_of_grad = both.split(counts)
    arguments = weight_packer.arguments_of(weights, s.siblings, packed)
    arguments.packed_of_grad = packed_of_grad.data_ptr()
    blocks = chain_pack_launcher.blocks_for(sum(counts))
    _emulate(kernels[2 * at], arguments, (blocks, packs.THREADS, 0), (memory, memory[:0], both))
    index = chain_packing.pack_index(s, tile)
    assert torch.equal(packed, chain_packing.pack(lefts, rights, index))
    alone = _aligned(torch.full((counts[1],), 77, dtype=torch.int16))
    arguments = weight_packer.arguments_of(weights, s.siblings, alone)
    launch = (input_grads.pack_blocks(grad_shape, of_grad), input_grads.PACK_THREADS, 0)
    _emulate(kernels[2 * at + 1], arguments, launch, (memory, memory[:0], alone))
    assert torch.equal(packed_of_grad, alone)


def test_it_compiles():
    s = Shape.of(Chain.parse("(1,192,64,2)*(2,64,192,1)"))
    try:
        code = nvrtc.cubin(packs.source(s, *tiles_of(s)), "sm_90a").data
    except UnavailableError as error:
        pytest.skip(str(error))
    assert packs.kernel_name(s).encode() in code
