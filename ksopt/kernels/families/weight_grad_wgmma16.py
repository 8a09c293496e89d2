"""The weight gradient of a 16-bit factor on Hopper (csrc/cuda/weight_grad_wgmma16.cuh): kernels.

dY's features are multiplied by X's, all of one i by all of it: d times the sums that are
needed, and no operand is copied into another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.families.common.weight_grad import WeightGradFamily
from ksopt.kernels.families.gradient_base import register_gradient_family
from ksopt.kernels.problem import RESERVED_SHARED, DeviceSpec
from ksopt.patterns.chain import Pattern

MOST_D = 8
"""The largest d: more would multiply too much in vain."""

_SHARED = 233_472  # of a multiprocessor
# Fitted to 47 launches on an H200, within 4 % (docs/development/training.md): TFLOP/s of tiles,
# TB/s of memory, of the L2 cache and of shares, and how well the first three overlap.
TFLOPS, MEMORY, L2, SHARES, OVERLAP = 652.0, 3.47, 6.84, 2.76, 10.6
L2_FILLED = 0.83  # power of the share of the blocks that run
LAUNCH_US, ADDING_US = 3.5, 7.7


@dataclass(frozen=True)
class Config:
    """A block's tile.

    Attributes:
        groups: warpgroups, with 64 features of dY each.
        panels: of 64 features of X.
    """

    groups: int
    panels: int
    family = "weight_grad_wgmma16"

    def __str__(self) -> str:
        """The tile's name in profiles and experiments."""
        return f"wgmma16:{self.groups}x{self.panels}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups

    @property
    def rows(self) -> int:
        """Rows of a stage: fewer of wide tiles, so that several stages are in flight."""
        return 64 if self.groups + self.panels <= 4 else 32

    @property
    def blocks(self) -> int:
        """Blocks on a multiprocessor at a time: two where stages and sums are small."""
        return 2 if self.groups + self.panels <= 3 else 1

    @property
    def stages(self) -> int:
        """The number of stages: as many as fit."""
        return min(8, (_SHARED // self.blocks - RESERVED_SHARED) // self._stage_bytes)

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block: for every pattern the same."""
        return self.stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        return (self.groups + self.panels) * self.rows * 128

    def tiles(self, p: Pattern) -> int:
        """The number of tiles of the whole gradient."""
        return p.a * -(-p.b * p.d // (64 * self.groups)) * -(-p.c * p.d // (64 * self.panels))

    def declaration(self, p: Pattern) -> str:
        """``Support`` and ``Tile`` in C++."""
        return (
            f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
            f"using Tile = WeightGradTile<Support, {self.groups}, {self.panels}, {self.rows}, "
            f"{self.stages}, {self.blocks}>;\n"
        )

    def predicted_us(self, p: Pattern, rows: int, shares: int, spec: DeviceSpec) -> float:
        """Predicted microseconds: the slowest of products, memory and L2 cache, then the shares."""
        m, n = 64 * self.groups, 64 * self.panels
        tiles = self.tiles(p)
        at_a_time = spec.multiprocessors * self.blocks
        blocks = tiles * shares
        waves = -(-blocks // at_a_time)
        filled = blocks / (waves * at_a_time)
        products = 2 * rows * tiles * m * n / (TFLOPS * 1e6 * filled)
        memory = 2 * rows * p.a * (p.b + p.c) * p.d / (MEMORY * 1e6)
        l2 = 2 * rows * tiles * (m + n) / (L2 * 1e6 * filled**L2_FILLED)
        total = LAUNCH_US + overlapped((products, memory, l2), OVERLAP)
        if shares > 1:
            total += ADDING_US + 8 * p.nnz * shares / (SHARES * 1e6)
        return total


def unsupported(p: Pattern, dtype: str, spec: DeviceSpec) -> str | None:
    """Why no kernel computes a pattern's weight gradient; None if one does."""
    if spec.capability != (9, 0):
        return "needs a GPU of compute capability 9.0"
    if dtype not in HALF:
        return f"{dtype} is not one of {', '.join(HALF)}"
    if p.d > MOST_D:
        return f"d = {p.d} is more than {MOST_D}"
    if p.b * p.d % 8 or p.c * p.d % 8:
        return "b*d or c*d is not a multiple of 8, the elements of 16 bytes"
    return None


def configs() -> Iterator[Config]:
    """The tiles whose sums fit into registers."""
    for groups, most in ((1, 4), (2, 4), (3, 3), (4, 2)):
        for panels in range(1, most + 1):
            yield Config(groups, panels)


@register_gradient_family
class WeightGradWgmma16(WeightGradFamily):
    """The family of a factor's weight gradient (csrc/cuda/weight_grad_wgmma16.cuh)."""

    name = "weight_grad_wgmma16"

    def tiles(self, p: Pattern, spec: DeviceSpec) -> Iterator[Config]:
        return configs()

    def unsupported_pattern(self, p: Pattern, dtype: str, spec: DeviceSpec) -> str | None:
        return unsupported(p, dtype, spec)
