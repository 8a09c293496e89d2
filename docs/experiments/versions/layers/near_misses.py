"""Products that look like factors, some of which are none or are only in part."""

import torch
from torch import nn

INPUT = (6, 32)


class Near(nn.Module):
    """Overlapping windows, a computed weight, shuffled features, float64, and a part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.other = nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.precise = nn.Parameter(torch.randn(4, 8, 8, dtype=torch.float64) / 3)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x: [batch, 32]."""
        groups = x.view(-1, 4, 8).transpose(0, 1)
        windows = torch.bmm(x.unfold(1, 8, 12).transpose(0, 1), self.other)
        gated = torch.bmm(groups, self.weight * x.mean())
        shuffled = torch.bmm(x.flip(-1).view(-1, 4, 8).transpose(0, 1), self.weight)
        precise = torch.bmm(groups.double(), self.precise)
        part = torch.bmm(groups.sin(), self.weight)[1:3]
        return [windows, gated, shuffled, precise, part]


build = Near
