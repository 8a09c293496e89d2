"""Kernels of few rows that are launched before those ahead of them have ended, several in a row."""

import pytest
import torch

import ksopt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="early launches need compute capability 9.0",
    ),
]

LAYERS = 24
# A launch a factor and one launch, long sums and short ones.
CHAINS = ("(1,64,64,16)*(16,64,64,1)", "(1,512,128,2)*(2,128,512,1)", "(8,128,128,1)")


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_layer_of_a_graph_reads_what_the_one_before_wrote(rows, dtype):
    """Layers read and write two buffers in turns, or new memory: each waits for all before it."""
    torch.manual_seed(0)
    layers = [
        ksopt.KSLinear(1024, 1024, CHAINS[at % len(CHAINS)], bias=False).to("cuda", dtype)
        for at in range(LAYERS)
    ]
    inputs = torch.randn(rows, 1024, device="cuda", dtype=dtype)
    buffers = [torch.empty_like(inputs), torch.empty_like(inputs)]

    def network():
        buffers[0].copy_(inputs)
        for at, layer in enumerate(layers):
            buffers[(at + 1) % 2].copy_(layer(buffers[at % 2]))

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), ksopt.prepared_weights():
        for _ in range(2):
            network()
        expected = buffers[LAYERS % 2].clone()
        with torch.cuda.graph(graph):
            network()
            x = inputs
            for layer in layers:
                x = layer(x)
    for _ in range(200):
        buffers[LAYERS % 2].fill_(torch.nan)
        x.fill_(torch.nan)
        graph.replay()
        assert torch.equal(buffers[LAYERS % 2], expected)
        assert torch.equal(x, expected)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("written", [0, 1])
def test_a_weight_is_read_as_the_kernel_right_before_has_written_it(rows, dtype, written):
    """Eagerly, and in a graph that writes weights, and so is not recorded as one that does not."""
    torch.manual_seed(0)
    layer = ksopt.KSLinear(4096, 4096, "(1,2048,512,2)*(2,512,2048,1)").to("cuda", dtype)
    x = torch.randn(rows, 4096, device="cuda", dtype=dtype)
    weight = layer.weights[written]
    source = torch.randn_like(weight)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        with torch.cuda.graph(graph):
            weight.copy_(source)
            recorded = layer(x)
        for at in range(30):
            source.normal_()
            weight.copy_(source)
            torch.cuda.synchronize()
            expected = layer(x).clone()
            weight.zero_()
            torch.cuda.synchronize()
            if at % 2:
                graph.replay()
                # It packs its weights itself, which another kernel may be the choice for.
                torch.testing.assert_close(recorded, expected, rtol=2e-2, atol=2e-2)
            else:
                weight.copy_(source)
                assert torch.equal(layer(x), expected), at
