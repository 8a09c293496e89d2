"""The kernel of weight gradients for few rows, run on the CPU, against float64."""

from __future__ import annotations

import pytest
import weight_grad_kernels
from checks import H200

from ksopt.kernels import gradient_autotuner, weight_gradients
from ksopt.kernels.families import weight_grad_fma as kernels
from ksopt.kernels.families.gradient_base import GradientProblem
from ksopt.kernels.families.weight_grad_fma import Config
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern

# Every kind of d; blocks that are filled and not; runs that share the values of dY and that do not;
# several i in a run, and several runs of an i.
TILES = [
    (Pattern(1, 192, 48, 2), Config(8, 1, 4)),
    (Pattern(2, 12, 64, 1), Config(4, 2, 4)),
    (Pattern(3, 20, 4, 1), Config(8, 1, 8)),
    (Pattern(2, 7, 8, 4), Config(2, 4, 16)),
    (Pattern(1, 5, 40, 8), Config(4, 2, 8)),
    (Pattern(2, 9, 3, 40), Config(16, 1, 4)),
    (Pattern(5, 8, 16, 3), Config(4, 1, 4)),
    (Pattern(1, 16, 64, 2), Config(4, 4, 4)),
]
DTYPES = ("float32", "bfloat16", "float16")
CASES = [(p, tile, DTYPES[at % 3], at % 4 > 0) for at, (p, tile) in enumerate(TILES)]
ROWS = ((1, 64), (3, 64), (16, 64), (70, 128))


@pytest.fixture(scope="module")
def emulated(emulator):
    return weight_grad_kernels.build(emulator, CASES)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: f"{CASES[at][0]}-{CASES[at][2]}")
def test_it_is_the_gradient(emulated, at):
    weight_grad_kernels.assert_right(emulated[at], {}, CASES[at], ROWS)


def test_infinities_stay_where_they_meet(emulated):
    weight_grad_kernels.assert_infinities_stay(emulated[0], {}, CASES[0])


def test_tiles_cover_a_pattern_and_fit():
    for p in (Pattern(1, 2, 4, 2), Pattern(48, 96, 96, 4), Pattern(1, 512, 128, 2)):
        tiles = list(kernels.configs(p))
        assert tiles
        for tile in tiles:
            assert tile.threads * tile.blocks <= 512
            assert tile.shared_bytes(p) <= 48 * 1024
            assert tile.tiles(p) * tile.ks * tile.features >= p.b * p.in_features


def test_what_it_does_not_compute_has_a_reason():
    family = kernels.WeightGradFma()
    older = DeviceSpec((7, 0), multiprocessors=72, shared_bytes=64 * 1024)
    for dtype in DTYPES:
        assert family.unsupported_pattern(Pattern(3, 16, 64, 7), dtype, older) is None
    for p, dtype, words in (
        (Pattern(1, 65, 64, 1), "float32", "multiple of 4"),
        (Pattern(1, 64, 36, 1), "float16", "multiple of 8"),
        (Pattern(1, 64, 64, 8), "float64", "float64 is not one of float32, float16"),
        (Pattern(2**20, 64, 64, 1), "float32", "more elements in a row or a weight"),
    ):
        assert words in str(family.unsupported_pattern(p, dtype, H200))


def test_it_is_for_few_rows():
    problem = GradientProblem("weight", (Pattern(1, 192, 48, 2),), "float32", with_bias=True)
    assert gradient_autotuner.ranked(problem, kernels.MOST_ROWS, H200)
    assert not gradient_autotuner.ranked(problem, kernels.MOST_ROWS + 1, H200)


@pytest.mark.parametrize("p", [Pattern(1, 192, 48, 2), Pattern(1, 384, 96, 2)])
def test_of_few_rows_it_is_predicted_to_be_faster_than_copies(p):
    for rows in (1, 16, 64):
        assert weight_gradients.is_faster(p, "float32", rows, H200)
