"""The replacement of the block-diagonal butterfly multiply."""

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
        raise NotImplementedError("not needed here")


def library():
    module = types.ModuleType("blockdiag_butterfly_multiply")
    module.blockdiag_butterfly_multiply = BlockdiagButterflyMultiply.apply
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
        found = torch.compile(model, backend="ksopt", fullgraph=True)(x)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        assert model.w1.grad is not None
    assert theirs.blockdiag_butterfly_multiply == BlockdiagButterflyMultiply.apply
    (report,) = compiled_by_eager.reports
    assert [str(site.chain) for site in report.sites] == ["(1,8,4,8)*(4,8,16,1)"]


def test_what_is_something_else_is_not_replaced():
    theirs = library()
    theirs.other = lambda x, w1, w2: x @ torch.ones(8, 15)
    theirs.failing = lambda x, w1: x
    with pytest.raises(InvalidInputError, match="computes something else"):
        ksopt.patch(theirs, "other")
    with pytest.raises(InvalidInputError, match=r"failing\(x, w1, w2\) fails on x \[3, 8\]"):
        ksopt.patch(theirs, "failing")
    with pytest.raises(InvalidInputError, match="has no function 'missing'"):
        ksopt.patch(theirs, "missing")
