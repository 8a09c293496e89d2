"""Tucker-like: two outer factors and a small core in one einsum, the input in the middle."""

import torch
from torch import nn

INPUT = (5, 32)
CHAINS = ["(1,24,2,1)*(1,2,3,1)*(1,3,32,1)"]


class Tucker(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(torch.randn(24, 2))
        self.core = nn.Parameter(torch.randn(2, 3))
        self.right = nn.Parameter(torch.randn(3, 32) / 5)

    def forward(self, x):
        return torch.einsum("os,sr,bi,ri->bo", self.left, self.core, x, self.right)


build = Tucker
