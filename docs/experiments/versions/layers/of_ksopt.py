"""ksopt's own layers with a bias, before and after products that the author wrote."""

import torch
import torch.nn.functional as F
from torch import nn

from ksopt.nn import KSLinear

INPUT = (6, 32)


class Layers(nn.Module):
    """Chains with their epilogues, between batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = KSLinear(32, 64, "(1,8,4,8)*(4,8,8,1)")
        self.down = KSLinear(64, 32, "(1,4,8,8)*(8,8,8,1)", bias=False)
        self.first = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.last = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), self.first).flatten(1)
        y = y + self.down(F.gelu(self.up(y)))
        return torch.einsum("bgi,goi->bgo", self.down(F.relu(self.up(y))).view(-1, 4, 8), self.last)


build = Layers
