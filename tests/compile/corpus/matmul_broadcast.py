"""Block-diagonal layer: a [blocks, in, out] weight broadcast over the batch by the @ operator."""

import torch
from torch import nn

INPUT = (6, 40)
CHAINS = ["(5,7,8,1)"]


class BlockDiagonal(nn.Module):
    def __init__(self, blocks=5, fan_in=8, fan_out=7):
        super().__init__()
        self.blocks = blocks
        self.weight = nn.Parameter(torch.randn(blocks, fan_in, fan_out) * fan_in**-0.5)

    def forward(self, x):
        rows = x.reshape(x.size(0), self.blocks, 1, -1)
        return (rows @ self.weight).squeeze(-2).flatten(1)


build = BlockDiagonal
