"""Chains in one launch: what is refused, that it compiles, and what the cost model predicts."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import chain_packing
import pytest
import torch
from checks import H200

from ksopt.errors import UnavailableError
from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common import (
    chain_cost,
    chain_launcher,
    chain_mlp_launcher,
    chain_mlp_tile,
    chain_pack_launcher,
    chain_tile,
)
from ksopt.kernels.families.common.chain_tile import Config, Epilogue, Shape
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Chain

TIMED = Path(__file__).parents[3] / "docs" / "data" / "chain-kernels-bfloat16.csv"
EPILOGUES = {
    "384-1536": Epilogue(activation="gelu", bias=True),
    "1536-384": Epilogue(bias=True, residual=True),
}


def shape(text: str, siblings: int = 1) -> Shape:
    return Shape.of(Chain.parse(text), siblings)


@pytest.mark.parametrize(
    ("text", "siblings", "words"),
    [
        ("(2,64,64,2)*(4,64,64,1)", 1, "not of the form"),
        ("(1,64,64,4)*(2,64,64,2)", 1, "not of the form"),
        ("(1,64,64,3)*(4,48,64,1)", 1, "d = 3 of the left factor"),
        ("(1,64,64,12)*(4,192,64,1)", 1, "d = 12 of the left factor"),
        ("(1,64,64,8)*(128,4,8,1)", 1, "not a multiple of the left one's d = 8"),
        ("(1,64,64,4)*(4,64,12,1)", 1, "whole runs of 16 bytes"),
        ("(1,63,64,4)*(4,64,16,1)", 1, "whole runs of 16 bytes"),
        ("(1,64,64,4)*(4,64,64,1)", 5, "5 siblings"),
        ("(1,4096,4096,1)*(1,4096,4096,1)", 1, "no tile fits"),
    ],
)
def test_what_is_refused(text, siblings, words):
    assert words in chain_tile.unsupported_reason(shape(text, siblings), "bfloat16", H200)


def test_other_types_and_devices_are_refused():
    s = shape("(1,256,128,4)*(4,128,256,1)")
    assert chain_tile.unsupported_reason(s, "float16", H200) is None
    assert "float32" in chain_tile.unsupported_reason(s, "float32", H200)
    for capability in ((8, 0), (10, 0)):
        device = replace(H200, capability=capability)
        assert "9.0" in chain_tile.unsupported_reason(s, "float16", device)


def test_standard_monarch_layers_are_computed():
    for n in (384, 768, 1024):
        for p in (4, 8):
            chain = Chain.monarch(n, n, p)
            assert chain_tile.unsupported_reason(Shape.of(chain), "bfloat16", H200) is None, chain


def test_a_gate_takes_registers_and_leaves_half_of_the_turns():
    s = shape("(1,384,48,4)*(4,48,96,1)", 2)
    after, gated = Epilogue(activation="silu"), Epilogue(activation="silu_gate")
    tiles, fewer = (set(chain_tile.configs(s, H200, one)) for one in (after, gated))
    assert fewer < tiles
    for tile in fewer:
        assert 2 * tile.turns(s, gated) == tile.turns(s, after) == tile.chunks(s)
        assert tile.cluster <= tile.turns(s, gated)
    # Half of y is written, and half of the activations are computed.
    for tile in sorted(fewer, key=str)[::50]:
        times = [chain_cost.predicted_us(s, tile, 25_088, H200, one) for one in (gated, after)]
        assert times[0] < times[1]


def test_every_weight_is_packed_once_for_each_time_that_it_is_read():
    """Splits and chunks read other weights; what is filled up is zero."""
    s = shape("(1,96,96,8)*(8,96,96,1)", 2)
    for tile in list(chain_tile.configs(s, H200))[::5]:
        index = chain_packing.pack_index(s, tile)
        assert index.numel() == tile.packed_elements(s)
        counts = torch.bincount(index[index >= 0], minlength=2 * (s.left.nnz + s.right.nnz))
        assert (counts == 1).all()


def test_machine_code_does_not_grow_with_the_features_of_x():
    """Of slots of 16 features the loop over them was written out once: minutes to compile."""
    try:
        nvrtc.version()
    except UnavailableError as error:
        pytest.skip(str(error))
    tile = chain_tile.Config(2, 1, 128, 16, 1, 1, 2, 8, 2)
    lengths = []
    for features in (256, 1024):
        s = shape(f"(1,4096,256,2)*(2,256,{features},1)")
        source = chain_launcher.source(s, tile, Epilogue(bias=True), "bfloat16")
        lengths.append(len(nvrtc.cubin(source, "sm_90a").data))
    assert lengths[1] < 1.05 * lengths[0]


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_it_compiles(dtype):
    try:
        nvrtc.version()
    except UnavailableError as error:
        pytest.skip(str(error))
    s = shape("(1,48,32,4)*(2,64,96,1)", 3)
    epilogue = Epilogue(activation="gelu", middle="relu", bias=True, residual=True)
    for tile in list(chain_tile.configs(s, H200, epilogue))[::25]:
        code = nvrtc.cubin(chain_launcher.source(s, tile, epilogue, dtype), "sm_90a").data
        assert chain_launcher.kernel_name(s, dtype, epilogue).encode() in code
    code = nvrtc.cubin(chain_pack_launcher.source(s, tile), "sm_90a").data
    assert chain_pack_launcher.kernel_name(s).encode() in code
    s, gated = shape("(1,48,32,4)*(2,64,96,1)", 2), Epilogue(True, "silu_gate", True)
    for tile in list(chain_tile.configs(s, H200, gated))[::40]:
        code = nvrtc.cubin(chain_launcher.source(s, tile, gated, dtype), "sm_90a").data
        assert chain_launcher.kernel_name(s, dtype, gated).encode() in code
    first, second = shape("(1,384,32,4)*(2,64,192,1)"), shape("(1,96,32,4)*(4,32,384,1)")
    tile = next(iter(chain_mlp_tile.configs(first, second, H200)))
    after = Epilogue(middle="gelu", bias=True)
    code = nvrtc.cubin(chain_mlp_launcher.source(first, second, tile, after, dtype), "sm_90a").data
    assert chain_mlp_launcher.kernel_name(first, second, dtype).encode() in code
    code = nvrtc.cubin(chain_mlp_launcher.pack_source(first, second, tile), "sm_90a").data
    assert chain_mlp_launcher.pack_name(first, second).encode() in code


def timed():
    with TIMED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            siblings, _, text = row["chain"].rpartition(" x ")
            tile = Config(*map(int, row["tile"].split()))
            epilogue = EPILOGUES.get(row["case"], Epilogue(bias=True))
            yield row, shape(text, int(siblings or 1)), tile, epilogue


def test_the_cost_model_ranks_what_was_timed():
    """Of each chain the three best predicted have one within 10 % of the fastest."""
    predicted, measured = [], []
    of_chain: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row, s, tile, epilogue in timed():
        predicted.append(chain_cost.predicted_us(s, tile, 25_088, H200, epilogue))
        measured.append(float(row["us"]))
        pairs = of_chain.setdefault((row["case"], row["chain"]), [])
        pairs.append((predicted[-1], measured[-1]))
    ranks = [torch.tensor(v).argsort().argsort().double() for v in (predicted, measured)]
    assert torch.corrcoef(torch.stack(ranks))[0, 1] > 0.95
    for pairs in of_chain.values():
        best = min(us for _, us in sorted(pairs)[:3])
        assert best <= 1.1 * min(us for _, us in pairs)


def test_blocks_share_the_rows():
    tile = Config(2, 1, 64, 32, 1, 1, 8, 6)
    for batch in (1, 64, 65, 8_449, 25_088, 100_000):
        blocks, rows = chain_launcher.launch_of(tile, batch, 132)
        assert blocks <= 132
        assert rows % 64 == 0
        assert (blocks - 1) * rows < batch <= blocks * rows


def test_a_cluster_s_blocks_have_the_same_rows():
    tile = Config(2, 1, 64, 32, 4, 1, 8, 6, cluster=4)
    assert chain_launcher.launch_of(tile, 1, 132) == (4, 128)
    assert chain_launcher.launch_of(tile, 129, 132) == (8, 128)


def test_clusters_are_predicted_to_help_where_multiprocessors_are_idle():
    for text in ("(1,512,128,2)*(2,128,512,1)", "(1,2048,512,2)*(2,512,2048,1)"):
        s = shape(text)
        sizes = [chain_cost.best(s, rows, H200)[0].cluster for rows in (256, 1024, 4096, 25_088)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] == 8
        assert sizes[-1] == 1


def test_weights_are_packed_by_one_launch_a_version(monkeypatch):
    launched = []

    def launch(kernel, blocks, threads, shared_bytes, arguments, device, early=False):
        launched.append((kernel, blocks, arguments))

    monkeypatch.setattr(nvrtc, "cubin", lambda source, arch: SimpleNamespace(data=b""))
    monkeypatch.setattr(arch, "of_device", lambda device: "sm_90a")
    monkeypatch.setattr(driver, "load_kernel", lambda code, name, shared_bytes, device: name)
    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(DeviceSpec, "of_device", lambda device: H200)
    problem = Problem(Chain.parse("(1,192,64,2)*(4,32,96,1)"), "bfloat16", False, siblings=2)
    family = family_of("chain_wgmma16")
    config = next(family.configs(problem, H200))
    launch_chain = family.launcher(problem, config, 0)
    weights = [torch.zeros(p.weight_shape).bfloat16() for p in 2 * tuple(problem.chain)]
    weights[2] = weights[2].permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    x = torch.zeros(70, 384).bfloat16()
    for _ in range(2):
        launch_chain(x, weights)
    kernels = [kernel for kernel, *_ in launched]
    assert [kernel.startswith("ksopt_chain_pack") for kernel in kernels] == [True, False, False]
    _, blocks, arguments = launched[0]
    packed = blocks * chain_pack_launcher.THREADS * 8
    assert config.packed_elements(Shape.of(problem.chain, 2)) <= packed
    for sibling in range(2):
        in_order = weights[2 * sibling : 2 * sibling + 2][::-1]  # in which x meets them
        addresses, strides = arguments.weights[sibling][:2], arguments.strides[sibling][:2]
        assert addresses == [weight.data_ptr() for weight in in_order]
        assert [tuple(one) for one in strides] == [weight.stride() for weight in in_order]
    assert launched[0][2].packed == launched[1][2].weights == launched[2][2].weights
    weights[3].add_(1)
    launch_chain(x, weights)
    assert [kernel.startswith("ksopt_chain_pack") for kernel, *_ in launched[3:]] == [True, False]
