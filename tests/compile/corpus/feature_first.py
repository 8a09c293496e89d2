"""Features first, batch last: an author from the signal-processing side."""

import torch
from torch import nn

INPUT = (24, 9)
CHAINS = ["(2,5,4,3)"]
BATCH_DIM = 1


class FeatureFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5, 4, 3) / 2)

    def forward(self, x):
        y = torch.einsum("abcd,acdn->abdn", self.weight, x.reshape(2, 4, 3, -1))
        return y.reshape(30, -1)


build = FeatureFirst
