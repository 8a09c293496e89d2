"""The 16-bit family whose blocks share sums: its index logic and its clusters, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from checks import Tiles, assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulationError
from packed_kernels import build, on_demand, without_predicates

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.wgmma16_split import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

wgmma16_split = family_of("wgmma16_split")

# A shape for every fold d; some sums are whole stages of several blocks, some are not.
SHAPES = [
    (2, 32, 256, 1),
    (1, 64, 128, 1),
    (3, 8, 40, 1),
    (1, 64, 128, 2),
    (2, 24, 52, 2),
    (1, 32, 96, 3),
    (2, 64, 64, 4),
    (1, 16, 48, 6),
    (2, 32, 64, 8),
    (1, 16, 96, 12),
    (1, 32, 128, 16),
    (1, 16, 32, 24),
]
OF_TEMPLATE = ("groups_j", "groups_m", "nt", "kl", "blocks", "cluster")
MOST_THREADS = 1024  # of a cluster: the emulator compares each with each


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape, tiles that have most values no earlier case had."""
    tiles = Tiles(OF_TEMPLATE)
    for at, shape in enumerate(SHAPES):
        dtype = list(wgmma16_split.dtypes)[at % 2]
        problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
        candidates = [
            c
            for c in wgmma16_split.configs(problem, gpu(4))
            if c.cluster * c.threads <= MOST_THREADS
        ]
        several = [c for c in candidates if c.cluster > 1]
        tile = tiles.draw(several or candidates)
        least = 2 if tile.cluster == 1 else tile.stages
        yield problem, replace(tile, stages=min(tile.stages, max(least, 3)))


CASES = list(cases())


@pytest.fixture(scope="module")
def kernels(emulator):
    return on_demand(emulator, wgmma16_split, CASES)


def name(at: int) -> str:
    problem, c = CASES[at]
    return f"{problem.pattern}-{c.groups_j}x{c.groups_m}w-{c.nt}n-{c.kl}l-{c.stages}s-{c.cluster}b"


def test_there_are_clusters_of_several_sizes():
    assert {config.cluster for _, config in CASES} >= {1, 2, 4}


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, config = CASES[at]
    for batch in (1, config.rows + 37):
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
        assert torch.equal(y, kernels[at](x, weight, seed=1)), "it depends on the order of threads"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=37, seed=at)


FAULTS = {
    "sums that are read too early": (
        "        keep_sums<Tile>(ring, sums, thread);\n        cluster_barrier();\n",
        "        cluster_barrier();\n        keep_sums<Tile>(ring, sums, thread);\n",
    ),
    "sums that are written while others still read x": (
        "wait_at(Tile::ALL_MULTIPLIERS, Tile::MULTIPLIERS);",
        "",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_detected(emulator, fault):
    """So what blocks tell each other is really checked."""
    cut, instead = FAULTS[fault]
    problem = Problem.of_factor(Pattern(1, 32, 128, 1), "float16", batch_last=False)
    config = Config(1, 1, 1, 4, 64, 2, 1, 1, max_blocks=2**30, cluster=2)

    def edit(header: str, text: str) -> str:
        if header == "wgmma16_split.cuh":
            assert cut in text
            text = text.replace(cut, instead)
        return without_predicates(header, text)

    (kernel,) = build(emulator, wgmma16_split, [(problem, config)], edit)
    x, weight = operands(problem, 64, seed=0)
    with pytest.raises(EmulationError, match=r"race|nothing wrote|under way"):
        kernel(x, weight)
