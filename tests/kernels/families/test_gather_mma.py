"""The description of a template in families/gather_mma.py: support, tiles, launch, times."""

import csv
import random
import statistics
from dataclasses import astuple
from pathlib import Path

import pytest
from checks import H200

from ksopt.bench import random_subjects
from ksopt.kernels import registry
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.gather_mma import Config
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec, Problem
from ksopt.patterns.chain import Pattern

gather_mma, gather_mma_packed = family_of("gather_mma"), family_of("gather_mma_packed")

DTYPES = ("bfloat16", "float16", "float32")
A100 = DeviceSpec((8, 0), multiprocessors=108, shared_bytes=164 * 1024)
RTX_4090 = DeviceSpec((8, 9), multiprocessors=128, shared_bytes=100 * 1024)

# The fastest tile of each that was timed on an H100 (34205df): its first fields, how weights come,
# and microseconds.
MEASURED = [
    ("bfloat16", "(6,392,136,1)", 3399, (4, 32, 1, 13, 2, 1, 1, 1, 1, 2, 2), "packed", 19.8),
    ("bfloat16", "(13,168,484,1)", 9891, (16, 128, 1, 11, 2, 1, 1, 1, 4, 2, 1), "streamed", 126.8),
    ("bfloat16", "(1,440,8,57)", 1219, (16, 16, 1, 5, 1, 1, 1, 57, 1, 2, 1), "packed", 30.4),
    ("bfloat16", "(1,392,3,2)", 18660, (4, 64, 1, 5, 2, 2, 1, 2, 1, 2, 4), "packed", 15.6),
    ("bfloat16", "(103,6,72,6)", 1881, (4, 32, 1, 1, 1, 2, 1, 6, 2, 2, 4), "packed", 80.2),
    ("bfloat16", "(1,206,8,8)", 5636, (4, 32, 1, 7, 1, 2, 1, 8, 1, 2, 3), "packed", 13.5),
    ("bfloat16", "(42,11,8,2)", 22977, (8, 32, 1, 2, 1, 2, 16, 2, 1, 2, 2), "packed", 35.1),
    ("bfloat16", "(15,528,839,1)", 615, (4, 128, 1, 11, 2, 1, 1, 1, 18, 2, 2), "streamed", 60.7),
    ("float32", "(33,20,24,18)", 1678, (16, 32, 2, 3, 1, 1, 1, 18, 1, 2, 1), "packed", 85.1),
    ("float32", "(6,288,23,1)", 8563, (4, 32, 1, 9, 2, 1, 1, 1, 1, 2, 4), "packed", 39.9),
    ("float32", "(8,917,792,1)", 18245, (16, 128, 2, 4, 4, 1, 1, 1, 11, 2, 1), "streamed", 4997.4),
    ("float32", "(1,24,645,5)", 21841, (16, 64, 1, 3, 1, 1, 1, 5, 12, 2, 1), "streamed", 155.2),
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


@pytest.mark.parametrize("family", [gather_mma, gather_mma_packed], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_fits_and_covers_every_output_once(family, dtype):
    for pattern in drawn(25):
        problem = Problem.of_factor(pattern, dtype, False)
        tiles = list(family.configs(problem, H200))
        assert len(set(tiles)) == len(tiles)
        for tile in random.Random(0).sample(tiles, min(20, len(tiles))):
            assert tile.shared_bytes(pattern) * tile.blocks <= SHARED_LIMIT
            assert tile.registers(pattern) * tile.threads * tile.blocks <= 65536
            assert tile.bm % (16 * tile.mt) == 0
            assert tile.jc <= pattern.d
            assert tile.groups == 1 or (tile.jc == pattern.d and tile.outputs >= pattern.b)
            assert (tile.parts - 1) * tile.part(pattern) < pattern.c
            geometry = family.geometry(problem, tile)
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


@pytest.mark.parametrize(("dtype", "text", "rows", "fields", "weights", "us"), MEASURED)
def test_times_are_predicted_nearly_as_they_were_measured(dtype, text, rows, fields, weights, us):
    problem = Problem.of_factor(Pattern.parse(text), dtype, False)
    tile = next(
        tile
        for tile in gather_mma_packed.configs(problem, H200)
        if (astuple(tile)[: len(fields)], tile.weights) == (fields, weights)
    )
    assert gather_mma_packed.predicted_us(problem, tile, rows, H200) == pytest.approx(us, rel=0.25)


def test_more_rows_take_longer():
    problem = Problem.of_factor(Pattern(13, 14, 84, 3), "bfloat16", False)
    for tile in list(gather_mma.configs(problem, H200))[::20]:
        times = [
            gather_mma.predicted_us(problem, tile, rows, H200)
            for rows in (1, 1000, 10_000, 100_000, 1_000_000)
        ]
        assert times == sorted(times)


def test_tiles_whose_weights_are_in_one_order_share_what_is_packed():
    problem = Problem.of_factor(Pattern(3, 70, 90, 6), "bfloat16", False)
    sizes: dict[str, set[int]] = {}
    orders: dict[str, set[tuple[int, ...]]] = {}
    for tile in gather_mma_packed.configs(problem, H200):
        form = gather_mma_packed.packed_form(problem, tile)
        sizes.setdefault(form, set()).add(gather_mma_packed.packed_elements(problem, tile))
        order = (tile.groups, tile.jc, tile.outputs, tile.parts, tile.step)
        orders.setdefault(form, set()).add(order)
    assert len(sizes) > 1
    assert all(len(one) == 1 for several in (sizes, orders) for one in several.values())


def test_packed_weights_are_not_many_times_as_large():
    for shape in ((1, 1, 1, 2**22), (2**18, 2, 2, 1), (60, 1, 16, 2)):
        problem = Problem.of_factor(Pattern(*shape), "bfloat16", False)
        for tile in gather_mma_packed.configs(problem, H200):
            elements = gather_mma_packed.packed_elements(problem, tile)
            assert elements <= max(8 * problem.pattern.nnz, 2**21)
    assert any(True for _ in gather_mma_packed.configs(problem, H200))


def test_what_has_too_many_features_is_refused():
    problem = Problem.of_factor(Pattern(1, 2**20, 2**12, 1), "float32", False)
    reason = gather_mma.unsupported_reason(problem, H200)
    assert reason is not None
    assert "32 bits" in reason


def test_the_best_predicted_tiles_of_random_factors_are_near_the_fastest():
    """Tiles of an H200 (5c75c22), to which the price of runs' ends and of few warps is fitted."""
    regrets = []
    for dtype in ("bfloat16", "float32"):
        by_problem = {}
        data = Path(__file__).parents[3] / "docs" / "data" / f"gather-mma-tiles-{dtype}.csv"
        with data.open(newline="", encoding="utf-8") as file:
            for text, rows, *rest in list(csv.reader(file))[1:]:
                tile = Config(*map(int, rest[:14]), rest[14])
                by_problem.setdefault((text, int(rows)), []).append((tile, float(rest[-2])))
        for (text, rows), tiles in by_problem.items():
            problem = Problem.of_factor(Pattern.parse(text), dtype, False)
            times = [
                (gather_mma_packed.predicted_us(problem, tile, rows, H200), us)
                for tile, us in tiles
            ]
            best_four = sorted(times)[:4]
            regrets.append(min(us for _, us in best_four) / min(us for _, us in times))
    assert len(regrets) == 34
    assert statistics.mean(regrets) < 1.01
