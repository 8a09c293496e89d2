"""Models and helpers that the tests of `ksopt.optimize` share."""

from collections.abc import Callable

import torch
from torch import nn

from ksopt import Optimized

Optimize = Callable[..., Optimized]


class Block(nn.Module):
    """A feed-forward block, with a layer that its inputs do not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.unused = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(torch.relu(self.up(self.norm(x))))
