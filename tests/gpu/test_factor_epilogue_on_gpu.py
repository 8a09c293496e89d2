"""Epilogues in the kernels of factors against float64, and the layers that use them."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import H200, compile_all
from profiled import kernels_of

from ksopt import KSLinear
from ksopt.epilogue import ACTIVATIONS, After, with_epilogue
from ksopt.kernels import by_factors, host_plans, plan_autotuner
from ksopt.kernels.backends import cuda
from ksopt.kernels.families.base import family_of
from ksopt.kernels.operands import random_operands
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import chain_reference, ks_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="two of the families need compute capability 9.0",
    ),
]

SHAPES = {
    "decode_mma16": [
        *((1, 512, 128, 2), (2, 128, 512, 1), (1, 24, 264, 3), (3, 21, 22, 4), (2, 22, 18, 24)),
        *((1, 61, 85, 8), (3, 9, 64, 1)),
    ],
    "decode_fma": [(8, 64, 256, 1), (4, 7, 24, 3), (4, 9, 16, 5), (1, 11, 9, 48), (1, 37, 40, 2)],
    "mma16": [(1, 512, 128, 2), (2, 37, 24, 3), (3, 21, 22, 4), (2, 29, 17, 16), (1, 48, 32, 32)],
    "wgmma16": [(1, 512, 128, 2), (2, 37, 24, 3), (3, 21, 22, 4), (2, 29, 17, 16), (1, 48, 32, 32)],
    "wgmma16_streamed": [(1, 256, 256, 2), (3, 32, 33, 8), (1, 16, 18, 12), (2, 13, 20, 2)],
    "mma_tf32x3": [(1, 192, 48, 2), (3, 31, 36, 1), (2, 37, 36, 3), (1, 21, 33, 8), (2, 11, 34, 6)],
    "wgmma_tf32x3": [
        *((2, 48, 192, 1), (1, 192, 48, 2), (2, 37, 36, 3), (1, 22, 33, 4), (2, 11, 34, 6)),
        *((1, 21, 33, 8), (1, 8, 40, 12), (2, 64, 64, 20)),
    ],
}
BATCHES = (1, 16, 67, 700)
CASTS = [
    Epilogue(bias, activation, in_float32=True)
    for bias in (True, False)
    for activation in ACTIVATIONS
]
TILES_EACH = 3
EPILOGUES = [
    Epilogue(bias, activation, residual)
    for activation, (bias, residual) in itertools.product(
        ACTIVATIONS, ((True, False), (True, True), (False, True))
    )
]


def cases() -> list[tuple[Any, Problem, Any]]:
    draw, after, casts = random.Random(0), itertools.cycle(EPILOGUES), itertools.cycle(CASTS)
    several = []
    for name, shapes in SHAPES.items():
        family = family_of(name)
        for at, shape in enumerate(shapes):
            dtype = list(family.dtypes)[at % len(family.dtypes)]
            problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
            assert family.unsupported_reason(problem, H200) is None, problem
            tiles = [c for c in family.configs(problem, H200) if family.fits(problem, c, H200)]
            for tile in draw.sample(tiles, min(TILES_EACH, len(tiles))):
                several.append((family, replace(problem, epilogue=next(after)), tile))
            if family.takes_float32_results and dtype != "float32":
                cast = replace(problem, epilogue=next(casts))
                several += [(family, cast, tile) for tile in draw.sample(tiles, min(2, len(tiles)))]
    return several


CASES = cases()


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """Compile on all cores; the tests then take the kernels from the cache."""
    compile_all(lambda job: job[0].launcher(job[1], job[2], 0), CASES)


def name(case: tuple[Any, Problem, Any]) -> str:
    return f"{case[0].name}-{case[1].pattern}-{case[1].dtype}-{'-'.join(case[1].epilogue.names)}"


def operands(problem, batch):
    """x, the weight, and what is after their product."""
    o = random_operands(problem, batch, torch.device("cuda"))
    after = problem.epilogue
    return o.x, o.weights[0], After(o.bias, after.activation, o.residual, after.in_float32)


def assert_close(y, x, weight, after):
    """Sums in fp32, rounded once behind the epilogue."""
    wide = [None if one is None else one.double() for one in (after.bias, after.residual)]
    truth = ks_reference(x.double(), weight.double())
    truth = with_epilogue(truth, wide[0], after.activation, wide[1])
    magnitude = ks_reference(x.double().abs(), weight.double().abs())
    for one in wide:
        magnitude = magnitude if one is None else magnitude + one.abs()
    rounding = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[y.dtype]
    sums = (2.3 * (weight.shape[2] + 3) * 2**-24 + 4e-6) * magnitude
    allowed = sums + rounding * (truth.abs() + sums) + 2**-25
    assert y.shape == truth.shape
    assert ((y.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("case", CASES, ids=name)
def test_results(case):
    family, problem, tile = case
    launcher = family.launcher(problem, tile, 0)
    for batch in BATCHES:
        x, weight, after = operands(problem, batch)
        dtype = torch.float32 if after.in_float32 else x.dtype
        out = torch.full((batch, problem.out_features), torch.nan, dtype=dtype, device="cuda")
        y = launcher.with_epilogue(x, weight, after, out)
        assert y.data_ptr() == out.data_ptr()
        assert_close(y, x, weight, after)
        again = launcher.with_epilogue(x, weight, after)
        assert again.dtype == dtype
        assert torch.equal(y, again), "the order of sums changes"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_not_finite_is_carried_as_by_pytorch(name, activation):
    family = family_of(name)
    dtype = "bfloat16" if "bfloat16" in family.dtypes else "float32"
    problem = Problem.of_factor(Pattern(*SHAPES[name][0]), dtype, batch_last=False)
    problem = replace(problem, epilogue=Epilogue(True, activation, True))
    launcher = family.launcher(problem, next(family.configs(problem, H200)), 0)
    x, weight, after = operands(problem, 16)
    planted = torch.tensor([torch.nan, torch.inf, -torch.inf], device="cuda", dtype=x.dtype)
    after.bias[3:6], after.residual[2, 7:10], x[1, 5] = planted, planted, torch.inf
    y = launcher.with_epilogue(x, weight, after)
    truth = ks_reference(x.double(), weight.double())
    truth = with_epilogue(truth, after.bias.double(), activation, after.residual.double())
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(y), kind(truth)), kind


@pytest.fixture
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KSOPT_TUNE", "model")
    plan_autotuner.forget()
    cuda.forget()
    yield
    plan_autotuner.forget()
    cuda.forget()


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("residual", [False, True])
def test_the_last_launch_of_a_layer_computes_its_epilogue(rows, residual):
    chain = Chain.parse("(1,512,128,2)*(2,128,512,1)")
    after = Epilogue(True, "gelu", residual)
    problem = Problem(chain, "bfloat16", False, epilogue=after)
    o = random_operands(problem, rows, torch.device("cuda"))
    call = by_factors.ByFactors(problem)
    with torch.no_grad():
        y = call(o.x, o.weights, o.bias, o.residual)
        names = kernels_of(lambda: call(o.x, o.weights, o.bias, o.residual))
    assert len(names) == 2, names
    assert all("ksopt_decode" in one for one in names), names
    wide = [None if one is None else one.double() for one in (o.bias, o.residual)]
    truth = chain_reference(o.x.double(), [one.double() for one in o.weights])
    truth = with_epilogue(truth, wide[0], "gelu", wide[1])
    assert float((y.double() - truth).norm() / truth.norm()) < 4e-3


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_by_factors_runs_without_python_and_in_graphs(dtype, monkeypatch):
    """The plan is set: one launch per factor."""
    monkeypatch.setattr(plan_autotuner.registry, "are_rivals", lambda *_: False)
    layer = KSLinear(1024, 1024, "(1,512,128,2)*(2,128,512,1)", activation="silu")
    layer = layer.to("cuda", dtype)
    x = torch.randn(3, 1024, device="cuda", dtype=dtype)
    with torch.inference_mode():
        for _ in range(3):
            y = layer(x)
        around = (layer.bias, None, "silu", False, 1)
        known = host_plans.run(x, list(layer.weights), *around)
        assert known is not None
        assert torch.equal(known, y)
        names = kernels_of(lambda: layer(x))
        assert len(names) == 2, names
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = layer(x)
        for _ in range(2):
            x.normal_()
            z.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(z, layer(x), rtol=0, atol=0)


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("rows", [1, 16])
def test_a_compiled_layer_for_few_rows_is_two_launches(rows):
    """The last of which computes bias and activation, so that Inductor has nothing to do."""
    layer = KSLinear(1024, 1024, "(1,512,128,2)*(2,128,512,1)", activation="gelu")
    layer = layer.to("cuda", torch.bfloat16)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="ksopt", dynamic=False)
    with torch.inference_mode():
        for _ in range(3):
            y = compiled(x)
        names = kernels_of(lambda: compiled(x))
    assert len(names) == 2, names
    assert all("ksopt_decode" in one for one in names), names
    truth = chain_reference(x.double(), [one.double() for one in layer.weights])
    truth = with_epilogue(truth, layer.bias.double(), "gelu")
    assert float((y.double() - truth).norm() / truth.norm()) < 6e-3


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("rows", [1, 16, 4096])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_compiled_layer_whose_result_is_returned_in_float32_has_no_launch_for_it(
    rows, activation
):
    layer = KSLinear(1024, 1024, "(1,512,128,2)*(2,128,512,1)", activation=activation)
    layer = layer.to("cuda", torch.bfloat16)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x).float(), backend="ksopt", dynamic=False)
    with torch.inference_mode():
        for _ in range(3):
            y = compiled(x)
        names = kernels_of(lambda: compiled(x))
    assert all("ksopt" in one for one in names), names
    assert y.dtype == torch.float32
    truth = chain_reference(x.double(), [one.double() for one in layer.weights])
    truth = with_epilogue(truth, layer.bias.double(), activation or "none")
    assert float((y.double() - truth).norm() / truth.norm()) < 4e-3
