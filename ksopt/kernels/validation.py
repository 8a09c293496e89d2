"""The operators' argument checks, with the same errors for eager, fake and meta tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt.epilogue import GATES, check_activation
from ksopt.errors import InvalidInputError
from ksopt.precision import dtype_name

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_tensors(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """Refuse arguments that are no tensor where one is needed.

    Args:
        op: the operator's name.
        x, weights, bias, residual: the operator's.

    Raises:
        InvalidInputError: another kind of object, an array of NumPy's, say.
    """
    if not hasattr(weights, "__iter__"):
        kind = type(weights).__qualname__
        raise InvalidInputError(
            f"{op}: weights is of type {kind}, but it must be a list of tensors"
        )
    for operand in (x, *weights):
        if not isinstance(operand, Tensor):
            raise InvalidInputError(_no_tensor(op, "x" if operand is x else "a weight", operand))
    for name, summand in (("bias", bias), ("residual", residual)):
        if summand is not None and not isinstance(summand, Tensor):
            raise InvalidInputError(_no_tensor(op, name, summand))


def _no_tensor(op: str, name: str, value: object) -> str:
    kind = "None" if value is None else f"of type {type(value).__qualname__}"
    return f"{op}: {name} is {kind}, but it must be a tensor"


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
            kind = dtype_name(tensor.dtype) if tensor.is_quantized else str(tensor.layout)
            raise InvalidInputError(
                f"{op}: {name} is stored as {kind.removeprefix('torch.')}, but it must be an "
                "ordinary tensor (call its to_dense() or dequantize())"
            )


def check_ks_mm(x: Tensor, weight: Tensor, batch_last: bool, *, any_dtype: bool = False) -> None:
    """Refuse operands that ks_mm cannot multiply, with the reason.

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


def check_castable(op: str, x: Tensor, weight: Tensor) -> None:
    """Refuse a weight that is not converted to x's dtype, with the reason.

    Args:
        op: the operator's name.
        x, weight: the operator's.

    Raises:
        InvalidInputError: dtypes or devices that do not fit together; tensors that are not dense in
            memory.
    """
    check_memory(op, x=x, weight=weight)
    _check_kind(x, weight, op, "x", "weight", any_dtype=True)


def check_out(x: Tensor, weight: Tensor, batch_last: bool, out: Tensor) -> None:
    """Refuse an ``out`` that cannot hold the product of operands that `check_ks_mm` accepts.

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
            f"ks_mm: out is {dtype_name(out.dtype)} on {out.device}, but it must be as x is: "
            f"{dtype_name(x.dtype)} on {x.device}"
        )


def check_chain_out(y: Tensor, out: Tensor) -> None:
    """Refuse an ``out`` that cannot hold a chain's result, such as y.

    Raises:
        InvalidInputError: another shape, dtype or device than y has.
    """
    if out.shape != y.shape:
        raise InvalidInputError(
            f"ks_chain: out has shape {_shape(out)}, but the result has shape {_shape(y)}"
        )
    if out.dtype != y.dtype or out.device != y.device:
        raise InvalidInputError(
            f"ks_chain: out is {dtype_name(out.dtype)} on {out.device}, but it must be as the "
            f"result is: {dtype_name(y.dtype)} on {y.device}"
        )


def is_written_straight(out: Tensor, *operands: Tensor | None) -> bool:
    """Whether kernels may write straight into out; other results are copied into it.

    That is where it is contiguous, aligned to 16 bytes, and shares no memory with the operands.
    """
    begin = out.data_ptr()
    if begin % 16 != 0 or not out.is_contiguous():
        return False
    end = begin + out.nbytes
    for operand in operands:
        if operand is None:
            continue
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
            f"{op}: {one} is {dtype_name(first.dtype)} and {other} is {dtype_name(second.dtype)}, "
            "but they must have one dtype (convert one of them, or run under torch.autocast)"
        )
    if first.dtype not in DTYPES:
        allowed = ", ".join(dtype_name(dtype) for dtype in DTYPES)
        raise InvalidInputError(
            f"{op}: {one} is {dtype_name(first.dtype)}, but it must be one of {allowed}"
        )
    if first.device != second.device:
        raise InvalidInputError(
            f"{op}: {one} is on {first.device} and {other} on {second.device}, but they must be "
            "on one device"
        )


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def check_weight_grad(grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> None:
    """Refuse operands that ks_mm_weight_grad cannot multiply.

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


def check_result_in_float32(op: str, x: Tensor, residual: Tensor | None) -> None:
    """Refuse a layer whose result cannot be cast to float32.

    Raises:
        InvalidInputError: operands of float64; a residual beside those of 16 bit.
    """
    if x.dtype == torch.float64:
        raise InvalidInputError(
            f"{op}: x is float64, whose result stays float64: results of 16-bit operands alone "
            "are cast to float32"
        )
    if residual is not None and x.dtype.itemsize == 2:
        raise InvalidInputError(
            f"{op}: a result in float32 takes no residual: add it to the result instead"
        )


def check_chain(op: str, weights: Sequence[Tensor], siblings: int, activation: str) -> None:
    """Refuse a chain that cannot be split into siblings, and an unknown activation.

    Args:
        op: the operator's name.
        weights: of all siblings.
        siblings: chains.
        activation: the epilogue's.

    Raises:
        InvalidInputError: no weights, or not as many of each sibling; an unknown activation; a gate
            of other than two siblings, or of siblings that are not alike.
    """
    count = len(weights)
    if count == 0:
        raise InvalidInputError(f"{op}: weights is empty, but a chain has at least one factor")
    if siblings < 1 or count % siblings != 0:
        raise InvalidInputError(
            f"{op}: {count} weights cannot be those of {siblings} siblings, which have as many "
            "factors each"
        )
    check_activation(activation, siblings)
    if activation in GATES:
        one, other = (
            [list(weight.shape) for weight in several]
            for several in (weights[: count // 2], weights[count // 2 :])
        )
        if one != other:
            raise InvalidInputError(
                f"{op}: activation {activation!r} multiplies the products of 2 siblings, but their "
                f"weights have shapes {one} and {other}: they must be the same"
            )


def shape_of_result(y: Tensor, activation: str, batch_last: bool) -> list[int]:
    """The shape of an activation's result for a chain's product y of all siblings."""
    shape = list(y.shape)
    if activation in GATES:
        shape[0 if batch_last else -1] //= 2
    return shape


def check_epilogue(
    op: str,
    y: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    batch_last: bool,
) -> None:
    """Refuse a bias or residual that cannot be added to a chain's product y, or to a gate's.

    Raises:
        InvalidInputError: another shape or dtype than the product's.
    """
    if bias is not None:
        features = y.shape[0 if batch_last else -1]
        if bias.dim() != 1 or bias.shape[0] != features:
            raise InvalidInputError(
                f"{op}: bias has shape {_shape(bias)}, but the chain has {features} outputs: "
                f"it must be [{features}]"
            )
    if residual is not None:
        shape = shape_of_result(y, activation, batch_last)
        if list(residual.shape) != shape:
            raise InvalidInputError(
                f"{op}: residual has shape {_shape(residual)}, but the product {shape}: they must "
                "be the same"
            )
    for name, tensor in (("bias", bias), ("residual", residual)):
        if tensor is not None and tensor.dtype != y.dtype:
            raise InvalidInputError(
                f"{op}: {name} is {dtype_name(tensor.dtype)} and the product "
                f"{dtype_name(y.dtype)}, but they must have one dtype"
            )
