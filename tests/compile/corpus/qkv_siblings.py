"""Three block-diagonal projections of one input."""

import torch
from torch import nn

INPUT = (2, 5, 32)
CHAINS = ["(4,8,8,1)", "(4,8,8,1)", "(4,8,8,1)"]


class GroupedQKV(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.k = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.v = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x):
        heads = x.unflatten(-1, (4, 8))
        q, k, v = (torch.einsum("bthi,hoi->bhto", heads, w) for w in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).flatten(-2)


build = GroupedQKV
