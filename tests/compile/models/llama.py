"""A Llama-style decoder: RMSNorm, rotary positions, grouped queries, SwiGLU, low rank, blocks."""

import torch
import torch.nn.functional as F
from torch import nn

SITES_PER_BLOCK = 7


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x.float() * scale).to(x.dtype)


class LowRank(nn.Module):
    def __init__(self, n_in, n_out, rank):
        super().__init__()
        self.down = nn.Linear(n_in, rank, bias=False)
        self.up = nn.Linear(rank, n_out, bias=False)

    def forward(self, x):
        return self.up(self.down(x))


class BlockLinear(nn.Module):
    """Block-diagonal by a broadcast matmul."""

    def __init__(self, n_in, n_out, blocks=2):
        super().__init__()
        self.blocks = blocks
        self.weight = nn.Parameter(torch.randn(blocks, n_in // blocks, n_out // blocks) * 0.1)

    def forward(self, x):
        y = x.unflatten(-1, (self.blocks, -1)).unsqueeze(-2) @ self.weight
        return y.squeeze(-2).flatten(-2)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Layer(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads
        self.input_norm, self.post_norm = RMSNorm(dim), RMSNorm(dim)
        self.q_proj = BlockLinear(dim, dim)
        self.k_proj = BlockLinear(dim, kv_heads * self.size)
        self.v_proj = BlockLinear(dim, kv_heads * self.size)
        self.o_proj = BlockLinear(dim, dim)
        self.gate_proj, self.up_proj = LowRank(dim, 3 * dim, 4), LowRank(dim, 3 * dim, 4)
        self.down_proj = BlockLinear(3 * dim, dim)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        h = self.input_norm(x)
        q = self.q_proj(h).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(h).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        v = self.v_proj(h).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (one.repeat_interleave(self.heads // self.kv_heads, dim=1) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        h = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    def __init__(self, vocabulary=61, dim=32, depth=1, heads=4, kv_heads=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads) for _ in range(depth))
        self.norm, self.lm_head = RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        size = dim // heads
        frequencies = 10_000 ** (-torch.arange(0, size, 2).float() / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def build():
    return Llama()


def example():
    return torch.randint(0, 61, (3, 11))
