"""Both weight gradients of a chain in one launch, against float64."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from ksopt.kernels import chain_gradients
from ksopt.kernels.families import chain_grads_wgmma16 as launcher
from ksopt.kernels.families.common import chain_grads_tile as kernels
from ksopt.kernels.families.common.chain_grads_tile import Chain
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops.chain_gradients import ks_chain_weight_grads
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns import chain as patterns

pytestmark = pytest.mark.gpu
TEXT = "(1,192,64,2)*(2,64,192,1)"


@pytest.fixture(autouse=True)
def by_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions decide here; in test_gradient_races_on_gpu.py races do."""
    monkeypatch.setenv("KSOPT_TUNE", "model")


@pytest.fixture
def spec() -> DeviceSpec:
    spec = DeviceSpec.of_device(0)
    if spec.capability != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    return spec


def chain_of(text: str) -> Chain:
    left, right = patterns.Chain.parse(text)
    return left, right


def operands(chain: Chain, rows: int, dtype: torch.dtype, siblings: int = 1) -> list[Tensor]:
    """Each sibling's grad, between and grad_between, and x: rows lie apart, with NaN between them.

    Those of siblings lie ever farther apart.
    """
    left, right = chain
    results = []
    for features in (left.out_features, left.in_features, right.out_features):
        results += [drawn(rows, features, dtype, 16 * at) for at in range(1, siblings + 1)]
    return [*results, drawn(rows, right.in_features, dtype, 16)]


def drawn(rows: int, features: int, dtype: torch.dtype, beside: int) -> Tensor:
    memory = torch.full((rows, features + beside), float("nan"), dtype=dtype, device="cuda")
    memory[:, 8 : 8 + features] = torch.randn(rows, features, device="cuda")
    return memory[:, 8 : 8 + features]


def of_operator(inputs: list[Tensor], with_bias: bool = True) -> list[Tensor]:
    """The gradients of siblings of ``TEXT``, by the operator."""
    siblings = len(inputs) // 3
    lists = (inputs[at : at + siblings] for at in range(0, 3 * siblings, siblings))
    results: list[Tensor] = ks_chain_weight_grads(*lists, inputs[-1], 1, 2, 2, 1, with_bias)
    return results


def assert_right(results: list[Tensor], inputs: list[Tensor], chain: Chain) -> None:
    """The weights' gradients, and those of the biases if any."""
    *several, x = (one.flatten(0, -2) for one in inputs)
    siblings = len(several) // 3
    unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[x.dtype]
    for at in range(siblings):
        grad, between, grad_between = several[at::siblings]
        both = zip(results[2 * at :], chain, (grad, grad_between), (between, x), strict=False)
        for dk, p, dy, z in both:
            truth = weight_grad_decomposed(dy.double(), z.double(), p.a, p.d, False)
            sizes = weight_grad_decomposed(dy.abs().double(), z.abs().double(), p.a, p.d, False)
            wrong = ~((dk.double() - truth).abs() <= unit * truth.abs() + 2e-6 * sizes + 1e-6)
            assert not wrong.any(), f"{p} of {at}: {int(wrong.sum())} of {p.nnz} are wrong"
        if len(results) > 2 * siblings:
            truth, sizes = grad.double().sum(0), grad.abs().double().sum(0)
            wrong = (results[2 * siblings + at].double() - truth).abs()
            assert (wrong <= unit * truth.abs() + 2e-6 * sizes).all()


def poisoned(
    kernel: launcher.ChainGradients, inputs: list[Tensor], with_bias: bool
) -> list[Tensor]:
    """The gradients, written over NaN."""
    x, siblings = inputs[-1], kernel.launch.siblings
    results = [x.new_full(p.weight_shape, torch.nan) for _ in range(siblings) for p in kernel.chain]
    if with_bias:
        results += [x.new_full((inputs[0].shape[-1],), torch.nan) for _ in range(siblings)]
    elements = siblings * sum(launcher.share_elements(kernel.chain, kernel.launch, with_bias))
    shares = x.new_full((elements,), torch.nan, dtype=torch.float32) if elements else None
    kernel.write(inputs, results, shares)
    return results


def test_random_chains(spec: DeviceSpec) -> None:
    """Every cluster and number of warpgroups; rows that fill no stage."""
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    torch.manual_seed(seed)
    draw = random.Random(seed)
    clusters = set()
    for _ in range(40):
        d = draw.choice((2, 2, 3, 4, 5, 6, 8))
        a = draw.choice((2, 3, 4))
        wide = 8 * draw.randint(1, 20) * d  # features of a block of the right factor
        c = wide * a // d
        left = patterns.Pattern(1, 8 * draw.randint(1, 40), c, d)
        right = patterns.Pattern(a, wide, 8 * draw.randint(1, 40), 1)
        chain = (left, right)
        if (left.nnz + right.nnz) * 8 > 2**25:
            continue
        rows = draw.choice((1, 63, 64, 65, 777, 3000, 8200))
        dtype = draw.choice((torch.float16, torch.bfloat16))
        config = draw.choice(list(kernels.configs(chain)))
        clusters.add(config.cluster)
        shares = draw.choice(((1, 1), (1, 1), (2, 1), (1, 3), (4, 2)))
        siblings = draw.choice((1, 1, 2, 3, 4))
        launch = kernels.launch_of(config, rows, shares, siblings)
        name, with_bias = str(dtype).removeprefix("torch."), draw.random() < 0.5
        kernel = launcher.ChainGradients(chain, name, launch, 0, with_bias)
        inputs = operands(chain, rows, dtype, siblings)
        results = poisoned(kernel, inputs, with_bias)
        assert_right(results, inputs, chain)
        for one, other in zip(results, poisoned(kernel, inputs, with_bias), strict=True):
            assert torch.equal(one, other), "not the same at every call"
    assert len(clusters) > 2


@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("cluster", kernels.CLUSTERS)
@pytest.mark.parametrize("text", [TEXT, "(1,512,128,2)*(2,128,512,1)"])
def test_every_cluster(spec: DeviceSpec, text: str, cluster: int, siblings: int) -> None:
    """The best predicted config of each size, which must be one that the device can run."""
    chain = chain_of(text)
    for rows in (1, 333, 4096):
        launches = [
            one
            for config in kernels.configs(chain)
            if config.cluster == cluster
            for one in kernels.launches_of(config, chain, rows, spec, siblings)
        ]
        launch = min(launches, key=lambda one: kernels.predicted_us(one, chain, rows, spec))
        kernel = launcher.ChainGradients(chain, "bfloat16", launch, 0, True)
        inputs = operands(chain, rows, torch.bfloat16, siblings)
        assert_right(poisoned(kernel, inputs, True), inputs, chain)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("batch", [(4096,), (4, 5, 100), (1,)], ids=str)
def test_a_known_call_needs_no_python(
    spec: DeviceSpec,
    monkeypatch: pytest.MonkeyPatch,
    batch: tuple[int, ...],
    siblings: int,
    with_bias: bool,
) -> None:
    from ksopt.jit import host

    assert host.load() is None
    chain = chain_of(TEXT)
    rows = torch.Size(batch).numel()
    inputs = [one.view(*batch, -1) for one in operands(chain, rows, torch.bfloat16, siblings)]
    first = of_operator(inputs, with_bias)
    assert_right(first, inputs, chain)
    assert len(first) == siblings * (3 if with_bias else 2)
    run = chain_gradients.run
    is_one = chain_gradients.is_by_kernel(
        chain, torch.bfloat16, rows, first[0].device, with_bias, siblings
    )
    assert is_one or rows == 1

    def refuse(*args: object) -> object:
        assert not is_one, "Python was entered"
        return run(*args)

    monkeypatch.setattr(chain_gradients, "run", refuse)
    again = of_operator(inputs, with_bias)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_operands_that_it_may_be_called_with(spec: DeviceSpec) -> None:
    """Rows that begin anywhere, batches in another order, and none at all."""
    chain = chain_of(TEXT)
    widths = [384, 128, 128, 384]
    odd = [torch.randn(1024 * n + 1, device="cuda").bfloat16()[1:].view(1024, n) for n in widths]
    turned = [torch.randn(64, 16, n, device="cuda").bfloat16().transpose(0, 1) for n in widths]
    for inputs in (odd, turned):
        results = of_operator(inputs)
        assert_right(results, [one.contiguous() for one in inputs], chain)
    none = [one[:0] for one in odd]
    assert not any(one.any() for one in of_operator(none))


@pytest.mark.parametrize("siblings", [1, 3])
def test_it_can_be_captured(spec: DeviceSpec, siblings: int) -> None:
    chain = chain_of(TEXT)
    inputs = operands(chain, 8192, torch.bfloat16, siblings)
    expected = of_operator(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = of_operator(inputs)
    for _ in range(2):
        for one in results:
            one.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_eager_and_compiled_training_take_it(spec: DeviceSpec) -> None:
    from torch.profiler import ProfilerActivity, profile

    from ksopt import KSLinear

    torch.manual_seed(1)
    for bias in (True, False):
        layer = KSLinear(384, 384, TEXT, bias=bias).cuda().bfloat16()
        x, grad = (torch.randn(8192, 384, device="cuda").bfloat16() for _ in range(2))
        actual = []
        for function in (layer, torch.compile(layer, backend="ksopt")):
            for _ in range(2):
                layer.zero_grad()
                with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                    function(x).backward(grad)
                    torch.cuda.synchronize()
            names = [event.key for event in profiled.key_averages()]
            assert any(name.startswith("ksopt_chain_grads_wgmma16_bfloat16") for name in names)
            assert not any("ksopt_weight_grad" in name for name in names)
            actual.append([weight.grad.clone() for weight in layer.parameters()])
        twin = KSLinear(384, 384, TEXT, bias=bias).cuda().double()
        twin.load_state_dict(layer.state_dict())
        twin(x.double()).backward(grad.double())
        for eager, compiled, truth in zip(*actual, twin.parameters(), strict=True):
            for mine in (eager, compiled):
                assert (mine.double() - truth.grad).abs().max() <= 0.02 * truth.grad.abs().max()
