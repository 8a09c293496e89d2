"""``ks_mlp``, two layers as one operator: values, gradients, transforms, compilation, messages."""

import pytest
import torch

from ksopt import ops
from ksopt.epilogue import ACTIVATIONS, with_epilogue
from ksopt.errors import InvalidInputError
from ksopt.kernels import plan_autotuner
from ksopt.kernels.families.base import ANY_TYPE
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference
from tests.kernels import toy_chains

UP = Chain.parse("(1,12,4,2)*(2,4,5,1)")  # 10 -> 8 -> 24
DOWNS = ["(1,3,4,3)*(3,4,8,1)", "(2,3,12,1)", "(1,5,3,2)*(2,3,7,1)*(14,1,1,1)*(2,7,12,1)"]
BATCHES = [(7,), (0,), (2, 3), ()]


@pytest.fixture(autouse=True)
def predicted(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    plan_autotuner.forget()
    yield
    plan_autotuner.forget()


@pytest.fixture
def toy(monkeypatch):
    with toy_chains.with_mlps() as family:
        monkeypatch.setattr(family, "us", 1e-3)
        yield family


def case(down=DOWNS[0], batch=(7,), dtype=torch.float32, around=True):
    """Operands, as far as the residual."""
    generator = torch.Generator().manual_seed(0)
    down = Chain.parse(down)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    both = ([draw(*p.weight_shape) for p in chain] for chain in (UP, down))
    summands = (draw(24), draw(down.out_features), draw(*batch, down.out_features))
    return (draw(*batch, 10), *both, *(summands if around else (None, None, None)))


def expected(inputs, hidden_activation="none", activation="none"):
    x, weights, last, hidden_bias, bias, residual = inputs

    def wide(tensor):
        return None if tensor is None else tensor.double()

    hidden = chain_reference(x.double(), [one.double() for one in weights])
    hidden = with_epilogue(hidden, wide(hidden_bias), hidden_activation)
    y = chain_reference(hidden, [one.double() for one in last])
    return with_epilogue(y, wide(bias), activation, wide(residual))


def ways(inputs, *activations):
    with torch.no_grad():
        yield ops.ks_mlp(*inputs, *activations)
        yield ops.ks_mlp_inner(*inputs, *activations)
        yield ops.ks_mlp_inner(*inputs, *activations, owners=[*inputs[1], *inputs[2]])
        out = torch.full_like(expected(inputs), torch.nan, dtype=inputs[0].dtype)
        ops.ks_mlp_out(*inputs, *activations, out=out)
        yield out
    yield ops.ks_mlp(*inputs, *activations)  # where gradients may be recorded


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("down", DOWNS)
def test_values(down, batch):
    for around in (True, False):
        inputs = case(down, batch, torch.float64, around)
        for activation in ACTIVATIONS:
            for y in ways(inputs, activation, "relu"):
                torch.testing.assert_close(y, expected(inputs, activation, "relu"))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_values_in_one_launch(batch, toy):
    inputs = case(batch=batch)
    for activation in ACTIVATIONS:
        for y in ways(inputs, activation):
            torch.testing.assert_close(y, expected(inputs, activation).float())
    assert bool(toy.launches) == (0 not in batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_as_exact_as_pytorchs_own_operations(dtype):
    inputs = case(dtype=dtype, batch=(63,))
    truth = expected(inputs, "gelu")
    for y in ways(inputs, "gelu"):
        assert y.dtype == dtype
        # h and what is between factors are rounded, and so is what each step gives.
        error = (y.double() - truth).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps * truth.abs().max()


def test_a_written_residual_and_an_output_that_is_not_contiguous(toy):
    inputs = case(batch=(8,))
    target = expected(inputs, "gelu").float()
    for out in (torch.empty(12, 8)[:9].t(), inputs[5]):
        with torch.no_grad():
            before = out._version
            ops.ks_mlp_out(*inputs, "gelu", out=out)
        torch.testing.assert_close(out, target)
        assert out._version > before


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    inputs = case()
    for tensor in (inputs[0], *inputs[1], *inputs[2], *inputs[3:]):
        tensor.requires_grad_(requires_grad)
    torch.library.opcheck(ops.ks_mlp, (*inputs, "gelu"))
    if not requires_grad:
        torch.library.opcheck(ops.ks_mlp_inner, (*inputs, "gelu"))


def test_gradients_are_those_of_two_layers(toy):
    inputs = case(dtype=torch.float64)
    leaves = [inputs[0], *inputs[1], *inputs[2], *inputs[3:]]
    for leaf in leaves:
        leaf.requires_grad_()
    grads = torch.autograd.grad(ops.ks_mlp(*inputs, "gelu").sum(), leaves)
    target = torch.autograd.grad(expected(inputs, "gelu").sum(), leaves)
    for one, other in zip(grads, target, strict=True):
        torch.testing.assert_close(one, other)
    assert not toy.launches


def test_inference_under_autocast_is_one_launch_in_its_dtype(toy, monkeypatch):
    monkeypatch.setattr(toy, "dtypes", ANY_TYPE)
    inputs = case()
    with torch.no_grad():
        low = ops.ks_mlp(*case(dtype=torch.bfloat16), "gelu")
        with torch.autocast("cpu", torch.bfloat16):
            y = ops.ks_mlp(*inputs, "gelu")
            compiled = torch.compile(ops.ks_mlp, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(*inputs, "gelu"), y, rtol=0, atol=0)
    torch.testing.assert_close(y, low, rtol=0, atol=0)
    assert [problem.dtype for problem in toy.launches] == ["bfloat16"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ksopt", "inductor", "aot_eager"])
def test_a_graph_launches_it_once(backend, toy):
    torch._dynamo.reset()
    inputs = case(batch=(8,))

    def model(x):
        return ops.ks_mlp(x, *inputs[1:], "gelu")

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(inputs[0]), expected(inputs, "gelu").float())
    assert len(toy.launches) == 2
    torch._dynamo.reset()


def test_what_does_not_fit_together_is_refused(toy):
    x, up, down, hidden_bias, bias, residual = case()
    wrong = {
        "its last dim must be": (x[:, 1:], up, down),
        "x has shape": (x, up, up),
        "hidden_bias|bias has shape": (x, up, down, hidden_bias[1:]),
        "bias has shape": (x, up, down, hidden_bias, bias[1:]),
        "residual has shape": (x, up, down, hidden_bias, bias, residual[1:]),
        "weights is empty": (x, up, []),
        "weight is float16": (x, up, [one.half() for one in down]),
    }
    for words, arguments in wrong.items():
        for op in (ops.ks_mlp, ops.ks_mlp_inner):
            with torch.no_grad(), pytest.raises(InvalidInputError, match=words):
                op(*arguments)
    with torch.no_grad(), pytest.raises(InvalidInputError, match="swish"):
        ops.ks_mlp(x, up, down, hidden_activation="swish")
    with pytest.raises(InvalidInputError, match="out has shape"):
        ops.ks_mlp_out(x, up, down, out=torch.empty(7, 8))
    x.requires_grad_()
    with pytest.raises(InvalidInputError, match="no gradient is recorded"):
        ops.ks_mlp_out(x, up, down, out=torch.empty(7, 9))
