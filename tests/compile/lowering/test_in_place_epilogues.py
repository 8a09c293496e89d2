"""In-place epilogues, as ``y += x``, are fused where nothing else reads the tensor."""

import pytest
import torch
import torch.nn.functional as F

from tests.compile.lowering.test_fuse import LAYERS, chains, graphs_of, targets
from tests.compile.lowering.test_fuse import toy as toy  # the fixture


def by_iadd(y, r):
    y += r
    return y


def by_method(y, r):
    return y.add_(r)


def of_a_view(y, r):
    return y.view(-1, 32).add_(r.view(-1, 32))


def behind_activation(y, r):
    y = F.relu(y, inplace=True)
    y += r
    return y


def twice(y, r):
    y += r  # an input of the graph, which the next write does not touch
    return y.mul_(2)


ABSORBED = {
    "y += r and y.mul_(2)": (twice, ("bias", "residual")),
    "y += r": (by_iadd, ("bias", "residual")),
    "y.add_(r)": (by_method, ("bias", "residual")),
    "y.view().add_(r)": (of_a_view, ("bias", "residual")),
    "relu in place": (behind_activation, ("bias", "relu", "residual")),
}


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        (name, one)
        for name in LAYERS
        for one in ABSORBED
        if (name, "view" in one) != ("einsum", True)
    ],
)
def test_an_in_place_epilogue_of_a_layer_is_in_its_launch(name, spelling, toy):
    layer, (behind, steps) = LAYERS[name](), ABSORBED[spelling]
    x, r = torch.randn(5, 3, 32), torch.randn(5, 3, 32)

    def model(x, r):
        return behind(layer(x), r)

    with torch.no_grad():
        y, graph, report = graphs_of(model, x, r)
        torch.testing.assert_close(y, model(x, r))
    assert len(chains(graph)) == 1
    assert toy.launches[0].epilogue.names == steps
    assert not any("add" in one or "ks_mm" in one for one in targets(graph))
    if name == "einsum":
        (site,) = report.sites
        assert site.epilogue == site.one_launch == steps


def written_input(y, r):
    r += y
    return r


def read_again(y, r):
    z = y
    y += r
    return y, z * 2


def view_read_again(y, r):
    first = y[0]
    y += r
    return y * 2, first


def promoted(y, r):
    y += r.double()
    return y


LEFT = {
    "an input of the graph": written_input,
    "a value that is read again": read_again,
    "a view that is read again": view_read_again,
    "a sum of another dtype": promoted,
}


@pytest.mark.parametrize("spelling", LEFT)
def test_what_others_may_read_is_written_in_place(spelling):
    layer, behind = LAYERS["einsum"](), LEFT[spelling]
    x, r = torch.randn(5, 3, 32), torch.randn(5, 3, 32)
    others = [r.clone(), r.clone()]

    def model(x, r):
        return behind(layer(x), r)

    with torch.no_grad():
        result, graph, report = graphs_of(model, x, others[0])
        torch.testing.assert_close(result, model(x, others[1]))
    torch.testing.assert_close(others[0], others[1])
    assert not chains(graph)
    (site,) = report.sites
    assert site.one_launch is None
    assert "residual" not in site.epilogue


def test_a_write_where_gradients_are_off_keeps_its_gradients():
    layer = LAYERS["KSLinear"]()

    def model(x, r):
        y = layer(x)
        with torch.no_grad():
            y += r
        return y

    x, r = torch.randn(5, 32), torch.randn(5, 32)
    y, graph, _ = graphs_of(model, x, r)
    assert any("iadd" in one for one in targets(graph))
    assert y.requires_grad
