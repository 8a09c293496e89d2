"""The paper's transformers in plain PyTorch, with a factory for their layers.

A ViT as the paper's source wrote it (lucidrains, "simple_vit": no class token, 196 tokens of an
image of 224 pixels, q, k and v as one layer without a bias), and a GPT-2 of the same blocks.
`ksopt bench models` times the compiled models of the library transformers; these are the paper's
own models, uncompiled, as it timed them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Make = Callable[[int, int, bool, int], nn.Module]
"""(features in, features out, bias, number of layers side by side) -> a layer."""


@dataclass(frozen=True)
class Size:
    """Sizes of a transformer.

    Attributes:
        width: features of a token.
        heads: of attention.
        depth: blocks.
        batch: images, or sequences.
        tokens: of each image or sequence.
        patch: pixels along a patch's edge; 0 for a language model.
        classes: of the head, or the vocabulary.
    """

    width: int
    heads: int
    depth: int
    batch: int
    tokens: int
    patch: int
    classes: int

    @property
    def is_causal(self) -> bool:
        """Whether it is a language model."""
        return self.patch == 0


VITS = {
    "ViT-S/16": Size(384, 6, 12, 128, 196, 16, 1000),
    "ViT-B/16": Size(768, 12, 12, 128, 196, 16, 1000),
    "ViT-L/16": Size(1024, 16, 24, 128, 196, 16, 1000),
    "ViT-H/14": Size(1280, 16, 32, 128, 256, 14, 1000),
}
"""Source: the paper, appendix B.6: 224 x 224 pixels, 128 images."""

GPT2_MEDIUM = Size(1024, 16, 24, 8, 512, 0, 50257)
"""The paper does not say its batch and length."""

SMALL_VIT = Size(48, 3, 2, 3, 16, 4, 10)
SMALL_GPT2 = Size(48, 3, 2, 3, 24, 0, 61)


def dense(n_in: int, n_out: int, bias: bool, count: int = 1) -> nn.Module:
    """One dense layer, even for several side by side."""
    return nn.Linear(n_in, count * n_out, bias)


class Attention(nn.Module):
    """Layer norm, q, k, v, attention, and a dense projection: [B, T, d] -> [B, T, d]."""

    def __init__(self, size: Size, make: Make) -> None:
        super().__init__()
        self.heads, self.is_causal = size.heads, size.is_causal
        self.norm = nn.LayerNorm(size.width)
        self.to_qkv = make(size.width, size.width, False, 3)
        self.to_out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] -> [B, T, d]."""
        # [B, T, 3 d] -> three of [B, heads, T, d / heads]
        parts = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if x.dtype == torch.float32 and not self.is_causal:
            # As the paper's float32 model; in half precision it used FlashAttention.
            weights = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            y = torch.matmul(weights.softmax(dim=-1), v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.to_out(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Layer norm, d -> 4 d, GELU, 4 d -> d: [B, T, d] -> [B, T, d]."""

    def __init__(self, size: Size, make: Make) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.up = make(size.width, 4 * size.width, True, 1)
        self.down = make(4 * size.width, size.width, True, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] -> [B, T, d]."""
        return self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    """Attention and a feed-forward network, each added to its input."""

    def __init__(self, size: Size, make: Make) -> None:
        super().__init__()
        self.attention = Attention(size, make)
        self.feed_forward = FeedForward(size, make)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] -> [B, T, d]."""
        x = self.attention(x) + x
        return self.feed_forward(x) + x


class Transformer(nn.Module):
    """The whole model: images [B, 3, H, W] or tokens [B, T] -> logits."""

    def __init__(self, size: Size, make: Make) -> None:
        super().__init__()
        self.size = size
        if size.is_causal:
            self.embed: nn.Module = nn.Embedding(size.classes, size.width)
        else:
            features = 3 * size.patch**2
            self.embed = nn.Sequential(
                nn.LayerNorm(features), nn.Linear(features, size.width), nn.LayerNorm(size.width)
            )
        self.places = nn.Parameter(0.02 * torch.randn(size.tokens, size.width))
        self.blocks = nn.Sequential(*(Block(size, make) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.classes, bias=not size.is_causal)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, classes], or [B, T] -> [B, T, classes]."""
        if not self.size.is_causal:
            # [B, 3, H, W] -> [B, T, 3 * patch * patch]
            inputs = F.unfold(inputs, self.size.patch, stride=self.size.patch).transpose(1, 2)
        x = self.norm(self.blocks(self.embed(inputs) + self.places))
        return self.head(x if self.size.is_causal else x.mean(dim=1))


def inputs_of(size: Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random inputs of the whole model."""
    if size.is_causal:
        return torch.randint(size.classes, (size.batch, size.tokens), device=device)
    edge = size.patch * round(size.tokens**0.5)
    return torch.randn(size.batch, 3, edge, edge, device=device, dtype=dtype)
