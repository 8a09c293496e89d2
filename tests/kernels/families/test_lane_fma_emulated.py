"""The family for short sums of many j, run on the CPU by the emulator."""

from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
from checks import Tiles, assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulationError, Instance

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.lane_fma import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

lane_fma = family_of("lane_fma")

# d odd and even, below and above a warp, with a tail of the last window; b and c mostly with tails.
SHAPES = [
    ("float32", (1, 13, 7, 4)),
    ("float32", (2, 5, 24, 33)),
    ("float32", (3, 1, 1, 7)),
    ("float32", (1, 3, 2, 300)),
    ("bfloat16", (1, 21, 8, 158)),
    ("bfloat16", (5, 5, 1, 133)),
    ("float16", (2, 9, 10, 20)),
    ("float16", (1, 8, 52, 9)),
    ("bfloat16", (1, 2, 3, 530)),
]
BATCHES = (1, 2, 7, 33, 70)
CONFIGS_EACH = 2
OF_TEMPLATE = ("slots", "rows", "outputs", "width")


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape, tiles that have most values no earlier case had."""
    tiles = Tiles(OF_TEMPLATE)
    for dtype, shape in SHAPES:
        problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
        candidates = list(lane_fma.configs(problem, gpu(4)))
        for _ in range(CONFIGS_EACH):
            yield problem, tiles.draw(candidates)


CASES = list(cases())


def instance(problem: Problem, config: Config) -> Instance:
    source = lane_fma.source(problem, config)
    return Instance(problem, source, lane_fma.geometry(problem, config))


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.on_demand([instance(*case) for case in CASES])


def name(at: int) -> str:
    problem, c = CASES[at]
    return f"{problem.pattern}-{problem.dtype}-{c.slots}x{c.rows}x{c.outputs}x{c.width}"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, _ = CASES[at]
    for batch in BATCHES:
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
    assert torch.equal(y, kernels[at](x, weight, seed=1)), "it depends on the order of threads"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_any_strides_and_addresses(kernels, at):
    problem, _ = CASES[at]
    x, weight = operands(problem, 33, seed=at)
    expected = kernels[at](x, weight)
    wide = torch.full((33, x.shape[1] + 3), torch.nan, dtype=x.dtype)
    wide[:, 1:-2] = x
    assert torch.equal(kernels[at](wide[:, 1:-2], weight), expected)
    assert torch.equal(kernels[at](x.T.contiguous().T, weight), expected)
    transposed = weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert torch.equal(kernels[at](x, transposed), expected)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=BATCHES[-1], seed=at)


def test_the_cases_differ_in_every_template_argument():
    for field in OF_TEMPLATE:
        assert len({asdict(config)[field] for _, config in CASES}) >= 2, field


FAULTS = {
    "rows beyond the batch": ("(r < rows ? r : 0) * GROUPS", "r * GROUPS", "outside"),
    "j beyond d": ("j >= P::D || ", "", "outside"),
    "the last outputs left out": (
        "if constexpr (WHOLE < P::B)",
        "if constexpr (WHOLE < 0)",
        "never written",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds(emulator, fault):
    before, after, message = FAULTS[fault]
    problem = Problem.of_factor(Pattern(1, 5, 4, 100), "float32", batch_last=False)
    config = Config(256, 64, 2, 2, 1)

    def edit(header: str, text: str) -> str:
        if header != "lane_fma.cuh":
            return text
        assert before in text
        return text.replace(before, after)

    (kernel,) = emulator.build([instance(problem, config)], edit)
    x, weight = operands(problem, 3, seed=0)
    with pytest.raises(EmulationError, match=message):
        kernel(x, weight, seed=1)
