"""The small-batch family with bulk copies: its ring, its shared x and its index logic, emulated."""

import random
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
from checks import assert_close_to_float64, operands
from cuda_emulator import EmulationError, Instance
from test_lanes32_wgmma_emulated import without_predicates

from ksopt.kernels import small_batch_ring
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern

# A shape for every fold d; c is a multiple of the unit of l, b mostly has a tail (no multiple of 8).
SHAPES = [
    (2, 60, 64, 1),
    (1, 72, 160, 1),
    (8, 43, 32, 1),
    (2, 62, 32, 2),
    (1, 40, 64, 3),
    (2, 46, 32, 4),
    (4, 21, 48, 6),
    (2, 22, 32, 12),
    (2, 45, 32, 8),
    (1, 93, 48, 8),
    (1, 43, 32, 16),
    (1, 31, 16, 24),
    (1, 17, 32, 32),
]
BATCHES = (1, 7, 16, 33, 64)
CONFIGS_EACH = 3
OF_TEMPLATE = (
    *("warps_j", "warps_m", "warps_n", "warps_l", "mt", "nt"),
    *("units", "stages", "share", "group_blocks"),
)
MOST_THREADS = 1000  # of a cluster: the emulator compares each with each


def cases() -> Iterator[tuple[Problem, small_batch_ring.Config]]:
    """For each shape, random tiles that have most values no earlier case had."""
    draw = random.Random(0)
    seen: set[tuple[str, int]] = set()

    def values(config: small_batch_ring.Config) -> set[tuple[str, int]]:
        return {(field, asdict(config)[field]) for field in OF_TEMPLATE}

    for at, shape in enumerate(SHAPES):
        for turn in range(CONFIGS_EACH):
            dtype = list(small_batch_ring.DTYPES)[(at + turn) % 2]
            problem = Problem(Pattern(*shape), dtype, batch_last=False)
            p = problem.pattern
            candidates = [
                c
                for c in small_batch_ring.configs(problem, 4)
                if c.share * c.threads <= MOST_THREADS
                and c.share * (c.shared_bytes(p) + 1024) <= 256 * 1024
            ]
            wanted = [c for c in candidates if (c.share > 1, c.passes(p) > c.stages)[turn % 2]]
            candidates = wanted or candidates
            sample = draw.sample(candidates, min(len(candidates), 40))
            config = max(sample, key=lambda config: len(values(config) - seen))
            seen |= values(config)
            yield problem, config


CASES = list(cases())


def instance(problem: Problem, config: small_batch_ring.Config) -> Instance:
    source = small_batch_ring.source(problem, config)
    return Instance(problem, source, small_batch_ring.geometry(problem, config))


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.build([instance(*case) for case in CASES], without_predicates)


def name(at: int) -> str:
    problem, c = CASES[at]
    warps = f"{c.warps_j}x{c.warps_m}x{c.warps_n}x{c.warps_l}w"
    ring = f"{c.passes(problem.pattern)}p-{c.stages}s-{c.share}b"
    return f"{problem.pattern}-{problem.dtype}-{warps}-{c.mt}x{c.nt}-{c.units}u-{ring}"


@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, _ = CASES[at]
    for batch in BATCHES:
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
    assert torch.equal(y, kernels[at](x, weight, seed=1)), "it depends on the order of threads"


def test_the_cases_have_rings_that_turn_and_clusters_of_every_size():
    assert {config.share for _, config in CASES} == {1, 2, 4}
    assert any(c.passes(problem.pattern) > c.stages > 1 for problem, c in CASES)
    assert any(c.passes(problem.pattern) == 1 for problem, c in CASES)


def test_the_cases_differ_in_every_template_argument():
    for field in OF_TEMPLATE:
        assert len({asdict(config)[field] for _, config in CASES}) >= 2, field
