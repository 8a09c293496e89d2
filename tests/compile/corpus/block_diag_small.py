"""torch.block_diag of small matrices, then one big F.linear."""

import torch
import torch.nn.functional as F
from torch import nn

INPUT = (3, 4, 24)
CHAINS = ["(4,5,6,1)"]


class BlockDiagOfSmall(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ParameterList(nn.Parameter(torch.randn(5, 6) / 2) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(20))

    def forward(self, x):
        return F.linear(x, torch.block_diag(*self.blocks), self.bias)


build = BlockDiagOfSmall
