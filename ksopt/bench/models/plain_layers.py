"""Kronecker-sparse layers in plain PyTorch, as authors who do not know ksopt write them.

Three compute x (K_1 K_2)ᵀ + bias with K_1 = (1, out/q, middle/q, q), K_2 = (p, middle/p, in/p, 1):
a block-diagonal matrix, then interleaved blocks (a Monarch layer). The fourth is for any chain.
Their products do not use ksopt: the benchmark measures how the backend lowers this code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ksopt.patterns.chain import Chain

Of = Callable[[nn.Parameter], Tensor]
"""(parameter) -> its values or its gradient."""


class PlainLayer(nn.Module):
    """A layer of one chain; each subclass multiplies by another of PyTorch's operations.

    Args:
        chain: its factors.
        bias: whether to add one.
    """

    def __init__(self, chain: Chain, bias: bool) -> None:
        super().__init__()
        self.chain = chain
        self.bias = nn.Parameter(torch.zeros(chain.out_features)) if bias else None

    def factors(self, of: Of) -> list[Tensor]:
        """The weights or their gradients in KSLinear's layout: [a, b, c, d], left to right."""
        raise NotImplementedError


class MonarchByBmm(PlainLayer):
    """Batched matrix products on transposed views, as in the code of the first Monarch papers."""

    def __init__(self, chain: Chain, bias: bool) -> None:
        super().__init__(chain, bias)
        outer, inner = chain
        self.p, self.q = inner.a, outer.d
        self.blocks1 = nn.Parameter(_random(self.p, inner.b, inner.c, fan_in=inner.c))
        self.blocks2 = nn.Parameter(_random(self.q, outer.b, outer.c, fan_in=outer.c))

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in] -> [*batch, out]."""
        batch = x.shape[:-1]
        x = x.reshape(-1, self.p, x.shape[-1] // self.p).transpose(0, 1)
        y = torch.bmm(x, self.blocks1.transpose(1, 2)).transpose(0, 1)
        # [rows, p, middle/p] -> [q, rows, middle/q]: every q-th feature is one block's.
        y = y.reshape(y.shape[0], -1, self.q).permute(2, 0, 1)
        y = torch.bmm(y, self.blocks2.transpose(1, 2)).permute(1, 2, 0)
        y = y.reshape(*batch, -1)
        return y if self.bias is None else y + self.bias

    def factors(self, of: Of) -> list[Tensor]:
        """The weights of the chain's factors (`PlainLayer`)."""
        return [of(self.blocks2).permute(1, 2, 0)[None], of(self.blocks1)[..., None]]


class ButterflyByEinsum(PlainLayer):
    """Einsum on unflattened features, weights [in, out] as GPT-2's own Conv1D has them."""

    def __init__(self, chain: Chain, bias: bool) -> None:
        super().__init__(chain, bias)
        outer, inner = chain
        self.p, self.q = inner.a, outer.d
        self.inner = nn.Parameter(_random(self.p, inner.c, inner.b, fan_in=inner.c))
        self.outer = nn.Parameter(_random(outer.c, outer.b, self.q, fan_in=outer.c))

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in] -> [*batch, out]."""
        hidden = torch.einsum("...gi,gio->...go", x.unflatten(-1, (self.p, -1)), self.inner)
        hidden = hidden.flatten(-2).unflatten(-1, (-1, self.q))
        y = torch.einsum("...lj,lkj->...kj", hidden, self.outer).flatten(-2)
        return y if self.bias is None else y + self.bias

    def factors(self, of: Of) -> list[Tensor]:
        """The weights of the chain's factors (`PlainLayer`)."""
        return [of(self.outer).transpose(0, 1)[None], of(self.inner).transpose(1, 2)[..., None]]


class BlocksByVmap(PlainLayer):
    """One small linear layer, mapped over groups of features."""

    def __init__(self, chain: Chain, bias: bool) -> None:
        super().__init__(chain, bias)
        outer, inner = chain
        self.p, self.q = inner.a, outer.d
        self.down = nn.Parameter(_random(self.p, inner.b, inner.c, fan_in=inner.c))
        self.up = nn.Parameter(_random(self.q, outer.b, outer.c, fan_in=outer.c))

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in] -> [*batch, out]."""
        groups = x.view(*x.shape[:-1], self.p, -1)
        hidden = torch.vmap(F.linear, in_dims=(-2, 0), out_dims=-2)(groups, self.down)
        strided = hidden.reshape(*x.shape[:-1], -1, self.q)
        y = torch.vmap(F.linear, in_dims=(-1, 0), out_dims=-1)(strided, self.up)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def factors(self, of: Of) -> list[Tensor]:
        """The weights of the chain's factors (`PlainLayer`)."""
        return [of(self.up).permute(1, 2, 0)[None], of(self.down)[..., None]]


class ChainByEinsum(PlainLayer):
    """One einsum per factor of any chain, as the product is defined."""

    def __init__(self, chain: Chain, bias: bool) -> None:
        super().__init__(chain, bias)
        self.weights = nn.ParameterList(
            nn.Parameter(_random(*pattern.weight_shape, fan_in=pattern.c)) for pattern in chain
        )

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in] -> [*batch, out]."""
        for weight in list(self.weights)[::-1]:
            a, _, c, d = weight.shape
            x = x.unflatten(-1, (a, c, d))
            x = torch.einsum("...acd,abcd->...abd", x, weight).flatten(-3)
        return x if self.bias is None else x + self.bias

    def factors(self, of: Of) -> list[Tensor]:
        """The weights of the chain's factors (`PlainLayer`)."""
        return [of(weight) for weight in self.weights]


class SideBySide(nn.Module):
    """Layers on one input with concatenated outputs: a fused q, k, v."""

    def __init__(self, parts: Sequence[PlainLayer]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in] -> [*batch, sum of out]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


MONARCH_LAYERS: dict[str, type[PlainLayer]] = {
    "bmm": MonarchByBmm,
    "einsum": ButterflyByEinsum,
    "vmap": BlocksByVmap,
}
"""Monarch layers, by the operation that multiplies."""


def plain_layer(chains: Sequence[Chain], bias: bool, op: str) -> PlainLayer | SideBySide:
    """A layer with random weights.

    Args:
        chains: one, or one for each part of a fused layer.
        bias: whether to add one.
        op: of `MONARCH_LAYERS`; chains that are no Monarch layer's are multiplied by einsum.
    """
    parts = [
        (MONARCH_LAYERS[op] if _is_monarch(chain) else ChainByEinsum)(chain, bias)
        for chain in chains
    ]
    return parts[0] if len(parts) == 1 else SideBySide(parts)


def _is_monarch(chain: Chain) -> bool:
    return len(chain) == 2 and chain[0].a == 1 and chain[1].d == 1


def _random(*shape: int, fan_in: int) -> Tensor:
    return torch.randn(shape) * fan_in**-0.5
