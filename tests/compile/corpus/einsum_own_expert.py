"""Weights of every pair of groups, of which each group reads its own: a diagonal."""

import torch
from torch import nn

INPUT = (6, 32)
CHAINS = ["(4,6,8,1)"]


class OwnExpert(nn.Module):
    def __init__(self):
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(4, 4, 8, 6) / 3)

    def forward(self, x):
        groups = x.view(-1, 4, 8)
        return torch.einsum("bgi,ggio->bgo", groups, self.pairs).flatten(1).sigmoid()


build = OwnExpert
