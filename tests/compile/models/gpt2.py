"""A GPT-2-style decoder with block-diagonal projections by einsum and a low-rank head."""

import math

import torch
import torch.nn.functional as F
from torch import nn

SITES_PER_BLOCK = 4


class GroupedConv1D(nn.Module):
    """GPT-2's Conv1D (weights [in, out], x @ w + b), block-diagonal."""

    def __init__(self, n_in, n_out, groups):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.randn(groups, n_in // groups, n_out // groups) * 0.1)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        y = torch.einsum("...gi,gio->...go", x.unflatten(-1, (self.groups, -1)), self.weight)
        return y.flatten(-2) + self.bias


class Block(nn.Module):
    def __init__(self, dim, heads, groups):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn = GroupedConv1D(dim, 3 * dim, groups)
        self.c_proj = GroupedConv1D(dim, dim, groups)
        self.c_fc = GroupedConv1D(dim, 4 * dim, groups)
        self.mlp_proj = GroupedConv1D(4 * dim, dim, groups)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (one.view(b, t, self.heads, c // self.heads).transpose(1, 2) for one in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.c_proj((scores @ v).transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocabulary=61, dim=32, depth=1, heads=4, groups=2, positions=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(positions, dim)
        self.h = nn.ModuleList(Block(dim, heads, groups) for _ in range(depth))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.t()


def build():
    return GPT2()


def example():
    return torch.randint(0, 61, (3, 11))
