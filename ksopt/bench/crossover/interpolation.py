"""Estimates for the layers of a crossover map that were not measured, from those that were.

Distances on a map are steps of its grid, whose widths and rows rise by factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import hypot

from ksopt.bench.crossover.request import CrossoverRequest, Site

FAR_STEPS = 2.0
"""Steps from the nearest measurement, beyond which there is no estimate."""


@dataclass(frozen=True)
class Grid:
    """The widths and rows of a map.

    Attributes:
        widths, rows: ascending.
    """

    widths: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, request: CrossoverRequest) -> Grid:
        """The grid of a request."""
        return cls(request.widths, request.rows)

    def steps(self, site: Site, others: Iterable[Site]) -> dict[Site, float]:
        """The distances from a layer to others, without those of other maps."""
        return {
            other: hypot(
                self.widths.index(site.width) - self.widths.index(other.width),
                self.rows.index(site.rows) - self.rows.index(other.rows),
            )
            for other in others
            if other.plane == site.plane and other.width in self.widths and other.rows in self.rows
        }

    @property
    def middle_and_corners(self) -> list[tuple[int, int]]:
        """The (width, rows) of the middle, then of the corners."""
        middle = (self.widths[len(self.widths) // 2], self.rows[len(self.rows) // 2])
        ends = [(w, r) for w in (self.widths[-1], self.widths[0])
                for r in (self.rows[-1], self.rows[0])]  # fmt: skip
        return list(dict.fromkeys([middle, *ends]))


def estimate(grid: Grid, site: Site, known: Mapping[Site, float]) -> float | None:
    """The value of a site, interpolated from its map's measurements; None far from all of them.

    Args:
        grid: of the map.
        site: the layer.
        known: values at other sites; those of other maps are ignored.

    Source: inverse distance weighting, Shepard, "A two-dimensional interpolation function for
    irregularly-spaced data", 1968, with the power 2.
    """
    near = [(steps, known[other]) for other, steps in grid.steps(site, known).items()]
    if not near or min(steps for steps, _ in near) > FAR_STEPS:
        return None
    exact = [value for steps, value in near if steps == 0]
    if exact:
        return exact[0]
    weights = [(steps**-2, value) for steps, value in near]
    return sum(w * value for w, value in weights) / sum(w for w, _ in weights)
