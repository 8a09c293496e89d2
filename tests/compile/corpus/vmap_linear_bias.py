"""The author of vmap_linear again: each block has a bias, and then all share one."""

import torch
import torch.nn.functional as F
from torch import nn

INPUT = (7, 32)
CHAINS = ["(4,6,8,1)", "(4,5,6,1)"]


class BiasedBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.b1 = nn.Parameter(torch.randn(4, 6))
        self.w2 = nn.Parameter(torch.randn(4, 5, 6) / 3)
        self.b2 = nn.Parameter(torch.randn(5))

    def forward(self, x):
        blocks = x.view(-1, 4, 8)
        y = torch.vmap(F.linear, in_dims=(1, 0, 0), out_dims=1)(blocks, self.w1, self.b1)
        y = torch.vmap(F.linear, in_dims=(1, 0, None), out_dims=1)(y.tanh(), self.w2, self.b2)
        return y.flatten(1).relu()


build = BiasedBlocks
