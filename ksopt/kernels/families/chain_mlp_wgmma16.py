"""Two 16-bit chains, an activation between, in one launch (csrc/cuda/chain_mlp_wgmma16.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.epilogue import ACTIVATIONS
from ksopt.kernels.families import chain_launcher, chain_packing, chain_tile
from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.chain_packing import span
from ksopt.kernels.families.chain_tile import Epilogue, Shape
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec

_BARRIER_BYTES = 128


@dataclass(frozen=True)
class Config:
    """Template arguments of ``MlpTile`` and its two tiles of chains.

    Attributes:
        first, second: the chains' tiles; of the second, ``ks`` and ``splits`` mean nothing.
        slot_steps: steps of 16 hidden features in a slot.
        stages: slots of the ring.
    """

    first: chain_tile.Config
    second: chain_tile.Config
    slot_steps: int
    stages: int

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

    def slot_bytes(self, first: Shape, second: Shape) -> int:
        """Bytes of a slot of the ring."""
        return max(
            self.first.first_slot_bytes(first),
            self.first.second_slot_bytes,
            self.second.second_slot_bytes,
            self.hidden_bytes(second),
        )

    def shared_bytes(self, first: Shape, second: Shape) -> int:
        """Dynamic shared memory of a block."""
        features = first.left.out_features + second.left.out_features
        fixed = _BARRIER_BYTES + -(-features * 2 // 128) * 128
        fixed += self.first.stash_bytes(first) + self.second.stash_bytes(second)
        return fixed + self.stages * self.slot_bytes(first, second)


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
    """All tiles worth considering, without order."""
    d = first.left.d
    for tile in chain_tile.configs(first, device):
        features = tile.nk * d
        if (tile.blocks, tile.splits, tile.cluster) != (1, 1, 1):
            continue
        if tile.nk % 16 != 0 or first.left.b % tile.nk != 0:
            continue
        if second.right.c % features != 0 or tile.first_slot_bytes(first) > 56 * 1024:
            continue
        for other in chain_tile.configs(second, device, residual=True):
            shared = (other.groups, other.blocks, other.splits, other.ks, other.cluster)
            if shared != (tile.groups, 1, 1, 16, 1):
                continue
            columns = other.columns(second)
            at_once = tile.slot_p if tile.slot_p <= 6 else 4
            kept = columns // 2 + max(
                d * tile.nk // 2 + 8 * at_once, features // 16 * 4 + d * tile.nk // 4
            )
            if kept + 40 > tile.registers:
                continue
            limit = max(tile.first_slot_bytes(first), 8192)
            steps = max(
                (
                    n
                    for n in range(1, features // 16 + 1)
                    if features // 16 % n == 0 and n * columns * 32 <= limit
                ),
                default=0,
            )
            if steps == 0:
                continue
            found = Config(tile, _filled(other, second, limit), steps, 0)
            room = min(SHARED_LIMIT, device.shared_bytes - 1024) - found.shared_bytes(first, second)
            stages = min(8, room // found.slot_bytes(first, second))
            if stages >= 2:
                yield Config(found.first, found.second, steps, stages)


def _filled(tile: chain_tile.Config, s: Shape, limit: int) -> chain_tile.Config:
    """The second chain's tile, with as much of its left factor in a slot as fits."""
    j = min(s.left.d, 8)
    choices = [(1, n) for n in range(1, s.steps + 1) if s.steps % n == 0]
    choices += [(n, s.steps) for n in range(1, j + 1) if j % n == 0]
    sizes = sorted((m * n, m, n) for m, n in choices if m * n * tile.nk * 32 <= limit)
    _, slot_j, slot_p = sizes[-1] if sizes else (1, 1, 1)
    return chain_tile.Config(
        *(tile.groups, tile.blocks, tile.nk, tile.ks, tile.splits, slot_j, slot_p, 2)
    )


def pack_index(first: Shape, second: Shape, tile: Config) -> Tensor:
    """As `chain_wgmma16.pack_index`, of left and right of the first chain, then of the second."""
    d, nk = first.left.d, tile.first.nk
    chunk_features, of_block = nk * d, second.right.c // (nk * d)
    starts = [0]
    for factor in (first.left, first.right, second.left):
        starts.append(starts[-1] + factor.nnz)

    def moved(index: Tensor, start: int) -> Tensor:
        return torch.where(index < 0, index, index + start)

    # The second right factor: [block, chunk, step, half, class, tile, column, l].
    sizes = (second.right.a, of_block, chunk_features // 16, 2)
    i, part, step, half = (span(n, at, 8) for at, n in enumerate(sizes))
    sizes = (second.left.d, second.tiles_of_block, 8, 8)
    j, u, column, e = (span(n, at + 4, 8) for at, n in enumerate(sizes))
    of_class = u * 8 + column
    n = (step % (nk // 16) * 2 + half) * 8 + e
    k = part * nk + chain_packing.output_of_column(n, d)
    feature = k * d + step // (nk // 16)  # of the block
    source = (i * second.right.b + of_class * second.left.d + j) * second.right.c + feature
    hidden = torch.where(of_class < second.l_of_block, source, -1)

    chunks = second.right.a * of_block
    middle = [
        chain_packing.left_index(first, tile.first).reshape(chunks, -1),
        moved(hidden, starts[3]).reshape(chunks, -1),
    ]
    parts = [
        moved(chain_packing.right_index(first, tile.first), starts[1]),
        torch.cat(middle, 1),
        moved(chain_packing.left_index(second, tile.second), starts[2]),
    ]
    return torch.cat([part.reshape(-1) for part in parts])


def kernel_name(first: Shape, second: Shape, dtype: str) -> str:
    """The kernel's name, as profilers show it."""
    factors = (first.left, first.right, second.left, second.right)
    return "_".join(
        ["ksopt_chain_mlp_wgmma16", dtype, *(str(n) for f in factors for n in f.weight_shape)]
    )


def source(first: Shape, second: Shape, tile: Config, epilogue: Epilogue, dtype: str) -> str:
    """The generated file. The epilogue's ``middle`` is the activation between the chains."""
    packed = 2 * pack_index(first, second, tile).numel()
    lines = ['#include "chain_mlp_wgmma16.cuh"']
    for at, (s, of_chain) in enumerate(((first, tile.first), (second, tile.second)), 1):
        pattern, fields = chain_tile.template_arguments(s, of_chain)
        lines.append(f"using Chain{at} = ChainPattern<{pattern}>;")
        lines.append(f"using Tile{at} = ChainTile<Chain{at}, {fields}>;")
    extras = (
        *(ACTIVATIONS.index(epilogue.middle), ACTIVATIONS.index(epilogue.activation)),
        *(int(epilogue.bias), int(epilogue.residual)),
    )
    lines += [
        f"using Tile = MlpTile<Chain1, Chain2, Tile1, Tile2, {tile.slot_steps}, {tile.stages}>;",
        f"using After = ChainEpilogue<{', '.join(map(str, extras))}>;",
        f"static_assert(Tile::SHARED_BYTES == {tile.shared_bytes(first, second)} && "
        f"Tile::PACKED_BYTES == {packed}, "
        '"csrc and kernels/families/chain_mlp_wgmma16.py disagree");',
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)',
        f"{kernel_name(first, second, dtype)}(const __grid_constant__ ChainArguments arguments) {{",
        f"  chain_mlp_wgmma16_kernel<{HALF[dtype]}, Chain1, Chain2, Tile, After>(arguments);",
        "}",
    ]
    return "\n".join(lines) + "\n"


class MlpLauncher(chain_launcher.ChainLauncher):
    """A loaded kernel, called as `ChainLauncher`; the bias is both chains', one after the other."""

    def __init__(
        self, first: Shape, second: Shape, tile: Config, epilogue: Epilogue, dtype: str, index: int
    ) -> None:
        self.out_features, self.tile, self.epilogue = second.left.out_features, tile, epilogue
        self._load(
            kernel_name(first, second, dtype),
            source(first, second, tile, epilogue, dtype),
            tile.shared_bytes(first, second),
            index,
        )
