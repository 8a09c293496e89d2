"""Weight on the left, features as columns: W @ x for every block."""

import torch
from torch import nn

INPUT = (4, 5, 36)
CHAINS = ["(3,10,12,1)"]


class LeftMultiply(nn.Module):
    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(3, 10, 12) / 3.5)
        self.b = nn.Parameter(torch.randn(3, 10, 1))

    def forward(self, x):
        b, t, _ = x.shape
        columns = x.view(b, t, 3, 12, 1)
        y = torch.matmul(self.W, columns) + self.b
        return nn.functional.silu(y.view(b, t, 30))


build = LeftMultiply
