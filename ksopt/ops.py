"""The torch operators of ksopt: the only door to the kernels.

Importing this module registers:

``ksopt::ks_mm(Tensor x, Tensor weight, bool batch_last=False, Tensor? owner=None) -> Tensor``
    y = x Kᵀ. x is [*batch, N] or, when batch_last, [N, *batch]; weight is [a, b, c, d], of x's
    dtype and device; y is [*batch, M] or [M, *batch], contiguous, and never shares x's memory.
    owner is for compiled graphs: the parameter or buffer that weight is a view of, which Inductor
    does not tell. What is prepared of the weight is then kept with it (see
    :mod:`ksopt.kernels.weight_cache`). Beside an owner the weight may be of another dtype: it is
    converted to x's, once a version. The owner's values are not read.

``ksopt::ks_mm_weight_grad(Tensor grad, Tensor x, SymInt a, SymInt d, bool batch_last) -> Tensor``
    The gradient of ks_mm with respect to its weight: the sum over the batch of
    grad[..., i, k, j] * x[..., i, l, j], as a contiguous [a, b, c, d].

``ksopt::ks_mm_once(Tensor x, Tensor weight, bool batch_last=False) -> Tensor``
    ks_mm by a weight that was computed for this product: nothing is kept of it.

``ksopt::ks_mm_saving(Tensor x, Tensor weight, Tensor saved, Tensor owner, bool batch_last=False) ->
Tensor``
    ks_mm by a frozen weight. For the gradient of x it saves ``saved``, a copy of weight in x's
    dtype, so that weight may be written before the backward pass. For compiled graphs.

All work in autograd (to any order), torch.compile, vmap, and on fake and meta tensors; ks_mm
follows autocast, like torch.nn.functional.linear. ks_mm has a twin, ``ks_mm_inner``, that only
multiplies: compiled graphs call it, to save the time that finding out that no gradient is needed
takes at each call. ``ks_mm_changing`` is a second twin, for weights that are trained or computed:
in compiled graphs too it takes the way that is fastest where a weight is prepared anew at each
call, keeps nothing, and forgets what was kept of the weight. ``ks_mm_frozen`` is a third, for
weights that gradients pass through.

In compiled graphs ks_mm_weight_grad is no operator but what it is made of: one ``torch.bmm``, for
d > 1 between permuting copies. To call that takes less of the host's time than an operator in
Python does, and Inductor fuses the copies with what stands beside them.

``ks_mm_inner.out`` and ``ks_mm_changing.out`` write y into a tensor that is given, ``(Tensor x,
Tensor weight, Tensor? owner=None, bool batch_last=False, *, Tensor(a!) out) -> ()``: compiled
graphs call them with memory that Inductor has planned. ``out`` has y's shape and x's dtype and
device. Nothing is copied if it is contiguous, aligned to 16 bytes, and shares no memory with x and
weight; else y is computed first. They record no gradient, and refuse operands that ask for one.

Compiled graphs are cached by torch with the operators' *names* in them, not with what they do. A
new kernel is picked up by an old graph, which is right. The shapes, dtypes and strides above and
the gradients below are baked into it: they are the contract of the name. Whoever changes the
contract changes the name; ``CONTRACT`` counts such changes, and those of what graphs call, and goes
into the cache key of everything that the backend "ksopt" compiles. Graphs that Inductor compiled
without it have no such key: ``ks_mm_weight_grad_inner``, which was a twin too, is still there for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ksopt import op_kernels
from ksopt.errors import InvalidInputError
from ksopt.kernels import weight_cache, weight_scopes
from ksopt.kernels.validation import check_ks_mm, check_memory

CONTRACT = 6

_LIBRARY = torch.library.Library("ksopt", "DEF")


# Tensors that are no array of numbers: without these torch would list all of its backends.
_OTHER_KINDS = (
    *("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU"),
    *("QuantizedCPU", "QuantizedCUDA", "NestedTensorCPU", "NestedTensorCUDA"),
    "AutogradNestedTensor",
)


def _refuse_other_kinds(name: str) -> None:
    """Answer tensors of other kinds with a sentence."""
    op = name.partition(".")[0]
    first, second = ("grad", "x") if "weight_grad" in op else ("x", "weight")

    def kernel(*args: Any, **others: Any) -> Any:
        check_memory(op, **{first: args[0], second: args[1]})
        names = ", ".join(others)
        raise InvalidInputError(f"{op}: {names} must be ordinary tensors, as {first} is")

    for key in _OTHER_KINDS:
        _LIBRARY.impl(name, kernel, key)


def _define(
    names: Sequence[str], schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Register an operator under several names; none knows autograd, autocast or vmap yet."""
    for name in names:
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, kernel, key)
        torch.library.register_fake(f"ksopt::{name}", fake, lib=_LIBRARY)
        _refuse_other_kinds(name)


_PRODUCT = "(Tensor x, Tensor weight, bool batch_last=False, Tensor? owner=None) -> Tensor"
_define(("ks_mm", "ks_mm_inner"), _PRODUCT, op_kernels.product, op_kernels.fake)
_define(("ks_mm_changing",), _PRODUCT, op_kernels.changing, op_kernels.fake)
_define(("ks_mm_frozen",), _PRODUCT, op_kernels.frozen, op_kernels.fake)
_define(
    ("ks_mm_weight_grad", "ks_mm_weight_grad_inner"),
    "(Tensor grad, Tensor x, SymInt a, SymInt d, bool batch_last) -> Tensor",
    op_kernels.weight_grad,
    op_kernels.weight_grad_fake,
)

# What is to be saved is an argument, so that a compiler computes it in the forward pass.
_SAVING = "(Tensor x, Tensor weight, Tensor saved, Tensor owner, bool batch_last=False) -> Tensor"
_define(
    ("ks_mm_saving_inner",),
    _SAVING,
    lambda x, weight, saved, owner, last=False: op_kernels.frozen(x, weight, last, owner),
    lambda x, weight, saved, owner, last=False: op_kernels.fake(x, weight, last, owner),
)

# Tensors come first, as Inductor writes them. Nothing is returned: of such an operator torch makes
# a functional one, where it compiles a user's own call.
_WRITING = (
    "(Tensor x, Tensor weight, Tensor? owner=None, bool batch_last=False, *, Tensor(a!) out) -> ()"
)
for _name, _kernel in (
    ("ks_mm_inner", op_kernels.product),
    ("ks_mm_changing", op_kernels.changing),
):
    _define((f"{_name}.out",), _WRITING, op_kernels.writing(_kernel), op_kernels.writing_fake)
    # torch's own kernel for lazily negated tensors expects something returned.
    _returning = getattr(torch.ops.ksopt, _name).default
    _LIBRARY.impl(f"{_name}.out", op_kernels.copying(_returning), "Negative")

ks_mm = torch.ops.ksopt.ks_mm.default
ks_mm_inner = torch.ops.ksopt.ks_mm_inner.default
ks_mm_inner_out = torch.ops.ksopt.ks_mm_inner.out
ks_mm_changing = torch.ops.ksopt.ks_mm_changing.default
ks_mm_changing_out = torch.ops.ksopt.ks_mm_changing.out
ks_mm_frozen = torch.ops.ksopt.ks_mm_frozen.default
ks_mm_saving_inner = torch.ops.ksopt.ks_mm_saving_inner.default
ks_mm_weight_grad = torch.ops.ksopt.ks_mm_weight_grad.default


def _ks_mm_once(x: Tensor, weight: Tensor, batch_last: bool = False) -> Tensor:
    with weight_scopes.changing():
        y: Tensor = ks_mm(x, weight, batch_last)
        return y


# Made of ks_mm alone, so it is all that ks_mm is.
_LIBRARY.define(
    "ks_mm_once(Tensor x, Tensor weight, bool batch_last=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("ks_mm_once", _ks_mm_once, "CompositeImplicitAutograd")
ks_mm_once = torch.ops.ksopt.ks_mm_once.default


# Autograd. The product is linear in x and in weight, so every gradient is one of the two operators
# again, with the pattern transposed where x is concerned: gradients of any order follow.


class _KsMm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, batch_last: bool, owner: Tensor | None
    ) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        # A frozen weight, through which gradients go on to x, is kept, there and back.
        ctx.changing = needs_weight or weight_cache.are_said_to_change()
        product = ks_mm_changing if ctx.changing else ks_mm_frozen
        y = product(x, weight, batch_last, owner)
        ctx.save_for_backward(
            x if needs_weight else None,
            weight if needs_x else None,
            owner if needs_x and not ctx.changing else None,
        )
        ctx.a, _, _, ctx.d = weight.shape
        ctx.batch_last = batch_last
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad = _in_rows(*grads)
        x, weight, owner = ctx.saved_tensors
        grad_x = grad_weight = None
        if weight is not None:
            if owner is None and not ctx.changing:
                owner = weight
            changing = ctx.changing or weight_cache.are_said_to_change()
            with weight_scopes.changing(changing), weight_scopes.frozen(not changing):
                grad_x = ks_mm(grad, weight.transpose(1, 2), ctx.batch_last, owner)
        if x is not None:
            grad_weight = ks_mm_weight_grad(grad, x, ctx.a, ctx.d, ctx.batch_last)
        return grad_x, grad_weight, None, None


class _KsMmSaving(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, saved: Tensor, owner: Tensor, batch_last: bool
    ) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.batch_last = batch_last
        y: Tensor = ks_mm_saving_inner(x, weight, saved, owner, batch_last)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (saved,) = ctx.saved_tensors
        grad_x = ks_mm_once(_in_rows(*grads), saved.transpose(1, 2), ctx.batch_last)
        return grad_x, None, None, None, None


def _ks_mm_saving(
    x: Tensor, weight: Tensor, saved: Tensor, owner: Tensor, batch_last: bool = False
) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        found: Tensor = _KsMmSaving.apply(x, weight, saved, owner, batch_last)
        return found
    y: Tensor = ks_mm(x, weight, batch_last, owner)
    return y


_LIBRARY.define(f"ks_mm_saving{_SAVING}", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("ks_mm_saving", _ks_mm_saving, "CompositeImplicitAutograd")
ks_mm_saving = torch.ops.ksopt.ks_mm_saving.default


def _in_rows(grad: Tensor) -> Tensor:
    """A gradient whose last dim's elements lie side by side, as all that multiplies it wants it.

    Both products of a backward pass read it: one copy for both, which a compiler fuses with what
    made the gradient (that of attention's keys comes transposed).
    """
    step = grad.stride(-1)  # no int where the sizes are symbolic; 1 is one there, too
    return grad if isinstance(step, int) and step == 1 else grad.contiguous()


def _with_gradients(x: Tensor, weight: Tensor, batch_last: bool, owner: Tensor | None) -> Any:
    if weight.dtype != x.dtype and weight.requires_grad:
        check_ks_mm(x, weight, batch_last, any_dtype=owner is not None)
        weight = weight.to(x.dtype)
    return _KsMm.apply(x, weight, batch_last, owner)


class _KsMmWeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> Tensor:
        needs_grad, needs_x, *_ = ctx.needs_input_grad
        ctx.save_for_backward(grad if needs_x else None, x if needs_grad else None)
        ctx.batch_last = batch_last
        return _weight_grad_traced(grad, x, a, d, batch_last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (grad_weight,) = grads
        grad, x = ctx.saved_tensors
        grad_grad = grad_x = None
        with weight_scopes.changing():  # what stands for the weight is a gradient
            if x is not None:
                grad_grad = ks_mm(x, grad_weight, ctx.batch_last)
            if grad is not None:
                grad_x = ks_mm(grad, grad_weight.transpose(1, 2), ctx.batch_last)
        return grad_grad, grad_x, None, None, None


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _register_autograd(
    op: torch._ops.OpOverload,
    inner: Callable[..., Tensor],
    kernel_of_inner: Callable[..., Tensor],
    differentiable: Callable[..., Any],
    decomposed: Callable[..., Tensor],
    defaults: tuple[Any, ...],
) -> None:
    """Make ``op`` differentiable by ``differentiable``, which records an autograd.Function.

    A graph that torch.compile traced through this kernel calls ``inner``, or what that calls, and
    never comes back here. Where nobody traces, ``kernel_of_inner`` is called at once, which saves a
    way through the dispatcher: about 2 us of a call.

    torch.library.register_autograd is not used: it refuses torch.func.grad, drops the tangents of
    forward mode without a word, and adds 7 us to a call that needs no gradient instead of 4. Under
    transforms of torch.func and in forward mode ``decomposed``, made of torch's own operators,
    stands in: slower, and right for any nesting.
    """

    def kernel(*args: Any) -> Tensor:
        # The dispatcher leaves out arguments that equal their defaults.
        args = (*args, *defaults[len(args) :])
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            return decomposed(*args)
        if torch.is_grad_enabled() and (args[0].requires_grad or args[1].requires_grad):
            return differentiable(*args)
        x = args[0]
        plain = type(x) in _PLAIN and type(args[1]) in _PLAIN and (x.is_cuda or x.is_cpu)
        if plain and torch._C._len_torch_dispatch_stack() == 0:
            return kernel_of_inner(*args)
        # ``inner`` has no kernel for autograd: an owner that requires gradients, beside a weight
        # that was detached from it, would make torch's own require them of the result.
        with torch._C._AutoDispatchBelowAutograd():
            return inner(*args)

    _LIBRARY.impl(op, kernel, "Autograd")


def _ks_mm_traced(x: Tensor, weight: Tensor, batch_last: bool, owner: Tensor | None) -> Tensor:
    """The twin that says in a compiled graph what `ksopt.kernels.weight_scopes` says here."""
    twin = ks_mm_frozen if weight_scopes.said.frozen else ks_mm_inner
    if weight_cache.are_said_to_change():
        twin = ks_mm_changing
    y: Tensor = twin(x, weight, batch_last, owner)
    return y


def _weight_grad_traced(grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> Tensor:
    """ks_mm_weight_grad below autograd, in torch's own operators: compiled graphs hold these."""
    # They may end in a view of what they make: torch would forbid in-place operations on it. And
    # autocast would cast for them, as it does not for the operator.
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
        return op_kernels.weight_grad_decomposed(grad, x, a, d, batch_last)


_register_autograd(
    ks_mm,
    _ks_mm_traced,
    op_kernels.product,
    _with_gradients,
    op_kernels.decomposed,
    (None, None, False, None),
)
_register_autograd(
    ks_mm_weight_grad,
    _weight_grad_traced,
    op_kernels.weight_grad,
    _KsMmWeightGrad.apply,
    op_kernels.weight_grad_decomposed,
    (),
)


def multiply(x: Tensor, weight: Tensor, batch_last: bool = False) -> Tensor:
    """`ks_mm`, past torch's dispatcher where that has nothing to do: some 2 us less of a call.

    That is outside of compilation, where no gradient is recorded and neither a mode nor a transform
    nor autocast is on, for ordinary tensors.
    """
    if _are_ordinary(x, weight):
        return op_kernels.product(x, weight, batch_last)
    product: Tensor = ks_mm(x, weight, batch_last)
    return product


def add(y: Tensor, bias: Tensor) -> Tensor:
    """y + bias, in y's own memory where nobody could tell: of y, which nobody else has seen yet."""
    return y.add_(bias) if _are_ordinary(y, bias) else y + bias


def _are_ordinary(x: Tensor, other: Tensor) -> bool:
    """Whether torch would do nothing with a call on these tensors beside running it."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and type(other) in _PLAIN
        and (x.is_cuda or x.is_cpu)
        and not _is_watched()
    )


def _is_watched() -> bool:
    """Whether torch may have something to do with a call beside running it."""
    return (
        torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or torch._C._get_tracing_state() is not None
    )


# Autocast, as for torch.nn.functional.linear: float32 and 16-bit tensors of the autocast device
# are cast to the dtype in force, float64 is left alone. (torch.library.register_autocast casts to
# one dtype for ever.) The cast of a weight is kept where no gradient of it is recorded; torch casts
# such a weight at each call.


def _register_autocast(device_type: str, key: str) -> None:
    this_key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(
        x: Tensor, weight: Tensor, batch_last: bool = False, owner: Tensor | None = None
    ) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(this_key):
            if _is_cast(x, dtype):
                x = x.to(dtype)
            if _is_cast(weight, dtype):
                if x.dtype == dtype:
                    owner = weight if owner is None else owner
                else:
                    weight = weight.to(dtype)  # which ks_mm refuses beside such an x
            return ks_mm(x, weight, batch_last, owner)

    def _is_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
        eligible = tensor.is_floating_point() and tensor.dtype not in (torch.float64, dtype)
        return eligible and tensor.device.type == device_type

    _LIBRARY.impl("ks_mm", kernel, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


# vmap. One weight: the mapped dim is one more batch dim. As many weights as samples: side by side
# they are one block-diagonal matrix, whose pattern has a times as many blocks.


def _vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    batch_last: bool = False,
    owner: Tensor | None = None,
) -> tuple[Tensor, int]:
    x_dim, weight_dim = in_dims[:2]
    if owner is not None:
        weight = weight.to(x.dtype)
    if weight_dim is None:
        assert x_dim is not None
        at = 1 if batch_last else 0
        return ks_mm(x.movedim(x_dim, at), weight, batch_last), at
    size = info.batch_size
    blocks = weight.movedim(weight_dim, 0).flatten(0, 1)
    y = ks_mm(_side_by_side(x, x_dim, size, batch_last), blocks, batch_last)
    at = 0 if batch_last else y.dim() - 1
    return y.unflatten(at, (size, y.shape[at] // size)), at


def _vmap_weight_grad(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad: Tensor,
    x: Tensor,
    a: int,
    d: int,
    batch_last: bool,
) -> tuple[Tensor, int]:
    size = info.batch_size
    blocks = ks_mm_weight_grad(
        _side_by_side(grad, in_dims[0], size, batch_last),
        _side_by_side(x, in_dims[1], size, batch_last),
        size * a,
        d,
        batch_last,
    )
    return blocks.unflatten(0, (size, a)), 0


def _side_by_side(tensor: Tensor, dim: int | None, size: int, batch_last: bool) -> Tensor:
    """Merge the mapped dim into the features: [size, *batch, N] -> [*batch, size*N]."""
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1) if batch_last else mapped.movedim(0, -2).flatten(-2, -1)


torch.library.register_vmap("ksopt::ks_mm", _vmap, lib=_LIBRARY)
torch.library.register_vmap("ksopt::ks_mm_weight_grad", _vmap_weight_grad, lib=_LIBRARY)
