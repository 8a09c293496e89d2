"""A list of small nn.Linear layers, one for each chunk of the features, concatenated."""

import torch
from torch import nn

INPUT = (4, 64)
CHAINS = ["(4,8,16,1)"]


class ChunkedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))

    def forward(self, x):
        chunks = x.chunk(4, dim=-1)
        pairs = zip(self.layers, chunks, strict=True)
        return torch.cat([layer(chunk) for layer, chunk in pairs], dim=-1)


build = ChunkedLinear
