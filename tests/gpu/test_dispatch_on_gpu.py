"""Choices of `dispatch.run` on a CUDA device: the result is right for every problem and choice."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from devices import H200

from ksopt import ops
from ksopt.bench.paper_patterns import stratified_sample
from ksopt.jit import arch, nvrtc
from ksopt.kernels import dispatch, registry, tuning_cache, weight_cache
from ksopt.kernels.backends import cpu, cuda
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.launcher import HostLauncher
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

mma16 = family_of("mma16")

pytestmark = pytest.mark.gpu

SAMPLE = stratified_sample(100, seed=0)
BATCHES = (1, 7, 64, 1000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Two results of one product may round differently (order of summation, split sums), so neither is
# the truth for the other: both are compared with float64, and ours may be up to twice as far away.
ALLOWED_RATIO = 2.0
TF32_ROUNDING = 2.0**-11
SUM_ROUNDING = 2.0**-24 / 2  # of each addition in fp32, about, at random


@pytest.fixture(autouse=True)
def forget():
    cuda.forget()
    weight_cache.refresh()
    yield
    cuda.forget()
    weight_cache.refresh()


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


@pytest.mark.parametrize("pattern", SAMPLE, ids=str)
def test_sample_of_the_papers_patterns(pattern, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")  # thousands of problems; measuring comes below
    exact_x, exact_w = draw(pattern, max(BATCHES))
    every = list(itertools.product(DTYPES, BATCHES, (False, True)))

    def choose(case):
        dtype, batch, last = case
        x = exact_x[:batch].to(dtype)
        return cuda.choice_for(x.T.contiguous() if last else x, exact_w.to(dtype), last)

    with ThreadPoolExecutor(8) as pool:  # compiles on several cores; what follows finds it done
        list(pool.map(choose, every))
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
            name = cuda.choice_for(x, weight, last).name
            if name in pytorch_ops.names(cuda.problem_key_of(x, weight, last).problem, "cuda"):
                # PyTorch's own result too, by another product, whose sums may be in order.
                allowed = max(allowed, SUM_ROUNDING * pattern.c**0.5)
            assert error <= ALLOWED_RATIO * allowed, (
                f"{pattern} {name_of(dtype)} batch {batch} last {last}: {error:.2e} against "
                f"PyTorch's {allowed:.2e}"
            )


@pytest.mark.parametrize("shape", [(2, 64, 48, 8), (1, 24, 40, 4), (3, 16, 16, 1), (1, 8, 8, 96)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=name_of)
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
def test_a_measured_choice_is_right_and_cached(shape, dtype, last):
    pattern = Pattern(*shape)
    exact_x, exact_w = draw(pattern, 300)
    x, weight = exact_x.to(dtype), exact_w.to(dtype)
    x = x.T.contiguous() if last else x
    truth = ks_reference(x.double(), weight.double(), "batch_last" if last else "batch_first")
    choice = cuda.choice_for(x, weight, last)
    assert cuda.choice_for(x, weight, last) is choice
    assert {"bmm", choice.name} <= set(dict(choice.times_us))
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(name_of(dtype), 1e-5)
    torch.testing.assert_close(
        dispatch.run(x, weight, last).double(), truth, rtol=tolerance, atol=tolerance
    )


def test_the_next_process_takes_the_choice_from_disk(monkeypatch):
    x, weight = (t.half() for t in draw(Pattern(2, 64, 64, 8), 1000))
    y = dispatch.run(x, weight, False)
    first = cuda.choice_for(x, weight, False)
    cuda.forget()
    for module, name in ((nvrtc, "_compile"), (cuda, "measured")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("compiled or timed again"))
    second = cuda.choice_for(x, weight, False)
    assert (second.source, second.candidate.label) == ("recorded", first.candidate.label)
    assert torch.equal(dispatch.run(x, weight, False), y)
    record = tuning_cache.load(cuda.fingerprint(0), cuda.problem_key_of(x, weight, False))
    assert record is not None
    assert second.record == record


def one_of_each(candidates: list[Candidate]) -> list[Candidate]:
    """The first way of each name: a family's tiles have tests of their own."""
    first: dict[str, Candidate] = {}
    for way in candidates:
        first.setdefault(way.name, way)
    return list(first.values())


SHAPES = [(2, 64, 48, 8), (1, 32, 64, 4), (3, 32, 32, 1), (1, 64, 64, 96), (4, 64, 64, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "tf32"])
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
def test_every_way_is_right_aligned_or_not_and_sees_a_changed_weight(shape, exact, last):
    pattern, before = Pattern(*shape), torch.backends.cuda.matmul.fp32_precision
    layout = "batch_last" if last else "batch_first"
    torch.backends.cuda.matmul.fp32_precision = "ieee" if exact else "tf32"
    try:
        for dtype, rows in itertools.product(DTYPES if exact else DTYPES[:1], (16, 1001)):
            x, weight = (tensor.to(dtype) for tensor in draw(pattern, rows))
            x = x.T.contiguous() if last else x
            problem_key = cuda.problem_key_of(x, weight, last)
            problem = problem_key.problem
            assert problem.exact == (exact or dtype != torch.float32)
            candidates = registry.candidates(problem, rows, cuda.spec_of(0))
            built = registry.built(one_of_each(candidates), 0, problem_key.rows)
            truth = ks_reference(x.double(), weight.double(), layout)
            twice = ks_reference(x.double(), 2 * weight.double(), layout)
            theirs = relative_error(cpu.multiply_by_bmm(x, weight, last), truth)
            if not exact:  # cuBLAS is allowed TF32, and need not use it for products as small
                theirs = max(theirs, TF32_ROUNDING)
            for way, call in built:
                repacked = weight.clone()
                for _ in range(2):  # the second time with what was cached
                    poison(rows * pattern.out_features, dtype)
                    error = relative_error(call(x, repacked), truth)
                    assert error <= ALLOWED_RATIO * theirs, f"{way.label}: {error:.2e}"
                repacked.mul_(2)
                assert relative_error(call(x, repacked), twice) <= ALLOWED_RATIO * theirs
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_a_graph_prepares_its_weight_at_every_replay():
    """The weight changes between replays, after an eager call has prepared and cached it."""
    exact_x, exact_w = draw(Pattern(4, 32, 32, 8), 64)
    for last in (False, True):
        x, weight = exact_x.half(), exact_w.half()
        x = x.T.contiguous() if last else x
        layout = "batch_last" if last else "batch_first"
        machine = cuda.spec_of(0)
        problem = cuda.problem_key_of(x, weight, last).problem
        for way, call in registry.built(one_of_each(registry.candidates(problem, 64, machine)), 0):
            call(x, weight)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = call(x, weight)
            for factor in (1, 3):
                weight.mul_(factor)
                call(x, weight)
                y.fill_(float("nan"))
                graph.replay()
                expected = ks_reference(x, weight, layout)
                torch.testing.assert_close(y, expected, rtol=1e-2, atol=2e-2, msg=way.label)
            weight.copy_(exact_w)


def test_a_weight_prepared_on_one_stream_serves_another():
    weight = torch.randn(64, 512, 512, 1, device="cuda").expand(64, 512, 512, 2)
    weight = weight.contiguous()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()

    def slowly(w):
        torch.cuda._sleep(200_000_000)
        return w.permute(0, 3, 1, 2).contiguous()

    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        weight_cache.prepared(weight, "slowly", slowly)
    with torch.cuda.stream(other):
        actual = weight_cache.prepared(weight, "slowly", slowly) + 0
    torch.cuda.synchronize()
    assert torch.equal(actual, weight.permute(0, 3, 1, 2))


def test_the_host_library_knows_decisions_of_one_kernel(monkeypatch):
    # The model's, one for all weights: of measured ones, that for weights that change may differ.
    monkeypatch.setenv("KSOPT_TUNE", "model")
    pattern = Pattern(4, 64, 64, 8)
    x, weight = (t.half() for t in draw(pattern, 64))
    assert cuda.run_known(x, weight, False) is None
    y = ops.ks_mm(x, weight)
    if not isinstance(cuda.choice_for(x, weight, False).call, HostLauncher):
        pytest.skip("one of PyTorch's ways is predicted to be the fastest here")
    known = cuda.run_known(x, weight, False)
    assert known is not None
    assert torch.equal(known, y)
    assert torch.equal(cuda.run_known(x.view(4, 16, -1), weight, False), y.view(4, 16, -1))
    # Everything out of the ordinary goes the way that checks and decides.
    others = {
        "more rows than the problem's": (x.repeat(2, 1), weight, False),
        "the other layout": (x.T.contiguous(), weight, True),
        "rows apart": (torch.empty(64, x.shape[1] + 8).cuda().half()[:, :-8], weight, False),
        "not aligned": (torch.empty(x.numel() + 1).cuda().half()[1:].view_as(x), weight, False),
        "a strided weight": (x, weight.transpose(1, 2).contiguous().transpose(1, 2), False),
        "another dtype": (x.float(), weight.float(), False),
        "two dtypes": (x, weight.float(), False),
        "too few features": (x[:, :-64].contiguous(), weight, False),
        "no rows": (x[:0], weight, False),
        "a weight on the CPU": (x, weight.cpu(), False),
        "a weight of two dims": (x, weight.flatten(0, 2), False),
        "a scalar": (x[0, 0], weight, False),
    }
    for what, operands in others.items():
        assert cuda.run_known(*operands) is None, what
    cuda.forget()
    assert cuda.run_known(x, weight, False) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_token_of_each_sequence_where_sequences_come_first(dtype):
    """(sequence, batch, features): what torch calls contiguous then has a dim of size 1 whose
    stride is no row's."""
    pattern = Pattern(4, 64, 64, 8)
    _, weight = draw(pattern, 1)
    steps = torch.randn(5, 48, pattern.in_features, device="cuda").to(dtype)
    last = steps.transpose(0, 1)[:, -1:]
    assert last.is_contiguous()
    assert last.stride(1) != last.stride(0)
    weight = weight.to(dtype)
    for _ in range(2):  # the second time by what the host library knows
        actual = ops.ks_mm(last, weight)
        expected = ks_reference(last.double(), weight.double())
        theirs = relative_error(cpu.multiply_by_bmm(last, weight, False), expected)
        assert relative_error(actual, expected) <= ALLOWED_RATIO * theirs


def test_a_thread_may_begin_with_a_product():
    """Nothing of CUDA has run in it, so it has no context yet, which the default stream needs."""
    x, weight = (t.half() for t in draw(Pattern(4, 64, 64, 8), 64))
    problem = cuda.problem_key_of(x, weight, False).problem
    ways = registry.best_predicted(problem, 64, cuda.spec_of(0))
    call = next(way for way in ways if not way.is_pytorch).build(0)
    expected = call(x, weight)
    torch.cuda.synchronize()
    results = []
    thread = threading.Thread(target=lambda: results.append(call(x, weight)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)


@pytest.mark.parametrize("recorded", [True, False])
def test_nothing_is_timed_while_a_graph_is_captured(recorded, tmp_path, monkeypatch):
    x, weight = (t.half() for t in draw(Pattern(2, 16, 16, 8), 64))
    dispatch.run(x, weight, False)
    cuda.forget()
    if not recorded:
        monkeypatch.setattr(tuning_cache, "load", lambda *_: None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dispatch.run(x, weight, False)
    assert not cuda._decisions
    x.normal_()
    y.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y, ks_reference(x, weight), rtol=2e-3, atol=2e-3)


def test_unfit_operands_may_first_come_in_a_capture():
    """What takes them is compiled and loaded there, which is no work of the stream."""
    x, weight = (t.half() for t in draw(Pattern(4, 64, 64, 8), 64))
    problem = cuda.problem_key_of(x, weight, False).problem
    call = mma16.launcher(problem, next(mma16.configs(problem, H200)), 0)
    call(x, weight)
    unfit = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(unfit, weight)
    unfit.mul_(-2)
    y.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y, ks_reference(unfit, weight), rtol=2e-3, atol=4e-3)


FOLDS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 96]


@pytest.mark.parametrize("d", FOLDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_tiles_of_the_mma16_family(d, dtype):
    """Random tiles, tails of the batch and of c, and operands unfit for 16-byte access."""
    generator = random.Random(d)
    for b, c in [(64, 48), (48, 72), (8, 8), (24, 16)]:
        pattern = Pattern(3, b, c, d)
        problem = Problem.of_factor(pattern, name_of(dtype), False)
        assert mma16.unsupported_reason(problem, H200) is None
        tiles = list(mma16.configs(problem, H200))
        tiles = generator.sample(tiles, min(4, len(tiles)))
        targets = [arch.of_device(0)] * len(tiles)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(nvrtc.cubin, [mma16.source(problem, t) for t in tiles], targets))
        exact_x, exact_w = draw(pattern, 1000)
        x, weight = exact_x.to(dtype), exact_w.to(dtype)
        truth = ks_reference(x.double(), weight.double())
        allowed = ALLOWED_RATIO * relative_error(cpu.multiply_by_bmm(x, weight, False), truth)
        padded = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape)
        padded.copy_(x)
        for tile in tiles:
            launch = mma16.launcher(problem, tile, 0)
            for rows in (1, 7, 63, 1000):
                poison(rows * pattern.out_features, dtype)
                assert relative_error(launch(x[:rows], weight), truth[:rows]) <= allowed, tile
            assert relative_error(launch(padded, weight), truth) <= allowed, tile
            strided = weight.transpose(1, 2).contiguous().transpose(1, 2)
            assert relative_error(launch(x, strided), truth) <= allowed, tile
            wide = torch.cat([x, x], dim=1)[:, : pattern.in_features]
            assert relative_error(launch(wide, weight), truth) <= allowed, tile
