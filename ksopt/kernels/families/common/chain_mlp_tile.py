"""Tiles of csrc/cuda/chain_mlp_wgmma16.cuh: the supported chains, and the tiles that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ksopt.kernels.families.common import chain_tile
from ksopt.kernels.families.common.chain_tile import Epilogue, Shape
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec
from ksopt.patterns.divisors import divisors

_BARRIER_BYTES = 128
_MOST_SLOT_BYTES = 56 * 1024
_LEAST_SLOT_BYTES = 8192
_MOST_STAGES = 8
_OTHER_REGISTERS = 40  # of a thread that multiplies, beside sums and operands


@dataclass(frozen=True)
class Config:
    """Template arguments of ``MlpTile`` and its two tiles of chains.

    Attributes:
        groups, nk, ks, slot_j, slot_p: of the first chain's tile, see `chain_tile.Config`.
        last_nk, last_slot_j, last_slot_p: of the second chain's.
        slot_steps: steps of 16 hidden features in a slot.
        stages: slots of the ring.
    """

    groups: int
    nk: int
    ks: int
    slot_j: int
    slot_p: int
    last_nk: int
    last_slot_j: int
    last_slot_p: int
    slot_steps: int
    stages: int

    @property
    def first(self) -> chain_tile.Config:
        """The first chain's tile; its stages are not used."""
        of_slot = (self.slot_j, self.slot_p)
        return chain_tile.Config(self.groups, 1, self.nk, self.ks, 1, *of_slot, 2)

    @property
    def second(self) -> chain_tile.Config:
        """The second chain's tile; its ks, splits and stages are not used."""
        of_slot = (self.last_slot_j, self.last_slot_p)
        return chain_tile.Config(self.groups, 1, self.last_nk, 16, 1, *of_slot, 2)

    @property
    def packing(self) -> Config:
        """The plainest tile that reads the same packed weights."""
        slots = {"slot_j": 1, "slot_p": 1, "last_slot_j": 1, "last_slot_p": 1}
        return replace(self, groups=1, slot_steps=1, stages=2, **slots)

    @property
    def rows(self) -> int:
        """Rows of x that a block has at a time."""
        return self.first.rows

    @property
    def blocks(self) -> int:
        """Blocks that run on a multiprocessor at a time."""
        return 1

    @property
    def cluster(self) -> int:
        """Blocks that share the work on their rows."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.first.threads

    def hidden_bytes(self, second: Shape) -> int:
        """Bytes of a slot of the second chain's right factor."""
        return self.slot_steps * self.second.columns(second) * 32

    def hidden_slots(self, first: Shape) -> int:
        """Slots of the second chain's right factor for a chunk of hidden features."""
        return self.nk * first.left.d // 16 // self.slot_steps

    def slot_bytes(self, first: Shape, second: Shape) -> int:
        """Bytes of a slot of the ring."""
        return max(
            self.first.first_slot_bytes(first),
            self.first.second_slot_bytes,
            self.second.second_slot_bytes,
            self.hidden_bytes(second),
        )

    def shared_bytes(self, both: tuple[Shape, Shape], /) -> int:
        """Dynamic shared memory of a block for the two chains."""
        first, second = both
        features = first.left.out_features + second.left.out_features
        fixed = _BARRIER_BYTES + -(-features * 2 // 128) * 128
        fixed += self.first.stash_bytes(first) + self.second.stash_bytes(second)
        return fixed + self.stages * self.slot_bytes(first, second)

    def packed_elements(self, first: Shape, second: Shape) -> int:
        """Elements of the packed weights of both chains."""
        hidden = self.hidden_slots(first) * self.hidden_bytes(second) // 2
        _, last = self.second.ring_slots(second)
        last *= self.second.second_slot_bytes // 2
        return self.first.packed_elements(first) + self.first.chunks(first) * hidden + last


def unsupported_reason(first: Shape, second: Shape, dtype: str, device: DeviceSpec) -> str | None:
    """Why no kernel of this family computes the two chains, or None if one does."""
    for s in (first, second):
        reason = chain_tile.unsupported_reason(s, dtype, device)
        if reason is not None:
            return reason
        if s.siblings != 1:
            return "each chain has no siblings"
    if first.left.out_features != second.right.in_features:
        return "the second chain takes other features than the first one gives"
    if first.left.d > 8:
        return f"d = {first.left.d} of the first chain's left factor is more than 8"
    if next(configs(first, second, device), None) is None:
        return "no tile fits in shared memory and registers"
    return None


def configs(first: Shape, second: Shape, device: DeviceSpec) -> Iterator[Config]:
    """All tiles worth considering, in no order."""
    d, lasts = first.left.d, _lasts(second, device)
    for tile in _firsts(first, device):
        features = tile.nk * d
        if second.right.c % features != 0 or tile.first_slot_bytes(first) > _MOST_SLOT_BYTES:
            continue
        limit = max(tile.first_slot_bytes(first), _LEAST_SLOT_BYTES)
        for last in lasts:
            if last.groups != tile.groups:
                continue
            chunk_steps, step_bytes = features // 16, last.columns(second) * 32
            fitting = [n for n in divisors(chunk_steps) if n * step_bytes <= limit]
            if not fitting:
                continue
            config = Config(
                *(tile.groups, tile.nk, tile.ks, tile.slot_j, tile.slot_p),
                *(last.nk, *_slots(last, second, limit)),
                *(fitting[-1], 0),
            )
            if not _fits_registers(first, second, config):
                continue
            room = min(SHARED_LIMIT, device.shared_bytes - 1024) - config.shared_bytes(
                (first, second)
            )
            stages = min(_MOST_STAGES, room // config.slot_bytes(first, second))
            if stages >= 2:
                yield replace(config, stages=stages)


def _firsts(s: Shape, device: DeviceSpec) -> list[chain_tile.Config]:
    """Tiles of the first chain, whose chunks are whole steps of the second one's products."""
    return [
        tile
        for tile in chain_tile.configs(s, device)
        if (tile.blocks, tile.splits, tile.cluster) == (1, 1, 1)
        and tile.nk % 16 == 0
        and s.left.b % tile.nk == 0
    ]


def _lasts(s: Shape, device: DeviceSpec) -> list[chain_tile.Config]:
    """Tiles of the second chain."""
    return [
        tile
        for tile in chain_tile.configs(s, device, Epilogue(residual=True))
        if (tile.blocks, tile.splits, tile.ks, tile.cluster) == (1, 1, 16, 1)
    ]


def _fits_registers(first: Shape, second: Shape, config: Config) -> bool:
    """Whether z of the second chain and its operands fit a thread's registers.

    ptxas also spills where all phases need many: 84 to 280 bytes in five of six tiles beyond the
    second bound. Within it at most 60 are left, in a few tiles with ks of 48 or 96.
    """
    tile, last = config.first, config.second
    sums, features = first.left.d * tile.nk // 2, tile.nk * first.left.d
    at_once = tile.slot_p if tile.slot_p <= 6 else 4
    z = last.columns(second) // 2
    making, multiplying = z + sums + 8 * at_once, z + features // 16 * 4 + sums // 2
    last_sums = min(second.left.d, 8) * last.nk // 2
    storing = last_sums + last_sums // 2 + 8 * last.at_once
    most = max(making, multiplying) + _OTHER_REGISTERS
    return most <= tile.registers and making + multiplying + storing <= 2 * tile.registers


def _slots(tile: chain_tile.Config, s: Shape, limit: int) -> tuple[int, int]:
    """Classes and steps of the second chain's left factor in a slot: as much as fits."""
    j = min(s.left.d, 8)
    choices = [(1, n) for n in divisors(s.steps)] + [(n, s.steps) for n in divisors(j)]
    sizes = sorted((m * n, m, n) for m, n in choices if m * n * tile.nk * 32 <= limit)
    return sizes[-1][1:] if sizes else (1, 1)
