"""Element types: their names, and the precision of fp32 products, by torch's own switches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype.

    Example:
        >>> dtype_name(torch.float16)
        'float16'
    """
    return str(dtype).removeprefix("torch.")


def is_exact() -> bool:
    """Whether fp32 products currently have fp32 precision (three TF32 products).

    False if ``torch.backends.cuda.matmul.allow_tf32`` is True,
    ``torch.set_float32_matmul_precision`` was called with ``"high"`` or ``"medium"``, or one of
    torch's ``fp32_precision`` switches above matrix products is ``"tf32"``, as for PyTorch's own.
    """
    # The value of torch.backends.cuda.matmul.fp32_precision, in a tenth of the time.
    return bool(torch._C._get_fp32_precision_getter("cuda", "matmul") != "tf32")


@contextmanager
def fp32_products(name: str) -> Iterator[None]:
    """Set the precision of FP32 products inside the block: full ("ieee") or TF32 ("tf32").

    torch's older switches (such as allow_tf32) raise while this newer one is in use; this one works
    beside them and restores the previous state.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = name
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
