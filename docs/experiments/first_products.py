"""The time of a problem's first product: compiling, checking, timing, choosing.

    KSOPT_CACHE_DIR=$(mktemp -d) python docs/experiments/first_products.py

With a cache that holds the choices, the time to read and load them.
"""

from __future__ import annotations

import torch

from ksopt import ops
from ksopt.measure.timed_call import TimedCall
from ksopt.patterns.chain import Pattern

PATTERNS = ("(4,64,64,16)", "(1,1024,1024,4)", "(8,512,512,1)", "(1,192,192,16)", "(16,128,128,4)")
BATCHES = (1, 64, 25_088)


def main() -> None:
    product = TimedCall(ops.ks_mm, torch.device("cuda"))
    for dtype in (torch.float16, torch.float32):
        for text in PATTERNS:
            p = Pattern.parse(text)
            weight = torch.randn(p.weight_shape, device="cuda", dtype=dtype)
            for batch in BATCHES:
                x = torch.randn(batch, p.in_features, device="cuda", dtype=dtype)
                product(x, weight)
                print(f"{dtype} {text} batch {batch}: {product.us / 1e6:.3f} s", flush=True)


if __name__ == "__main__":
    main()
