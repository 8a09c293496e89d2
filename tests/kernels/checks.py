"""Operands for emulated kernels, and how far a result may be from float64."""

import torch
from torch import Tensor

from ksopt.kernels.problem import Problem
from ksopt.reference import ks_reference

# Largest relative error of one rounding to nearest, and half the spacing of subnormal numbers.
_ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
_SUBNORMAL = {"float32": 2**-150, "float16": 2**-25, "bfloat16": 2**-134}


def operands(problem: Problem, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random x and contiguous weight; x's rows lie apart in memory, with NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    p = problem.pattern
    slow, fast = (p.in_features, batch) if problem.batch_last else (batch, p.in_features)
    memory = torch.full((slow, -(-fast // 8) * 8 + 8), float("nan"), dtype=dtype)
    x = memory[:, :fast]
    x.copy_(torch.randn(slow, fast, generator=generator))
    return x, torch.randn(p.weight_shape, generator=generator).to(dtype)


def assert_close_to_float64(y: Tensor, x: Tensor, weight: Tensor, problem: Problem) -> None:
    """Every element within its own bound: fp32 sums in any order, then one rounding."""
    layout = "batch_last" if problem.batch_last else "batch_first"
    truth = ks_reference(x.double(), weight.double(), layout)
    magnitude = ks_reference(x.double().abs(), weight.double().abs(), layout)
    sums = (problem.pattern.c + 1) * 2**-24 * magnitude
    rounding = _ROUNDING[problem.dtype]
    allowed = sums + rounding * (truth.abs() + sums) + _SUBNORMAL[problem.dtype]
    assert y.shape == truth.shape
    wrong = ~((y.double() - truth).abs() <= allowed)  # also true of NaN
    assert not wrong.any(), (
        f"{problem}: {int(wrong.sum())} of {wrong.numel()} outputs are wrong, the first at "
        f"{wrong.nonzero()[0].tolist()}: {y[wrong][0].item()} instead of {truth[wrong][0].item()}"
    )
