"""A chain in an author's spelling."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ByEinsum(nn.Module):
    """Both factors of (1,8,4,4)*(4,4,8,1), 32 -> 16 -> 32, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(1, 8, 4, 4) / 2)
        self.right = nn.Parameter(torch.randn(4, 4, 8, 1) / 3)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1]
        z = torch.einsum("...acd,abcd->...abd", x.view(*rows, 4, 8, 1), self.right)
        z = z.reshape(*rows, 1, 4, 4)
        y = torch.einsum("...acd,abcd->...abd", z, self.left).reshape(*rows, 32)
        return y + self.bias
