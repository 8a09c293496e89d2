"""Projection of a dense matrix to a chain: weights whose product is near the matrix.

- `ksopt.projection.nearest`: the public function `project` and its result;
- `ksopt.projection.two_factors`: the exact solution for any two factors;
- `ksopt.projection.hierarchical`: longer chains, one factor split off at a time;
- `ksopt.projection.alternating`: other chains, one factor refitted at a time;
- `ksopt.projection.least_squares`: the small independent equations of such a refit;
- `ksopt.projection.refine`: all factors at once, along the gradient;
- `ksopt.projection.scale`: scaling by powers of two, so that nothing overflows.
"""

from ksopt.projection.nearest import Projection, project

__all__ = ["Projection", "project"]
