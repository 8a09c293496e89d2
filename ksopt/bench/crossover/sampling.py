"""The choice of the layers of a crossover map to measure next, the most informative one first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp

from ksopt.bench.crossover.interpolation import FAR_STEPS, Grid, estimate
from ksopt.bench.crossover.request import Site

_NEAR_TIE = 0.25  # in log(speed-up): within a quarter a measurement may reverse the verdict
_CERTAIN = 0.2  # weight of a step where the verdict is certain


def next_sites(
    grid: Grid, sites: Sequence[Site], known: Mapping[Site, float], count: int = 2
) -> list[Site]:
    """The sites to measure next.

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
        for width, rows in grid.middle_and_corners
        for site in left
        if (site.width, site.rows) == (width, rows)
    ]
    others = sorted(
        (site for site in left if site not in set(first)),
        key=lambda site: -_information(grid, site, known),
    )
    return [*first, *others][:count]


def _information(grid: Grid, site: Site, known: Mapping[Site, float]) -> float:
    steps = min(grid.steps(site, known).values(), default=FAR_STEPS + 1)
    value = estimate(grid, site, known)
    uncertainty = 1.0 if value is None else exp(-((value / _NEAR_TIE) ** 2))
    return steps * (_CERTAIN + uncertainty)
