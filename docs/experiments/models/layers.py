"""Kronecker-sparse layers as three authors who never heard of ksopt would write them.

All compute x (K_1 K_2)ᵀ + bias with K_1 = (1, out/q, middle/q, q), K_2 = (p, middle/p, in/p, 1):
a block-diagonal matrix, then interleaved blocks (a Monarch layer). Nothing of ksopt is used here:
what the backend makes of this code is what is measured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MonarchByBmm(nn.Module):
    """Batched matrix products on transposed views, as in the code of the first Monarch papers.

    Args:
        n_in: input features.
        n_out: output features.
        middle: features between the factors.
        p: blocks of the factor that meets the input.
        q: interleaved blocks of the other.
        bias: whether to add one.
    """

    def __init__(self, n_in: int, n_out: int, middle: int, p: int, q: int, bias: bool) -> None:
        super().__init__()
        self.p, self.q = p, q
        self.blocks1 = nn.Parameter(_random(p, middle // p, n_in // p, fan_in=n_in // p))
        self.blocks2 = nn.Parameter(_random(q, n_out // q, middle // q, fan_in=middle // q))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[:-1]
        x = x.reshape(-1, self.p, x.shape[-1] // self.p).transpose(0, 1)
        y = torch.bmm(x, self.blocks1.transpose(1, 2)).transpose(0, 1)
        # [rows, p, middle/p] -> [q, rows, middle/q]: every q-th feature is one block's.
        y = y.reshape(y.shape[0], -1, self.q).permute(2, 0, 1)
        y = torch.bmm(y, self.blocks2.transpose(1, 2)).permute(1, 2, 0)
        y = y.reshape(*batch, -1)
        return y if self.bias is None else y + self.bias


class ButterflyByEinsum(nn.Module):
    """Einsum on unflattened features, weights [in, out] as GPT-2's own Conv1D has them."""

    def __init__(self, n_in: int, n_out: int, middle: int, p: int, q: int, bias: bool) -> None:
        super().__init__()
        self.p, self.q = p, q
        self.inner = nn.Parameter(_random(p, n_in // p, middle // p, fan_in=n_in // p))
        self.outer = nn.Parameter(_random(middle // q, n_out // q, q, fan_in=middle // q))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("...gi,gio->...go", x.unflatten(-1, (self.p, -1)), self.inner)
        hidden = hidden.flatten(-2).unflatten(-1, (-1, self.q))
        y = torch.einsum("...lj,lkj->...kj", hidden, self.outer).flatten(-2)
        return y if self.bias is None else y + self.bias


class BlocksByVmap(nn.Module):
    """One small linear layer, mapped over groups of features."""

    def __init__(self, n_in: int, n_out: int, middle: int, p: int, q: int, bias: bool) -> None:
        super().__init__()
        self.p, self.q = p, q
        self.down = nn.Parameter(_random(p, middle // p, n_in // p, fan_in=n_in // p))
        self.up = nn.Parameter(_random(q, n_out // q, middle // q, fan_in=middle // q))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        groups = x.view(*x.shape[:-1], self.p, -1)
        hidden = torch.vmap(F.linear, in_dims=(-2, 0), out_dims=-2)(groups, self.down)
        strided = hidden.reshape(*x.shape[:-1], -1, self.q)
        y = torch.vmap(F.linear, in_dims=(-1, 0), out_dims=-1)(strided, self.up)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def _random(*shape: int, fan_in: int) -> Tensor:
    return torch.randn(shape) * fan_in**-0.5
