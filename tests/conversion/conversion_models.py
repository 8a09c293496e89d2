"""Small models that the tests of conversion build, here and from the command line."""

import torch
from torch import Tensor, nn

from ksopt import Chain
from ksopt.projection.products import product

FUSED, UP, DOWN = "(1,12,4,2)*(2,4,4,1)", "(1,16,4,2)*(2,4,4,1)", "(1,4,4,2)*(2,4,16,1)"


class Block(nn.Module):
    """Attention's projections and a feed-forward part, 8 features wide."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        attended = torch.softmax(q @ k.mT, -1) @ v
        return x + self.down(torch.relu(self.up(x + attended)))


class Tiny(nn.Module):
    """Two blocks, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tiny() -> Tiny:
    """The same model every time."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = Tiny().eval()
    torch.set_rng_state(state)
    return model


def exact(chain: Chain | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix that is a product of the chain."""
    chain = Chain.parse(chain) if isinstance(chain, str) else chain
    return product([torch.randn(p.weight_shape, dtype=torch.float64) for p in chain]).to(dtype)


def inputs() -> Tensor:
    return torch.arange(5).reshape(1, 5)


def wrong_inputs() -> Tensor:
    return torch.ones(1, 5)


def no_inputs() -> None:
    return None


def not_a_model() -> int:
    return 3
