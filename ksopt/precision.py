"""How exact fp32 products are to be: torch's own switches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_exact() -> bool:
    """Whether fp32 products are to be exact to fp32 (three TF32 products) at this moment.

    False where ``torch.backends.cuda.matmul.allow_tf32`` is True,
    ``torch.set_float32_matmul_precision`` was given ``"high"`` or ``"medium"``, or one of torch's
    ``fp32_precision`` switches above matrix products is ``"tf32"``: what PyTorch's own products do.
    """
    # What torch.backends.cuda.matmul.fp32_precision gives, in a tenth of the time.
    return bool(torch._C._get_fp32_precision_getter("cuda", "matmul") != "tf32")


@contextmanager
def fp32_products(name: str) -> Iterator[None]:
    """FP32 products in full ("ieee") or through TF32 ("tf32") inside, the user's setting after.

    torch's older switches (allow_tf32 and its like) raise where this newer one is in use; this one
    works beside them, and leaves them as they were.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = name
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
