"""From tensors to the fastest known way to multiply them. Forward only; called by ksopt.ops."""

from __future__ import annotations

from torch import Tensor

from ksopt.kernels.backends import cpu, cuda


def run_known(
    x: Tensor,
    weight: Tensor,
    batch_last: bool,
    out: Tensor | None = None,
    owner: Tensor | None = None,
) -> Tensor | None:
    """y, where these operands need neither be checked nor decided about anew; None otherwise.

    Args:
        x, weight, batch_last, out: as for `run`, or anything else that an operator may be given.
        owner: the tensor that weight is said to be a view of, itself none; None if nobody says so.
    """
    return cuda.run_known(x, weight, batch_last, out, owner) if x.is_cuda else None


def run_known_changing(
    x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None
) -> Tensor | None:
    """The same where weights change, which need not be said (`scopes.changing`)."""
    return cuda.run_known_changing(x, weight, batch_last, out) if x.is_cuda else None


def run(x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None) -> Tensor:
    """Compute y = x K^T.

    Args:
        x: (*batch, N), or (N, *batch) when ``batch_last``; CPU or CUDA, any strides.
        weight: (a, b, c, d), of the same dtype and device.
        batch_last: the layout.
        out: where the result is written, as for `cuda.run`; None for new memory.

    Returns:
        A contiguous tensor (*batch, M), or (M, *batch) when ``batch_last``; new, or in ``out``.

    Raises:
        CompilationError: a kernel does not compile, which is a fault of ksopt.
    """
    if x.is_cuda:
        return cuda.run(x, weight, batch_last, out)
    return cpu.run(x, weight, batch_last, out)
