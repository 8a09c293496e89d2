"""An ensemble-minded author: vmap of F.linear over blocks, biases mapped along."""

import torch
import torch.nn.functional as F
from torch import nn

INPUT = (7, 32)
CHAINS = ["(4,6,8,1)"]


class VmapBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6, 8) / 3)

    def forward(self, x):
        blocks = x.view(-1, 4, 8)
        y = torch.vmap(F.linear, in_dims=(1, 0), out_dims=1)(blocks, self.w)
        return y.flatten(1).tanh()


build = VmapBlocks
