"""The Strassen-Tile product in PyTorch, and its reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ksopt.operators.batches import Product, of_any_batch
from ksopt.reference import is_batch_last


def bind(tile: int, weights: Sequence[Tensor], layout: str) -> Product:
    """The product by D [t², r], V [r, out/t, in/t] and E [r, t²]: three matrix products."""
    decoder, v, encoder = weights
    last = is_batch_last(layout)

    def product(x: Tensor) -> Tensor:
        rows = x.shape[1 if last else 0]
        more = -rows % tile
        x = pad(x, (0, more) if last else (0, 0, 0, more)) if more else x
        # Each tile a column, of entries [a, b] row by row: [t², tiles of rows * tiles of features].
        if last:
            cut = x.unflatten(1, (-1, tile)).unflatten(0, (-1, tile)).permute(3, 1, 2, 0)
        else:
            cut = x.unflatten(0, (-1, tile)).unflatten(2, (-1, tile)).permute(1, 3, 0, 2)
        groups, features = cut.shape[2:]
        encoded = encoder @ cut.reshape(tile * tile, groups * features)
        summed = torch.bmm(encoded.view(len(v), groups, features), v.mT)  # [r, groups, out/t]
        outputs = v.shape[1]
        y = (decoder @ summed.flatten(1)).view(tile, tile, groups, outputs)
        if last:
            y = y.permute(3, 1, 2, 0).reshape(outputs * tile, groups * tile)
            return y[:, :rows].contiguous()
        return y.permute(2, 0, 3, 1).reshape(groups * tile, outputs * tile)[:rows]

    return of_any_batch(product, layout)


def reference(tile: int, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The product of x [rows, in] in plain einsums, as the definition has it."""
    decoder, v, encoder = weights
    rows = x.shape[0]
    x = pad(x, (0, 0, 0, -rows % tile))
    groups = x.reshape(-1, tile, x.shape[1] // tile, tile)  # [n, a, i, b]
    decode, encode = decoder.view(tile, tile, -1), encoder.view(-1, tile, tile)
    encoded = torch.einsum("rab,naib->nri", encode, groups)
    summed = torch.einsum("roi,nri->nro", v, encoded)
    y = torch.einsum("acr,nro->naoc", decode, summed)
    return y.reshape(-1, v.shape[1] * tile)[:rows]
