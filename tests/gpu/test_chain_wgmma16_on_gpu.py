"""Chains in one launch on a GPU: every kind of tile, epilogue and tail against float64."""

import chain_packing
import pytest
import torch

from ksopt.epilogue import parts_of_result, with_epilogue
from ksopt.kernels.families.common import (
    chain_cost,
    chain_launcher,
    chain_pack_launcher,
    chain_tile,
)
from ksopt.kernels.families.common.chain_tile import Epilogue, Shape
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Chain
from ksopt.reference import ks_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a device of compute capability 9.0",
    ),
]

CASES = [
    ("(1,96,96,4)*(4,96,96,1)", 1, Epilogue(activation="gelu", bias=True)),
    ("(1,48,48,8)*(8,48,48,1)", 1, Epilogue(activation="silu", bias=True, residual=True)),
    ("(1,192,64,2)*(4,32,96,1)", 3, Epilogue(bias=True)),
    ("(1,384,48,1)*(1,48,384,1)", 1, Epilogue(activation="gelu_tanh", middle="relu")),
    ("(1,32,24,16)*(3,128,40,1)", 2, Epilogue(activation="relu", bias=True, residual=True)),
    ("(1,96,96,4)*(4,96,96,1)", 2, Epilogue(activation="silu_gate")),
    ("(1,384,48,4)*(4,48,96,1)", 2, Epilogue(activation="gelu_gate", bias=True, residual=True)),
    ("(1,96,96,4)*(4,96,96,1)", 1, Epilogue(activation="gelu", bias=True, in_float32=True)),
    ("(1,192,64,2)*(4,32,96,1)", 3, Epilogue(bias=True, in_float32=True)),
    ("(1,384,48,4)*(4,48,96,1)", 2, Epilogue(activation="silu_gate", in_float32=True)),
]


def draw(*size, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(*size, device="cuda") * scale).to(dtype)


def weights_of(s, dtype):
    left = [
        draw(*s.left.weight_shape, scale=s.left.c**-0.5, dtype=dtype) for _ in range(s.siblings)
    ]
    right = [
        draw(*s.right.weight_shape, scale=s.right.c**-0.5, dtype=dtype) for _ in range(s.siblings)
    ]
    return left, right


def two_products(x, left, right, middle, dtype):
    """The chains, each product rounded to ``dtype``, where x is."""
    outs = []
    for one_left, one_right in zip(left, right, strict=True):
        z = ks_reference(x.double(), one_right.double()).to(dtype)
        z = with_epilogue(z.double(), activation=middle).to(dtype)
        outs.append(ks_reference(z.double(), one_left.double()))
    return torch.cat(outs, -1)


def check(s, tile, epilogue, dtype, batches):
    """Results of a tile for batches of rows, outputs poisoned with NaN first."""
    name = str(dtype).removeprefix("torch.")
    features = parts_of_result(epilogue.activation, s.siblings) * s.left.out_features
    launcher = chain_launcher.ChainLauncher(s, tile, epilogue, name, 0)
    index = chain_packing.pack_index(s, tile).cuda()
    for rows in batches:
        left, right = weights_of(s, dtype)
        x = draw(rows, s.right.in_features + 8, dtype=dtype)[:, :-8]
        bias = draw(s.siblings * s.left.out_features, dtype=dtype)
        residual = draw(rows, features, dtype=dtype)
        kind = torch.float32 if epilogue.in_float32 else dtype
        out = torch.full((rows, features + 8), float("nan"), device="cuda", dtype=kind)
        y = launcher(
            *(x, chain_packing.pack(left, right, index)),
            bias if epilogue.bias else None,
            residual if epilogue.residual else None,
            out[:, :-8],
        )
        truth = two_products(x, left, right, epilogue.middle, dtype)
        truth = with_epilogue(
            *(truth, bias.double() if epilogue.bias else None, epilogue.activation),
            residual.double() if epilogue.residual else None,
        )
        assert out[:, -8:].isnan().all()
        assert y.shape == truth.shape
        if rows:
            # One rounding of y, at most half a unit in the last place, of which a z here and
            # there that is rounded the other way takes little.
            unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
            assert (y.double() - truth).norm() <= unit * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("text", "siblings", "epilogue"), CASES)
def test_results(text, siblings, epilogue, dtype):
    s, spec = Shape.of(Chain.parse(text), siblings), DeviceSpec.of_device(0)
    tiles = [t for t in chain_cost.best(s, 25_088, spec, epilogue, 10_000) if t.cluster == 1]
    assert tiles
    for tile in tiles[:: max(1, siblings * 8)]:
        check(s, tile, epilogue, dtype, (0, 1, 63, 1000, 20_011))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("text", "siblings", "epilogue"),
    [
        *CASES,
        ("(1,512,128,2)*(2,128,512,1)", 1, Epilogue(activation="gelu", bias=True, residual=True)),
        ("(1,2048,512,2)*(2,512,2048,1)", 1, Epilogue(bias=True)),
        ("(1,128,128,8)*(8,128,128,1)", 1, Epilogue()),
    ],
)
def test_few_rows_by_clusters_of_blocks(text, siblings, epilogue, dtype):
    s, spec = Shape.of(Chain.parse(text), siblings), DeviceSpec.of_device(0)
    tiles = chain_cost.best(s, 256, spec, epilogue, 10_000)
    sizes = {tile.cluster for tile in tiles}
    assert len(sizes) > 1
    for size in sizes:
        alike = [tile for tile in tiles if tile.cluster == size]
        for tile in {alike[0], alike[len(alike) // 2]}:
            check(s, tile, epilogue, dtype, (1, 63, 65, 256, 1000, 4_096, 20_011))


def test_weights_are_packed_as_by_pytorch():
    for text, siblings, _ in CASES:
        s = Shape.of(Chain.parse(text), siblings)
        tiles = {tile.packing: tile for tile in chain_tile.configs(s, DeviceSpec.of_device(0))}
        left, right = weights_of(s, torch.float16)
        others = [w.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0) for w in left]
        for tile in tiles.values():
            index = chain_packing.pack_index(s, tile).cuda()
            packer = chain_pack_launcher.chain_packer(s, tile, 0)
            for lefts in (left, others):
                weights = [w for pair in zip(lefts, right, strict=True) for w in pair]
                assert torch.equal(packer(weights), chain_packing.pack(lefts, right, index))


def test_a_graph_packs_what_the_weights_are_at_each_replay():
    s = Shape.of(Chain.parse("(1,192,64,2)*(4,32,96,1)"), 3)
    tile = chain_cost.best(s, 25_088, DeviceSpec.of_device(0))[0]
    packer, index = chain_pack_launcher.chain_packer(s, tile, 0), chain_packing.pack_index(s, tile)
    left, right = weights_of(s, torch.bfloat16)
    weights = [w for pair in zip(left, right, strict=True) for w in pair]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = packer(weights)
    for _ in range(2):
        for weight in weights:
            weight.normal_()
        packed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(packed, chain_packing.pack(left, right, index.cuda()))
