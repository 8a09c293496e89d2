"""The tensors that outlive a call of a compiled graph: its inputs, not its results.

A weight's prepared form is cached until its version changes. Inductor counts no versions
inside a graph: it writes results into the memory, and the tensors, of values that are no longer
read. So a traced product names its weight's owner only where that is an input of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from ksopt.kernels.operands import is_real
from ksopt.kernels.weight_scopes import root_of


def cacheable_owner(owner: Tensor) -> Tensor | None:
    """The tensor that the cache may store a weight's forms with; None where there is none.

    Args:
        owner: the weight, or the tensor whose memory it is in.

    Returns:
        ``owner`` itself without tracing, as torch counts writes to it. Where a graph is traced: the
        input that it is, or is a view of, unless the graph has written to it.
    """
    mode = get_proxy_mode()
    if mode is None:
        return owner if is_real(owner) else None
    root = root_of(owner)
    slot = get_proxy_slot(_traced(root), mode.tracer, None)
    if slot is None:
        return root if is_real(root) else None  # a constant
    proxy: Any = getattr(slot, "proxy", slot)
    return root if proxy.node.op in ("placeholder", "get_attr") else None


def cacheable_owners(owners: Sequence[Tensor]) -> list[Tensor] | None:
    """The `cacheable_owner` tensor of each owner; None where one has none."""
    cacheable = [one for owner in owners if (one := cacheable_owner(owner)) is not None]
    return cacheable if len(cacheable) == len(owners) else None


def _traced(tensor: Tensor) -> Tensor:
    """The tracer's record of a functional tensor, which counts writes instead of executing them."""
    inner = tensor.elem if isinstance(tensor, FunctionalTensor) else tensor
    if not torch._is_functional_tensor(inner):
        return tensor
    torch._sync(tensor)
    traced: Tensor = torch._from_functional_tensor(inner)
    return traced
