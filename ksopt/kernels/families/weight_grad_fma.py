"""The weight gradient of a factor for few rows, in ordinary arithmetic.

The kernel is csrc/cuda/weight_grad_fma.cuh. PyTorch copies both operands of d > 1 into another
order, multiplies, copies the product back and sums the rows for a bias: five launches, which cost
more than the arithmetic where rows are few. This family needs one, of any type and any d.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ksopt.kernels.families.base import ANY_TYPE
from ksopt.kernels.families.common.weight_grad import ROWS, Launch, WeightGradFamily
from ksopt.kernels.families.gradient_base import GradientProblem, register_gradient_family
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern

MOST_ROWS = 512
"""With more, PyTorch's copies and products use the device better."""

_LARGEST_INT = 2**31 - 1
_LANES = 32
_SHARED = 48 * 1024  # bytes of a block on any GPU
_MOST_SUMS = 32  # of a lane; half as many where it also has values of dY for each: no spills
_UNROLLED = 4  # rows of a warp on their way at a time
# The cost model, of one multiprocessor in a microsecond: loads, multiply-adds, and sums that warps
# add up, of a warp each; and microseconds of rows on their way. Fitted to 270 launches in float32,
# of 32 factors and 16 or 64 rows, on an H200, within 8 % (root mean square). These took 2.2 us
# longer, as PyTorch's did that `weight_gradient_us` is fitted to: times between two events.
_LAUNCH_US, _LATENCY_US = 2.2, 0.17
_LOADS, _MULTIPLY_ADDS, _ADDED = 1_700.0, 2_200.0, 370.0


@dataclass(frozen=True)
class Config:
    """A block's tile.

    Attributes:
        ks: values of k.
        runs: of 32 features of x.
        warps: that share the rows.
    """

    ks: int
    runs: int
    warps: int
    family = "weight_grad_fma"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _LANES * self.warps

    @property
    def blocks(self) -> int:
        """Blocks on a multiprocessor at a time: up to 128 registers a thread."""
        return 512 // self.threads

    @property
    def features(self) -> int:
        """Features of x of a block."""
        return _LANES * self.runs

    def shares_values(self, p: Pattern) -> bool:
        """Whether the runs of a lane multiply by the same values of dY: ``Tile::DISTINCT``."""
        return p.c * p.d % self.features == 0 and _LANES % p.d == 0

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block: the sums of its warps."""
        return 4 * self.warps * self.ks * self.features

    def tiles(self, p: Pattern) -> int:
        """The number of tiles of the whole gradient."""
        return -(-p.b // self.ks) * -(-p.in_features // self.features)

    def declaration(self, p: Pattern) -> str:
        """``Support`` and ``Tile`` in C++."""
        fields = f"{self.ks}, {self.runs}, {self.warps}, {self.blocks}"
        return (
            f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
            f"using Tile = WeightGradFmaTile<Support, {fields}>;\n"
        )

    def predicted_us(self, p: Pattern, rows: int, shares: int, spec: DeviceSpec) -> float:
        """Predicted microseconds: rows in turns, loads or products, and adding up the warps'."""
        tiles = self.tiles(p)
        waves = -(-tiles // (spec.multiprocessors * self.blocks))
        on_one = -(-tiles // spec.multiprocessors)  # blocks of a multiprocessor
        of_warp = -(-rows // self.warps)
        loads = self.runs + self.ks * (1 if self.shares_values(p) else self.runs)
        work = on_one * self.warps * of_warp
        turns = waves * -(-of_warp // _UNROLLED) * _LATENCY_US
        sums = self.ks * self.runs
        busy = max(work * loads / _LOADS, work * sums / _MULTIPLY_ADDS)
        return _LAUNCH_US + turns + busy + on_one * self.warps * sums / _ADDED


def unsupported(p: Pattern, dtype: str) -> str | None:
    """Why no kernel computes a pattern's weight gradient; None if one does."""
    if dtype not in ANY_TYPE:
        return f"{dtype} is not one of {', '.join(ANY_TYPE)}"
    elements = 4 if dtype == "float32" else 8
    if p.b * p.d % elements or p.c * p.d % elements:
        return f"b*d or c*d is not a multiple of {elements}, the elements of 16 bytes"
    if max(p.in_features, p.out_features, p.nnz) > _LARGEST_INT:
        return f"{p} has more elements in a row or a weight than 32 bits count"
    return None


def configs(p: Pattern) -> Iterator[Config]:
    """The tiles of a pattern: those that are not mostly empty."""
    for ks in (2, 4, 8, 16):
        for runs in (1, 2, 4):
            is_filled = ks < 2 * p.b and _LANES * runs < 2 * max(p.in_features, _LANES)
            for warps in (4, 8, 16):
                tile = Config(ks, runs, warps)
                most = _MOST_SUMS if tile.shares_values(p) else _MOST_SUMS // 2
                if is_filled and ks * runs <= most and tile.shared_bytes(p) <= _SHARED:
                    yield tile


@register_gradient_family
class WeightGradFma(WeightGradFamily):
    """The family of a factor's weight gradient for few rows (csrc/cuda/weight_grad_fma.cuh)."""

    name = "weight_grad_fma"

    def tiles(self, p: Pattern, spec: DeviceSpec) -> Iterator[Config]:
        return configs(p)

    def launches(self, problem: GradientProblem, rows: int, device: DeviceSpec) -> Iterator[Launch]:
        """One share of all rows, the warps of a block share them; none of many rows."""
        (p,) = problem.factors
        if rows <= MOST_ROWS:
            all_rows = -(-rows // ROWS) * ROWS
            yield from (Launch(tile, 1, all_rows) for tile in self.tiles(p, device))

    def unsupported_pattern(self, p: Pattern, dtype: str, spec: DeviceSpec) -> str | None:
        return unsupported(p, dtype)
