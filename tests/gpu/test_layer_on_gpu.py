"""The operators and the layer on a CUDA device: gradients, autocast, torch.compile, moving."""

import copy

import pytest
import torch

from ksopt import ops
from ksopt.jit import host
from ksopt.kernels import dispatch, weight_cache
from ksopt.nn import KSLinear
from ksopt.reference import chain_reference, ks_reference

pytestmark = pytest.mark.gpu

CHAIN = "(1,64,32,4)*(4,32,16,1)"  # 64 inputs, 256 outputs


def layer(**options) -> KSLinear:
    torch.manual_seed(0)
    return KSLinear(64, 256, CHAIN, device="cuda", **options)


@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_opcheck(dtype, last):
    x = torch.randn((64, 10) if last else (10, 64), device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(2, 8, 16, 2, device="cuda").to(dtype).requires_grad_()
    torch.library.opcheck(ops.ks_mm, (x, weight, last))


@pytest.mark.parametrize("shape", [(2, 8, 16, 2), (4, 8, 16, 1)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
def test_gradients_are_the_references(last, shape):
    layout = "batch_last" if last else "batch_first"
    x = torch.randn((64, 33) if last else (33, 64), device="cuda", requires_grad=True)
    weight = torch.randn(shape, device="cuda", requires_grad=True)
    y = ops.ks_mm(x, weight, last)
    grad = torch.randn_like(y)
    actual = torch.autograd.grad(y, (x, weight), grad)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    target = torch.autograd.grad(ks_reference(*exact, layout), exact, grad.double())
    for ours, truth in zip(actual, target, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    model, x = layer(), torch.randn(12, 64, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        y = model(x)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in model.weights)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_is_eager(mode):
    model = layer()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True, mode=mode)
    for rows in (16, 16, 48):
        x = torch.randn(rows, 64, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [7, 512, 4_099, 25_216])
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_an_eager_step_are_the_references(dtype, layout, rows):
    """Weights' gradients by PyTorch: of many rows in parts."""
    assert host.load() is None
    model = layer(dtype=dtype, activation="gelu", layout=layout)
    exact = copy.deepcopy(model).double()
    shape = (64, rows) if layout == "batch_last" else (rows, 64)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    y = model(x)
    assert "TrainedLayer" in y.grad_fn.name()
    grad = torch.randn_like(y)
    y.backward(grad)
    exact(x.double()).backward(grad.double())
    eps = 1e-6 if dtype == torch.float32 else 2**-7
    for one, truth in zip(model.parameters(), exact.parameters(), strict=True):
        error = (one.grad.double() - truth.grad).norm() / truth.grad.norm()
        assert error <= 4 * eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_steps_through_a_frozen_layer_run_no_python(activation, dtype, monkeypatch):
    assert host.load() is None
    frozen = layer(dtype=dtype, activation=activation).requires_grad_(False)
    exact = copy.deepcopy(frozen).double()
    x = torch.randn(40, 64, device="cuda", dtype=dtype, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=1e-3)

    def step():
        x.grad = None
        y = frozen(x)
        y.float().square().sum().backward()
        truth = x.detach().double().requires_grad_()
        exact(truth).square().sum().backward()
        optimizer.step()
        scale = truth.grad.abs().max().item()
        allowed = scale * (1e-5 if dtype == torch.float32 else 2e-2)
        torch.testing.assert_close(x.grad.double(), truth.grad, rtol=0, atol=allowed)

    for _ in range(3):
        step()
    entered, run_known = [], dispatch.run_known

    def seen(rows, *others):
        if rows.dtype == dtype:  # not those of float64
            entered.append(others)
        return run_known(rows, *others)

    monkeypatch.setattr(dispatch, "run_known", seen)
    before = weight_cache.cached_bytes(torch.device("cuda", 0))
    for _ in range(2):
        step()
    assert not entered
    assert weight_cache.cached_bytes(torch.device("cuda", 0)) == before


class Preparing(torch.nn.Module):
    """A product in a way that prepares its weight, whatever is the fastest here."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(4, 64, 64, 4, device="cuda")
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return torch.ops.ksopt_test.prepare_and_multiply(x, self.weight)


@pytest.fixture
def preparing():
    def prepare_and_multiply(x, weight):
        matrices = weight_cache.prepared(
            weight, "adbc", lambda w: w.permute(0, 3, 1, 2).contiguous()
        )
        return ks_reference(x, matrices.permute(0, 2, 3, 1))

    library = torch.library.Library("ksopt_test", "DEF")
    library.define("prepare_and_multiply(Tensor x, Tensor weight) -> Tensor")
    library.impl("prepare_and_multiply", prepare_and_multiply, "CUDA")
    fake = lambda x, _: torch.empty_like(x)  # noqa: E731
    torch.library.register_fake("ksopt_test::prepare_and_multiply", fake, lib=library)
    weight_cache.refresh()
    yield Preparing()
    weight_cache.refresh()
    library._destroy()


def test_entries_of_the_first_run_of_a_captured_graph_are_not_in_its_memory(preparing):
    """Torch refuses what is still alive there after that run, or gives its memory to others."""
    compiled = torch.compile(preparing, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(64, 1024, device="cuda")
            actual = compiled(x).clone()
            expected = ks_reference(x, preparing.weight)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    assert weight_cache.cached_bytes(torch.device("cuda", 0)) == preparing.weight.nbytes


def test_compiled_trains_as_eager_does():
    model = layer()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="ksopt", fullgraph=True)
    x = torch.randn(24, 64, device="cuda")
    model(x).square().mean().backward()
    compiled(x).square().mean().backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_moving_and_casting():
    on_cpu = KSLinear(64, 256, CHAIN)
    x = torch.randn(9, 64)
    moved = copy.deepcopy(on_cpu).cuda()
    torch.testing.assert_close(moved(x.cuda()).cpu(), on_cpu(x), rtol=1e-4, atol=1e-5)
    half = copy.deepcopy(moved).half()
    truth = chain_reference(x.cuda().half().double(), [w.double() for w in half.weights])
    actual = half(x.cuda().half()).double() - half.bias.double()
    torch.testing.assert_close(actual, truth, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(moved.cpu()(x), on_cpu(x))
