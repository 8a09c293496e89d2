"""The template's description in families/wgmma16_streamed.py, and its cost model's predictions."""

import pytest
from checks import H200

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.lane_layout import lane_layout
from ksopt.kernels.problem import SHARED_LIMIT, Problem
from ksopt.patterns.chain import Pattern

wgmma16 = family_of("wgmma16")
wgmma16_streamed = family_of("wgmma16_streamed")

FOLDS = (2, 3, 4, 6, 8, 12, 16, 24, 40, 48, 64)
BATCH = 25_088


def problem(*shape: int, dtype: str = "float16", last: bool = False) -> Problem:
    return Problem.of_factor(Pattern(*shape), dtype, last)


PROBLEMS = [problem(2, 48, 48, d) for d in FOLDS]
PROBLEMS += [problem(4, 64, 64, 16), problem(1, 96, 7, 24), problem(1, 768, 768, 4)]


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda p: str(p.pattern))
def test_every_tile_fits_and_covers_every_output_once(case):
    p, f = case.pattern, lane_layout(case.pattern.d)
    tiles = list(wgmma16_streamed.configs(case, H200))
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert tile.shared_bytes(p) <= SHARED_LIMIT
        assert tile.stages >= 2
        width = tile.groups_j * f.j
        assert tile.loads_ahead(p) or width < p.d
        geometry = wgmma16_streamed.geometry(case, tile)
        assert geometry.tiles_per_row_tile * tile.outputs * width == p.out_features
        assert geometry.max_blocks == H200.multiprocessors
        # All weights, and zeros after the last l.
        padded = -(-p.c // f.unit) * f.unit
        assert tile.packed_elements(p) == p.a * p.b * padded * p.d


def test_where_x_comes_in_pieces_more_outputs_a_block_may_be_faster():
    """Measured: 441 us by 48 outputs, which leave no registers to load ahead, and 511 by 32."""
    case = problem(1, 192, 192, 32)
    tiles = list(wgmma16_streamed.configs(case, H200))

    def best(outputs: int) -> float:
        alike = (tile for tile in tiles if tile.outputs == outputs)
        return min(wgmma16_streamed.predicted_us(case, tile, BATCH, H200) for tile in alike)

    assert best(48) < best(32)
    whole = wgmma16_streamed.configs(problem(1, 192, 192, 16), H200)
    assert 48 not in {tile.outputs for tile in whole}
