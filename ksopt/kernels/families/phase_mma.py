"""Factors of d = 1 whose rows begin anywhere: tiles of rows that lie alike in their chunks."""

from __future__ import annotations

from collections.abc import Iterator

from ksopt.kernels.families.base import register_family
from ksopt.kernels.families.gather_mma import (
    Config,
    parts_of,
    phased_row_bytes,
    row_bytes,
    widths,
)
from ksopt.kernels.families.gather_mma_packed import GatherMmaPacked
from ksopt.kernels.problem import DeviceSpec, Problem

_STEP_BYTES = 32  # of x in a step
_MOST_ELEMENTS = 2**24  # of the packed weight, which is there once for each phase


@register_family
class PhaseMma(GatherMmaPacked):
    """`gather_mma_packed` of whole chunks of x, by weights that lie as far into a chunk as x does.

    Rows of a tile are as many apart as an aligned chunk has elements, so that all begin as far into
    their first chunk, whatever the distance of rows is. The weight is packed once for each of these
    phases. Tensor cores then take x by ``ldmatrix`` as it lies, where `gather_mma` loads elements
    one by one.
    """

    name = "phase_mma"
    are_phased = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        p = problem.pattern
        size = 4 if problem.dtype == "float32" else 2
        if p.d > 1:
            return "features that are added do not lie side by side"
        if p.c * size < _STEP_BYTES or 1 in self.steps(problem):
            return f"sums of {p.c} values are too short"
        if p.c * size % 16 == 0:
            return "blocks i of x begin with a chunk of 16 bytes wherever a row does"
        if p.b * p.c * 16 // size > _MOST_ELEMENTS:
            return "the weight would be packed several times, and is too large for that"
        return super().unsupported_shape(problem, device)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p, size = problem.pattern, 4 if problem.dtype == "float32" else 2
        (step,) = self.steps(problem)
        steps = -(-(p.c + 16 // size - 1) // step)
        pieces = []
        for parts in (1, *parts_of(steps)):
            of_part = -(-steps // parts)
            pieces.append((parts, of_part, phased_row_bytes(of_part * step, size)))
        for nt, ns in widths(-(-p.b // 8)):
            y_bytes = row_bytes(p, size, 1, 1, min(8 * nt * ns, p.b))
            for mt, jt, bm, warps in self.shapes(p, step, 1, ns):
                shape = (warps, bm, mt, nt, ns, jt, 1, 1)
                for tile in self.with_parts(p, shape, size, step, y_bytes, pieces, device):
                    if self.packed_elements(problem, tile) <= _MOST_ELEMENTS:
                        yield tile

    def packed_form(self, problem: Problem, config: Config) -> str:
        return f"{super().packed_form(problem, config)} by phases"
