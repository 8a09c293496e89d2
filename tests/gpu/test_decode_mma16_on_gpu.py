"""The families for a few rows against float64: tiles, clusters, tails, early launches."""

import random
from typing import Any

import pytest
import torch
from devices import H200, compile_all

from ksopt.kernels.families.base import TemplateFamily, family_of
from ksopt.kernels.launcher import Launcher
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

decode_fma = family_of("decode_fma")
decode_mma16 = family_of("decode_mma16")

pytestmark = pytest.mark.gpu

BATCHES = (1, 2, 7, 16, 33, 64, 100)
TILES_EACH = 2  # of each number of blocks in a cluster

# Every class of d; b and c with tails, and the shapes of layers that decode.
SHAPES = [
    (2, 20, 48, 1), (8, 56, 264, 1), (8, 512, 512, 1), (4, 13, 84, 2), (8, 11, 72, 3),
    (2, 46, 18, 4), (4, 26, 20, 6), (4, 22, 18, 12), (2, 45, 21, 8), (1, 61, 85, 8),
    (1, 43, 133, 16), (2, 22, 18, 24), (1, 31, 5, 40), (1, 64, 64, 64), (1, 512, 512, 8),
    (3, 9, 64, 1), (1, 37, 40, 2), (1, 13, 24, 3), (3, 21, 22, 4),  # rows of y at odd addresses
]  # fmt: skip
FMA_SHAPES = [
    (2, 18, 52, 1), (8, 512, 512, 1), (4, 5, 26, 2), (4, 7, 24, 3), (1, 13, 37, 4), (4, 9, 20, 5),
    (2, 6, 14, 6), (8, 7, 16, 7), (1, 11, 9, 48), (2, 24, 20, 10), (1, 16, 16, 512),
    (3, 9, 64, 1), (1, 7, 24, 3), (1, 6, 752, 5),
]  # fmt: skip


def tiles_of(module: TemplateFamily, problem: Problem) -> list[Any]:
    """Some of each cluster size."""
    draw = random.Random(str(problem))
    by_cluster: dict[int, list[Any]] = {}
    for config in module.configs(problem, H200):
        by_cluster.setdefault(getattr(config, "cluster", 1), []).append(config)
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    return [
        config
        for cluster, configs in by_cluster.items()
        if hopper or cluster == 1
        for config in draw.sample(configs, min(TILES_EACH, len(configs)))
    ]


def cases() -> list[tuple[TemplateFamily, Problem]]:
    pairs: list[tuple[TemplateFamily, Problem]] = []
    for at, shape in enumerate(SHAPES):
        dtype = ("bfloat16", "float16")[at % 2]
        pairs.append((decode_mma16, Problem.of_factor(Pattern(*shape), dtype, batch_last=False)))
    for at, shape in enumerate(FMA_SHAPES):
        for dtype in ("float32", ("bfloat16", "float16")[at % 2]):
            problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
            if decode_fma.unsupported_reason(problem, H200) is None:
                pairs.append((decode_fma, problem))
    return pairs


CASES = cases()


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """Compile on all cores; the tests then take the kernels from the cache."""
    jobs = [(m, p, c) for m, p in CASES for c in tiles_of(m, p)]
    compile_all(lambda job: job[0].launcher(job[1], job[2], 0), jobs)


def operands(problem: Problem, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    p, dtype = problem.pattern, getattr(torch, problem.dtype)
    generator = torch.Generator("cuda").manual_seed(sum(p.weight_shape) + batch)
    x = torch.randn(batch, p.in_features, generator=generator, device="cuda")
    weight = torch.rand(p.weight_shape, generator=generator, device="cuda") * 2 - 1
    return x.to(dtype), weight.to(dtype)


def assert_close(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Fp32 sums in any order, rounded once: no element further off than that allows."""
    truth = ks_reference(x.double(), weight.double())
    magnitude = ks_reference(x.double().abs(), weight.double().abs())
    rounding = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[y.dtype]
    # The tensor cores cut their sums toward zero: twice the error of sums that are rounded.
    sums = 2 * (weight.shape[2] + 1) * 2**-24 * magnitude
    assert y.shape == truth.shape
    assert ((y.double() - truth).abs() <= sums + rounding * (truth.abs() + sums) + 2**-25).all()


def poison(elements: int, dtype: torch.dtype) -> None:
    """Fill memory that the allocator will hand out next with NaN, then free it."""
    torch.full((elements,), float("nan"), dtype=dtype, device="cuda")


def name(case: tuple[TemplateFamily, Problem]) -> str:
    return f"{case[0].name}-{case[1].pattern}-{case[1].dtype}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_results(case):
    module, problem = case
    for config in tiles_of(module, problem):
        launch = module.launcher(problem, config, 0)
        for batch in BATCHES:
            x, weight = operands(problem, batch)
            poison(batch * problem.pattern.out_features, x.dtype)
            y = launch(x, weight)
            assert_close(y, x, weight)
            assert torch.equal(y, launch(x, weight)), "the order of sums changes"


def layer(module: TemplateFamily, dtype: str) -> tuple[Problem, Launcher]:
    problem = Problem.of_factor(Pattern(4, 256, 256, 1), dtype, batch_last=False)
    configs = module.configs(problem, H200)
    best = min(configs, key=lambda c: module.predicted_us(problem, c, 4, H200))
    return problem, module.launcher(problem, best, 0)


FAMILIES = [(decode_mma16, "bfloat16"), (decode_fma, "float32")]


@pytest.mark.parametrize(("module", "dtype"), FAMILIES, ids=["tensor cores", "fma"])
def test_a_kernel_that_starts_early_reads_what_the_one_before_it_wrote(module, dtype):
    """x and the weight written just before, by other kernels and by kernels of the family."""
    problem, launch = layer(module, dtype)
    weights = [operands(problem, 1)[1].roll(n) / 8 for n in range(20)]
    x = operands(problem, 4)[0]
    weight = torch.empty_like(weights[0])
    torch.cuda.synchronize()
    results, expected = [], []
    for new in weights:  # no waiting in between
        weight.copy_(new)
        y = launch(launch(x, weight), weight)
        results.append(y)
        # The output as a weight: (4, 1024) -> a = 4, b = 4, c = 256.
        created = launch(x, weight).view(4, 4, 256, 1)
        small = Problem.of_factor(Pattern(4, 4, 256, 1), dtype, batch_last=False)
        config = next(iter(module.configs(small, H200)))
        results.append(module.launcher(small, config, 0)(x, created))
    torch.cuda.synchronize()
    for new in weights:
        expected.append(launch(launch(x, new).clone(), new))
        torch.cuda.synchronize()
        created = launch(x, new).view(4, 4, 256, 1)
        torch.cuda.synchronize()
        assert_close(results[2 * len(expected) - 1], x, created)
        assert torch.equal(results[2 * len(expected) - 2], expected[-1])


@pytest.mark.parametrize(("module", "dtype"), FAMILIES, ids=["tensor cores", "fma"])
def test_cuda_graph_replays_on_new_values(module, dtype):
    problem, launch = layer(module, dtype)
    x, weight = operands(problem, 4)
    launch(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch(x, weight)
        z = launch(y, weight)
    for _ in range(3):
        x.normal_()
        weight.normal_().div_(16)
        y.fill_(float("nan"))
        z.fill_(float("nan"))
        graph.replay()
        assert_close(y, x, weight)
        assert_close(z, y, weight)


@pytest.mark.parametrize(("module", "dtype"), FAMILIES, ids=["tensor cores", "fma"])
def test_a_captured_kernel_may_follow_copies_and_other_streams(module, dtype):
    """What is no kernel, and several streams, cannot let a kernel start early: it must wait."""
    problem, launch = layer(module, dtype)
    x, weight = operands(problem, 4)
    x_before, other = x.clone(), weight.clone()
    launch(x, weight)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(x_before)  # a copy in memory
        y = launch(x, weight)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = launch(y, other)
        u = launch(y, weight)
        torch.cuda.current_stream().wait_stream(side)
        v = launch(z, other)  # after both streams
        x.zero_()
    for _ in range(3):
        x_before.normal_()
        weight.normal_().div_(16)
        other.normal_().div_(16)
        for result in (y, z, u, v):
            result.fill_(float("nan"))
        graph.replay()
        assert_close(y, x_before, weight)
        assert_close(z, y, other)
        assert_close(u, y, weight)
        assert_close(v, z, other)


@pytest.mark.parametrize(("module", "dtype"), FAMILIES, ids=["tensor cores", "fma"])
def test_what_is_not_aligned_and_what_is_transposed(module, dtype):
    problem, launch = layer(module, dtype)
    x, weight = operands(problem, 5)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    for rows in (shifted, x[::2], x[:0], x[0], x.view(5, 1, -1)):
        assert_close(launch(rows, weight), rows, weight)
    assert_close(launch(x, turned), x, weight)


@pytest.mark.parametrize(("module", "dtype"), FAMILIES, ids=["tensor cores", "fma"])
def test_without_the_cpp_launcher_results_are_the_same(module, dtype, monkeypatch):
    from ksopt.jit import host

    problem, fast = layer(module, dtype)
    x, weight = operands(problem, 16)
    monkeypatch.setattr(host, "load", lambda: "no compiler")
    _, slow = layer(module, dtype)
    assert torch.equal(fast(x, weight), slow(x, weight))
