"""Tensors that are allocated and then written slice by slice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ksopt.compile.sites import Verdict


class Case(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.w = nn.Parameter(torch.randn(4, 8, 4) / 3)

    def forward(self, x):
        return self.call(x, self.w)


def piece(x, w, i):
    return x[:, i * 4 : (i + 1) * 4] @ w[i].T


def whole(x, w):
    y = torch.empty(x.shape[0], 32)
    for i in range(4):
        y[:, i * 8 : (i + 1) * 8] = piece(x, w, i)
    return y


def from_the_end(x, w):
    y = x.new_zeros(x.shape[0], 32)
    for i in (2, 0, 3, 1):
        y[..., i * 8 - 32 : (i * 8 - 24) or None] = piece(x, w, i)
    return y


def by_copy(x, w):
    y = x.new_empty(x.shape[0], 4, 8)
    for i in range(4):
        y[:, i].copy_(piece(x, w, i))
    return y.flatten(1)


def written_afterwards(x, w):
    y = whole(x, w)
    z = y.view(-1, 4, 8)
    y[:, 3] = 1.0
    return z.sum(1), y.relu_()


def two_at_once(x, w):
    y, z = torch.empty(x.shape[0], 32), torch.zeros(32, 16)
    for i in range(4):
        y[:, i * 8 : (i + 1) * 8] = piece(x, w, i)
        z[i * 8 : (i + 1) * 8, i * 4 : (i + 1) * 4] = w[i]
    return y + F.linear(x, z)


def without_gradients(x, w):
    with torch.no_grad():
        weight = torch.zeros(32, 16)
        for i in range(4):
            weight[i * 8 : (i + 1) * 8, i * 4 : (i + 1) * 4] = w[i]
    return F.linear(x, weight) + w.sum()


FOLLOWED = {whole: 1, from_the_end: 1, by_copy: 1, two_at_once: 2, without_gradients: 1}


def overlapping(x, w):
    y = torch.zeros(x.shape[0], 32)
    for i in range(4):
        y[:, i * 8 : (i + 1) * 8] = piece(x, w, i)
    y[:, 4:12] = piece(x, w, 3)
    return y


def one_twice(x, w):
    y = torch.zeros(x.shape[0], 32)
    for i in (0, 1, 2, 3, 1):
        y[:, i * 8 : (i + 1) * 8] = piece(x, w, i) if i else piece(x, w, 1)
    return y


def one_unset(x, w):
    y = torch.zeros(x.shape[0], 32)
    for i in (0, 1, 3):
        y[:, i * 8 : (i + 1) * 8] = piece(x, w, i)
    return y


def read_in_between(x, w):
    y = torch.zeros(x.shape[0], 32)
    for i in range(4):
        y[:, i * 8 : (i + 1) * 8] = piece(x, w, i)
        if i == 2:
            before = y.sum()
    return y + before


def value_written_in_between(x, w):
    y = torch.zeros(x.shape[0], 32)
    for i in range(4):
        part = piece(x, w, i)
        y[:, i * 8 : (i + 1) * 8] = part
        part.mul_(2.0)
    return y


def seen_through_an_older_view(x, w):
    y = torch.zeros(x.shape[0], 32)
    view = y.view(-1, 4, 8)
    for i in range(4):
        y[:, i * 8 : (i + 1) * 8] = piece(x, w, i)
    return view.sum(1)


def gradients_switched(x, w):
    y = torch.zeros(x.shape[0], 32)
    for i in range(4):
        with torch.set_grad_enabled(i != 1):
            y[:, i * 8 : (i + 1) * 8] = piece(x, w, i)
    return y


def off_the_diagonal(x, w):
    weight = torch.zeros(32, 16)
    for i in range(4):
        weight[i * 8 : (i + 1) * 8, (3 - i) * 4 : (4 - i) * 4] = w[i]
    return F.linear(x, weight)


def diagonal_unset(x, w):
    weight = torch.zeros(32, 16)
    for i in range(3):
        weight[i * 8 : (i + 1) * 8, i * 4 : (i + 1) * 4] = w[i]
    return F.linear(x, weight)


def overwritten(x, w):
    weight = torch.zeros(32, 16)
    for i in range(4):
        weight[i * 8 : (i + 1) * 8, i * 4 : (i + 1) * 4] = w[i]
    weight[0:8, 4:8] = w[0]
    return F.linear(x, weight)


REASONS = {
    overlapping: "overlap, are unequal or are not all of it",
    one_twice: "overlap, are unequal or are not all of it",
    one_unset: "overlap, are unequal or are not all of it",
    read_in_between: "are not all of it",
    value_written_in_between: "mul_ writes one of them in between",
    seen_through_an_older_view: "view sees it before they are written",
    gradients_switched: "changes how they are written",
    off_the_diagonal: "overlap, are unequal or are not all of it",
    diagonal_unset: "are not all of it",
    overwritten: "overlap, are unequal or are not all of it",
}


def results(function, model, x):
    leaf = x.clone().requires_grad_()
    outputs = function(leaf)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(one.square().sum() for one in outputs)
    return [*outputs, *torch.autograd.grad(total, [leaf, *model.parameters()])]


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("call", [*FOLLOWED, written_afterwards], ids=lambda call: call.__name__)
def test_slices_are_one_factor(call, dynamic, compiled_by_eager):
    model = Case(call)
    compiled = torch.compile(model, backend="ksopt", fullgraph=True, dynamic=dynamic)
    for rows in (5, 7) if dynamic else (5,):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(results(compiled, model, x), results(model, model, x))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    report = compiled_by_eager.reports[0]
    if call in FOLLOWED:
        assert [site.verdict for site in report.sites] == [Verdict.LOWERED] * FOLLOWED[call]
        assert {str(site.chain) for site in report.sites} == {"(4,8,4,1)"}


def test_autocast_writes_16_bits_into_32(compiled_by_eager):
    model, x = Case(whole), torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.compile(model, backend="ksopt", fullgraph=True)(x)
        torch.testing.assert_close(actual, model(x), rtol=2e-2, atol=2e-2)
    assert actual.dtype is torch.float32
    assert [str(site.chain) for site in compiled_by_eager.reports[0].sites] == ["(4,8,4,1)"]


@pytest.mark.sweep
@pytest.mark.parametrize("call", REASONS, ids=lambda call: call.__name__)
def test_other_slices_are_left_alone_with_the_reason(call, compiled_by_eager):
    model, x = Case(call), torch.randn(5, 16)
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    torch.testing.assert_close(results(compiled, model, x), results(model, model, x))
    report = compiled_by_eager.reports[0]
    assert report.count(Verdict.LOWERED) == 0
    (site,) = report.sites
    assert "slices are written into " in site.reason
    assert REASONS[call] in site.reason
