"""Both weight gradients of a chain in one launch: where, and by which kernel."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt import settings
from ksopt.errors import KsoptError
from ksopt.jit import host
from ksopt.kernels import weight_gradients
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.families import chain_grads_wgmma16 as kernels
from ksopt.kernels.families.chain_grads_launcher import ChainGradients, Gradients
from ksopt.kernels.families.pytorch_cost import bias_gradient_us
from ksopt.kernels.operands import in_aligned_rows
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name

_BY_FACTORS = (0,) * 11  # of `ChainGradients.entry`
_log = logging.getLogger("ksopt")


@dataclass(frozen=True)
class Factors:
    """The sizes of a chain's two weights that their gradients' operands do not determine.

    Attributes:
        left_a: blocks of the left factor.
        left_d: its d.
        right_a: blocks of the right factor.
        right_d: its d.
    """

    left_a: int
    left_d: int
    right_a: int
    right_d: int

    def chain(self, out: int, left_in: int, right_out: int, features: int) -> kernels.Chain:
        """The patterns, of the features of y, of both sides between the factors, and of x."""
        left, right = self.left_a * self.left_d, self.right_a * self.right_d
        return (
            Pattern(self.left_a, out // left, left_in // left, self.left_d),
            Pattern(self.right_a, right_out // right, features // right, self.right_d),
        )


def is_by_kernel(
    chain: kernels.Chain, dtype: torch.dtype, rows: int, device: torch.device, with_bias: bool
) -> bool:
    """Whether one launch is predicted to be faster than one per factor and one for the bias.

    Args:
        chain: the patterns of both factors.
        dtype: of the rows; batch first.
        rows: of all operands.
        device: where.
        with_bias: the gradient of a bias is computed, too.
    """
    if device.type != "cuda" or rows == 0 or settings.tuning() == "off":
        return False
    spec = backend_of("cuda").spec(device)
    name = dtype_name(dtype)
    return spec is not None and _is_faster(chain, name, rows, spec, with_bias)


def run(
    grad: Tensor, between: Tensor, grad_between: Tensor, x: Tensor, of: Factors, with_bias: bool
) -> Gradients | None:
    """Both weight gradients, and the gradient of a bias after the product, by a kernel.

    Args:
        grad: of y, [*batch, a1*b1*d1].
        between: what is between the factors, [*batch, a1*c1*d1].
        grad_between: its gradient, of the same shape.
        x: [*batch, a2*c2*d2].
        of: the factors.
        with_bias: sum the rows of ``grad``, too.

    Returns:
        None where no kernel computes them, or faster.
    """
    operands = (grad, between, grad_between, x)
    if not x.is_cuda or x.numel() == 0 or grad.numel() == 0:
        return None
    chain, rows = of.chain(*(one.shape[-1] for one in operands)), x.numel() // x.shape[-1]
    kernel = None
    spec = backend_of("cuda").spec(x.device)
    if spec is not None and is_by_kernel(chain, x.dtype, rows, x.device, with_bias):
        launch = kernels.best(chain, rows, spec)
        name = dtype_name(x.dtype)
        kernel = _loaded(chain, name, launch, x.get_device(), with_bias)
    if host.is_loaded():
        entry = list(_BY_FACTORS if kernel is None else kernel.entry)
        sizes = (of.left_a, of.left_d, of.right_a, of.right_d)
        torch.ops.ksopt_host.know_chain_grads(*operands, *sizes, with_bias, entry)
    if kernel is None:
        return None
    first, second, third, fourth = map(in_aligned_rows, operands)
    return kernel(first, second, third, fourth)


@functools.lru_cache(maxsize=4096)
def _is_faster(
    chain: kernels.Chain, dtype: str, rows: int, spec: DeviceSpec, with_bias: bool
) -> bool:
    if kernels.unsupported(chain, dtype, spec) is not None:
        return False
    launch = kernels.best(chain, rows, spec)
    return kernels.predicted_us(launch, chain, rows, spec) < by_factors_us(
        chain, dtype, rows, spec, with_bias
    )


def by_factors_us(
    chain: kernels.Chain, dtype: str, rows: int, spec: DeviceSpec, with_bias: bool
) -> float:
    """Predicted microseconds of one launch per factor, in 16 bits, and one for the bias."""
    left, _ = chain
    total = sum(weight_gradients.predicted_us(p, dtype, rows, spec) for p in chain)
    if with_bias and not weight_gradients.is_faster(left, dtype, rows, spec):
        total += bias_gradient_us(left.out_features, rows)
    return total


@functools.lru_cache(maxsize=1024)
def _loaded(
    chain: kernels.Chain, dtype: str, launch: kernels.Launch, device: int, with_bias: bool
) -> ChainGradients | None:
    try:
        return ChainGradients(chain, dtype, launch, device, with_bias)
    except KsoptError as error:
        _log.warning("ksopt: weight gradients of %s are computed one by one: %s", chain, error)
        return None
