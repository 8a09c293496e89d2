"""Predicted time of a tile, so that only the best few need to be compiled and measured.

The constants were fitted to 70 random tiles of each of 18 of the paper's patterns (fp16, batch
25,088, one H200); ``python -m ksopt.bench.tiles`` measures such tiles and says how much slower the
fastest of the best predicted is than the fastest of all (docs/performance.md has the numbers).
They stand for one multiprocessor, so that a device with more of them is predicted faster.
"""

from __future__ import annotations

import math

from ksopt.kernels.lanes16 import Config, fold
from ksopt.pattern import Pattern

_DRAM_BYTES_US = 32_300.0  # per multiprocessor and microsecond
_L2_BYTES_US = 22_500.0
_SHARED_BYTES_US = 107_800.0
_WEIGHT_BYTES_US = 20_000.0  # a block's weights, read and regrouped before it starts
_TENSOR_STEPS_US = 530.0  # m16n8k16 products
_STEP_US = 0.21  # a stage's barrier and latency
_LAUNCH_US = 4.0
_FULL_WARPS = 5.0  # with fewer on a multiprocessor, shared memory is not kept busy


def lanes16_us(p: Pattern, config: Config, batch: int, multiprocessors: int) -> float:
    """Predicted time of a tile of the lanes16 family.

    Args:
        p: the pattern.
        config: the tile.
        batch: rows of x.
        multiprocessors: of the device.

    Returns:
        Microseconds.
    """
    f = fold(p.d)
    columns = config.columns(p)
    tiles = -(-batch // config.rows) * columns
    slots = multiprocessors * config.blocks
    blocks = min(columns * config.walkers, tiles)
    waves = -(-blocks // slots)
    busy = multiprocessors * blocks / (waves * slots)

    x_bytes, y_bytes = 2 * batch * p.in_features, 2 * batch * p.out_features
    # Every block reads x for its own outputs; 16 bytes of a row cost the sector of 32.
    sector_waste = {1: 2.0, 2: 1.0, 3: 1.5}[config.warps_j] if p.d % 8 == 0 and p.d > 8 else 1.0
    x_reads = p.b / config.outputs * sector_waste
    steps = batch * p.nnz / 2048
    step_bytes = 512 / config.nt + 256 / config.mt  # fragments of x and of the weight
    warps = config.threads // 32 * config.blocks
    streaming = max(
        (x_bytes + y_bytes) / _DRAM_BYTES_US,
        (x_bytes * x_reads + y_bytes) / _L2_BYTES_US,
        (steps * step_bytes + x_bytes * x_reads + y_bytes)
        / (_SHARED_BYTES_US * min(1.0, warps / _FULL_WARPS)),
        steps / _TENSOR_STEPS_US,
    )
    stages = -(-tiles // blocks) * waves * -(-smallest_multiple(p.c, f.unit) // config.kl)
    weight_bytes = 2 * config.outputs * p.c * config.warps_j * f.j
    return (
        math.hypot(streaming / busy, stages * _STEP_US)
        + waves * weight_bytes / _WEIGHT_BYTES_US
        + _LAUNCH_US
    )


def smallest_multiple(value: int, of: int) -> int:
    """The smallest multiple of ``of`` that is not below ``value``."""
    return -(-value // of) * of
