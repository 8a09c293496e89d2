"""Blocks of Llama 70B's shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ksopt.nn import KSLinear

WIDTH = 8192
ROWS = 16
SIZES = ("8192x8192", "8192x1024", "8192x28672", "28672x8192")
_Linear = Callable[[int, int], nn.Module]


def dense(columns: int, rows: int) -> nn.Module:
    """A dense layer."""
    return nn.Linear(columns, rows, bias=False)


def sparse(columns: int, rows: int) -> nn.Module:
    """A layer of two factors."""
    chain = f"(1,{rows // 4},{columns // 4},4)*(4,{columns // 4},{columns // 4},1)"
    return KSLinear(columns, rows, chain, bias=False)


class Block(nn.Module):
    """Attention and a gated MLP, without norms and rotations.

    Args:
        linear: (columns, rows) -> a linear layer.
        width: The number of features; 64 heads share it.
    """

    def __init__(self, linear: _Linear, width: int) -> None:
        super().__init__()
        middle = width * 7 // 2
        self.width = width
        self.q, self.o = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, width // 8), linear(width, width // 8)
        self.gate, self.up = linear(width, middle), linear(width, middle)
        self.down = linear(middle, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of x's shape.

        Args:
            x: [batch, rows, width].
        """
        q, k, v = (
            one.unflatten(-1, (-1, self.width // 64)).transpose(-3, -2)
            for one in (self.q(x), self.k(x), self.v(x))
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.o(mixed.transpose(-3, -2).flatten(-2))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def on_meta(blocks: int, linear: _Linear, width: int = WIDTH) -> tuple[nn.Sequential, Tensor]:
    """A model without values in bfloat16, and its input."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(linear, width) for _ in range(blocks)))
        return model.to(torch.bfloat16), torch.empty(1, ROWS, width, dtype=torch.bfloat16)


def unwritten(blocks: int, width: int = WIDTH) -> tuple[nn.Sequential, Tensor]:
    """A model of KS layers, whose weights are allocated but not written, and its input."""
    model, x = on_meta(blocks, sparse, width)
    return model.to_empty(device="cpu"), torch.empty_like(x, device="cpu")
