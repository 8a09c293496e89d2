"""What families/wgmma16_streamed.py says of its template, and what its cost model predicts."""

import random
from dataclasses import astuple

import pytest
from checks import H200

from ksopt.errors import UnavailableError
from ksopt.jit import nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.mma16 import fold
from ksopt.kernels.families.wgmma16_streamed import Config
from ksopt.kernels.problem import SHARED_LIMIT, Problem
from ksopt.patterns.chain import Pattern

wgmma16 = family_of("wgmma16")
wgmma16_streamed = family_of("wgmma16_streamed")

FOLDS = (2, 3, 4, 6, 8, 12, 16, 24, 40, 48, 64)
BATCH = 25_088

# The fastest tiles measured on an H200 (fp16): pattern, template arguments, microseconds.
MEASURED = [
    ("(1,96,384,16)", (2, 1, 1, 4, 16, 4), 132.2),
    ("(1,128,512,4)", (1, 2, 1, 8, 16, 7), 40.8),
    ("(4,192,768,4)", (1, 1, 2, 8, 16, 7), 280.4),
    ("(4,512,512,4)", (1, 2, 1, 8, 16, 7), 486.5),
    ("(1,64,256,64)", (2, 1, 1, 4, 16, 4), 471.8),
    ("(1,256,256,32)", (2, 1, 1, 4, 16, 4), 909.6),
    ("(1,256,256,8)", (1, 2, 1, 4, 16, 5), 93.2),
    ("(1,512,512,2)", (1, 1, 2, 16, 32, 5), 52.8),
]


def problem(*shape: int, dtype: str = "float16", last: bool = False) -> Problem:
    return Problem(Pattern(*shape), dtype, last)


PROBLEMS = [problem(2, 48, 48, d) for d in FOLDS]
PROBLEMS += [problem(4, 64, 64, 16), problem(1, 96, 7, 24), problem(1, 768, 768, 4)]


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
        (problem(1, 12, 8, 8), "b = 12 is not a multiple of 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.pattern),
)
def test_a_refusal_says_why(given, reason):
    assert wgmma16_streamed.unsupported_reason(given, H200) == reason


@pytest.mark.parametrize("shape", [(1, 8, 100_000, 8), (1, 1024, 1024, 16)], ids=str)
def test_it_takes_blocks_whose_weights_fit_nowhere(shape):
    assert (
        wgmma16.unsupported_reason(problem(*shape), H200)
        == "no tile's weights fit in shared memory"
    )
    assert wgmma16_streamed.unsupported_reason(problem(*shape), H200) is None


@pytest.mark.parametrize("given", PROBLEMS, ids=lambda p: str(p.pattern))
def test_every_tile_fits_and_covers_every_output_once(given):
    p, f = given.pattern, fold(given.pattern.d)
    tiles = list(wgmma16_streamed.configs(given, H200))
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert tile.shared_bytes(p) <= SHARED_LIMIT
        assert tile.stages >= 2
        width = tile.groups_j * f.j
        assert tile.loads_ahead(p) or width < p.d
        geometry = wgmma16_streamed.geometry(given, tile)
        assert geometry.tiles_per_row_tile * tile.outputs * width == p.out_features
        assert geometry.max_blocks == H200.multiprocessors
        # All weights, and zeros after the last l.
        padded = -(-p.c // f.unit) * f.unit
        assert tile.packed_elements(p) == p.a * p.b * padded * p.d


@pytest.mark.usefixtures("compiler")
def test_the_template_agrees_on_every_number():
    """Python's formulas are the template's: a sample of tiles of every fold, by static_assert."""
    draw = random.Random(0)
    lines = ['#include "wgmma16_streamed.cuh"']
    for given in PROBLEMS:
        p, f = given.pattern, fold(given.pattern.d)
        tiles = list(wgmma16_streamed.configs(given, H200))
        for tile in draw.sample(tiles, min(20, len(tiles))):
            support = f"Pattern<{p.a}, {p.b}, {p.c}, {p.d}>"
            name = f"Wgmma16StreamedTile<{support}, {', '.join(map(str, astuple(tile)[:6]))}>"
            numbers = {
                "SHARED_BYTES": tile.shared_bytes(p),
                "STAGE_BYTES": tile.stage_bytes(p),
                "STAGE_WEIGHT_BYTES": tile.stage_weight_bytes(p),
                "COLUMNS": tile.columns(p),
                "COLUMN_BYTES": tile.packed_elements(p) * 2 // tile.columns(p),
                "THREADS": tile.threads,
                "BM": tile.rows,
                "NB": tile.outputs,
                "MULTIPLIER_REGISTERS": tile.register_limit,
                "AHEAD": int(tile.loads_ahead(p)),
                "JC": tile.groups_j * f.j,
            }
            lines += [f'static_assert({name}::{k} == {v}, "{k}");' for k, v in numbers.items()]
    nvrtc.cubin("\n".join(lines) + "\n", "sm_90a")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", wgmma16.dtypes)
def test_both_kernels_compile(dtype):
    given = problem(1, 48, 48, 16, dtype=dtype)
    tile = next(iter(wgmma16_streamed.configs(given, H200)))
    packing, multiplying = wgmma16_streamed.sources(given, tile)
    assert wgmma16_streamed.pack_name(given).encode() in nvrtc.cubin(packing, "sm_90a").data
    assert wgmma16_streamed.kernel_name(given).encode() in nvrtc.cubin(multiplying, "sm_90a").data


@pytest.mark.parametrize(("text", "arguments", "us"), MEASURED, ids=lambda value: str(value))
def test_the_cost_model_is_near_what_was_measured(text, arguments, us):
    """Times within a third; and no other tile is predicted to be much faster than these."""
    given = Problem(Pattern.parse(text), "float16", False)

    def predicted(config: Config) -> float:
        return wgmma16_streamed.predicted_us(given, config, BATCH, H200)

    tiles = list(wgmma16_streamed.configs(given, H200))
    fastest = [tile for tile in tiles if astuple(tile)[:6] == arguments]
    assert len(fastest) == 1
    assert predicted(fastest[0]) == pytest.approx(us, rel=0.34)
    assert predicted(fastest[0]) <= 1.1 * min(map(predicted, tiles))


def test_where_x_comes_in_pieces_more_outputs_a_block_may_be_faster():
    """Measured: 441 us by 48 outputs, which leave no registers to load ahead, and 511 by 32."""
    given = problem(1, 192, 192, 32)
    tiles = list(wgmma16_streamed.configs(given, H200))

    def best(outputs: int) -> float:
        alike = (tile for tile in tiles if tile.outputs == outputs)
        return min(wgmma16_streamed.predicted_us(given, tile, BATCH, H200) for tile in alike)

    assert best(48) < best(32)
    whole = wgmma16_streamed.configs(problem(1, 192, 192, 16), H200)
    assert 48 not in {tile.outputs for tile in whole}


def test_more_rows_take_longer():
    given = problem(4, 64, 64, 16)
    tile = next(iter(wgmma16_streamed.configs(given, H200)))
    times = [
        wgmma16_streamed.predicted_us(given, tile, batch, H200)
        for batch in (1, 10_000, 25_088, 100_000)
    ]
    assert times == sorted(times)
    assert times[0] > 0
