"""`gather_mma_packed` for factors with d > 1, written out with zeros as factors with d = 1."""

from __future__ import annotations

from collections.abc import Iterator

from ksopt.kernels.families.base import HALF, register_family
from ksopt.kernels.families.gather_mma import Config
from ksopt.kernels.families.gather_mma_packed import GatherMmaPacked
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_MOST_CLASSES = 16  # d times the products, most of them with zeros
_MOST_TIMES, _FEW_ELEMENTS = 8, 2**21


@register_family
class GatherMmaWrittenOut(GatherMmaPacked):
    """(a, b, c, d) as (a, b d, c d, 1): d times the products, of elements that lie side by side.

    Tensor cores have time for them where x is large beside the weights. What a zero makes of an
    infinity is added anew, without the zeros.
    """

    name = "gather_mma_written_out"
    dtypes = HALF

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        d = problem.pattern.d
        if not 1 < d <= _MOST_CLASSES:
            return f"d = {d} is not one of 2 to {_MOST_CLASSES}"
        return super().unsupported_shape(problem, device)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        most = max(_MOST_TIMES * problem.pattern.nnz, _FEW_ELEMENTS)
        for tile in super().configs(_written_out(problem), device):
            if tile.step > 1 and self.packed_elements(problem, tile) <= most:
                yield tile

    def shared_bytes(self, problem: Problem, config: Config) -> int:
        return config.shared_bytes(_written_out(problem).pattern)

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        return super().predicted_us(_written_out(problem), config, batch, device)

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        return super().geometry(_written_out(problem), config)

    def packed_elements(self, problem: Problem, config: Config) -> int:
        return super().packed_elements(_written_out(problem), config)

    def packed_form(self, problem: Problem, config: Config) -> str:
        return f"written out {super().packed_form(problem, config)}"

    def tile(self, problem: Problem, config: Config) -> str:
        return self.tile_of(_written_out(problem), config, problem.pattern.d)


def _written_out(problem: Problem) -> Problem:
    """The problem of the pattern without d; itself where d is 1."""
    p = problem.pattern
    wide = Pattern(p.a, p.b * p.d, p.c * p.d, 1)
    return Problem.of_factor(wide, problem.dtype, False, problem.exact)
