"""How exact fp32 products are to be: torch's own switches."""

from __future__ import annotations

import torch


def is_exact() -> bool:
    """Whether fp32 products are to be exact to fp32 (three TF32 products) at this moment.

    False where ``torch.backends.cuda.matmul.allow_tf32`` is True,
    ``torch.set_float32_matmul_precision`` was given ``"high"`` or ``"medium"``, or one of torch's
    ``fp32_precision`` switches above matrix products is ``"tf32"``: what PyTorch's own products do.
    """
    # What torch.backends.cuda.matmul.fp32_precision gives, in a tenth of the time.
    return bool(torch._C._get_fp32_precision_getter("cuda", "matmul") != "tf32")
