"""What families/gather_mma.py says of its template: support, tiles, launch, predicted times."""

import random
from dataclasses import astuple

import pytest
from checks import H200

from ksopt.bench import random_subjects
from ksopt.kernels import registry
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec, Problem
from ksopt.patterns.chain import Pattern

gather_mma = family_of("gather_mma")

DTYPES = ("bfloat16", "float16", "float32")
A100 = DeviceSpec((8, 0), multiprocessors=108, shared_bytes=164 * 1024)
RTX_4090 = DeviceSpec((8, 9), multiprocessors=128, shared_bytes=100 * 1024)

# The fastest tile of each that was timed on an H100 (e7a6f17): its first fields, and microseconds.
MEASURED = [
    ("float32", "(19,606,214,1)", 1383, (8, 128, 1, 6, 1, 1, 6, 2, 2), 277.0),
    ("bfloat16", "(1,11,208,4)", 4374, (8, 32, 1, 2, 1, 4, 2, 2, 2), 17.4),
    ("bfloat16", "(38,1,136,7)", 877, (8, 32, 1, 1, 1, 7, 3, 2, 3), 40.3),
    ("bfloat16", "(1,15,2,5)", 8284, (4, 16, 1, 2, 1, 5, 1, 2, 4), 6.7),
    ("float32", "(1,129,808,1)", 2480, (8, 128, 1, 3, 1, 1, 8, 2, 1), 43.0),
    ("float32", "(2,1,56,4)", 8426, (8, 32, 1, 1, 1, 4, 1, 2, 2), 13.9),
    ("bfloat16", "(1,32,2,6)", 20334, (4, 64, 2, 4, 1, 6, 1, 2, 3), 9.1),
    ("bfloat16", "(128,16,8,7)", 6419, (8, 64, 2, 2, 2, 7, 1, 2, 2), 110.1),
    ("float32", "(2,33,160,1)", 4615, (8, 128, 1, 2, 1, 1, 2, 2, 2), 15.9),
    ("bfloat16", "(8,2,389,8)", 6476, (8, 32, 1, 1, 1, 8, 9, 2, 2), 164.8),
    ("bfloat16", "(1,160,18,3)", 6335, (8, 128, 2, 4, 1, 3, 1, 2, 2), 10.3),
    ("bfloat16", "(4,368,15,6)", 2324, (8, 32, 1, 8, 1, 6, 1, 2, 2), 28.1),
]


def drawn(count: int) -> list[Pattern]:
    """Factors of the chains that the benchmark of random patterns draws."""
    return [factor for chain, _ in random_subjects.draw(count, seed=12) for factor in chain]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", [H200, A100, RTX_4090], ids=["9.0", "8.0", "8.9"])
def test_it_takes_nearly_all_that_is_drawn(dtype, device):
    """What is left has weights of a single output that fill the memory: long sums of many j."""
    patterns = drawn(60)
    problems = [Problem.of_factor(pattern, dtype, False) for pattern in patterns]
    taken = [one for one in problems if registry.ranked(gather_mma, one, 1000, device)]
    assert len(taken) >= 0.95 * len(problems)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_fits_and_covers_every_output_once(dtype):
    for pattern in drawn(25):
        problem = Problem.of_factor(pattern, dtype, False)
        tiles = list(gather_mma.configs(problem, H200))
        assert len(set(tiles)) == len(tiles)
        for tile in random.Random(0).sample(tiles, min(20, len(tiles))):
            assert tile.shared_bytes(pattern) * tile.blocks <= SHARED_LIMIT
            assert tile.registers(pattern) * tile.threads * tile.blocks <= 65536
            assert tile.bm % (16 * tile.mt) == 0
            assert tile.jc <= pattern.d
            assert tile.groups == 1 or (tile.jc == pattern.d and tile.outputs >= pattern.b)
            assert (tile.parts - 1) * tile.part(pattern) < pattern.c
            geometry = gather_mma.geometry(problem, tile)
            columns = geometry.tiles_per_row_tile
            groups, windows = -(-pattern.a // tile.groups), -(-pattern.d // tile.jc)
            assert columns == groups * windows * -(-pattern.b // tile.outputs)
            assert geometry.max_blocks % columns == 0  # a block keeps its column's weights


def test_short_sums_of_fp32_are_added_without_tensor_cores():
    """Three TF32 products of fewer than 32 values would be further from float64 than cuBLAS."""
    for c, exact, products in ((31, True, {0}), (32, True, {3}), (32, False, {1})):
        problem = Problem.of_factor(Pattern(2, 9, c, 3), "float32", False, exact)
        tiles = gather_mma.configs(problem, H200)
        assert {gather_mma.products(problem, tile) for tile in tiles} == products


@pytest.mark.parametrize(("dtype", "text", "rows", "fields", "us"), MEASURED)
def test_times_are_predicted_nearly_as_they_were_measured(dtype, text, rows, fields, us):
    problem = Problem.of_factor(Pattern.parse(text), dtype, False)
    tiles = gather_mma.configs(problem, H200)
    offered = [tile for tile in tiles if astuple(tile)[: len(fields)] == fields]
    best = min(gather_mma.predicted_us(problem, tile, rows, H200) for tile in offered)
    assert best == pytest.approx(us, rel=0.25)


def test_more_rows_take_longer():
    problem = Problem.of_factor(Pattern(13, 14, 84, 3), "bfloat16", False)
    for tile in list(gather_mma.configs(problem, H200))[::20]:
        times = [
            gather_mma.predicted_us(problem, tile, rows, H200)
            for rows in (1, 1000, 10_000, 100_000, 1_000_000)
        ]
        assert times == sorted(times)


def test_what_has_too_many_features_is_refused():
    problem = Problem.of_factor(Pattern(1, 2**20, 2**12, 1), "float32", False)
    reason = gather_mma.unsupported_reason(problem, H200)
    assert reason is not None
    assert "32 bits" in reason
