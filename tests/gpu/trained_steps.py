"""Compiled training steps on a GPU beside eager ones and float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


def gradients(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Those of x and of all parameters, of a fixed loss."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = function(x)
    generator = torch.Generator(x.device).manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, device=x.device)
    y.backward(grad.to(y.dtype))
    return [one.grad for one in (x, *model.parameters()) if one.grad is not None]


def kernels_of_step(model: nn.Module, x: Tensor) -> set[str]:
    """The kernels of a compiled step whose gradients are as exact as those of eager mode."""
    twin = copy.deepcopy(model).double()
    truth = gradients(twin, twin, x.double())
    eager = gradients(model, model, x)
    compiled = torch.compile(model, backend="ksopt")
    names: set[str] = set()
    for _ in range(2):  # by Python, and by the host library
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            mine = gradients(compiled, model, x)
            torch.cuda.synchronize()
        names |= {event.key for event in profiled.key_averages()}
        for one, other, exact in zip(mine, eager, truth, strict=True):
            error, theirs = ((a.double() - exact).norm() / exact.norm() for a in (one, other))
            assert error <= 1.1 * theirs + 1e-4
    return names
