"""The description of a template in families/mma16.py: support, tiles, launch, shared memory."""

import pytest
from checks import H200

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.lane_layout import lane_layout
from ksopt.kernels.problem import SHARED_LIMIT, Problem
from ksopt.patterns.chain import Pattern

mma16 = family_of("mma16")

FOLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 48)
# Of a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide).
REGISTERS, SHARED_BYTES, THREADS = 65536, 227 * 1024, 2048


def problem(*shape: int, dtype: str = "float16", last: bool = False) -> Problem:
    return Problem.of_factor(Pattern(*shape), dtype, last)


PROBLEMS = [problem(2, 48, 48, d) for d in FOLDS]
PROBLEMS += [
    problem(4, 64, 64, 16),
    problem(1, 8, 8, 1),
    problem(1, 256, 64, 2),
    problem(1, 96, 7, 24),
]


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda p: str(p.pattern))
@pytest.mark.parametrize("dtype", mma16.dtypes)
def test_it_takes_every_class_of_d(case, dtype):
    assert mma16.unsupported_reason(Problem.of_factor(case.pattern, dtype, False), H200) is None


@pytest.mark.parametrize("d", FOLDS)
def test_a_layout_covers_whole_runs(d):
    f = lane_layout(d)
    assert f.run * 8 == f.run_l * f.j  # chunks of a run hold whole l
    assert f.length % f.run_l == 0
    assert f.steps * 4 == f.length
    assert f.unit == 16 * f.steps  # a tensor-core step sums 16 l
    assert d % f.j == 0


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda p: str(p.pattern))
def test_every_tile_fits_and_divides(case):
    p, f = case.pattern, lane_layout(case.pattern.d)
    tiles = list(mma16.configs(case, H200))
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert tile.threads <= 1024
        assert tile.threads * tile.blocks <= THREADS
        assert tile.shared_bytes(p) <= SHARED_LIMIT
        assert tile.shared_bytes(p) * tile.blocks <= SHARED_BYTES
        assert tile.registers(p) <= 255
        assert tile.registers(p) * tile.threads * tile.blocks <= REGISTERS
        assert p.b % tile.outputs == 0
        assert tile.kl % f.unit == 0
        assert p.d % (tile.warps_j * f.j) == 0
        assert tile.stages >= 2
        assert tile.persistent_ctas >= 1


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda p: str(p.pattern))
def test_a_launch_covers_every_output_once(case):
    p, f = case.pattern, lane_layout(case.pattern.d)
    for tile in mma16.configs(case, H200):
        geometry = mma16.geometry(case, tile)
        outputs_of_column = tile.outputs * tile.warps_j * f.j
        assert geometry.tiles_per_row_tile * outputs_of_column == p.out_features
        assert (
            geometry.max_blocks % geometry.tiles_per_row_tile == 0
        )  # every column has persistent blocks
        assert geometry.threads == tile.threads
        assert geometry.rows_per_tile == tile.rows
        assert geometry.shared_bytes == tile.shared_bytes(p)
