"""torch.compile(model, backend="ksopt")."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx as real_compile_fx

from ksopt import ops
from ksopt.compile import backend
from ksopt.errors import InvalidInputError
from ksopt.nn import KSLinear

KS_MM = torch.ops.ksopt.ks_mm.default
CHAIN = "(1,12,4,2)*(2,4,8,1)"  # 16 -> 24


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def targets(graph_module):
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def test_is_registered():
    assert "ksopt" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("ksopt") is backend.ksopt


@pytest.mark.parametrize(
    "layout", ["batch_first", pytest.param("batch_last", marks=pytest.mark.slow)]
)
def test_trains_like_eager_with_one_compile_for_all_batches(layout, graph_caches):
    model = nn.Sequential(
        KSLinear(16, 24, CHAIN, layout=layout),
        nn.GELU(),
        KSLinear(24, 16, "(2,8,12,1)", layout=layout),
    )
    graphs = []

    def spy(gm, *args, **kwargs):
        graphs.append(targets(gm))
        return real_compile_fx(gm, *args, **kwargs)

    with mock.patch("torch._inductor.compile_fx.compile_fx", spy):
        compiled = torch.compile(model, backend="ksopt", fullgraph=True, dynamic=True)
        for batch in (5, 7, 63):
            x = torch.randn((16, batch) if layout == "batch_last" else (batch, 16))
            results = []
            for run in (model, compiled):
                leaf = x.clone().requires_grad_()
                run(leaf).square().sum().backward()
                results.append([leaf.grad, *(p.grad for p in model.parameters())])
                model.zero_grad()
            # 1e-4: the same float32 sums in another order.
            for actual, expected in zip(*results, strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
    assert graphs[0].count(torch.ops.ksopt.ks_chain) == 2  # one for each layer
    assert not counters["aot_autograd"]["autograd_cache_bypass"]


@pytest.mark.parametrize(
    "mode",
    [
        "no_grad",
        pytest.param("inference_mode", marks=pytest.mark.slow),
        pytest.param("autocast outside", marks=pytest.mark.slow),
        pytest.param("autocast inside", marks=pytest.mark.slow),
    ],
)
def test_follows_the_mode_in_force(mode):
    model = KSLinear(16, 24, CHAIN)
    x = torch.randn(7, 16)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast inside"):
            return model(x)

    around = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast outside": torch.autocast("cpu", torch.bfloat16),
    }.get(mode, torch.enable_grad())
    function = inside if mode == "autocast inside" else model
    compiled = torch.compile(function, backend="ksopt", fullgraph=True)
    with around:
        expected, actual = function(x), compiled(x)
    assert actual.dtype == expected.dtype
    assert actual.requires_grad == expected.requires_grad
    assert actual.dtype == (torch.bfloat16 if "autocast" in mode else torch.float32)
    torch.testing.assert_close(actual, expected)
    if "autocast" in mode:
        gradients = [
            torch.autograd.grad(y.float().sum(), list(model.parameters()))
            for y in (actual, expected)
        ]
        assert gradients[0][0].dtype == torch.float32
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)  # bfloat16 sums


def test_mode_and_options_are_forwarded():
    model = KSLinear(16, 24, CHAIN)
    x = torch.randn(7, 16)
    patches = []

    def spy(*args, config_patches=None, **kwargs):
        if config_patches:  # compile_fx applies them, and calls itself without them
            patches.append(config_patches)
        return real_compile_fx(*args, config_patches=config_patches, **kwargs)

    with mock.patch("torch._inductor.compile_fx.compile_fx", spy):
        for how in (
            {"mode": "reduce-overhead"},
            {"options": {"mode": "reduce-overhead", "epilogue-fusion": False}},
        ):
            torch._dynamo.reset()
            actual = torch.compile(model, backend="ksopt", fullgraph=True, **how)(x)
            torch.testing.assert_close(actual, model(x))
    assert patches == [
        {"triton.cudagraphs": True},
        {"triton.cudagraphs": True, "epilogue_fusion": False},
    ]


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        (None, {"tritn.cudagraphs": True}, "option 'tritn.cudagraphs' is unknown. Did you mean "),
        (None, {"mdoe": "default"}, "Did you mean 'mode'? ksopt's own options: 'mode' ("),
        (None, {"xyzzy": 1}, "torch._inductor.list_options() lists them."),
        (None, {3: 1}, "option 3 is unknown"),
        ("fast", None, "mode 'fast' is unknown: it must be one of default, "),
        (None, {"mode": "fast"}, "mode 'fast' is unknown"),
        ("default", {"mode": "max-autotune"}, "mode is 'default' and options['mode'] is "),
        (None, {"max_autotune": "yes"}, "max_autotune, got str should be bool"),
    ],
)
def test_wrong_options_are_refused_in_words(mode, options, message):
    with pytest.raises(InvalidInputError) as raised:
        backend.inductor_config(mode, options)
    assert message in str(raised.value)


def test_torch_compile_shows_the_refusal():
    compiled = torch.compile(KSLinear(4, 4, "(1,4,4,1)"), backend="ksopt", options={"tpyo": 1})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="option 'tpyo' is unknown"):
        compiled(torch.ones(2, 4))


def test_torchs_caches_are_used_and_keyed_by_the_contract(monkeypatch, graph_caches):
    model = KSLinear(16, 24, CHAIN, bias=False)
    x = torch.randn(7, 16)

    def compile_again():
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            torch.compile(model, backend="ksopt", fullgraph=True)(x)
        seen = counters["aot_autograd"]
        assert not seen["autograd_cache_bypass"]
        return seen["autograd_cache_hit"], seen["autograd_cache_miss"]

    assert compile_again() == (0, 1)
    assert compile_again() == (1, 0)
    monkeypatch.setattr(ops, "CONTRACT", ops.CONTRACT + 1)
    assert compile_again() == (0, 1)


def test_exports_with_a_dynamic_batch():
    model = KSLinear(16, 24, CHAIN)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (torch.randn(7, 16),), dynamic_shapes={"x": {0: batch}})
    assert targets(program.graph_module).count(torch.ops.ksopt.ks_chain.default) == 1
    assert targets(program.run_decompositions().graph_module).count(KS_MM) == 2
    x = torch.randn(63, 16)
    torch.testing.assert_close(program.module()(x), model(x))
