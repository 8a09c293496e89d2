"""PyTorch's own ways to multiply, as rivals of the kernels: which make sense, and what they cost.

The predicted times are rooflines of what each way moves and computes, made to meet the times in
docs/performance.md within a factor of about two. They decide only where nothing may be timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ksopt.baselines import BASELINES, Baseline, Product
from ksopt.kernels import packed
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern

# An expanded product costs d times the flops: past this no saved copy pays for it.
_MAX_EXTRA_FLOPS = 16
_MAX_LOOP = 64
_PERMUTED = ("bmm", "bmm_paper", "bmm_loop")  # one form of the weight, [a*d, b, c]

# Of one multiprocessor, in a microsecond.
_BYTES = 30_000.0
_COPY_BYTES = 0.45 * _BYTES  # PyTorch's permuting copies, up to _COPY_D and then slower
_COPY_D = 16
_FLOPS = {"float32": 0.33e6, "tf32": 2.5e6, "float16": 4.5e6, "bfloat16": 4.5e6, "float64": 0.33e6}
_LAUNCH_US = 4.0


def names(problem: Problem, device_type: str) -> list[str]:
    """The ways worth trying on ``device_type``, the simplest first."""
    p = problem.pattern
    found = ["bmm", "bmm_paper", "einsum"]
    if min(p.a, p.d) <= _MAX_LOOP:
        found.append("bmm_loop")
    if 1 < p.d <= _MAX_EXTRA_FLOPS:
        found.append("expand")
    if p.a * p.d <= _MAX_EXTRA_FLOPS and (device_type != "cpu" or p.a > 1 or p.d == 1):
        found.append("dense")
    product = Product(p, getattr(torch, problem.dtype), device_type, problem.batch_last)
    return [name for name in found if BASELINES[name].supports(product).ok]


def prepares(name: str, problem: Problem) -> bool:
    """Whether the way's weight is another tensor than the canonical one."""
    return _prepares(name, problem.pattern)


def _prepares(name: str, p: Pattern) -> bool:
    if name == "dense":
        return p.a * p.d > 1
    return name != "einsum" and p.d > 1


def multiplier(name: str, problem: Problem) -> Callable[..., Tensor]:
    """(x, weight, out=None) -> y by one of PyTorch's ways, its weight prepared once a version."""
    baseline, p, last = BASELINES[name], problem.pattern, problem.batch_last

    def call(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return baseline.multiply(x, prepared(baseline, weight, p, last), p, last, out)

    return call


def prepared(baseline: Baseline, weight: Tensor, p: Pattern, batch_last: bool) -> Tensor:
    """The weight as a baseline wants it: kept (packed.py) where that is another tensor."""
    name = baseline.name
    if not _prepares(name, p):
        return baseline.prepare(weight, batch_last)
    form = "bmm" if name in _PERMUTED else name
    return packed.prepared(weight, form, lambda w: baseline.prepare(w, batch_last))


def predicted_us(name: str, problem: Problem, batch: int, multiprocessors: int) -> float:
    """Predicted time of one of PyTorch's ways on a CUDA device, its weight prepared.

    Args:
        name: one of `names`.
        problem: what is computed.
        batch: rows of x.
        multiprocessors: of the device.
    """
    p = problem.pattern
    size = getattr(torch, problem.dtype).itemsize
    x, y = size * batch * p.in_features, size * batch * p.out_features
    spread = {"dense": p.a * p.d, "expand": p.d}.get(name, 1)  # zeros that are multiplied too
    rate = _FLOPS[problem.dtype if problem.exact else "tf32"]
    # A product of few outputs or few sums leaves most of a tensor core's tile empty.
    fill = min(1.0, p.b * spread / 64) * min(1.0, p.c * spread / 32)
    product = max(
        (x + y + spread * size * p.nnz) / _BYTES,
        spread * p.flops(batch) / (rate * max(fill, 0.05)),
    )
    copied, launches = _copies(name, problem)
    copying = 2 * copied * (x + y) / _COPY_BYTES
    if not problem.batch_last:  # runs of d values; in batch_last, runs of whole rows
        copying *= max(1.0, p.d / _COPY_D)
    return (product + copying) / multiprocessors + launches * _LAUNCH_US


def _copies(name: str, problem: Problem) -> tuple[int, int]:
    """How often x and y are copied each, and how many kernels are launched."""
    p = problem.pattern
    if name in ("dense", "expand"):
        return 0, 1
    if name == "bmm_loop":
        return 0, min(p.a, p.d)
    direct = p.d == 1 or (problem.batch_last and p.a == 1)
    if name == "bmm" and direct:
        return 0, 1
    if p.a * p.d == 1:
        return 0, 1
    return 1, 3
