"""Predicted times of the tiles of exchange16. Nothing of it was fitted: it has not been timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksopt.pattern import Pattern

if TYPE_CHECKING:
    from ksopt.kernels.exchange16 import Config

# Of one multiprocessor of an H200, in bytes and flops of a microsecond. The rates of DRAM and of
# the tensor cores, and what reading from other blocks of a cluster and meeting them costs, are
# those that other families were measured with. The L2 cache's is a round figure: 5.5 TB/s in all.
_DRAM_BYTES_US = 31_800.0
_L2_BYTES_US = 41_700.0
_L2_REQUESTS_US = 758.0  # each of a line of 128 bytes
_FLOPS_US = 5.5e6
_REMOTE_BYTES_US = 31_000.0
_LATENCY_US = 1.05  # in which what has been asked for arrives
_SLICE_US = 0.8  # two meetings
_STAGE_US = 0.5  # a stage is handed out: one meeting, and what is computed for it
_LAUNCH_US = 4.0
_L2_BYTES = 40e6  # weights beyond this are read from DRAM for each tile of rows


def predicted_us(p: Pattern, config: Config, batch: int, multiprocessors: int) -> float:
    """Predicted time of a tile, with a weight that is packed already.

    Args:
        p: the pattern.
        config: the tile.
        batch: rows of x.
        multiprocessors: of the device.

    Returns:
        Microseconds.
    """
    tiles = -(-batch // config.rows) * config.tiles_of_rows(p)
    clusters = min(config.clusters, tiles)
    # What a block moves and computes for a tile, with two j.
    length = 2 * config.parts(p) * config.kl
    x_bytes, weight_bytes = 4 * config.rows * p.c, 2 * config.outputs * length
    y_bytes = 4 * config.rows * p.b / config.output_tiles(p)
    from_dram = x_bytes / config.output_tiles(p)
    if 2 * p.nnz > _L2_BYTES:
        from_dram += weight_bytes
    piece = 4 * config.cluster  # bytes of x and of y that lie side by side
    request = 128 if piece == 2 * p.d else piece * max(1, 64 // p.d)
    requests = (x_bytes + y_bytes) / request + weight_bytes / 128
    # DRAM serves all multiprocessors, be they busy or not.
    busy = clusters * config.cluster / multiprocessors
    moving = max(
        (x_bytes + weight_bytes + y_bytes) / _L2_BYTES_US,
        (from_dram + y_bytes) / _DRAM_BYTES_US * busy,
        requests / _L2_REQUESTS_US,
        (x_bytes + y_bytes) / _REMOTE_BYTES_US,
        config.parts(p) * _STAGE_US,
        # x is asked for some raw stages ahead, the weights some stages ahead.
        config.parts(p) * _LATENCY_US / (config.raw - 1),
        config.parts(p) * _LATENCY_US / (config.stages - 1),
    )
    multiplying = 2 * config.rows * config.outputs * length / _FLOPS_US
    storing = y_bytes / _REMOTE_BYTES_US + config.outputs / config.slice * _SLICE_US
    # While slices are exchanged nothing is multiplied, and what is free of the rings fills.
    ring = config.stages * config.stage_bytes + config.raw * config.raw_bytes
    filling = moving * min(1.0, ring / (x_bytes + weight_bytes))
    tile_us = max(multiplying + storing, moving + max(0.0, storing - filling))
    return float(-(-tiles // clusters) * tile_us) + _LAUNCH_US
