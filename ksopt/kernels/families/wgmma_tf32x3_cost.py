"""Predicted times of the tiles of wgmma_tf32x3: only the best few are compiled and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksopt.kernels.families.cost_terms import chains_cycles, overlapped
from ksopt.kernels.families.mma_tf32x3 import fold
from ksopt.patterns.chain import Pattern

if TYPE_CHECKING:
    from ksopt.kernels.families.wgmma_tf32x3 import Config

# Of one multiprocessor of an H200, in bytes, cycles and microseconds, fitted to 298 tiles of 47 of
# the paper's patterns (exact products, batch 25,088, as many stages as fit): the fastest of a
# pattern's three best predicted was a mean 0.3 %, at worst 6 % slower than the fastest of its
# tiles.
_CYCLES_US = 1755.0
_TENSOR_CYCLES_US = 1457.0
_DRAM_BYTES_US = 31_800.0
_L2_BYTES_US = 54_900.0
_CHAIN_CYCLES = 198.0  # from a chain of products to the next, beside the products themselves
_PENDING = 0.41  # how much of that a chain under way hides
_STAGE_CYCLES = 98.0
_COPY_CYCLES = 79.0  # for a chunk of each thread that copies
_STORED_BYTES_CYCLE = 36.7
_LAUNCH_US = 6.2
_OVERLAP = 3.0
_READ_AGAIN = 0.39  # share of x that another block no longer finds in the L2 cache
_PART_OF_SECTOR = 5.2  # cost of each byte of a sector that a store leaves out

_STEP_CYCLES = 0.5  # of the tensor cores for 64 rows, 8 l and an output, each of three products


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
    f = fold(p.d)
    width = config.warpgroups_j * f.j
    products = 3 if exact else 1
    columns, output_tiles = config.columns(p), p.b // config.outputs
    row_tiles = -(-batch // config.rows)
    blocks = min(config.max_blocks, row_tiles * columns)
    if config.resident:
        rounds = -(-row_tiles // (blocks // columns))
    else:
        rounds = -(-row_tiles * columns // blocks)
    rounds *= -(-blocks // multiprocessors)

    # Bytes of a tile; runs of x and y narrower than a sector of 32 bytes cross in whole sectors.
    sectors = 1.0
    if p.d > width:
        sectors = 2.0 if width == 4 else 4 / 3 if width == 12 else 1.0
    x_bytes = 4 * config.rows * p.c * width
    y_bytes = 4 * config.rows * config.outputs * width
    weight_bytes = (8 if exact else 4) * config.outputs * p.c * width
    again = x_bytes * (1 - 1 / output_tiles) * _READ_AGAIN if config.resident else 0.0
    memory = x_bytes / output_tiles + y_bytes + again + (sectors - 1) * y_bytes * _PART_OF_SECTOR
    cache = (x_bytes + y_bytes) * sectors + (0 if config.resident else weight_bytes)

    # Chains of products that a warpgroup computes one after the other.
    steps = -(-p.c // f.unit) * f.unit // 8 * f.j
    step_cycles = products * _STEP_CYCLES * config.outputs
    hidden = 1 + _PENDING * config.pending
    alone = chains_cycles(steps, config.chain, step_cycles, _CHAIN_CYCLES, hidden)
    alone += -(-p.c // config.kl) * _STAGE_CYCLES + y_bytes * sectors / _STORED_BYTES_CYCLE
    demands = (
        memory / _DRAM_BYTES_US,
        cache / _L2_BYTES_US,
        config.warpgroups_j * config.warpgroups_m * steps * step_cycles / _TENSOR_CYCLES_US,
        alone / config.teams / _CYCLES_US,
        x_bytes / 16 / 128 * _COPY_CYCLES / _CYCLES_US,
    )
    tile_us = overlapped(demands, _OVERLAP)
    first_weights_us = weight_bytes / _L2_BYTES_US if config.resident else 0.0
    return float(rounds * tile_us + first_weights_us + _LAUNCH_US)
