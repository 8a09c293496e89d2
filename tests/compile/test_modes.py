"""The backend in every mode of torch: gradients, autocast, dynamic batches, changes of weights."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import ksopt
from ksopt.compile import backend, collected
from ksopt.compile.sites import Verdict

KS_MM = torch.ops.ksopt.ks_mm.default


class Blocks(nn.Module):
    """A block-diagonal layer in plain PyTorch: pattern (groups, fan_out, fan_in, 1)."""

    def __init__(self, groups=4, fan_in=8, fan_out=8):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.randn(groups, fan_out, fan_in) / fan_in**0.5)
        self.bias = nn.Parameter(torch.randn(groups * fan_out))

    def forward(self, x):
        y = torch.einsum("...gi,goi->...go", x.unflatten(-1, (self.groups, -1)), self.weight)
        return y.flatten(-2) + self.bias


def operators(seen):
    return [sum(node.target is KS_MM for node in graph.nodes) for graph in seen.graphs]


def check_equal(model, compiled, x, **tolerance):
    actual, expected = compiled(x), model(x)
    assert actual.dtype == expected.dtype
    assert actual.requires_grad == expected.requires_grad
    torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode, compiled_by_eager):
    model = Blocks()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    with mode():
        check_equal(model, compiled, torch.randn(5, 32))
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.LOWERED]


def test_autocast_outside_lowers_in_its_dtype(compiled_by_eager):
    model = nn.Sequential(Blocks(), nn.GELU(), Blocks())
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    x = torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        check_equal(model, compiled, x, rtol=2e-2, atol=2e-2)  # bfloat16 rounds both
        gradients = [
            torch.autograd.grad(run(x).float().square().sum(), list(model.parameters()))
            for run in (model, compiled)
        ]
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-2)
    assert operators(compiled_by_eager) == [2]
    assert {site.dtype for site in compiled_by_eager.reports[0].sites} == {"bfloat16"}


def test_a_bias_inside_a_vmap_under_autocast(compiled_by_eager):
    """There torch adds a float32 bias to a bfloat16 product."""
    weight, bias = nn.Parameter(torch.randn(4, 6, 8) / 3), nn.Parameter(torch.randn(4, 6))

    def function(x):
        blocks = torch.vmap(F.linear, in_dims=(1, 0, 0), out_dims=1)
        return blocks(x.view(-1, 4, 8), weight, bias).flatten(1)

    with torch.autocast("cpu", torch.bfloat16):
        check_equal(function, torch.compile(function, backend="ksopt"), torch.randn(5, 32))
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.LOWERED]


def test_half_precision_parameters(compiled_by_eager):
    model = Blocks().to(torch.bfloat16)
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    check_equal(model, compiled, torch.randn(5, 32).bfloat16(), rtol=2e-2, atol=2e-2)
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.LOWERED]


def test_a_marked_batch_is_compiled_once(compiled_by_eager):
    model = Blocks()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    for batch in (5, 9, 64):
        x = torch.randn(batch, 32)
        torch._dynamo.mark_dynamic(x, 0)
        check_equal(model, compiled, x)
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.LOWERED]


def test_a_marked_number_of_features_stays_dynamic(compiled_by_eager):
    """torch.compile ends in an error where a marked size is fixed."""
    weight = nn.Parameter(torch.randn(8, 2, 2))

    def function(x):
        return (x.t().reshape(-1, 8, 1, 2) * weight).sum(-1)

    compiled = torch.compile(function, backend="ksopt", fullgraph=True)
    for features in (32, 64):
        x = torch.randn(features, 5)
        torch._dynamo.mark_dynamic(x, 0)
        check_equal(function, compiled, x)
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.NOT_RECOGNISED]
    assert "is marked dynamic" in report.sites[0].reason


@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 32), (2, 3, 4, 32), (32,), (1, 32)])
def test_batches_of_any_rank(shape, compiled_by_eager):
    model = Blocks()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    check_equal(model, compiled, torch.randn(shape))
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.LOWERED]


def test_an_empty_batch_is_left_alone(compiled_by_eager):
    model = Blocks()
    check_equal(model, torch.compile(model, backend="ksopt"), torch.randn(0, 32))
    assert operators(compiled_by_eager) == [0]


def test_inputs_that_are_not_contiguous(compiled_by_eager):
    model = Blocks()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    wide = torch.randn(32, 10, 3)
    for x in (wide[:, ::2, 1].t(), wide.permute(2, 1, 0), torch.randn(1, 32).expand(6, 32)):
        check_equal(model, compiled, x)
    assert set(operators(compiled_by_eager)) == {1}


def test_graph_breaks_make_several_graphs(compiled_by_eager):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Blocks(), Blocks()

        def forward(self, x):
            x = self.one(x)
            torch._dynamo.graph_break()
            return self.two(x)

    model = Broken()
    check_equal(model, torch.compile(model, backend="ksopt"), torch.randn(5, 32))
    assert operators(compiled_by_eager) == [1, 1]


def test_weights_changed_after_compiling(compiled_by_eager):
    model = Blocks()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    x = torch.randn(5, 32)
    check_equal(model, compiled, x)
    with torch.no_grad():
        model.weight.mul_(2.0)
    check_equal(model, compiled, x)
    model.load_state_dict(Blocks().state_dict())
    check_equal(model, compiled, x)
    model.weight.data = torch.randn(4, 8, 8)
    check_equal(model, compiled, x)
    model.weight = nn.Parameter(torch.randn(4, 8, 8))
    check_equal(model, compiled, x)
    model.weight = nn.Parameter(torch.randn(4, 6, 8))
    model.bias = nn.Parameter(torch.zeros(24))
    check_equal(model, compiled, x)
    assert set(operators(compiled_by_eager)) == {1}


def test_training_steps_match(compiled_by_eager):
    model = nn.Sequential(Blocks(), nn.ReLU(), Blocks())
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    x, target = torch.randn(16, 32), torch.randn(16, 32)
    losses = []
    for run, parameters in ((compiled, model.parameters()), (twin, twin.parameters())):
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.mse_loss(run(x), target)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert operators(compiled_by_eager) == [2]


@pytest.mark.slow
def test_no_length_is_fixed_because_it_equals_a_number_of_features(compiled_by_eager):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = Blocks(4, 8, 24), Blocks()

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-2, -1)).softmax(-1)
            return self.proj((scores @ v).transpose(1, 2).reshape(b, t, 32))

    model = Attention()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True, dynamic=True)
    compiles = set()
    for shape in ((2, 8, 32), (3, 9, 32), (5, 32, 32), (4, 7, 32)):  # 8 is the size of a head
        check_equal(model, compiled, torch.randn(shape), rtol=1e-4, atol=1e-5)
        compiles.add(len(compiled_by_eager.graphs))
    assert len(compiles) == 1
    assert operators(compiled_by_eager)[-1] == 2


def test_tied_weights(compiled_by_eager):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Blocks()

        def forward(self, x):
            hidden = torch.relu(self.layer(x))
            # The same weight again, transposed.
            y = torch.einsum("bgo,goi->bgi", hidden.view(-1, 4, 8), self.layer.weight)
            return y.flatten(1)

    model = Tied()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    x = torch.randn(5, 32)
    check_equal(model, compiled, x)
    gradients = [
        torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
        for run in (model, compiled)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert operators(compiled_by_eager) == [2]


def test_checkpointed_layers(compiled_by_eager):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Blocks(), Blocks()

        def forward(self, x):
            hidden = torch.utils.checkpoint.checkpoint(self.one, x, use_reentrant=False)
            return self.two(hidden)

    model = Checkpointed()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    x = torch.randn(5, 32)
    check_equal(model, compiled, x)
    gradients = [
        torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
        for run in (model, compiled)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    (report,) = compiled_by_eager.reports
    assert [site.verdict.value for site in report.sites] == ["lowered", "lowered"]
    (graph,) = compiled_by_eager.graphs
    bodies = [node.target for node in graph.nodes if node.op == "get_attr"]
    lowered = [getattr(graph.owning_module, str(name)).graph for name in bodies]
    assert operators(SimpleNamespace(graphs=[graph, *lowered])) == [1, 1]  # outside, and inside


def test_a_checkpoints_weight_that_is_written_behind_it(compiled_by_eager):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(8, 8, 4))
            self.second = nn.Parameter(torch.randn(4, 2, 8, 2))

        def forward(self, x):
            def features_first(x):
                return torch.bmm(self.first, x.view(-1, 8, 4).permute(1, 2, 0))

            hidden = torch.utils.checkpoint.checkpoint(features_first, x, use_reentrant=False)
            with torch.no_grad():
                self.first.zero_()
            hidden = hidden.permute(2, 0, 1).unflatten(-1, (4, 2))
            return torch.einsum("bixy,irxy->biry", hidden.reshape(-1, 4, 8, 2), self.second)

    x, gradients = torch.randn(5, 32), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Written()
        run = torch.compile(model, backend="ksopt", fullgraph=True) if compiled else model
        gradients += torch.autograd.grad(run(x).sum(), [model.second])
    # torch computes the checkpoint again where its result is saved as it is: from zeros.
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    (report,) = compiled_by_eager.reports
    assert Verdict.LOWERED not in [site.verdict for site in report.sites]
    assert "a checkpoint's operand is written in place behind it" in report.sites[-1].reason


def test_functions_that_are_not_modules(compiled_by_eager):
    weight = nn.Parameter(torch.randn(4, 6, 8))

    def function(x, scale=1.0):
        return torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), weight) * scale

    check_equal(function, torch.compile(function, backend="ksopt"), torch.randn(5, 32))
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.LOWERED]


def test_a_sequence_of_matmuls_with_an_intermediate_that_is_read(compiled_by_eager):
    class TwoOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Blocks(), Blocks()

        def forward(self, x):
            middle = self.one(x)
            return self.two(middle) + middle.sum(-1, keepdim=True)

    model = TwoOutputs()
    check_equal(
        model, torch.compile(model, backend="ksopt"), torch.randn(5, 32), rtol=1e-4, atol=1e-4
    )
    assert operators(compiled_by_eager) == [2]


def test_the_wrapper_of_data_parallel_training(compiled_by_eager, tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(Blocks(), nn.ReLU(), Blocks())
        twin = copy.deepcopy(model)
        compiled = torch.compile(nn.parallel.DistributedDataParallel(model), backend="ksopt")
        x = torch.randn(6, 32)
        compiled(x).square().sum().backward()
        twin(x).square().sum().backward()
        for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()
    assert sum(operators(compiled_by_eager)) == 2


@pytest.mark.slow
def test_inductor_compiles_what_was_rewritten_and_its_caches_are_used(graph_caches):
    model = nn.Sequential(Blocks(), nn.GELU(), Blocks())
    x = torch.randn(5, 32)
    compiled = torch.compile(model, backend="ksopt", fullgraph=True, dynamic=True)
    for batch in (5, 8):
        rows = torch.randn(batch, 32)
        gradients = [
            torch.autograd.grad(run(rows).square().sum(), list(model.parameters()))
            for run in (model, compiled)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert counters["ksopt"]["lowered"] == 2
    assert counters["ksopt"]["graphs"] == 1
    assert not counters["aot_autograd"]["autograd_cache_bypass"]
    torch._dynamo.reset()
    counters.clear()
    torch.compile(model, backend="ksopt", fullgraph=True, dynamic=True)(x)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["ksopt"]["lowered"] == 2  # the pass runs all the same


@pytest.mark.parametrize(
    "how",
    [{"mode": "reduce-overhead"}, {"options": {"mode": "max-autotune", "tune": "off"}}],
    ids=["mode", "options"],
)
def test_inductors_modes(how):
    model = Blocks()
    with torch.no_grad():
        check_equal(model, torch.compile(model, backend="ksopt", **how), torch.randn(5, 32))
    assert counters["ksopt"]["lowered"] == 1


def frozen_layer():
    layer = nn.Linear(32, 32)
    with torch.no_grad():
        layer.weight.copy_(torch.block_diag(*torch.randn(4, 8, 8)))
    return layer.requires_grad_(False)


class PiecesOfARepeatedInput(nn.Module):
    """Each piece multiplies rows that are expanded over one more dim."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 2))

    def forward(self, x):
        rows = x.unsqueeze(0).expand(3, -1, -1).chunk(2, -1)
        return torch.cat([F.linear(rows[at], self.weight[at]) for at in range(2)], -1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_pieces_of_an_input_that_is_repeated(dynamic, compiled_by_eager):
    model, x = PiecesOfARepeatedInput(), torch.randn(5, 4)
    compiled = torch.compile(model, backend="ksopt", dynamic=dynamic)
    check_equal(model, compiled, x, rtol=1e-4, atol=1e-5)


def test_a_frozen_weight_is_watched(compiled_by_eager, caplog):
    layer = frozen_layer()
    compiled = torch.compile(layer, backend="ksopt")
    x = torch.randn(5, 32)
    check_equal(layer, compiled, x)
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.LOWERED]
    layer.weight[0, 0] = 7.0  # inside the support
    check_equal(layer, compiled, x)
    assert "has left the pattern" not in caplog.text
    layer.weight[0, 31] = 7.0  # outside
    check_equal(layer, compiled, x)
    assert "has left the pattern" in caplog.text
    layer.weight[0, 31] = 0.0
    check_equal(layer, compiled, x)
    layer.weight.data[0, 31] = 3.0  # torch does not count this
    ksopt.refresh()
    check_equal(layer, compiled, x)


def test_a_frozen_weight_that_is_trained_now_gets_all_of_its_gradient(compiled_by_eager, caplog):
    """Dynamo of torch 2.11 calls the compiled graph again."""
    layer = frozen_layer()
    graphs = []

    def unchanged(gm, example_inputs):
        graphs.append((backend.ksopt(gm, example_inputs), example_inputs))
        return graphs[0][0]

    x = torch.randn(5, 32)
    torch.compile(layer, backend=unchanged)(x)
    layer.weight.requires_grad_(True)
    ((compiled, inputs),) = graphs
    (y,) = compiled(*inputs)
    (grad,) = torch.autograd.grad(y.sum(), [layer.weight])
    torch.testing.assert_close(grad, torch.ones(5, 32).T @ x)
    assert "requires gradients now" in caplog.text
    layer.weight.requires_grad_(False)
    torch.testing.assert_close(compiled(*inputs)[0], y.detach())


def test_nearly_zero_counts_as_zero_on_request_only(compiled_by_eager):
    layer = frozen_layer()
    layer.weight[0, 31] = 1e-6
    x = torch.randn(5, 32)
    options = {"frozen_tolerance": 1e-4}
    check_equal(layer, torch.compile(layer, backend="ksopt", options=options), x)
    torch._dynamo.reset()
    check_equal(layer, torch.compile(layer, backend="ksopt"), x)
    torch._dynamo.reset()
    layer.weight[0, 31] = 0.0
    options = {"frozen_values": False}
    check_equal(layer, torch.compile(layer, backend="ksopt", options=options), x)
    assert operators(compiled_by_eager) == [1, 0, 0]


def test_what_is_required_and_missing_fails_with_the_table(compiled_by_eager):
    x = torch.randn(5, 32)
    torch.compile(Blocks(), backend="ksopt", options={"require": "all"})(x)
    dense = nn.Linear(32, 32)
    torch.compile(dense, backend="ksopt", options={"require": "all"})(x)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="nothing is lowered"):
        torch.compile(dense, backend="ksopt", options={"require": "any"})(x)
    double = Blocks().double()
    message = r"(?s)1 of 1 site is not lowered.*einsum.*it computes in float64"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        torch.compile(double, backend="ksopt", options={"require": "all"})(x.double())


def test_a_site_that_is_slower_is_not_lowered(compiled_by_eager, monkeypatch):
    from ksopt.compile.lowering.site_times import Times
    from ksopt.compile.sites import Decision

    def slower(site, device, tune):
        reason = "Measured 9.0 us, slower than 3.0 us under Inductor."
        return Decision(False, reason, measured=Times(9.0, 3.0))

    monkeypatch.setattr(backend, "decide", slower)
    model = Blocks()
    check_equal(model, torch.compile(model, backend="ksopt"), torch.randn(5, 32))
    assert operators(compiled_by_eager) == [0]
    (site,) = compiled_by_eager.reports[0].sites
    assert (site.verdict.value, site.measured) == ("left to PyTorch", Times(9.0, 3.0))
    assert counters["ksopt"]["not_lowered"] == 1


def test_each_pass_counts_what_it_handled(compiled_by_eager):
    model = nn.Sequential(Blocks(), nn.ReLU(), nn.Linear(32, 32), frozen_layer(), Blocks())
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    x = torch.randn(5, 32)
    compiled(x)
    actual = dict(counters["ksopt"])
    (report,) = compiled_by_eager.reports
    (graph,) = compiled_by_eager.graphs
    assert {name: actual[name] for name in report.passes} == dict(report.passes)
    assert {name: number for name, number in actual.items() if not name.startswith("nodes")} == {
        "graphs": 1,
        "lowered": 3,
        "not_lowered": 0,
        "not_recognised": 0,
        "frozen_patterns": 1,
        "products_recognised": 4,
        "products_checked": 3,
        "chains_decided": 3,
        "products_lowered": 3,
        "layers_in_one_launch": 0,
        "gates_in_one_launch": 0,
        "mlps_in_one_launch": 0,
        "activations_recomputed": 0,
    }
    assert actual["nodes_emitted"] >= actual["products_lowered"]
    assert actual["nodes_removed"] > 0
    before = actual["nodes_followed"]
    assert before + actual["nodes_emitted"] - actual["nodes_removed"] == len(graph.nodes)
    torch._dynamo.reset()
    torch.compile(model, backend="ksopt", fullgraph=True)(x)
    assert dict(counters["ksopt"]) == {name: 2 * number for name, number in actual.items()}


def test_a_site_that_is_not_lowered_is_decided_and_nothing_is_emitted(
    compiled_by_eager, monkeypatch
):
    from ksopt.compile.sites import Decision

    monkeypatch.setattr(backend, "decide", lambda *_: Decision(False, "It is slower."))
    torch.compile(Blocks(), backend="ksopt")(torch.randn(5, 32))
    names = ("chains_decided", "products_lowered", "nodes_emitted", "nodes_removed")
    assert [counters["ksopt"][name] for name in names] == [1, 0, 0, 0]


@pytest.mark.slow
def test_results_in_planned_memory_are_counted():
    model, x = nn.Sequential(Blocks(), nn.GELU(), Blocks()), torch.randn(5, 32)
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        torch.compile(model, backend="ksopt")(x)
    assert counters["ksopt"]["results_planned"] == 2


def test_a_size_that_cannot_be_fixed_leaves_the_graph_alone(compiled_by_eager):
    weight = nn.Parameter(torch.randn(2, 3, 4))

    def function(x):  # features and batch flattened together, then taken apart
        return torch.einsum("nil,iol->nio", x.reshape(-1).view([5, 2, 4]), weight)

    compiled = torch.compile(function, backend="ksopt", dynamic=True)
    check_equal(function, compiled, torch.randn(5, 2, 4))


def test_a_dense_weight_in_the_memory_of_a_frozen_one_is_not_taken_for_it(compiled_by_eager):
    """Identity of tensors, not of addresses: freed memory is reused."""
    memory = np.zeros((64, 64), dtype=np.float32)
    layer, x = nn.Linear(64, 64, bias=False), torch.randn(6, 64)
    compiled = torch.compile(layer, backend="ksopt")
    for values in (torch.block_diag(*torch.randn(4, 16, 16)), torch.randn(64, 64)):
        del layer.weight
        memory[:] = values.numpy()
        layer.weight = nn.Parameter(torch.from_numpy(memory), requires_grad=False)
        check_equal(layer, compiled, x)
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.LOWERED]


@pytest.mark.parametrize("handed_over", [pytest.param("inductor", marks=pytest.mark.slow), "eager"])
def test_a_detached_weight_gets_no_gradient_and_gives_none(handed_over, monkeypatch):
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 6, 18))

        def forward(self, x):
            return torch.bmm(x.reshape(-1, 2, 18).transpose(0, 1), self.weight.detach().mT)

    model, x = Detached(), torch.randn(5, 36)
    with collected() as reports:
        if handed_over == "eager":
            monkeypatch.setattr(
                backend, "compile_by_inductor", lambda gm, inputs, config: gm.forward
            )
        compiled = torch.compile(model, backend="ksopt", options={"tune": "off"})
        assert compiled(x).requires_grad is model(x).requires_grad is False
        leaf = x.clone().requires_grad_()
        result = compiled(leaf)
        result.square().sum().backward()
    assert any(site.verdict is Verdict.LOWERED for report in reports for site in report.sites)
    other = x.clone().requires_grad_()
    model(other).square().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)
    assert model.weight.grad is None


def test_a_call_of_the_operator_that_reads_other_rows_is_a_site_of_its_own():
    def repeated(x, one, other):
        y = ksopt.ks_linear(x, [one])
        return ksopt.ks_linear(y.unsqueeze(-2).expand(-1, 2, -1).flatten(1), [other])

    def as_they_are(x, one, other):
        return ksopt.ks_linear(ksopt.ks_linear(x, [one]), [other])

    x, one = torch.randn(5, 90), torch.randn(2, 4, 45, 1)
    for call, other, chains in (
        (repeated, torch.randn(8, 8, 2, 1), ["(2,4,45,1)", "(8,8,2,1)"]),
        (as_they_are, torch.randn(4, 8, 2, 1), ["(4,8,2,1)*(2,4,45,1)"]),
    ):
        torch._dynamo.reset()
        with collected() as reports:
            compiled = torch.compile(call, backend="ksopt")
            torch.testing.assert_close(compiled(x, one, other), call(x, one, other))
        assert [str(site.chain) for report in reports for site in report.sites] == chains


def test_a_weight_that_is_cast_beside_a_vmap(compiled_by_eager):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 5, 2).bfloat16(), requires_grad=False)

        def forward(self, x):
            y = x.view(-1, 4, 2)
            return torch.vmap(F.linear, in_dims=(1, 0), out_dims=1)(y, self.weight.float())

    model, x = Cast(), torch.randn(5, 8)
    compiled = torch.compile(model, backend="ksopt", options={"tune": "off"})
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.05)
    (report,) = compiled_by_eager.reports
    assert [site.verdict for site in report.sites] == [Verdict.LOWERED]
