"""PyTorch's implementations of a product as candidates: the applicable ones and their cost.

The predicted times are sums of `pytorch_cost`'s. They decide only where nothing may be timed.

On CUDA all of them multiply the pattern's own blocks, and nothing else. Ways that write the weight
into zeros and multiply these too (`FILLED`) would be wrong there in two things. Zero times infinity
is NaN: what is not finite would reach outputs that it never met, and to look whether some is would
wait for the device. And cuBLAS may add 16-bit partial sums of such products in 16 bit
(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction), where it rounds those of the
author's shapes once: errors were up to 3e-3 of sum |x||w|. With a kernel behind them that mends the
first, and every result judged, the family `expanded_bmm` has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ksopt.baselines import BASELINES, Baseline, Product
from ksopt.batched import Matrices
from ksopt.kernels import weight_table
from ksopt.kernels.families.common import pytorch_cost as cost
from ksopt.kernels.launcher import Entry, torch_entry
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name

# An expanded product costs d times the flops: past this no saved copy pays for it.
_MAX_EXTRA_FLOPS = 16
_MAX_LOOP = 64
FILLED = ("expand", "dense")
"""The ways that multiply stored zeros: on CPU alone, where cpu.py looks at what comes out."""
# One form of the weight, [a*d, b, c].
_PERMUTED = ("bmm", "bmm_paper", "bmm_loop", "bmm_weight_first")
_EINSUMS = ("einsum", "einsum_weight_first")
_EINSUM = 1.12  # what they take, beside their product and their copies


def names(problem: Problem, device_type: str) -> list[str]:
    """The names of the candidates on ``device_type``, the simplest first."""
    p = problem.pattern
    ways = ["bmm", "bmm_paper", "einsum"]
    if min(p.a, p.d) <= _MAX_LOOP:
        ways.append("bmm_loop")
    if device_type != "cpu":
        ways += ["einsum_weight_first", "bmm_weight_first", "conv"]
    else:
        if 1 < p.d <= _MAX_EXTRA_FLOPS:
            ways.append("expand")
        if p.a > 1 and p.a * p.d <= _MAX_EXTRA_FLOPS:  # for a = 1 they are the same
            ways.append("dense")
    product = Product(p, getattr(torch, problem.dtype), device_type, problem.batch_last)
    return [name for name in ways if BASELINES[name].supports(product).ok]


def prepares(name: str, problem: Problem) -> bool:
    """Whether the candidate's weight is another tensor than the canonical one."""
    return _prepares(name, problem.pattern)


def _prepares(name: str, p: Pattern) -> bool:
    if name == "dense":
        return p.a * p.d > 1
    return name not in _EINSUMS and p.d > 1


@dataclass(frozen=True)
class Multiplier:
    """(x, weight, out=None) -> y by one of PyTorch's products, the weight prepared once a version.

    Attributes:
        name: one of `names` on a CUDA device.
        problem: what is computed.
    """

    name: str
    problem: Problem

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        baseline, p, last = BASELINES[self.name], self.problem.pattern, self.problem.batch_last
        return baseline.multiply(x, prepared(baseline, weight, p, last), p, last, out)

    def entry(self) -> Entry | None:
        """The entry that lets the host library do the same; None where there is none."""
        p, dtype = self.problem.pattern, self.problem.dtype
        form = weight_table.number_of(_form(self.name), p.weight_shape, dtype)
        return entry(self.name, p, self.problem.batch_last, form)


_WAYS = MappingProxyType(
    {"bmm_loop": "loop", **{name: name for name in (*_EINSUMS, "bmm_weight_first", "conv")}}
)
_MATRICES = MappingProxyType({"expand": Matrices.of_blocks, "dense": Matrices.of_all})


def entry(
    name: str, p: Pattern, batch_last: bool, form: int, by_groups: bool = False
) -> Entry | None:
    """The entry that lets the host library run one of PyTorch's products; None without one.

    Args:
        name: one of `names`.
        p: the weight's pattern.
        batch_last, form, by_groups: as for `launcher.torch_entry`.
    """
    matrices = _MATRICES.get(name, Matrices.of)(p)
    way = _WAYS.get(name, "batched")
    return torch_entry(matrices, batch_last, form, way, by_groups=by_groups)


def multiplier(name: str, problem: Problem) -> Multiplier:
    """One of PyTorch's products, ready to be called."""
    return Multiplier(name, problem)


def prepared(baseline: Baseline, weight: Tensor, p: Pattern, batch_last: bool) -> Tensor:
    """The weight as a baseline reads it, cached (weight_cache.py) where that is another tensor."""
    name = baseline.name
    if not _prepares(name, p):
        return baseline.prepare(weight, batch_last)

    def prepare(weight: Tensor) -> Tensor:
        return baseline.prepare(weight, batch_last)

    form, dtype = _form(name), dtype_name(weight.dtype)
    number = weight_table.number_of(form, weight.shape, dtype)
    return weight_table.prepared(weight, form, number, prepare)


def _form(name: str) -> str:
    """The name of the form of a candidate's prepared weight."""
    return "bmm" if name in _PERMUTED else name


def predicted_us(name: str, problem: Problem, batch: int, multiprocessors: int) -> float:
    """Predicted time of one of PyTorch's products on a CUDA device, its weight prepared.

    Args:
        name: one of `names` on such a device.
        problem: what is computed.
        batch: rows of x.
        multiprocessors: of the device.
    """
    p = problem.pattern
    kind = problem.dtype if problem.exact else "tf32"
    size = getattr(torch, problem.dtype).itemsize
    x, y = size * batch * p.in_features, size * batch * p.out_features
    if p.c == 1 and name == "bmm" and p.a * p.d > 1:
        return cost.multiply_us(x + y, multiprocessors) + cost.LAUNCH_US
    copying, launches = _copying_us(name, problem, x, y, multiprocessors)
    us = cost.product_us(p.a * p.d, batch, p.b, p.c, kind, multiprocessors) + copying
    us += cost.LAUNCH_US + (launches - 1) * cost.NEXT_LAUNCH_US
    return us * (_EINSUM if name in _EINSUMS else 1.0)


def _copying_us(
    name: str, problem: Problem, x: int, y: int, multiprocessors: int
) -> tuple[float, int]:
    """Microseconds to permute x and y of this many bytes, and the total number of launches."""
    p = problem.pattern
    if name == "bmm_loop":
        return 0.0, min(p.a, p.d)
    if p.d == 1 or (problem.batch_last and p.a == 1):
        # Only einsum still puts its result in order.
        return (
            (cost.copy_us(y, 1, multiprocessors), 2) if name in _EINSUMS and p.a > 1 else (0.0, 1)
        )
    d = 1 if problem.batch_last else p.d  # whole rows of the batch change places there
    is_left = name == "bmm_weight_first"  # the rows become columns: x and y are always copied
    far = (name == "bmm" or is_left) and not problem.batch_last
    total, launches = 0.0, 1
    for moved, length in ((x, p.c), (y, p.b)):
        if length > 1 or is_left:
            total += cost.copy_us(moved, d, multiprocessors) * (
                cost.far_copy(p.d, length) if far else 1.0
            )
            launches += 1
    return total, launches
