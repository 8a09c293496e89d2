"""What `dispatch.run` chooses on a CUDA device: right for every problem, whatever it chooses."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ksopt.bench.paper import stratified_sample
from ksopt.jit import arch, nvrtc
from ksopt.kernels import cpu, cuda, dispatch, general, lanes16
from ksopt.kernels.families import FAMILIES, Machine, ranked_tiles
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern
from ksopt.reference import ks_reference

pytestmark = pytest.mark.gpu

SAMPLE = stratified_sample(100, seed=0)
BATCHES = (1, 7, 64, 1000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Two results of one product may round differently (order of summation, split sums), so neither is
# the truth for the other: both are compared with float64, and ours may be up to twice as far away.
ALLOWED_RATIO = 2.0


@pytest.fixture(autouse=True)
def forget():
    cuda.forget()
    yield
    cuda.forget()


@pytest.fixture(scope="module")
def compiled_ahead():
    """Compile what the sample needs on all cores; the tests then take it from the cache."""
    target, machine = arch.of_device(0), Machine.of_device(0)
    sources = []
    for pattern, dtype, last in itertools.product(SAMPLE, DTYPES, (False, True)):
        problem = Problem(pattern, name_of(dtype), last)
        sources.append(general.source(problem, general.default_config(problem)))
        for family, batch in itertools.product(FAMILIES, BATCHES):
            best = ranked_tiles(family, problem, batch, machine)[:1]
            sources += [tile.source() for tile in best]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda source: nvrtc.cubin(source, target), dict.fromkeys(sources)))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def draw(pattern: Pattern, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(sum(pattern.weight_shape))
    weight = torch.rand(pattern.weight_shape, generator=generator, device="cuda") * 2 - 1
    x = torch.randn(rows, pattern.in_features, generator=generator, device="cuda")
    return x, weight / pattern.c**0.5


def poison(elements: int, dtype: torch.dtype) -> None:
    """Fill memory that the allocator will hand out next with NaN, then free it."""
    torch.full((elements,), float("nan"), dtype=dtype, device="cuda")


@pytest.mark.usefixtures("compiled_ahead")
@pytest.mark.parametrize("pattern", SAMPLE, ids=str)
def test_sample_of_the_papers_patterns(pattern, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")  # thousands of problems; what is measured comes below
    exact_x, exact_w = draw(pattern, max(BATCHES))
    for dtype in DTYPES:
        weight, rows = exact_w.to(dtype), exact_x.to(dtype)
        truth = ks_reference(rows.double(), weight.double())
        for batch, last in itertools.product(BATCHES, (False, True)):
            x = rows[:batch].T.contiguous() if last else rows[:batch].contiguous()
            poison(batch * pattern.out_features, dtype)
            ours = dispatch.run(x, weight, last)
            theirs = cpu.multiply_by_bmm(x, weight, last)
            expected = truth[:batch].T if last else truth[:batch]
            assert ours.shape == expected.shape
            assert ours.is_contiguous()
            error, allowed = relative_error(ours, expected), relative_error(theirs, expected)
            assert error <= ALLOWED_RATIO * allowed, (
                f"{pattern} {name_of(dtype)} batch {batch} last {last}: {error:.2e} against "
                f"PyTorch's {allowed:.2e}"
            )


@pytest.mark.parametrize("shape", [(2, 64, 48, 8), (1, 24, 40, 4), (3, 16, 16, 1), (1, 8, 8, 96)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=name_of)
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
def test_a_measured_choice_is_right_and_kept(shape, dtype, last):
    pattern = Pattern(*shape)
    exact_x, exact_w = draw(pattern, 300)
    x, weight = exact_x.to(dtype), exact_w.to(dtype)
    x = x.T.contiguous() if last else x
    truth = ks_reference(x.double(), weight.double(), "batch_last" if last else "batch_first")
    choice = cuda.choice_for(x, weight, last)
    assert cuda.choice_for(x, weight, last) is choice
    assert "bmm" in dict(choice.times_us)
    assert choice.name in dict(choice.times_us)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(name_of(dtype), 1e-5)
    torch.testing.assert_close(
        dispatch.run(x, weight, last).double(), truth, rtol=tolerance, atol=tolerance
    )


def test_nothing_is_timed_while_a_graph_is_captured():
    x, weight = (t.half() for t in draw(Pattern(2, 16, 16, 8), 64))
    dispatch.run(x, weight, False)
    cuda.forget()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dispatch.run(x, weight, False)
    assert not cuda._choices
    x.normal_()
    y.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y, ks_reference(x, weight), rtol=2e-3, atol=2e-3)


FOLDS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 96]


@pytest.mark.parametrize("d", FOLDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_tiles_of_the_lanes16_family(d, dtype):
    """Random tiles, tails of the batch and of c, and operands unfit for 16-byte access."""
    generator = random.Random(d)
    for b, c in [(64, 48), (48, 72), (8, 8), (24, 16)]:
        pattern = Pattern(3, b, c, d)
        problem = Problem(pattern, name_of(dtype), False)
        assert lanes16.supports(problem) is None
        tiles = list(lanes16.configs(problem, 132))
        tiles = generator.sample(tiles, min(4, len(tiles)))
        targets = [arch.of_device(0)] * len(tiles)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(nvrtc.cubin, [lanes16.source(problem, t) for t in tiles], targets))
        exact_x, exact_w = draw(pattern, 1000)
        x, weight = exact_x.to(dtype), exact_w.to(dtype)
        truth = ks_reference(x.double(), weight.double())
        allowed = ALLOWED_RATIO * relative_error(cpu.multiply_by_bmm(x, weight, False), truth)
        padded = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape)
        padded.copy_(x)
        for tile in tiles:
            launch = lanes16.launcher(problem, tile, 0)
            for rows in (1, 7, 63, 1000):
                poison(rows * pattern.out_features, dtype)
                assert relative_error(launch(x[:rows], weight), truth[:rows]) <= allowed, tile
            assert relative_error(launch(padded, weight), truth) <= allowed, tile
            strided = weight.transpose(1, 2).contiguous().transpose(1, 2)
            assert relative_error(launch(x, strided), truth) <= allowed, tile
            wide = torch.cat([x, x], dim=1)[:, : pattern.in_features]
            assert relative_error(launch(wide, weight), truth) <= allowed, tile
