"""What ksopt/kernels/families/wgmma16.py says of its template, and what its cost model predicts."""

import random
from dataclasses import astuple

import pytest
from checks import H200

from ksopt.errors import UnavailableError
from ksopt.jit import nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.mma16 import fold
from ksopt.kernels.families.wgmma16 import Config
from ksopt.kernels.problem import SHARED_LIMIT, Problem
from ksopt.patterns.chain import Pattern

wgmma16 = family_of("wgmma16")

FOLDS = (2, 3, 4, 6, 8, 12, 16, 24, 40, 48, 64)
BATCH = 25_088
# Of a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide).
REGISTERS, SHARED_BYTES = 65536, 228 * 1024

# Tiles as fast as any measured on an H200 (fp16): pattern, template arguments, microseconds.
MEASURED = [
    ("(1,128,128,96)", (2, 1, 1, 4, 16, 2, 1, 3), 771.0),
    ("(48,96,96,16)", (2, 1, 1, 4, 16, 3, 1, 1), 2424.0),
    ("(4,64,64,16)", (2, 1, 1, 4, 32, 2, 1, 1), 122.6),
    ("(16,128,128,4)", (1, 1, 1, 8, 64, 4, 1, 1), 234.7),
    ("(4,96,96,16)", (2, 1, 1, 4, 16, 3, 1, 1), 196.1),
    ("(1,64,64,64)", (2, 1, 1, 4, 32, 2, 1, 4), 174.5),
    ("(1,192,192,16)", (2, 1, 1, 3, 16, 2, 1, 1), 214.8),
    ("(4,96,384,16)", (2, 1, 1, 1, 16, 3, 1, 1), 1406.5),
    ("(4,384,96,4)", (1, 2, 1, 8, 48, 3, 1, 1), 131.4),
]


def problem(*shape: int, dtype: str = "float16", last: bool = False) -> Problem:
    return Problem(Pattern(*shape), dtype, last)


PROBLEMS = [problem(2, 48, 48, d) for d in FOLDS]
PROBLEMS += [problem(4, 64, 64, 16), problem(1, 96, 7, 24), problem(1, 256, 256, 32)]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KSOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        yield


@pytest.fixture
def compiler():
    try:
        nvrtc.version()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(1, 8, 8, 8, dtype="float32"), "float32 is not one of float16, bfloat16"),
        (problem(1, 8, 8, 8, last=True), "batch_last has its own kernels"),
        (problem(1, 8, 8, 1), "d = 1 is not 2, 3, 4, 6, 12 or a multiple of 8"),
        (problem(1, 8, 8, 20), "d = 20 is not 2, 3, 4, 6, 12 or a multiple of 8"),
        (problem(1, 12, 8, 8), "b = 12 is not a multiple of 8"),
        (
            problem(1, 8, 6, 2),
            "c*d = 12 is not a multiple of 8, so rows of a group are not aligned",
        ),
        (problem(1, 8, 100_000, 8), "no tile's weights fit in shared memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.pattern),
)
def test_a_refusal_says_why(given, reason):
    assert wgmma16.unsupported_reason(given, H200) == reason


@pytest.mark.parametrize("given", PROBLEMS, ids=lambda p: str(p.pattern))
@pytest.mark.parametrize("dtype", wgmma16.dtypes)
def test_it_takes_every_fold(given, dtype):
    assert wgmma16.unsupported_reason(Problem(given.pattern, dtype, False), H200) is None


@pytest.mark.parametrize("given", PROBLEMS, ids=lambda p: str(p.pattern))
def test_every_tile_fits_and_covers_every_output_once(given):
    p, f = given.pattern, fold(given.pattern.d)
    tiles = list(wgmma16.configs(given, H200))
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        width = tile.groups_j * f.j
        assert tile.shared_bytes(p) <= SHARED_LIMIT
        assert (tile.shared_bytes(p) + 1024) * tile.blocks <= SHARED_BYTES
        taken = tile.register_limit * 128 * tile.groups + 24 * 128
        assert taken * tile.blocks <= REGISTERS
        assert p.d % (width * tile.team_j) == 0
        geometry = wgmma16.geometry(given, tile)
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
    tiles = wgmma16.configs(Problem(p, "float16", False), H200)
    alike = [t for t in tiles if t.outputs == outputs and t.blocks == 1]
    assert {t.max_blocks // t.team(p) for t in alike} == {teams}


@pytest.mark.usefixtures("compiler")
def test_the_template_agrees_on_every_number():
    """Python's formulas are the template's: a sample of tiles of every fold, by static_assert."""
    draw = random.Random(0)
    lines = ['#include "wgmma16.cuh"']
    for given in PROBLEMS:
        p, f = given.pattern, fold(given.pattern.d)
        tiles = list(wgmma16.configs(given, H200))
        for tile in draw.sample(tiles, min(30, len(tiles))):
            support = f"Pattern<{p.a}, {p.b}, {p.c}, {p.d}>"
            arguments = ", ".join(map(str, astuple(tile)[:-1]))
            name = f"Wgmma16Tile<{support}, {arguments}>"
            numbers = {
                "SHARED_BYTES": tile.shared_bytes(p),
                "WEIGHT_BYTES": tile.weight_bytes(p),
                "THREADS": tile.threads,
                "BM": tile.rows,
                "NB": tile.outputs,
                "TEAM": tile.team(p),
                "COLUMN_GROUPS": tile.columns(p) // tile.team(p),
                "MULTIPLIER_REGISTERS": tile.register_limit,
                "AHEAD": int(tile.loads_ahead(p)),
                "JC": tile.groups_j * f.j,
            }
            lines += [f'static_assert({name}::{k} == {v}, "{k}");' for k, v in numbers.items()]
    nvrtc.cubin("\n".join(lines) + "\n", "sm_90a")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("shape", [(2, 24, 48, 3), (1, 48, 48, 16)], ids=str)
def test_it_compiles(shape):
    draw = random.Random(0)
    for dtype in wgmma16.dtypes:
        given = problem(*shape, dtype=dtype)
        tile = draw.choice(list(wgmma16.configs(given, H200)))
        code = nvrtc.cubin(wgmma16.source(given, tile), "sm_90a").data
        assert code.startswith(b"\x7fELF")
        assert wgmma16.kernel_name(given).encode() in code


@pytest.mark.parametrize(("text", "arguments", "us"), MEASURED, ids=lambda value: str(value))
def test_the_cost_model_is_near_what_was_measured(text, arguments, us):
    """Times within a fifth; and no other tile is predicted to be much faster than these."""
    given = Problem(Pattern.parse(text), "float16", False)

    def predicted(config: Config) -> float:
        return wgmma16.predicted_us(given, config, BATCH, H200)

    tiles = list(wgmma16.configs(given, H200))
    fastest = [tile for tile in tiles if astuple(tile)[:-1] == arguments]
    assert len(fastest) == 1
    assert predicted(fastest[0]) == pytest.approx(us, rel=0.2)
    assert predicted(fastest[0]) <= 1.1 * min(map(predicted, tiles))


def test_more_rows_take_longer_and_few_rows_use_few_blocks():
    given = problem(4, 64, 64, 16)
    tile = next(iter(wgmma16.configs(given, H200)))
    times = [wgmma16.predicted_us(given, tile, batch, H200) for batch in (1, 1000, 25_088, 100_000)]
    assert times == sorted(times)
    assert times[0] > 0
