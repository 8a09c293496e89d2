"""Layers that the host library runs by their plan: a chain's kernel, or one launch per factor.

The plan is set here, not measured, so that what is tested does not depend on which is the fastest.
"""

import gc
import threading

import pytest
import torch
from profiled import kernels_of

import ksopt
from ksopt import KSLinear, ops
from ksopt.epilogue import ACTIVATIONS
from ksopt.kernels import host_plans, plan_autotuner, registry, weight_cache, weight_scopes
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.backends import cuda
from ksopt.kernels.candidate import Pair
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem, ProblemKey
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the chain's kernel needs compute capability 9.0",
    ),
]

CHAIN = Chain.parse("(1,192,48,2)*(2,48,192,1)")
ROWS = 600
PLANS = ("chain", "factors")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")

    def forget():
        plan_autotuner.forget()
        cuda.forget()
        weight_cache.refresh()

    forget()
    with torch.no_grad():
        yield
    forget()


def pair_of(problem, rows, spec):
    """Kernels of two families, neither of which is the factors' own choice."""
    left, right = problem.factors()
    first, second = (
        registry.ranked(family_of(name), factor, rows, spec)[0]
        for name, factor in (("mma16", right), ("wgmma16", left))
    )
    return registry.pair(problem, Pair(first, second), rows, spec)


class Case:
    """Operands of a layer whose plan is decided."""

    def __init__(self, plan, activation="gelu", residual=False, siblings=1, rows=ROWS, device=0):
        place = torch.device("cuda", device)

        def draw(*shape):
            return torch.randn(shape, device=place).bfloat16()

        self.chain = CHAIN
        self.x = draw(rows, CHAIN.in_features)
        self.weights = [draw(*p.weight_shape) / p.c**0.5 for _ in range(siblings) for p in CHAIN]
        features = siblings * CHAIN.out_features
        self.bias = draw(features)
        self.residual = draw(rows, features) if residual else None
        self.activation, self.siblings = activation, siblings
        after = Epilogue(True, activation, residual)
        problem = Problem(CHAIN, "bfloat16", False, epilogue=after, siblings=siblings)
        if plan == "chain":
            spec = DeviceSpec.of_device(device)
            way = registry.ranked(family_of("chain_wgmma16"), problem, rows, spec)[0]
        elif plan == "pair":
            way = pair_of(problem, rows, DeviceSpec.of_device(device))
        else:
            way = registry.rule(problem)
        self.call = way.build(device)
        choice = Choice(way, self.call, "model")
        key = ProblemKey.of_problem(problem, rows)
        plan_autotuner._decisions[key, place] = Decision(choice, choice)
        for factor in problem.factors():
            x, weight = draw(rows, factor.pattern.in_features), draw(*factor.pattern.weight_shape)
            cuda.remember(
                cuda.problem_key_of(x, weight, False), device, decision_of(factor, rows, device)
            )

    def arguments(self):
        return self.weights, self.bias, self.residual, self.activation, False, self.siblings

    def known(self, x=None, out=None):
        return host_plans.run(self.x if x is None else x, *self.arguments(), out=out)

    def by_python(self):
        y = self.call(self.x, tuple(self.weights), self.bias, self.residual)
        return y.clone()

    def run(self):
        y = ops.chain(self.x, *self.arguments())
        self.check(y)
        return y

    def check(self, y):
        """As near to float64 as bfloat16 is."""
        parts = []
        for at in range(0, len(self.weights), 2):
            own = [weight.double() for weight in self.weights[at : at + 2]]
            parts.append(chain_reference(self.x.double(), own))
        from ksopt.epilogue import with_epilogue

        residual = None if self.residual is None else self.residual.double()
        truth = torch.cat(parts, -1)
        truth = with_epilogue(truth, self.bias.double(), self.activation, residual)
        error = float((y.double() - truth).norm() / truth.norm())
        assert error <= 1e-2, error

    def warm(self):
        for _ in range(3):
            self.run()
        y = self.known()
        assert y is not None
        self.check(y)
        return y


def decision_of(problem, rows, device):
    """The best predicted kernel, which the host library launches by itself."""
    spec = cuda.spec_of(device)
    for way in registry.best_kernels(problem, rows, spec):
        call = way.build(device)
        if getattr(call, "entry", lambda: None)() is not None:
            choice = Choice(way, call, "model")
            return Decision(choice, choice)
    pytest.skip(f"no kernel of {problem} that the host library launches")


@pytest.fixture(params=PLANS)
def case(request):
    return Case(request.param)


@pytest.mark.parametrize("siblings", [1, 2])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_the_result_is_that_of_python(plan, activation, residual, siblings):
    case = Case(plan, activation, residual, siblings)
    y = case.warm()
    assert torch.equal(y, case.by_python())
    out = torch.full_like(y, torch.nan)
    assert case.known(out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, y)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 4133])
def test_batches(rows):
    case = Case("chain", rows=rows)
    assert torch.equal(case.warm(), case.by_python())


CHANGES = {
    "the first": lambda case: case.weights[0].mul_(-2),
    "the second": lambda case: case.weights[1].add_(1),
    "other data": lambda case: setattr(
        case.weights[1], "data", torch.randn_like(case.weights[1]) / 8
    ),
    "unseen and refreshed": lambda case: (case.weights[0].data.mul_(3), ksopt.refresh()),
    "another tensor of the memory": lambda case: case.weights.__setitem__(
        1, case.weights[1].data.mul_(2)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_has_changed_is_packed_again(case, change):
    case.warm()
    CHANGES[change](case)
    y = case.known()
    if y is not None:  # by factors that take the weight as it is
        case.check(y)
    case.warm()


def test_a_freed_weights_memory_is_not_mistaken(case):
    for _ in range(5):
        case.warm()
        shape, address = case.weights[1].shape, case.weights[1].data_ptr()
        case.weights[1] = None
        gc.collect()
        case.weights[1] = torch.randn(shape, device="cuda").bfloat16() / 8
        if case.weights[1].data_ptr() == address:
            y = case.known()
            if y is not None:
                case.check(y)


def test_a_captured_graph_packs_at_each_replay(case):
    case.warm()
    graph, x = torch.cuda.CUDAGraph(), case.x
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        y = ops.chain(x, *case.arguments())
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        case.weights[0].mul_(1.5)
        graph.replay()
        torch.cuda.synchronize()
        case.check(y)


def test_another_stream_waits_for_what_is_prepared(case):
    case.warm()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            case.weights[0].mul_(1.1)
            case.run()
    torch.cuda.synchronize()
    case.run()


def test_weights_that_change_and_deterministic_algorithms(case, deterministic):
    case.warm()
    with weight_scopes.repacked():
        case.run()
    with deterministic():
        assert case.known() is None


def test_rows_that_lie_otherwise_are_pythons():
    case = Case("chain")
    case.warm()
    wide = torch.randn(ROWS, 400, device="cuda").bfloat16()
    for rows in (wide[:, 8:392], wide[:, 3:387], case.x.T.contiguous().T):
        assert case.known(rows) is None
        case.x = rows
        case.run()


def test_two_threads(case):
    case.warm()
    expected, wrong = case.known(), []

    def multiply():
        with torch.no_grad():
            for _ in range(200):
                y = ops.chain(case.x, *case.arguments())
                torch.cuda.synchronize()
                if not torch.equal(y, expected):
                    wrong.append(1)

    threads = [threading.Thread(target=multiply) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_that_never_used_cuda_launches_it(case):
    case.warm()
    results = []
    thread = threading.Thread(target=lambda: results.append(case.known()))
    thread.start()
    thread.join()
    case.check(results[0])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_layer(mode, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "measure")
    torch._dynamo.reset()
    layer = KSLinear(384, 384, CHAIN, activation="gelu").cuda().bfloat16()
    compiled = torch.compile(layer, backend="ksopt", mode=mode)
    case = Case("chain")
    case.weights, case.bias = list(layer.weights), layer.bias
    for _ in range(5):
        case.x = torch.randn(4096, 384, device="cuda").bfloat16()
        case.check(compiled(case.x).clone())
        layer.weights[1].mul_(1.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_the_second_device():
    case = Case("chain", device=1)
    y = case.warm()
    assert y.device.index == 1
    assert torch.equal(y, case.by_python())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_pair_of_kernels_is_two_launches_without_python(activation, residual):
    case = Case("pair", activation, residual)
    for _ in range(3):
        case.run()
    known = case.known()
    assert known is not None
    assert torch.equal(known, case.by_python())
    names = kernels_of(case.known)
    assert len(names) == 2, names
    assert "_mma16_" in names[0], names
    assert "_wgmma16_" in names[1], names
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.chain(case.x, *case.arguments())
    case.x.normal_()
    graph.replay()
    case.check(y)
