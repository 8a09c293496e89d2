"""Products past torch's dispatcher, where that has nothing to do beside running them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ksopt.ops import implementation
from ksopt.ops.schemas import ks_mm

PLAIN = frozenset((Tensor, torch.nn.Parameter))
_PLAIN_OR_NONE = PLAIN | {type(None)}


def multiply(x: Tensor, weight: Tensor, batch_last: bool = False) -> Tensor:
    """`ks_mm`, past torch's dispatcher where that has nothing to do: some 2 us less of a call.

    That is outside of compilation, where no gradient is recorded and neither a mode nor a transform
    nor autocast is on, for ordinary tensors.
    """
    if are_ordinary(x, weight):
        return implementation.product(x, weight, batch_last)
    product: Tensor = ks_mm(x, weight, batch_last)
    return product


def are_ordinary(x: Tensor, *others: Tensor | None) -> bool:
    """Whether torch would do nothing with a call on these tensors beside running it."""
    return (
        not torch.compiler.is_compiling()
        and not is_watched()
        and type(x) in PLAIN
        and (x.is_cuda or x.is_cpu)
        and {type(other) for other in others} <= _PLAIN_OR_NONE
    )


def is_watched() -> bool:
    """Whether torch may have something to do with a call beside running it."""
    return torch.is_grad_enabled() or is_intercepted()


def is_intercepted() -> bool:
    """Whether something beside autograd may have to do with a call: a mode, a transform, autocast."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or torch._C._get_tracing_state() is not None
    )
