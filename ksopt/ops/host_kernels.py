"""The host library's own kernels of the products and layers that compiled graphs call.

They override those of `ksopt.ops.implementation`: calls that the tables know run without Python,
all others go on to Python. See product_kernels.cpp, layer_kernels.cpp, mlp_kernels.cpp and
input_gradient_kernel.cpp of csrc/host.
"""

from __future__ import annotations

import torch

from ksopt.jit import host
from ksopt.ops import input_gradient, schemas, trained_chain  # noqa: F401  operators come first
from ksopt.ops.chain import ks_chain_inner  # noqa: F401  those of layers, too
from ksopt.ops.mlp import ks_mlp_inner  # noqa: F401


def _serve() -> None:
    torch.ops.ksopt_host.serve_products(True)
    torch.ops.ksopt_host.serve_input_gradients(True)


host.when_loaded(_serve)
