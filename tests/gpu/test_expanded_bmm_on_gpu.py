"""Products by matrices with zeros, and the kernel that mends what these spoil, against float64."""

import pytest
import torch

from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

pytestmark = pytest.mark.gpu

family = family_of("expanded_bmm")
SHAPES = [
    (2, 48, 24, 4),
    (1, 5, 3, 16),
    (16, 8, 159, 1),
    (3, 7, 2, 5),
    (1, 1, 1, 9),
    (9, 3, 232, 6),
]
DTYPES = ("float32", "float16", "bfloat16")
_BOUND = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of sum |x||w|


def built(shape, dtype, last):
    problem = Problem.of_factor(Pattern(*shape), dtype, last)
    device = DeviceSpec.of_device(0)
    for config in family.configs(problem, device):
        yield problem, family.launcher(problem, config, 0)


def operands(problem, rows):
    p, dtype = problem.pattern, getattr(torch, problem.dtype)
    generator = torch.Generator("cuda").manual_seed(rows)
    size = (p.in_features, rows) if problem.batch_last else (rows, p.in_features)
    x = torch.randn(size, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(p.weight_shape, generator=generator, device="cuda").to(dtype)
    return x, weight


def assert_right(y, x, weight, problem):
    truth = ks_reference(x.double(), weight.double(), problem.layout)
    scale = ks_reference(x.double().abs(), weight.double().abs(), problem.layout)
    assert y.shape == truth.shape
    error = (y.double() - truth).abs()
    assert (error <= _BOUND[problem.dtype] * scale + 1e-30).all()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results(shape, dtype, last):
    for problem, launch in built(shape, dtype, last):
        for rows in (1, 7, 64, 1001):
            x, weight = operands(problem, rows)
            assert_right(launch(x, weight), x, weight, problem)
            stored = weight.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
            out = torch.full_like(launch(x, weight), torch.nan)
            launch(x, stored, out)
            assert_right(out, x, stored, problem)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_not_finite_reaches_what_it_met(shape, dtype, last):
    for problem, launch in built(shape, dtype, last):
        x, weight = operands(problem, 300)
        rows = x.T if last else x
        n = rows.shape[1]
        for row, feature, value in (
            (3, 0, torch.inf),
            (99, n - 1, torch.nan),
            (299, n // 2, -torch.inf),
        ):
            rows[row, feature] = value
        truth = ks_reference(x.double(), weight.double(), problem.layout)
        y = launch(x, weight)
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(y), kind(truth)), (problem, kind)


def test_the_host_library_does_the_same_without_python(monkeypatch):
    problem = Problem.of_factor(Pattern(2, 48, 24, 4), "bfloat16", False)
    x, weight = operands(problem, 64)
    x[5, 7] = torch.inf
    config = next(iter(family.configs(problem, DeviceSpec.of_device(0))))
    launch = family.launcher(problem, config, 0)
    entry = launch.entry()
    assert entry is not None
    expected = launch(x, weight)
    torch.ops.ksopt_host.know(
        x, weight, False, True, True, entry.plan, entry.form, entry.kind, True
    )
    y = torch.ops.ksopt_host.run_product(x, weight, False, None, True, None)
    torch.ops.ksopt_host.forget()
    assert y is not None
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=0, atol=0)


def test_a_graph_replays_it():
    problem = Problem.of_factor(Pattern(1, 64, 64, 2), "float32", False)
    x, weight = operands(problem, 128)
    config = next(iter(family.configs(problem, DeviceSpec.of_device(0))))
    launch = family.launcher(problem, config, 0)
    launch(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch(x, weight)
    x[3, 4] = torch.nan
    graph.replay()
    torch.cuda.synchronize()
    truth = ks_reference(x.double(), weight.double())
    assert torch.equal(y.isnan(), truth.isnan())
