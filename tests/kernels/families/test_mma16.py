"""What families/mma16.py says of its template: support, tiles, launch, shared memory."""

import random

import pytest
from checks import H200

from ksopt.errors import UnavailableError
from ksopt.jit import nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.mma16 import Config, fold
from ksopt.kernels.problem import SHARED_LIMIT, Problem
from ksopt.patterns.chain import Pattern

mma16 = family_of("mma16")

FOLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 48)
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
# Of a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide).
REGISTERS, SHARED_BYTES, THREADS = 65536, 227 * 1024, 2048


def problem(*shape: int, dtype: str = "float16", last: bool = False) -> Problem:
    return Problem(Pattern(*shape), dtype, last)


PROBLEMS = [problem(2, 48, 48, d) for d in FOLDS]
PROBLEMS += [
    problem(4, 64, 64, 16),
    problem(1, 8, 8, 1),
    problem(1, 256, 64, 2),
    problem(1, 96, 7, 24),
]


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
        (problem(1, 8, 8, 5), "d = 5 is not 1, 2, 3, 4, 6, 12 or a multiple of 8"),
        (problem(1, 8, 8, 20), "d = 20 is not 1, 2, 3, 4, 6, 12 or a multiple of 8"),
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
    assert mma16.unsupported_reason(given, H200) == reason


@pytest.mark.parametrize("given", PROBLEMS, ids=lambda p: str(p.pattern))
@pytest.mark.parametrize("dtype", mma16.dtypes)
def test_it_takes_every_fold(given, dtype):
    assert mma16.unsupported_reason(Problem(given.pattern, dtype, False), H200) is None


@pytest.mark.parametrize("d", FOLDS)
def test_a_fold_covers_whole_runs(d):
    f = fold(d)
    assert f.run * 8 == f.run_l * f.j  # chunks of a run hold whole l
    assert f.length % f.run_l == 0
    assert f.steps * 4 == f.length
    assert f.unit == 16 * f.steps  # a tensor-core step sums 16 l
    assert d % f.j == 0


@pytest.mark.parametrize("given", PROBLEMS, ids=lambda p: str(p.pattern))
def test_every_tile_fits_and_divides(given):
    p, f = given.pattern, fold(given.pattern.d)
    tiles = list(mma16.configs(given, H200))
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
        assert tile.walkers >= 1


@pytest.mark.parametrize("given", PROBLEMS, ids=lambda p: str(p.pattern))
def test_a_launch_covers_every_output_once(given):
    p, f = given.pattern, fold(given.pattern.d)
    for tile in mma16.configs(given, H200):
        geometry = mma16.geometry(given, tile)
        outputs_of_column = tile.outputs * tile.warps_j * f.j
        assert geometry.tiles_per_row_tile * outputs_of_column == p.out_features
        assert geometry.max_blocks % geometry.tiles_per_row_tile == 0  # every column has walkers
        assert geometry.threads == tile.threads
        assert geometry.rows_per_tile == tile.rows
        assert geometry.shared_bytes == tile.shared_bytes(p)


def template_arguments(tile: Config) -> str:
    fields = (tile.warps_j, tile.warps_m, tile.warps_n, tile.mt, tile.nt, tile.kl, tile.stages)
    return ", ".join(map(str, (*fields, tile.blocks)))


@pytest.mark.usefixtures("compiler")
def test_the_template_agrees_on_every_number():
    """Python's formulas are the template's: a sample of tiles of every fold, by static_assert."""
    draw = random.Random(0)
    lines = ['#include "mma16.cuh"']
    for given in PROBLEMS:
        p, f = given.pattern, fold(given.pattern.d)
        tiles = list(mma16.configs(given, H200))
        for tile in draw.sample(tiles, min(40, len(tiles))):
            support = f"Pattern<{p.a}, {p.b}, {p.c}, {p.d}>"
            name = f"Mma16Tile<{support}, {template_arguments(tile)}>"
            numbers = {
                "SHARED_BYTES": tile.shared_bytes(p),
                "THREADS": tile.threads,
                "BM": tile.rows,
                "NB": tile.outputs,
                "COLUMNS": tile.columns(p),
                "Fold::J": f.j,
                "Fold::RUN": f.run,
                "Fold::RUN_L": f.run_l,
                "Fold::UNIT": f.unit,
                "Fold::CHUNKS": f.chunks,
                "Fold::STEPS": f.steps,
            }
            lines += [f'static_assert({name}::{k} == {v}, "{k}");' for k, v in numbers.items()]
    nvrtc.cubin("\n".join(lines) + "\n", "sm_90a")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(2, 24, 48, 3), (1, 48, 48, 16)], ids=str)
def test_it_compiles_for(target, shape):
    draw = random.Random(0)
    for dtype in mma16.dtypes:
        given = problem(*shape, dtype=dtype)
        tile = draw.choice(list(mma16.configs(given, H200)))
        code = nvrtc.cubin(mma16.source(given, tile), target).data
        assert code.startswith(b"\x7fELF")
        assert mma16.kernel_name(given).encode() in code
