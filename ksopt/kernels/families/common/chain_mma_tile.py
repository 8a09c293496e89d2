"""Tiles of csrc/cuda/chain_mma.cuh: the work of a block, and the memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from ksopt.patterns.chain import Pattern


@dataclass(frozen=True)
class Stage:
    """A factor as ``ChainStage`` computes it.

    Attributes:
        pattern: of the factor.
        size: bytes of an element.
        products: of two numbers, by tensor cores; 0 for ordinary arithmetic.
        mt, nt, jt: tiles of 16 rows, tiles of 8 outputs and neighbouring j of a warp's unit.
    """

    pattern: Pattern
    size: int
    products: int
    mt: int
    nt: int
    jt: int

    @property
    def step(self) -> int:
        """Values of l that are added at a time."""
        return 1 if self.products == 0 else 32 // self.size

    @property
    def steps(self) -> int:
        return -(-self.pattern.c // self.step)

    @property
    def planes(self) -> int:
        """Products of matrices, one for each (i, j)."""
        return self.pattern.a * self.pattern.d

    @property
    def tiles(self) -> int:
        """Tiles of 8 outputs of a plane."""
        return -(-self.pattern.b // 8)

    @property
    def row_features(self) -> int:
        """Features of a row that it reads, including the zeros after each sum's values."""
        return self.planes * self.steps * self.step

    def units(self, bm: int) -> int:
        """The units of work that the warps of a block share."""
        return self.planes // self.jt * (bm // (16 * self.mt)) * -(-self.tiles // self.nt)

    @property
    def packed_bytes(self) -> int:
        of_step = 8 * self.size if self.products == 0 else 256
        return self.planes * self.tiles * self.steps * of_step

    @property
    def registers(self) -> int:
        """Registers a thread, roughly: sums, operands, addresses."""
        sums = self.jt * self.mt * self.nt * 4
        weights = 4 * self.jt * self.nt
        return sums + weights + (40 if self.products == 3 else 16) + 48

    @property
    def arguments(self) -> str:
        """The arguments of the template."""
        p = self.pattern
        sizes = (self.size, p.a, p.b, p.c, p.d, self.products, self.mt, self.nt, self.jt)
        return ", ".join(map(str, sizes))


@dataclass(frozen=True)
class Config:
    """A tile; its fields are those of ``ChainMmaTile``.

    Attributes:
        bm: rows of a block.
        warps: of a block.
        mt: tiles of rows of a unit.
        nt: the most tiles of outputs of a unit.
        groups: equal shares of all factors' i; a block has one.
        blocks: that run on a multiprocessor at a time.
    """

    bm: int
    warps: int
    mt: int
    nt: int
    groups: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Rows of x that a block has at a time."""
        return self.bm

    @property
    def cluster(self) -> int:
        """Blocks that share the work on their rows."""
        return self.groups

    def shared_bytes(self, stages: tuple[Stage, ...]) -> int:
        """Dynamic shared memory of a block."""
        size, last = stages[0].size, stages[-1].pattern
        pitches = [_pitch(one.row_features * size) for one in stages]
        y = last.out_features * size
        pitches.append(_pitch(y) if y % 16 == 0 else y)
        regions = (max(pitches[which::2]) * self.bm for which in (0, 1))
        return sum(-(-region // 16) * 16 for region in regions)


def _pitch(row_bytes: int) -> int:
    """Bytes from a row to the next: an odd number of chunks."""
    return (-(-row_bytes // 16) | 1) * 16
