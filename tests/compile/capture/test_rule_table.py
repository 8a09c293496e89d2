"""Nodes that are not run: their records equal those of running them."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ksopt
from ksopt.compile.backend import judge
from ksopt.compile.capture import in_place, interpreter
from ksopt.compile.capture.frozen_weight import FrozenValues
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.passes import rewrite_graph

HERE = Path(__file__).parents[1]
LAYERS = [*sorted((HERE / "models").glob("*.py")), *sorted((HERE / "corpus").glob("*.py"))]


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"rules_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def site_rows(report):
    return report.notes, [
        (site.chain, site.batch, site.verdict, site.reason, site.epilogue, site.flops)
        for site in report.sites
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.stem)
def test_the_same_sites_as_by_running_every_node(path, dynamic, monkeypatch):
    module = load(path)
    torch.manual_seed(0)
    x = module.example() if hasattr(module, "example") else torch.randn(module.INPUT)
    pairs = []

    def both(gm, inputs):
        def rewritten(graph):
            values = FrozenValues(inputs)
            return site_rows(rewrite_graph(graph, inputs, judge(inputs, None), values))

        as_it_is = gm.forward
        short = rewritten(copy.deepcopy(gm))
        with monkeypatch.context() as patch:
            patch.setattr(interpreter, "writes_in_place", lambda graph: True)
            patch.setattr(interpreter, "makes_new_tensor", lambda node: False)
            pairs.append((short, rewritten(copy.deepcopy(gm))))
        return as_it_is

    torch._dynamo.reset()
    torch.compile(module.build(), backend=both, dynamic=dynamic)(x)
    for short, whole in pairs:
        assert short == whole
    assert any(sites for (_, sites), _ in pairs)


def ran(model, x, monkeypatch):
    """The ATen operators that ran on fake tensors while a model was followed."""
    seen = []
    dispatch = Tracker.__torch_dispatch__

    def noted(self, func, types, args=(), kwargs=None):
        seen.append(func.overloadpacket._qualified_op_name)
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(Tracker, "__torch_dispatch__", noted)
    torch._dynamo.reset()
    report = ksopt.explain(model, x, dynamic=True).report
    assert [str(site.chain) for site in report.sites] == ["(4,4,8,1)"]
    return set(seen)


WEIGHT = nn.Parameter(torch.randn(4, 4, 8))
BIAS = nn.Parameter(torch.randn(4))


def masks_and_dropout(x):
    mask = (x[:, 0] > 0) & (x[:, 1] > 0)  # operator.and_ is no function in place
    x = F.dropout(x, 0.0, True)
    y = torch.einsum("bgi,goi->bgo", x.unflatten(1, (4, 8)), WEIGHT)
    return torch.cat([y.flatten(1) * mask[:, None], x], dim=1)


def mapped(x):
    groups = x.view(-1, 4, 8)
    return torch.vmap(F.linear, in_dims=(1, 0), out_dims=1)(groups, WEIGHT).flatten(1)


@pytest.mark.parametrize("model", [masks_and_dropout, mapped])
def test_products_and_masks_are_not_run(model, monkeypatch):
    actual = ran(model, torch.randn(6, 32), monkeypatch)
    assert not actual & {"aten::bmm", "aten::mm", "aten::cat", "aten::native_dropout", "aten::mul"}
    assert not actual & {"aten::bitwise_and", "aten::gt", "aten::matmul", "aten::permute"}


def with_bias(x):
    groups = x.view(-1, 4, 8)
    return torch.vmap(F.linear, (1, 0, None), 1)(groups, WEIGHT, BIAS).flatten(1)


def with_one_weight(x):
    return torch.vmap(F.linear, (1, None), 1)(x.view(-1, 4, 8), WEIGHT[0]).flatten(1)


def nested(x):
    inner = torch.vmap(torch.vmap(torch.dot, (None, 0)), (0, 0))
    return torch.vmap(inner, (0, None))(x.view(-1, 4, 8), WEIGHT).flatten(1)


@pytest.mark.parametrize("model", [with_bias, with_one_weight, nested])
def test_other_vmaps_are_still_right(model, compiled_by_eager):
    x = torch.randn(6, 32)
    torch.testing.assert_close(torch.compile(model, backend="ksopt")(x), model(x))


@pytest.mark.parametrize(
    ("function", "writes"),
    [
        (lambda x: F.relu(x, True), True),
        (lambda x: F.relu(x, inplace=True), True),
        (lambda x: F.dropout(x, 0.5, True, True), True),
        (lambda x: F.dropout(x, 0.5, True), False),
        (lambda x: (x > 0) & (x < 1), False),
        (lambda x: x.add_(1), True),
        (lambda x: torch.add(x, 1, out=x), True),
        (lambda x: x.sum(-1, True), False),
    ],
)
def test_which_functions_write_in_place(function, writes):
    graph = torch.fx.symbolic_trace(function).graph
    assert in_place.writes_in_place(graph) is writes
