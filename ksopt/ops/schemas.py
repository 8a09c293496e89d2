"""The operators' schemas, kernels and fake implementations, as `ksopt.ops` describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.kernels import weight_scopes
from ksopt.kernels.backends.base import backend_of, when_registered
from ksopt.kernels.validation import check_memory
from ksopt.ops import implementation, weight_gradient

LIBRARY = torch.library.Library("ksopt", "DEF")


# Tensors that are no array of numbers: without these torch would list all of its backends.
_OTHER_KINDS = (
    *("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU"),
    *("QuantizedCPU", "QuantizedCUDA", "NestedTensorCPU", "NestedTensorCUDA"),
    "AutogradNestedTensor",
)


def _refuse_other_kinds(name: str) -> None:
    """Answer tensors of other kinds with a sentence."""
    op = name.partition(".")[0]
    first, second = ("grad", "x") if "grad" in op else ("x", "weight")

    def kernel(*args: Any, **others: Any) -> Any:
        several = enumerate(args[1]) if isinstance(args[1], list) else ()
        named = {f"weights[{at}]": weight for at, weight in several} or {second: args[1]}
        check_memory(op, **{first: args[0], **named})
        names = ", ".join(others)
        raise InvalidInputError(f"{op}: {names} must be ordinary tensors, as {first} is")

    for key in _OTHER_KINDS:
        LIBRARY.impl(name, kernel, key)


_kernels: dict[str, Callable[..., Any]] = {}
_others: dict[str, str] = {}
"""Key of torch's dispatcher -> the type of devices, of those that are registered."""


def implement(name: str, kernel: Callable[..., Any]) -> None:
    """Register an operator's kernel for every type of devices that has a backend, now or later."""
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    _kernels[name] = kernel
    for key, device_type in _others.items():
        LIBRARY.impl(name, _with_backend(device_type, kernel), key)


def _implement_on(device_type: str) -> None:
    """Register all kernels for one more type of devices."""
    key = torch._C._dispatch_key_for_device(device_type)
    if key in ("CPU", "CUDA", *_others):
        return
    _others[key] = device_type
    for name, kernel in _kernels.items():
        LIBRARY.impl(name, _with_backend(device_type, kernel), key)


def _with_backend(device_type: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for a type of devices whose backend may be unregistered."""

    def checked(*args: Any, **others: Any) -> Any:
        backend_of(device_type)
        return kernel(*args, **others)

    return checked


when_registered(_implement_on)


def define(
    names: Sequence[str], schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Register an operator under several names; none knows autograd, autocast or vmap yet."""
    for name in names:
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        implement(name, kernel)
        torch.library.register_fake(f"ksopt::{name}", fake, lib=LIBRARY)
        _refuse_other_kinds(name)


_PRODUCT = "(Tensor x, Tensor weight, bool batch_last=False, Tensor? owner=None) -> Tensor"
define(("ks_mm",), _PRODUCT, implementation.product, implementation.fake)
define(("ks_mm_inner",), _PRODUCT, implementation.inner, implementation.fake)
define(("ks_mm_repacked",), _PRODUCT, implementation.repacked, implementation.fake)
define(("ks_mm_frozen",), _PRODUCT, implementation.frozen, implementation.fake)
define(
    ("ks_mm_weight_grad", "ks_mm_weight_grad_inner"),
    "(Tensor grad, Tensor x, SymInt a, SymInt d, bool batch_last) -> Tensor",
    weight_gradient.weight_grad,
    weight_gradient.weight_grad_fake,
)
define(
    ("ks_mm_weight_bias_grad_inner",),
    "(Tensor grad, Tensor x, SymInt a, SymInt d) -> (Tensor, Tensor)",
    weight_gradient.weight_bias_grad,
    weight_gradient.weight_bias_grad_fake,
)

# Tensors come first, as Inductor writes them. Nothing is returned: of such an operator torch makes
# a functional one, where it compiles a user's own call.
_WRITING = (
    "(Tensor x, Tensor weight, Tensor? owner=None, bool batch_last=False, *, Tensor(a!) out) -> ()"
)
for _name, _kernel in (
    ("ks_mm_inner", implementation.inner),
    ("ks_mm_repacked", implementation.repacked),
):
    define(
        (f"{_name}.out",), _WRITING, implementation.writing(_kernel), implementation.writing_fake
    )
    # torch's own kernel for lazily negated tensors expects something returned.
    _returning = getattr(torch.ops.ksopt, _name).default
    LIBRARY.impl(f"{_name}.out", implementation.copying(_returning), "Negative")

ks_mm = torch.ops.ksopt.ks_mm.default
ks_mm_inner = torch.ops.ksopt.ks_mm_inner.default
ks_mm_inner_out = torch.ops.ksopt.ks_mm_inner.out
ks_mm_repacked = torch.ops.ksopt.ks_mm_repacked.default
ks_mm_repacked_out = torch.ops.ksopt.ks_mm_repacked.out
ks_mm_frozen = torch.ops.ksopt.ks_mm_frozen.default
ks_mm_weight_grad = torch.ops.ksopt.ks_mm_weight_grad.default
ks_mm_weight_grad_inner = torch.ops.ksopt.ks_mm_weight_grad_inner.default
ks_mm_weight_bias_grad_inner = torch.ops.ksopt.ks_mm_weight_bias_grad_inner.default


def _ks_mm_once(x: Tensor, weight: Tensor, batch_last: bool = False) -> Tensor:
    with weight_scopes.repacked():
        y: Tensor = ks_mm(x, weight, batch_last)
        return y


# Made of ks_mm alone, so it is all that ks_mm is.
LIBRARY.define(
    "ks_mm_once(Tensor x, Tensor weight, bool batch_last=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("ks_mm_once", _ks_mm_once, "CompositeImplicitAutograd")
ks_mm_once = torch.ops.ksopt.ks_mm_once.default
