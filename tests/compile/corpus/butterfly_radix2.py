"""Butterfly as a product of log2(n) factors of 2 x 2 blocks, by broadcasting and a sum."""

import math

import torch
from torch import nn

INPUT = (5, 16)
CHAINS = ["(1,2,2,8)*(2,2,2,4)*(4,2,2,2)*(8,2,2,1)"]


class Butterfly(nn.Module):
    def __init__(self, n=16):
        super().__init__()
        self.n = n
        self.twiddle = nn.ParameterList(
            nn.Parameter(torch.randn(n // (2 * stride), 2, 2, stride) / math.sqrt(2))
            for stride in (1, 2, 4, 8)
        )

    def forward(self, x):
        for twiddle in self.twiddle:
            blocks, _, _, stride = twiddle.shape
            pairs = x.view(-1, blocks, 1, 2, stride)
            x = (twiddle * pairs).sum(dim=-2).view(-1, self.n)
        return x


build = Butterfly
