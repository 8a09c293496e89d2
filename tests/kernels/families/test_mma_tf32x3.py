"""The fp32 families: supported problems, exactness, compilation for every target."""

import random

import pytest
import torch
from checks import H200, gpu

from ksopt import precision
from ksopt.jit import nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

mma_tf32x3 = family_of("mma_tf32x3")
wgmma_tf32x3 = family_of("wgmma_tf32x3")

SHAPES = [(2, 64, 64, 1), (1, 96, 96, 2), (1, 48, 96, 3), (1, 48, 192, 6), (4, 64, 64, 4),
          (1, 128, 512, 16), (2, 48, 36, 12)]  # fmt: skip


def problem_of(shape: tuple[int, int, int, int], exact: bool = True) -> Problem:
    return Problem.of_factor(Pattern(*shape), "float32", False, exact)


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("exact", [True, False])
def test_it_compiles(target, exact):
    # The source itself checks that C++ and Python agree on the shared memory.
    shape = random.Random(target).choice(SHAPES)
    problem = problem_of(shape, exact)
    for resident in (True, False):
        candidates = [c for c in mma_tf32x3.configs(problem, gpu(108)) if c.resident == resident]
        config = random.Random(0).choice(candidates)
        code = nvrtc.cubin(mma_tf32x3.source(problem, config), target).data
        assert mma_tf32x3.kernel_name(problem).encode() in code


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_warpgroup_products_compile_for_hopper(shape):
    for resident, exact in ((True, True), (False, True), (False, False)):
        problem = problem_of(shape, exact)
        candidates = list(wgmma_tf32x3.configs(problem, H200))
        fitting = [c for c in candidates if c.resident == resident] or candidates
        config = random.Random(str(shape)).choice(fitting)
        code = nvrtc.cubin(wgmma_tf32x3.source(problem, config), "sm_90a").data
        assert wgmma_tf32x3.kernel_name(problem).encode() in code
        code = nvrtc.cubin(wgmma_tf32x3.pack_source(problem, config), "sm_90a").data
        assert wgmma_tf32x3.pack_name(problem).encode() in code


def test_every_supported_d_has_tiles():
    for d in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 64, 96, 128):
        problem = problem_of((1, 1024, 1024, d))
        for family in (mma_tf32x3, wgmma_tf32x3):
            assert family.unsupported_reason(problem, H200) is None
            assert next(family.configs(problem, H200), None) is not None, (family, d)


@pytest.fixture
def switch():
    """The switch that never clashes with torch's older ones, put back afterwards."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.fp32_precision = before


def test_precise_follows_torchs_switch(switch):
    for name, exact in (("ieee", True), ("tf32", False), ("none", True)):
        switch.fp32_precision = name
        assert precision.is_exact() is exact


def test_precise_follows_the_older_switches(switch):
    # They are read through the newer one, because reading them raises where both were set.
    before = torch.get_float32_matmul_precision()
    try:
        for name, exact in (("high", False), ("highest", True)):
            torch.set_float32_matmul_precision(name)
            assert precision.is_exact() is exact
        torch.backends.cuda.matmul.allow_tf32 = True
        assert precision.is_exact() is False
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_float32_matmul_precision(before)
