"""Two chains with an activation between them in one launch, run on the CPU."""

from __future__ import annotations

import chain_packing
import pytest
import torch
from emulated_chains import (
    Operands,
    assert_mlp_right,
    build_mlp_packers,
    build_mlps,
    run_mlp,
    run_packer,
)

from ksopt.kernels.families.common.chain_mlp_tile import Config
from ksopt.kernels.families.common.chain_tile import Epilogue, Shape
from ksopt.patterns.chain import Chain


def shape(text: str) -> Shape:
    return Shape.of(Chain.parse(text))


CASES = [
    (
        *(shape("(1,32,16,4)*(2,32,32,1)"), shape("(1,16,16,4)*(2,32,64,1)")),
        Config(2, 16, 16, 1, 1, 16, 2, 1, 2, 3),
        *(Epilogue(middle="gelu", bias=True, residual=True), "bfloat16"),
    ),
    (
        *(shape("(1,64,24,2)*(2,24,32,1)"), shape("(1,8,16,8)*(1,128,128,1)")),
        Config(1, 32, 32, 2, 2, 8, 8, 1, 4, 2),
        *(Epilogue(middle="relu", bias=False, residual=False), "float16"),
    ),
    (
        *(shape("(1,16,16,8)*(2,64,32,1)"), shape("(1,64,32,1)*(1,32,128,1)")),
        Config(1, 16, 16, 8, 1, 32, 1, 2, 8, 2),
        *(Epilogue(middle="silu", bias=True, residual=False), "bfloat16"),
    ),
]


@pytest.fixture(scope="module")
def kernels(emulator):
    return build_mlps(emulator, CASES)


@pytest.mark.parametrize("at", range(len(CASES)))
def test_results(kernels, at):
    first, second, _, epilogue, dtype = CASES[at]
    for rows in (1, 200):
        o = Operands.random(first, dtype, rows, seed=rows)
        last = Operands.random(second, dtype, 1, seed=rows + 1)
        assert_mlp_right(run_mlp(kernels[at], CASES[at], o, last), o, last, epilogue)


@pytest.fixture(scope="module")
def packers(emulator):
    return build_mlp_packers(emulator, CASES)


@pytest.mark.parametrize("at", range(len(CASES)))
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1)], ids=str)
def test_weights_are_packed_as_by_pytorch(packers, at, order):
    first, second, tile, *_ = CASES[at]
    # Every value has bits of its own, as far as 16 bits go.
    memory = torch.randint(-(2**15), 2**15, (60_000,), dtype=torch.int16)
    weights, place = [], 1  # from addresses that are no multiples of 16 bytes
    for p in (first.left, first.right, second.left, second.right):
        lying = [p.weight_shape[dim] for dim in order]
        weight = memory[place : place + p.nnz].view(lying)
        weights.append(weight.permute([order.index(dim) for dim in range(4)]))
        place += p.nnz + 5
    index = chain_packing.mlp_pack_index(first, second, tile)
    expected = chain_packing.pack(weights[:2], weights[2:], index)
    elements = tile.packed_elements(first, second)
    assert torch.equal(run_packer(packers[at], elements, memory, weights), expected)
