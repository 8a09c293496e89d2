"""A trained dense matrix times a constant mask: blocks along the diagonal, and a bias."""

import torch
import torch.nn.functional as F
from torch import nn

INPUT = (6, 32)
CHAINS = ["(4,6,8,1)"]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 32) / 3)
        self.bias = nn.Parameter(torch.randn(24))
        self.register_buffer("mask", torch.block_diag(*torch.ones(4, 6, 8)))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


def build():
    return Masked()
