"""The pass on its own: in somebody else's backend, and on exported programs."""

import pytest
import torch
from torch import nn

import ksopt
import ksopt.compile
from ksopt.errors import InvalidInputError

KS_MM = torch.ops.ksopt.ks_mm.default


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.bias = nn.Parameter(torch.randn(24))

    def forward(self, x):
        y = torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), self.weight)
        return torch.relu(y.flatten(1) + self.bias)


def test_another_backend_rewrites_first():
    reports = []

    def my_backend(gm, example_inputs):
        reports.append(ksopt.compile.rewrite(gm, example_inputs))
        assert KS_MM in [node.target for node in gm.graph.nodes]
        return gm.forward

    model, x = Blocks(), torch.randn(5, 32)
    actual = torch.compile(model, backend=my_backend)(x)
    torch.testing.assert_close(actual, model(x))
    assert [str(site.chain) for site in reports[0].sites] == ["(4,6,8,1)"]


def test_a_symbolic_trace_with_attributes_for_weights():
    gm = torch.fx.symbolic_trace(Blocks())
    x = torch.randn(5, 32)
    expected = gm(x)
    report = ksopt.compile.rewrite(gm, [x])
    assert report.sites[0].verdict.value == "lowered"
    torch.testing.assert_close(gm(x), expected)


def test_a_graph_that_returns_the_product_itself():
    class Bare(Blocks):
        def forward(self, x):
            return torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), self.weight)

    gm = torch.fx.symbolic_trace(Bare())
    x = torch.randn(5, 32)
    expected = gm(x)
    assert ksopt.compile.rewrite(gm, [x]).sites[0].verdict.value == "lowered"
    torch.testing.assert_close(gm(x), expected)


def test_a_graph_that_hides_its_weights_is_left_alone_and_noted():
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Conv1d(8, 8, 1, groups=2)))
    before = gm.code
    report = ksopt.compile.rewrite(gm, [torch.randn(2, 8, 3)])
    assert gm.code == before
    assert "calls a module whole" in report.notes[0]


def test_what_is_no_graph_is_refused():
    with pytest.raises(InvalidInputError, match=r"gm is a Linear: give a torch\.fx\.GraphModule"):
        ksopt.compile.rewrite(nn.Linear(2, 2), [])
    with pytest.raises(InvalidInputError, match="the program is a Linear"):
        ksopt.export_pass(nn.Linear(2, 2))


def test_an_exported_program_with_a_dynamic_batch():
    model = Blocks()
    batch = torch.export.Dim("batch")
    x = torch.randn(5, 32)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    exported = ksopt.export_pass(program)
    assert [node.target for node in exported.graph.nodes].count(KS_MM) == 1
    assert KS_MM not in [node.target for node in program.graph.nodes]
    more = torch.randn(9, 32)
    torch.testing.assert_close(exported.module()(more), model(more))
    torch.testing.assert_close(program.module()(more), model(more))


@pytest.mark.slow
def test_aotinductor_packages_and_loads_it(tmp_path):
    model, x = Blocks(), torch.randn(5, 32)
    with torch.no_grad():
        exported = ksopt.export_pass(torch.export.export(model, (x,)))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2")
        )
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))
