"""Predicted times of the tiles of batch_last32_wgmma: only the best few are compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksopt.kernels.batch_last import output_tiles
from ksopt.pattern import Pattern

if TYPE_CHECKING:
    from ksopt.kernels.batch_last32_wgmma import Config

_CYCLES_US = 1755.0
_TENSOR_CYCLES_US = 1457.0
_DRAM_BYTES_US = 31_000.0
_L2_BYTES_US = 55_000.0
_SHARED_BYTES_US = 210_000.0
_LATENCY_US = 1.2
_CHAIN_CYCLES = 198.0  # from a chain of products to the next, beside the products themselves
_PENDING = 0.41  # how much of that a chain under way hides
_STAGE_CYCLES = 98.0
_STORED_BYTES_CYCLE = 36.7
_LAUNCH_US = 5.0
_OVERLAP = 3.0

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
    streamed = 0 if config.resident else weight_bytes
    # Chains of products that a warpgroup computes one after the other.
    products = 3 if exact else 1
    steps = config.stages_per_tile(p) * config.kl // 8 * config.mt
    step_cycles = products * _STEP_CYCLES * config.nt * 8
    between = _CHAIN_CYCLES / (1 + _PENDING * config.pending)
    alone = steps / config.chain * (between + config.chain * step_cycles)
    alone += config.stages_per_tile(p) * _STAGE_CYCLES
    alone += y_bytes / _STORED_BYTES_CYCLE
    operands = steps * config.multipliers * products * 32 * config.nt * 8
    in_flight = (config.stages - 1) * config.kl * config.rows * 4
    demands = (
        (x_bytes / tiles + y_bytes) / _DRAM_BYTES_US,
        (x_bytes + y_bytes + streamed) / _L2_BYTES_US,
        (x_bytes * (1 + config.groups_n) + streamed + operands) / _SHARED_BYTES_US,
        x_bytes * _LATENCY_US / in_flight,
        config.multipliers * steps * step_cycles / _TENSOR_CYCLES_US,
        alone / _CYCLES_US,
    )
    # What comes close to the slowest of these adds to it: they do not overlap perfectly.
    tile_us = sum(demand**_OVERLAP for demand in demands) ** (1 / _OVERLAP)
    changes = -(-columns // groups) + 1 if config.resident else 0
    weights_us = changes * (1.0 + weight_bytes / _L2_BYTES_US)
    return float(rounds * tile_us + weights_us + _LAUNCH_US)
