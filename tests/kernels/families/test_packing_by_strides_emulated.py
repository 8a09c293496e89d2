"""Kernels that pack a weight as it is stored, whatever its strides, run on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import gpu
from packed_kernels import instances, without_predicates
from torch import Tensor

from ksopt.kernels.families.base import families, family_of
from ksopt.kernels.families.common.packed_weight import PackedFamily
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

SHAPES = {
    # All layouts of j in the vector lanes; tails of l and of outputs; dimensions of size 1.
    "wgmma16_streamed": [
        *((1, 32, 24, 1), (2, 36, 20, 2), (2, 24, 40, 3), (1, 40, 22, 4), (2, 20, 24, 6)),
        *((3, 33, 33, 8), (1, 16, 18, 12), (2, 29, 17, 16), (1, 48, 16, 24), (2, 8, 1, 32)),
    ],
    "wgmma_tf32x3": [(2, 40, 12, 1), (2, 24, 20, 2), (1, 24, 20, 3), (2, 32, 9, 8), (1, 48, 20, 6)],
    "batch_last_wgmma_tf32x3": [(2, 24, 20, 1), (1, 40, 24, 3)],
    "gather_mma_packed": [(2, 7, 9, 1), (1, 10, 13, 5), (3, 1, 6, 2)],
}
DTYPES = {
    "wgmma16_streamed": ("float16", "bfloat16"),
    "gather_mma_packed": ("bfloat16", "float32"),
}


def problems() -> Iterator[tuple[Any, Problem, Any]]:
    """Families, and problems with the tile of each that computes most outputs that do not exist."""
    for name, shapes in SHAPES.items():
        family = family_of(name)
        dtypes = DTYPES.get(name, ("float32",))
        for at, shape in enumerate(shapes):
            dtype = dtypes[at % len(dtypes)]
            problem = Problem.of_factor(Pattern(*shape), dtype, family.layout == "batch_last")
            tiles = list(family.configs(problem, gpu(4)))
            yield family, problem, max(tiles, key=lambda one: -problem.pattern.b % one.outputs)


CASES = list(problems())


def transposed(weight: Tensor) -> Tensor:
    """As the gradient of an input multiplies by it."""
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


def by_groups(weight: Tensor) -> Tensor:
    return weight.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


def at_an_odd_address(weight: Tensor) -> Tensor:
    return torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)


def transposed_at_an_address_of_words(weight: Tensor) -> Tensor:
    """Where pieces of two elements may be loaded, and none of more."""
    memory = torch.cat([weight.new_zeros(2), weight.transpose(1, 2).flatten()])
    a, b, c, d = weight.shape
    return memory[2:].view(a, c, b, d).transpose(1, 2)


def part_of_a_larger_one(weight: Tensor) -> Tensor:
    larger = weight.new_full([size + 3 for size in weight.shape], torch.nan)
    part = larger[2:-1, 1:-2, 3:, 1:-2]
    return part.copy_(weight)


def transposed_part_of_a_larger_one(weight: Tensor) -> Tensor:
    """All j of a larger weight: pieces may be loaded."""
    a, b, c, d = weight.shape
    part = weight.new_full((a + 1, c + 2, b + 1, d), torch.nan)[1:, 1:-1, :-1].transpose(1, 2)
    return part.copy_(weight)


def the_same_for_all_outputs(weight: Tensor) -> Tensor:
    return weight[:, :1].expand_as(weight)


STORED = [
    *(transposed, by_groups, at_an_odd_address, transposed_at_an_address_of_words),
    *(part_of_a_larger_one, transposed_part_of_a_larger_one, the_same_for_all_outputs),
]


@pytest.fixture(scope="module")
def kernels(emulator):
    # A family at a time: their headers' names are their own.
    groups = [[case for case in CASES if case[0].name == name] for name in SHAPES]
    builds = (
        emulator.build([instances(*case)[0] for case in group], without_predicates)
        for group in groups
    )
    return list(itertools.chain.from_iterable(builds))


def name(at: int) -> str:
    family, problem, _ = CASES[at]
    return f"{family.name}-{problem.pattern}-{problem.dtype}"


@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_a_weight_is_packed_as_its_contiguous_copy_is(kernels, at):
    _, problem, _ = CASES[at]
    generator = torch.Generator().manual_seed(at)
    values = torch.randn(problem.pattern.weight_shape, generator=generator)
    values = values.to(getattr(torch, problem.dtype))
    bits = torch.int32 if values.element_size() == 4 else torch.int16
    for seed, store in enumerate(STORED):
        weight = store(values)
        expected = kernels[at].packed(weight.clone(memory_format=torch.contiguous_format))
        actual = kernels[at].packed(weight, seed)
        assert torch.equal(actual.view(bits), expected.view(bits)), store.__name__


def test_every_family_that_packs_by_a_kernel_is_here():
    assert {one.name for one in families() if isinstance(one, PackedFamily)} == set(SHAPES)
