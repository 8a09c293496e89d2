"""A weight that is written between the forward and the backward pass: as in eager mode.

What the author's product saves for the gradient of its input decides: the weight, which must not be
written then, or a copy.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import ksopt
from ksopt.kernels import weight_cache


class Layer(nn.Module):
    """A product of rows [B, 32] by a weight, in one spelling."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4, 4) / 2)
        self.blocks = nn.Parameter(torch.randn(4, 8, 8) / 2)
        self.other = nn.Parameter(torch.randn(2, 4, 4, 4) / 2)


class ByEinsum(Layer):
    copies = True

    def forward(self, x):
        return torch.einsum("nacd,abcd->nabd", x.view(-1, 2, 4, 4), self.weight).flatten(1)


class ByMatmul(Layer):
    copies = True

    def forward(self, x):
        return torch.matmul(self.blocks, x.view(-1, 4, 8, 1)).flatten(1)


class OfAChain(Layer):
    copies = True

    def forward(self, x):
        x = x.view(-1, 2, 4, 4)
        return torch.einsum("nacd,abcd,aebd->naed", x, self.weight, self.other).flatten(1)


class ByACastOfItsOwn(Layer):
    copies = True

    def forward(self, x):
        weight = self.blocks.to(torch.bfloat16)
        y = torch.bmm(x.bfloat16().view(-1, 4, 8).transpose(0, 1), weight.mT)
        return y.transpose(0, 1).flatten(1).float()


class UnderAutocast(Layer):
    copies = True

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.bmm(x.view(-1, 4, 8).transpose(0, 1), self.blocks.mT)
        return y.transpose(0, 1).flatten(1).float()


class ByBmm(Layer):
    copies = False

    def forward(self, x):
        y = torch.bmm(x.view(-1, 4, 8).transpose(0, 1), self.blocks.mT)
        return y.transpose(0, 1).flatten(1)


class ByMulAndSum(Layer):
    copies = False

    def forward(self, x):
        return (self.weight * x.view(-1, 2, 1, 4, 4)).sum(3).flatten(1)


class OfAChunk(Layer):
    copies = False

    def forward(self, x):
        weight = self.blocks.chunk(2, 2)[0]
        y = torch.bmm(x.view(-1, 4, 8)[..., :4].transpose(0, 1), weight.mT)
        return y.transpose(0, 1).flatten(1)


class InALoop(Layer):
    copies = False

    def forward(self, x):
        pieces = [F.linear(x[:, 8 * at : 8 * at + 8], self.blocks[at]) for at in range(4)]
        return torch.cat(pieces, dim=1)


class InAVmapUnderAutocast(Layer):
    copies = True

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.vmap(F.linear, in_dims=(1, 0))(x.view(-1, 4, 8), self.blocks)
        return y.transpose(0, 1).flatten(1).float()


LAYERS = (
    *(ByEinsum, ByMatmul, OfAChain, ByACastOfItsOwn, UnderAutocast, InAVmapUnderAutocast),
    *(ByBmm, OfAChunk, ByMulAndSum, InALoop),
)


def step(model, function, x, written=None, is_leaf=False):
    """The gradients of the input and of the weights, which are written before; None: refused."""
    x = x.clone().requires_grad_()
    written = list(model.parameters()) if written is None else written
    for weight in model.parameters():
        weight.grad = None
    y = function(x if is_leaf else x * 1)
    with torch.no_grad():
        for weight in written:
            weight.mul_(2)
    is_refused = False
    try:
        y.sum().backward()
    except RuntimeError as error:
        is_refused = "modified by an inplace operation" in str(error) or (
            "has been modified inplace" in str(error)
        )
        if not is_refused:
            raise
    with torch.no_grad():
        for weight in written:
            weight.div_(2)
    return None if is_refused else [x.grad, *(weight.grad for weight in model.parameters())]


CASES = [
    *((build, dynamic, False) for build in (ByEinsum, ByBmm) for dynamic in (True, False)),
    *((build, False, True) for build in LAYERS),
    *((build, False, False) for build in LAYERS if build not in (ByEinsum, ByBmm)),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("build", "dynamic", "frozen"),
    CASES,
    ids=[
        f"{build.__name__}-{'dynamic' if dynamic else 'static'}-{'frozen' if frozen else 'trained'}"
        for build, dynamic, frozen in CASES
    ],
)
def test_a_weight_may_be_written_where_eager_mode_lets_it(build, dynamic, frozen):
    torch.manual_seed(0)
    model = build().requires_grad_(not frozen)
    compiled = torch.compile(model, backend="ksopt", dynamic=dynamic)
    for batch in (5, 9) if dynamic else (5, 5):  # another static size would be recompiled
        x = torch.randn(batch, 32)
        expected, actual = step(model, model, x), step(model, compiled, x)
        assert (expected is not None) == build.copies
        if expected is None:
            assert actual is None
            continue
        is_16_bit = build in (ByACastOfItsOwn, UnderAutocast, InAVmapUnderAutocast)
        tolerance = 5e-2 if is_16_bit else 1e-4
        for one, other in zip(expected, actual, strict=True):
            if one is None:
                assert other is None
            else:
                torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)
    assert counters["ksopt"]["lowered"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_bias_may_be_written(dynamic):
    check_a_written_bias(dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_bias_may_be_written_where_graphs_run_by_eager(dynamic, compiled_by_eager):
    check_a_written_bias(dynamic)


def check_a_written_bias(dynamic):
    class Model(Layer):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(32))
            self.mask = torch.kron(torch.eye(4), torch.ones(8, 8))
            self.matrix = nn.Parameter(torch.randn(32, 32))

        def forward(self, x):
            y = F.linear(x, self.matrix * self.mask, self.bias)
            return F.gelu(y)  # its backward pass reads y

    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model, backend="ksopt", dynamic=dynamic)
    x = torch.randn(64, 32)
    written = [model.bias]
    expected, actual = step(model, model, x, written), step(model, compiled, x, written)
    for one, other in zip(expected, actual, strict=True):
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    assert counters["ksopt"]["lowered"] >= 1


def by_eager(gm, example_inputs):
    """A backend that rewrites a graph, and runs it as it is."""
    ksopt.compile.rewrite(gm, example_inputs)
    return gm.forward


@pytest.mark.parametrize("frozen", [(), ("weight",), ("other",)])
def test_a_weight_that_is_computed_of_two_is_computed_of_copies(frozen):
    class Model(Layer):
        def forward(self, x):
            x = x.view(-1, 2, 4, 4)  # summed over b: y = x (weight * other)
            return torch.einsum("nacd,abcd,aecd->naed", x, self.weight, self.other).flatten(1)

    model, x = Model(), torch.randn(5, 32)
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    expected, actual = step(model, model, x), step(model, torch.compile(model, backend=by_eager), x)
    for one, other in zip(expected, actual, strict=True):
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_weight_of_two_may_be_written_where_the_input_needs_no_gradient(dynamic):
    class Model(Layer):
        def forward(self, x):
            return torch.einsum("nacd,abcd,acd->nabd", x.view(-1, 2, 4, 4), self.weight, self.scale)

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(2, 4, 4))

    model, x = Model(), torch.randn(5, 32)
    compiled = torch.compile(model, backend=by_eager, dynamic=dynamic)
    gradients = []
    for function in (model, compiled):
        y = function(x)
        with torch.no_grad():
            model.weight.mul_(2)
        gradients.append(torch.autograd.grad(y.sum(), [model.weight, model.scale]))
        with torch.no_grad():
            model.weight.div_(2)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_what_the_author_saved_and_writes_is_left_alone():
    class Model(Layer):
        def forward(self, x):
            weight = self.blocks * 2
            y = torch.bmm(x.view(-1, 4, 8).transpose(0, 1), weight.mT)
            weight[..., :1] += 1
            return y.transpose(0, 1).flatten(1)

    model, x = Model(), torch.randn(5, 32)
    assert step(model, model, x) is None
    assert step(model, torch.compile(model, backend=by_eager), x) is None


def test_nothing_is_copied_where_no_gradient_of_the_input_is_recorded(monkeypatch):
    emitted = []
    model = ByEinsum()

    def backend(gm, example_inputs):
        ksopt.compile.rewrite(gm, example_inputs)
        emitted.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(5, 32)).sum().backward()
    assert "ksopt.ks_mm.default" in emitted
    assert not any("clone" in target for target in emitted)


def test_a_frozen_weight_stays_prepared_for_the_forward_pass():
    model = ByEinsum().requires_grad_(False)
    compiled = torch.compile(model, backend="ksopt")
    x = torch.randn(64, 32, requires_grad=True)
    for _ in range(2):
        compiled(x).sum().backward()
    stored = weight_cache.cached_bytes(x.device)
    compiled(x).sum().backward()
    assert weight_cache.cached_bytes(x.device) == stored


def test_a_view_created_without_gradients_passes_none():
    """It says that it requires gradients, and autograd saves nothing for it."""

    class Model(Layer):
        def forward(self, x):
            with torch.no_grad():
                rows = x.reshape(-1, 4, 8).transpose(0, 1)
            return torch.bmm(rows, self.blocks).transpose(0, 1).flatten(1) * x.sum()

    model, x = Model().requires_grad_(False), torch.randn(5, 32)
    written = [model.blocks]
    compiled = torch.compile(model, backend=by_eager)
    expected = step(model, model, x, written, is_leaf=True)
    actual = step(model, compiled, x, written, is_leaf=True)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_computed_without_gradients_has_none(mode):
    """Autograd then saves no weight for them, and the weight may be written."""

    class Model(Layer):
        def forward(self, x):
            x = x @ self.matrix
            with mode():
                rows = (x * 2).view(-1, 2, 4, 4)
            return torch.einsum("nacd,abcd,acd->nabd", rows * 3, self.weight, self.scale)

        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(32, 32))
            self.scale = nn.Parameter(torch.randn(2, 4, 4))
            self.weight.requires_grad_(False)

    model, x = Model(), torch.randn(5, 32)
    written = [model.weight]
    compiled = torch.compile(model, backend=by_eager)
    expected, actual = step(model, model, x, written), step(model, compiled, x, written)
    for one, other in zip(expected, actual, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


class DetachedUnderAutocast(Layer):
    def forward(self, x):
        blocks = self.blocks.detach()
        return torch.einsum("ngi,goi->ngo", x.view(-1, 4, 8), blocks).flatten(1)


class WithGradientsFromInside(Layer):
    def forward(self, x):
        torch.set_grad_enabled(True)
        return F.conv1d((x * 2)[:, :, None], self.blocks.detach().view(32, 8, 1), groups=4).flatten(
            1
        )


@pytest.mark.parametrize("handover", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("build", "grad"), [(DetachedUnderAutocast, True), (WithGradientsFromInside, False)]
)
def test_a_weight_that_autocast_casts_may_be_written(build, grad, handover, monkeypatch):
    """A trained weight that is cut off, and gradients that the model itself switches on."""
    from ksopt.compile import backend

    if handover == "eager":
        monkeypatch.setattr(backend, "compile_by_inductor", lambda gm, inputs, config: gm.forward)
    model, gradients = build(), []
    for run in (model, torch.compile(model, backend="ksopt", options={"tune": "off"})):
        x = torch.linspace(-1, 1, 5 * 32).view(5, 32).requires_grad_()
        try:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
                y = run(x)
        finally:
            torch.set_grad_enabled(True)
        with torch.no_grad():
            model.blocks.mul_(0.5)
        y.float().square().sum().backward()
        gradients.append(x.grad)
        with torch.no_grad():
            model.blocks.mul_(2)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.05, atol=0.05)
