"""The cost model of PyTorch's operations on CUDA: batched matrix products, permuting copies.

Fitted to 5,300 times of 1,115 patterns (bfloat16, batch_first, 8,192 rows, H200, commits 5f45235
and 73637bb; docs/data/search-regret-fitted.csv names them): the middle four fifths of them lie
within 0.82 and 1.3 times what is predicted here. Other dtypes and layouts take the same form with
the rates of their own arithmetic.
"""

from __future__ import annotations

import math

import torch

from ksopt.kernels.problem import FEW_ROWS, Problem
from ksopt.patterns.chain import Pattern

# Of one multiprocessor, in a microsecond.
_BYTES = 24_900.0
_COPY_BYTES = 12_400.0  # a permuting copy, each element read and written
_MULTIPLY_BYTES = 7_900.0  # a broadcast multiplication, where there is nothing to sum
_FLOPS = {"float32": 0.44e6, "tf32": 3.3e6, "float16": 6.0e6, "bfloat16": 6.0e6, "float64": 0.44e6}
_TILE_US = 0.56  # a block of a product, whatever little it has to do
_TILE_ROWS, _TILE_OUTPUTS, _TILE_SUMS = 128, 64, 32  # less is filled up

LAUNCH_US = 7.5
"""The first launch, and all that is not proportional to anything."""
NEXT_LAUNCH_US = 0.9
_FOLLOWING_US = 3.5  # what a launch that follows others takes: cuBLAS's, of a few rows, on an H100

# Matrices whose rows do not begin at multiples of 16 bytes go to other kernels of cuBLAS's: how
# many times as long these compute, by the largest power of two that divides their sizes.
_SLOWER = {4: 3.7, 2: 3.8, 1: 9.5}
_UNALIGNED_BYTES, _UNALIGNED_TILE = 0.38, 1.4
_WIDE = 32
_WIDE_COPY = 1.6  # of d values or more that change places with l
# The same of many l: neighbouring threads read places far apart. From these d and l on.
_FAR_D, _FAR_L, _FAR_COPY = 24, 64, 1.7
_SMOOTH = 3.0

# Of the whole device, in 16 bits: see `weight_gradient_us`. The sums over the rows are not split.
_GRAD_LAUNCH_US, _GRAD_US_PER_ROW, _GRAD_FLOPS_PER_US = 3.0, 1.5e-3, 5.5e8
_GRAD_BYTES_PER_US, _GRAD_COPY_BYTES_PER_US = 2.6e6, 2.6e6
_SLOW_COPY_D, _SLOW_COPY = 32, 3.0  # copies of pieces a d apart
# The same in float32 of few rows, where all sums are of one part: microseconds of a row, of the
# three copies, and bytes of the result that is copied, in a microsecond.
_SINGLE_US_PER_ROW, _SINGLE_ROWS, _SINGLE_FLOPS_PER_US = 0.045, 512, 5e7
_SINGLE_COPIES_US, _SINGLE_RESULT_BYTES_PER_US = 8.0, 1e6


def product_us(
    groups: int, rows: int, outputs: int, sums: int, kind: str, multiprocessors: int
) -> float:
    """Microseconds of a batched product, its launch apart.

    Args:
        groups: matrices.
        rows: of each left operand.
        outputs: columns of each right operand.
        sums: terms of each sum.
        kind: the dtype's name, or "tf32" for float32 by tensor cores.
        multiprocessors: of the device.
    """
    size = {"float64": 8, "float32": 4, "tf32": 4}.get(kind, 2)
    moved = size * groups * (rows * sums + rows * outputs + sums * outputs) / _BYTES
    filled = math.ceil(outputs / _TILE_OUTPUTS) * _TILE_OUTPUTS
    filled *= math.ceil(sums / _TILE_SUMS) * _TILE_SUMS
    computed = 2 * groups * rows * filled / _FLOPS[kind]
    tiles = groups * math.ceil(rows / _TILE_ROWS) * math.ceil(outputs / _TILE_ROWS) * _TILE_US
    even = math.gcd(outputs, sums, 16 // size)
    if kind in ("tf32", "float16", "bfloat16") and even * size < 16:
        computed *= _SLOWER[min(4, even)]
        moved /= _UNALIGNED_BYTES
        tiles *= _UNALIGNED_TILE
    total = moved**_SMOOTH + computed**_SMOOTH + tiles**_SMOOTH
    return float(total ** (1 / _SMOOTH)) / multiprocessors


def copy_us(size_bytes: float, d: int, multiprocessors: int) -> float:
    """Microseconds of a copy in which the d and the l (or k) of [.., l, d] change places.

    Args:
        size_bytes: of the copied tensor, which is read and written.
        d: values that lie side by side before it (or after).
        multiprocessors: of the device.
    """
    wide = _WIDE_COPY if d >= _WIDE else 1.0
    return 2 * size_bytes * wide / _COPY_BYTES / multiprocessors


def far_copy(d: int, length: int) -> float:
    """The slowdown of a copy that permutes inside each row only."""
    return _FAR_COPY if d >= _FAR_D and length >= _FAR_L else 1.0


def multiply_us(moved_bytes: float, multiprocessors: int) -> float:
    """Microseconds of a broadcast multiplication that reads and writes this many bytes."""
    return moved_bytes / _MULTIPLY_BYTES / multiprocessors


def elementwise_us(moved_bytes: float, multiprocessors: int) -> float:
    """Microseconds of one elementwise kernel that reads and writes this many bytes."""
    return moved_bytes / _BYTES / multiprocessors + NEXT_LAUNCH_US


def matrix_us(problem: Problem, batch: int, multiprocessors: int) -> float:
    """Predicted time of a layer as a product by one dense matrix, and its epilogue after it.

    Args:
        problem: what is computed.
        batch: rows of x.
        multiprocessors: of the device.
    """
    kind = problem.dtype if problem.exact else "tf32"
    n_out, n_in, after = problem.product_features, problem.chain.in_features, problem.epilogue
    us = product_us(1, batch, n_out, n_in, kind, multiprocessors)
    size = getattr(torch, problem.dtype).itemsize * batch * n_out
    passes = [2.0] * (after.activation != "none") + [3.0] * after.residual
    if after.is_gated:  # of half of the products each: what is activated, multiplied, added to
        passes = [1, 1.5] + [1.5] * after.residual
    passes += [2] * (after.bias and problem.batch_last)
    steps = [elementwise_us(n * size, multiprocessors) for n in passes]
    launch_us = _FOLLOWING_US if batch <= FEW_ROWS else LAUNCH_US
    return us + launch_us + sum(steps)


def weight_gradient_us(p: Pattern, rows: int, dtype: str = "bfloat16") -> float:
    """Microseconds of a weight's gradient: ``torch.bmm`` and the copies around it.

    Fitted apart from the products above, to gradients of factors in bfloat16 of 25,088 rows, on an
    H200 and later an H100 ("apart" in docs/data/weight-gradients-bfloat16.txt and -h100.txt). Where
    a factor is not one matrix, half of the times there are over 1.12 and 1.24 times what is
    predicted here. Of float32 to 32 factors of 16 and 64 rows on an H200, within 6 %, from 2.2 us
    of each (docs/data/weight-gradients-16-rows-float32.txt, -64-). Other devices are predicted to
    take as long.

    Args:
        p: of the factor.
        rows: of its input and of its result's gradient.
        dtype: of both.
    """
    element = getattr(torch, dtype).itemsize
    size = float(element) * rows * (p.in_features + p.out_features)
    slower = _SLOW_COPY if p.d >= _SLOW_COPY_D else 1.0
    copies = 2 * size * slower / _GRAD_COPY_BYTES_PER_US
    if element > 2:
        flops_us = 2.0 * rows * p.nnz / _SINGLE_FLOPS_PER_US
        of_rows = _SINGLE_US_PER_ROW * min(rows, _SINGLE_ROWS)
        product = _GRAD_LAUNCH_US + max(of_rows, size / _GRAD_BYTES_PER_US, flops_us)
        result = 2 * element * p.nnz / _SINGLE_RESULT_BYTES_PER_US
        return product if p.d == 1 else product + _SINGLE_COPIES_US + copies + result
    flops_us = 2.0 * rows * p.nnz / _GRAD_FLOPS_PER_US
    product = _GRAD_LAUNCH_US + max(_GRAD_US_PER_ROW * rows, size / _GRAD_BYTES_PER_US, flops_us)
    return product if p.d == 1 else product + 2 * _GRAD_LAUNCH_US + copies


def bias_gradient_us(features: int, rows: int) -> float:
    """Microseconds of the sum over rows of 16 bits, which reads them once; constants as above."""
    return _GRAD_LAUNCH_US + 2.0 * rows * features / _GRAD_COPY_BYTES_PER_US
