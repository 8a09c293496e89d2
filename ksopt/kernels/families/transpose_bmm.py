"""Transposes at copy speed around PyTorch's batched matrix product (csrc/cuda/transpose_bmm.cuh).

x' = x with l side by side, y' = x' K^T by cuBLAS, one matrix product for each (i, j), and y = y'
with j side by side again. What PyTorch's own permuting copies do at a fraction of the memory's
speed, the transposes do at 0.94 of it, and the product itself is near its own limit: three passes
over x and y where one would be the least. No kernel of one pass here is faster where b and c are
large, because the weights of the j that share a sector of x then exceed a multiprocessor's shared
memory many times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.batched import Matrices
from ksopt.kernels import weight_table
from ksopt.kernels.families.base import ANY_TYPE, KernelFamily, register_family
from ksopt.kernels.families.common import pytorch_cost, transpose
from ksopt.kernels.launcher import Entry, Launcher, torch_entry
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern

# For one multiprocessor of an H200, from 25 patterns at a batch of 25,088 (docs/development).
_DRAM_BYTES_US = 32_300.0
_COPY_OVERHEAD = 1.05  # a transpose against a plain copy
_LAUNCHES_US = 12.0


@dataclass(frozen=True)
class Config:
    """The only configuration."""

    dtype: str

    @property
    def blocks(self) -> int:
        """Blocks that must run on a multiprocessor at a time."""
        return 1

    def shared_bytes(self, p: Pattern) -> int:
        """No dynamic shared memory."""
        return 0


def pack(weight: Tensor) -> Tensor:
    """The weight (a, b, c, d) as matrices (a, d, b, c): what `PermutedProduct.multiply` takes."""
    a, _, _, d = weight.shape
    return Matrices.of(Pattern(*weight.shape)).prepare(weight).unflatten(0, (a, d))


@dataclass(frozen=True)
class PermutedProduct:
    """(x, weight) -> y, also with a weight that is packed already.

    Attributes:
        problem: what is computed.
        before: x (rows, a*c*d) to l side by side.
        after: y' (rows, a*d*b) to j side by side.
    """

    problem: Problem
    before: Launcher
    after: Launcher

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return self.multiply(x, weight_table.prepared(weight, "adbc", self._form, pack), out)

    def entry(self) -> Entry | None:
        """The entry that lets the host library do the same."""
        matrices = Matrices.of(self.problem.pattern)
        return torch_entry(matrices, False, self._form, before=self.before, after=self.after)

    @property
    def _form(self) -> int:
        shape = self.problem.pattern.weight_shape
        return weight_table.number_of("adbc", shape, self.problem.dtype)

    @torch.no_grad()  # ksopt.ops has the gradients; bmm(out=) refuses operands that want them
    def multiply(self, x: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
        """y (*batch, M), contiguous, from x (*batch, N) and the weight as `pack` returns it."""
        p = self.problem.pattern
        rows = x.numel() // p.in_features
        if rows == 0:
            return x.new_empty(*x.shape[:-1], p.out_features) if out is None else out
        whole = x.contiguous()
        if whole.data_ptr() % 16 != 0:
            whole = whole.clone()
        planar = self.before(whole.view(rows, p.in_features), matrices)
        product = torch.empty_like(planar) if p.b == p.c else planar.new_empty(rows, p.out_features)
        torch.bmm(
            planar.view(rows, p.a * p.d, p.c).transpose(0, 1),
            matrices.flatten(0, 1).transpose(1, 2),
            out=product.view(rows, p.a * p.d, p.b).transpose(0, 1),
        )
        y = self.after(product, matrices, None if out is None else out.view(product.shape))
        return y.view(*x.shape[:-1], p.out_features)


@register_family
class TransposeBmm(KernelFamily[Config]):
    """Two transposes and a batched product, which follows PyTorch's own switch for TF32."""

    name = "transpose_bmm"
    dtypes = ANY_TYPE
    layout = "batch_first"  # batch last, the rows of a group lie apart already
    packs_from_d = 2
    by_pytorch = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        p = problem.pattern
        if p.d == 1:
            return "d = 1 needs no transposes"
        reasons = (transpose.unsupported(problem.dtype, length, p.d) for length in (p.c, p.b))
        return next((reason for reason in reasons if reason is not None), None)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        yield Config(problem.dtype)

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        size = transpose.BYTES[config.dtype]
        bandwidth = _DRAM_BYTES_US * device.multiprocessors
        copy_us = size * batch * (p.in_features + p.out_features) / bandwidth
        kind = config.dtype if problem.exact else "tf32"
        product_us = pytorch_cost.product_us(
            p.a * p.d, batch, p.b, p.c, kind, device.multiprocessors
        )
        return 2 * _COPY_OVERHEAD * copy_us + product_us + _LAUNCHES_US

    def sources(self, problem: Problem, config: Config) -> list[str]:
        # before the product and after it
        p, dtype = problem.pattern, problem.dtype
        before = transpose.tile_of(dtype, p.a, p.c, p.d)
        after = transpose.tile_of(dtype, p.a, p.b, p.d)
        return [transpose.source(p.a, before, True), transpose.source(p.a, after, False)]

    def launcher(self, problem: Problem, config: Config, device_index: int) -> PermutedProduct:
        p, dtype = problem.pattern, problem.dtype
        return PermutedProduct(
            problem,
            transpose.launcher(dtype, p.a, p.c, p.d, True, device_index),
            transpose.launcher(dtype, p.a, p.b, p.d, False, device_index),
        )
