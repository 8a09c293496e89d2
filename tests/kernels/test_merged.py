"""A chain as one dense matrix or factor: what it gives, when it is taken, and when it is not."""

import functools
from dataclasses import replace

import pytest
import torch
from checks import H200
from torch._dynamo.utils import counters
from toy_chains import SPEC, toy_device

import ksopt
from ksopt import KSLinear, ks_linear, precision
from ksopt.epilogue import ACTIVATIONS, GATES, with_epilogue
from ksopt.kernels import (
    merged,
    plan_autotuner,
    planner,
    registry,
    tuning_cache,
    weight_cache,
)
from ksopt.kernels.backends import cpu
from ksopt.kernels.candidate import MERGED, Candidate
from ksopt.kernels.families.common import pytorch_cost
from ksopt.kernels.mergeable import can_merge
from ksopt.kernels.merged import Merged, merge
from ksopt.kernels.operands import Operands, problem_of
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.measure.accuracy import AccuracyCheck
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference, chain_to_dense, to_dense

CHAIN = Chain.parse("(1,6,5,5)*(5,5,7,1)")
TO_FACTOR = Chain.parse("(4,3,6,2)*(1,24,5,2)")  # (1,12,5,2)
WITH_ZEROS = Chain.parse("(3,1,2,1)*(2,3,2,1)")  # no pattern has its product's support
LONGER = Chain.parse("(1,6,4,3)*(3,4,3,1)*(1,9,7,1)")


def draw(chain=CHAIN, siblings=1, dtype=torch.float32):
    """Weights as a module stores them."""
    shapes = [p.weight_shape for _ in range(siblings) for p in chain]
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def product(x, weights, siblings=1, last=False):
    """In float64."""
    length, layout = len(weights) // siblings, "batch_last" if last else "batch_first"
    wide = [weight.detach().double() for weight in weights]
    parts = [
        chain_reference(x.double(), wide[at : at + length], layout)
        for at in range(0, len(wide), length)
    ]
    return torch.cat(parts, 0 if last else -1)


@pytest.mark.parametrize("chain", [CHAIN, LONGER], ids=str)
@pytest.mark.parametrize("siblings", [1, 3])
def test_the_matrix_is_the_product_rounded_once(chain, siblings, monkeypatch):
    monkeypatch.setattr(merged, "_COLUMNS", 4)
    weights = draw(chain, siblings, torch.bfloat16)
    wide = [weight.detach().double() for weight in weights]
    length = len(chain)
    parts = [chain_to_dense(wide[at : at + length]) for at in range(0, len(wide), length)]
    matrix = merge(weights, siblings)
    assert matrix.shape == (siblings * chain.out_features, chain.in_features)
    error = (matrix.double() - torch.cat(parts)).abs()
    exact = torch.cat([chain_to_dense([w.abs() for w in wide[at : at + length]])
                       for at in range(0, len(wide), length)])  # fmt: skip
    assert (error <= 2**-8 * exact).all()


@pytest.mark.parametrize(
    "chain",
    [
        TO_FACTOR,
        Chain.parse("(2,3,4,4)*(2,4,3,4)"),
        Chain.parse("(6,16,4,3)*(24,3,7,1)"),
        Chain.parse("(2,1,3,2)*(2,3,4,2)*(1,2,5,8)"),
        Chain.parse("(6,1,1,1)*(3,1,1,2)"),
    ],
    ids=str,
)
def test_the_factor_is_the_product_rounded_once(chain, monkeypatch):
    monkeypatch.setattr(merged, "_COLUMNS", 3)
    weights = draw(chain, dtype=torch.bfloat16)
    wide = [weight.detach().double() for weight in weights]
    factor = merge(weights)
    assert factor.shape == chain.product_support.weight_shape
    assert factor.is_contiguous()
    error = (to_dense(factor.double()) - chain_to_dense(wide)).abs()
    assert (error <= 2**-8 * chain_to_dense([weight.abs() for weight in wide])).all()


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem(CHAIN, "bfloat16", False), True),
        (Problem(CHAIN, "float32", True, siblings=2), True),
        (Problem(CHAIN, "float32", True, True, Epilogue(activation="silu_gate"), 2), True),
        (Problem(LONGER, "float32", False), True),
        (Problem(CHAIN, "float16", False), False),  # a product may lie outside its range
        (Problem(CHAIN, "float64", False), False),
        (Problem(CHAIN[:1], "float32", False, epilogue=Epilogue(True)), False),
        (Problem(TO_FACTOR, "float32", True, True, Epilogue(True, "silu", True)), True),
        (Problem(TO_FACTOR, "float16", False), False),
        (Problem(TO_FACTOR, "float32", False, siblings=2), False),  # their product is no factor
        (Problem(WITH_ZEROS, "bfloat16", True, epilogue=Epilogue(True, "silu", True)), True),
        (Problem(WITH_ZEROS, "float16", False), False),
        (Problem(WITH_ZEROS, "float32", False, siblings=2), False),  # one chain's rows are repaired
        (Problem(Chain.parse("(3,1,2,1)*(2,3,2,1)*(2,2,3,1)"), "float32", False), False),
        (Problem(Chain.parse("(3,4096,2,1)*(2,3,4096,1)"), "float32", False), False),  # too large
    ],
    ids=str,
)
def test_what_can_be_merged(problem, expected):
    assert can_merge(problem) == expected


@torch.no_grad()
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("chain", "siblings"), [(CHAIN, 1), (CHAIN, 2), (TO_FACTOR, 1)], ids=str)
@pytest.mark.parametrize("batch", [(8,), (2, 3), ()], ids=str)
def test_every_epilogue_layout_and_place(last, chain, siblings, batch):
    def rows(features):
        return torch.randn((features, *batch) if last else (*batch, features))

    weights, features = draw(chain, siblings), siblings * chain.out_features
    x, bias, summand = rows(chain.in_features), torch.randn(features), rows(features)
    half = summand.narrow(0 if last else -1, 0, chain.out_features).contiguous()
    for activation in (*ACTIVATIONS, *(GATES if siblings == 2 else ())):
        residual = half if activation in GATES else summand
        for around in ((None, None), (bias, None), (None, residual), (bias, residual)):
            epilogue = Epilogue(around[0] is not None, activation, around[1] is not None)
            problem = Problem(chain, "float32", last, epilogue=epilogue, siblings=siblings)
            y = product(x, weights, siblings, last).float()
            expected = with_epilogue(y, around[0], activation, around[1], last)
            # What a gate multiplies has the rounding of the sums that it was made of.
            size = 1e-5 * y.square().max().item() if activation in GATES else 1e-5
            near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=size)
            for strided in (False, True):
                out = torch.full((*expected.shape, 2) if strided else expected.shape, torch.nan)
                out = out[..., 0] if strided else out
                near(Merged(problem)(x, weights, *around, out), expected)
                near(out, expected)
            near(Merged(problem)(x, weights, *around), expected)


def by_reference(problem):
    """Stands in for the compiled kernel: a row whose first output is not finite is added again."""

    def repair(x, weights, bias, y):
        exact = product(x, weights, last=problem.batch_last).to(y.dtype)
        if bias is not None:
            exact += bias[:, None] if problem.batch_last else bias
        first = y[:1] if problem.batch_last else y[..., :1]
        return y.copy_(torch.where(first.isfinite(), y, exact))

    return repair


@torch.no_grad()
@pytest.mark.parametrize("last", [False, True])
def test_rows_that_zeros_spoil_are_repaired_before_the_activation(last):
    weights, x = draw(WITH_ZEROS), torch.randn(*((4, 5) if last else (5, 4)))
    (x.T if last else x)[1, 2], (x.T if last else x)[3, 0] = -torch.inf, torch.nan
    bias, residual = torch.randn(3), torch.randn(*((3, 5) if last else (5, 3)))
    problem = Problem(WITH_ZEROS, "float32", last, epilogue=Epilogue(True, "relu", True))
    y = Merged(problem, by_reference(problem))(x, weights, bias, residual)
    expected = with_epilogue(product(x, weights, last=last).float(), bias, "relu", residual, last)
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert 0 < y.isnan().sum() < y.numel() // 5 * 2  # not all outputs of the two rows


def test_a_matrix_with_zeros_is_for_gpus_alone():
    wide = Problem(Chain.parse("(132,3,144,1)*(36,88,2,6)"), "bfloat16", False)
    assert registry.candidates(wide, 1140, H200)[-1].name == MERGED
    assert registry.best_predicted(wide, 1140, H200)[0].name == MERGED
    assert registry.by_merging(wide, 1140, None) == []


@torch.no_grad()
@pytest.mark.parametrize("chain", [CHAIN, TO_FACTOR], ids=str)
def test_what_is_not_finite_reaches_what_it_reached(chain):
    weights, x = draw(chain), torch.randn(5, chain.in_features)
    x[1, 2], x[3, 4] = torch.inf, torch.nan
    y = Merged(Problem(chain, "float32", False))(x, weights)
    expected = product(x, weights)
    assert torch.equal(y.isfinite(), expected.isfinite())


def by_merging_at_once(problem, *_):
    return [Candidate(MERGED, problem, 1e-3)] if can_merge(problem) else []


@pytest.fixture
def device(monkeypatch, tmp_path):
    """The CPU with a spec, so that plans are made; merging is predicted to be the fastest."""
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KSOPT_TUNE", "model")
    monkeypatch.setattr(registry, "by_merging", by_merging_at_once)
    with toy_device():
        cpu.forget()
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()
        cpu.forget()


@pytest.fixture
def merges(monkeypatch):
    """The matrices that are made."""
    result = []

    def counted(weights, siblings=1):
        result.append(merge(weights, siblings))
        return result[-1]

    monkeypatch.setattr(merged, "merge", counted)
    return result


@pytest.fixture(params=[CHAIN, TO_FACTOR], ids=str)
def layer(request):
    chain = request.param
    with torch.no_grad():
        yield KSLinear(chain.in_features, chain.out_features, chain, activation="gelu")


def expected_of(layer, x):
    y = product(x, list(layer.weights)).float() + layer.bias
    return torch.nn.functional.gelu(y).detach()


def test_a_layer_makes_its_matrix_once_a_version(device, layer, merges):
    x = torch.randn(8, layer.in_features)
    for rows in (x, 2 * x, x[:5]):
        torch.testing.assert_close(layer(rows), expected_of(layer, rows))
    assert len(merges) == 1
    layer.weights[1].mul_(-2)
    torch.testing.assert_close(layer(x), expected_of(layer, x))
    assert len(merges) == 2


def test_without_room_it_does_not_race(device, layer, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "measure")
    monkeypatch.setattr(weight_cache, "limit_bytes", lambda _: 0)
    x = torch.randn(8, layer.in_features)
    operands = Operands(x, tuple(layer.weights), layer.bias)
    record = plan_autotuner.tune(operands, problem_of(operands, "gelu", False, 1), 0.01)
    assert record is None or "merged" not in [one.way for one in record.timed]


@torch.no_grad()
def test_layers_that_share_a_factor_keep_a_product_each(device, layer, merges):
    twin = KSLinear(layer.in_features, layer.out_features, layer.chain, activation="gelu")
    twin.weights[0] = layer.weights[0]
    x = torch.randn(8, layer.in_features)
    for _ in range(3):
        for one in (layer, twin):
            torch.testing.assert_close(one(x), expected_of(one, x))
    assert len(merges) == 2


def test_a_cached_product_needs_no_room(device, layer, merges, monkeypatch):
    x = torch.randn(8, layer.in_features)
    limit = 3 * 4 * layer.chain.product_support.nnz
    monkeypatch.setattr(weight_cache, "limit_bytes", lambda _: limit)
    for _ in range(2):
        layer(x)
    problem = Problem(layer.chain, "float32", False, epilogue=Epilogue(True, "gelu"))
    assert merged.may_keep(problem, list(layer.weights))
    monkeypatch.setattr(weight_cache, "limit_bytes", lambda _: limit // 3)
    assert merged.may_keep(problem, list(layer.weights))
    assert len(merges) == 1


@torch.no_grad()
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e30])
def test_a_product_that_is_not_finite_is_not_used(device, layer, value):
    layer.bias.zero_()
    for weight in layer.weights:
        weight.view(-1)[1] = value
    x = 1e-30 * torch.randn(8, layer.in_features)
    expected = torch.nn.functional.gelu(chain_reference(x, list(layer.weights)))
    for _ in range(2):
        torch.testing.assert_close(layer(x), expected, equal_nan=True)


@torch.no_grad()
def test_products_of_tiny_weights_underflow(device, layer, merges):
    """The limit that docs/backend.md states."""
    layer.bias.zero_()
    for weight in layer.weights:
        weight.fill_(1e-25)
    x = torch.full((8, layer.in_features), 1e25)
    assert torch.equal(layer(x), torch.zeros(8, layer.out_features))
    assert len(merges) == 1
    assert (chain_reference(x, list(layer.weights)) > 0).all()


@torch.no_grad()
def test_it_is_computed_in_full_precision(device, layer, merges):
    seen = []
    before = torch.backends.cuda.matmul.fp32_precision
    result = chain_reference

    def noted(*arguments):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return result(*arguments)

    with pytest.MonkeyPatch.context() as patch, precision.fp32_products("tf32"):
        patch.setattr(merged, "chain_reference", noted)
        merge(list(layer.weights))
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert set(seen) == {"ieee"}
    assert torch.backends.cuda.matmul.fp32_precision == before


@torch.no_grad()
@pytest.mark.parametrize(("mean", "is_close"), [(0.0, True), (100.0, False)])
def test_it_is_not_taken_where_factors_are_much_closer(mean, is_close):
    """Factors that cancel what is common in x round little, and their product as ever."""
    chain = Chain.parse("(1,64,32,1)*(1,32,64,1)")
    weights = draw(chain, 1, torch.bfloat16)
    weights[1] -= weights[1].mean(2, keepdim=True)
    weights[1] -= weights[1].mean(2, keepdim=True)
    x = (torch.randn(200, 64) + mean).bfloat16()
    check = AccuracyCheck(x, weights, "batch_first")
    y = Merged(Problem(chain, "bfloat16", False))(x, weights)
    assert (check.judge(y.clone(), True) is None) == is_close


def test_trained_weights_are_not_merged(device, merges):
    layer = KSLinear(CHAIN.in_features, CHAIN.out_features, CHAIN, activation="gelu")
    x = torch.randn(8, CHAIN.in_features)
    y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(y.detach(), expected_of(layer, x))
    assert not merges


@torch.no_grad()
def test_what_is_no_parameter_is_not_merged(device, merges):
    x, weights = torch.randn(8, CHAIN.in_features), [one.detach() for one in draw()]
    for _ in range(3):
        torch.testing.assert_close(ks_linear(x, weights), product(x, weights).float())
    assert not merges


def test_without_room_it_is_not_merged(device, layer, merges, monkeypatch):
    limit = 4 * layer.chain.product_support.nnz - 1
    monkeypatch.setattr(weight_cache, "limit_bytes", lambda _: limit)
    x = torch.randn(8, layer.in_features)
    torch.testing.assert_close(layer(x), expected_of(layer, x))
    problem = Problem(layer.chain, "float32", False, epilogue=Epilogue(True, "gelu"))
    y = Merged(problem)(x, list(layer.weights), layer.bias)
    torch.testing.assert_close(y, expected_of(layer, x))
    assert not merges


def test_without_memory_its_factors_compute_it(device, layer, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(merged, "merge", fail)
    x = torch.randn(8, layer.in_features)
    torch.testing.assert_close(layer(x), expected_of(layer, x))


def test_the_race_counts_it_and_says_what_it_costs(device, layer, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "measure")
    x = torch.randn(8, layer.in_features)
    operands = Operands(x, tuple(layer.weights), layer.bias)
    problem = problem_of(operands, "gelu", False, 1)
    record = plan_autotuner.tune(operands, problem, 0.01)
    timed = {(one.way, one.weight) for one in record.timed}
    assert [mode for way, mode in timed if way == "merged"] == ["stored"]
    names = [one.way for one in record.timed]
    at = names.index("merged")
    record = replace(record, stored=at)
    assert record.timed[record.cached].way == "factors"
    tuning_cache.save(cpu.fingerprint(), record)
    plan_autotuner.forget()
    torch.testing.assert_close(layer(x), expected_of(layer, x))
    plan = planner.plan_of(problem, 8, device="cpu")
    assert plan.ways == ("merged",)
    product = "one dense matrix" if layer.chain.is_dense_support else "one factor, (1,12,5,2),"
    assert f"multiplied to {product} of 0.0 MiB" in plan.launches[0].choice.reason
    repacked = planner.plan_of(problem, 8, device="cpu", repacked=True)
    assert "merged" not in repacked.ways


def test_far_from_the_fastest_it_is_not_tried(monkeypatch):
    problem = Problem(CHAIN, "float32", False)
    names = [one.name for one in registry.candidates(problem, 100, SPEC)]
    assert names[-1] == "merged"
    (factors,) = registry.plain(problem, 100, SPEC)
    monkeypatch.setattr(pytorch_cost, "matrix_us", lambda *_: 2.1 * factors.predicted_us)
    assert "merged" not in [one.name for one in registry.candidates(problem, 100, SPEC)]


def test_a_factor_is_predicted_as_one():
    chain = Chain.parse("(2,304,10176,1)*(8,424,32,6)")  # (2,304,768,1)
    alone = Problem.of_factor(chain.product_support, "bfloat16", False)
    usual = registry.best_predicted(alone, 6062, SPEC)[0].predicted_us
    plain, activated = (
        registry.by_merging(Problem(chain, "bfloat16", False, epilogue=around), 6062, SPEC)
        for around in (Epilogue(), Epilogue(True, "gelu"))
    )
    assert plain[0].predicted_us == usual < activated[0].predicted_us
    assert registry.candidates(plain[0].problem, 6062, SPEC)[-1].name == "merged"


@pytest.mark.parametrize("backend", ["ksopt", "inductor"])
def test_a_compiled_layer_takes_it(device, layer, merges, backend):
    x = torch.randn(8, layer.in_features)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected_of(layer, x))
    assert len(merges) == 1


class ByEinsum(torch.nn.Module):
    """The same layer as its author may spell it."""

    def __init__(self):
        super().__init__()
        self.left, self.right = draw()
        self.bias = torch.nn.Parameter(torch.randn(CHAIN.out_features))

    def forward(self, x):
        for weight in (self.right, self.left):
            a, _, c, d = weight.shape
            x = torch.einsum("nacd,abcd->nabd", x.view(-1, a, c, d), weight).reshape(len(x), -1)
        return torch.nn.functional.gelu(x + self.bias)


@torch.no_grad()
def test_explain_says_so(device, merges):
    module, x = ByEinsum(), torch.randn(8, CHAIN.in_features)
    expected = module(x)
    explanation = ksopt.explain(module, x)
    (site,) = explanation.sites
    assert site.reason.endswith(
        "One dense matrix of 0.0 MiB beside its factors computes all of it, with bias."
    )
    compiled = torch.compile(module, backend="ksopt", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x), expected)
    assert len(merges) == 1


class Scaled(ByEinsum):
    """One whose weights the graph computes."""

    def forward(self, x):
        y = ksopt.ks_linear(x, [self.left.exp(), self.right * 2], self.bias)
        return torch.nn.functional.gelu(y)


@pytest.mark.slow
@torch.no_grad()
def test_weights_that_the_graph_computes_are_not_merged(device, merges):
    """They would be prepared at each call, so that it is not judged by what is cached."""
    module, x = Scaled(), torch.randn(8, CHAIN.in_features)
    counters.clear()
    compiled = torch.compile(module, backend="ksopt", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), module(x))
    assert counters["ksopt"]["layers_in_one_launch"] == 0
    assert not merges
