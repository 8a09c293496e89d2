"""The epilogues of factors' kernels, run on the CPU by the emulator."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import assert_epilogue_is_right, gpu, operands, random_after
from cuda_emulator import EmulationError, Instance
from packed_kernels import PackedKernel, instances, without_predicates

from ksopt.epilogue import ACTIVATIONS, with_epilogue
from ksopt.kernels.families.base import families, family_of
from ksopt.kernels.families.common.packed_weight import PackedFamily
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

# Tails of b and c, results at odd addresses, and every way in which results are stored.
SHAPES = {
    "decode_mma16": [
        *((1, 21, 264, 1), (8, 3, 264, 1), (1, 12, 264, 2), (2, 20, 48, 1), (3, 9, 64, 1)),
        *((2, 22, 20, 2), (1, 37, 40, 2), (8, 11, 72, 3), (3, 21, 22, 4), (4, 22, 18, 12)),
        *((2, 45, 21, 8), (1, 43, 33, 16), (2, 22, 18, 24)),
    ],
    "decode_fma": [
        *((2, 18, 52, 1), (3, 9, 64, 1), (4, 7, 24, 3), (4, 9, 20, 5), (1, 11, 9, 48)),
        (8, 7, 16, 7),
    ],
    "mma16": [
        *((1, 32, 20, 2), (2, 37, 24, 3), (3, 21, 22, 4), (2, 16, 20, 6), (3, 31, 40, 1)),
        *((1, 33, 20, 8), (1, 16, 18, 12), (2, 29, 17, 16)),
    ],
    "wgmma16": [
        *((1, 32, 20, 2), (2, 37, 24, 3), (3, 21, 22, 4), (2, 16, 20, 6), (1, 33, 20, 8)),
        (2, 29, 17, 16),
    ],
    "wgmma16_streamed": [(2, 13, 20, 2), (1, 40, 22, 4), (3, 32, 33, 8), (1, 16, 18, 12)],
    "mma_tf32x3": [
        *((3, 31, 36, 1), (2, 13, 34, 2), (2, 37, 36, 3), (1, 22, 33, 4), (2, 11, 34, 6)),
        (1, 21, 33, 8),
    ],
    "wgmma_tf32x3": [
        *((3, 31, 36, 1), (2, 13, 34, 2), (2, 37, 36, 3), (1, 22, 33, 4), (2, 11, 34, 6)),
        *((1, 21, 33, 8), (1, 8, 40, 12), (2, 17, 32, 20)),
    ],
}
BATCHES = (1, 13, 67)
# Each activation, with a bias or a residual, neither and both in turn; and those of results in
# float32, which have no residual.
EPILOGUES = [
    Epilogue(bias, activation, residual)
    for activation, (bias, residual) in itertools.product(
        ACTIVATIONS, ((True, False), (False, True), (True, True), (False, False))
    )
    if bias or residual or activation != "none"
]
CAST = [
    Epilogue(bias, activation, in_float32=True)
    for activation, bias in itertools.product(ACTIVATIONS, (True, False))
]


def cases() -> Iterator[tuple[Any, Problem, Any]]:
    """For each shape tiles of every size of clusters, with the next epilogue each."""
    draw, after, cast = random.Random(0), itertools.cycle(EPILOGUES), itertools.cycle(CAST)
    for name, shapes in SHAPES.items():
        family = family_of(name)
        for at, shape in enumerate(shapes):
            dtype = list(family.dtypes)[at % len(family.dtypes)]
            problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
            tiles = list(family.configs(problem, gpu(4)))
            small = [c for c in tiles if getattr(c, "cluster", 1) * c.threads <= 1024]
            several = [c for c in small if getattr(c, "cluster", 1) > 1]
            for few in (small, several or small):
                yield family, replace(problem, epilogue=next(after)), draw.choice(few)
    for name, shapes in SHAPES.items():
        family = family_of(name)
        for at, shape in enumerate(shapes if family.takes_float32_results else ()):
            problem = Problem.of_factor(Pattern(*shape), ("float16", "bfloat16")[at % 2], False)
            if family.unsupported_reason(problem, gpu(4)) is not None:
                continue
            tiles = list(family.configs(problem, gpu(4)))
            small = [c for c in tiles if getattr(c, "cluster", 1) * c.threads <= 1024]
            yield family, replace(problem, epilogue=next(cast)), draw.choice(small)


CASES = list(cases())


def built(emulator, group, edit=without_predicates) -> list[Any]:
    kernels = []
    for family, problem, tile in group:
        if isinstance(family, PackedFamily):
            kernels.append(PackedKernel(*emulator.build(instances(family, problem, tile), edit)))
        else:
            source, geometry = family.source(problem, tile), family.geometry(problem, tile)
            kernels += emulator.build([Instance(problem, source, geometry)], edit)
    return kernels


def name(at: int) -> str:
    family, problem, _ = CASES[at]
    return f"{family.name}-{problem.pattern}-{'-'.join(problem.epilogue.names)}"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(emulator, at):
    (kernel,) = built(emulator, [CASES[at]])
    _, problem, _ = CASES[at]
    for batch in BATCHES:
        x, weight = operands(problem, batch, seed=batch)
        after = random_after(problem, batch, seed=batch)
        y = kernel.with_epilogue(x, weight, after)
        assert_epilogue_is_right(y, x, weight, after)
    assert torch.equal(y, kernel.with_epilogue(x, weight, after, seed=1))


def test_every_family_that_takes_epilogues_is_here_with_all_of_them():
    assert {one.name for one in families() if one.takes_epilogues} == set(SHAPES)
    assert {problem.epilogue for _, problem, _ in CASES} == {*EPILOGUES, *CAST}
    clusters = {getattr(tile, "cluster", 1) for _, _, tile in CASES}
    assert clusters >= {1, 2, 4}


@pytest.mark.parametrize("at", [1, len(SHAPES["decode_mma16"]) * 2 + 2])
def test_summands_at_other_addresses_are_not_taken(emulator, at):
    family, problem, tile = CASES[at]
    problem = replace(problem, epilogue=Epilogue(True, "none", True))
    (kernel,) = built(emulator, [(family, problem, tile)])
    x, weight = operands(problem, 5, seed=0)
    after = random_after(problem, 5, seed=0)
    shifted = torch.empty(after.bias.numel() + 1, dtype=x.dtype)[1:].copy_(after.bias)
    turned = after.residual.T.contiguous().T
    assert kernel.with_epilogue(x, weight, after) is not None
    assert kernel.with_epilogue(x, weight, replace(after, bias=shifted)) is None
    assert kernel.with_epilogue(x, weight, replace(after, residual=turned)) is None


AFTER = "common/factor_epilogue.cuh"
OUTSIDE = "if (row >= place.rows || output >= place.outputs) return 0.0f;"
# The family that is run, the header, what is replaced by what, and what is noticed.
FAULTS = {
    "a bias beyond b": (
        *("decode_mma16", "decode_mma16.cuh", "if (f / Tile::JC < outputs) words", "words"),
        "outside|wrong",
    ),
    "a residual beyond the batch": ("wgmma16", AFTER, OUTSIDE, "", "outside"),
    "a residual beyond the batch by mma16": ("mma16", AFTER, OUTSIDE, "", "outside"),
    "a residual beyond the batch in fp32": (
        *("wgmma_tf32x3", "wgmma_tf32x3.cuh", "if (row >= arguments.batch) break;", ""),
        "outside",
    ),
    "a bias beyond b in fp32": (
        *("mma_tf32x3", "mma_tf32x3.cuh"),
        *("|| (Tile::PADDED && first_of(n, e) >= GROUP_OUT)) continue;", ") continue;"),
        "outside|wrong",
    ),
    "a residual of the first row": (
        *("decode_fma", AFTER, "(arguments.residual)[at]", "(arguments.residual)[at % 8]"),
        "wrong",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_the_tests_find(emulator, fault):
    name, header, before, after, message = FAULTS[fault]

    def edit(file: str, text: str) -> str:
        if file == header:
            assert before in text
            text = text.replace(before, after)
        return without_predicates(file, text)

    family = family_of(name)
    shape = (1, 43, 33, 16) if name == "decode_mma16" else SHAPES[name][-1]
    problem = Problem.of_factor(Pattern(*shape), "bfloat16", batch_last=False)
    tile = next(c for c in family.configs(problem, gpu(4)) if problem.pattern.b % c.outputs)
    problem = replace(problem, epilogue=Epilogue(True, "none", True))
    (kernel,) = built(emulator, [(family, problem, tile)], edit)
    x, weight = operands(problem, 13, seed=0)
    after = random_after(problem, 13, seed=0)

    def check() -> None:
        assert_epilogue_is_right(kernel.with_epilogue(x, weight, after), x, weight, after)

    with pytest.raises((EmulationError, AssertionError), match=message):
        check()


CAST_AT = {
    name: next(
        at
        for at, (family, problem, _) in enumerate(CASES)
        if family.name == name and problem.epilogue.in_float32
    )
    for name, shapes in SHAPES.items()
    if family_of(name).takes_float32_results
}


@pytest.mark.parametrize("name", CAST_AT)
def test_what_is_not_finite_is_so_in_float32(emulator, name):
    """And what float16 cannot hold is a number there."""
    family, problem, tile = CASES[CAST_AT[name]]
    after = Epilogue(True, "relu", in_float32=True)
    problem = replace(problem, dtype="float16", epilogue=after)
    (kernel,) = built(emulator, [(family, problem, tile)])
    x, weight = operands(problem, 5, seed=0)
    after = random_after(problem, 5, seed=0)
    weight.abs_()
    x[0] = 60_000.0
    x[1, 3], x[3, 1] = torch.inf, torch.nan
    after.bias[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    y = kernel.with_epilogue(x, weight, after)
    truth = ks_reference(x.double(), weight.double())
    truth = with_epilogue(truth, after.bias.double(), "relu")
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(y), kind(truth)), kind
    assert y[0, 3:].isfinite().all()
    assert (y[0, 3:] > torch.finfo(torch.float16).max).any()
