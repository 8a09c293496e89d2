"""As above, but with a shuffle in between that no index map over the first product describes."""

import torch
from torch import nn

INPUT = (7, 64)
CHAINS = ["(4,6,16,1)", "(8,5,3,1)"]


class ShuffledNonNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 6, 16) / 4)
        self.w2 = nn.Parameter(torch.randn(8, 5, 3) / 2)

    def forward(self, x):
        y = torch.einsum("bgi,goi->bgo", x.reshape(-1, 4, 16), self.w1)
        y = y.transpose(1, 2).reshape(-1, 8, 3)
        return torch.einsum("bgi,goi->bgo", y, self.w2).flatten(1)


build = ShuffledNonNested
