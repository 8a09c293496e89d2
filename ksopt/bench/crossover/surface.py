"""Estimates for layers that were not measured, and the choice of the layer to measure next.

Distances on a map are steps of its grid, whose widths and rows rise by factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot

from ksopt.bench.crossover.request import CrossoverRequest, Plane, Site

_FAR = 2.0  # steps from the nearest measurement, beyond which there is no estimate
_NEAR_TIE = 0.25  # in log(speed-up): within a quarter a measurement may reverse the verdict
_CERTAIN = 0.2  # weight of a step where the verdict is certain


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

    def steps(self, one: Site, other: Site) -> float:
        """The distance between two layers of a map."""
        return hypot(
            self.widths.index(one.width) - self.widths.index(other.width),
            self.rows.index(one.rows) - self.rows.index(other.rows),
        )

    def skeleton(self) -> list[tuple[int, int]]:
        """The (width, rows) to measure first: the middle, then the corners."""
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
    near = [
        (grid.steps(site, other), value)
        for other, value in known.items()
        if other.plane == site.plane and other.width in grid.widths and other.rows in grid.rows
    ]
    if not near or min(steps for steps, _ in near) > _FAR:
        return None
    exact = [value for steps, value in near if steps == 0]
    if exact:
        return exact[0]
    weights = [(steps**-2, value) for steps, value in near]
    return sum(w * value for w, value in weights) / sum(w for w, _ in weights)


def next_sites(
    grid: Grid, sites: Sequence[Site], known: Mapping[Site, float], count: int = 2
) -> list[Site]:
    """The sites to measure next, the most informative one first.

    The middle and the corners of every map come first. Then come sites that are far from all
    measurements of their map and whose winner is uncertain.

    Args:
        grid: of the maps.
        sites: all of them.
        known: log(speed-up) of the measured sites, each of its budget nearest to a tie.
        count: the number of sites to return.
    """
    left = [site for site in sites if site not in known]
    first = [
        site
        for width, rows in grid.skeleton()
        for site in left
        if (site.width, site.rows) == (width, rows)
    ]
    others = sorted(
        (site for site in left if site not in set(first)),
        key=lambda site: -_information(grid, site, known),
    )
    return [*first, *others][:count]


def _information(grid: Grid, site: Site, known: Mapping[Site, float]) -> float:
    steps = min(
        (grid.steps(site, other) for other in known if _is_beside(grid, site.plane, other)),
        default=_FAR + 1,
    )
    value = estimate(grid, site, known)
    uncertainty = 1.0 if value is None else exp(-((value / _NEAR_TIE) ** 2))
    return steps * (_CERTAIN + uncertainty)


def _is_beside(grid: Grid, plane: Plane, other: Site) -> bool:
    return other.plane == plane and other.width in grid.widths and other.rows in grid.rows
