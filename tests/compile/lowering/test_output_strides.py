"""The outputs of a compiled model have the strides of the author's model."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ksopt.compile import backend
from ksopt.compile.sites import Verdict

_LIBRARY = torch.library.Library("ksopt_tests_strides", "FRAGMENT")
_LIBRARY.define("last_stride(Tensor x) -> Tensor")


def _last_stride(x):
    return x.new_full((1,), float(x.stride(-1)))


_LIBRARY.impl("last_stride", _last_stride, "CompositeExplicitAutograd")
_LIBRARY.impl("last_stride", lambda x: x.new_empty(1), "Meta")


class Strided(nn.Module):
    """A product whose result [B, 4, 3] is in memory as [3, 4, B]; its replacement is not."""

    def __init__(self, after):
        super().__init__()
        self.after = after
        self.weight = nn.Parameter(torch.randn(3, 4, 16))

    def product(self, x):
        return torch.bmm(self.weight, x.reshape(-1, 3, 16).permute(1, 2, 0)).permute(2, 1, 0)

    def forward(self, x):
        return self.after(self.product(x))


AFTER = {
    "itself": lambda y: y,
    "elementwise": torch.relu,
    "detached": lambda y: y.detach() if not y.requires_grad else y * 2,
    "permuted": lambda y: torch.relu(y).permute(0, 2, 1),
    "a part": lambda y: torch.relu(y)[:, :2],
    "of a part": lambda y: y[:, :2] * 1,
    "a piece": lambda y: y.chunk(2, 1)[0],
    "a piece of what is computed": lambda y: torch.relu(y).chunk(2, 1)[1],
    "written": lambda y: torch.relu(y).add_(1),
    "several": lambda y: (torch.relu(y), (y + 1).mT),
    "two of one memory": lambda y: (lambda z: (z, z.permute(2, 1, 0)))(torch.relu(y)),
    "as complex": lambda y: torch.view_as_complex(
        torch.relu(y).permute(2, 1, 0).unflatten(2, (4, 2))
    ),
    "an operator's": lambda y: torch.ops.ksopt_tests_strides.last_stride(y + 1),
}


def compiled(model, *inputs, dynamic=None):
    """The result of a compiled model of which one product is lowered."""
    with backend.collected() as reports:
        options = {"tune": "off"}
        result = torch.compile(model, backend="ksopt", options=options, dynamic=dynamic)(*inputs)
    assert sum(report.count(Verdict.LOWERED) for report in reports) == 1
    return result


def assert_alike(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    actual, expected = (one if isinstance(one, tuple) else (one,) for one in (actual, expected))
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.stride() == theirs.stride()
    memories = [[one.untyped_storage()._cdata for one in every] for every in (actual, expected)]
    ours, theirs = ([every.index(one) for one in every] for every in memories)
    assert ours == theirs  # which of them share memory


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("after", "trained"),
    # The operator has no gradient.
    [(name, trained) for name in AFTER for trained in (False, True)[: 1 + (name[:3] != "an ")]],
)
def test_what_is_returned_has_the_authors_strides(after, trained):
    model, x = Strided(AFTER[after]).requires_grad_(trained), torch.randn(8, 48)
    assert_alike(compiled(model, x), model(x))


@pytest.mark.parametrize("after", ["elementwise", "a part"])
def test_of_any_number_of_rows(after):
    model = Strided(AFTER[after]).requires_grad_(False)
    x = torch.randn(8, 48)
    assert_alike(compiled(model, x, dynamic=True), model(x))


@pytest.mark.parametrize("trained", [False, True])
def test_a_view_as_another_type(trained, monkeypatch):
    """Without Inductor: torch 2.11's leaves out the author's own copy ahead of such a view, too."""
    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(backend, "compile_by_inductor", lambda gm, inputs, _: aot_eager(gm, inputs))

    def after(y):
        return torch.relu(y).permute(2, 1, 0).view(torch.int64)

    model, x = Strided(after).requires_grad_(trained), torch.randn(8, 48)
    actual, expected = compiled(model, x), model(x)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual.view(torch.float32), expected.view(torch.float32))


@pytest.mark.slow
def test_a_view_and_a_copy_behind_a_graph_break():
    """The next graph takes its copies by strides as the author's code does."""

    def after(y):
        y = torch.relu(y)
        torch._dynamo.graph_break()
        z = y.permute(2, 1, 0).reshape(-1)  # a view in the author's memory
        z.mul_(2)
        return y, y.permute(2, 1, 0).view(-1)

    model, x = Strided(after).requires_grad_(False), torch.randn(8, 48)
    assert_alike(compiled(model, x), model(x))


@pytest.mark.parametrize("taken", [lambda y: y.transpose(0, 0), lambda y: y.permute(2, 1, 0)])
def test_a_view_without_gradients_of_what_a_dropout_passes_on(taken):
    """Eager mode's transpose of one dim returns its input, which requires gradients."""

    def after(y):
        y = nn.functional.dropout(y, 0.5, False)
        with torch.no_grad():
            return taken(y)

    model, x = Strided(after), torch.randn(8, 48)
    actual, expected = compiled(model, x), model(x)
    assert_alike(actual, expected)
    assert actual.requires_grad == expected.requires_grad


class InACheckpoint(Strided):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class BeforeACheckpoint(Strided):
    """What tells the strides is in the checkpoint's graph."""

    def forward(self, x):
        return checkpoint(self.after, self.product(x) * 2, use_reentrant=False)


@pytest.mark.sweep
@pytest.mark.parametrize("model", [InACheckpoint, BeforeACheckpoint])
@pytest.mark.parametrize("after", ["elementwise", "permuted", "as complex", "an operator's"])
def test_across_a_checkpoint(model, after):
    model, x = model(AFTER[after]).requires_grad_(False), torch.randn(8, 48)
    assert_alike(compiled(model, x), model(x))
