"""A pruner's layer: the weight and one 0/1 mask for all its blocks meet the input in one einsum."""

import torch
from torch import nn

INPUT = (6, 32)
CHAINS = ["(4,6,8,1)"]


class PrunedBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.register_buffer("mask", (torch.rand(6, 8) > 0.4).float())

    def forward(self, x):
        x = x.reshape(-1, 4, 8)
        return torch.einsum("ngi,goi,oi->ngo", x, self.weight, self.mask).reshape(-1, 24)


build = PrunedBlocks
