"""Einsums of many operands, in whatever order torch would multiply them."""

import pytest
import torch
from torch import nn

from ksopt.compile.capture.rules.einsum import letters_of
from ksopt.compile.sites import Verdict


class Scaled(nn.Module):
    """A block-diagonal product in one einsum with another operand, which a function makes."""

    def __init__(self, equation, other, after=lambda y: y):
        super().__init__()
        self.equation, self.other, self.after = equation, other, after
        self.w = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.s = nn.Parameter(torch.rand(4, 6) + 0.5)

    def forward(self, x):
        y = torch.einsum(self.equation, x.view(-1, 4, 8), self.w, self.other(self, x))
        return self.after(y)


def gain(model, x):
    return model.s


def site_of(model, seen, mode=torch.enable_grad, **tolerance):
    """Compile a model, compare what it computes, and return its only site."""
    x = torch.randn(5, 32)
    with mode():
        expected = model(x)
        actual = torch.compile(model, backend="ksopt")(x)
    torch.testing.assert_close(actual, expected, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))
    (site,) = seen.reports[-1].sites
    return site


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode, compiled_by_eager):
    site = site_of(Scaled("bgi,goi,go->bgo", gain), compiled_by_eager, mode)
    assert (str(site.chain), site.verdict) == ("(4,6,8,1)", Verdict.LOWERED)
    assert site.computed is (mode is not torch.enable_grad)


@pytest.mark.parametrize(
    ("equation", "other"),
    [
        ("bgi,goi,go->bgo", lambda model, x: model.s[:1].expand(4, 6)),
        ("bgi,goi,gik->bgo", lambda model, x: model.w.mT),  # summed over k alone
        ("bgi,goi,->bgo", lambda model, x: torch.tensor(2.0)),
        ("bgi,goi,gi->bgo", lambda model, x: model.w[:, 0]),
        ("bgi,goi,gogo->bgo", lambda model, x: torch.einsum("go,hp->gohp", model.s, model.s)),
    ],
)
def test_what_is_joined_to_the_weight(equation, other, compiled_by_eager):
    site = site_of(Scaled(equation, other), compiled_by_eager)
    assert (str(site.chain), site.verdict) == ("(4,6,8,1)", Verdict.LOWERED)


def test_a_result_that_is_written_in_place(compiled_by_eager):
    model = Scaled("bgi,goi,go->bgo", gain, after=torch.relu_)
    assert site_of(model, compiled_by_eager).verdict is Verdict.LOWERED


@pytest.mark.parametrize(
    ("equation", "other", "reason"),
    [
        ("bgi,goi,bg->bgo", lambda m, x: x[:, :4].sigmoid(), "more than one of its operands"),
        ("bgi,goi,oi->bgo", lambda m, x: x[0, :6, None] * m.w[0], "more than one of its operands"),
    ],
)
def test_the_reason_names_the_node(equation, other, reason, compiled_by_eager):
    site = site_of(Scaled(equation, other), compiled_by_eager)
    assert site.verdict is Verdict.NOT_RECOGNISED
    assert site.reason.startswith("At node y: ")
    assert reason in site.reason


def test_under_autocast_torchs_own_order_decides_the_dtypes(compiled_by_eager):
    model = Scaled("bgi,goi,go->bgo", gain)
    with torch.autocast("cpu", torch.bfloat16):
        site = site_of(model, compiled_by_eager, rtol=2e-2, atol=2e-2)
    assert "no node holds its result, only what is computed from it" in site.reason


def test_the_inputs_own_sum_is_reported(compiled_by_eager):
    w, s = nn.Parameter(torch.randn(4, 6, 4)), nn.Parameter(torch.rand(4, 6))

    def pooled(x):
        return torch.einsum("bgik,goi,go->bgo", x.view(-1, 4, 4, 2), w, s)

    torch.compile(pooled, backend="ksopt")(torch.randn(5, 32))
    (site,) = compiled_by_eager.reports[-1].sites
    assert site.reason == "At node einsum: it sums the input alone over an index."


@pytest.mark.parametrize(
    ("equation", "shape", "weights"),
    [
        ("bij,j->b", (5, 4, 8), [(8,)]),
        ("bi,oi,o->bo", (5, 8), [(6, 8), (6,)]),
        ("bhqd,bhkd,h->bhqk", (2, 4, 3, 8), [(2, 4, 3, 8), (4,)]),
    ],
)
def test_what_is_dense_or_no_product_by_a_weight_is_no_site(
    equation, shape, weights, compiled_by_eager
):
    weights = [nn.Parameter(torch.randn(size)) for size in weights]

    def called(x):
        operands = [x, x.sin(), weights[-1]] if "k" in equation else [x, *weights]
        return torch.einsum(equation, *operands)

    x = torch.randn(shape)
    actual = torch.compile(called, backend="ksopt")(x)
    torch.testing.assert_close(actual, called(x), rtol=1e-4, atol=1e-5)
    assert compiled_by_eager.reports[-1].sites == []


def test_letters_of_a_result_that_is_not_named():
    assert letters_of("bgi,goi,zg", (3, 3, 2)) == ["bgi", "goi", "zg", "boz"]
    assert letters_of("...i,...oi->...o", (3, 2)) is None  # dots of two ranks: broadcast
    assert letters_of("bi,oi->bo", (2,)) is None
    assert letters_of("bi,oi->bo", (3, 2)) is None
    assert letters_of("...i,oi->o", (3, 2)) is None
