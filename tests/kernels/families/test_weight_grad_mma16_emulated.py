"""The kernels of weight gradients with j in the lanes, run on the CPU, against float64."""

from __future__ import annotations

import pytest
import weight_grad_kernels
from checks import H200

from ksopt.kernels import weight_gradients
from ksopt.kernels.families import weight_grad_mma16 as kernels
from ksopt.kernels.families.weight_grad_mma16 import Config
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern

# Every kind of d; tiles that are filled up in both directions, and several of them; several i;
# warps side by side in k, l and j; one and two runs of a thread.
TILES = [
    (Pattern(2, 40, 72, 8), Config(2, 2, 1, 2, 4, 16, 1)),
    (Pattern(1, 33, 10, 16), Config(1, 2, 2, 2, 3, 32, 1)),
    (Pattern(3, 5, 50, 16), Config(1, 4, 1, 2, 2, 16, 1)),
    (Pattern(1, 20, 20, 24), Config(1, 2, 3, 2, 2, 16, 1)),
    (Pattern(1, 17, 9, 64), Config(1, 1, 4, 2, 4, 16, 2)),
    (Pattern(1, 70, 34, 4), Config(2, 2, 1, 2, 2, 16, 1)),
    (Pattern(2, 18, 66, 4), Config(1, 4, 1, 1, 2, 32, 1)),
    (Pattern(1, 100, 36, 2), Config(2, 2, 1, 2, 1, 16, 1)),
    (Pattern(2, 22, 38, 12), Config(2, 3, 1, 1, 1, 16, 1)),
    (Pattern(1, 70, 66, 8), Config(4, 2, 1, 2, 4, 16, 1, memory=100 * 1024)),
]
CASES = [
    (p, tile, weight_grad_kernels.DTYPES[at % 2], at % 3 > 0) for at, (p, tile) in enumerate(TILES)
]


@pytest.fixture(scope="module")
def emulated(emulator):
    return weight_grad_kernels.build(emulator, CASES)


@pytest.fixture(scope="module")
def adding(emulator):
    return weight_grad_kernels.build_adding(emulator)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: f"{CASES[at][0]}-{CASES[at][2]}")
def test_it_is_the_gradient(emulated, adding, at):
    weight_grad_kernels.assert_right(emulated[at], adding, CASES[at])


def test_infinities_stay_where_they_meet(emulated, adding):
    weight_grad_kernels.assert_infinities_stay(emulated[0], adding, CASES[0])


def test_tiles_cover_a_pattern_and_fit():
    tiny = Pattern(1, 8, 8, 48)
    for p in (Pattern(1, 96, 96, 16), Pattern(48, 96, 96, 4), tiny, Pattern(9, 40, 8, 24)):
        for memory in (228 * 1024, 164 * 1024, 100 * 1024):
            tiles = list(kernels.configs(p, memory))
            assert tiles or (p, memory) == (tiny, 100 * 1024)
            for tile in tiles:
                assert tile.threads * tile.blocks <= 384
                assert (tile.shared_bytes(p) + 1024) * tile.blocks <= memory
                assert p.d % tile.sizes(p)[2] == 0


def test_what_it_does_not_compute_has_a_reason():
    assert kernels.unsupported(Pattern(1, 64, 64, 16), "bfloat16", H200) is None
    older = DeviceSpec((7, 5), multiprocessors=72, shared_bytes=64 * 1024)
    ampere = DeviceSpec((8, 6), multiprocessors=84, shared_bytes=100 * 1024)
    assert kernels.unsupported(Pattern(1, 64, 64, 16), "bfloat16", ampere) is None
    assert "no tile fits" in str(kernels.unsupported(Pattern(1, 8, 8, 48), "bfloat16", ampere))
    for p, dtype, spec, words in (
        (Pattern(1, 64, 64, 1), "bfloat16", H200, "d = 1 is not"),
        (Pattern(1, 64, 64, 10), "bfloat16", H200, "d = 10 is not"),
        (Pattern(1, 65, 64, 4), "float16", H200, "multiple of 8"),
        (Pattern(1, 64, 64, 8), "float32", H200, "float32 is not one of float16, bfloat16"),
        (Pattern(1, 64, 64, 8), "float16", older, "capability 8.0 or newer"),
    ):
        assert words in str(kernels.unsupported(p, dtype, spec))


@pytest.mark.parametrize(
    ("p", "family"),
    [
        (Pattern(16, 64, 64, 16), "weight_grad_mma16"),
        (Pattern(1, 48, 192, 96), "weight_grad_mma16"),
        (Pattern(1, 64, 256, 12), "weight_grad_mma16"),
        (Pattern(64, 128, 128, 4), "weight_grad_mma16"),
        (Pattern(24, 96, 96, 4), "weight_grad_wgmma16"),
        (Pattern(3, 768, 768, 16), None),
        (Pattern(1, 192, 192, 10), None),
    ],
)
def test_which_kernel_is_chosen(p, family):
    """The faster one of 25,088 rows on an H100, None for PyTorch: as measured."""
    launch = weight_gradients.best(p, "bfloat16", 25_088, H200)
    is_faster = weight_gradients.is_faster(p, "bfloat16", 25_088, H200)
    assert (launch.tile.family if is_faster else None) == family
