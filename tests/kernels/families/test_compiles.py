"""Every family's kernels compile for every GPU that has their instructions, without a GPU."""

from dataclasses import replace
from typing import Any

import pytest
from checks import H200

from ksopt.jit import arch, driver, nvrtc, resources
from ksopt.kernels.families.base import KernelFamily, families
from ksopt.kernels.families.gradient_base import (
    KINDS,
    GradientFamily,
    GradientProblem,
    gradient_families,
)
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem, SecondLayer
from ksopt.kernels.registry import by_merging, ranked
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
CHAIN = Chain.parse("(1,192,64,2)*(2,64,192,1)")
LEFT, RIGHT = (Chain((factor,)) for factor in CHAIN)
ROWS = 25_088
FEW_ROWS = 64  # of families of gradients that take no more than a few hundred


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


def gradient_of(family: GradientFamily[Any], siblings: int = 1) -> GradientProblem:
    factors = LEFT.patterns if family.computes == "weight" else CHAIN.patterns
    with_bias = family.computes != "chain_input"
    return GradientProblem(family.computes, factors, "bfloat16", with_bias, siblings)


def predictions_of(
    family: GradientFamily[Any], problem: GradientProblem, device: DeviceSpec
) -> dict[Any, float]:
    """The predicted time of each launch of many rows, or of few where there is none."""
    for rows in (ROWS, FEW_ROWS):
        launches = list(family.launches(problem, rows, device))
        if launches:
            return {one: family.predicted_us(problem, one, rows, device) for one in launches}
    raise AssertionError(f"{family.name} has no launch")


GRADIENT_CASES = [
    pytest.param(family, siblings, target, id=f"{family.name}-{siblings}-{target}")
    for kind in KINDS
    for siblings in ((1, 3) if kind == "chain_weights" else (1,))
    for family in gradient_families(kind)
    for target, device in DEVICES.items()
    if family.unsupported_reason(gradient_of(family), device) is None
]


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "siblings", "target"), GRADIENT_CASES)
def test_the_fastest_launch_of_a_gradient_compiles(
    family: GradientFamily[Any], siblings: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bytes] = []
    problem, device = gradient_of(family, siblings), DEVICES[target]
    monkeypatch.setattr(arch, "of_device", lambda _: target)
    monkeypatch.setattr(driver, "load_kernel", lambda code, *_: loaded.append(code))
    monkeypatch.setattr(DeviceSpec, "of_device", lambda _: device)
    predicted = predictions_of(family, problem, device)
    family.launcher(problem, min(predicted, key=predicted.__getitem__), 0)
    assert loaded
    assert all(code.startswith(b"\x7fELF") for code in loaded)


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_repair_of_a_chains_matrix_compiles(dtype: str, target: str) -> None:
    chain = Chain.parse("(132,3,144,1)*(36,88,2,6)")
    problem = Problem(chain, dtype, False, epilogue=Epilogue(bias=True))
    (merged,) = by_merging(problem, 1140, DEVICES[target])
    (source,) = merged.sources()
    (used,) = resources.of_source(source, target)
    assert used.spilled_bytes == 0
    assert used.registers <= 128  # two blocks of 256 threads and more on a multiprocessor


def test_every_family_of_gradients_has_a_case() -> None:
    names = {family.name for kind in KINDS for family in gradient_families(kind)}
    assert names == {case.values[0].name for case in GRADIENT_CASES}


@pytest.mark.parametrize("multiprocessors", [1, 14])
def test_a_part_of_a_gpu_is_predicted_for_too(multiprocessors: int) -> None:
    """It may have fewer multiprocessors than a cluster of blocks takes."""
    device = replace(H200, multiprocessors=multiprocessors)
    for family in families():
        for dtype in family.dtypes:
            for problem in problems(family, dtype, device):
                assert all(one.predicted_us > 0 for one in ranked(family, problem, 256, device))
    for kind in KINDS:
        for family in gradient_families(kind):
            predicted = predictions_of(family, gradient_of(family), device)
            assert all(us > 0 for us in predicted.values())
