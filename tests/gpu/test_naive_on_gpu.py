"""The general kernel against float64, on a stratified sample of the paper's patterns."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ksopt.bench.paper_patterns import stratified_sample
from ksopt.jit import arch, nvrtc
from ksopt.kernels.backends import cpu
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.naive import launcher
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

naive = family_of("naive")


def multiply(x: torch.Tensor, weight: torch.Tensor, last: bool) -> torch.Tensor:
    problem = Problem.of_factor(Pattern(*weight.shape), name_of(x.dtype), last)
    return launcher(problem, x.get_device())(x, weight)


pytestmark = pytest.mark.gpu

PATTERNS = stratified_sample(100, seed=0)
BATCHES = (1, 7, 64, 1000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Two results of one product may round differently (order of summation, split sums), so neither is
# the truth for the other: both are compared with float64, and ours may be up to twice as far away.
ALLOWED_RATIO = 2.0


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compile_ahead(pattern: Pattern) -> None:
    """Compile what the pattern needs on several cores; the test then takes it from the cache."""
    target = arch.of_device(0)
    problems = [
        Problem.of_factor(pattern, name_of(dt), last) for dt in DTYPES for last in (False, True)
    ]
    with ThreadPoolExecutor(len(problems)) as pool:
        sources = [naive.source(p, naive.default_config(p)) for p in problems]
        list(pool.map(lambda source: nvrtc.cubin(source, target), sources))


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def poison(elements: int, dtype: torch.dtype) -> None:
    """Fill memory that the allocator will hand out next with NaN, then free it."""
    torch.full((elements,), float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_sample_of_the_papers_patterns(pattern):
    compile_ahead(pattern)
    generator = torch.Generator("cuda").manual_seed(sum(pattern.weight_shape))
    exact_w = torch.rand(pattern.weight_shape, generator=generator, device="cuda") * 2 - 1
    exact_w /= pattern.c**0.5
    exact_x = torch.randn(max(BATCHES), pattern.in_features, generator=generator, device="cuda")
    for dtype in DTYPES:
        weight, rows = exact_w.to(dtype), exact_x.to(dtype)
        truth = ks_reference(rows.double(), weight.double())
        for batch in BATCHES:
            for last in (False, True):
                x = rows[:batch].T.contiguous() if last else rows[:batch].contiguous()
                layout = "batch_last" if last else "batch_first"
                poison(batch * pattern.out_features, dtype)
                ours = multiply(x, weight, last)
                theirs = cpu.multiply_by_bmm(x, weight, last)
                expected = truth[:batch].T if last else truth[:batch]
                assert ours.shape == expected.shape
                assert ours.is_contiguous()
                error, allowed = relative_error(ours, expected), relative_error(theirs, expected)
                assert error <= ALLOWED_RATIO * allowed, (
                    f"{pattern} {name_of(dtype)} {layout} batch {batch}: {error:.2e} against "
                    f"PyTorch's {allowed:.2e}"
                )


def every(step: int, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Every `step`-th slice along `dim`, as a view."""
    return x[::step] if dim == 0 else x[:, ::step]


def doubled(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x twice along `dim`, in one piece of memory."""
    return torch.cat([x, x], dim)


SMALL = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 17, 33, 1), (5, 2, 2, 3), (1, 65, 1, 9), (3, 1, 70, 2)]


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
def test_odd_shapes_strides_and_alignment(shape, dtype, last):
    pattern = Pattern(*shape)
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*sizes):
        return torch.randn(sizes, generator=generator, device="cuda").to(dtype)

    features, rows = pattern.in_features, 13
    shape_of_x = (features, rows) if last else (rows, features)
    one_row = (features, 1) if last else (1, features)
    three_rows = (features, 3, 2) if last else (3, 2, features)
    feature_dim, batch_dim = (0, 1) if last else (1, 0)
    weight = draw(*shape)
    inputs = {
        "contiguous": draw(*shape_of_x),
        "every other feature": every(2, doubled(draw(*shape_of_x), feature_dim), feature_dim),
        "every other row": every(2, doubled(draw(*shape_of_x), batch_dim), batch_dim),
        "the other layout's memory": draw(*shape_of_x[::-1]).T,
        "misaligned": draw(features * rows + 1)[1:].view(shape_of_x),
        "two batch dims": draw(*three_rows),
        "two batch dims, not collapsible": draw(*three_rows).transpose(batch_dim, batch_dim + 1),
        "no batch dim": draw(features),
        "empty batch": draw(*shape_of_x).narrow(batch_dim, 0, 0),
        "one input broadcast": draw(*one_row).expand(shape_of_x),
    }
    weights = {
        "contiguous": weight,
        "transposed": weight.transpose(1, 2).contiguous().transpose(1, 2),
        "slice": draw(*(2 * s for s in shape))[::2, ::2, ::2, ::2],
    }
    for x_kind, x in inputs.items():
        for w_kind, w in weights.items():
            poison(x.numel() // max(pattern.in_features, 1) * pattern.out_features, dtype)
            layout = "batch_last" if last else "batch_first"
            truth = ks_reference(x.double(), w.double(), layout)
            ours = multiply(x, w, last)
            assert ours.shape == truth.shape, (x_kind, w_kind)
            # One rounding to the storage type, and fp32 sums of at most 70 terms before it.
            tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[name_of(dtype)]
            torch.testing.assert_close(
                ours.double(), truth, rtol=tolerance, atol=tolerance * 10, msg=f"{x_kind}, {w_kind}"
            )


def test_cuda_graph_replays_on_new_values():
    pattern = Pattern(4, 16, 8, 4)
    x = torch.randn(32, pattern.in_features, device="cuda")
    weight = torch.randn(pattern.weight_shape, device="cuda")
    multiply(x, weight, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = multiply(x, weight, False)
    x.normal_()
    weight.normal_()
    y.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y, ks_reference(x, weight), rtol=1e-5, atol=1e-5)


def test_it_runs_on_the_current_stream():
    pattern = Pattern(2, 64, 64, 4)
    weight = torch.randn(pattern.weight_shape, device="cuda")
    stream = torch.cuda.Stream()
    x = torch.zeros(4096, pattern.in_features, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.normal_()  # late, and only on this stream
        y = multiply(x, weight, False)
    stream.synchronize()
    torch.testing.assert_close(y, ks_reference(x, weight), rtol=1e-4, atol=1e-4)


def test_without_the_cpp_launcher_results_are_the_same(monkeypatch):
    from ksopt.jit import host

    pattern = Pattern(2, 16, 24, 3)
    x = torch.randn(2, 50, pattern.in_features, device="cuda")
    weight = torch.randn(pattern.weight_shape, device="cuda")
    problem = Problem.of_factor(pattern, "float32", False)
    fast = launcher(problem, 0)
    monkeypatch.setattr(host, "load", lambda: "no compiler")
    slow = launcher(problem, 0)
    assert torch.equal(fast(x, weight), slow(x, weight))
    assert slow(x[:0], weight).shape == (0, 50, pattern.out_features)
