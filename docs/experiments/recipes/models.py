"""An MLP-Mixer and a GPT with a factory for their large linear layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ksopt import Chain, KSLinear

Linear = Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Size:
    """The size of a network.

    Args:
        width: Features of a token.
        hidden: Features within each MLP.
        depth: Blocks.
    """

    width: int
    hidden: int
    depth: int


def chain_linear(in_features: int, out_features: int) -> nn.Module:
    """A layer whose matrix is a Monarch chain of four blocks: a third to a half of the weights."""
    return KSLinear(in_features, out_features, Chain.monarch(in_features, out_features, p=4))


def _mlp(width: int, hidden: int, linear: Linear) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width), linear(width, hidden), nn.GELU(), linear(hidden, width)
    )


class Mixer(nn.Module):
    """An MLP-Mixer (Tolstikhin et al. 2021) for images of 8 x 8 pixels: patches of 2 x 2.

    The MLPs over the channels use the factory's layers; those over the 16 patches are too small for
    chains, and dense.
    """

    def __init__(self, size: Size, linear: Linear) -> None:
        super().__init__()
        self.patches = nn.PixelUnshuffle(2)
        self.embed = nn.Linear(4, size.width)
        self.tokens = nn.ModuleList(_mlp(16, 32, nn.Linear) for _ in range(size.depth))
        self.channels = nn.ModuleList(
            _mlp(size.width, size.hidden, linear) for _ in range(size.depth)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 1, 8, 8] -> logits [B, 10]."""
        x = self.embed(self.patches(x).flatten(2).mT)  # [B, 16, width]
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(x.mT).mT
            x = x + channels(x)
        return self.head(self.norm(x).mean(1))


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self, width: int, linear: Linear) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, 4, T, width / 4]
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A decoder of bytes, pre-norm, with learned positions."""

    def __init__(self, size: Size, context: int, linear: Linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, size.width)
        self.position = nn.Embedding(context, size.width)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)
        self.attention = nn.ModuleList(Attention(size.width, linear) for _ in range(size.depth))
        self.mlp = nn.ModuleList(_mlp(size.width, size.hidden, linear) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes [B, T] -> logits of the next [B, T, 256]."""
        y = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            y = y + attention(y)
            y = y + mlp(y)
        return self.head(self.norm(y))


def parameters(model: nn.Module) -> int:
    """The number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def dense_size(build: Callable[[Size, Linear], nn.Module], chains: Size, width: int) -> Size:
    """A dense size of a width, with MLPs that give it as many parameters as one with chains."""
    with torch.device("meta"):
        goal = parameters(build(chains, chain_linear))
        sizes = [Size(width, 8 * n, chains.depth) for n in range(1, 1024)]
        counts = [parameters(build(size, nn.Linear)) for size in sizes[:2]]
        slope = counts[1] - counts[0]
    return sizes[max(0, round((goal - counts[0]) / slope))]
