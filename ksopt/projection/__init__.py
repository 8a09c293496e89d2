"""From a dense matrix to the weights of a chain: the nearest product that can be found.

- `ksopt.projection.nearest`: the public function `project` and its result;
- `ksopt.projection.two_factors`: the exact solution for any two factors;
- `ksopt.projection.hierarchical`: longer chains, one factor split off at a time;
- `ksopt.projection.alternating`: chains that cannot be split so, one factor refitted at a time;
- `ksopt.projection.least_squares`: the small equations that such a refit falls apart into;
- `ksopt.projection.refine`: all factors at once, along the gradient;
- `ksopt.projection.scale`: powers of two, so that none of this overflows.
"""

from ksopt.projection.nearest import Projection, project

__all__ = ["Projection", "project"]
