"""The kernels of weight gradients, run on the CPU, against float64."""

from __future__ import annotations

import pytest
import weight_grad_kernels
from checks import H200

from ksopt.kernels import weight_gradients
from ksopt.kernels.families import weight_grad_wgmma16 as kernels
from ksopt.kernels.families.common import weight_grad
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
    return weight_grad_kernels.build(emulator, CASES)


@pytest.fixture(scope="module")
def adding(emulator):
    return weight_grad_kernels.build_adding(emulator)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: f"{CASES[at][0]}-{CASES[at][2]}")
def test_it_is_the_gradient(emulated, adding, at):
    weight_grad_kernels.assert_right(emulated[at], adding, CASES[at])


def test_infinities_stay_where_they_meet(emulated, adding):
    weight_grad_kernels.assert_infinities_stay(emulated[4], adding, CASES[4])


def test_launches_fill_the_device_and_leave_no_share_empty():
    for p in (*PATTERNS, Pattern(1, 768, 64, 2), Pattern(8, 128, 128, 1)):
        for rows in (1, 64, 1000, 25_088, 10_000_000):
            for tile in kernels.configs():
                for launch in weight_grad.launches(tile, p, rows, H200):
                    assert launch.rows_per_share % weight_grad.ROWS == 0
                    assert (launch.shares - 1) * launch.rows_per_share < rows
                    assert launch.shares * launch.rows_per_share >= rows
                    assert launch.predicted_us(p, rows, H200) > 0
    assert weight_gradients.best(Pattern(1, 768, 64, 2), "bfloat16", 25_088, H200).shares > 4


def test_what_it_does_not_compute_has_a_reason():
    assert kernels.unsupported(Pattern(1, 64, 64, 2), "bfloat16", H200) is None
    for p, dtype, words in (
        (Pattern(1, 64, 64, 16), "bfloat16", "d = 16"),
        (Pattern(1, 65, 64, 2), "float16", "multiple of 8"),
        (Pattern(1, 64, 64, 2), "float32", "float32 is not one of float16, bfloat16"),
    ):
        assert words in str(kernels.unsupported(p, dtype, H200))
