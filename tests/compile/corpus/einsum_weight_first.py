"""Multi-head output projection, weights first in the equation, heads in an odd place."""

import torch
from torch import nn

INPUT = (2, 5, 32)
CHAINS = ["(4,6,8,1)"]


class PerHead(nn.Module):
    def __init__(self, heads=4, dim=8, out=6):
        super().__init__()
        self.heads = heads
        self.proj = nn.Parameter(torch.randn(dim, heads, out) * 0.2)

    def forward(self, x):
        x = x.unflatten(-1, (self.heads, -1))
        return torch.einsum("dho,bthd->btho", self.proj, x).flatten(-2)


build = PerHead
