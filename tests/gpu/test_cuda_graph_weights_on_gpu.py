"""Graphs that torch.compile records read prepared weights, which are kept up to date."""

import gc

import pytest
import torch

import ksopt
from ksopt.kernels import cuda_graph_weights, plan_autotuner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="warpgroup products need compute capability 9.0",
    ),
]


def layer(dtype=torch.bfloat16):
    torch.manual_seed(0)
    linear = ksopt.KSLinear(768, 768, "(1,384,96,2)*(2,96,384,1)", activation="gelu")
    return linear.to("cuda", dtype)


@pytest.fixture
def preparations(monkeypatch):
    """How often weights are prepared between two replays."""
    seen = []
    usual = cuda_graph_weights._Preparation.refresh

    def counted(self, arguments, is_forced):
        before = self.prepared._version
        usual(self, arguments, is_forced)
        seen.extend([1] * (self.prepared._version - before))

    monkeypatch.setattr(cuda_graph_weights._Preparation, "refresh", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inference", [True, False])
def test_a_replay_reads_the_weights_as_they_are(dtype, inference, preparations):
    model = layer(dtype)
    compiled = torch.compile(model, backend="ksopt", mode="reduce-overhead")
    x = torch.randn(4096, 768, device="cuda", dtype=dtype)
    with torch.inference_mode() if inference else torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        assert preparations == []
        for weight in model.weights:
            weight.mul_(-2)
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        weight.data.mul_(0.5)
        ksopt.refresh()
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        model.weights[0] = torch.nn.Parameter(torch.randn_like(model.weights[0]))
        for _ in range(4):
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-1)


def test_a_second_model_at_the_addresses_of_a_deleted_one():
    """Dynamo's code of the first model serves the second one, and so does its graph."""
    x = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)
    addresses = []
    for _ in range(2):
        gc.collect()
        model = layer()
        with torch.no_grad():
            for weight in model.weights:
                weight.mul_(1 - 3 * len(addresses))
            compiled = torch.compile(model, backend="ksopt", mode="reduce-overhead")
            for _ in range(4):
                torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        addresses.append([weight.data_ptr() for weight in model.weights])
        del model, compiled, weight
    if addresses[0] != addresses[1]:
        pytest.skip("the second model got other memory")


def test_an_evaluation_after_training_steps():
    model = layer()
    compiled = torch.compile(model, backend="ksopt", mode="reduce-overhead")
    x = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, fused=True)
    for _ in range(3):
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_graph_of_ones_own_is_captured_with_what_is_on_disk():
    model, x = layer(), torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
    plan_autotuner.forget()
    ksopt.refresh()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    with torch.no_grad():
        graph.replay()
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        for weight in model.weights:
            weight.mul_(-2)
        graph.replay()
        torch.testing.assert_close(y, model(x), rtol=2e-2, atol=2e-2)


# Chains that are one launch, and one launch per factor; one whose product may be the dense matrix.
OWN_GRAPHS = {
    "one launch": (1024, 256, "(1,512,128,2)*(2,128,512,1)"),
    "one launch per factor": (4096, 256, "(1,2048,512,2)*(2,512,2048,1)"),
    "few rows": (4096, 16, "(1,512,512,8)*(8,512,512,1)"),
    "Monarch": (1024, 64, "(1,128,128,8)*(8,128,128,1)"),
}


@pytest.mark.parametrize("case", OWN_GRAPHS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_of_ones_own_reads_weights_that_were_prepared_before(case, compiled):
    features, rows, chain = OWN_GRAPHS[case]
    torch.manual_seed(0)
    model = ksopt.KSLinear(features, features, chain).to("cuda", torch.bfloat16)
    called = torch.compile(model, backend="ksopt") if compiled else model
    x = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), ksopt.prepared_weights():
        for _ in range(2):
            called(x)
        with torch.cuda.graph(graph):
            y = called(x)
    with torch.no_grad():
        for factor in (1, -2, 0.5):
            for weight in model.weights:
                weight.mul_(factor)
            ksopt.refresh()
            y.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(y, model(x), rtol=2e-2, atol=2e-1)
