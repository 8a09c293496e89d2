"""The fp32 tensor-core family's index logic and accuracy, run on the CPU by the emulator."""

from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
from checks import Tiles, assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import Instance

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.mma_tf32x3 import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

mma_tf32x3 = family_of("mma_tf32x3")

# A shape for every class of d, whose c has a tail: it is no multiple of the unit of l (8 or 16).
SHAPES = [
    (2, 24, 20, 1),
    (1, 48, 88, 1),
    (2, 24, 18, 2),
    (1, 32, 42, 2),
    (1, 48, 20, 3),
    (2, 24, 36, 3),
    (2, 24, 10, 6),
    (1, 16, 22, 6),
    (2, 48, 9, 4),
    (1, 64, 45, 4),
    (1, 32, 17, 8),
    (2, 24, 12, 12),
    (1, 48, 33, 16),
    (2, 16, 5, 20),
    (2, 44, 20, 1),  # from here on b has no divisors for wide tiles
    (1, 26, 18, 2),
    (2, 20, 36, 3),
    (1, 29, 9, 4),
    (2, 19, 17, 8),
    (3, 13, 20, 1),  # groups' results begin at multiples of 4 bytes, of 8, of 4, and of 8
    (2, 11, 18, 2),
    (2, 23, 36, 3),
    (2, 13, 22, 6),
]
BATCHES = (1, 7, 17)
CONFIGS_EACH = 2
OF_TEMPLATE = ("warps_j", "warps_m", "warps_n", "mt", "nt", "kl", "stages", "resident")


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape, tiles that have most values no earlier case had."""
    tiles = Tiles(OF_TEMPLATE)
    for shape in SHAPES:
        problem = Problem.of_factor(Pattern(*shape), "float32", batch_last=False)
        candidates = list(mma_tf32x3.configs(problem, gpu(4)))
        for turn in range(CONFIGS_EACH):
            # Where several warps may share the j, one turn each.
            width = 1 + turn if problem.pattern.d % 8 == 0 else 1
            fitting = [config for config in candidates if config.warps_j == width]
            yield problem, tiles.draw(fitting)


CASES = list(cases())


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.on_demand(
        [
            Instance(
                problem, mma_tf32x3.source(problem, config), mma_tf32x3.geometry(problem, config)
            )
            for problem, config in CASES
        ]
    )


def name(at: int) -> str:
    problem, c = CASES[at]
    where = "resident" if c.resident else "streamed"
    tile = f"{c.warps_j}x{c.warps_m}x{c.warps_n}w-{c.mt}x{c.nt}-{c.kl}l-{c.stages}s-{where}"
    return f"{problem.pattern}-{tile}"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, config = CASES[at]
    for batch in (*BATCHES, 2 * config.rows + 5):
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
        assert torch.equal(y, kernels[at](x, weight, seed=1))


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=17, seed=at)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(0, len(CASES), 3), ids=name)
def test_blocks_walk_over_many_tiles(kernels, at):
    problem, config = CASES[at]
    x, weight = operands(problem, 5 * config.rows + 3, seed=at)
    columns = config.columns(problem.pattern)
    results = []
    for persistent_ctas in (1, 2, 4):
        config = replace(config, max_blocks=persistent_ctas * columns)
        kernel = kernels[at].launched_as(mma_tf32x3.geometry(problem, config))
        results.append(kernel(x, weight, seed=persistent_ctas))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(0, len(CASES), 4), ids=name)
def test_what_tf32_cannot_hold_is_as_in_fp32(kernels, at):
    problem, _ = CASES[at]
    x, weight = operands(problem, 7, seed=at)
    features = problem.pattern.in_features
    largest = torch.finfo(torch.float32).max
    for row, value in enumerate((torch.inf, -torch.inf, torch.nan, largest, -largest, 1e-40)):
        x[row, row % features] = value
    weight.clamp_(-0.9, 0.9)
    weight[0, 0, 0, 0] = 0.5  # its rest is zero, and infinity times zero is NaN
    y = kernels[at](x, weight)
    expected = ks_reference(x, weight)
    assert torch.isinf(expected).any()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_the_cases_differ_in_every_template_argument():
    for field in OF_TEMPLATE:
        assert len({asdict(config)[field] for _, config in CASES}) >= 2, field


def test_one_product_is_tf32(emulator):
    problem, config = CASES[0]
    problem = replace(problem, exact=False)
    source = mma_tf32x3.source(problem, config)
    (kernel,) = emulator.build([Instance(problem, source, mma_tf32x3.geometry(problem, config))])
    x, weight = operands(problem, 17, seed=0)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        bits = values.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()

    truth = ks_reference(rounded(x), rounded(weight))
    torch.testing.assert_close(kernel(x, weight).double(), truth, rtol=1e-5, atol=1e-5)
