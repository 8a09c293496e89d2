"""The weight gradient of a 16-bit factor with j in the lanes (csrc/cuda/weight_grad_mma16.cuh).

For each i and j it is a product of the k by the l. A thread loads several j of two rows at once,
and regroups them into the pairs that warps' tensor cores take: only the needed sums are computed,
and no operand is copied into another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.families.common.weight_grad import WeightGradFamily
from ksopt.kernels.families.gradient_base import register_gradient_family
from ksopt.kernels.problem import RESERVED_SHARED, DeviceSpec
from ksopt.patterns.chain import Pattern

_HOPPERS = 233_472  # bytes of shared memory of a multiprocessor
# Fitted to 731 launches on an H100, within 24 % (docs/development/training.md): TFLOP/s, TB/s of
# the L2 cache, of shared memory and of shares, and how well they overlap. Each piece of a row costs
# the L2 cache as much as PIECE_BYTES. Memory is an H200's, as in weight_grad_wgmma16.
TFLOPS, L2, SHARED, SHARES, OVERLAP = 178.0, 5.08, 18.2, 2.0, 7.0
PIECE_BYTES, MEMORY = 28.4, 3.47
LAUNCH_US, ADDING_US = 3.5, 5.0
FEWEST_STAGES, MOST_STAGES = 2, 6


@dataclass(frozen=True)
class Config:
    """A block's tile.

    Attributes:
        warps_k, warps_l: warps side by side in k and in l.
        warps_j: in groups of 8 j; 1 where d is no multiple of 8.
        runs_k, runs_l: of each thread: a warp has 8 times as many, of a few k or l each.
        rows: of a stage.
        blocks: on a multiprocessor at a time.
        memory: bytes of shared memory of a multiprocessor, which they fill with stages.
    """

    warps_k: int
    warps_l: int
    warps_j: int
    runs_k: int
    runs_l: int
    rows: int
    blocks: int
    memory: int = _HOPPERS
    family = "weight_grad_mma16"

    def __str__(self) -> str:
        """The tile's name in profiles and experiments."""
        warps = f"{self.warps_k}x{self.warps_l}x{self.warps_j}"
        return f"mma16:{warps}:{self.runs_k}x{self.runs_l}:{self.rows}:{self.blocks}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_k * self.warps_l * self.warps_j

    def sizes(self, p: Pattern) -> tuple[int, int, int]:
        """The k, l and j of a tile."""
        few = _few(p.d)
        j = 8 * self.warps_j if p.d % 8 == 0 else p.d
        return 8 * self.warps_k * self.runs_k * few, 8 * self.warps_l * self.runs_l * few, j

    def stages(self, p: Pattern) -> int:
        """The number of stages: as many as fit, up to a limit."""
        memory = self.memory // self.blocks - RESERVED_SHARED
        return min(MOST_STAGES, memory // self._stage_bytes(p))

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        return self.stages(p) * self._stage_bytes(p)

    def _stage_bytes(self, p: Pattern) -> int:
        k, l, j = self.sizes(p)
        return self.rows * 16 * sum(-(-size * j // 64) * 8 + 1 for size in (k, l))

    def tiles(self, p: Pattern) -> int:
        """The number of tiles of the whole gradient."""
        k, l, j = self.sizes(p)
        return p.a * (p.d // j) * -(-p.b // k) * -(-p.c // l)

    def declaration(self, p: Pattern) -> str:
        """``Support`` and ``Tile`` in C++."""
        numbers = (self.warps_k, self.warps_l, self.warps_j, self.runs_k, self.runs_l, self.rows)
        fields = ", ".join(map(str, (*numbers, self.stages(p), self.blocks)))
        return (
            f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
            f"using Tile = WeightGradMmaTile<Support, {fields}>;\n"
        )

    def predicted_us(self, p: Pattern, rows: int, shares: int, spec: DeviceSpec) -> float:
        """Predicted microseconds: the slowest of products and memories, then the shares."""
        k, l, j = self.sizes(p)
        tiles = self.tiles(p)
        at_a_time = spec.multiprocessors * self.blocks
        blocks = tiles * shares
        waves = -(-blocks // at_a_time)
        filled = blocks / (waves * at_a_time)
        read = 2 * rows * tiles * (k + l) * j
        piece = 2 * j * (min(k, l) if j == p.d else 1)
        # A thread reads 4 * 16 bytes of each chunk of its runs for every 16 rows.
        chunks = (self.runs_k + self.runs_l) * (3 if p.d == 12 else 1)
        through_shared = read + rows / 16 * tiles * self.threads * 64 * chunks
        terms = (
            2 * rows * tiles * k * l * j / (TFLOPS * 1e6 * filled),
            read * (1 + PIECE_BYTES / piece) / (L2 * 1e6 * filled),
            2 * rows * p.a * (p.b + p.c) * p.d / (MEMORY * 1e6),
            through_shared / (SHARED * 1e6 * filled),
        )
        total = LAUNCH_US + overlapped(terms, OVERLAP)
        if shares > 1:
            total += ADDING_US + 8 * p.nnz * shares / (SHARES * 1e6)
        return total


def _few(d: int) -> int:
    """The k (or l) of a run: the chunks of 16 bytes that hold whole ones."""
    if d % 8 == 0:
        return 1
    return (8 if 8 % d == 0 else 24) // d


def unsupported(p: Pattern, dtype: str, spec: DeviceSpec) -> str | None:
    """Why no kernel computes a pattern's weight gradient; None if one does."""
    if spec.capability < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    if dtype not in HALF:
        return f"{dtype} is not one of {', '.join(HALF)}"
    if p.d not in (2, 4, 12) and p.d % 8:
        return f"d = {p.d} is not 2, 4, 12 or a multiple of 8"
    if p.b * p.d % 8 or p.c * p.d % 8:
        return "b*d or c*d is not a multiple of 8, the elements of 16 bytes"
    if not any(configs(p, spec.shared_bytes)):
        return "no tile fits into shared memory"
    return None


def configs(p: Pattern, memory: int = _HOPPERS) -> Iterator[Config]:
    """The tiles of a pattern: those whose sums fit into registers, and that are not half empty.

    Args:
        p: the pattern.
        memory: bytes of shared memory of a multiprocessor.
    """
    for warps, runs in _shapes(p.d):
        blocks = max(1, 8 // (warps[0] * warps[1] * warps[2]))
        tile = Config(*warps, *runs, 32, blocks, memory)
        if tile.stages(p) < (4 if p.d % 8 == 0 else 3):
            tile = replace(tile, rows=16)
        k, l, j = tile.sizes(p)
        is_filled = k - k // warps[0] < p.b and l - l // warps[1] < p.c
        if p.d % j == 0 and is_filled and tile.stages(p) >= FEWEST_STAGES:
            yield tile


def _shapes(d: int) -> Iterator[tuple[tuple[int, int, int], tuple[int, int]]]:
    """Warps (k, l, j) and runs (k, l) of tiles, with 128 sums a thread at most, 64 of 12 warps.

    32 neighbouring bytes of a row are read together at least, a sector of the L2 cache: so two
    groups of 8 j where d allows it.
    """
    if d % 8 == 0:
        for warps_j in (2, 4) if d % 16 == 0 else (1, 3):
            for several in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (4, 1), (1, 4)):
                if several[0] * several[1] * warps_j > 8:
                    continue
                for runs in ((2, 2), (2, 3), (2, 4)):
                    if several != (3, 1) or runs != (2, 4):  # which spills registers
                        yield (*several, warps_j), runs
            if warps_j == 1:
                yield from (((*several, 1), (2, 4)) for several in ((4, 2), (2, 4), (3, 2), (2, 3)))
        return
    whole = {2: (2, 1), 4: (2, 2), 12: (1, 1)}[d]
    for several in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (4, 2), (2, 4), (8, 1), (1, 8)):
        yield (*several, 1), whole
    if d == 4:
        for several in ((4, 3), (3, 4), (6, 2), (2, 6)):
            yield from (((*several, 1), runs) for runs in ((1, 2), (2, 1)))


@register_gradient_family
class WeightGradMma16(WeightGradFamily):
    """The family of a factor's weight gradient (csrc/cuda/weight_grad_mma16.cuh)."""

    name = "weight_grad_mma16"

    def tiles(self, p: Pattern, spec: DeviceSpec) -> Iterator[Config]:
        return configs(p, spec.shared_bytes)

    def unsupported_pattern(self, p: Pattern, dtype: str, spec: DeviceSpec) -> str | None:
        return unsupported(p, dtype, spec)
