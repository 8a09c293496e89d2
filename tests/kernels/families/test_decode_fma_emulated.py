"""The small-batch family in ordinary arithmetic, run on the CPU by the emulator."""

from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
from checks import Tiles, assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulationError, Instance

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.decode_fma import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

decode_fma = family_of("decode_fma")

# d below, above, equal to, prime to a chunk of 4 or 8 elements; c and b mostly with tails.
SHAPES = [
    ("float32", (2, 18, 52, 1)),
    ("float32", (4, 5, 26, 2)),
    ("float32", (4, 7, 24, 3)),
    ("float32", (1, 13, 37, 4)),
    ("float32", (4, 9, 20, 5)),
    ("float32", (2, 6, 14, 6)),
    ("float32", (1, 11, 9, 48)),
    ("float32", (1, 5, 3, 256)),
    ("bfloat16", (8, 3, 72, 1)),
    ("float16", (8, 3, 40, 5)),
    ("bfloat16", (2, 10, 20, 10)),
    ("float16", (2, 9, 10, 20)),
    ("float16", (8, 7, 16, 7)),
    ("bfloat16", (1, 5, 33, 64)),
    ("float32", (3, 9, 64, 1)),  # from here on rows of y begin at odd addresses
    ("bfloat16", (1, 13, 40, 1)),
    ("float16", (1, 7, 24, 3)),
]
BATCHES = (1, 2, 7, 16, 33)
CONFIGS_EACH = 2
OF_TEMPLATE = ("jw", "lt", "kt", "kr", "m", "units")


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape, tiles that have most values no earlier case had."""
    tiles = Tiles(OF_TEMPLATE)
    for dtype, shape in SHAPES:
        problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
        candidates = list(decode_fma.configs(problem, gpu(4)))
        for _ in range(CONFIGS_EACH):
            yield problem, tiles.draw(candidates)


CASES = list(cases())


def instance(problem: Problem, config: Config) -> Instance:
    source = decode_fma.source(problem, config)
    return Instance(problem, source, decode_fma.geometry(problem, config))


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.on_demand([instance(*case) for case in CASES])


def name(at: int) -> str:
    problem, c = CASES[at]
    tile = f"{c.jw}x{c.lt}x{c.kt}t-{c.m}x{c.kr}-{c.units}u"
    return f"{problem.pattern}-{problem.dtype}-{tile}"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, _ = CASES[at]
    for batch in BATCHES:
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
    assert torch.equal(y, kernels[at](x, weight, seed=1)), "it depends on the order of threads"
    assert torch.equal(y, kernels[at](x, weight, settled=True))


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=BATCHES[-1], seed=at)


def test_the_cases_differ_in_every_template_argument():
    for field in OF_TEMPLATE:
        assert len({asdict(config)[field] for _, config in CASES}) >= 2, field


FAULTS = {
    "no barrier before the products": (
        "cp_async_wait_group<0>();\n  __syncthreads();",
        "cp_async_wait_group<0>();",
        "race|nothing wrote|under way",
    ),
    "sums written over x that is still read": (
        "__syncthreads();  // all have read x",
        "// all have read x",
        "race",
    ),
    "no barrier before sums of groups are added": (
        "    }\n    __syncthreads();\n  }",
        "    }\n  }",
        "race",
    ),
    "rows beyond the batch": ("rows_inside<M>(arguments.batch - row0)", "M", "outside"),
    "outputs beyond b": ("&& first_k + r < outputs", "", "outside"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds(emulator, fault):
    before, after, message = FAULTS[fault]
    # A single group: what lies beyond b lies outside the weight.
    problem = Problem.of_factor(Pattern(1, 13, 64, 4), "float32", batch_last=False)
    config = Config(1, 32, 2, 4, 4, 1, vector=4)

    def edit(header: str, text: str) -> str:
        if header != "decode_fma.cuh":
            return text
        assert before in text
        return text.replace(before, after)

    (kernel,) = emulator.build([instance(problem, config)], edit)
    x, weight = operands(problem, 3, seed=0)
    with pytest.raises(EmulationError, match=message):
        kernel(x, weight, seed=1)
