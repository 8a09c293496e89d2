"""Predicted times of the tiles of batch_last_wgmma_tf32x3: only the best few are timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksopt.kernels.families.batch_last import output_tiles
from ksopt.kernels.families.cost_terms import chains_cycles, overlapped
from ksopt.patterns.chain import Pattern

if TYPE_CHECKING:
    from ksopt.kernels.families.batch_last_wgmma_tf32x3 import Config

# Of one multiprocessor of an H200, in bytes, cycles and microseconds, fitted together to 324 tiles
# of 24 of the paper's patterns (exact products, batch 25,088, as many stages as fit): half of them
# are within 6 %, and the fastest of a pattern's three best predicted was a mean 1.3 %, at worst
# 13 % slower than the fastest of its tiles.
_CYCLES_US = 1755.0
_TENSOR_CYCLES_US = 2130.0
_DRAM_BYTES_US = 38_060.0
_SHARED_BYTES_US = 180_900.0  # x, weights, and what the tensor cores read
_WEIGHT_BYTES_US = 54_200.0  # a column's resident weights
_COLUMN_US = 0.93  # latency of a change of column
_LATENCY_US = 1.05  # in which what the ring holds arrives
_CHAIN_CYCLES = 122.0  # from a chain of products to the next, beside the products themselves
_PENDING = 0.5  # how much of that a chain under way hides
_STAGE_CYCLES = 152.0
_ROW_CYCLES = 25.5  # a row of a stage, which one instruction copies
_STORED_BYTES_CYCLE = 16.25  # of a warpgroup
_LAUNCH_US = 8.4
_OVERLAP = 2.58

_STEP_CYCLES = 0.5  # of the tensor cores for 64 columns, 8 l and an output, each of three products


def predicted_us(
    p: Pattern, config: Config, batch: int, multiprocessors: int, exact: bool = True
) -> float:
    """Predicted time of a tile, with a weight that is packed already.

    Args:
        p: the pattern.
        config: the tile.
        batch: rows of x.
        multiprocessors: of the device.
        exact: FP32 accuracy rather than TF32's (for which nothing was fitted).

    Returns:
        Microseconds.
    """
    tiles, columns = output_tiles(p, config.outputs), p.a * p.d
    items = -(-batch // config.rows) * columns
    groups = min(config.groups, items)
    rounds = -(-items // groups) * -(-groups * tiles // multiprocessors)

    x_bytes = 4 * config.rows * p.c
    y_bytes = 4 * config.rows * min(config.outputs, p.b)
    weight_bytes = config.column_bytes(p, exact)
    products, outputs = 3 if exact else 1, config.nt * 8
    stages = config.stages_per_tile(p)
    steps = stages * config.kl // 8 * config.mt
    step_cycles = products * _STEP_CYCLES * outputs
    # Chains of products that a warpgroup computes one after the other, and what it stores then.
    hidden = 1 + _PENDING * config.pending
    alone = chains_cycles(steps, config.chain, step_cycles, _CHAIN_CYCLES, hidden)
    alone += stages * _STAGE_CYCLES + y_bytes / _STORED_BYTES_CYCLE
    operands = steps * config.multipliers * products * 32 * outputs
    through_shared = x_bytes * (1 + config.groups_n) + operands
    if not config.resident:
        through_shared += weight_bytes
    in_flight = (config.stages - 1) * config.kl * config.rows * 4
    demands = (
        (x_bytes / tiles + y_bytes) / _DRAM_BYTES_US,
        through_shared / _SHARED_BYTES_US,
        x_bytes * _LATENCY_US / in_flight,
        config.multipliers * steps * step_cycles / _TENSOR_CYCLES_US,
        alone / _CYCLES_US,
        stages * config.kl * _ROW_CYCLES / _CYCLES_US,
    )
    tile_us = overlapped(demands, _OVERLAP)
    weights_us = 0.0
    if config.resident:
        weights_us = (columns / groups + 1) * (_COLUMN_US + weight_bytes / _WEIGHT_BYTES_US)
    return float(rounds * tile_us + weights_us + _LAUNCH_US)
