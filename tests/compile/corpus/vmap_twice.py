"""The functional author again: a function of one block, mapped over blocks, then over samples."""

import torch
import torch.nn.functional as F
from torch import nn

INPUT = (7, 32)
CHAINS = ["(4,6,8,1)"]


class PerSamplePerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        over_blocks = torch.vmap(F.linear)
        over_samples = torch.vmap(over_blocks, in_dims=(0, None, None))
        return over_samples(x.unflatten(-1, (4, 8)), self.weight, self.bias).flatten(1)


build = PerSamplePerBlock
