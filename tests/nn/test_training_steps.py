"""Gradients of layers against float64, steps in CUDA graphs, and deterministic steps."""

import pytest
import torch
from torch import nn

from ksopt import KSLinear, ops
from ksopt.epilogue import with_epilogue
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CHAINS = ["(1,64,32,2)*(2,32,64,1)", "(1,6,4,3)*(3,4,5,1)", "(4,16,16,4)"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def predicted(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")


def by_pytorch(x, weights, bias, residual, activation, last, siblings):
    """The layer by its definition, in the operands' dtype."""
    length = len(weights) // siblings
    layout = "batch_last" if last else "batch_first"
    chains = [weights[at : at + length] for at in range(0, len(weights), length)]
    products = [chain_reference(x, list(one), layout) for one in chains]
    y = torch.cat(products, 0 if last else -1)
    return with_epilogue(y, bias, activation, residual, last)


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 63, 1000])
@pytest.mark.parametrize(("activation", "siblings"), [("none", 1), ("gelu", 1), ("silu", 2)])
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("text", CHAINS)
def test_gradients_are_as_close_to_float64_as_pytorchs(
    text, last, activation, siblings, rows, dtype, device
):
    chain, generator = Chain.parse(text), torch.Generator().manual_seed(rows)

    def draw(*shape, scale=1.0):
        drawn = torch.randn(shape, generator=generator) * scale
        return drawn.to(device, dtype)

    features = siblings * chain.out_features
    x = draw(chain.in_features, rows) if last else draw(rows, chain.in_features)
    weights = [draw(*one.weight_shape, scale=one.c**-0.5) for _ in range(siblings) for one in chain]
    summands = [draw(features), draw(features, rows) if last else draw(rows, features)]
    grad = draw(*summands[1].shape)
    operands = [x, *weights, *summands]

    def gradients(layer, dtype):
        leaves = [one.detach().to(dtype).requires_grad_() for one in operands]
        y = layer(leaves[0], leaves[1:-2], *leaves[-2:], activation, last, siblings)
        return torch.autograd.grad(y, leaves, grad.to(dtype))

    exact = gradients(by_pytorch, torch.float64)
    mine, theirs = gradients(ops.chain, dtype), gradients(by_pytorch, dtype)
    for one, other, truth in zip(mine, theirs, exact, strict=True):
        error, allowed = ((result.double() - truth).norm() for result in (one, other))
        # Twice PyTorch's, or a rounding of the result and of what is between the factors.
        assert error <= 2 * allowed + 2 * torch.finfo(dtype).eps * truth.norm()


class Model(nn.Module):
    """Two layers, between which is an activation of its own."""

    def __init__(self):
        super().__init__()
        self.first = KSLinear(128, 256, "(1,128,32,2)*(2,32,64,1)", activation="gelu")
        self.second = KSLinear(256, 128, "(1,64,32,2)*(2,32,128,1)")

    def forward(self, x):
        return x + self.second(self.first(x))


def losses_of(device, compiled, autocast, steps=6):
    """The losses of some steps by a fused optimizer, and the trained weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    run = model if compiled is None else torch.compile(model, backend="ksopt", mode=compiled)
    rows = torch.randn(512, 128, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(steps):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = (run(rows) - 1).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return torch.stack(losses).cpu(), [one.detach().clone() for one in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_are_those_of_eager_mode(mode, autocast):
    compiled, _ = losses_of("cuda", mode, autocast)
    eager, _ = losses_of("cuda", None, autocast)
    assert eager[-1] < 0.9 * eager[0]
    torch.testing.assert_close(compiled, eager, rtol=2e-2 if autocast else 1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_deterministic_steps_have_the_same_bits(autocast, device, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        (losses, weights), (again, others) = (losses_of(device, None, autocast) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(losses, again)
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_accumulated_and_checkpointed_gradients_are_those_of_all_rows(device):
    torch.manual_seed(0)
    model = Model().to(device)
    rows = torch.randn(96, 128, device=device)
    (model(rows) - 1).square().sum().backward()
    expected = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    for part in rows.split(40):
        y = torch.utils.checkpoint.checkpoint(model, part, use_reentrant=False)
        (y - 1).square().sum().backward()
    for one, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, other, rtol=1e-4, atol=1e-4)
