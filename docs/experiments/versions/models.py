"""A user's models and functions, on which the commands of both versions run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and an MLP without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, 32]."""
        x = x + torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)
        return x + self.down(F.gelu(self.up(x)))


class Tied(nn.Module):
    """Layers that share a weight, or hold three in one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 32)
        self.qkv = nn.Linear(32, 96)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, tokens]."""
        q, k, v = self.qkv(self.table(tokens)).chunk(3, -1)
        y: Tensor = self.head(self.second(self.first(torch.softmax(q @ k.mT, -1) @ v)))
        return y


class Monarch(nn.Module):
    """Two block-diagonal factors in plain PyTorch, a bias and an activation, in dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)
        self.right = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.left = nn.Parameter(torch.randn(8, 4, 4) / 2)
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 32]."""
        y = torch.einsum("bgi,goi->bgo", self.before(x).view(-1, 4, 8), self.right)
        y = torch.einsum("bok,opk->bop", y.transpose(1, 2), self.left).flatten(1)
        return self.after(F.gelu(y + self.bias) + x)


def build() -> nn.Module:
    """Two blocks and a head: ten layers of four sizes."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(32, 10))


def inputs() -> Tensor:
    """The inputs on which `build`'s model is timed."""
    return torch.ones(4, 16, 32)


def build_tied() -> nn.Module:
    """A seeded `Tied`."""
    torch.manual_seed(1)
    return Tied()


def build_monarch() -> nn.Module:
    """A seeded `Monarch`."""
    torch.manual_seed(2)
    return Monarch()


def score(scored: Any) -> float:
    """A user's own objective: the last factor's blocks."""
    last = list(scored.chain)[-1]
    return float(last.b * last.c)
