"""The weight is computed from parameters: a mask buffer and a norm."""

import torch
from torch import nn

INPUT = (6, 32)
CHAINS = ["(4,6,8,1)"]


class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(4, 6, 8))
        self.g = nn.Parameter(torch.rand(4, 6, 1) + 0.5)
        self.register_buffer("mask", (torch.arange(8) % 3 > 0).float())

    def forward(self, x):
        weight = self.g * self.v / self.v.norm(dim=-1, keepdim=True) * self.mask
        return torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), weight).flatten(1)


build = WeightNormed
