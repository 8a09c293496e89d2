"""The gradient of what trained chains read, in one launch, against float64."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ksopt.kernels import input_gradients
from ksopt.kernels.families.common import input_grad_tile as tiles
from ksopt.kernels.families.common.input_grad_tile import Config, Shape
from ksopt.kernels.families.input_grad_wgmma16 import InputGradient
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops import input_gradient
from ksopt.ops.input_gradient import ks_chain_input_grad
from ksopt.ops.trained_chain import ks_chain_keeping
from ksopt.patterns.chain import Chain
from ksopt.reference import ks_reference

pytestmark = pytest.mark.gpu

LAYER = "(1,192,64,2)*(2,64,192,1)"
CHAINS = (
    LAYER,
    "(1,768,64,2)*(2,64,192,1)",
    "(1,512,128,2)*(2,128,512,1)",
    "(1,52,48,2)*(3,32,72,1)",
    "(1,72,96,1)*(3,32,40,1)",
    "(1,200,192,1)*(1,192,136,1)",
    "(1,90,64,4)*(4,64,96,1)",
    "(1,33,64,8)*(4,128,40,1)",
)
SIBLINGS = ((LAYER, 3), ("(1,52,48,2)*(3,32,72,1)", 2), ("(1,72,96,1)*(3,32,40,1)", 4))


@pytest.fixture
def spec() -> DeviceSpec:
    spec = DeviceSpec.of_device(0)
    if spec.capability != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    return spec


@pytest.fixture
def is_faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is taken wherever it computes a chain, whatever is predicted."""
    input_gradients.faster.cache_clear()
    monkeypatch.setenv("KSOPT_TUNE", "model")
    monkeypatch.setattr(input_gradients, "factors_us", lambda *_: 1e9)
    yield
    input_gradients.faster.cache_clear()


def drawn(s: Shape, rows: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, whose rows lie apart with NaN between them, and all factors."""
    features, grads, weights = s.left.out_features, [], []
    for at in range(s.siblings):
        memory = torch.full(
            (rows, features + 16 + 8 * at), float("nan"), dtype=dtype, device="cuda"
        )
        grads.append(memory[:, 8 : 8 + features].copy_(torch.randn(rows, features, device="cuda")))
        left = torch.randn(s.left.weight_shape, device="cuda") * s.left.b**-0.5
        # A view whose elements are in another order.
        right = torch.randn(s.right.weight_shape, device="cuda").transpose(0, 1).contiguous()
        weights += [left.to(dtype), (right.transpose(0, 1) * s.right.b**-0.5).to(dtype)]
    return grads, weights


def assert_right(
    to: Tensor, between: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> None:
    """Each within one rounding of its own, and the first within one of what is between, too."""
    unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[to.dtype]
    total, allowed = torch.zeros_like(to).double(), torch.zeros_like(to).double()
    planes = between.view(len(grads), *grads[0].shape[:-1], -1)
    for at, grad in enumerate(grads):
        of_left, of_right = (one.double().transpose(1, 2) for one in weights[2 * at : 2 * at + 2])
        truth = ks_reference(grad.double(), of_left)
        size = ks_reference(grad.double().abs(), of_left.abs())
        wrong = ~((planes[at].double() - truth).abs() <= unit * truth.abs() + 2e-6 * size + 1e-6)
        assert not wrong.any(), f"{int(wrong.sum())} between the factors are wrong"
        spread, sizes = (ks_reference(one, of_right.abs()) for one in (truth.abs(), size))
        total += ks_reference(truth, of_right)
        allowed += unit * 1.01 * spread + 4e-6 * sizes
    wrong = ~((to.double() - total).abs() <= allowed + unit * total.abs() + 1e-6)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are wrong"


def computed(
    kernel: InputGradient, grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """Both gradients, with nothing written beside them."""
    s, rows = kernel.shape, len(grads[0])
    apart = [
        torch.full((count + 2, features), float("nan"), device="cuda", dtype=grads[0].dtype)
        for count, features in ((rows, s.right.in_features), (s.siblings * rows, s.middle))
    ]
    to, between = (one[1:-1] for one in apart)
    if s.siblings > 1:
        between = between.view(s.siblings, rows, -1)
    kernel.launch(grads, kernel.pack(weights), between, to)
    for one in apart:
        assert one[0].isnan().all()
        assert one[-1].isnan().all()
    return [to, between]


@pytest.mark.parametrize(("text", "siblings"), [*((text, 1) for text in CHAINS), *SIBLINGS])
def test_random_tiles_and_rows(spec: DeviceSpec, text: str, siblings: int) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    torch.manual_seed(seed)
    draw, s = random.Random(seed), Shape(*Chain.parse(text), siblings)
    of_way: dict[tuple[int, int, int, int], list[Config]] = {}
    for tile in tiles.configs(s, spec):
        of_way.setdefault((tile.groups, tile.blocks, tile.splits, tile.parts), []).append(tile)
    for way in draw.sample(list(of_way.values()), min(6, len(of_way))):
        dtype = draw.choice((torch.float16, torch.bfloat16))
        kernel = InputGradient(s, draw.choice(way), str(dtype).removeprefix("torch."), 0)
        for rows in (1, draw.choice((63, 64, 65, 200)), draw.choice((1000, 8_200, 20_011))):
            operands = drawn(s, rows, dtype)
            result = computed(kernel, *operands)
            assert_right(*result, *operands)
            for one, again in zip(result, kernel(*operands), strict=True):
                assert torch.equal(one, again), "not the same at every call"


def test_what_is_not_finite_reaches_what_it_met(spec: DeviceSpec) -> None:
    s = Shape(*Chain.parse("(1,52,48,2)*(3,32,72,1)"))
    kernel = InputGradient(s, tiles.best(s, 300, spec)[0], "bfloat16", 0)
    (grad,), (left, right) = drawn(s, 300, torch.bfloat16)
    grad[3, -1], grad[170, 0] = float("inf"), float("nan")
    to, between = computed(kernel, [grad], [left, right])
    truth = ks_reference(grad.double(), left.double().transpose(1, 2))
    assert torch.equal(between.isfinite(), truth.isfinite())
    truth = ks_reference(truth, right.double().transpose(1, 2))
    assert torch.equal(to.isfinite(), truth.isfinite())


@pytest.mark.usefixtures("is_faster")
def test_the_operator_takes_all_that_it_may_be_called_with(spec: DeviceSpec) -> None:
    s = Shape(*Chain.parse(LAYER))
    (grad,), weights = drawn(s, 4096, torch.bfloat16)
    for one in (
        grad,
        grad.contiguous().view(4, 1024, -1),
        grad.contiguous().view(4, 1024, -1).transpose(0, 1),
        torch.randn(4096 * 384 + 1, device="cuda").bfloat16()[1:].view(4096, 384),
        grad[:0],
    ):
        to, between = ks_chain_input_grad([one], weights)
        assert to.shape == (*one.shape[:-1], 384)
        assert between.shape == (*one.shape[:-1], 128)
        flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (to, between, one)]
        if one.numel() > 0:
            assert_right(*flat[:2], flat[2:], weights)
    apart = input_gradient._apart
    assert input_gradients.run([grad], weights, None, apart, apart) is not None


@pytest.mark.usefixtures("is_faster")
@pytest.mark.parametrize("siblings", [2, 3])
def test_the_operator_sums_over_siblings(spec: DeviceSpec, siblings: int) -> None:
    s = Shape(*Chain.parse(LAYER), siblings)
    grads, weights = drawn(s, 4096, torch.bfloat16)
    for several in (grads, [one.contiguous().view(4, 1024, -1) for one in grads]):
        for _ in range(2):  # by Python, and by the host library
            to, between = ks_chain_input_grad(several, weights)
            assert to.shape == (*several[0].shape[:-1], 384)
            assert between.shape == (siblings, *several[0].shape[:-1], 128)
            assert_right(to.view(-1, 384), between, grads, weights)


@pytest.mark.usefixtures("is_faster")
def test_it_can_be_captured(spec: DeviceSpec) -> None:
    s = Shape(*Chain.parse(LAYER))
    grads, weights = drawn(s, 4096, torch.float16)
    ks_chain_input_grad(grads, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ks_chain_input_grad(grads, weights)
    for _ in range(2):
        weights[0].normal_(std=0.1)
        grads[0].normal_()
        graph.replay()
        for one, expected in zip(result, ks_chain_input_grad(grads, weights), strict=True):
            assert torch.equal(one, expected)


@pytest.mark.usefixtures("is_faster")
def test_compiled_and_eager_training_take_it(
    spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.profiler import ProfilerActivity, profile

    from ksopt import KSLinear
    from ksopt.jit import host

    assert host.load() is None
    monkeypatch.setenv("KSOPT_TUNE", "model")
    torch.manual_seed(0)
    rows = 7_101  # of no other test: whether a kernel is taken is kept
    layer = KSLinear(384, 384, LAYER).cuda().bfloat16()
    x = torch.randn(rows, 384, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(rows, 384, device="cuda").bfloat16()
    results = []
    for function in (layer, torch.compile(layer, backend="ksopt")):
        for _ in range(3):
            layer.zero_grad()
            x.grad = None
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                function(x).backward(grad)
                torch.cuda.synchronize()
            names = [event.key for event in profiled.key_averages()]
            assert "ksopt_input_grad_wgmma16_bfloat16_192_64_2_2_64_192" in names
        assert x.grad is not None
        results.append([x.grad.clone(), *(weight.grad.clone() for weight in layer.parameters())])
    left, right = (weight.detach() for weight in layer.weights)
    between = ks_reference(grad.double(), left.double().transpose(1, 2))
    truth = ks_reference(between, right.double().transpose(1, 2))
    assert (results[0][0].double() - truth).abs().max() <= 2**-7 * truth.abs().max()
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()


@pytest.mark.usefixtures("is_faster")
def test_a_known_launch_needs_no_python(spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    from ksopt.jit import host

    assert host.load() is None
    s = Shape(*Chain.parse(LAYER))
    grads, weights = drawn(s, 7_102, torch.bfloat16)
    expected = ks_chain_input_grad(grads, weights)

    def refuse(*_: object) -> None:
        raise AssertionError("Python was entered")

    monkeypatch.setattr(input_gradients, "run", refuse)
    for one, other in zip(ks_chain_input_grad(grads, weights), expected, strict=True):
        assert torch.equal(one, other)
    weights[0].mul_(2)
    to, between = ks_chain_input_grad(grads, weights)
    assert_right(to, between, grads, weights)


@pytest.mark.parametrize("siblings", [1, 3])
def test_the_forward_pass_packs_weights_for_it(
    spec: DeviceSpec, is_faster: None, monkeypatch: pytest.MonkeyPatch, siblings: int
) -> None:
    """As the kernel that packs them for the backward pass alone does; by Python and without it."""
    monkeypatch.setenv("KSOPT_TUNE", "model")
    for rows in (300, 20_000):
        shape = Shape(*Chain.parse(LAYER), siblings)
        grads, weights = drawn(shape, rows, torch.bfloat16)
        x = torch.randn(rows, 384, device="cuda").bfloat16()
        tile = input_gradients.tile_of(shape, x.dtype, rows, x.device)
        assert tile is not None
        expected = input_gradients.packed_for(weights, rows)
        assert expected is not None
        gradients = ks_chain_input_grad(grads, weights)
        elements = tile.packed_elements(shape)
        for _ in range(3):
            y, between, packed = ks_chain_keeping(x, weights, None, siblings, packed=elements)
            assert torch.equal(packed, expected)
            others = ks_chain_keeping(x, weights, None, siblings)
            for one, other in zip((y, between), others, strict=False):
                assert torch.equal(one, other)
            again = ks_chain_input_grad(grads, weights, packed)
            assert all(map(torch.equal, again, gradients))
