"""Predictions of cost models for timed tiles of families on warpgroup products."""

from dataclasses import astuple, dataclass
from typing import Any

import pytest
from checks import H200

from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

BATCH = 25_088

# A tile's first fields, and microseconds on an H200, the fastest of a pattern first.
Tiles = dict[str, list[tuple[tuple[Any, ...], float]]]


@dataclass(frozen=True)
class Measured:
    """Tiles of one family that were timed.

    Attributes:
        name: the family's.
        dtype: of the operands.
        within: how near nearly all predictions are, of the tiles that the model was fitted to.
        tiles: by pattern.
        fastest: whether the first of each pattern are as fast as any that was measured.
    """

    name: str
    dtype: str
    within: float
    tiles: Tiles
    fastest: bool = False

    def problem(self, text: str, exact: bool = True) -> Problem:
        last = self.name.startswith("batch_last")
        return Problem.of_factor(Pattern.parse(text), self.dtype, last, exact)

    def offered(self, text: str, fields: tuple[Any, ...]) -> Any:
        """The one tile of such first fields that the family has for a pattern."""
        tiles = family_of(self.name).configs(self.problem(text), H200)
        (tile,) = [tile for tile in tiles if astuple(tile)[: len(fields)] == fields]
        return tile

    def predicted_us(self, text: str, tile: Any, batch: int = BATCH, exact: bool = True) -> float:
        return family_of(self.name).predicted_us(self.problem(text, exact), tile, batch, H200)


# Fields: warpgroups of j, of outputs, of rows, nt, kl, stages, blocks, teams of j.
WGMMA16 = Measured(
    "wgmma16",
    "float16",
    0.2,
    {
        "(1,128,128,96)": [((2, 1, 1, 4, 16, 2, 1, 3), 771.0)],
        "(48,96,96,16)": [((2, 1, 1, 4, 16, 3, 1, 1), 2424.0)],
        "(4,64,64,16)": [((2, 1, 1, 4, 32, 2, 1, 1), 122.6)],
        "(16,128,128,4)": [((1, 1, 1, 8, 64, 4, 1, 1), 234.7)],
        "(4,96,96,16)": [((2, 1, 1, 4, 16, 3, 1, 1), 196.1)],
        "(1,64,64,64)": [((2, 1, 1, 4, 32, 2, 1, 4), 174.5)],
        "(1,192,192,16)": [((2, 1, 1, 3, 16, 2, 1, 1), 214.8)],
        "(4,96,384,16)": [((2, 1, 1, 1, 16, 3, 1, 1), 1406.5)],
        "(4,384,96,4)": [((1, 2, 1, 8, 48, 3, 1, 1), 131.4)],
    },
    fastest=True,
)
# Fields: warpgroups of j, of outputs, of rows, nt, kl, stages.
WGMMA16_STREAMED = Measured(
    "wgmma16_streamed",
    "float16",
    0.34,
    {
        "(1,96,384,16)": [((2, 1, 1, 4, 16, 4), 132.2)],
        "(1,128,512,4)": [((1, 2, 1, 8, 16, 7), 40.8)],
        "(4,192,768,4)": [((1, 1, 2, 8, 16, 7), 280.4)],
        "(4,512,512,4)": [((1, 2, 1, 8, 16, 7), 486.5)],
        "(1,64,256,64)": [((2, 1, 1, 4, 16, 4), 471.8)],
        "(1,256,256,32)": [((2, 1, 1, 4, 16, 4), 909.6)],
        "(1,256,256,8)": [((1, 2, 1, 4, 16, 5), 93.2)],
        "(1,512,512,2)": [((1, 1, 2, 16, 32, 5), 52.8)],
    },
    fastest=True,
)
# Fields: warpgroups of j, of rows, teams, nt, kl, stages, resident, chain, pending, blocks. Half of
# the tiles that the model was fitted to are within 7 %.
WGMMA_TF32X3 = Measured(
    "wgmma_tf32x3",
    "float32",
    0.3,
    {
        "(16,64,64,4)": [
            ((1, 1, 2, 8, 16, 6, True, 1, 0, 128), 232.6),
            ((1, 2, 1, 8, 8, 6, False, 1, 0, 132), 234.9),
            ((1, 3, 1, 4, 16, 3, False, 1, 0, 132), 263.3),
            ((1, 1, 3, 4, 16, 8, True, 1, 0, 128), 295.3),
        ],
        "(16,128,128,4)": [
            ((1, 2, 1, 8, 16, 3, False, 2, 0, 132), 688.8),
            ((1, 2, 1, 8, 8, 6, False, 1, 0, 132), 785.6),
            ((1, 2, 1, 4, 16, 3, True, 2, 0, 128), 819.3),
            ((1, 3, 1, 4, 8, 6, False, 1, 0, 132), 1028.9),
        ],
        "(1,256,256,32)": [
            ((2, 1, 1, 8, 16, 2, False, 2, 0, 132), 1613.3),
            ((2, 1, 1, 8, 8, 4, False, 1, 0, 132), 1681.8),
        ],
        "(1,1024,1024,1)": [
            ((1, 3, 1, 16, 16, 6, False, 1, 0, 132), 531.9),
            ((1, 2, 1, 16, 16, 8, False, 1, 0, 132), 580.2),
        ],
        "(1,96,96,3)": [
            ((1, 2, 1, 6, 16, 3, True, 1, 1, 132), 29.9),
            ((1, 2, 1, 6, 16, 4, False, 1, 0, 132), 32.1),
        ],
        "(1,512,512,12)": [
            ((3, 1, 1, 4, 16, 2, False, 2, 0, 132), 2879.0),
            ((3, 1, 1, 4, 16, 2, False, 1, 1, 132), 2997.0),
            ((3, 1, 1, 4, 8, 4, False, 1, 1, 132), 3677.0),
        ],
    },
)
# Fields: warpgroups of outputs, of columns, mt, nt, kl, stages, resident, chain, pending, groups.
# Half of the tiles that the model was fitted to are within 6 %.
BATCH_LAST_WGMMA_TF32X3 = Measured(
    "batch_last_wgmma_tf32x3",
    "float32",
    0.25,
    {
        "(4,64,64,16)": [
            ((1, 3, 1, 8, 64, 3, True, 1, 1, 132), 228.7),
            ((1, 3, 1, 8, 32, 5, False, 1, 1, 132), 230.3),
            ((1, 3, 2, 8, 32, 3, True, 1, 0, 132), 271.2),
        ],
        "(16,128,128,4)": [
            ((2, 2, 1, 8, 32, 5, True, 2, 0, 132), 585.1),
            ((1, 2, 2, 16, 16, 5, True, 2, 0, 132), 610.4),
            ((1, 2, 1, 16, 32, 5, True, 1, 1, 132), 690.6),
        ],
        "(6,256,256,4)": [
            ((1, 2, 2, 16, 16, 6, False, 2, 0, 66), 728.9),
            ((2, 1, 2, 16, 16, 5, False, 2, 0, 132), 769.9),
            ((1, 3, 1, 16, 32, 3, False, 1, 0, 66), 811.5),
        ],
        "(2,768,768,4)": [
            ((1, 3, 1, 12, 32, 4, False, 2, 0, 16), 1884.1),
            ((1, 2, 2, 16, 16, 6, False, 2, 0, 22), 1926.3),
            ((1, 3, 2, 8, 16, 6, False, 2, 0, 11), 2024.1),
        ],
        "(2,256,64,16)": [
            ((1, 3, 1, 16, 64, 3, True, 1, 0, 66), 372.7),
            ((1, 3, 1, 16, 32, 6, True, 1, 0, 66), 416.4),
        ],
    },
)
ALL = [WGMMA16, WGMMA16_STREAMED, WGMMA_TF32X3, BATCH_LAST_WGMMA_TF32X3]


def patterns(*measured: Measured) -> list[Any]:
    return [pytest.param(m, text, id=f"{m.name}-{text}") for m in measured for text in m.tiles]


@pytest.mark.parametrize(("measured", "text"), patterns(*ALL))
def test_tiles_that_were_measured_are_offered_and_predicted_nearly_so(measured, text):
    for fields, us in measured.tiles[text]:
        predicted_us = measured.predicted_us(text, measured.offered(text, fields))
        assert predicted_us == pytest.approx(us, rel=measured.within), fields


@pytest.mark.parametrize(
    ("measured", "text"), patterns(*[measured for measured in ALL if measured.fastest])
)
def test_no_tile_is_predicted_to_be_much_faster_than_the_fastest(measured, text):
    tiles = family_of(measured.name).configs(measured.problem(text), H200)
    least_us = min(measured.predicted_us(text, tile) for tile in tiles)
    ((fields, _),) = measured.tiles[text]
    assert measured.predicted_us(text, measured.offered(text, fields)) <= 1.1 * least_us


@pytest.mark.parametrize(("measured", "text"), patterns(WGMMA_TF32X3, BATCH_LAST_WGMMA_TF32X3))
def test_what_was_clearly_slower_is_predicted_to_be(measured, text):
    tiles = [(measured.offered(text, fields), us) for fields, us in measured.tiles[text]]
    for fast, fast_us in tiles:
        for slow, slow_us in tiles:
            if slow_us > 1.15 * fast_us:
                predicted_us = measured.predicted_us(text, slow)
                assert predicted_us > measured.predicted_us(text, fast), (slow, fast)


@pytest.mark.parametrize("measured", ALL, ids=lambda measured: measured.name)
def test_more_rows_take_longer_and_fewer_products_do_not(measured):
    for text, tiles in measured.tiles.items():
        fields, us = tiles[0]
        tile = measured.offered(text, fields)
        batches = (1, 1000, 10_000, BATCH, 100_000, 10 * BATCH)
        times = [measured.predicted_us(text, tile, batch) for batch in batches]
        assert times == sorted(times)
        assert times[0] > 0
        if us > 700:  # so long that the launch is hardly any of it
            assert times[-1] == pytest.approx(10 * times[3], rel=0.05)
        if measured.dtype == "float32":
            assert measured.predicted_us(text, tile, exact=False) < times[3]
