"""The program that the harness of kills compiles: the host library, then a model by the backend."""

import sys

import torch
from torch import nn

from ksopt.compile import backend
from ksopt.jit import host
from ksopt.nn import KSLinear

CHAIN = "(1,16,4,8)*(8,4,4,1)"


def build() -> nn.Module:
    """A model whose layers convert and compile in a moment; the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def main() -> None:
    """Compile, compare, and say so."""
    print("building", flush=True)
    reason = host.load()
    if reason is not None:  # its compiler was killed
        sys.exit(f"ksopt: {reason}")
    torch.manual_seed(0)
    layer = nn.Sequential(KSLinear(32, 128, CHAIN), nn.ReLU())
    x = torch.randn(5, layer[0].in_features)
    # What Inductor starts, and leaves where, is PyTorch's.
    backend.compile_by_inductor = lambda gm, inputs, config: gm.forward
    compiled = torch.compile(layer, backend="ksopt")
    torch.testing.assert_close(compiled(x), layer(x))
    print("the same", flush=True)


if __name__ == "__main__":
    main()
