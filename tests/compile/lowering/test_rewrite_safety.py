"""Writes, regions and aliases around a product: the compiled model equals eager code.

Each case is a model whose products are lowered, or left with a reason, and whose results,
gradients, written buffers and shared memory are those of eager mode.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ksopt.compile import backend, rewrite
from ksopt.compile.sites import Verdict
from ksopt.nn import KSLinear

WRITTEN_BEFORE = "an operand was written in place before, through another view of its memory"
WRITTEN_BEFORE_READ = "an operand is written in place before it is read"


class Case(nn.Module):
    """A model with the modules of the cases.

    Attributes:
        reasons: why sites are not lowered, in the order of the graph; "" for a lowered one.
        trains: whether its gradients are compared, of parameters and input.
    """

    reasons: tuple = ("",)
    trains = True

    def __init__(self):
        super().__init__()
        shapes = {"w": (4, 8, 8), "v": (8, 4, 4), "one": (16, 16), "two": (16, 16)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 4))
        self.register_buffer("buffer", torch.randn(4, 8, 8) / 4)
        self.register_buffer("flat", self.buffer.view(-1))
        self.register_buffer("scale", torch.randn(4, 8))
        self.register_buffer("p", torch.randn(16))
        self.register_buffer("q", torch.randn(16))

    def first(self, x, weight=None):
        """The factor (4, 8, 8, 1), as rows of blocks [B, 4, 8]."""
        weight = self.w if weight is None else weight
        return torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), weight)

    def second(self, blocks):
        """The factor (1, 4, 4, 8) of the blocks [B, 4, 8]."""
        return torch.einsum("bok,opk->bop", blocks.transpose(1, 2), self.v).flatten(1)


class Written(Case):
    """Buffers are written: no gradients."""

    trains = False


class WeightAfterProduct(Written):
    def forward(self, x):
        y = self.first(x, self.buffer)
        self.buffer.mul_(0.5)
        return y.flatten(1) + self.buffer.sum()


class WeightByAnotherName(Written):
    def forward(self, x):
        y = self.first(x, self.buffer).flatten(1)
        self.flat.mul_(0.5)
        return y


class WeightThroughAView(Written):
    def forward(self, x):
        y = self.first(x, self.buffer)
        self.buffer.view(-1)[:64].mul_(0.5)
        return y.flatten(1) + self.buffer.sum()


class WeightBeforeByAnotherName(Written):
    reasons = (WRITTEN_BEFORE,)

    def forward(self, x):
        self.flat.mul_(0.5)
        return self.first(x, self.buffer).flatten(1)


class WeightBeforeThroughAView(Written):
    reasons = (WRITTEN_BEFORE,)

    def forward(self, x):
        self.buffer.view(-1)[:64].mul_(0.5)
        return self.first(x, self.buffer).flatten(1)


class WeightBetweenProducts(Written):
    reasons = ("", WRITTEN_BEFORE)

    def forward(self, x):
        y = self.first(x, self.buffer).flatten(1)
        self.buffer[0].zero_()
        return self.first(y, self.buffer).flatten(1)


class WholeWeightBefore(Written):
    def forward(self, x):
        self.buffer /= 2 * self.buffer.norm()
        return self.first(x, self.buffer).flatten(1)


class CopyOfAWrittenWeight(Written):
    """The copy has the weight's earlier values."""

    def forward(self, x):
        stored = self.buffer.clone()
        self.buffer.mul_(3)
        return self.first(x, stored).flatten(1)


class CastWeight(Written):
    def forward(self, x):
        stored = self.buffer.to(torch.bfloat16)
        y = self.first(x.to(torch.bfloat16), stored)
        stored.mul_(2)
        return y.flatten(1) + stored.sum()


class CastUnderAutocast(Written):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x, self.buffer)
            self.buffer.mul_(2)
            return y.flatten(1)


class ThirdOperand(Written):
    def forward(self, x):
        y = torch.einsum("bki,koi,ko->bko", x.view(-1, 4, 8), self.w, self.scale)
        self.scale.mul_(2)
        return y.flatten(1)


class ThirdOperandWithGradients(Case):
    """Joined before the product, the weights would need each other for their gradients."""

    reasons = ("an operand is written in place behind it, and gradients are on",)

    def forward(self, x):
        rows = x.detach().unflatten(-1, (4, 8))
        y = torch.einsum("pis,iws,ws->piw", rows, self.buffer, self.gain)
        self.buffer[..., :1] += 1
        return y.flatten(1)

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(8, 8))


class BiasWrittenBehindIt(Case):
    """AOTAutograd computes the activation again from the bias as it is then."""

    reasons = ("an operand is written in place behind it, and gradients are on",)

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))
        self.register_buffer("matrix", torch.block_diag(*torch.randn(4, 2, 8)))

    def forward(self, x):
        y = torch.addmm(self.bias, x, self.matrix.T)
        with torch.no_grad():
            self.bias[0].zero_()
        return F.silu(y)


class LoopWeight(Written):
    """The product is there when all pieces are; then one of the weights holds something else."""

    reasons = (WRITTEN_BEFORE_READ,)

    def forward(self, x):
        c, d = x.chunk(2, -1)
        u, v = F.linear(c, self.one), F.linear(d, self.two)
        self.one.mul_(2)
        return torch.cat([u, v], -1)


class LoopBias(LoopWeight):
    def forward(self, x):
        c, d = x.chunk(2, -1)
        u, v = F.linear(c, self.one, self.p), F.linear(d, self.two, self.q)
        self.p.mul_(2)
        return torch.cat([u, v], -1)


class LoopInput(LoopWeight):
    def forward(self, x):
        x = x * 1.0
        c, d = x.chunk(2, -1)
        u, v = F.linear(c, self.one), F.linear(d, self.two)
        x.mul_(2)
        return torch.cat([u, v], -1)


class BlockDiagonal(Written):
    def forward(self, x):
        matrix = torch.block_diag(self.one, self.two)
        self.one.mul_(2)
        return F.linear(x, matrix).view(-1, 2, 16)


class FrozenMatrix(Written):
    def __init__(self):
        super().__init__()
        self.register_buffer("matrix", torch.block_diag(*torch.randn(4, 8, 8)))

    def forward(self, x):
        y = F.linear(x, self.matrix)
        self.matrix.mul_(2)
        return y.view(-1, 4, 8)


class Input(Written):
    def forward(self, x):
        x = x * 1.0
        y = self.first(x)
        x.mul_(3.0)
        return y.flatten(1) + x


class ResultThroughAView(Written):
    def forward(self, x):
        y = torch.bmm(x.view(-1, 4, 8).transpose(0, 1), self.w)
        view = y.transpose(0, 1)
        view.relu_()
        return view.flatten(1) + y.sum()


class CopyOfAResult(Written):
    def forward(self, x):
        y = self.first(x)
        copy_of_it = y.clone()
        copy_of_it.mul_(2)
        return y, copy_of_it


class PartOfAResult(Written):
    def forward(self, x):
        y = self.first(x)
        seen = y.transpose(1, 2)
        y[:, 0].zero_()
        return seen


class ResultBetweenFactors(Written):
    reasons = ("", "", "")

    def forward(self, x):
        middle = self.first(x)
        out = self.second(middle)
        middle.mul_(2)
        return out + self.second(middle)


class ResultReadThroughACopy(Written):
    """The copy holds the input of the second factor, the result itself no longer does."""

    reasons = ("its result is written in place and read elsewhere too", "")

    def forward(self, x):
        middle = self.first(x)
        stored = middle.clone()
        middle.mul_(2)
        return self.second(stored) + middle.flatten(1)


class ResultWrittenBehindItsReader(Case):
    """The author's second product saves a copy of the first one's result."""

    reasons = ("", "an operand is written in place behind it, and gradients are on")

    def forward(self, x):
        y = x @ torch.block_diag(*self.w)
        blocks = y.view(-1, 2, 8, 2).permute(1, 3, 0, 2).reshape(4, -1, 8)
        z = torch.bmm(blocks, self.w)
        y.detach().add_(1)
        return z


class NamesOfOneResult(Case):
    def forward(self, x):
        y = torch.bmm(x.view(-1, 4, 8).transpose(0, 1), self.w)
        return y, y.transpose(0, 1), y.view(-1)


class CopiesOfOneResult(Case):
    def forward(self, x):
        y = self.first(x)
        return y, y.clone(), y.flatten(1)


class PartAndWhole(Case):
    def forward(self, x):
        y = self.first(x).flatten(1)
        return y, y[:, :8]


class FirstFactorWithoutGradients(Case):
    reasons = ("", "")

    def forward(self, x):
        with torch.no_grad():
            middle = self.first(x)
        return self.second(middle)


class SecondFactorWithoutGradients(Case):
    reasons = ("", "")

    def forward(self, x):
        middle = self.first(x)
        with torch.no_grad():
            out = self.second(middle)
        return out + middle.flatten(1)


class ViewWithoutGradients(Case):
    """The view has no gradient, whatever it is a view of has."""

    def forward(self, x):
        y = self.first(x)
        with torch.no_grad():
            view = y.transpose(1, 2)
        return view.flatten(1) * self.w.sum() + x


class WeightViewedWithoutGradients(Case):
    def forward(self, x):
        with torch.no_grad():
            weight = self.w.transpose(1, 2)
        return torch.einsum("bgi,gio->bgo", x.view(-1, 4, 8), weight).flatten(1)


class WeightCastWithoutGradients(Case):
    """One cast of the weight has gradients, the other has none."""

    reasons = ("", "")

    def forward(self, x):
        low = x.to(torch.bfloat16)
        with torch.no_grad():
            constant = self.w.to(torch.bfloat16)
        first = self.first(low, constant).flatten(1)
        return first + self.first(low, self.w.to(torch.bfloat16)).flatten(1)


class OnePieceWithoutGradients(Case):
    reasons = ("gradients",)

    def forward(self, x):
        c, d = x.chunk(2, -1)
        with torch.no_grad():
            u = F.linear(c, self.one)
        return torch.cat([u, F.linear(d, self.two)], -1)


class PiecesCutWithoutGradients(Case):
    """Two dense layers on pieces that have lost the gradient of their source."""

    reasons = ()

    def forward(self, x):
        with torch.no_grad():
            c, d = x.chunk(2, -1)
        return torch.cat([F.linear(c, self.one), F.linear(d, self.two)], -1)


class MultipliedWithoutGradients(Case):
    reasons = ("gradients",)

    def forward(self, x):
        with torch.no_grad():
            products = x.view(-1, 4, 1, 8) * self.w
        return products.sum(-1).flatten(1) + x


class GradientsSwitchedOn(Case):
    """Called where gradients are off, it switches them on for one factor."""

    reasons = ("", "")
    outside = staticmethod(torch.no_grad)

    def forward(self, x):
        middle = self.first(x)
        with torch.enable_grad():
            return self.second(middle)


class InferenceFactor(Case):
    def forward(self, x):
        with torch.inference_mode():
            middle = self.first(x)
        return self.second(middle.clone())


class DetachedMiddle(Case):
    reasons = ("", "")

    def forward(self, x):
        return self.second(self.first(x).detach()) + x


class AutocastEndsBetweenFactors(Case):
    reasons = ("", "")

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            middle = self.first(x)
        return self.second(middle.float())


class AutocastBeginsBetweenFactors(Case):
    reasons = ("", "")

    def forward(self, x):
        middle = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(middle)


class OtherHalfUnderAutocast(Case):
    """Autocast does not take float16 where it computes in bfloat16."""

    trains = False
    reasons = ("it computes in float16, but autocast is on where it is computed",)

    def __init__(self):
        super().__init__()
        self.half()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x.half(), torch.block_diag(self.one, self.two))


class CheckpointUnderAutocast(Case):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(lambda x: self.second(self.first(x)), x, use_reentrant=False)


class CheckpointWithoutGradients(Case):
    reasons = ("", "")

    def forward(self, x):
        with torch.no_grad():
            middle = checkpoint(self.first, x, use_reentrant=False)
        return self.second(middle)


class CopyByStrides(Case):
    """What einsum returns is not contiguous: the reshape copies it."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(2, 5, 16) / 4)

    def forward(self, x):
        y = torch.einsum("njb,jwb->njw", x.unflatten(-1, (2, 16)), self.v)
        some = y.narrow(0, 1, 2)
        return some.reshape(-1, 10), some.movedim(2, 1)


class WrittenCopyByStrides(CopyByStrides):
    trains = False

    def forward(self, x):
        y = torch.einsum("njb,jwb->njw", x.unflatten(-1, (2, 16)), self.v)
        y.split(5, -1)[0].flatten(1).zero_()
        return y + 1


class CopyWithoutGradients(CopyByStrides):
    """A view requires gradients where they are off, a copy does not."""

    def forward(self, x):
        y = torch.einsum("njb,jwb->njw", x.unflatten(-1, (2, 16)), self.v)
        with torch.no_grad():
            return y.flatten(1)


class ViewBeforeGradients(Case):
    """The product reads a view without gradient."""

    outside = staticmethod(torch.no_grad)

    def forward(self, x):
        weight = self.w.transpose(1, 2)
        with torch.enable_grad():
            return torch.einsum("bgi,gio->bgo", x.view(-1, 4, 8), weight)


class CopyOfAnInferenceTensor(Case):
    """The copy is an ordinary tensor."""

    def forward(self, x):
        with torch.inference_mode():
            x = torch.sin(x)
        blocks = x.view(-1, 4, 8).transpose(0, 1).contiguous()
        return torch.bmm(blocks, self.w)


class CopyThatTheProductMakes(Case):
    """Autograd saves the copy, and could not save the operator's input."""

    reasons = ("an operand is made in a torch.inference_mode",)

    def forward(self, x):
        with torch.inference_mode():
            x = torch.sin(x)
        return torch.einsum("bgdi,goi->bgdo", x.view(-1, 4, 2, 4), self.w[:, :, :4])


class ViewWrittenWithoutGradients(Case):
    """torch takes no view of it where gradients are recorded; the copy is the author's."""

    reasons = ("an operand is a view, written where no gradients are recorded",)

    def forward(self, x):
        y = x * 2
        with torch.no_grad():
            y = y.view(-1, 4, 8).transpose(0, 1).mul_(2).reshape(4, -1, 8)
        return torch.bmm(y, self.w) + x.sum()


class DropoutThatIsOff(Case):
    """It returns its input, which is written between two products by pieces of it."""

    trains = False
    reasons = ()

    def forward(self, x):
        y = x * 2
        pieces = F.dropout(y, 0.5, False)
        first = pieces[:, :16] @ self.one
        y.fill_(0.25)
        return torch.cat([first, pieces[:, 16:] @ self.two], -1)


class CopyOfWhatIsComputedElementwise(Case):
    """Where gradients are off, a view of a result requires one, and a copy of it does not."""

    def forward(self, x):
        y = F.gelu(torch.einsum("bgi,goi->obg", x.view(-1, 4, 8), self.w))
        with torch.no_grad():
            y = y.flatten(-2)
        return y.view(-1), x.sum()


class WrittenInsideACheckpoint(Case):
    """The body writes one of two views that it reads of a result."""

    def forward(self, x):
        blocks = torch.bmm(x.view(-1, 4, 8).transpose(0, 1), self.w)

        def body(blocks, rows):
            blocks[..., 0] *= 3
            return rows.reshape(-1, 32)

        return checkpoint(body, blocks, blocks.transpose(0, 1), use_reentrant=False)


class OwnTensorWrittenInsideACheckpoint(Case):
    """It is the body's own: nothing outside is written, and both products are lowered."""

    reasons = ("", "")

    def forward(self, x):
        def body(rows):
            return (self.second(rows) + 1).mul_(2)

        return checkpoint(body, self.first(x), use_reentrant=False) + x.sum()


class TheSameTensorWithoutGradients(Case):
    """float() returns the tensor that it is called on, gradients and all."""

    def forward(self, x):
        y = torch.bmm(self.w, x.view(-1, 4, 8).permute(1, 2, 0))
        with torch.no_grad():
            return y.float()


def subclasses(base):
    direct = base.__subclasses__()
    return [one for cls in direct for one in (cls, *subclasses(cls))]


CASES = [
    case for case in subclasses(Case) if "forward" in vars(case) and case is not InferenceFactor
]


def outcome(function, model, x):
    """Results, gradients (None where there are none), buffers, and who shares memory with whom."""
    x = x.clone().requires_grad_(model.trains)
    outside = getattr(model, "outside", torch.enable_grad if model.trains else torch.no_grad)
    with outside():
        out = function(x)
    outs = list(out) if isinstance(out, tuple) else [out]
    leaves = [x, *model.parameters()]
    grads = [None] * len(leaves)
    roots = [one for one in outs if one.requires_grad]
    if roots:
        total = sum((one.float() ** 2).sum() for one in roots)
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    values = [one.detach().clone() for one in outs]
    shares = []
    for one in outs:
        with torch.no_grad():
            one.detach().zero_()
        shares.append([bool((other.detach() == 0).all()) for other in outs])
        for other, value in zip(outs, values, strict=True):
            other.detach().copy_(value)
    buffers = [buffer.clone() for buffer in model.buffers()]
    return values, [one.requires_grad for one in outs], list(grads), buffers, shares


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_does_what_eager_code_does(case, dynamic, compiled_by_eager):
    model = case()
    for parameter in model.parameters():
        parameter.requires_grad_(model.trains)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ksopt", fullgraph=True, dynamic=dynamic)
    for rows in (6, 3) if dynamic else (6, 6):  # another static size would be recompiled
        x = torch.randn(rows, 32)
        expected, result = outcome(twin, twin, x), outcome(compiled, model, x)
        # bfloat16 is summed in another order: one unit in the last of 8 bits, and sums of a few.
        exact = expected[0][0].dtype == torch.float32 and "Cast" not in case.__name__
        rtol, atol = (1e-4, 1e-4) if exact and "Autocast" not in case.__name__ else (4e-2, 8e-2)
        for mine, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    sites = compiled_by_eager.reports[0].sites
    reasons = [site.reason if site.verdict is Verdict.NOT_RECOGNISED else "" for site in sites]
    assert len(reasons) == len(case.reasons), reasons
    for reason, expected_reason in zip(reasons, case.reasons, strict=True):
        assert expected_reason in reason
        assert bool(expected_reason) == bool(reason), reason


def test_the_authors_kernels_may_write_what_they_read():
    """Such a kernel is a node of its own kind, which does not show its writes."""
    from ksopt.compile.capture.in_place import writes_its_inputs

    graph = torch.fx.Graph()
    kernel = torch.ops.higher_order.triton_kernel_wrapper_mutation
    assert writes_its_inputs(graph.call_function(kernel, kwargs={"kwargs": {}}))
    assert not writes_its_inputs(graph.call_function(torch.relu, (graph.placeholder("x"),)))


def test_an_inference_region_keeps_its_own_factor(compiled_by_eager, monkeypatch):
    """AOTAutograd refuses views inside such a region, so the graph itself is run."""
    monkeypatch.setattr(
        backend, "compile_by_inductor", lambda gm, example_inputs, config: gm.forward
    )
    model = InferenceFactor()
    x = torch.randn(6, 32, requires_grad=True)
    expected = model(x)
    result = torch.compile(model, backend="ksopt", fullgraph=True)(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(result.sum(), [model.v])
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), [model.v])[0])
    assert torch.autograd.grad(model(x).sum(), [x, model.w], allow_unused=True) == (None, None)
    first, second = compiled_by_eager.reports[0].sites
    assert "inside a torch.inference_mode" in first.reason
    assert second.verdict is Verdict.LOWERED


RETURNED = {
    "itself": lambda y: (y, y.contiguous()),
    "a view of it": lambda y: (y.mT, y.contiguous()),
    "a view of the copy": lambda y: (y, y.contiguous().view(-1)),
    "two copies": lambda y: (y.contiguous(), y.contiguous()),
}


class BesideItsCopy(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.returned = returned
        self.register_buffer("weight", torch.randn(2, 3, 32))
        self.register_buffer("scale", torch.randn(2, 32))

    def forward(self, x):
        parts = x.unflatten(-1, (2, 32)), self.weight, self.scale
        return self.returned(torch.einsum("iuj,uwj,uj->iuw", *parts) * 2)


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
def test_a_result_that_is_returned_beside_its_copy_shares_no_memory_with_it(returned):
    model, x = BesideItsCopy(returned), torch.randn(3, 64)

    def by_eager(gm, example_inputs):
        report = rewrite(gm, example_inputs)
        assert report.count(Verdict.LOWERED) == 1
        return gm.forward

    expected, actual = model(x), torch.compile(model, backend=by_eager)(x)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one)
    shares = [one.data_ptr() == other.data_ptr() for one, other in (expected, actual)]
    assert shares == [False, False]


@pytest.fixture
def handed_over(monkeypatch):
    """Graphs that run as they were rewritten: AOTAutograd refuses some with an inference mode."""
    graphs = []

    def compile_by_inductor(gm, example_inputs, config):
        graphs.append(gm.graph)
        return gm.forward

    monkeypatch.setattr(backend, "compile_by_inductor", compile_by_inductor)
    return graphs


MOVES = {
    "a copy of a view": lambda y: y.permute(1, 0, 2).reshape(-1, 9),
    "a view of a copy": lambda y: y.permute(1, 0, 2).contiguous().flatten(1),
    "a copy of a copy": lambda y: y.contiguous().permute(1, 0, 2).reshape(-1, 9),
    "views": lambda y: y.permute(1, 0, 2),
}


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("move", MOVES)
def test_a_copy_where_gradients_are_off_passes_none_on(region, move, handed_over):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("first", torch.randn(3, 2, 3))
            self.register_buffer("second", torch.randn(3, 3))

        def forward(self, x):
            y = torch.matmul(x.view(-1, 3, 2).permute(1, 0, 2), self.first)  # [3, B, 3]
            with region():
                y = MOVES[move](y)
            y = y if y.dim() == 2 else y.reshape(-1, 9)
            return y @ torch.block_diag(*[self.second] * 3).t()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 6, requires_grad=True)
    expected = model(x)
    actual = torch.compile(model, backend="ksopt", options={"tune": "off"})(x)
    torch.testing.assert_close(actual, expected)
    assert actual.requires_grad == expected.requires_grad
    assert any(node.target is torch.ops.ksopt.ks_mm.default for node in handed_over[0].nodes)
    if expected.requires_grad:
        expected.sum().backward()
        expected_grad, x.grad = x.grad, None
        actual.sum().backward()
        assert (x.grad is None) == (expected_grad is None)


def test_a_copy_of_a_view_that_is_not_followed_passes_none_on(handed_over):
    """The view splits 8 and 6 features into 3, 2 and 8."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(8, 6, 1))
            self.register_buffer("second", torch.randn(24, 2, 4))

        def forward(self, x):
            y = torch.bmm(self.first, x.reshape(-1, 8, 1).permute(1, 2, 0)).permute(2, 0, 1)
            with torch.no_grad():
                y = y.reshape(-1, 3, 2, 8).permute(1, 3, 0, 2).reshape(24, -1, 2)
            return y.bmm(self.second)

    model, x = Model(), torch.randn(8, 8)
    expected = model(x)
    actual = torch.compile(model, backend="ksopt", options={"tune": "off"})(x)
    torch.testing.assert_close(actual, expected)
    assert not expected.requires_grad
    assert not actual.requires_grad
    assert any("ks_mm" in str(node.target) for node in handed_over[0].nodes)


@pytest.mark.parametrize("batch", [2, 3, 9])  # 2 and 9 are sizes of the weight, too
def test_a_returned_view_fixes_no_dim_that_is_marked_dynamic(batch, handed_over):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 2, 9))

        def forward(self, x):
            y = torch.bmm(self.weight, x.unflatten(-1, (2, 9)).permute(1, 2, 0))
            with torch.enable_grad():
                return y.permute(2, 0, 1)

    model, x = Model(), torch.randn(batch, 18)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(model, backend="ksopt", options={"tune": "off"})
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))


class TwoWeights(nn.Module):
    """The author's einsum saves the elementwise product of weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 3, 12))
        self.second = nn.Parameter(torch.randn(3, 3, 12).bfloat16())

    def forward(self, x):
        operands = x.unflatten(-1, (12, 3)), self.first, self.second.float()
        y = torch.einsum("...bp,pub,pub->...bu", *operands)
        with torch.no_grad():
            self.second.fill_(0.25)
        return y


class BiasOfALayer(nn.Module):
    """The author's einsum saves the layer's result, bias included."""

    def __init__(self):
        super().__init__()
        self.layer = KSLinear(36, 36, "(1,6,6,6)*(6,6,6,1)")
        self.weight = nn.Parameter(torch.randn(12, 3, 3))

    def forward(self, x):
        y = torch.einsum("bgi,goi->bgo", self.layer(x).unflatten(-1, (12, 3)), self.weight)
        with torch.no_grad():
            self.layer.bias.fill_(0.25)
        return y


def sites_of_equal_gradients(model, x, monkeypatch):
    """The sites of a model's graph, after its gradients have been compared with eager ones."""
    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(
        backend, "compile_by_inductor", lambda gm, inputs, config: aot_eager(gm, inputs)
    )
    compiled = copy.deepcopy(model)
    with backend.collected() as reports:
        torch.compile(compiled, backend="ksopt", options={"tune": "off"})(
            x
        ).square().sum().backward()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).grad, parameter.grad)
    return reports[0].sites


@pytest.mark.parametrize("kind", [TwoWeights, BiasOfALayer])
def test_what_the_backward_pass_may_make_again_is_not_read_where_it_is_written_behind(
    kind, monkeypatch
):
    """AOTAutograd recomputes such operands from inputs written since."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(5, 36)
    sites = sites_of_equal_gradients(model, x, monkeypatch)
    (site,) = (one for one in sites if one.spelling == "einsum")
    assert "an operand is written in place behind it" in site.reason


@pytest.mark.parametrize("is_written", [False, True])
def test_a_low_rank_pair_is_left_where_the_parameter_of_its_computed_weight_is_written_behind_it(
    is_written, monkeypatch
):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Parameter(torch.randn(24, 80))
            self.register_buffer("mask", (torch.rand(24, 80) > 0.5).float())  # of no pattern
            self.outer = nn.Linear(24, 40)

        def forward(self, x):
            y = self.outer(F.linear(x, self.inner * self.mask))
            if is_written:
                with torch.no_grad():
                    self.inner[:, :1].add_(1.0)
            return y

    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 80)
    sites = sites_of_equal_gradients(model, x, monkeypatch)
    lowered = [str(one.chain) for one in sites if one.verdict is Verdict.LOWERED]
    assert lowered == ([] if is_written else ["(1,40,24,1)*(1,24,80,1)"])
