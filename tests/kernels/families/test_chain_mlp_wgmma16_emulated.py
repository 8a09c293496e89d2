"""Two chains with an activation between them in one launch, run on the CPU."""

from __future__ import annotations

import pytest

from chain_kernels import Operands, assert_mlp_right, build_mlps, run_mlp
from ksopt.kernels.families import chain_mlp_wgmma16 as mlps
from ksopt.kernels.families.chain_tile import Config, Epilogue, Shape
from ksopt.patterns.chain import Chain


def shape(text: str) -> Shape:
    return Shape.of(Chain.parse(text))


CASES = [
    (
        *(shape("(1,32,16,4)*(2,32,32,1)"), shape("(1,16,16,4)*(2,32,64,1)")),
        mlps.Config(Config(2, 1, 16, 16, 1, 1, 1, 2), Config(2, 1, 16, 16, 1, 2, 1, 2), 2, 3),
        *(Epilogue(middle="gelu", bias=True, residual=True), "bfloat16"),
    ),
    (
        *(shape("(1,64,24,2)*(2,24,32,1)"), shape("(1,8,16,8)*(1,128,128,1)")),
        mlps.Config(Config(1, 1, 32, 32, 1, 2, 2, 2), Config(1, 1, 8, 16, 1, 8, 1, 2), 4, 2),
        *(Epilogue(middle="relu", bias=False, residual=False), "float16"),
    ),
    (
        *(shape("(1,16,16,8)*(2,64,32,1)"), shape("(1,64,32,1)*(1,32,128,1)")),
        mlps.Config(Config(1, 1, 16, 16, 1, 8, 1, 2), Config(1, 1, 32, 16, 1, 1, 2, 2), 8, 2),
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
