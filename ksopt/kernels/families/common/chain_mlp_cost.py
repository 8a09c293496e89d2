"""Predicted times of the tiles of csrc/cuda/chain_mlp_wgmma16.cuh, by chain_cost.py's model."""

from __future__ import annotations

from ksopt.kernels.families.common import chain_cost as of_chain
from ksopt.kernels.families.common.chain_mlp_tile import Config
from ksopt.kernels.families.common.chain_tile import Epilogue, Shape
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.problem import DeviceSpec


def predicted_us(
    first: Shape,
    second: Shape,
    tile: Config,
    batch: int,
    device: DeviceSpec,
    epilogue: Epilogue | None = None,
) -> float:
    """Predicted time of a tile, in microseconds: three phases, one after the other.

    The first phase reads x and computes z of the first chain. The second computes hidden features
    from z, activates and multiplies them, chunk by chunk, within a multiprocessor. The third
    multiplies by the second chain's left factor, and writes. The constants are chain_cost.py's.
    """
    e = epilogue or Epilogue()
    work = of_chain.Work.of(tile.first, batch, device)
    passes, units = work.passes, work.units
    one, two = tile.first, tile.second
    ring = tile.stages * tile.slot_bytes(first, second)
    right, left = first.right, second.left
    right_slots, hidden_slots = one.ring_slots(first)
    _, left_slots = two.ring_slots(second)
    right_bytes = right_slots * one.columns(first) * one.ks * 2
    middle_bytes = hidden_slots * one.second_slot_bytes
    middle_bytes += one.chunks(first) * tile.hidden_slots(first) * tile.hidden_bytes(second)
    left_bytes = left_slots * two.second_slot_bytes
    # Of 64 rows. z goes into shared memory once, and out of it for each chunk of outputs.
    x_bytes = 128 * right.a * -(-right.c // one.ks) * one.ks
    z_bytes, last_z_bytes = (s.classes * s.steps * 2048 for s in (first, second))
    y_bytes = 128 * left.out_features * (2 if e.residual else 1)
    groups = one.chunks(first) * (
        first.left.d * first.steps / one.at_once + tile.hidden_slots(first)
    )
    last_groups = two.chunks(second) * min(left.d, 8) * second.steps / two.at_once
    hidden = 64 * first.left.out_features if e.middle != "none" else 0
    activated = 64 * left.out_features if e.activation != "none" else 0

    def through_shared(weights: float, operands: float) -> float:
        moved = passes * weights + units * (weights + operands)
        return moved / of_chain.SHARED_BYTES_US

    def arriving(weights: float) -> float:
        return passes * weights / ring * of_chain.LATENCY_US

    phases = (
        (
            units * 128 * right.in_features / work.rate(of_chain.READ_BYTES_US),
            through_shared(right_bytes, 2 * x_bytes),
            (passes * right_bytes + units * x_bytes) / ring * of_chain.LATENCY_US,
        ),
        (
            through_shared(middle_bytes, z_bytes * one.chunks(first)),
            arriving(middle_bytes),
            units / work.at_a_time * groups * of_chain.BETWEEN_US,
            units * hidden * of_chain.ACTIVATION_US,
        ),
        (
            units * y_bytes / work.rate(of_chain.WRITTEN_BYTES_US),
            through_shared(left_bytes, last_z_bytes * two.chunks(second)),
            arriving(left_bytes),
            units / work.at_a_time * last_groups * of_chain.BETWEEN_US,
            units * activated * of_chain.ACTIVATION_US,
        ),
    )
    times = (overlapped(phase, of_chain.OVERLAP) for phase in phases)
    return of_chain.LAUNCH_US + work.waves * sum(times)
