"""A ViT whose author wrote Monarch layers (two factors, batched matmuls) in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import nn

INPUT = (2, 3, 32, 32)
SITES_PER_BLOCK = 4


class MonarchLinear(nn.Module):
    """(1, n_out/p, m/p, p)*(p, m/p, n_in/p, 1) with m = min(n_in, n_out)."""

    def __init__(self, n_in, n_out, p=4):
        super().__init__()
        middle = min(n_in, n_out) // p
        self.p = p
        self.right = nn.Parameter(torch.randn(p, middle, n_in // p) * (n_in // p) ** -0.5)
        self.left = nn.Parameter(torch.randn(p, n_out // p, middle) * middle**-0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        shape = x.shape[:-1]
        x = x.reshape(-1, self.p, x.shape[-1] // self.p).transpose(0, 1)
        y = torch.bmm(x, self.right.transpose(1, 2)).transpose(0, 1)  # [rows, p, m]
        # The middle index is read with stride p: p interleaved blocks.
        y = y.reshape(y.shape[0], -1, self.p).permute(2, 0, 1)
        y = torch.bmm(y, self.left.transpose(1, 2)).permute(1, 2, 0)
        return y.reshape(*shape, -1) + self.bias


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = MonarchLinear(dim, 3 * dim), MonarchLinear(dim, dim)
        self.fc1, self.fc2 = MonarchLinear(dim, 4 * dim), MonarchLinear(4 * dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, dim=32, depth=1, heads=4, patch=8, size=32, classes=10):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def build():
    return ViT()


def example():
    return torch.randn(INPUT)
