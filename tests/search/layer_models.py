"""Models that the tests of searches build, here and from the command line."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two layers of one size, one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.mT, -1) @ v
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    """Two blocks between an embedding and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(scale * x)


def tiny() -> Tiny:
    return Tiny()


def on_meta() -> Tiny:
    with torch.device("meta"):
        return Tiny()


def inputs() -> Tensor:
    return torch.arange(20).reshape(4, 5)


def keywords() -> dict[str, object]:
    return {"tokens": inputs(), "scale": 2.0}


def wrong_inputs() -> str:
    return "tokens"


def inputs_of_another_model() -> Tensor:
    return torch.ones(4, 5)


def broken() -> Tiny:
    raise RuntimeError("no such file")


def leaving() -> Tiny:
    raise SystemExit(0)


def without_layers() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(1, 1, 3))


def not_a_model() -> int:
    return 3
