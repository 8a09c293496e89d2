"""The host library's own kernels of the products and layers that compiled graphs call.

They stand above those of `ksopt.ops.implementation`: what the tables know runs without Python, all
else goes on to it. See csrc/host/product_kernels.cpp and layer_kernels.cpp.
"""

from __future__ import annotations

import torch

from ksopt.jit import host
from ksopt.ops.chain import ks_chain_inner  # noqa: F401  the operators are defined first


def _serve() -> None:
    torch.ops.ksopt_host.serve_products(True)


host.when_loaded(_serve)
