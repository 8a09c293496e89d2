"""Monarch matrix as in the paper's first listings: two batched matmuls around transpositions."""

import torch
from torch import nn

INPUT = (6, 64)
CHAINS = ["(1,8,4,8)*(4,8,16,1)"]


class MonarchLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.blkdiag1 = nn.Parameter(torch.randn(4, 8, 16) / 4)
        self.blkdiag2 = nn.Parameter(torch.randn(8, 8, 4) / 2)

    def forward(self, x):
        batch = x.shape[0]
        k, _, p = self.blkdiag1.shape
        l, s, r = self.blkdiag2.shape
        out1 = torch.bmm(x.view(batch, k, p).transpose(0, 1), self.blkdiag1.transpose(1, 2))
        out1 = out1.transpose(0, 1).reshape(batch, r, l).transpose(-1, -2).contiguous()
        out2 = torch.bmm(out1.transpose(0, 1), self.blkdiag2.transpose(-1, -2))
        return out2.permute(1, 2, 0).reshape(batch, s * l)


build = MonarchLinear
