"""Chains of two 16-bit factors in one launch: index logic and hand-over, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chain_kernels import Operands, assert_right, build, run
from ksopt.kernels.families.chain_wgmma16 import Config, Epilogue, Shape
from ksopt.patterns.chain import Chain

# Chain, siblings, tile, epilogue, dtype.
CASES = [
    # One slot after another; several passes; two groups.
    ("(1,32,16,4)*(2,32,32,1)", 1, (2, 1, 16, 16, 1, 1, 1, 2), ("none", "none", 1, 0), "bfloat16"),
    ("(1,32,16,4)*(2,32,64,1)", 1, (1, 1, 32, 32, 1, 4, 1, 3), ("gelu", "none", 1, 1), "float16"),
    # Several classes, or parts of one, in a slot; an odd number of tiles in a block, and in a class.
    ("(1,32,72,2)*(3,48,48,1)", 1, (1, 1, 32, 48, 1, 1, 5, 3), ("relu", "none", 0, 1), "bfloat16"),
    ("(1,24,48,8)*(4,96,32,1)", 1, (2, 1, 24, 16, 2, 2, 4, 2), ("silu", "none", 1, 0), "float16"),
    # Columns of z that are no feature, outputs that are none, a block of x that is no whole part.
    ("(1,20,24,4)*(4,24,24,1)", 1, (1, 1, 16, 16, 1, 2, 2, 2), ("none", "silu", 1, 0), "bfloat16"),
    # Siblings; one class; 16 classes.
    ("(1,48,32,4)*(2,64,96,1)", 3, (1, 1, 48, 48, 2, 4, 2, 2), ("none", "none", 1, 0), "bfloat16"),
    (
        "(1,64,64,1)*(1,64,32,1)",
        1,
        (1, 1, 64, 32, 1, 1, 4, 2),
        ("gelu_tanh", "relu", 0, 0),
        "float16",
    ),
    (
        "(1,16,16,16)*(1,256,32,1)",
        1,
        (1, 1, 16, 16, 2, 8, 1, 2),
        ("none", "none", 1, 1),
        "bfloat16",
    ),
]


def cases() -> Iterator[tuple[Shape, Config, Epilogue, str]]:
    for text, siblings, tile, (activation, middle, bias, residual), dtype in CASES:
        shape = Shape.of(Chain.parse(text), siblings)
        yield shape, Config(*tile), Epilogue(activation, middle, bool(bias), bool(residual)), dtype


ALL = list(cases())


@pytest.fixture(scope="module")
def kernels(emulator):
    return build(emulator, ALL)


@pytest.mark.parametrize("at", range(len(ALL)), ids=lambda at: str(ALL[at][0]))
def test_results(kernels, at):
    shape, _, epilogue, dtype = ALL[at]
    for rows in (1, 200):
        o = Operands.random(shape, dtype, rows, seed=rows)
        assert_right(run(kernels[at], ALL[at], o), o, epilogue)
