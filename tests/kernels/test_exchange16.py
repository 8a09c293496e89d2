"""16-bit products over clusters: tiles, packing, launcher, cost model and compiled code."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from test_batch_last32_wgmma import Recording, instructions

from ksopt.jit import nvrtc
from ksopt.kernels import exchange16, general
from ksopt.kernels.exchange16 import Config, ExchangeLauncher
from ksopt.kernels.problem import SHARED_LIMIT, Problem
from ksopt.pattern import Pattern

BATCH, MULTIPROCESSORS = 25_088, 132
SHAPES = [(3, 384, 96, 64), (8, 384, 384, 16), (16, 192, 768, 4), (1, 256, 256, 24)]
SHAPES += [(2, 96, 96, 64), (1, 128, 512, 8), (1, 1024, 1024, 8)]


def problem_of(shape: tuple[int, int, int, int], dtype: str = "float16") -> Problem:
    return Problem(Pattern(*shape), dtype, batch_last=False)


def halves(*size: int) -> torch.Tensor:
    return torch.randn(size).half()


def tiles_of(shape: tuple[int, int, int, int]) -> list[Config]:
    return list(exchange16.configs(problem_of(shape), MULTIPROCESSORS))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_fit_and_cover_every_output(shape):
    problem, p = problem_of(shape), Pattern(*shape)
    tiles = tiles_of(shape)
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for c in tiles:
        assert c.shared_bytes(p) <= SHARED_LIMIT
        assert c.registers() <= c.register_limit
        # What multiplying warpgroups take must have been given up: else they wait for ever.
        at_start = min(248, 65_536 // c.threads // 8 * 8)
        assert 128 * (56 + c.groups * c.register_limit) <= at_start * c.threads
        geometry = exchange16.geometry(problem, c)
        assert geometry.max_blocks % c.cluster == 0
        assert geometry.tiles_per_row_tile % c.cluster == 0
        assert geometry.max_blocks <= MULTIPROCESSORS
        columns = c.output_tiles(p) * c.outputs * c.cluster * exchange16.J
        assert c.tiles_of_rows(p) * c.outputs * c.cluster * exchange16.J >= p.out_features
        assert columns >= p.b * c.cluster * exchange16.J


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        (Problem(Pattern(1, 64, 64, 16), "float32", False), "float32"),
        (Problem(Pattern(1, 64, 64, 16), "float16", True), "batch_last"),
        (problem_of((1, 64, 64, 12)), "d = 12"),
        (problem_of((1, 64, 64, 1)), "d = 1"),
        (problem_of((1, 60, 64, 16)), "b = 60"),
        (problem_of((1, 64, 60, 16)), "c = 60"),
    ],
)
def test_what_is_refused(problem, word):
    assert word in exchange16.supports(problem)


@pytest.mark.parametrize("kl", [32, 64])
def test_packing_puts_every_weight_where_stages_read_it(kl):
    a, b, c, d, outputs = 2, 72, 40, 4, 64
    weight = torch.randperm(a * b * c * d).float().view(a, b, c, d)
    packed = exchange16.pack(weight, outputs, kl).flatten()
    tiles, parts = -(-b // outputs), -(-c // kl)
    found = torch.zeros_like(weight)
    assert packed.numel() == a * d * tiles * outputs * parts * kl
    seen = torch.zeros(packed.numel(), dtype=torch.bool)
    draw = random.Random(kl)
    for _ in range(4000):
        i, k, l, j = (draw.randrange(n) for n in (a, b, c, d))
        row, chunk = k % outputs, l % kl // 8
        place = chunk ^ (row % 8 if kl == 64 else row // 2 % 4)
        pair = (i * d + j) // 2
        piece = (pair * tiles + k // outputs) * parts + l // kl
        at = ((piece * 2 + j % 2) * outputs + row) * kl + place * 8 + l % 8
        found[i, k, l, j] = packed[at]
        seen[at] = True
        assert packed[at] == weight[i, k, l, j]
    assert packed.double().sum() == weight.double().sum()  # so all else is zero
    assert seen.any()


def test_packing_takes_any_strides():
    weight = torch.randn(2, 24, 16, 8).half()
    apart = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(exchange16.pack(apart, 64, 32), exchange16.pack(weight, 64, 32))


@pytest.mark.parametrize(
    ("make", "fit"),
    [
        (lambda: halves(6, 64), True),
        (lambda: halves(2, 3, 64), True),
        (lambda: halves(6, 72)[:, :64], True),
        (lambda: halves(6, 68)[:, :64], False),  # rows begin at multiples of 8 bytes only
        (lambda: halves(6, 65)[:, 1:], False),
        (lambda: halves(64, 6).T, False),
    ],
)
def test_rows_that_are_not_aligned_go_to_the_general_kernel(make, fit):
    problem = problem_of((1, 64, 64, 4))
    multiply, otherwise = Recording(problem), Recording(problem)
    config = tiles_of((1, 64, 64, 4))[0]
    launch = ExchangeLauncher(config, multiply, otherwise)
    x, weight = make(), halves(1, 64, 64, 4)
    launch(x, weight)
    used, unused = (multiply, otherwise)[:: 1 if fit else -1]
    assert not unused.calls
    assert used.calls[0][0] is x
    assert (used.calls[0][1] is weight) is not fit
    assert general.supports(problem) is None


def test_more_rows_take_longer():
    for shape in SHAPES:
        config = tiles_of(shape)[0]
        times = [
            exchange16.predicted_us(Pattern(*shape), config, batch, MULTIPROCESSORS)
            for batch in (1, 1000, 25_088, 250_880)
        ]
        assert times == sorted(times)
        assert times[3] == pytest.approx(10 * times[2], rel=0.1)


HGMMA, LOAD_LOCAL = 0x9F0, 0x983  # both operands named by descriptors; what was spilled


def some_tiles() -> list[tuple[Problem, Config]]:
    """The best predicted of every pattern, and one of each shape of sums."""
    chosen: dict[tuple[int, ...], tuple[Problem, Config]] = {}
    for at, shape in enumerate(SHAPES):
        problem = problem_of(shape, ("float16", "bfloat16")[at % 2])
        tiles = tiles_of(shape)
        best = min(
            tiles,
            key=lambda c: exchange16.predicted_us(problem.pattern, c, BATCH, MULTIPROCESSORS),
        )
        for c in (best, *tiles):
            chosen.setdefault((c.groups, c.mt, c.nt, c.kl), (problem, c))
    return list(chosen.values())


def test_no_product_is_lost_and_next_to_nothing_spilled():
    tiles = some_tiles()
    assert len(tiles) > 10
    for problem, c in tiles:
        found = instructions(nvrtc.cubin(exchange16.source(problem, c), "sm_90a").data)
        assert found[HGMMA] == exchange16.J * c.mt * c.kl // 16, (problem.pattern, c)
        # Products that wait for each other for want of registers spill ten times as much.
        assert found[LOAD_LOCAL] <= 24, (problem.pattern, c)


def test_the_order_of_packed_weights_is_the_same_for_tiles_that_share_it():
    config = tiles_of((8, 384, 384, 16))[0]
    problem = problem_of((8, 384, 384, 16))
    other = replace(config, stages=2, slice=config.outputs // 2)
    forms = {
        ExchangeLauncher(c, Recording(problem), Recording(problem))._form for c in (config, other)
    }
    assert len(forms) == 1
