"""The 16-bit family for some hundred rows, batch first (csrc/cuda/wgmma16_split.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ksopt.kernels import codegen
from ksopt.kernels.families import wgmma16, wgmma16_streamed
from ksopt.kernels.families.base import HALF, register_family
from ksopt.kernels.families.cost_terms import overlapped
from ksopt.kernels.families.mma16 import fold
from ksopt.kernels.families.packed import PackedFamily
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

MAX_BATCH = 512
"""More rows than this are computed rightly, but other families are the ones to try."""

_MOST_BLOCKS = 2**30  # never reached: its outputs would not fit into any device's memory

# The cost model's constants, of launches in a series. None is fitted: those of a cluster are of
# decode_mma16, the rates those of wgmma16_streamed.
_LAUNCH_US = 1.9  # with the latency of the first bytes
_ALONE_US = 0.4  # more, where the next kernel's blocks do not fit beside this one's
_DRAM_BYTES_US = 3_500_000.0
_FETCHED_BYTES_US = 108_000.0  # by one multiprocessor
_LATENCY_US = 0.8  # in which what a block's ring holds arrives from the L2 cache
_OUTPUT_US = 0.00058  # a warpgroup product of 64 rows, 16 l and one j, for each output
_UNIT_US = 0.065  # the least time of a warpgroup's products of a unit of l, one after the other
_STAGE_US = 0.01  # from a stage of the ring to the next
_NOT_AHEAD = 1.75  # times slower, where registers do not allow to load during products
_SUM_BYTES_US = 54_000.0  # sums written to shared memory and added
_REMOTE_BYTES_US = 31_000.0  # read from other blocks of a cluster
_CLUSTER_US = 0.7
_OVERLAP = 4.0


@dataclass(frozen=True)
class Config(wgmma16_streamed.Config):
    """Template arguments of ``Wgmma16SplitTile``; ``groups_n`` and ``team_j`` are 1.

    Attributes:
        cluster: blocks that share the sum over l of a tile.
    """

    cluster: int = 1


@register_family
class Wgmma16Split(PackedFamily[Config]):
    """Products by warpgroup instructions, summed by clusters of blocks."""

    name = "wgmma16_split"
    template = "wgmma16_split.cuh"
    dtypes = HALF
    layout = "batch_first"
    capability = (9, 0)
    capability_only = True
    packs_from_d = 1
    max_batch = MAX_BATCH

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        p = problem.pattern
        reason = None if p.d == 1 else wgmma16.unsupported_fold(p)
        if p.d == 1 and (p.b % 8 or p.c % 8):
            return f"b = {p.b} or c = {p.c} is not a multiple of 8"
        if reason is None and next(self.configs(problem, device), None) is None:
            return "no tile fits in shared memory"
        return reason

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p = problem.pattern
        for tile in wgmma16.tiles(problem, Config):
            if not tile.team_j == tile.groups_n == 1:
                continue
            for cluster in (1, 2, 4, 8):
                if cluster > 1 and (p.c % (tile.kl * cluster) or tile.nt % cluster):
                    continue
                if cluster > 1 and _sum_bytes(tile, p) > tile.stages * tile.stage_bytes(p):
                    continue
                yield replace(tile, max_blocks=_MOST_BLOCKS, cluster=cluster)

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        f = fold(p.d)
        width = config.groups_j * f.j
        blocks = -(-batch // config.rows) * config.columns(p) * config.cluster
        turns = -(-blocks // device.multiprocessors)
        units = -(-p.c // f.unit) / config.cluster
        # Bytes of one row, or of one output's weights, in a block.
        bytes_each = units * f.unit * width * 2
        fetched = (config.rows + config.outputs) * bytes_each
        product = f.steps * f.j * config.outputs * config.groups * _OUTPUT_US
        unit_us = max(product, _UNIT_US) * (1.0 if config.loads_ahead(p) else _NOT_AHEAD)
        us = _LAUNCH_US + (_ALONE_US if config.blocks == 1 else 0.0)
        us += overlapped(
            (
                (2 * p.nnz + 2 * batch * p.in_features) / _DRAM_BYTES_US,
                turns * fetched / _FETCHED_BYTES_US,
                turns * fetched / (config.stages * config.stage_bytes(p)) * _LATENCY_US,
                turns * units * (unit_us + f.unit / config.kl * _STAGE_US),
            ),
            _OVERLAP,
        )
        if config.cluster > 1:
            sums = _sum_bytes(config, p)
            remote = sums * (config.cluster - 1) / config.cluster
            us += turns * (_CLUSTER_US + sums / _SUM_BYTES_US + remote / _REMOTE_BYTES_US)
        return us

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        return Geometry(
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.pattern),
            rows_per_tile=config.rows,
            tiles_per_row_tile=config.columns(problem.pattern) * config.cluster,
            max_blocks=config.max_blocks,
            early=True,
        )

    def source(self, problem: Problem, config: Config) -> str:
        cluster = f"__cluster_dims__({config.cluster}, 1, 1) " if config.cluster > 1 else ""
        call = f"wgmma16_split_kernel<{self.dtypes[problem.dtype]}, Support, Tile>"
        kernel = codegen.kernel(self.kernel_name(problem), call, attributes=cluster)
        return self._tile(problem, config) + kernel

    def packed_elements(self, problem: Problem, config: Config) -> int:
        return config.packed_elements(problem.pattern)

    def packed_form(self, problem: Problem, config: Config) -> str:
        return wgmma16_streamed.packed_form(config)

    def pack_geometry(self, problem: Problem, config: Config) -> Geometry:
        return wgmma16_streamed.pack_geometry(problem, config)

    def pack_source(self, problem: Problem, config: Config) -> str:
        call = "wgmma16_streamed_pack_kernel<Support, Tile::Whole>"
        kernel = codegen.kernel(self.pack_name(problem), call, bounds="Tile::MULTIPLIERS")
        return self._tile(problem, config) + kernel

    def _tile(self, problem: Problem, config: Config) -> str:
        p, c = problem.pattern, config
        facts = {
            "Tile::SHARED_BYTES": c.shared_bytes(p),
            "Tile::COLUMNS * Tile::COLUMN_BYTES": 2 * c.packed_elements(p),
        }
        arguments = (c.groups_j, c.groups_m, c.nt, c.kl, c.stages, c.blocks, c.cluster)
        instance = f"Wgmma16SplitTile<Support, {', '.join(map(str, arguments))}>"
        return codegen.tile(self.template, p, instance, facts, self.name)


def _sum_bytes(config: Config, p: Pattern) -> int:
    """Bytes of a block's sums."""
    return 4 * config.rows * config.outputs * config.groups_j * fold(p.d).j
