"""A layer that switches autocast on by itself, around its products only."""

import torch
from torch import nn

INPUT = (6, 32)
CHAINS = ["(4,6,8,1)"]
DTYPE = torch.bfloat16


class AutocastInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 6) / 3)

    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = torch.bmm(x.view(-1, 4, 8).transpose(0, 1), self.weight)
        return y.transpose(0, 1).flatten(1).float()


build = AutocastInside
