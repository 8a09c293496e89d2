"""Predicted times of mma_tf32x3's tiles: a roofline, not a fit.

The rates of memory, caches and shared memory are those that were fitted for the 16-bit family of
the same walk (mma16.py); that of the products is read off docs/performance.md: 54 effective
TFLOP/s of an H200 where d = 1, which splits the fewest values. For 16 of the patterns there, the
best predicted tile's time is 0.75 to 1.4 times that of the fastest tile measured: good enough to
choose what is compiled and timed.
"""

from __future__ import annotations

import math

from ksopt.kernels.families.cost_terms import overlapped
from ksopt.kernels.families.mma_tf32x3 import Config, fold
from ksopt.patterns.chain import Pattern

# Of one multiprocessor, in a microsecond.
_DRAM_BYTES = 32_300.0
_L2_BYTES = 22_500.0
_SHARED_BYTES = 107_800.0
_STEPS = {True: 215.0, False: 430.0}  # m16n8k8, exact (three products and their splits) or TF32
_STAGE_US = 0.25
_LAUNCH_US = 4.0
_SPLIT = 3.0  # what preparing the operands of a warp's steps costs, in steps
_OVERLAP = 4.0
_FULL_WARPS = 8.0  # with fewer on a multiprocessor, latency shows


def predicted_us(
    p: Pattern, config: Config, batch: int, multiprocessors: int, exact: bool = True
) -> float:
    """Predicted time of a tile of mma_tf32x3 in microseconds.

    Args:
        p: the pattern.
        config: the tile.
        batch: rows of x.
        multiprocessors: of the device.
        exact: FP32 accuracy rather than TF32's.
    """
    warps = config.threads // 32 * config.blocks
    pace = min(1.0, (warps / _FULL_WARPS) ** 0.4)
    step_us = (1 + _SPLIT / (config.mt * config.nt)) / (_STEPS[exact] * pace)
    # Fragments of x and of the weight for one step, reused mt and nt times.
    step_bytes = 256 / config.mt + 512 / config.nt
    f = fold(p.d)
    columns = config.columns(p)
    tiles = -(-batch // config.rows) * columns
    slots = multiprocessors * config.blocks
    blocks = min(config.max_blocks, tiles)
    rounds = -(-tiles // blocks) * -(-blocks // slots)
    busy = tiles / (rounds * slots)  # share of the multiprocessors' time that has work

    x_bytes, y_bytes = 4 * batch * p.in_features, 4 * batch * p.out_features
    # 16 bytes of a row cost the sector of 32.
    waste = 2.0 if p.d % 4 == 0 and p.d > 4 and config.warps_j == 1 else 1.0
    x_reads = p.b / config.outputs * waste
    width = config.warps_j * f.j
    weight_bytes = 4 * config.outputs * p.c * width
    streamed = 0 if config.resident else tiles * weight_bytes
    steps = batch * p.nnz / 1024
    demands = (
        (x_bytes + y_bytes) / _DRAM_BYTES,
        (x_bytes * x_reads + y_bytes + streamed) / _L2_BYTES,
        (steps * step_bytes + x_bytes * x_reads + y_bytes + streamed) / _SHARED_BYTES,
        steps * step_us,
    )
    streaming = overlapped(demands, _OVERLAP) / multiprocessors
    stages = rounds * -(-(-(-p.c // f.unit) * f.unit) // config.kl)
    first_weights = weight_bytes / _L2_BYTES if config.resident else 0.0
    return math.hypot(streaming / max(busy, 1e-3), stages * _STAGE_US) + first_weights + _LAUNCH_US
