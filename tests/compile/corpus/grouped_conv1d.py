"""Pointwise grouped convolution over a sequence, channels first, as in audio models."""

import torch.nn.functional as F
from torch import nn

INPUT = (3, 24, 11)
CHAINS = ["(4,5,6,1)"]


class GroupedPointwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(24, 20, kernel_size=1, groups=4)

    def forward(self, x):
        return F.gelu(self.conv(x), approximate="tanh")


build = GroupedPointwise
