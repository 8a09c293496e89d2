"""The templates of the 16-bit families compile, and count as Python's formulas do."""

import random
from dataclasses import astuple

import pytest
from checks import H200

from ksopt.errors import UnavailableError
from ksopt.jit import nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.lane_layout import lane_layout
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

FOLDS = (2, 3, 4, 6, 8, 12, 16, 24, 40, 48)
PATTERNS = [Pattern(2, 48, 48, d) for d in FOLDS] + [Pattern(4, 64, 64, 16), Pattern(1, 96, 7, 24)]


def mma16(tile, p):
    f = lane_layout(p.d)
    return {
        "COLUMNS": tile.columns(p),
        "Layout::J": f.j,
        "Layout::RUN": f.run,
        "Layout::RUN_L": f.run_l,
        "Layout::UNIT": f.unit,
        "Layout::CHUNKS": f.chunks,
        "Layout::STEPS": f.steps,
    }


def wgmma16(tile, p):
    return {
        "WEIGHT_BYTES": tile.weight_bytes(p),
        "TEAM": tile.team(p),
        "COLUMN_GROUPS": tile.columns(p) // tile.team(p),
        "MULTIPLIER_REGISTERS": tile.register_limit,
        "AHEAD": int(tile.loads_ahead(p)),
        "JC": tile.groups_j * lane_layout(p.d).j,
    }


def wgmma16_streamed(tile, p):
    return {
        "STAGE_BYTES": tile.stage_bytes(p),
        "STAGE_WEIGHT_BYTES": tile.stage_weight_bytes(p),
        "COLUMNS": tile.columns(p),
        "COLUMN_BYTES": tile.packed_elements(p) * 2 // tile.columns(p),
        "MULTIPLIER_REGISTERS": tile.register_limit,
        "AHEAD": int(tile.loads_ahead(p)),
        "JC": tile.groups_j * lane_layout(p.d).j,
    }


# The template, how many of a tile's fields are its arguments, patterns of a family's own, tiles of
# each that are drawn, and what it counts besides what all do.
TEMPLATES = {
    "mma16": (
        "Mma16Tile",
        lambda tile: (*astuple(tile)[:7], tile.blocks),
        [Pattern(2, 48, 48, 1), Pattern(1, 8, 8, 1), Pattern(1, 256, 64, 2)],
        40,
        mma16,
    ),
    "wgmma16": (
        "Wgmma16Tile",
        lambda tile: astuple(tile)[:-1],
        [Pattern(2, 48, 48, 64), Pattern(1, 256, 256, 32)],
        30,
        wgmma16,
    ),
    "wgmma16_streamed": (
        "Wgmma16StreamedTile",
        lambda tile: astuple(tile)[:6],
        [Pattern(2, 48, 48, 64), Pattern(1, 768, 768, 4)],
        20,
        wgmma16_streamed,
    ),
}
OLDER = ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a")
TARGETS = [("mma16", target) for target in OLDER] + [(name, "sm_90a") for name in TEMPLATES]


@pytest.fixture(autouse=True)
def compiler():
    try:
        nvrtc.version()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_agrees_on_every_number(name):
    """A sample of tiles of every class of d, by static_assert."""
    template, arguments, own_patterns, count, numbers = TEMPLATES[name]
    draw = random.Random(0)
    lines = [f'#include "{name}.cuh"']
    for p in [*PATTERNS, *own_patterns]:
        tiles = list(family_of(name).configs(Problem.of_factor(p, "float16", False), H200))
        assert tiles
        for tile in draw.sample(tiles, min(count, len(tiles))):
            written = ", ".join(map(str, arguments(tile)))
            instance = f"{template}<Pattern<{p.a}, {p.b}, {p.c}, {p.d}>, {written}>"
            counted = {
                "SHARED_BYTES": tile.shared_bytes(p),
                "THREADS": tile.threads,
                "BM": tile.rows,
                "NB": tile.outputs,
                **numbers(tile, p),
            }
            lines += [
                f'static_assert({instance}::{what} == {value}, "{what}");'
                for what, value in counted.items()
            ]
    nvrtc.cubin("\n".join(lines) + "\n", "sm_90a")


@pytest.mark.sweep
@pytest.mark.parametrize("shape", [(2, 24, 48, 3), (1, 48, 48, 16)], ids=str)
@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_it_compiles(name, target, shape):
    family = family_of(name)
    for dtype in family.dtypes:
        problem = Problem.of_factor(Pattern(*shape), dtype, False)
        tile = random.Random(0).choice(list(family.configs(problem, H200)))
        kernels = [nvrtc.cubin(source, target).data for source in family.sources(problem, tile)]
        assert all(code.startswith(b"\x7fELF") for code in kernels)
        assert family.kernel_name(problem).encode() in kernels[-1]
        if name == "wgmma16_streamed":
            assert family.pack_name(problem).encode() in kernels[0]
