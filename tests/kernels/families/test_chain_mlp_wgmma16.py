"""Two layers in one launch: what is refused, which tiles there are, what they are predicted."""

from dataclasses import replace
from types import SimpleNamespace

import chain_packing
import pytest
import torch
from checks import H200

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels import planner, registry
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common import chain_mlp_cost, chain_mlp_tile
from ksopt.kernels.families.common.chain_tile import Epilogue, Shape
from ksopt.kernels.operands import random_operands
from ksopt.kernels.problem import DeviceSpec, Problem, SecondLayer
from ksopt.kernels.problem import Epilogue as After
from ksopt.patterns.chain import Chain

# Of docs/development/chains.md: the fastest tile of each MLP, measured on an H200.
MEASURED = {
    ("(1,384,64,4)*(2,128,192,1)", "(1,96,64,4)*(4,64,384,1)"): 75.5,
    ("(1,768,64,2)*(2,64,192,1)", "(1,192,48,2)*(2,48,768,1)"): 62.4,
    ("(1,384,32,4)*(2,64,192,1)", "(1,96,32,4)*(4,32,384,1)"): 59.2,
}
ROWS = 25_088


def problem_of(up, down, dtype="bfloat16", hidden=True, biased=True, last=False):
    second = SecondLayer(Chain.parse(down), After(biased, "none", True))
    return Problem(Chain.parse(up), dtype, last, epilogue=After(hidden, "gelu"), second=second)


def shapes(up, down):
    return Shape.of(Chain.parse(up)), Shape.of(Chain.parse(down))


@pytest.mark.parametrize(
    ("up", "down", "more", "words"),
    [
        ("(1,384,64,4)*(2,128,192,1)", "(1,96,64,4)*(4,64,384,1)", {}, None),
        ("(1,384,64,4)*(2,128,192,1)", "(1,384,1536,1)", {}, "these have 2 and 1"),
        ("(1,384,64,4)*(2,128,192,1)", "(1,96,64,4)*(4,64,384,1)", {"hidden": False}, "a bias"),
        ("(1,384,64,4)*(2,128,192,1)", "(1,96,64,4)*(4,64,384,1)", {"dtype": "float32"}, "float32"),
        ("(1,384,64,4)*(2,128,192,1)", "(1,96,64,4)*(4,64,384,1)", {"last": True}, "own kernels"),
        ("(1,96,24,16)*(2,192,192,1)", "(1,96,64,4)*(4,64,384,1)", {}, "d = 16 of the first"),
        ("(1,1024,1024,4)*(4,1024,1024,1)", "(1,1024,1024,4)*(4,1024,1024,1)", {}, "no tile fits"),
    ],
)
def test_what_is_refused(up, down, more, words):
    family, problem = family_of("chain_mlp_wgmma16"), problem_of(up, down, **more)
    reason = family.unsupported_reason(problem, H200)
    assert (reason is None) if words is None else (words in reason)
    alone = family.unsupported_reason(problem.layers()[0], H200)
    assert alone is not None


def test_other_devices_are_refused():
    family, problem = family_of("chain_mlp_wgmma16"), problem_of(*next(iter(MEASURED)))
    for capability in ((8, 0), (10, 0)):
        device = DeviceSpec(capability, 132, 228 * 1024)
        assert "compute capability 9.0" in family.unsupported_reason(problem, device)
    first, second = shapes(*next(iter(MEASURED)))
    assert "other features" in chain_mlp_tile.unsupported_reason(first, first, "bfloat16", H200)
    wide = replace(second, siblings=2)
    assert "no siblings" in chain_mlp_tile.unsupported_reason(first, wide, "bfloat16", H200)


@pytest.mark.parametrize("texts", MEASURED, ids=lambda texts: texts[0])
def test_tiles_agree_with_their_shape(texts):
    first, second = shapes(*texts)
    tiles = list(chain_mlp_tile.configs(first, second, H200))
    assert len(tiles) == len({*tiles}) > 20
    by_packing = {}
    for tile in tiles:
        assert tile.shared_bytes((first, second)) <= 227 * 1024
        assert second.right.c % (tile.nk * first.left.d) == 0
        assert tile.hidden_slots(first) * tile.slot_steps * 16 == tile.nk * first.left.d
        elements = tile.packed_elements(first, second)
        assert elements == tile.packing.packed_elements(first, second)
        by_packing.setdefault(tile.packing, []).append(tile)
    for packing, alike in list(by_packing.items())[:3]:
        expected = chain_packing.mlp_pack_index(first, second, packing)
        assert expected.numel() == packing.packed_elements(first, second)
        for tile in alike[:2]:
            assert torch.equal(chain_packing.mlp_pack_index(first, second, tile), expected)


@pytest.mark.parametrize(("texts", "us"), MEASURED.items())
def test_the_cost_model_is_near_what_was_measured(texts, us):
    after = Epilogue(bias=True, residual=True, middle="gelu")
    first, second = shapes(*texts)
    best = min(
        chain_mlp_cost.predicted_us(first, second, tile, ROWS, H200, after)
        for tile in chain_mlp_tile.configs(first, second, H200)
    )
    assert best == pytest.approx(us, rel=0.15)


@pytest.mark.parametrize("texts", MEASURED)
def test_many_rows_are_one_launch_and_few_are_not(texts):
    problem = problem_of(*texts)
    assert planner.plan_of(problem, ROWS, spec=H200).ways == ("chain_mlp_wgmma16",)
    assert len(planner.plan_of(problem, 16, spec=H200).launches) > 1
    several = registry.best_predicted(problem, ROWS, H200)
    (layers,) = (one for one in several if one.name == "layers")
    assert several[0].name == "chain_mlp_wgmma16"
    # The layers' activation, bias and residual count, as those of the one launch do.
    bare = sum(registry.best_predicted(one, ROWS, H200)[0].predicted_us for one in problem.layers())
    assert layers.predicted_us > bare


def test_what_is_launched(monkeypatch):
    launched = []

    def launch(kernel, blocks, threads, shared_bytes, arguments, device, early=False):
        launched.append((kernel, blocks, arguments))

    monkeypatch.setattr(nvrtc, "cubin", lambda source, arch: SimpleNamespace(data=b""))
    monkeypatch.setattr(arch, "of_device", lambda device: "sm_90a")
    monkeypatch.setattr(driver, "load_kernel", lambda code, name, shared_bytes, device: name)
    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(DeviceSpec, "of_device", lambda device: H200)
    problem = problem_of(*next(iter(MEASURED)))
    family = family_of("chain_mlp_wgmma16")
    config = registry.best_kernels(problem, ROWS, H200)[0].tile
    call = family.launcher(problem, config, 0)
    operands = random_operands(problem, 70, torch.device("cpu"))
    for _ in range(2):
        y = call(*operands.arguments(problem))
    assert y.shape == (70, 384)
    kernels = [kernel for kernel, *_ in launched]
    packs = [kernel.startswith("ksopt_chain_mlp_pack") for kernel in kernels]
    assert packs == [True, False, False]
    x, weights, hidden_bias, bias, residual = operands.arguments(problem)
    both = launched[0][2].weights
    assert [both[at][1] for at in range(2)] == [w.data_ptr() for w in weights[0::2]]
    assert [both[at][0] for at in range(2)] == [w.data_ptr() for w in weights[1::2]]
    _, blocks, arguments = launched[-1]
    assert (blocks, arguments.rows_per_block, arguments.batch) == (2, 64, 70)
    assert arguments.weights == launched[0][2].packed
    assert arguments.hidden_bias == hidden_bias.data_ptr()
    assert (arguments.bias, arguments.residual) == (bias.data_ptr(), residual.data_ptr())
    assert (arguments.x, arguments.y) == (x.data_ptr(), y.data_ptr())
    # Rows that the kernel cannot read are copied, an output that it cannot write is copied into.
    launched.clear()
    weights[3].add_(1)
    apart = torch.zeros(70, 393).bfloat16()[:, 9:]
    out = torch.zeros(384, 70).bfloat16().t()
    assert call(apart, weights, hidden_bias, bias, residual, out) is out
    assert len(launched) == 2
    assert launched[-1][2].x not in (0, apart.data_ptr())
    assert launched[-1][2].y != out.data_ptr()
