"""The 16-bit family for batch first whose weights are streamed (csrc/cuda/wgmma16_streamed.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from ksopt.kernels import codegen
from ksopt.kernels.families import wgmma16
from ksopt.kernels.families.base import HALF, register_family
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.families.common.lane_layout import lane_layout
from ksopt.kernels.families.common.packed_weight import PackedFamily
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

# The cost model's constants: fitted to 306 tiles of 45 patterns with large b*c (fp16, batch 25,088,
# one H200; docs/development/16-bit.md). By default of one multiprocessor.
_DRAM_BYTES_US = 32_300.0
_FETCHED_BYTES_US = 108_000.0
_SHARED_BYTES_US = 205_600.0
_L2_REQUESTS_US = 157_000.0  # of the device
_LATENCY_US = 1.28  # in which what a block's ring holds arrives
_OUTPUT_US = 0.00058  # a warpgroup product of 64 rows, 16 l and one j, for each output
_NOT_AHEAD = 1.75  # times slower, where registers do not allow to load during products
_STORED_BYTES_US = 100_000.0  # at the end of a tile, while nothing is multiplied
_LAUNCH_US = 7.0
_OVERLAP = 4.1

_PACKED_AT_ONCE = 64
"""Elements that a thread packs at a time, at most: ``AT_ONCE`` chunks of wgmma16.cuh."""
_PACKING_BLOCKS = 264  # two for each of an H200's multiprocessors


@dataclass(frozen=True)
class Config(wgmma16.Config):
    """Template arguments of ``Wgmma16StreamedTile``, in its order; ``blocks`` and ``team_j`` are 1.

    There are no teams: any block takes any outputs and j.
    """

    def weight_bytes(self, p: Pattern) -> int:
        """Zero, as weights are streamed: see `stage_bytes`."""
        return 0

    def stage_weight_bytes(self, p: Pattern) -> int:
        """Bytes of the weights that a stage holds."""
        return self.kl * self.groups_j * lane_layout(p.d).j * self.outputs * 2

    def stage_bytes(self, p: Pattern) -> int:
        return super().stage_bytes(p) + self.stage_weight_bytes(p)

    def packed_elements(self, p: Pattern) -> int:
        """Elements of the packed weight."""
        return self.columns(p) * wgmma16.Config.weight_bytes(self, p) // 2


def _pays(config: Config, p: Pattern) -> bool:
    """Whether the tile is worth considering.

    Where x comes in pieces, their number is what bounds it, and more outputs a block are worth
    more than loads that overlap with products.
    """
    return config.loads_ahead(p) or _width(config, p) < p.d


def _width(config: Config, p: Pattern) -> int:
    """Values of j that a block takes."""
    return config.groups_j * lane_layout(p.d).j


@register_family
class Wgmma16Streamed(PackedFamily[Config]):
    """Products by warpgroup instructions; weights pass through shared memory with x."""

    name = "wgmma16_streamed"
    template = "wgmma16_streamed.cuh"
    dtypes = HALF
    layout = "batch_first"
    capability = (9, 0)
    capability_only = True
    packs_from_d = 2
    takes_epilogues = True
    takes_float32_results = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        reason = wgmma16.unsupported_layout(problem.pattern)
        if reason is None and next(self.configs(problem, device), None) is None:
            return "no tile fits in shared memory"
        return reason

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        for config in wgmma16.tiles(problem, Config):
            if config.blocks == config.team_j == 1 and _pays(config, problem.pattern):
                yield replace(config, max_blocks=device.multiprocessors)

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        f = lane_layout(p.d)
        width = _width(config, p)
        tiles = -(-batch // config.rows) * config.columns(p)
        turns = -(
            -tiles // min(config.max_blocks, device.multiprocessors)
        )  # of the busiest multiprocessor
        # Bytes of one 16-bit number of every row, or of every output, in a turn.
        bytes_each = -(-p.c // f.unit) * f.unit * width * 2
        fetched = turns * (config.rows + config.outputs) * bytes_each
        # Rows go into shared memory once and out of it once for each warpgroup that needs them; so
        # do outputs' weights.
        rows, outputs = config.rows * (1 + config.groups_n), config.outputs * (1 + config.groups_m)
        x_bytes, y_bytes = 2 * batch * p.in_features, 2 * batch * p.out_features
        piece = 128.0 if width == p.d else 2.0 * width
        requests = (x_bytes * -(-p.b // config.outputs) + y_bytes) / piece
        requests += tiles * config.outputs * bytes_each / 128
        products = turns * config.rows / 64 * config.outputs * bytes_each / 32 / config.groups
        times = (
            (x_bytes + y_bytes) / (_DRAM_BYTES_US * device.multiprocessors),
            fetched / _FETCHED_BYTES_US,
            turns * (rows + outputs) * bytes_each / _SHARED_BYTES_US,
            fetched / (config.stages * config.stage_bytes(p)) * _LATENCY_US,
            requests / _L2_REQUESTS_US,
            products * _OUTPUT_US * (1.0 if config.loads_ahead(p) else _NOT_AHEAD),
        )
        stored = turns * config.rows * config.outputs * width * 2
        return overlapped(times, _OVERLAP) + stored / _STORED_BYTES_US + _LAUNCH_US

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        return Geometry(
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.pattern),
            rows_per_tile=config.rows,
            tiles_per_row_tile=config.columns(problem.pattern),
            max_blocks=config.max_blocks,
            early=True,
        )

    def source(self, problem: Problem, config: Config) -> str:
        call = f"wgmma16_streamed_kernel<{self.dtypes[problem.dtype]}, Support, Tile>"
        return self._tile(problem, config) + codegen.kernel(
            self.kernel_name(problem), call, after=problem.epilogue
        )

    def packed_elements(self, problem: Problem, config: Config) -> int:
        return config.packed_elements(problem.pattern)

    def packed_form(self, problem: Problem, config: Config) -> str:
        return f"wgmma16_streamed {config.groups_j} {config.outputs}"

    def pack_geometry(self, problem: Problem, config: Config) -> Geometry:
        p, threads = problem.pattern, 128 * config.groups
        columns = config.columns(p)
        turns = -(-config.packed_elements(p) // (columns * threads * _PACKED_AT_ONCE))
        blocks = columns * min(turns, -(-_PACKING_BLOCKS // columns))  # shares of each column
        return Geometry(threads, 0, 1, blocks, blocks)

    def pack_source(self, problem: Problem, config: Config) -> str:
        call = "wgmma16_streamed_pack_kernel<Support, Tile>"
        kernel = codegen.kernel(self.pack_name(problem), call, bounds="Tile::MULTIPLIERS")
        return self._tile(problem, config) + kernel

    def _tile(self, problem: Problem, config: Config) -> str:
        p = problem.pattern
        values = astuple(config)[:6]
        facts = {
            "Tile::SHARED_BYTES": config.shared_bytes(p),
            "Tile::COLUMNS * Tile::COLUMN_BYTES": 2 * config.packed_elements(p),
        }
        instance = f"Wgmma16StreamedTile<Support, {', '.join(map(str, values))}>"
        return codegen.tile(self.template, p, instance, facts, self.name)
