"""Ways to compute a factor's weight gradient, beside that of the dense layer whose chain it is in.

    python docs/experiments/weight_gradients.py [--device cuda] [--rows 25088] [--dtype bfloat16]

dK[i,k,l,j] is the sum over the rows n of dY[n,i,k,j] X[n,i,l,j]. With d > 1 neither dY nor X is a
batch of matrices: ``apart`` copies both into one, which is what ksopt does. ``joined`` multiplies
the j's by each other and keeps the diagonal: d times the flops and no copy. ``split`` adds up
shares of the rows, in float32. Each way is checked against float64 first, then all take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ksopt import ops
from ksopt.measure import timing
from ksopt.patterns.chain import Chain, Pattern

LAYERS = (
    (384, 1536, "(1,768,64,2)*(2,64,192,1)"),
    (1536, 384, "(1,192,64,2)*(2,64,768,1)"),
    (384, 1152, "(1,576,64,2)*(2,64,192,1)"),
    (1024, 4096, "(1,2048,170,2)*(2,170,512,1)"),
    (1024, 1024, "(1,512,128,2)*(2,128,512,1)"),
    (1024, 1024, "(1,256,128,4)*(4,128,256,1)"),
    (1024, 1024, "(1,128,128,8)*(8,128,128,1)"),
    (2048, 2048, "(1,1024,256,2)*(2,256,1024,1)"),
)
SPLITS = (4, 16)
Way = Callable[[Tensor, Tensor, Pattern], Tensor]


def apart(grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """As ksopt does: one batched product of a*d matrices."""
    return ops.ks_mm_weight_grad(grad, x, p.a, p.d, False)


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """A product whose sums stay in float32."""
    if a.dtype is torch.float32 or not a.is_cuda:
        return torch.matmul(a, b)
    product = torch.mm if a.dim() == 2 else torch.bmm
    return product(a, b, out_dtype=torch.float32)


def _kept(blocks: Tensor, p: Pattern, dtype: torch.dtype) -> Tensor:
    """Of [a, b*d, c*d] the values of equal j: [a, b, c, d]."""
    return blocks.view(p.a, p.b, p.d, p.c, p.d).diagonal(0, 2, 4).to(dtype).contiguous()


def joined(grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """One batched product of a matrices [b*d, c*d]."""
    rows = grad.view(-1, p.a, p.b * p.d).permute(1, 2, 0)
    return _kept(_wide(rows, x.view(-1, p.a, p.c * p.d).transpose(0, 1)), p, x.dtype)


def joined_one_by_one(grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """The same as a products, which a library may split over the rows by itself."""
    rows, others = grad.view(-1, p.a, p.b * p.d), x.view(-1, p.a, p.c * p.d)
    blocks = [_wide(rows[:, i].T, others[:, i]) for i in range(p.a)]
    return _kept(torch.stack(blocks), p, x.dtype)


def joined_split(parts: int, grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """a batched products of shares of the rows, added up."""
    rows = grad.view(parts, -1, p.a, p.b * p.d)
    others = x.view(parts, -1, p.a, p.c * p.d)
    blocks = [_wide(rows[:, :, i].mT, others[:, :, i]).sum(0) for i in range(p.a)]
    return _kept(torch.stack(blocks), p, x.dtype)


def whole(grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """One product of all of the matrix, of which the support is kept."""
    blocks = _wide(grad.T, x).view(p.a, p.b * p.d, p.a, p.c * p.d).diagonal(0, 0, 2)
    return _kept(blocks.permute(2, 0, 1).contiguous(), p, x.dtype)


WAYS: dict[str, Way] = {
    "apart": apart,
    "joined": joined,
    "one by one": joined_one_by_one,
    "whole": whole,
    **{f"split {parts}": partial(joined_split, parts) for parts in SPLITS},
}


def main() -> None:
    """Check and time every way for the factors of each layer's chain."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=25_088)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    dtype: torch.dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    for n, m, text in LAYERS:
        dense_x = torch.randn(options.rows, n, device=options.device).to(dtype)
        dense_grad = torch.randn(options.rows, m, device=options.device).to(dtype)
        dense = {"dense": lambda grad=dense_grad, x=dense_x: grad.T @ x}
        for pattern in Chain.parse(text):
            x = torch.randn(options.rows, pattern.in_features, device=options.device).to(dtype)
            grad = torch.randn(options.rows, pattern.out_features, device=options.device).to(dtype)
            calls: dict[str, Callable[[], object]] = dict(dense)
            errors = {}
            truth = apart(grad.double(), x.double(), pattern)
            for name, way in WAYS.items():
                error = (way(grad, x, pattern).double() - truth).abs().max() / truth.abs().max()
                errors[name] = float(error)
                calls[name] = partial(way, grad, x, pattern)
            times = timing.measure(calls, options.device, max_seconds=0.5, precision=0.02)
            row = ", ".join(
                f"{name} {times[name].median_us:.1f} ({errors[name]:.0e})" for name in WAYS
            )
            print(f"{n} -> {m} {pattern}: dense {times['dense'].median_us:.1f} us; {row}")


if __name__ == "__main__":
    main()
