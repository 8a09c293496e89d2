"""``ks_chain``, all that a layer computes: values, gradients, transforms, compilation, messages."""

import functools
import shutil

import numpy as np
import pytest
import torch
from seen_products import without_library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from ksopt import KSLinear, ks_linear, ops
from ksopt.epilogue import ACTIVATIONS, GATES
from ksopt.errors import InvalidInputError
from ksopt.jit import host
from ksopt.kernels.backends import cpu
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference

CHAINS = ["(1,6,4,3)*(3,4,5,1)", "(2,3,7,1)", "(1,5,3,2)*(2,3,7,1)*(14,1,1,1)"]
LAYOUTS = [False, True]
BATCHES = [(7,), (0,), (2, 3), ()]
FUNCTIONS = {
    "none": lambda y: y,
    "relu": lambda y: y.clamp(min=0),
    "gelu": lambda y: y / 2 * (1 + torch.erf(y / 2**0.5)),
    "gelu_tanh": lambda y: y / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))),
    "silu": lambda y: y / (1 + torch.exp(-y)),
}


@pytest.fixture(autouse=True)
def no_old_choices(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")
    cpu.forget()
    yield
    cpu.forget()


class Case:
    """Operands of a chain, and what their result is in float64."""

    def __init__(self, chain, last=False, batch=(7,), siblings=1, dtype=torch.float64, around=True):
        self.chain, self.last, self.siblings = Chain.parse(chain), last, siblings
        self.layout = "batch_last" if last else "batch_first"
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        def rows(features):
            return random(features, *batch) if last else random(*batch, features)

        self.x = rows(self.chain.in_features)
        self.weights = [random(*p.weight_shape) for _ in range(siblings) for p in self.chain]
        features = siblings * self.chain.out_features
        self.bias = random(features) if around else None
        self.residual = rows(features) if around else None

    @classmethod
    def gated(cls, chain, *args, **named):
        """Two siblings, whose products a gate multiplies."""
        case = cls(chain, *args, siblings=2, **named)
        if case.residual is not None:
            case.residual = case.residual.tensor_split(2, 0 if case.last else -1)[0].contiguous()
        return case

    def arguments(self, activation="none"):
        around = (self.bias, self.residual, activation)
        return self.x, self.weights, *around, self.last, self.siblings

    def tensors(self):
        present = (self.bias, self.residual)
        return [self.x, *self.weights, *(one for one in present if one is not None)]

    def expected(self, activation="none"):
        length, wide = len(self.chain), [weight.double() for weight in self.weights]
        parts = [
            chain_reference(self.x.double(), wide[at : at + length], self.layout)
            for at in range(0, len(wide), length)
        ]
        y = torch.cat(parts, 0 if self.last else -1)
        if self.bias is not None:
            bias = self.bias.double()
            y = y + (bias.view(-1, *(1,) * (y.dim() - 1)) if self.last else bias)
        if activation in GATES:
            a, b = y.tensor_split(2, 0 if self.last else -1)
            y = FUNCTIONS[activation.removesuffix("_gate")](a) * b
        else:
            y = FUNCTIONS[activation](y)
        return y if self.residual is None else y + self.residual.double()


def ways(case, activation):
    """The result by every way to it: past the dispatcher, by the operator, written, by a graph."""
    arguments = case.arguments(activation)
    with torch.no_grad():
        yield ops.chain(*arguments)
        yield ops.ks_chain(*arguments)
        yield ops.ks_chain_inner(*arguments)
        out = torch.full_like(case.expected(activation), torch.nan, dtype=case.x.dtype)
        ops.ks_chain_out(*arguments, out=out)
        yield out
    yield ops.chain(*arguments)  # where gradients may be recorded


@pytest.mark.parametrize("last", LAYOUTS)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("text", CHAINS)
def test_values(text, siblings, batch, last):
    for around in (True, False):
        case = Case(text, last, batch, siblings, around=around)
        for activation in ACTIVATIONS:
            for y in ways(case, activation):
                torch.testing.assert_close(y, case.expected(activation))
                assert y.is_contiguous()


@pytest.mark.parametrize("last", LAYOUTS)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("text", CHAINS)
def test_a_gate_multiplies_the_products_of_two_siblings(text, batch, last):
    for around in (True, False):
        case = Case.gated(text, last, batch, around=around)
        for gate in GATES:
            for y in ways(case, gate):
                torch.testing.assert_close(y, case.expected(gate))
                assert y.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATES])
def test_it_is_as_exact_as_pytorchs_own_operations(dtype, activation):
    make = Case.gated if activation in GATES else Case
    case = make(CHAINS[0], dtype=dtype, batch=(63,))
    unit = torch.finfo(dtype).eps
    case.residual, residual = None, case.residual
    largest = case.expected().abs().max() ** (2 if activation in GATES else 1)
    case.residual = residual
    for y in ways(case, activation):
        assert y.dtype == dtype
        # The tensor between the factors is rounded, and so is what each step gives.
        error = (y.double() - case.expected(activation)).abs().max()
        assert error <= 5 * unit * largest


@pytest.mark.parametrize("name", ["bias", "residual", "activation"])
@pytest.mark.parametrize("last", LAYOUTS)
def test_each_part_of_an_epilogue_alone(name, last):
    case = Case(CHAINS[0], last)
    for other in {"bias", "residual"} - {name}:
        setattr(case, other, None)
    activation = "silu" if name == "activation" else "none"
    for y in ways(case, activation):
        torch.testing.assert_close(y, case.expected(activation))


def test_a_residual_may_be_written_over_and_operands_may_have_any_strides():
    case = Case(CHAINS[0], batch=(8,))
    expected = case.expected("gelu")
    case.x = case.x.t().contiguous().t()
    case.weights = [weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in case.weights]
    case.residual = case.residual.t().contiguous().t()
    for y in ways(case, "gelu"):
        torch.testing.assert_close(y, expected)
    case.residual = case.residual.contiguous()
    with torch.no_grad():
        before = case.residual._version
        ops.ks_chain_out(*case.arguments("gelu"), out=case.residual)
        torch.testing.assert_close(case.residual, expected)
        assert case.residual._version > before


@pytest.mark.sweep
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("last", LAYOUTS)
@pytest.mark.parametrize("siblings", [1, 2])
def test_opcheck(siblings, last, requires_grad):
    case = Case(CHAINS[0], last, siblings=siblings, dtype=torch.float32)
    for tensor in case.tensors():
        tensor.requires_grad_(requires_grad)
    torch.library.opcheck(ops.ks_chain, case.arguments("gelu"))
    alone = (case.x, case.weights[: len(case.chain)], None, None, "none", last)
    torch.library.opcheck(ops.ks_chain, alone)
    if not requires_grad:
        torch.library.opcheck(ops.ks_chain_inner, case.arguments("gelu"))
        out = torch.empty_like(case.residual)
        torch.library.opcheck(ops.ks_chain_out, case.arguments("relu"), {"out": out})


@pytest.mark.sweep
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("last", LAYOUTS)
def test_opcheck_of_a_gate(last, requires_grad):
    case = Case.gated(CHAINS[0], last, dtype=torch.float32)
    for tensor in case.tensors():
        tensor.requires_grad_(requires_grad)
    torch.library.opcheck(ops.ks_chain, case.arguments("silu_gate"))
    if not requires_grad:
        torch.library.opcheck(ops.ks_chain_inner, case.arguments("silu_gate"))
        out = torch.empty_like(case.residual)
        torch.library.opcheck(ops.ks_chain_out, case.arguments("relu_gate"), {"out": out})


@pytest.mark.sweep
@pytest.mark.parametrize("by_library", [False, True], ids=["python", "library"])
@pytest.mark.parametrize("activation", ["none", "gelu", "silu", "silu_gate"])
@pytest.mark.parametrize("last", LAYOUTS)
@pytest.mark.parametrize("siblings", [1, 2])
def test_gradients_of_any_order(siblings, last, activation, by_library, monkeypatch):
    if not by_library:
        without_library(monkeypatch)
    elif shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this machine")
    else:
        assert host.load() is None
    if activation in GATES and siblings == 1:
        pytest.skip("a gate is of two siblings")
    make = Case.gated if activation in GATES else functools.partial(Case, siblings=siblings)
    case = make("(1,2,2,2)*(2,2,1,1)", last, (3,))
    count = len(case.weights)

    def layer(x, bias, residual, *weights):
        return ops.chain(x, list(weights), bias, residual, activation, last, siblings)

    inputs = [case.x, case.bias, case.residual, *case.weights]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    assert len(inputs) == 3 + count
    assert torch.autograd.gradcheck(layer, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(layer, inputs)


@pytest.mark.parametrize("last", LAYOUTS)
def test_vmap_and_functional_gradients(last):
    case = Case(CHAINS[0], last)
    xs = torch.stack([case.x, case.x + 1])
    biases = torch.stack([case.bias, -case.bias])

    def layer(x, bias, *weights):
        return ops.chain(x, list(weights) or case.weights, bias, case.residual, "gelu", last)

    both = [layer(x, bias) for x, bias in zip(xs, biases, strict=True)]
    torch.testing.assert_close(vmap(layer)(xs, biases), torch.stack(both))
    torch.testing.assert_close(vmap(layer, (None, 0))(case.x, biases)[1], layer(case.x, biases[1]))
    several = [torch.stack([weight, 2 * weight]) for weight in case.weights]
    mapped = vmap(layer, (None, None, *(0 for _ in several)))(case.x, case.bias, *several)
    other = [2 * weight for weight in case.weights]
    torch.testing.assert_close(mapped[1], layer(case.x, case.bias, *other))
    gradient = grad(lambda x: layer(x, case.bias).sum())(case.x)
    case.x.requires_grad_()
    layer(case.x, case.bias).sum().backward()
    torch.testing.assert_close(gradient, case.x.grad)
    x = case.x.detach()
    _, tangent = jvp(lambda x: layer(x, case.bias), (x,), (torch.ones_like(x),))
    step = 1e-6
    numeric = (layer(x + step, case.bias) - layer(x - step, case.bias)) / (2 * step)
    torch.testing.assert_close(tangent, numeric, rtol=1e-5, atol=1e-6)


def test_vmap_and_functional_gradients_of_a_gate():
    case = Case.gated(CHAINS[0])
    xs = torch.stack([case.x, case.x + 1])

    def layer(x):
        around = (case.bias, case.residual, "silu_gate")
        return ops.chain(x, case.weights, *around, siblings=2)

    torch.testing.assert_close(vmap(layer)(xs), torch.stack([layer(x) for x in xs]))
    gradient = grad(lambda x: layer(x).sum())(case.x)
    case.x.requires_grad_()
    layer(case.x).sum().backward()
    torch.testing.assert_close(gradient, case.x.grad)


@pytest.mark.parametrize("activation", ["gelu", "silu_gate"])
@pytest.mark.parametrize("with_grad", [False, True])
def test_autocast_computes_in_its_dtype(with_grad, activation):
    case = (Case.gated if activation in GATES else Case)(CHAINS[0], dtype=torch.float32)
    low = [tensor.bfloat16() for tensor in case.tensors()]
    with torch.set_grad_enabled(with_grad), torch.autocast("cpu", torch.bfloat16):
        y = ops.chain(*case.arguments(activation))
        torch.testing.assert_close(y, ops.ks_chain(*case.arguments(activation)), rtol=0, atol=0)
    assert y.dtype == torch.bfloat16
    case.x, case.bias, case.residual = low[0], low[-2], low[-1]
    case.weights = low[1:-2]
    torch.testing.assert_close(y, ops.chain(*case.arguments(activation)), rtol=0, atol=0)


def test_fake_tensors_have_the_results_shape():
    with FakeTensorMode():
        case_x, weights = torch.empty(5, 2, 15), [torch.empty(1, 6, 4, 3), torch.empty(3, 4, 5, 1)]
        for op in (ops.ks_chain, ops.ks_chain_inner, ops.chain):
            y = op(case_x, weights * 2, torch.empty(36), torch.empty(5, 2, 36), "relu", False, 2)
            assert (y.shape, y.dtype) == ((5, 2, 36), torch.float32)
            gated = (torch.empty(36), torch.empty(5, 2, 18), "silu_gate", False, 2)
            y = op(case_x, weights * 2, *gated)
            assert (y.shape, y.dtype) == ((5, 2, 18), torch.float32)
    meta = ops.ks_chain(torch.empty(15, 4, device="meta"), [torch.empty(3, 4, 5, 1, device="meta")],
                        batch_last=True)  # fmt: skip
    assert (meta.shape, meta.device.type) == ((12, 4), "meta")


@pytest.mark.sweep
@pytest.mark.parametrize("last", LAYOUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_layer_is_one_graph(last, dynamic):
    case = Case(CHAINS[0], last, dtype=torch.float32)

    @functools.partial(torch.compile, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def by_function(x, weights, bias, residual):
        layout = "batch_last" if last else "batch_first"
        return ks_linear(x, weights, bias, layout, activation="gelu", residual=residual)

    @functools.partial(torch.compile, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def by_operator(x, weights, bias, residual):
        return torch.ops.ksopt.ks_chain(x, weights, bias, residual, "gelu", last)

    expected = case.expected("gelu").float()
    operands = (case.x, case.weights, case.bias, case.residual)
    for compiled in (by_function, by_operator):
        with torch.no_grad():
            torch.testing.assert_close(compiled(*operands), expected)
        weights = [weight.requires_grad_() for weight in case.weights]
        y = compiled(*operands)
        torch.testing.assert_close(y, expected)
        (own,) = torch.autograd.grad(y.sum(), weights[:1])
        (theirs,) = torch.autograd.grad(ops.chain(*case.arguments("gelu")).sum(), weights[:1])
        torch.testing.assert_close(own, theirs)


class Names(TorchDispatchMode):
    """Which operators are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_it_is_composed_of_products_and_torchs_own_operations():
    case = Case(CHAINS[0])
    with Names() as names:
        ops.ks_chain(*case.arguments("relu"))
    own = [name for name in names.seen if name.startswith("ksopt")]
    assert own == ["ksopt.ks_mm_inner.default"] * 2
    assert {"aten.add.Tensor", "aten.relu.default"} <= set(names.seen)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": []}, "weights is empty"),
        ({"siblings": 3}, "2 weights cannot be those of 3 siblings"),
        ({"siblings": 0}, "2 weights cannot be those of 0 siblings"),
        ({"activation": "tanh"}, "activation 'tanh' is unknown"),
        ({"bias": torch.ones(17)}, r"bias has shape \[17\], but the chain has 18 outputs"),
        ({"bias": torch.ones(18).half()}, "bias is float16 and the product float32"),
        ({"residual": torch.ones(18)}, r"residual has shape \[18\], but the product \[7, 18\]"),
        ({"residual": torch.ones(7, 18).double()}, "residual is float64 and the product float32"),
        ({"x": torch.ones(7, 14)}, r"its last dim must be a\*c\*d = 15"),
        ({"x": torch.ones(7, 15).double()}, "x is float64 and weight is float32"),
    ],
)
def test_misuse_is_answered_by_a_sentence(change, words):
    case = Case(CHAINS[0], dtype=torch.float32)
    names = ("x", "weights", "bias", "residual", "activation", "batch_last", "siblings")
    call_args = dict(zip(names, case.arguments(), strict=True)) | change
    for op in (ops.chain, ops.ks_chain, ops.ks_chain_inner):
        with pytest.raises(InvalidInputError, match=words):
            op(**call_args)
    with pytest.raises(InvalidInputError, match=words):
        ops.ks_chain_out(**call_args, out=torch.empty(7, 18))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": 3}, "x is of type int"),
        ({"weights": None}, "weights is of type NoneType, but it must be a list of tensors"),
        ({"weights": [None]}, "a weight is None, but it must be a tensor"),
        ({"weights": [torch.ones(1, 4, 4, 1), np.ones(3)]}, "a weight is of type ndarray"),
        ({"bias": 3.0}, "bias is of type float"),
        ({"residual": "x"}, "residual is of type str"),
    ],
)
def test_what_is_no_tensor_is_named(change, words):
    operands = {"x": torch.ones(2, 4), "weights": [torch.ones(1, 4, 4, 1)]}
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded), pytest.raises(InvalidInputError, match=words):
            ks_linear(**{**operands, **change})


def test_weights_may_be_a_parameter_list():
    weight = torch.nn.Parameter(torch.ones(1, 4, 4, 1))
    y = ks_linear(torch.ones(2, 4), torch.nn.ParameterList([weight]))
    assert torch.equal(y, torch.full((2, 4), 4.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"siblings": 1}, "'silu_gate' multiplies the products of 2 siblings, not of 1"),
        ({"siblings": 4}, "'silu_gate' multiplies the products of 2 siblings, not of 4"),
        ({"activation": "tanh_gate"}, "'tanh_gate' is unknown: it must be one of .*, silu_gate"),
        ({"bias": torch.ones(18)}, r"bias has shape \[18\], but the chain has 36 outputs"),
        ({"residual": torch.ones(7, 36)}, r"shape \[7, 36\], but the product \[7, 18\]"),
    ],
)
def test_a_gate_that_cannot_be_is_answered_by_a_sentence(change, words):
    case = Case.gated(CHAINS[0], dtype=torch.float32)
    names = ("x", "weights", "bias", "residual", "activation", "batch_last", "siblings")
    arguments = dict(zip(names, case.arguments("silu_gate"), strict=True)) | change
    for op in (ops.chain, ops.ks_chain, ops.ks_chain_inner):
        with pytest.raises(InvalidInputError, match=words):
            op(**arguments)
    with pytest.raises(InvalidInputError, match=words):
        ops.ks_chain_out(**arguments, out=torch.empty(7, 18))


def test_a_gate_of_siblings_that_are_not_alike_is_refused():
    one, other = torch.ones(1, 3, 4, 1), torch.ones(1, 5, 4, 1)
    for op in (ops.chain, ops.ks_chain, ops.ks_chain_inner):
        with pytest.raises(InvalidInputError, match="their weights have shapes"):
            op(torch.ones(2, 4), [one, other], activation="silu_gate", siblings=2)


def test_out_that_cannot_hold_the_result_and_one_that_wants_gradients():
    case = Case(CHAINS[0], dtype=torch.float32)
    with pytest.raises(InvalidInputError, match=r"out has shape \[7, 17\], but the result has sha"):
        ops.ks_chain_out(*case.arguments(), out=torch.empty(7, 17))
    with pytest.raises(
        InvalidInputError, match="out is float64 on cpu, but it must be as the result"
    ):
        ops.ks_chain_out(*case.arguments(), out=torch.empty(7, 18).double())
    case.x.requires_grad_()
    with pytest.raises(InvalidInputError, match="no gradient is recorded of a product"):
        ops.ks_chain_out(*case.arguments(), out=torch.empty(7, 18))
    sparse = torch.eye(15).to_sparse()
    for op in (ops.ks_chain, ops.ks_chain_inner):
        with pytest.raises(InvalidInputError, match="x is stored as sparse_coo"):
            op(sparse, case.weights)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_a_layer_with_an_activation(activation):
    layer = KSLinear(15, 18, CHAINS[0], activation=activation)
    plain = KSLinear(15, 18, CHAINS[0])
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 15)
    torch.testing.assert_close(layer(x), FUNCTIONS[activation or "none"](plain(x)))
    assert ("activation=" in repr(layer)) == (activation is not None)
    with pytest.raises(InvalidInputError, match="activation 'tanh' is unknown"):
        KSLinear(15, 18, CHAINS[0], activation="tanh")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["none", "gelu", "silu_gate"])
@pytest.mark.parametrize("last", LAYOUTS)
def test_results_in_float32(last, activation, dtype):
    """Of 16-bit operands, by every way; with gradients of the operands' type."""
    make = Case.gated if activation in GATES else Case
    case = make("(1,6,4,3)*(3,4,5,1)", last, dtype=dtype)
    arguments = (case.x, case.weights, case.bias, None, activation, last, case.siblings)
    case.residual = None
    truth = case.expected(activation)
    tensors = [case.x, *case.weights, case.bias]
    for way in (ops.chain, ops.ks_chain, ops.ks_chain_inner):
        with torch.no_grad():
            y = way(*arguments, in_float32=True)
        assert y.dtype == torch.float32
        assert (y - truth).norm() < 0.02 * truth.norm()
        with FakeTensorMode() as mode:
            x, *weights = (mode.from_tensor(one) for one in (case.x, *case.weights))
            bias = mode.from_tensor(case.bias)
            fake = way(x, weights, bias, *arguments[3:], in_float32=True)
        assert (fake.dtype, fake.shape) == (y.dtype, y.shape)
    for one in tensors:
        one.requires_grad_()
    for way in (ops.chain, ops.ks_chain):
        y = way(*arguments, in_float32=True)
        gradients = torch.autograd.grad(y.square().sum(), tensors)
        assert all(one.dtype == dtype for one in gradients)
        assert all(one.isfinite().all() and one.any() for one in gradients)


def test_other_results_stay_as_they_are_where_float32_is_requested():
    """Float32 operands have such a result already, with a residual too; float64 ones have none."""
    case = Case("(1,6,4,3)*(3,4,5,1)", dtype=torch.float32)
    y = ops.chain(*case.arguments(), in_float32=True)
    assert torch.equal(y, ops.chain(*case.arguments()))
    with pytest.raises(InvalidInputError, match="x is float64, whose result stays float64"):
        ops.chain(*Case("(1,6,4,3)*(3,4,5,1)").arguments(), in_float32=True)


def test_out_dtype():
    case = Case("(1,6,4,3)*(3,4,5,1)", dtype=torch.bfloat16, around=False)
    for dtype, expected in ((None, "bfloat16"), (case.x.dtype, "bfloat16"), (torch.float32,) * 2):
        y = ks_linear(case.x, case.weights, out_dtype=dtype)
        assert str(y.dtype).endswith(str(expected).removeprefix("torch."))
    wide = [one.float() for one in case.weights]
    with torch.autocast("cpu", torch.bfloat16):
        assert ks_linear(case.x.float(), wide).dtype == torch.bfloat16
        assert ks_linear(case.x.float(), wide, out_dtype=torch.float32).dtype == torch.float32
    with pytest.raises(InvalidInputError, match=r"out_dtype is torch\.float16, but it must be"):
        ks_linear(case.x, case.weights, out_dtype=torch.float16)
    y = ks_linear(case.x, case.weights)
    with pytest.raises(InvalidInputError, match="takes no residual: add it to the result"):
        ks_linear(case.x, case.weights, residual=y, out_dtype=torch.float32)


def test_a_result_in_float32_is_written_into_such_memory_alone():
    case = Case("(1,6,4,3)*(3,4,5,1)", dtype=torch.bfloat16, around=False)
    arguments = (*case.arguments(), None, True)
    y = ops.chain(*case.arguments(), in_float32=True)
    out = torch.full_like(y, torch.nan)
    ops.ks_chain_out(*arguments, out=out)
    assert torch.equal(out, y)
    with pytest.raises(InvalidInputError, match=r"out is bfloat16 .* as the result is: float32"):
        ops.ks_chain_out(*arguments, out=out.bfloat16())
