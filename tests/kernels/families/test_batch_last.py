"""The batch-last families without a GPU: what they take, their tiles, and that they compile."""

import pytest
from checks import H200

from ksopt.jit import nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.batch_last import output_tiles
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

batch_last_mma16 = family_of("batch_last_mma16")
batch_last_mma_tf32x3 = family_of("batch_last_mma_tf32x3")
batch_last_wgmma16 = family_of("batch_last_wgmma16")
batch_last_wgmma_tf32x3 = family_of("batch_last_wgmma_tf32x3")

SHAPES = [(4, 64, 64, 16), (1, 192, 48, 3), (2, 17, 33, 5), (1, 1024, 256, 1), (1, 1, 1, 1)]


def problem_of(shape, dtype="float16", batch_last=True):
    return Problem.of_factor(Pattern(*shape), dtype, batch_last)


FAMILIES = {
    "mma": (batch_last_mma16, "bfloat16"),
    "wgmma": (batch_last_wgmma16, "float16"),
    "fp32": (batch_last_mma_tf32x3, "float32"),
    "fp32, wgmma": (batch_last_wgmma_tf32x3, "float32"),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tile_fits_and_covers_the_outputs(name, shape):
    family, dtype = FAMILIES[name]
    problem = problem_of(shape, dtype)
    count = 0
    for config in family.configs(problem, H200):
        count += 1
        geometry = family.geometry(problem, config)
        assert geometry.shared_bytes * config.blocks <= 227 * 1024
        assert geometry.threads <= 1024
        assert geometry.threads * config.blocks <= 2048
        together = output_tiles(problem.pattern, config.outputs)
        assert together * config.outputs >= problem.pattern.b
        # Every block of a group must be in the launch, however small the batch.
        assert geometry.max_blocks % together == 0
        assert geometry.tiles_per_row_tile % together == 0
    assert count > 0


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shifted", [False, True], ids=["aligned", "shifted"])
def test_it_compiles_for_every_target(target, dtype, shifted):
    family = batch_last_mma_tf32x3 if dtype == "float32" else batch_last_mma16
    problem = problem_of((2, 48, 50, 6), dtype)
    config = family.default_config(problem, H200)
    code = nvrtc.cubin(family.source(problem, config, shifted=shifted), target).data
    assert family.kernel_name(problem).encode() in code


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["wgmma", "fp32, wgmma"])
def test_hopper_s_own_kernel_compiles(name, shape):
    # The source asserts that device code and Python agree on the shared memory of a block.
    family, dtype = FAMILIES[name]
    problem = problem_of(shape, dtype)
    every = list(family.configs(problem, H200))
    for config in (every[0], every[-1]):
        code = nvrtc.cubin(family.source(problem, config), "sm_90a").data
        assert family.kernel_name(problem).encode() in code


@pytest.mark.parametrize("exact", [True, False], ids=["fp32", "tf32"])
def test_the_kernel_that_packs_weights_compiles(exact):
    problem = Problem.of_factor(Pattern(2, 48, 50, 6), "float32", True, exact)
    config = next(batch_last_wgmma_tf32x3.configs(problem, H200))
    for code, name in (
        (batch_last_wgmma_tf32x3.pack_source, batch_last_wgmma_tf32x3.pack_name),
        (batch_last_wgmma_tf32x3.source, batch_last_wgmma_tf32x3.kernel_name),
    ):
        result = nvrtc.cubin(code(problem, config), "sm_90a").data
        assert name(problem).encode() in result
