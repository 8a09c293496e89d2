"""Predicted times of the tiles of csrc/cuda/chain_wgmma16.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from ksopt.epilogue import parts_of_result
from ksopt.kernels.families.common.chain_tile import Config, Epilogue, Shape, configs
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.problem import DeviceSpec

# The cost model's constants, of one multiprocessor: fitted to 144 tiles of 24 chains (bf16, 25,088
# rows, one H200; docs/development/chains.md).
READ_BYTES_US = 24_000.0
WRITTEN_BYTES_US = 37_800.0
SHARED_BYTES_US = 138_000.0
LATENCY_US = 0.99  # of the loads that fill a block's ring
BETWEEN_US = 0.086  # between two groups of a warpgroup's products
ACTIVATION_US = 1.43e-4  # of an output
LAUNCH_US = 5.8
OVERLAP = 1.97
# Not fitted: the bandwidth at which one multiprocessor can read (decode_mma16) and send to others
# of its cluster (published times of an H100), and the start of a cluster with its barrier.
_MOST_BYTES_US = 106_000.0
_CLUSTER_BYTES_US = 25_000.0
_CLUSTER_US = 0.7


def predicted_us(
    s: Shape, tile: Config, batch: int, device: DeviceSpec, epilogue: Epilogue | None = None
) -> float:
    """Predicted time of a tile, in microseconds: one phase after the other."""
    e = epilogue or Epilogue()
    work = Work.of(tile, batch, device)
    passes, of_block = work.passes, work.units
    left, right = s.left, s.right
    first, second = tile.ring_slots(s)
    # The largest parts of z and of the outputs that a block of a cluster has.
    of_z, of_y = (-(-n // tile.cluster) / n for n in (tile.z_blocks(s), tile.turns(s, e)))
    right_bytes = first * tile.columns(s) * tile.ks * 2 * of_z
    left_bytes = second * tile.second_slot_bytes * of_y
    chunks = -(-left.b // tile.nk) * of_y
    features = parts_of_result(e.activation, s.siblings) * left.out_features * of_y
    # Of 64 rows. z goes into shared memory once, and out of it for each chunk of outputs.
    x_bytes = 128 * right.a * -(-right.c // tile.ks) * tile.ks * tile.splits * of_z
    z_bytes = s.classes * s.steps * 2048
    y_bytes = 128 * features * (2 if e.residual else 1)
    groups = s.siblings * chunks * left.d * s.steps / tile.at_once
    ring = tile.stages * max(tile.first_slot_bytes(s), tile.second_slot_bytes)
    activated = 64 * features if e.activation != "none" else 0
    activated_z = 64 * right.out_features * of_z if e.middle != "none" else 0
    phases = (
        overlapped(
            (
                of_block * 128 * right.in_features * of_z / work.rate(READ_BYTES_US),
                (passes * right_bytes + of_block * (2 * x_bytes + right_bytes)) / SHARED_BYTES_US,
                (passes * right_bytes + of_block * x_bytes) / ring * LATENCY_US,
                of_block * activated_z * ACTIVATION_US,
            ),
            OVERLAP,
        ),
        overlapped(
            (
                of_block * y_bytes / work.rate(WRITTEN_BYTES_US),
                (passes * left_bytes + of_block * (left_bytes + z_bytes * chunks))
                / SHARED_BYTES_US,
                passes * left_bytes / ring * LATENCY_US,
                of_block / work.at_a_time * groups * BETWEEN_US,
                of_block * activated * ACTIVATION_US,
            ),
            OVERLAP,
        ),
    )
    exchange = 0.0
    if tile.cluster > 1:
        sent = of_block * z_bytes * of_z * (tile.cluster - 1)
        exchange = _CLUSTER_US + sent / _CLUSTER_BYTES_US
    return LAUNCH_US + work.waves * (sum(phases) + exchange)


@dataclass(frozen=True)
class Work:
    """The work of the busiest multiprocessor.

    Attributes:
        passes: number of passes over the weights.
        units: number of units of 64 rows.
        at_a_time: units that are computed at a time.
        waves: number of times that it does all this.
        busy: share of the multiprocessors that have work.
    """

    passes: int
    units: int
    at_a_time: int
    waves: int
    busy: float

    @classmethod
    def of(cls, tile: Config, batch: int, device: DeviceSpec) -> Work:
        units = -(-batch // 64)
        if tile.cluster > 1:
            clusters, units = -(-units // tile.groups), min(tile.groups, units)
            waves = -(-clusters // (device.multiprocessors // tile.cluster))
            busy = min(1.0, clusters * tile.cluster / device.multiprocessors)
            return cls(1, units, units, waves, busy)
        busy = min(1.0, units / device.multiprocessors)
        units = -(-units // (device.multiprocessors * tile.blocks))
        passes = -(-units // tile.groups) * tile.blocks
        return cls(passes, units * tile.blocks, min(tile.groups, units) * tile.blocks, 1, busy)

    def rate(self, of_all: float) -> float:
        """Bytes a microsecond of one multiprocessor, if it has ``of_all`` when all are busy."""
        return min(of_all / self.busy, _MOST_BYTES_US)


def best(
    s: Shape, batch: int, device: DeviceSpec, epilogue: Epilogue | None = None, count: int = 1
) -> list[Config]:
    """The tiles with the least predicted times, the best first."""
    candidates = configs(s, device, epilogue)
    ranked = sorted(candidates, key=lambda t: predicted_us(s, t, batch, device, epilogue))
    return ranked[:count]
