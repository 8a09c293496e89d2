"""In-place epilogues, as ``y += x``, are fused where nothing else reads the tensor."""

import pytest
import torch
import torch.nn.functional as F

import ksopt
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


def add_through_a_view(y, r):
    v = y.view(-1, 32)
    v += r.view(-1, 32)
    return v


def add_through_a_reshape(y, r):
    v = y.reshape(-1, 32)
    v += r.reshape(-1, 32)
    return y


def add_through_a_squeeze(y, r):
    return y.unsqueeze(0).squeeze(0).add_(r)


def add_to_a_row(y, r):
    y[0] += r[0]
    return y


def add_through_a_transpose(y, r):
    v = y.transpose(0, 1)
    v += r.transpose(0, 1)
    return y


def relu_through_a_view(y, r):
    return torch.relu_(y.view(-1, 32))


def inplace_relu_through_a_view(y, r):
    F.relu(y.view(-1, 32), inplace=True)
    return y


def multiply_through_a_view(y, r):
    v = y.view(-1, 32)
    v *= 2
    return v


def bias_through_a_view(y, r):
    v = y.view(-1, 32)
    v += r[0, 0]
    return v


def out_of_place_through_a_view(y, r):
    return F.relu(y.view(-1, 32)) + r.view(-1, 32)


def beside_another_write(y, r):
    z = r.clone()
    z[0] += 1
    v = y.view(-1, 32)
    v += r.view(-1, 32)
    return v, z


def of_a_transposed_residual(y, r):
    return y.view(-1, 32) + r.view(32, -1).t()


THROUGH_VIEWS = [
    *(add_through_a_view, add_through_a_reshape, add_through_a_squeeze, add_to_a_row),
    *(add_through_a_transpose, relu_through_a_view, inplace_relu_through_a_view),
    *(multiply_through_a_view, bias_through_a_view, out_of_place_through_a_view),
    *(beside_another_write, of_a_transposed_residual),
]


class ByBmm(torch.nn.Module):
    """Permute, multiply, permute, twice."""

    def __init__(self):
        super().__init__()
        self.right = torch.nn.Parameter(torch.randn(4, 8, 4) / 3)
        self.left = torch.nn.Parameter(torch.randn(4, 4, 8) / 2)

    def forward(self, x):
        rows = x.shape[:-1]
        z = torch.bmm(x.reshape(-1, 4, 8).permute(1, 0, 2), self.right)
        y = torch.bmm(z.permute(2, 1, 0), self.left)
        return y.permute(1, 2, 0).reshape(*rows, 32)


@pytest.mark.parametrize("behind", THROUGH_VIEWS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", [*LAYERS, "bmm"])
def test_the_report_names_what_the_launch_computes(name, behind):
    layer = (LAYERS | {"bmm": ByBmm})[name]()
    x, r = torch.randn(5, 3, 32), torch.randn(5, 3, 32)

    def model(x, r):
        return behind(layer(x), r)

    with torch.no_grad():
        result, graph, report = graphs_of(model, x, r)
        layer.double()
        expected = model(x.double(), r.double())
    torch.testing.assert_close(result, expected, check_dtype=False, rtol=1e-4, atol=1e-4)
    (site,) = report.sites
    launched = [steps_of(node) for node in chains(graph)] or [()]
    if name == "KSLinear":  # the author's call; its site names the steps in the launch alone
        assert site.one_launch in (None, *launched)
        assert site.epilogue == ()
    else:
        assert [site.epilogue] == [site.one_launch or ()] == launched


def steps_of(node):
    """Names of the steps that a call of ks_chain computes behind its product."""
    _, _, bias, residual, activation, *_ = (*node.args, None, None, "none")
    names = {"bias": bias is not None, activation: activation != "none"}
    names["residual"] = residual is not None
    return tuple(one for one, is_computed in names.items() if is_computed)


def test_siblings_of_which_one_is_written_through_a_view():
    one, other = LAYERS["einsum"](), LAYERS["einsum"]()
    x, r = torch.randn(5, 3, 32), torch.randn(5, 3, 32)

    def model(x, r):
        return one(x), add_through_a_view(other(x), r)

    with torch.no_grad():
        result, graph, report = graphs_of(model, x, r)
        torch.testing.assert_close(result, model(x, r))
    launched = [steps_of(node) for node in chains(graph)]
    assert sorted(site.epilogue for site in report.sites) == sorted(launched)
    assert [site.epilogue for site in report.sites] == [site.one_launch for site in report.sites]


def test_a_report_without_fusing_names_no_step_that_is_apart_from_the_product():
    layer, x, r = LAYERS["einsum"](), torch.randn(5, 3, 32), torch.randn(5, 3, 32)
    reports = []

    def backend(gm, example_inputs):
        reports.append(ksopt.compile.rewrite(gm, example_inputs))
        return gm.forward

    def model(x, r):
        return add_through_a_view(layer(x), r)

    with torch.no_grad():
        torch.compile(model, backend=backend)(x, r)
    assert [site.epilogue for report in reports for site in report.sites] == [()]


SUMS = [
    (lambda one, other, r: one + r + other, [("bias", "residual"), ("residual",)]),
    (lambda one, other, r: one + other, [(), ("bias", "residual")]),
    (lambda one, other, r: other + one, [("bias",), ("residual",)]),
]


@pytest.mark.parametrize(("add", "steps"), SUMS)
def test_a_sum_of_two_layers_is_in_one_of_their_launches(add, steps):
    one, other = LAYERS["einsum"](), ByBmm()
    x, r = torch.randn(5, 3, 32), torch.randn(5, 3, 32)

    def model(x, r):
        return add(one(x), other(x), r)

    with torch.no_grad():
        result, graph, report = graphs_of(model, x, r)
        torch.testing.assert_close(result, model(x, r), rtol=1e-4, atol=1e-4)
    launched = [steps_of(node) for node in chains(graph)]
    assert sorted(launched) == steps
    assert [site.epilogue for site in report.sites] == [site.one_launch for site in report.sites]
