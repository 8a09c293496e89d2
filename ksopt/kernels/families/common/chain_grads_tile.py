"""Both weight gradients of a chain in one launch (csrc/cuda/chain_grads_wgmma16.cuh): its tiles.

The first blocks of the grid have tiles of the left factor's gradient, the others of the right
one's. How the rows are split decides when they end: all at about the same time, in one wave.
Siblings, chains of the same patterns on the same x, share the waves of a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ksopt.kernels.families import weight_grad_wgmma16 as factors
from ksopt.kernels.families.common import weight_grad
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.problem import RESERVED_SHARED, DeviceSpec
from ksopt.patterns.chain import Pattern

ROWS = weight_grad.ROWS
"""The rows of a block are a multiple of this: whole stages."""
CLUSTERS = (1, 2, 3, 4, 8)
MOST_SIBLINGS = 4
"""Chains of a launch."""

_SHARED = 233_472  # of a multiprocessor
_WIDEST = {1: 4, 2: 4, 3: 3, 4: 2}  # warpgroups: panels whose sums fit into registers
_CLUSTERED = 16  # multiprocessors of a group, which a cluster lies within
# Bytes that a multiprocessor sends to others of its cluster in a microsecond (published times of
# an H100), and a cluster's start and barriers: of 13 launches on an H200 those of one wave took 2
# to 9 us more than is predicted without it (docs/development/training.md).
_SENT_BYTES_US, _CLUSTER_US = 25_000.0, 7.5
_AT_A_TIME = {4: 30, 8: 14}
"""Cluster size -> clusters that ran at a time: 16 of 8 took 1.5 times as long as 14."""


@dataclass(frozen=True)
class Tile:
    """The part of one factor's gradient that a block computes.

    Attributes:
        m_groups: of 64 features of dY.
        panels: of 64 features of X.
    """

    m_groups: int
    panels: int

    @property
    def m(self) -> int:
        """The tile's features of dY."""
        return 64 * self.m_groups

    @property
    def n(self) -> int:
        """The tile's features of X."""
        return 64 * self.panels

    @property
    def rows(self) -> int:
        """Rows of a stage: fewer of wide tiles, so that several stages are in flight."""
        return 64 if self.m_groups + self.panels <= 4 else 32

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: the rows of both operands."""
        return (self.m_groups + self.panels) * self.rows * 128

    def count(self, p: Pattern) -> int:
        """The number of tiles of the whole gradient."""
        return p.a * -(-p.b * p.d // self.m) * -(-p.c * p.d // self.n)

    def stored_sums(self, p: Pattern) -> int:
        """The number of sums that leave the registers: for even d every second column."""
        return self.m * self.n // (2 if p.d % 2 == 0 else 1)


@dataclass(frozen=True)
class Config:
    """The composition of blocks and clusters.

    Attributes:
        groups: warpgroups of a block.
        cluster: blocks that share a tile's rows, and add their sums up.
        left: tile of the left factor.
        right: of the right one.
    """

    groups: int
    cluster: int
    left: Tile
    right: Tile

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups

    @property
    def blocks(self) -> int:
        """Blocks on a multiprocessor at a time: two where stages and sums are small."""
        return 2 if self.groups + max(self.left.panels, self.right.panels) <= 3 else 1

    @property
    def _most_shared(self) -> int:
        return _SHARED // self.blocks - RESERVED_SHARED

    def stages(self, tile: Tile) -> int:
        """Stages of one of the tiles: as many as fit."""
        return min(8, self._most_shared // tile.stage_bytes)

    def sources(self, tile: Tile) -> int:
        """The number of warpgroups of a cluster with sums of the same elements."""
        return self.cluster * (self.groups // tile.m_groups)

    def shared_bytes(self, chain: Chain) -> int:
        """Shared memory of a block in bytes: the stages, later the sums sent within the cluster."""
        needed = self.groups * 4096  # sums for the bias
        for tile, p in zip((self.left, self.right), chain, strict=True):
            needed = max(needed, self.stages(tile) * tile.stage_bytes, self._sent_bytes(tile, p))
        return needed

    def _sent_bytes(self, tile: Tile, p: Pattern) -> int:
        if self.sources(tile) == 1:
            return 0
        chunks = tile.stored_sums(p) // (tile.m_groups * 128 * 4)
        of_sums = self.sources(tile) * -(-chunks // self.cluster) * tile.m_groups * 128 * 16
        return of_sums + self.sources(tile) * tile.m * 4

    def fits(self, chain: Chain) -> bool:
        """Whether a multiprocessor has the memory, and each warpgroup a part of each stage."""
        return self.shared_bytes(chain) <= self._most_shared and all(
            self.groups % tile.m_groups == 0
            and tile.rows // 16 % (self.groups // tile.m_groups) == 0
            and self.stages(tile) >= 4
            for tile in (self.left, self.right)
        )

    def clusters(self, spec: DeviceSpec) -> int:
        """Clusters that a device runs at a time."""
        if self.cluster <= 2:
            return spec.multiprocessors // self.cluster * self.blocks
        most = spec.multiprocessors // _CLUSTERED * (_CLUSTERED // self.cluster)
        return min(most, _AT_A_TIME.get(self.cluster, most)) * self.blocks


Chain = tuple[Pattern, Pattern]
"""The left factor and the right one."""


@dataclass(frozen=True)
class Launch:
    """A launch that computes the gradients.

    Attributes:
        config: of the blocks.
        shares: clusters with the same tile, of the left factor and of the right one; where there
            are several a second kernel adds their sums.
        rows_per_block: of each factor's blocks, multiples of `ROWS`.
        siblings: chains whose gradients are computed.
    """

    config: Config
    shares: tuple[int, int]
    rows_per_block: tuple[int, int]
    siblings: int = 1

    def blocks(self, chain: Chain) -> int:
        """Blocks of the grid."""
        tiles = (self.config.left, self.config.right)
        counts = (
            tile.count(p) * shares
            for tile, p, shares in zip(tiles, chain, self.shares, strict=True)
        )
        return sum(counts) * self.siblings * self.config.cluster


def unsupported(chain: Chain, dtype: str, spec: DeviceSpec, siblings: int = 1) -> str | None:
    """Why no kernel computes a chain's weight gradients; None if one does."""
    if siblings > MOST_SIBLINGS:
        return f"{siblings} siblings are more than {MOST_SIBLINGS}"
    for p in chain:
        reason = factors.unsupported(p, dtype, spec)
        if reason is not None:
            return f"{p}: {reason}"
        if p.a == p.d == 1:
            return f"{p} is one matrix, whose sums over rows cuBLAS splits itself"
    return None


def configs(chain: Chain) -> Iterator[Config]:
    """The configurations that a multiprocessor can run."""
    for groups, most in _WIDEST.items():
        tiles = [
            Tile(m_groups, panels)
            for m_groups in range(1, groups + 1)
            for panels in range(1, most + 1)
            if groups % m_groups == 0
        ]
        for cluster, left, right in product(CLUSTERS, tiles, tiles):
            config = Config(groups, cluster, left, right)
            if config.fits(chain):
                yield config


def launches_of(
    config: Config, chain: Chain, rows: int, spec: DeviceSpec, siblings: int = 1
) -> Iterator[Launch]:
    """The launches worth considering: one cluster per tile, and those that fill one wave."""
    tiles = (config.left.count(chain[0]) * siblings, config.right.count(chain[1]) * siblings)
    at_a_time = config.clusters(spec)
    if at_a_time == 0:
        return  # a part of a GPU may have fewer multiprocessors than a cluster takes
    yield launch_of(config, rows, (1, 1), siblings)
    for of_left in range(1, min(24, at_a_time // tiles[0]) + 1):
        of_right = (at_a_time - of_left * tiles[0]) // tiles[1]
        if of_right > 0 and (of_left, of_right) != (1, 1):
            yield launch_of(config, rows, (of_left, of_right), siblings)


def launch_of(config: Config, rows: int, shares: tuple[int, int], siblings: int = 1) -> Launch:
    """The launch with this many shares, or fewer where some would be empty."""
    stages = max(1, -(-rows // ROWS))
    of_block = [-(-stages // (share * config.cluster)) for share in shares]
    shares_used = [-(-stages // (one * config.cluster)) for one in of_block]
    return Launch(
        config,
        (shares_used[0], shares_used[1]),
        (of_block[0] * ROWS, of_block[1] * ROWS),
        siblings,
    )


def predicted_us(launch: Launch, chain: Chain, rows: int, spec: DeviceSpec) -> float:
    """Predicted microseconds: the slowest of products, memory and L2, then moving the sums.

    The rates of these are `weight_grad_wgmma16`'s, which were measured. Siblings read x from memory
    once.
    """
    config, siblings = launch.config, launch.siblings
    at_a_time = spec.multiprocessors * config.blocks
    waves = -(-launch.blocks(chain) // (config.clusters(spec) * config.cluster))
    multiplied, read, all_read, sent = 0.0, 0.0, 0.0, 0.0
    shares_bytes = 0.0
    for tile, p, shares, of_block in zip(
        (config.left, config.right), chain, launch.shares, launch.rows_per_block, strict=True
    ):
        of_block = min(rows, of_block)
        multiplied = max(multiplied, 2.0 * of_block * tile.m * tile.n)
        one = 2.0 * of_block * (tile.m + tile.n)
        blocks = tile.count(p) * shares * config.cluster * siblings
        read, all_read = max(read, one), all_read + one * blocks
        if config.sources(tile) > 1:
            sent = max(sent, 4.0 * tile.stored_sums(p))
        shares_bytes += 8.0 * p.nnz * shares * siblings if shares > 1 else 0.0
    products = waves * multiplied * at_a_time / (factors.TFLOPS * 1e6)
    filled = all_read / (waves * at_a_time * read)
    left, right = chain
    own = left.out_features + left.in_features + right.out_features
    features = siblings * own + right.in_features
    memory = 2.0 * rows * features / (factors.MEMORY * 1e6)
    l2 = all_read / (factors.L2 * 1e6 * filled**factors.L2_FILLED)
    total = factors.LAUNCH_US + overlapped((products, memory, l2), factors.OVERLAP)
    if sent:
        total += _CLUSTER_US + waves * sent * config.blocks / _SENT_BYTES_US
    if shares_bytes:
        total += factors.ADDING_US + shares_bytes / (factors.SHARES * 1e6)
    return total
