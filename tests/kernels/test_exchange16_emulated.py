"""16-bit products over clusters: index logic and hand-over, run on the CPU by the emulator."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from checks import assert_close_to_float64, operands
from cuda_emulator import EmulatedKernel, EmulationError, Emulator, Instance
from torch import Tensor

from ksopt.kernels import exchange16
from ksopt.kernels.exchange16 import Config
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern

# Every size of cluster; b and c end within a tile and within a stage in most. The emulator has 128
# KB for each of 8 blocks. A tile: cluster, warpgroups, mt, nt, kl, stages, raw stages, slice,
# clusters.
CASES = {
    ((2, 72, 40, 4), "float16"): Config(2, 2, 1, 12, 32, 3, 3, 96, 2),
    ((1, 136, 72, 4), "bfloat16"): Config(2, 1, 2, 8, 64, 2, 3, 32, 1),
    ((2, 56, 72, 8), "float16"): Config(4, 1, 1, 8, 32, 2, 3, 64, 2),
    ((1, 104, 40, 8), "bfloat16"): Config(4, 3, 1, 12, 32, 2, 2, 96, 1),
    ((1, 104, 48, 24), "bfloat16"): Config(4, 1, 1, 8, 64, 2, 2, 32, 1),
    ((1, 72, 40, 16), "float16"): Config(8, 1, 1, 8, 32, 2, 2, 64, 1),
    ((1, 8, 96, 32), "float16"): Config(8, 1, 1, 8, 64, 2, 2, 64, 2),
    ((1, 64, 72, 64), "bfloat16"): Config(8, 1, 1, 8, 32, 2, 3, 32, 2),
}


def problem_of(case: tuple[tuple[int, int, int, int], str]) -> Problem:
    shape, dtype = case
    return Problem(Pattern(*shape), dtype, batch_last=False)


def without_predicates(name: str, text: str) -> str:
    """A header, with calls of the emulator instead of what needs a PTX predicate."""
    wait = r"uint32 over = 0;.*?memory\"\);\n\s*\}"
    if name in ("pipeline.cuh", "cluster.cuh"):
        barrier = "state" if name == "pipeline.cuh" else "barrier.state"
        call = f"emulate::wait_for_phase(shared_address(&{barrier}), unsigned(parity));"
        text, found = re.subn(wait, call, text, flags=re.DOTALL)
        assert found == 1
    if name == "wgmma16_rows.cuh":
        text = text[: text.index("#define")] + (
            "template <typename T> constexpr auto WIDEN = emulate::ptx::cvt_f32_f16;\n"
            "template <> constexpr auto WIDEN<BFloat16> = emulate::ptx::widen_bf16;\n"
            "template <typename T, int N> void multiply_warpgroup_rows(float (&sums)[N / 2],"
            " uint64 a, uint64 b, int accumulate) {\n"
            "  emulate::ptx::multiply_warpgroup_rows<N, WIDEN<T>>(sums, a, b, accumulate);\n}\n"
        )
    return text


@dataclass(frozen=True)
class Kernel:
    """As `exchange16.ExchangeLauncher`, emulated."""

    config: Config
    multiply: EmulatedKernel

    def __call__(self, x: Tensor, weight: Tensor, seed: int = 0) -> Tensor:
        packed = exchange16.pack(weight, self.config.outputs, self.config.kl)
        return self.multiply(x, packed, seed)


def build(
    emulator: Emulator,
    made: list[tuple[Problem, Config]],
    edit: Callable[[str, str], str] = without_predicates,
) -> list[Kernel]:
    instances = [Instance(p, exchange16.source(p, c), exchange16.geometry(p, c)) for p, c in made]
    built = emulator.build(instances, edit)
    return [Kernel(c, one) for (_, c), one in zip(made, built, strict=True)]


@pytest.fixture(scope="module")
def kernels(emulator):
    made = [(problem_of(case), config) for case, config in CASES.items()]
    return dict(zip(CASES, build(emulator, made), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(kernels, case):
    problem, config = problem_of(case), CASES[case]
    for batch in (1, config.rows + 5):
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[case](x, weight)
        assert_close_to_float64(y, x, weight, problem)


@pytest.mark.parametrize("case", [case for case, c in CASES.items() if c.cluster < 8], ids=str)
def test_the_order_of_threads_and_blocks_does_not_matter(kernels, case):
    """And clusters walk over several tiles each."""
    problem, config = problem_of(case), CASES[case]
    x, weight = operands(problem, 2 * config.rows + 3, seed=7)
    first = kernels[case](x, weight)
    assert_close_to_float64(first, x, weight, problem)
    alone = exchange16.geometry(problem, replace(config, clusters=1))
    kernel = replace(kernels[case], multiply=kernels[case].multiply.launched_as(alone))
    for seed in (1, 2):
        assert torch.equal(kernel(x, weight, seed), first)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ("wait_for_cluster(barriers.full[slot], parity);", "race|nothing wrote|under way"),
        ("wait_for_cluster(barriers.empty[slot], parity);", "race|under way|only waits"),
        ("wait_for_cluster(barriers.taken, phase ^ 1);", "race"),
        ("wait_for_cluster(barriers.shown, phase);", "race|nothing wrote"),
        ("wait_at(Tile::ALL_LOADERS, Tile::LOADERS);", "race|under way|nothing wrote"),
        ("if (part > 0) give_back(before);", "for ever"),
        ("  cluster_barrier();  // none may end", "have ended"),
    ],
)
def test_a_missing_wait_is_found(emulator, cut, message):
    """So the hand-over of stages and of slices between blocks is really checked."""
    case = ((2, 72, 40, 4), "float16")
    problem, config = problem_of(case), CASES[case]

    def edit(header: str, text: str) -> str:
        if header == "exchange16.cuh":
            assert text.count(cut) == 1
            text = text.replace(cut, "// none may end" if "none may end" in cut else "")
        return without_predicates(header, text)

    (kernel,) = build(emulator, [(problem, replace(config, clusters=1))], edit)
    x, weight = operands(problem, 4 * config.rows, seed=0)

    def in_some_orders():
        for seed in range(4):
            kernel(x, weight, seed)

    with pytest.raises(EmulationError, match=message):
        in_some_orders()
