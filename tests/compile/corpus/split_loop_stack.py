"""A loop that indexes one weight tensor and stacks the results."""

import torch
from torch import nn

INPUT = (6, 30)
CHAINS = ["(3,4,10,1)"]


class LoopStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 10) / 3)

    def forward(self, x):
        outs = []
        for i, part in enumerate(torch.split(x, 10, dim=1)):
            outs.append(part @ self.weight[i].t())
        return torch.stack(outs, dim=1).reshape(x.shape[0], -1)


build = LoopStack
