"""The layers of a crossover map: y = gelu(x W^T + bias), dense, in FP8, or by a chain.

x is [rows, n], W [n, n]; every way computes GELU by its tanh approximation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ksopt import precision
from ksopt.bench.crossover.results import DENSE, DENSE_FUSED
from ksopt.epilogue import with_epilogue
from ksopt.measure.accuracy import (
    TF32_ROUNDING,
    AccuracyCheck,
    Around,
    fault_against,
    fault_beyond,
    relative_error,
)
from ksopt.nn import KSLinear
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference

ACTIVATION: Final = "gelu_tanh"
_FP8 = torch.float8_e4m3fn
_FP8_LARGEST = torch.finfo(_FP8).max
# FP8 has three bits behind the point: each operand is off by up to 1/16, the product by less. It is
# no multiple of PyTorch's error, because PyTorch computes this product itself.
_FP8_ERROR = 0.08
_FP8_FAULT = "relative error {error:.1e}, allowed {allowed:g}"
_CHECKED_ROWS = 256

Layer = Callable[[Tensor], Tensor]


class Dense(nn.Module):
    """A dense layer as PyTorch users write it: linear, then GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, n] -> [rows, n]."""
        return F.gelu(self.linear(x), approximate="tanh")


def dense_layers(module: Dense, is_training: bool) -> dict[str, Layer]:
    """The dense layer's forms by name: the module, and cuBLAS's product with GELU fused into it.

    The fused form has no gradient, so it is for inference; on a CPU it computes another GELU.
    """
    forms: dict[str, Layer] = {DENSE: module}
    on_gpu = module.linear.weight.is_cuda
    if on_gpu and not is_training and hasattr(torch, "_addmm_activation"):
        weight, bias = module.linear.weight, module.linear.bias
        forms[DENSE_FUSED] = lambda x: torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return forms


class Fp8Dense:
    """The dense layer in FP8: each call scales and rounds x; the weight is rounded beforehand.

    Each operand has one static scale, which maps its largest number to FP8's largest.

    Args:
        module: the dense layer, in 16 bit.
        x: [rows, n], which sets the scale of later inputs.
    """

    def __init__(self, module: Dense, x: Tensor) -> None:
        weight, self._bias = module.linear.weight.detach(), module.linear.bias.detach()
        x_scale, w_scale = (_FP8_LARGEST / one.abs().max().float() for one in (x, weight))
        self._weight = (weight * w_scale).to(_FP8)
        self._dtype, self._x_factor = x.dtype, x_scale.to(x.dtype)
        self._x_back, self._w_back = self._x_factor.float().reciprocal(), w_scale.reciprocal()

    def rounded(self, x: Tensor) -> Tensor:
        """x in FP8, scaled."""
        return (x * self._x_factor).clamp(-_FP8_LARGEST, _FP8_LARGEST).to(_FP8)

    def of_rounded(self, x: Tensor) -> Tensor:
        """The layer's result for a rounded x, as where the layer before has rounded it.

        Raises:
            RuntimeError: the device or torch has no FP8 product, or none of this size.
        """
        y = torch._scaled_mm(
            x,
            self._weight.t(),
            scale_a=self._x_back,
            scale_b=self._w_back,
            bias=self._bias,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )
        return F.gelu(y, approximate="tanh")

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, n] -> [rows, n] in 16 bit; raises as `of_rounded` does."""
        return self.of_rounded(self.rounded(x))


def ks_layer(chain: Chain, dtype: torch.dtype, device: torch.device) -> KSLinear:
    """A Kronecker-sparse layer with its bias and activation."""
    n_out, n_in = chain.shape
    return KSLinear(n_in, n_out, chain, device=device, dtype=dtype, activation=ACTIVATION)


def fault_of_ks(layer: KSLinear, x: Tensor) -> str | None:
    """The fault of a Kronecker-sparse layer's result for x, in words; None if it is correct."""
    weights = [weight.detach() for weight in layer.weights]
    bias = None if layer.bias is None else layer.bias.detach()
    around = Around(bias=bias, activation=ACTIVATION)
    return AccuracyCheck(x, weights, "batch_first", around=around).fault_of(layer)


def fault_of_dense(layer: Layer, module: Dense, x: Tensor) -> str | None:
    """The fault of a dense form's result for x, in words; None if it is correct."""
    weight = module.linear.weight.detach()[None, :, :, None]
    around = Around(bias=module.linear.bias.detach(), activation=ACTIVATION)
    return AccuracyCheck(x, [weight], "batch_first", around=around).fault_of(layer)


def fault_of_fp8(layer: Layer, module: Dense, x: Tensor) -> str | None:
    """The fault of an FP8 result for x beyond FP8's rounding, in words; None if it is correct."""
    few = x[:_CHECKED_ROWS].double()
    weight, bias = module.linear.weight.double(), module.linear.bias.double()
    truth = with_epilogue(few @ weight.t(), bias, ACTIVATION)
    error = relative_error(layer(x)[:_CHECKED_ROWS], truth)
    return fault_beyond(error, _FP8_ERROR, _FP8_FAULT)


def step(layer: Layer, parameters: Sequence[Tensor], x: Tensor, g: Tensor) -> Callable[[], object]:
    """A training step: the gradients of x and of the parameters from that of the result.

    Args:
        layer: [rows, n] -> [rows, n].
        parameters: of the layer.
        x: [rows, n], which requires a gradient.
        g: [rows, n], the gradient of the result.
    """
    inputs = [x, *parameters]
    return lambda: torch.autograd.grad(layer(x), inputs, g)


def fault_of_gradients(layer: KSLinear, x: Tensor) -> str | None:
    """The fault of a layer's gradients for x, in words; None if they are correct.

    The gradient of the result is random in the first rows and 0 in the others: the layer computes
    the whole batch, and the reference needs those rows only.
    """
    g = torch.zeros_like(x)
    rows = min(_CHECKED_ROWS, x.shape[0])
    g[:rows].normal_()
    weights = list(layer.weights)
    assert layer.bias is not None
    parameters = [*weights, layer.bias]
    gradients = torch.autograd.grad(layer(x), [x, *parameters], g)
    mine = [gradients[0][:rows], *gradients[1:]]

    def plain(kind: torch.dtype) -> list[Tensor]:
        few, *own = (one.detach().to(kind).requires_grad_() for one in (x[:rows], *parameters))
        y = with_epilogue(chain_reference(few, own[:-1], "batch_first"), own[-1], ACTIVATION)
        return list(torch.autograd.grad(y, [few, *own], g[:rows].to(kind)))

    rounding = torch.finfo(x.dtype).eps
    if x.is_cuda and x.dtype == torch.float32 and not precision.is_exact():
        rounding = TF32_ROUNDING
    names = ["x", *(f"factor {at}" for at in range(1, len(weights) + 1)), "bias"]
    for name, own, theirs, truth in zip(
        names, mine, plain(x.dtype), plain(torch.float64), strict=True
    ):
        fault = fault_against(own, theirs, truth, rounding)
        if fault is not None:
            return f"gradient of {name}: {fault}"
    return None
