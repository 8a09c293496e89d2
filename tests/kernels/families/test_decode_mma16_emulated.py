"""The small-batch family's index logic and its clusters, run on the CPU by the emulator."""

from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
from checks import Tiles, assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulationError, Instance

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.decode_mma16 import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

decode_mma16 = family_of("decode_mma16")

# A shape for every class of d, whose c has a tail (no multiple of the unit of l, 16 or 32) and
# whose b mostly has one too (no multiple of 8).
SHAPES = [
    (2, 20, 48, 1),
    (1, 72, 168, 1),
    (8, 3, 264, 1),
    (2, 22, 20, 2),
    (4, 13, 84, 2),
    (1, 40, 40, 3),
    (8, 11, 72, 3),
    (2, 46, 18, 4),
    (1, 90, 90, 4),
    (4, 13, 20, 6),
    (4, 22, 18, 12),
    (2, 45, 21, 8),
    (1, 61, 85, 8),
    (1, 43, 33, 16),
    (2, 22, 18, 24),
    (1, 31, 5, 40),
    (1, 5, 40, 64),
    (1, 12, 264, 2),
    (1, 24, 136, 8),
    (1, 13, 150, 16),
    (3, 9, 64, 1),  # from here on rows of y begin at odd addresses
    (1, 37, 40, 2),
    (1, 13, 24, 3),
    (3, 21, 22, 4),
]
BATCHES = (1, 2, 7, 16, 33, 64)
CONFIGS_EACH = 2
OF_TEMPLATE = ("warps_j", "warps_m", "warps_n", "warps_l", "mt", "nt", "units", "cluster")
MOST_THREADS = 1024  # of a cluster: the emulator compares each with each


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape, tiles that have most values no earlier case had."""
    tiles = Tiles(OF_TEMPLATE)
    for at, shape in enumerate(SHAPES):
        for turn in range(CONFIGS_EACH):
            dtype = list(decode_mma16.dtypes)[(at + turn) % 2]
            problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
            candidates = [
                c
                for c in decode_mma16.configs(problem, gpu(4))
                if c.cluster * c.threads <= MOST_THREADS
                and c.cluster * c.shared_bytes(problem.pattern) <= 256 * 1024
            ]
            several = [c for c in candidates if c.cluster > 1]
            candidates = several if several and turn == 1 else candidates
            yield problem, tiles.draw(candidates)


CASES = list(cases())


def instance(problem: Problem, config: Config) -> Instance:
    source = decode_mma16.source(problem, config)
    return Instance(problem, source, decode_mma16.geometry(problem, config))


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.on_demand([instance(*case) for case in CASES])


def name(at: int) -> str:
    problem, c = CASES[at]
    warps = f"{c.warps_j}x{c.warps_m}x{c.warps_n}x{c.warps_l}w"
    return f"{problem.pattern}-{problem.dtype}-{warps}-{c.mt}x{c.nt}-{c.units}u-{c.cluster}b"


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


def test_there_are_clusters_of_every_size():
    assert {config.cluster for _, config in CASES} >= {1, 2, 4, 8}


def test_the_cases_differ_in_every_template_argument():
    for field in OF_TEMPLATE:
        assert len({asdict(config)[field] for _, config in CASES}) >= 2, field


def test_operands_that_are_not_aligned_are_an_error_of_the_caller(kernels):
    problem, _ = CASES[0]
    x, weight = operands(problem, 17, seed=0)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    with pytest.raises(EmulationError, match="multiple of its size"):
        kernels[0](shifted, weight)


FAULTS = {
    "no barrier before the products": (
        "cp_async_wait_group<0>();\n  __syncthreads();",
        "cp_async_wait_group<0>();",
        "race|nothing wrote|under way",
    ),
    "no wait for x": ("cp_async_wait_group<0>();\n", "\n", "under way"),
    "sums written over x that is still read": (
        "__syncthreads();  // all have read x",
        "// all have read x",
        "race",
    ),
    "no barrier before the sums are added": (
        "gather_sums<Tile>(parts, sums, rows, place);\n  __syncthreads();",
        "gather_sums<Tile>(parts, sums, rows, place);",
        "race|nothing wrote",
    ),
    "rows beyond the batch": (
        "rows_inside<Tile::BM>(arguments.batch - row0)",
        "Tile::BM",
        "outside",
    ),
    "outputs beyond b": ("k < outputs && offset", "offset", "outside"),
}


IN_CLUSTERS = {
    "no barrier before the other blocks' sums are read": (
        "    cluster_barrier();\n    for",
        "    for",
        "race|nothing wrote|have ended",
    ),
    "a block that ends while its sums are read": (
        "    cluster_barrier();  // none",
        "    // none",
        "have ended",
    ),
    "a block that adds all of the sums": (
        "int e = rank * THREADS + thread; e < rows * FOURS; e += CLUSTER * THREADS",
        "int e = thread; e < rows * FOURS; e += THREADS",
        "written twice",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS | IN_CLUSTERS)
def test_the_emulator_finds(emulator, fault):
    before, after, message = (FAULTS | IN_CLUSTERS)[fault]
    # A single group: what lies beyond b lies outside the weight.
    problem = Problem.of_factor(Pattern(1, 31, 40, 40), "float16", batch_last=False)
    cluster = 2 if fault in IN_CLUSTERS else 1
    config = Config(1, 1, 2, 2, 1, 2, 1, cluster, blocks=1)

    def edit(header: str, text: str) -> str:
        if header != "decode_mma16.cuh":
            return text
        assert before in text
        return text.replace(before, after)

    (kernel,) = emulator.build([instance(problem, config)], edit)
    x, weight = operands(problem, 13, seed=0)
    with pytest.raises(EmulationError, match=message):
        kernel(x, weight, seed=1)
