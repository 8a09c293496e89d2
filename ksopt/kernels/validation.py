"""What the operators refuse, in words: eager, fake and meta tensors get the same sentences."""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt.errors import InvalidInputError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_memory(op: str, **operands: Tensor) -> None:
    """Refuse tensors that are no array of numbers in memory.

    Args:
        op: the operator's name.
        operands: its tensors, by their names.

    Raises:
        InvalidInputError: a sparse, nested or quantized tensor, or one in a library's own layout.
    """
    for name, tensor in operands.items():
        if tensor.is_nested:
            raise InvalidInputError(
                f"{op}: {name} is a nested tensor, but it must be an ordinary one (pad it, or "
                "multiply its parts)"
            )
        if tensor.is_quantized or tensor.layout is not torch.strided:
            kind = _dtype(tensor) if tensor.is_quantized else str(tensor.layout)
            raise InvalidInputError(
                f"{op}: {name} is stored as {kind.removeprefix('torch.')}, but it must be an "
                "ordinary tensor (call its to_dense() or dequantize())"
            )


def check_ks_mm(x: Tensor, weight: Tensor, batch_last: bool, *, any_dtype: bool = False) -> None:
    """Refuse what ks_mm cannot multiply, and say why.

    Args:
        x, weight, batch_last: the operator's.
        any_dtype: whether the weight may be of another dtype than x.

    Raises:
        InvalidInputError: shapes, dtypes or devices that do not fit together; tensors that are not
            dense in memory.
    """
    check_memory("ks_mm", x=x, weight=weight)
    if weight.dim() != 4:
        raise InvalidInputError(
            f"ks_mm: weight has shape {_shape(weight)}, but it must be [a, b, c, d]"
        )
    if weight.numel() == 0:
        raise InvalidInputError(
            f"ks_mm: weight has shape {_shape(weight)}, but a, b, c and d must be at least 1"
        )
    if x.dim() == 0:
        raise InvalidInputError("ks_mm: x is a scalar, but it must have a dim of features")
    a, _, c, d = weight.shape
    features = a * c * d
    if x.shape[0 if batch_last else -1] != features:
        dim, layout = ("first", "batch_last") if batch_last else ("last", "batch_first")
        raise InvalidInputError(
            f"ks_mm: x has shape {_shape(x)}, but with weight {_shape(weight)} in layout {layout} "
            f"its {dim} dim must be a*c*d = {features}"
        )
    _check_kind(x, weight, "ks_mm", "x", "weight", any_dtype)


def check_out(x: Tensor, weight: Tensor, batch_last: bool, out: Tensor) -> None:
    """Refuse what cannot hold the product of operands that `check_ks_mm` has let pass.

    Raises:
        InvalidInputError: another shape, dtype or device than the product has.
    """
    a, b, _, d = weight.shape
    shape = (a * b * d, *x.shape[1:]) if batch_last else (*x.shape[:-1], a * b * d)
    if out.shape != shape:
        raise InvalidInputError(
            f"ks_mm: out has shape {_shape(out)}, but the product of x {_shape(x)} and weight "
            f"{_shape(weight)} has shape {list(shape)}"
        )
    if out.dtype != x.dtype or out.device != x.device:
        raise InvalidInputError(
            f"ks_mm: out is {_dtype(out)} on {out.device}, but it must be as x is: {_dtype(x)} on "
            f"{x.device}"
        )


def is_written_straight(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether kernels may write into out: all else is copied into it, as by torch's own operators.

    That is where it is contiguous, aligned to 16 bytes, and shares no memory with the operands.
    """
    begin = out.data_ptr()
    if begin % 16 != 0 or not out.is_contiguous():
        return False
    end = begin + out.nbytes
    for operand in (x, weight):
        first = operand.data_ptr()
        if first < end and begin < first + _reach(operand):
            return False
    return True


def _reach(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to past its last."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((size - 1) * stride for size, stride in steps))


def _check_kind(
    first: Tensor, second: Tensor, op: str, one: str, other: str, any_dtype: bool = False
) -> None:
    if first.dtype != second.dtype and not (any_dtype and second.dtype in DTYPES):
        raise InvalidInputError(
            f"{op}: {one} is {_dtype(first)} and {other} is {_dtype(second)}, but they must have "
            "one dtype (convert one of them, or run under torch.autocast)"
        )
    if first.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise InvalidInputError(f"{op}: {one} is {_dtype(first)}, but it must be one of {allowed}")
    if first.device != second.device:
        raise InvalidInputError(
            f"{op}: {one} is on {first.device} and {other} on {second.device}, but they must be "
            "on one device"
        )


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_weight_grad(grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> None:
    """Refuse what ks_mm_weight_grad cannot multiply.

    Raises:
        InvalidInputError: shapes, dtypes or devices that do not fit together; tensors that are not
            dense in memory.
    """
    check_memory("ks_mm_weight_grad", grad=grad, x=x)
    if grad.dim() == 0 or x.dim() != grad.dim():
        raise InvalidInputError(
            f"ks_mm_weight_grad: grad has shape {_shape(grad)} and x {_shape(x)}, but both must "
            "have the same batch dims and one dim of features"
        )
    at = 0 if batch_last else -1
    batches = [t.shape[1:] if batch_last else t.shape[:-1] for t in (grad, x)]
    if batches[0] != batches[1]:
        raise InvalidInputError(
            f"ks_mm_weight_grad: grad has batch dims {list(batches[0])} and x {list(batches[1])}, "
            "but they must be the same"
        )
    for name, tensor in (("grad", grad), ("x", x)):
        if a < 1 or d < 1 or tensor.shape[at] == 0 or tensor.shape[at] % (a * d) != 0:
            raise InvalidInputError(
                f"ks_mm_weight_grad: {name} has {tensor.shape[at]} features, but they must be a "
                f"multiple of a*d = {a}*{d}"
            )
    _check_kind(grad, x, "ks_mm_weight_grad", "grad", "x")
