"""The weights of two chains in the order that csrc/cuda/chain_mlp_wgmma16.cuh reads them in.

By PyTorch: csrc/cuda/chain_mlp_pack.cuh does the same in one launch, which tests compare with this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt.kernels.families import chain_packing
from ksopt.kernels.families.chain_mlp_tile import Config
from ksopt.kernels.families.chain_packing import span
from ksopt.kernels.families.chain_tile import Shape


def pack_index(first: Shape, second: Shape, tile: Config) -> Tensor:
    """The `chain_packing.pack_index` of the first chain's left and right, then of the second's."""
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
