"""Grouped dense layer in the style of JAX ports: ellipsis, capital letters, scale parameter."""

import torch
from torch import nn

INPUT = (2, 3, 4, 24)
CHAINS = ["(2,5,12,1)"]


class DenseGeneral(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(2, 12, 5) * 0.3)
        self.bias = nn.Parameter(torch.zeros(2, 5))

    def forward(self, x):
        x = x.reshape(*x.shape[:-1], 2, 12)
        return torch.einsum("...GI,GIO->...GO", x, self.kernel) + self.bias


build = DenseGeneral
