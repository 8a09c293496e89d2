"""Predicted times of the tiles of csrc/cuda/chain_wgmma16.cuh."""

from __future__ import annotations

from ksopt.kernels.families.chain_tile import Config, Epilogue, Shape, configs
from ksopt.kernels.families.cost_terms import overlapped
from ksopt.kernels.problem import DeviceSpec

# The cost model's constants, of one multiprocessor: fitted to 144 tiles of 24 chains (bf16, 25,088
# rows, one H200; docs/performance/chains.md).
_READ_BYTES_US = 24_000.0
_WRITTEN_BYTES_US = 37_800.0
_SHARED_BYTES_US = 138_000.0
_LATENCY_US = 0.99  # in which what a block's ring holds arrives
_BETWEEN_US = 0.086  # from a group of a warpgroup's products to its next
_ACTIVATION_US = 1.43e-4  # of an output
_LAUNCH_US = 5.8
_OVERLAP = 1.97


def predicted_us(
    s: Shape, tile: Config, batch: int, device: DeviceSpec, epilogue: Epilogue | None = None
) -> float:
    """Predicted time of a tile, in microseconds: one phase after the other."""
    e = epilogue or Epilogue()
    units = -(-batch // 64)
    of_block = -(-units // (device.multiprocessors * tile.blocks))  # the busiest block's
    passes = -(-of_block // tile.groups) * tile.blocks
    at_a_time = min(tile.groups, of_block) * tile.blocks
    of_block *= tile.blocks
    left, right = s.left, s.right
    first, second = tile.ring_slots(s)
    right_bytes = first * tile.columns(s) * tile.ks * 2
    left_bytes = second * tile.second_slot_bytes
    chunks = -(-left.b // tile.nk)
    features = s.siblings * left.out_features
    # Of 64 rows. z goes into shared memory once, and out of it for each chunk of outputs.
    x_bytes = 128 * right.a * -(-right.c // tile.ks) * tile.ks * tile.splits
    z_bytes = s.classes * s.steps * 2048
    y_bytes = 128 * features * (2 if e.residual else 1)
    groups = s.siblings * chunks * left.d * s.steps / tile.at_once
    ring = tile.stages * max(tile.first_slot_bytes(s), tile.second_slot_bytes)
    activated = 64 * features if e.activation != "none" else 0
    return (
        _LAUNCH_US
        + overlapped(
            (
                of_block * 128 * right.in_features / _READ_BYTES_US,
                (passes * right_bytes + of_block * (2 * x_bytes + right_bytes)) / _SHARED_BYTES_US,
                (passes * right_bytes + of_block * x_bytes) / ring * _LATENCY_US,
            ),
            _OVERLAP,
        )
        + overlapped(
            (
                of_block * y_bytes / _WRITTEN_BYTES_US,
                (passes * left_bytes + of_block * (left_bytes + z_bytes * chunks))
                / _SHARED_BYTES_US,
                passes * left_bytes / ring * _LATENCY_US,
                of_block / at_a_time * groups * _BETWEEN_US,
                of_block * activated * _ACTIVATION_US,
            ),
            _OVERLAP,
        )
    )


def best(
    s: Shape, batch: int, device: DeviceSpec, epilogue: Epilogue | None = None, count: int = 1
) -> list[Config]:
    """The tiles with the least predicted times, the best first."""
    candidates = configs(s, device, epilogue is not None and epilogue.residual)
    ranked = sorted(candidates, key=lambda t: predicted_us(s, t, batch, device, epilogue))
    return ranked[:count]
