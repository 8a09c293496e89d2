"""The description of a template in families/wgmma16.py, and its cost model's predictions."""

import pytest
from checks import H200

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.lane_layout import lane_layout
from ksopt.kernels.problem import SHARED_LIMIT, Problem
from ksopt.patterns.chain import Pattern

wgmma16 = family_of("wgmma16")

FOLDS = (2, 3, 4, 6, 8, 12, 16, 24, 40, 48, 64)
# Of a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide).
REGISTERS, SHARED_BYTES = 65536, 228 * 1024


def problem(*shape: int, dtype: str = "float16", last: bool = False) -> Problem:
    return Problem.of_factor(Pattern(*shape), dtype, last)


PROBLEMS = [problem(2, 48, 48, d) for d in FOLDS]
PROBLEMS += [problem(4, 64, 64, 16), problem(1, 96, 7, 24), problem(1, 256, 256, 32)]


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda p: str(p.pattern))
@pytest.mark.parametrize("dtype", wgmma16.dtypes)
def test_it_takes_every_class_of_d(case, dtype):
    assert wgmma16.unsupported_reason(Problem.of_factor(case.pattern, dtype, False), H200) is None


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda p: str(p.pattern))
def test_every_tile_fits_and_covers_every_output_once(case):
    p, f = case.pattern, lane_layout(case.pattern.d)
    tiles = list(wgmma16.configs(case, H200))
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        width = tile.groups_j * f.j
        assert tile.shared_bytes(p) <= SHARED_LIMIT
        assert (tile.shared_bytes(p) + 1024) * tile.blocks <= SHARED_BYTES
        taken = tile.register_limit * 128 * tile.groups + 24 * 128
        assert taken * tile.blocks <= REGISTERS
        assert p.d % (width * tile.team_j) == 0
        geometry = wgmma16.geometry(case, tile)
        assert geometry.tiles_per_row_tile * tile.outputs * width == p.out_features
        assert geometry.max_blocks % tile.team(p) == 0  # whole teams, whatever the batch
        assert geometry.tiles_per_row_tile % tile.team(p) == 0
        if tile.team(p) <= H200.multiprocessors:  # all at a time: a team's blocks wait for no other
            assert geometry.max_blocks <= H200.multiprocessors * tile.blocks


@pytest.mark.parametrize(
    ("text", "outputs", "teams"),
    [
        ("(16,128,128,4)", 128, 128),  # eight teams for each i, and four multiprocessors idle
        ("(16,128,128,4)", 64, 64),
        ("(64,64,64,8)", 64, 128),
        ("(24,48,192,4)", 48, 132),  # 120 would leave too many idle
        ("(96,48,48,16)", 48, 132),  # more groups than half of the teams
        ("(1,64,64,4)", 64, 132),
    ],
)
def test_teams_are_as_many_for_each_group_where_few_are_idle(text, outputs, teams):
    p = Pattern.parse(text)
    tiles = wgmma16.configs(Problem.of_factor(p, "float16", False), H200)
    alike = [t for t in tiles if t.outputs == outputs and t.blocks == 1]
    assert {t.max_blocks // t.team(p) for t in alike} == {teams}
