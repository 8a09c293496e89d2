"""The reference of packed weights: the order that the kernels of chains and MLPs read, by PyTorch.

csrc/cuda/common/chain_pack.cuh and chain_mlp_pack.cuh do the same in one launch each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt.kernels.families.common.chain_mlp_tile import Config as MlpConfig
from ksopt.kernels.families.common.chain_tile import Config, Shape


def pack_index(s: Shape, tile: Config) -> Tensor:
    """The source index of each element of the packed weights.

    Returns:
        int64, one entry for each packed element: an index into the siblings' left factors, then
        their right factors, each flattened, one after another; -1 for a zero.
    """
    right, left = right_index(s, tile), left_index(s, tile)
    right = torch.where(right < 0, right, right + s.siblings * s.left.nnz)
    return torch.cat([right.reshape(-1), left.reshape(-1)])


def span(n: int, dim: int, dims: int) -> Tensor:
    """0 to n - 1 along dimension ``dim`` of ``dims``."""
    return torch.arange(n).view(*(-1 if at == dim else 1 for at in range(dims)))


def right_index(s: Shape, tile: Config) -> Tensor:
    """The right factors' part of `pack_index`, slot by slot: indices into these factors."""
    right, d = s.right, s.left.d
    tiles = s.tiles_of_block // tile.splits
    sizes = (right.a, tile.splits, -(-right.c // tile.ks), tile.ks // 16)
    dims = 10
    i, split, part, step = (span(n, at, dims) for at, n in enumerate(sizes))
    half, sibling, j, u, column, e = (
        span(n, at + 4, dims) for at, n in enumerate((2, s.siblings, d, tiles, 8, 8))
    )
    of_class = (split * tiles + u) * 8 + column
    feature = part * tile.ks + step * 16 + half * 8 + e
    source = sibling * right.nnz + (i * right.b + of_class * d + j) * right.c + feature
    return torch.where((of_class < s.l_of_block) & (feature < right.c), source, -1)


def left_index(s: Shape, tile: Config) -> Tensor:
    """The left factors' part, chunk by chunk: [sibling, chunk, group of j, j, step, half, k, l]."""
    left, right, d = s.left, s.right, s.left.d
    dims, group = 8, min(s.left.d, 8)
    sizes = (s.siblings, -(-left.b // tile.nk), d // group, group)
    sibling, chunk, j_group, j = (span(n, at, dims) for at, n in enumerate(sizes))
    step, half, n, e = (span(m, at + 4, dims) for at, m in enumerate((s.steps, 2, tile.nk, 8)))
    k = chunk * tile.nk + output_of_column(n, d)
    i, u = (2 * step + half) // s.tiles_of_block, (2 * step + half) % s.tiles_of_block
    of_class = u * 8 + e
    z = i * s.l_of_block + of_class  # of the class
    source = sibling * left.nnz + (k * left.c + z) * d + j_group * group + j
    return torch.where((k < left.b) & (i < right.a) & (of_class < s.l_of_block), source, -1)


def output_of_column(column: Tensor, d: int) -> Tensor:
    """The output within its chunk that a column of the tensor cores' operand holds.

    Four threads share the columns of 8; each has two of them, whose outputs must make runs of 8
    neighbouring features.
    """
    tile, quarter, odd = column // 8, column % 8 // 2, column % 2
    if d >= 8:
        return tile * 8 + quarter + 4 * odd
    tiles = max(1, 4 // d)  # that make whole runs
    return tile // tiles * tiles * 8 + quarter * (8 // d) + tile % tiles * 2 + odd


def pack(left: Sequence[Tensor], right: Sequence[Tensor], index: Tensor) -> Tensor:
    """The packed weights of siblings' factors, [1, b, c, d] and [a, b, c, 1] each."""
    flat = torch.cat([w.reshape(-1) for w in (*left, *right)])
    packed = flat.index_select(0, index.clamp_min(0))
    return packed.masked_fill_(index < 0, 0)


def mlp_pack_index(first: Shape, second: Shape, tile: MlpConfig) -> Tensor:
    """The `pack_index` of the first chain's left and right, then of the second's."""
    d, nk = first.left.d, tile.nk
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
    k = part * nk + output_of_column(n, d)
    feature = k * d + step // (nk // 16)  # of the block
    source = (i * second.right.b + of_class * second.left.d + j) * second.right.c + feature
    hidden = torch.where(of_class < second.l_of_block, source, -1)

    chunks = second.right.a * of_block
    middle = [
        left_index(first, tile.first).reshape(chunks, -1),
        moved(hidden, starts[3]).reshape(chunks, -1),
    ]
    parts = [
        moved(right_index(first, tile.first), starts[1]),
        torch.cat(middle, 1),
        moved(left_index(second, tile.second), starts[2]),
    ]
    return torch.cat([part.reshape(-1) for part in parts])
