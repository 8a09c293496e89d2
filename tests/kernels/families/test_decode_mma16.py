"""The families for a few rows, without a GPU: what they take, what compiles, what they predict."""

import math
from types import ModuleType
from typing import Any

import pytest
from checks import H200, gpu

from ksopt.jit import nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import SHARED_LIMIT, Problem
from ksopt.patterns.chain import Pattern

decode_fma = family_of("decode_fma")
decode_mma16 = family_of("decode_mma16")

FAMILIES = [(decode_mma16, "bfloat16"), (decode_fma, "float32"), (decode_fma, "float16")]
SHAPES = [(8, 512, 512, 1), (4, 24, 48, 2), (2, 48, 24, 3), (1, 512, 512, 8), (1, 64, 64, 64)]


def ranked(module: ModuleType, problem: Problem, batch: int) -> list[Any]:
    configs = module.configs(problem, H200)
    return sorted(configs, key=lambda c: module.predicted_us(problem, c, batch, H200))


@pytest.mark.sweep
@pytest.mark.parametrize(("module", "dtype"), FAMILIES)
def test_it_compiles(module, dtype):
    for shape in SHAPES:
        problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
        config = ranked(module, problem, 64)[0]
        assert nvrtc.cubin(module.source(problem, config), "sm_90a").data


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_clusters_compile_and_say_what_they_need(cluster):
    problem = Problem.of_factor(Pattern(1, 512, 512, 8), "float16", batch_last=False)
    config = next(c for c in ranked(decode_mma16, problem, 16) if c.cluster == cluster)
    assert config.capability == (9, 0)
    assert nvrtc.cubin(decode_mma16.source(problem, config), "sm_90a").data


@pytest.mark.parametrize(("module", "dtype"), FAMILIES)
def test_tiles_fit_and_the_grid_is_whole_clusters(module, dtype):
    for shape in SHAPES:
        problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
        for config in module.configs(problem, H200):
            geometry = module.geometry(problem, config)
            assert geometry.early
            assert geometry.shared_bytes <= SHARED_LIMIT
            assert geometry.threads % 32 == 0
            assert geometry.tiles_per_row_tile % getattr(config, "cluster", 1) == 0


@pytest.mark.parametrize(("module", "dtype"), FAMILIES)
def test_more_rows_than_a_few_are_for_other_families(module, dtype):
    problem = Problem.of_factor(Pattern(4, 64, 64, 4), dtype, batch_last=False)
    config = ranked(module, problem, 1)[0]
    few, many = module.max_batch, module.max_batch + 1
    assert 0 < module.predicted_us(problem, config, few, H200) < math.inf
    assert module.predicted_us(problem, config, many, H200) == math.inf


# The fastest tiles measured on an H200 at 1, 16 and 64 rows (docs/development): microseconds.
MEASURED = {
    "(8,512,512,1)": (2.42, 2.61, 4.15),
    "(4,1024,1024,1)": (3.88, 4.22, 7.43),
    "(1,512,512,8)": (3.31, 4.64, 7.69),
    "(16,256,256,1)": (1.87, 1.93, 2.75),
    "(1,256,256,16)": (2.92, 4.02, 6.68),
    "(8,1376,512,1)": (4.71, 4.99, 9.40),
    "(4,2752,1024,1)": (7.78, 9.09, 15.40),
    "(1,64,64,64)": (2.08, 3.00, 3.73),
    "(64,64,64,1)": (1.27, 1.29, 1.68),
}


@pytest.mark.parametrize("text", MEASURED)
def test_predictions_are_near_what_was_measured(text):
    problem = Problem.of_factor(Pattern.parse(text), "bfloat16", batch_last=False)
    for batch, measured in zip((1, 16, 64), MEASURED[text], strict=True):
        best = ranked(decode_mma16, problem, batch)[0]
        predicted = decode_mma16.predicted_us(problem, best, batch, H200)
        assert measured / 1.4 < predicted < measured * 1.4


@pytest.mark.parametrize(("module", "dtype"), FAMILIES)
def test_fewer_multiprocessors_are_predicted_to_be_slower(module, dtype):
    problem = Problem.of_factor(Pattern(8, 512, 512, 1), dtype, batch_last=False)
    config = ranked(module, problem, 16)[0]
    slow, fast = (module.predicted_us(problem, config, 16, gpu(count)) for count in (32, 132))
    assert fast < slow
