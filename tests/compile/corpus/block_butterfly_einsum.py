"""Block butterfly for a vision model: einsum with three batch dims, tokens kept apart."""

import torch
from torch import nn

INPUT = (3, 7, 48)
CHAINS = ["(1,12,12,4)*(4,12,12,1)"]


class BlockButterfly(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(4, 12, 12) * 0.3)
        self.outer = nn.Parameter(torch.randn(12, 12, 4) * 0.3)

    def forward(self, tokens):
        b, t, _ = tokens.shape
        h = torch.einsum("btgi,goi->btgo", tokens.view(b, t, 4, 12), self.inner)
        h = h.reshape(b, t, 12, 4)
        return torch.einsum("btij,oij->btoj", h, self.outer).reshape(b, t, 48)


build = BlockButterfly
