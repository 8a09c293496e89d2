"""Every family's kernels compile for every GPU that has their instructions, without a GPU."""

from dataclasses import replace
from typing import Any

import pytest
from checks import H200

from ksopt.jit import nvrtc
from ksopt.kernels import weight_gradients
from ksopt.kernels.families import chain_grads_launcher, chain_grads_wgmma16, weight_grad
from ksopt.kernels.families.base import KernelFamily, families
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem, SecondLayer
from ksopt.kernels.registry import ranked
from ksopt.patterns.chain import Chain, Pattern

DEVICES = {
    "sm_80": DeviceSpec((8, 0), 108, 164 * 1024),
    "sm_86": DeviceSpec((8, 6), 84, 100 * 1024),
    "sm_89": DeviceSpec((8, 9), 128, 100 * 1024),
    "sm_90a": H200,
    "sm_100a": DeviceSpec((10, 0), 148, 228 * 1024),
    "sm_120a": DeviceSpec((12, 0), 170, 100 * 1024),
}
SHORT_SUMS, LONG_SUMS = Pattern(2, 8, 8, 64), Pattern(4, 64, 64, 16)
CHAIN = Chain.parse("(1,192,48,2)*(2,48,192,1)")
LEFT, RIGHT = (Chain((factor,)) for factor in CHAIN)
ROWS = 25_088


def problems(family: KernelFamily[Any], dtype: str, device: DeviceSpec) -> list[Problem]:
    """What a family may compute: at least one of them, where its instructions are."""
    if not (family.takes_chains or family.takes_mlps):
        last = family.layout == "batch_last"
        factors = [Problem.of_factor(p, dtype, last) for p in (LONG_SUMS, SHORT_SUMS)]
        return [one for one in factors if family.unsupported_reason(one, device) is None][:1]
    layer = Problem(CHAIN, dtype, False, epilogue=Epilogue(activation="gelu"))
    seconds = [(CHAIN, CHAIN), (RIGHT, LEFT)] if family.takes_mlps else []
    return [layer, *(replace(layer, chain=one, second=SecondLayer(two)) for one, two in seconds)]


def has_instructions(family: KernelFamily[Any], device: DeviceSpec) -> bool:
    if family.capability_only:
        return device.capability == family.capability
    return device.capability >= family.capability


CASES = [
    pytest.param(family, dtype, target, id=f"{family.name}-{dtype}-{target}")
    for family in families()
    for target, device in DEVICES.items()
    if has_instructions(family, device)
    for dtype in family.dtypes
    if dtype != "float16"  # the code of bfloat16, with another type
]


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "dtype", "target"), CASES)
def test_the_fastest_tile_compiles(family: KernelFamily[Any], dtype: str, target: str) -> None:
    rows, device = family.max_batch or ROWS, DEVICES[target]
    best = [ranked(family, one, rows, device)[:1] for one in problems(family, dtype, device)]
    sources = [source for tiles in best for tile in tiles for source in tile.sources()]
    assert sources
    for source in sources:
        assert nvrtc.cubin(source, target).data.startswith(b"\x7fELF")


@pytest.mark.sweep
@pytest.mark.parametrize(("target", "count"), [("sm_90a", 2), ("sm_100a", 1)])
def test_weight_gradients_compile(target: str, count: int) -> None:
    """Where a multiprocessor has the memory; one of the kernels has instructions of 9.0 alone."""
    p, device = Pattern(1, 96, 96, 4), DEVICES[target]
    launches = weight_gradients.several(p, "bfloat16", ROWS, device)
    slowest_first = sorted(launches, key=lambda one: -one.predicted_us(p, ROWS, device))
    tiles = {one.tile.family: one.tile for one in slowest_first}
    assert len(tiles) == count
    sources = [weight_grad.source(p, tile, "bfloat16", True) for tile in tiles.values()]
    for source in (*sources, weight_grad.adding_source("bfloat16")):
        assert nvrtc.cubin(source, target).data.startswith(b"\x7fELF")


@pytest.mark.slow
def test_gradients_of_chains_compile() -> None:
    config = chain_grads_wgmma16.best(CHAIN, ROWS, H200).config
    sources = [chain_grads_launcher.source(CHAIN, config, "bfloat16", True)]
    for source in (*sources, chain_grads_launcher.adding_source("bfloat16")):
        assert nvrtc.cubin(source, "sm_90a").data.startswith(b"\x7fELF")
