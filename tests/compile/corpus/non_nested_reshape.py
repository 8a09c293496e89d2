"""Two grouped layers whose groups do not nest: 4 groups of 6, then 3 groups of 8."""

import torch
from torch import nn

INPUT = (7, 64)
CHAINS = ["(3,5,8,1)*(4,6,16,1)"]


class NonNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 6, 16) / 4)
        self.w2 = nn.Parameter(torch.randn(3, 5, 8) / 3)

    def forward(self, x):
        y = torch.einsum("bgi,goi->bgo", x.reshape(-1, 4, 16), self.w1)
        return torch.einsum("bgi,goi->bgo", y.reshape(-1, 3, 8), self.w2).flatten(1)


build = NonNested
