"""Copies by strides and writes of values computed from a product: they equal eager code.

What replaces a product may have other strides. A copy that depends on them, as `flatten`, must not
become a view that a caller can tell from a copy.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ksopt.compile import backend
from ksopt.compile.sites import Verdict


def copy_is_read(y):
    y = y * 2
    z = y.flatten(1)
    y.add_(1)
    return z


def copied_is_read(y):
    y = torch.relu(y)
    z = y.flatten(1)
    z.add_(1)
    return y


def read_after_a_size_of_one(y):
    """torch multiplies dims of size 1 elementwise: the strides are passed on."""
    y = torch.einsum("zjsu,u->zjs", y.unsqueeze(-1), torch.ones(1))
    z = y.flatten(1)
    y.mul_(2)
    return z


def both_are_returned(y):
    y = torch.einsum("zjsu,u->zjs", y.unsqueeze(-1), torch.ones(1))
    y = torch.where(y > 0, y, 0.1 * y)
    return y, y.flatten(1)


def view_is_written(y):
    """It is a view of the author's memory alone: on other strides it would be a copy."""
    y = torch.relu(y).permute(1, 0, 2)
    y.view(-1).mul_(2)
    return y


def viewed_is_written(y):
    y = torch.relu(y).permute(1, 0, 2)
    z = y.view_as(y.new_empty(2, y.shape[1] * 4))
    y.mul_(2)
    return z


def view_is_returned_beside_it(y):
    y = torch.relu(y).permute(1, 0, 2)
    return y, y.view(-1)


def view_is_read(y):
    y = torch.relu(y).permute(1, 0, 2)
    return y.view_as(y.new_empty(2, y.shape[1] * 4)) + 1


def aten_view_is_read(y):
    y = torch.relu(y).permute(1, 0, 2)
    return torch.ops.aten.view.default(y, [y.numel()]) + torch.ops.aten.view(y, [-1])


def view_of_named_sizes_is_read(y):
    return torch.relu(y).permute(1, 0, 2).view(size=(2, -1)) + 1


AFTER = [
    *(copy_is_read, copied_is_read, read_after_a_size_of_one, both_are_returned),
    *(view_is_written, viewed_is_written, view_is_returned_beside_it, view_is_read),
    *(aten_view_is_read, view_of_named_sizes_is_read),
]


class Strided(nn.Module):
    """A product whose result [B, 2, 4] lies in memory as [2, B, 4]."""

    def __init__(self, after):
        super().__init__()
        self.after = after
        self.weight = nn.Parameter(torch.randn(2, 6, 4))

    def forward(self, x):
        y = torch.einsum("zji,jis->jzs", x.view(-1, 2, 6), self.weight).permute(1, 0, 2)
        return self.after(y)


@pytest.fixture(params=["eager", "aot_eager"])
def rewritten(request, monkeypatch):
    """What ksopt's backend makes of a model, without Inductor."""
    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    by = {"eager": lambda gm, inputs: gm.forward, "aot_eager": aot_eager}[request.param]
    monkeypatch.setattr(backend, "compile_by_inductor", lambda gm, inputs, config: by(gm, inputs))

    def compiled(model, *inputs):
        with backend.collected() as reports:
            result = torch.compile(model, backend="ksopt", options={"tune": "off"})(*inputs)
        assert sum(report.count(Verdict.LOWERED) for report in reports) == 1
        return result

    return compiled


def are_one_memory(one, other):
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


@pytest.mark.parametrize("after", AFTER, ids=lambda after: after.__name__)
def test_a_copy_of_what_is_computed_of_a_result_stays_a_copy(after, rewritten):
    model, x = Strided(after).requires_grad_(False), torch.randn(5, 12)
    expected, actual = model(x), rewritten(model, x)
    torch.testing.assert_close(actual, expected)
    if isinstance(expected, tuple):
        assert are_one_memory(*actual) == are_one_memory(*expected)


class CopySavedAndSourceWritten(nn.Module):
    """The backward pass reads the copy, which must not be a view of a written tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.randn(3, 4, 8))
        self.second = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        y = torch.nn.functional.gelu(torch.einsum("zkv,kwv->zkw", x.view(-1, 3, 8), self.first))
        part = y.narrow(1, 2, 1)
        z = y.flatten(1) * self.second.flatten()
        torch.relu_(part)
        return z


def test_a_copy_that_a_backward_pass_reads_stays_a_copy(rewritten):
    model, x = CopySavedAndSourceWritten(), torch.randn(5, 24)
    expected = model(x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), model.second)
    actual = rewritten(model, x)
    (grad,) = torch.autograd.grad(actual.square().sum(), model.second)
    torch.testing.assert_close((actual, grad), (expected, expected_grad))


class WrittenBehindACheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 10))

    def forward(self, x):
        def body(x):
            return torch.matmul(self.weight, x.reshape(-1, 3, 10, 1))

        y = checkpoint(body, x, use_reentrant=False)
        z = y.flip(1)
        y.permute(2, 0, 1, 3)[..., :1].zero_()
        return z, y


class WrittenInInferenceMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randn(2, 8, 3))

    def forward(self, x):
        y = torch.sum(x.reshape(-1, 2, 1, 3) * self.weight, dim=-1, keepdim=True)
        with torch.inference_mode():
            z = torch.stack([y, y], 0)
            y.fill_(0.25)
        return z


@pytest.mark.parametrize(
    ("model", "features"), [(WrittenBehindACheckpoint, 30), (WrittenInInferenceMode, 6)]
)
def test_a_result_that_is_written_is_no_view(model, features, rewritten):
    """torch 2.11 cannot trace these writes into views."""
    model, x = model(), torch.randn(3, features)
    torch.testing.assert_close(rewritten(model, x), model(x))


class StridedAndWritten(nn.Module):
    """Two factors with a strided tensor between them, which is written before it is read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.randn(4, 8, 2).permute(1, 0, 2))
        self.register_buffer("second", torch.randn(8, 1, 4))

    def forward(self, x):
        y = torch.einsum("pxs,xbs->pxb", x.reshape(-1, 8, 2), self.first)
        y.zero_()
        return torch.bmm(self.second, y.detach().permute(1, 2, 0))


def test_what_is_written_is_copied_before_it_is_read_as_rows(monkeypatch):
    """torch 2.11 treats the result of zero_() as contiguous, and fails to take rows of it."""
    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    graphs = []

    def compile_by_inductor(gm, inputs, config):
        graphs.append(gm.graph)
        return aot_eager(gm, inputs)

    monkeypatch.setattr(backend, "compile_by_inductor", compile_by_inductor)
    model, x = StridedAndWritten(), torch.randn(13, 16)
    compiled = torch.compile(model, backend="ksopt", options={"tune": "off"})
    torch.testing.assert_close(compiled(x), model(x))
    (written,) = (node for node in graphs[0].nodes if node.target == "detach")
    assert [reader.target for reader in written.users] == [torch.clone]


class ReturnedTwice(nn.Module):
    """Two views of a product are returned, and two inputs share memory that is written."""

    def __init__(self, in_a_checkpoint):
        super().__init__()
        self.in_a_checkpoint = in_a_checkpoint
        self.weight = nn.Parameter(torch.randn(2, 8, 2))
        self.register_buffer("scales", torch.ones(2, 2))
        self.register_buffer("flat", self.scales.view(-1))

    def forward(self, x):
        x = torch.sin(x)  # x comes first among the graph's inputs
        self.flat[0] *= 3
        x = x * self.scales.view(-1)

        def body(x):
            return (torch.tanh(x).unflatten(-1, (2, 1, 2)) * self.weight).sum(-1)

        y = checkpoint(body, x, use_reentrant=False) if self.in_a_checkpoint else body(x)
        return y.reshape(-1, 16), y


@pytest.mark.parametrize("in_a_checkpoint", [False, True])
def test_a_result_that_is_returned_twice_beside_inputs_that_share_memory(
    in_a_checkpoint, rewritten
):
    model, x = ReturnedTwice(in_a_checkpoint), torch.randn(3, 4, requires_grad=True)
    expected = model(x)
    model.scales.fill_(1)
    actual = rewritten(model, x)
    torch.testing.assert_close(actual, expected)
    assert actual[0].untyped_storage()._cdata == actual[1].untyped_storage()._cdata


def multiplied(x, weight):
    """[3, 3, 3 * B] of [B, 3, 48]; the replacement of its transpose is contiguous, unlike that."""
    return torch.bmm(weight, x.transpose(0, 1).reshape(-1, 3, 16).permute(1, 2, 0))


class CopiedBehindACheckpoint(nn.Module):
    """What a checkpoint returns is strided and copied by its strides; then it is written."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 16))

    def forward(self, x):
        def body(x):
            y = multiplied(x, self.weight)
            return y, y.mT + 1

        _, y = checkpoint(body, x, use_reentrant=False)
        z = y.flatten(1)
        y.mul_(2)
        return z


class CopiedBehindTwoCheckpoints(CopiedBehindACheckpoint):
    def forward(self, x):
        def outer(x):
            def inner(x):
                y = multiplied(x, self.weight)
                return y, y.mT + 1

            return checkpoint(inner, x, use_reentrant=False)[1] + 1

        y = checkpoint(outer, x, use_reentrant=False)
        z = y.flatten(1)
        y.mul_(2)
        return z


class CopiedInACheckpoint(CopiedBehindACheckpoint):
    """The reverse: a checkpoint copies its input, and the caller writes."""

    def forward(self, x):
        def body(y):
            return y.flatten(1)

        y = multiplied(x, self.weight).mT + 1
        z = checkpoint(body, y, use_reentrant=False)
        y.mul_(2)
        return z


class CopiedInTheNextCheckpoint(CopiedBehindACheckpoint):
    def forward(self, x):
        def first(x):
            return multiplied(x, self.weight).mT + 1

        def second(y):
            z = y.flatten(1)
            return z, y * 2

        y = checkpoint(first, x, use_reentrant=False)
        z, _ = checkpoint(second, y, use_reentrant=False)
        z.mul_(2)
        return y


@pytest.mark.parametrize(
    "model",
    [
        CopiedBehindACheckpoint,
        CopiedBehindTwoCheckpoints,
        CopiedInACheckpoint,
        CopiedInTheNextCheckpoint,
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_copy_by_strides_stays_one_on_the_other_side_of_a_checkpoint(model, trained, rewritten):
    model, x = model().requires_grad_(trained), torch.randn(8, 3, 48)
    torch.testing.assert_close(rewritten(model, x), model(x))


class FactorWrittenBehindACheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 10), requires_grad=False)

    def forward(self, x):
        def body(x):
            return torch.matmul(self.weight, x.reshape(-1, 3, 10, 1))

        y = checkpoint(body, x, use_reentrant=False)
        self.weight.mul_(3)
        return y


class OperandWrittenBehindACheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 10), requires_grad=False)

    def forward(self, x):
        def body(x):
            weight = self.weight + 1
            return weight, torch.matmul(weight, x.reshape(-1, 3, 10, 1))

        weight, y = checkpoint(body, x, use_reentrant=False)
        weight.mul_(3)
        return y


@pytest.mark.parametrize("model", [FactorWrittenBehindACheckpoint, OperandWrittenBehindACheckpoint])
def test_what_is_written_behind_a_checkpoint_is_read_by_no_new_operator(model):
    """What its backward pass reads is for torch to say: the weight of now, or an error."""
    with backend.collected() as reports:
        torch.compile(model(), backend="ksopt", options={"tune": "off"})(
            torch.randn(3, 30, requires_grad=True)
        )
    sites = [site for report in reports for site in report.sites]
    assert [site.verdict for site in sites] == [Verdict.NOT_RECOGNISED]
    assert "is written in place behind it" in sites[0].reason
