"""The 16-bit family for batch first on Hopper's tensor cores (csrc/cuda/wgmma16.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import TypeVar

from ksopt.kernels import codegen
from ksopt.kernels.families.base import HALF, TemplateFamily, register_family
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.families.common.lane_layout import LaneLayout, lane_layout
from ksopt.kernels.families.common.output_tiles import (
    may_cover,
    padding,
    unsupported_outputs,
)
from ksopt.kernels.problem import RESERVED_SHARED, SHARED_LIMIT, DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_OUTPUT_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # for which wgmma_16bit.cuh has an instruction
_BARRIER_BYTES = 128
_MOST_NEIGHBOURS = 8  # of j, in a team
_MOST_STAGES = 8
_FEW_IDLE = 0.96  # of the teams are at work
_LOADER_REGISTERS = 24
_REGISTERS = 65536  # of a multiprocessor

# The cost model's constants: fitted to 142 tiles of 18 of the paper's patterns (fp16, batch 25,088,
# one H200). ``python docs/experiments/tiles.py wgmma16`` measures such tiles, and how much slower
# the best predicted ones are than the best (docs/development).
_DRAM_BYTES_US = 32_300.0  # per multiprocessor and microsecond
_L2_BYTES_US = 37_600.0  # of y, and of x's first reading; per multiprocessor too
_L2_REQUESTS_US = 100_000.0  # of the device; a request is of one line of 128 bytes
# Reading x again costs less than the first time: n readings cost as much as n to this power.
_AGAIN_BYTES, _AGAIN_REQUESTS = 0.63, 0.46
# But not where x comes in pieces of a row: per multiprocessor; the median of 516 tiles of 166
# patterns that read x six times and more has 32,800 (bf16, 8,192 rows, commit 1ce664a).
_PIECES_BYTES_US = 34_000.0
_LATENCY_US = 1.12  # in which what a block's ring holds arrives
_OUTPUT_US = 0.00103  # a warpgroup product of 64 rows, 16 l and one j, for each output
_NOT_AHEAD = 1.75  # times slower, where registers do not allow to load during products
_WEIGHT_BYTES_US = 18_000.0  # a block's weights, read and regrouped
_LAUNCH_US = 6.0
_OVERLAP = 4.3


@dataclass(frozen=True)
class Config:
    """Template arguments of ``Wgmma16Tile``, in its order and with its meaning."""

    groups_j: int
    groups_n: int
    groups_m: int
    nt: int
    kl: int
    stages: int
    blocks: int
    team_j: int
    max_blocks: int
    """Blocks of the largest launch, whole teams; not a template argument."""

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return self.groups_j * self.groups_n * self.groups_m

    @property
    def threads(self) -> int:
        """Threads a block, with the warpgroup that loads."""
        return 128 * (1 + self.groups)

    @property
    def rows(self) -> int:
        return 64 * self.groups_m

    @property
    def outputs(self) -> int:
        return 8 * self.nt * self.groups_n

    def columns(self, p: Pattern) -> int:
        """Blocks that together cover all outputs of the same rows."""
        return p.a * (p.d // (self.groups_j * lane_layout(p.d).j)) * -(-p.b // self.outputs)

    def team(self, p: Pattern) -> int:
        """Blocks that walk over the same bytes of x together."""
        return -(-p.b // self.outputs) * self.team_j

    def weight_bytes(self, p: Pattern) -> int:
        """Bytes of a block's weights in shared memory."""
        f = lane_layout(p.d)
        return -(-p.c // f.unit) * f.unit * self.groups_j * f.j * self.outputs * 2

    def shared_bytes(self, p: Pattern, stages: int | None = None) -> int:
        """Dynamic shared memory of a block, or of one with another number of stages."""
        f = lane_layout(p.d)
        width = self.groups_j * f.j
        spread = self.groups_j if p.d % 8 == 0 else f.run
        tiles = max(n for n in range(1, max(2, 16 // width + 1)) if self.nt % n == 0)
        chunks = tiles * width
        pitch = chunks + ((1 if spread == 2 else 4) - chunks) % 8
        slices = 4 * self.groups_m * self.groups_n * 16 * pitch * 16
        count = self.stages if stages is None else stages
        return _BARRIER_BYTES + self.weight_bytes(p) + count * self.stage_bytes(p) + slices

    def stage_bytes(self, p: Pattern) -> int:
        """Bytes of one stage of the ring."""
        return self.rows * self.kl * self.groups_j * lane_layout(p.d).j * 2

    def registers(self, p: Pattern) -> int:
        """Registers of a thread that multiplies, at the least: sums, operands, and addresses.

        Registers above this are spilled outside of the innermost loop.
        """
        f = lane_layout(p.d)
        return self.nt * f.j * 4 + f.j * f.steps * 4 + 8

    def loads_ahead(self, p: Pattern) -> bool:
        """``AHEAD`` of wgmma16.cuh: x is loaded while the tensor cores work."""
        f = lane_layout(p.d)
        operands = f.chunks * 8 + f.j * f.steps * 4
        return self.nt * f.j * 4 + operands + 20 <= self.register_limit

    @property
    def register_limit(self) -> int:
        """``MULTIPLIER_REGISTERS`` of wgmma16.cuh."""
        at_start = _REGISTERS // (self.threads * self.blocks) // 8 * 8
        return min(240, (at_start * (self.groups + 1) - _LOADER_REGISTERS) // self.groups // 8 * 8)


AnyConfig = TypeVar("AnyConfig", bound=Config)


def unsupported_layout(p: Pattern) -> str | None:
    """Why no tile computes ``p``, whatever fits in shared memory; None if some do."""
    if p.d % 8 != 0 and p.d not in (2, 3, 4, 6, 12):
        return f"d = {p.d} is not 2, 3, 4, 6, 12 or a multiple of 8"
    if p.c * p.d % 8 != 0:
        return f"c*d = {p.c * p.d} is not a multiple of 8, so rows of a group are not aligned"
    return unsupported_outputs(p.b)


def tiles(problem: Problem, kind: type[AnyConfig]) -> Iterator[AnyConfig]:
    """All tiles that fit, whatever the number of multiprocessors.

    Args:
        problem: what is computed.
        kind: this family's `Config`, or one derived from it.
    """
    p = problem.pattern
    f = lane_layout(p.d)
    for groups_j, groups_n, groups_m, nt in itertools.product(
        (1, 2, 3), (1, 2, 3), (1, 2, 3), _OUTPUT_TILES
    ):
        if groups_j * groups_n * groups_m > 3 or not may_cover(p.b, 8 * nt * groups_n):
            continue
        if groups_j not in _groups_j(p.d):
            continue
        groups = groups_j * groups_n * groups_m
        for kl, blocks in itertools.product((16, 32, 48, 64), (1, 2)):
            if not _staged(f, kl, groups_j, p) or (blocks > 1 and groups > 1):
                continue
            for team_j in _teams(p, groups_j * f.j):
                config = kind(groups_j, groups_n, groups_m, nt, kl, 0, blocks, team_j, 0)
                config = replace(config, stages=_stages(p, config))
                if config.stages >= 2 and config.registers(p) <= config.register_limit:
                    yield config


def most_blocks(p: Pattern, config: Config, multiprocessors: int) -> int:
    """The most blocks: whole teams, and where few are left idle, equal for groups of columns.

    No team then passes from one group to the next (docs/development/16-bit.md).
    """
    teams = max(1, multiprocessors * config.blocks // config.team(p))
    groups = config.columns(p) // config.team(p)
    even = teams // groups * groups
    return (even if even >= _FEW_IDLE * teams else teams) * config.team(p)


def _groups_j(d: int) -> tuple[int, ...]:
    """Warpgroups adjacent along j: for whole sectors of 32 bytes where d allows."""
    if d % 16 == 0:
        return (2,)
    return (1, 3) if d == 24 else (1,)


def _stages(p: Pattern, config: Config) -> int:
    """The number of stages: as many as fit, for the most loads of x in flight."""
    limit = (SHARED_LIMIT + RESERVED_SHARED) // config.blocks - RESERVED_SHARED
    one = config.shared_bytes(p, stages=1) - config.shared_bytes(p, stages=0)
    return min(_MOST_STAGES, (limit - config.shared_bytes(p, stages=0)) // one)


def _staged(f: LaneLayout, kl: int, groups_j: int, p: Pattern) -> bool:
    """Whether a stage may hold ``kl`` l: whole units, and rows without bank conflicts."""
    chunks = kl * groups_j * f.j // 8
    if kl % f.unit or (kl > f.unit and -(-p.c // f.unit) * f.unit % kl):
        return False
    return chunks <= 64 and (chunks % 8 == 0 or (chunks % 8 == 4 and groups_j != 2))


def _teams(p: Pattern, width: int) -> list[int]:
    """The numbers of adjacent j that walk together: one, a line of 128 bytes, or some more."""
    neighbours = p.d // width
    line = max(n for n in range(1, max(1, 64 // width) + 1) if neighbours % n == 0)
    return sorted({1, line, neighbours if neighbours <= _MOST_NEIGHBOURS else line})


@register_family
class Wgmma16(TemplateFamily[Config]):
    """Products by warpgroup instructions, each block with its weights in shared memory."""

    name = "wgmma16"
    template = "wgmma16.cuh"
    dtypes = HALF
    layout = "batch_first"
    capability = (9, 0)
    capability_only = True
    takes_epilogues = True
    takes_float32_results = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        reason = unsupported_layout(problem.pattern)
        if reason is None and next(self.configs(problem, device), None) is None:
            return "no tile's weights fit in shared memory"
        return reason

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        for config in tiles(problem, Config):
            yield replace(
                config, max_blocks=most_blocks(problem.pattern, config, device.multiprocessors)
            )

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        f = lane_layout(p.d)
        width = config.groups_j * f.j
        blocks = min(config.max_blocks, -(-batch // config.rows) * config.columns(p))
        busy = min(float(device.multiprocessors), blocks / config.blocks)

        x_bytes, y_bytes = 2 * batch * p.in_features, 2 * batch * p.out_features
        reads = -(-p.b // config.outputs)
        if width == p.d:  # all of a row's bytes, in one run
            sectors, request_bytes, fetched = 1.0, 128.0, 1.0
            in_pieces = 0.0
        else:
            sectors = 2.0 if width == 8 else 1.0  # 16 bytes cost a sector of 32
            request_bytes = 2.0 * width * max(1, 128 // (2 * p.d))
            # A line of 128 bytes comes from DRAM as a whole; a team uses so much of it at one time.
            line = min(64, p.d)
            fetched = line / min(line, width * config.team_j)
            in_pieces = sectors * (x_bytes * reads + y_bytes)
        ring = config.stages * config.rows * config.kl * width * 2 * config.blocks
        outputs = batch / 64 * p.nnz / 16 * padding(p.b, config.outputs)  # of all products
        slower = 1.0 if config.loads_ahead(p) else _NOT_AHEAD
        times = (
            (x_bytes * fetched + y_bytes) / (_DRAM_BYTES_US * device.multiprocessors),
            sectors
            * (x_bytes * reads**_AGAIN_BYTES + y_bytes)
            / (_L2_BYTES_US * device.multiprocessors),
            (x_bytes * reads**_AGAIN_REQUESTS + y_bytes) / request_bytes / _L2_REQUESTS_US,
            x_bytes * reads / busy / ring * _LATENCY_US,
            outputs * _OUTPUT_US * slower / busy,
            in_pieces / (_PIECES_BYTES_US * device.multiprocessors),
        )
        groups = p.a * (p.d // (width * config.team_j))
        fills = 1 + (groups - 1) / max(1, blocks // config.team(p))
        return (
            overlapped(times, _OVERLAP)
            + fills * config.weight_bytes(p) / _WEIGHT_BYTES_US
            + _LAUNCH_US
        )

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
        p = problem.pattern
        arguments = ", ".join(map(str, astuple(config)[:-1]))
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        call = f"wgmma16_kernel<{self.dtypes[problem.dtype]}, Support, Tile>"
        tile = codegen.tile(
            self.template, p, f"Wgmma16Tile<Support, {arguments}>", facts, self.name
        )
        return tile + codegen.kernel(self.kernel_name(problem), call, after=problem.epilogue)
