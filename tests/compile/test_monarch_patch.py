"""Replacements of functions that Dynamo refuses: checked before they are put in their place."""

import types

import pytest
import torch
from torch import nn

import ksopt
from ksopt.errors import InvalidInputError


class BlockdiagButterflyMultiply(torch.autograd.Function):
    """As it is copied from repository to repository: it writes into transposed tensors."""

    @staticmethod
    def forward(ctx, x, w1_bfly, w2_bfly):
        batch_shape, n = x.shape[:-1], x.shape[-1]
        rows = x.numel() // n
        k, q, p = w1_bfly.shape
        l, s, r = w2_bfly.shape
        x_reshaped = x.reshape(rows, k, p).transpose(0, 1)
        out1 = torch.empty(rows, k, q, device=x.device, dtype=x.dtype).transpose(0, 1)
        out1 = torch.bmm(x_reshaped, w1_bfly.transpose(-1, -2), out=out1)
        out1 = out1.transpose(0, 1).reshape(rows, r, l).transpose(-1, -2).contiguous()
        out1 = out1.transpose(0, 1)
        out2 = torch.empty(rows, l, s, device=x.device, dtype=x.dtype).transpose(0, 1)
        out2 = torch.bmm(out1, w2_bfly.transpose(-1, -2), out=out2)
        out2 = out2.permute(1, 2, 0).reshape(*batch_shape, s * l)
        ctx.save_for_backward(x, w1_bfly, w2_bfly, out1)
        return out2

    @staticmethod
    def backward(ctx, dout):
        x, w1_bfly, w2_bfly, out1 = ctx.saved_tensors
        (k, q, p), (l, s) = w1_bfly.shape, w2_bfly.shape[:2]
        dout = dout.reshape(-1, s, l).permute(2, 0, 1)
        dw2 = dout.transpose(-1, -2) @ out1
        dout1 = (dout @ w2_bfly).permute(1, 2, 0).reshape(-1, k, q).transpose(0, 1)
        dw1 = dout1.transpose(-1, -2) @ x.reshape(-1, k, p).transpose(0, 1)
        dx = (dout1 @ w1_bfly).transpose(0, 1).reshape(x.shape)
        return dx, dw1, dw2


class BlockdiagMultiply(torch.autograd.Function):
    """The same with one factor."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        k, q, p = weight.shape
        rows = x.numel() // x.shape[-1]
        x_reshaped = x.reshape(rows, k, p).transpose(0, 1)
        out = torch.empty(rows, k, q, device=x.device, dtype=x.dtype).transpose(0, 1)
        out = torch.bmm(x_reshaped, weight.transpose(-1, -2), out=out).transpose(0, 1)
        return out.reshape(*x.shape[:-1], k * q)

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        k, q, p = weight.shape
        dout = dout.reshape(-1, k, q).transpose(0, 1)
        dweight = dout.transpose(-1, -2) @ x.reshape(-1, k, p).transpose(0, 1)
        return (dout @ weight).transpose(0, 1).reshape(x.shape), dweight


def library():
    module = types.ModuleType("blockdiag_butterfly_multiply")
    module.blockdiag_butterfly_multiply = BlockdiagButterflyMultiply.apply
    module.blockdiag_multiply = BlockdiagMultiply.apply
    return module


class Monarch(nn.Module):
    def __init__(self, theirs):
        super().__init__()
        self.theirs = theirs
        self.w1 = nn.Parameter(torch.randn(4, 8, 16) / 4)
        self.w2 = nn.Parameter(torch.randn(8, 8, 4) / 2)

    def forward(self, x):
        return self.theirs.blockdiag_butterfly_multiply(x, self.w1, self.w2)


def test_after_the_patch_the_layer_is_lowered_in_one_graph(compiled_by_eager):
    theirs = library()
    model, x = Monarch(theirs), torch.randn(3, 5, 64)
    with torch.no_grad():
        expected = model(x)
    with ksopt.patch(theirs):
        actual = torch.compile(model, backend="ksopt", fullgraph=True)(x)
        torch.testing.assert_close(actual, expected)
        actual.sum().backward()
        assert model.w1.grad is not None
    assert theirs.blockdiag_butterfly_multiply == BlockdiagButterflyMultiply.apply
    (report,) = compiled_by_eager.reports
    assert [str(site.chain) for site in report.sites] == ["(1,8,4,8)*(4,8,16,1)"]


def test_what_is_something_else_is_not_replaced():
    theirs = library()
    theirs.other = lambda x, w1, w2: x @ x.new_ones(8, 15)
    theirs.failing = lambda x, w1: x
    with pytest.raises(InvalidInputError, match="computes something else"):
        ksopt.patch(theirs, "other")
    with pytest.raises(InvalidInputError, match=r"failing fails on tensors \[3, 8\], \[2, 3, 4\]"):
        ksopt.patch(theirs, "failing")
    with pytest.raises(InvalidInputError, match="has no function 'missing'"):
        ksopt.patch(theirs, "missing")


class BlockdiagLinear(nn.Module):
    def __init__(self, theirs):
        super().__init__()
        self.theirs = theirs
        self.weight = nn.Parameter(torch.randn(4, 8, 4) / 2)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x):
        return self.theirs.blockdiag_multiply(x, self.weight) + self.bias


def test_the_single_factor_is_lowered_after_the_patch(compiled_by_eager):
    theirs = library()
    model, x = BlockdiagLinear(theirs), torch.randn(3, 5, 16, requires_grad=True)
    targets = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), targets)
    with ksopt.patch(theirs, "blockdiag_multiply"):
        compiled = torch.compile(model, backend="ksopt", fullgraph=True)
        actual = torch.autograd.grad(compiled(x).square().sum(), targets)
    torch.testing.assert_close(actual, expected)
    assert [str(site.chain) for site in compiled_by_eager.reports[0].sites] == ["(4,8,4,1)"]


def test_explain_names_the_break_the_call_and_the_remedy():
    theirs = library()
    model, x = BlockdiagLinear(theirs), torch.randn(3, 16)
    for _ in range(2):  # Dynamo says it in full only once
        explanation = ksopt.explain(model, x)
        (broken,) = explanation.graph_breaks
        assert "torch.bmm(x_reshaped, weight.transpose(-1, -2), out=out)" in broken.place.code
        assert broken.place.file == __file__
        assert "out=" in broken.reason
        assert "ksopt.patch" in explanation.summary()
        assert explanation.to_json()["graph_breaks"][0]["place"]["line"] == broken.place.line
    torch._dynamo.reset()
    (broken,) = ksopt.explain(model, x).graph_breaks
    assert "self.theirs.blockdiag_multiply(x, self.weight)" in broken.caller.code
    with ksopt.patch(theirs, "blockdiag_multiply"):
        torch._dynamo.reset()
        assert ksopt.explain(model, x).graph_breaks == ()


def transposed(x, weight):
    """Another function of theirs: y = x W, block by block."""
    return x @ torch.block_diag(*weight)


def by_einsum(x, weight):
    return torch.einsum("...ki,kio->...ko", x.unflatten(-1, weight.shape[:2]), weight).flatten(-2)


EXAMPLES = [(torch.ones(3, 8), torch.ones(2, 4, 5)), (torch.ones(2, 1, 6), torch.ones(3, 2, 2))]


def test_any_function_is_replaced_by_what_computes_the_same():
    owner = types.SimpleNamespace(multiply=transposed)
    with ksopt.patch(owner, "multiply", by_einsum, EXAMPLES) as patched:
        assert owner.multiply is by_einsum
        assert patched.original is transposed
    assert owner.multiply is transposed


def wrong_value(x, weight):
    return by_einsum(x, weight) * 1.0001


def wrong_shape(x, weight):
    return by_einsum(x, weight).unsqueeze(0)


def wrong_gradient(x, weight):
    return by_einsum(x, weight.detach())


def refusing(x, weight):
    raise ValueError("no such blocks")


def writing(x, weight):
    y = transposed(x, weight)
    x.data.mul_(2)
    return y


@pytest.mark.parametrize(
    ("original", "replacement", "examples", "message"),
    [
        (transposed, wrong_value, EXAMPLES, r"on tensors \[3, 8\], \[2, 4, 5\] a result differs"),
        (transposed, wrong_shape, EXAMPLES, "the shapes of the results are"),
        (transposed, wrong_gradient, EXAMPLES, "a gradient differs by"),
        (transposed, refusing, EXAMPLES, "refusing fails on tensors .*: no such blocks"),
        (refusing, by_einsum, EXAMPLES, "multiply fails on tensors .*: no such blocks"),
        (writing, by_einsum, EXAMPLES, "multiply writes its arguments"),
        (transposed, by_einsum, None, "give examples, a tuple of arguments of multiply"),
        (transposed, by_einsum, [torch.ones(3)], "an example is a Tensor: give a tuple"),
        (transposed, 3, EXAMPLES, "the replacement for multiply is no function"),
    ],
)
def test_what_differs_is_not_replaced(original, replacement, examples, message):
    owner = types.SimpleNamespace(multiply=original)
    with pytest.raises(InvalidInputError, match=message):
        ksopt.patch(owner, "multiply", replacement, examples)
    assert owner.multiply is original


def test_results_alone_are_compared_when_there_is_no_gradient():
    owner = types.SimpleNamespace(multiply=lambda x, w: transposed(x, w).detach())
    with pytest.raises(InvalidInputError, match="a gradient differs"):
        ksopt.patch(owner, "multiply", by_einsum, EXAMPLES)
    with ksopt.patch(owner, "multiply", by_einsum, EXAMPLES, gradients=False):
        assert owner.multiply is by_einsum


class Static:
    @staticmethod
    def multiply(x, weight):
        return transposed(x, weight)


class Inherited(Static):
    pass


@pytest.mark.parametrize("owner", [Static, Inherited])
def test_a_static_method_stays_one(owner):
    with ksopt.patch(owner, "multiply", by_einsum, EXAMPLES):
        assert owner().multiply(*EXAMPLES[0]).shape == (3, 10)
        assert owner.multiply is by_einsum
    assert owner().multiply(*EXAMPLES[0]).shape == (3, 10)
    assert isinstance(Static.__dict__["multiply"], staticmethod)
    assert "multiply" not in Inherited.__dict__
