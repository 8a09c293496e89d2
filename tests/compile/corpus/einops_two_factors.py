"""einops all the way: rearrange, einsum, rearrange, einsum."""

import torch
from einops import einsum, rearrange
from torch import nn

INPUT = (6, 24)
CHAINS = ["(1,5,4,6)*(4,6,6,1)"]


class EinopsMonarch(nn.Module):
    def __init__(self):
        super().__init__()
        self.right = nn.Parameter(torch.randn(4, 6, 6) * 0.4)
        self.left = nn.Parameter(torch.randn(6, 5, 4) * 0.5)

    def forward(self, x):
        x = rearrange(x, "b (k i) -> b k i", k=4)
        x = einsum(x, self.right, "b k i, k o i -> b k o")
        x = rearrange(x, "b k l -> b l k")
        x = einsum(x, self.left, "b l k, l s k -> b l s")
        return rearrange(x, "b l s -> b (s l)")


build = EinopsMonarch
