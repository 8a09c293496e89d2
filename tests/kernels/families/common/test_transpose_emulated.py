"""The transposes' index logic, run on the CPU by the emulator."""

import pytest
import torch
from cuda_emulator import Instance

from ksopt.kernels.families.common import transpose
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

# (a, length, d): every class of d, tiles of parts of a matrix, of whole rows, of shares of a row.
SHAPES = [(1, 48, 1), (3, 16, 2), (2, 48, 3), (5, 96, 4), (1, 64, 6), (2, 24, 12), (7, 48, 8)]
SHAPES += [(1, 192, 24), (2, 40, 16), (1, 1024, 48), (6, 256, 4), (1, 768, 96), (1, 8, 128)]
CASES = [
    (dtype, *shape, to_planar)
    for shape in SHAPES
    for dtype in ("float16", "float32")
    for to_planar in (True, False)
]


def instance(dtype: str, a: int, length: int, d: int, to_planar: bool) -> Instance:
    tile = transpose.tile_of(dtype, a, length, d)
    problem = Problem.of_factor(Pattern(a, length, length, d), dtype, False)
    source = transpose.source(a, tile, to_planar)
    return Instance(problem, source, transpose.geometry(a, tile))


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.on_demand([instance(*case) for case in CASES])


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: str(CASES[at]))
def test_transposes(kernels, at):
    dtype, a, length, d, to_planar = CASES[at]
    weight = torch.zeros(1, 1, 1, 1)
    for rows in (1, 5, 33):
        shape = (rows, a, length, d) if to_planar else (rows, a, d, length)
        x = torch.randn(shape).to(getattr(torch, dtype))
        y = kernels[at](x.reshape(rows, -1), weight)
        assert torch.equal(y, x.transpose(2, 3).reshape(rows, -1))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("length", [48, 64, 192, 1024])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("a", [1, 3, 4, 64])
def test_tiles_cover_a_row(dtype, a, length, d):
    assert transpose.unsupported(dtype, length, d) is None
    tile = transpose.tile_of(dtype, a, length, d)
    geometry = transpose.geometry(a, tile)
    elements = tile.part * tile.group * d
    assert elements * geometry.tiles_per_row_tile == geometry.rows_per_tile * a * length * d
    assert tile.shared_bytes <= 48 * 1024
    assert tile.threads % 32 == 0


def test_what_is_refused():
    assert "float64" in transpose.unsupported("float64", 64, 4)
    assert "63" in transpose.unsupported("float16", 63, 4)
    assert "d = 20" in transpose.unsupported("float16", 64, 20)
    assert transpose.unsupported("float32", 64, 20) is None
