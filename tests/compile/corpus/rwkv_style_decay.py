"""Recurrent-model style: a low-rank decay beside a grouped key projection, with residual."""

import torch
from torch import nn

INPUT = (2, 6, 32)
CHAINS = ["(4,8,8,1)", "(1,32,3,1)*(1,3,32,1)"]


class TimeMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.decay_a = nn.Parameter(torch.randn(32, 3) / 5)
        self.decay_b = nn.Parameter(torch.randn(3, 32) / 5)
        self.base = nn.Parameter(torch.randn(32))

    def forward(self, x):
        b, t, c = x.shape
        k = torch.einsum("bthi,hio->btho", x.view(b, t, 4, 8), self.key).reshape(b, t, c)
        decay = self.base + x @ self.decay_a @ self.decay_b
        return x + k * torch.sigmoid(decay)


build = TimeMix
