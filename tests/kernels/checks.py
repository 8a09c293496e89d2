"""Operands for emulated kernels, and what a result may be."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ksopt.epilogue import After, with_epilogue
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.reference import ks_reference

H200 = DeviceSpec((9, 0), multiprocessors=132, shared_bytes=228 * 1024)

# Largest relative error of one rounding to nearest, and half the spacing of subnormal numbers.
_ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
_SUBNORMAL = {"float32": 2**-150, "float16": 2**-25, "bfloat16": 2**-134}


def gpu(multiprocessors: int) -> DeviceSpec:
    """An H200 of another size: with few multiprocessors, blocks of an emulated kernel are few."""
    return replace(H200, multiprocessors=multiprocessors)


class Tiles:
    """Random tiles of a family, each with most values that no earlier one had.

    Args:
        fields: of a tile, whose values count.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = fields
        self._random = random.Random(0)
        self._seen: set[tuple[str, object]] = set()

    def draw(self, candidates: Sequence[Any]) -> Any:
        """The next one."""
        sample = self._random.sample(candidates, min(len(candidates), 30))
        tile = max(sample, key=lambda tile: len(self._values(tile) - self._seen))
        self._seen |= self._values(tile)
        return tile

    def _values(self, tile: Any) -> set[tuple[str, object]]:
        return {(field, getattr(tile, field)) for field in self._fields}


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


def random_after(problem: Problem, batch: int, seed: int) -> After:
    """What is after a problem's product, with a random bias and residual where it has them."""
    epilogue, features = problem.epilogue, problem.out_features
    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(features, generator=generator).to(dtype)
    residual = torch.randn(batch, features, generator=generator).to(dtype)
    return After(
        bias if epilogue.bias else None,
        epilogue.activation,
        residual if epilogue.residual else None,
        epilogue.in_float32,
    )


def assert_epilogue_is_right(y: Tensor | None, x: Tensor, weight: Tensor, after: After) -> None:
    """A product and what is after it, batch first, rounded once: see `assert_close_to_float64`.

    The activations' slopes are at most 1.13, and they are computed to 2e-6 of their argument.
    """
    assert y is not None
    assert y.dtype == (torch.float32 if after.in_float32 else x.dtype)
    name = str(y.dtype).removeprefix("torch.")
    wide = [None if one is None else one.double() for one in (after.bias, after.residual)]
    product = ks_reference(x.double(), weight.double())
    truth = with_epilogue(product, wide[0], after.activation, wide[1])
    magnitude = ks_reference(x.double().abs(), weight.double().abs())
    for one in wide:
        magnitude = magnitude if one is None else magnitude + one.abs()
    sums = (1.13 * (weight.shape[2] + 3) * 2**-24 + 2e-6) * magnitude
    allowed = sums + _ROUNDING[name] * (truth.abs() + sums) + _SUBNORMAL[name]
    wrong = ~((y.double() - truth).abs() <= allowed)  # also true of NaN
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} outputs are wrong, the first at "
        f"{wrong.nonzero()[0].tolist()}: {y[wrong][0].item()} instead of {truth[wrong][0].item()}"
    )


def assert_not_finite_stays(
    multiply: Callable[[Tensor, Tensor], Tensor], problem: Problem, batch: int, seed: int
) -> None:
    """What is not finite reaches the outputs whose sums it is in, as infinity or as NaN.

    It stands where tiles end: in the first and the last l of a block, in any row, i and j. A kernel
    that fills up its tiles with zeros would multiply them by what stands beyond an end.
    """
    p, last, chance = problem.pattern, problem.batch_last, random.Random(seed)
    planted = [float("nan"), float("inf"), float("-inf")]
    for hit in ("x", "weight"):
        x, weight = operands(problem, batch, seed)
        rows = (x.T if last else x).unflatten(1, (p.a, p.c, p.d))
        for ends in ((0, p.c - 1), (0, p.c - 1), (chance.randrange(p.c),)):
            i, k, j = chance.randrange(p.a), chance.randrange(p.b), chance.randrange(p.d)
            place = (i, k, chance.choice(ends), j)
            if hit == "weight":
                weight[place] = chance.choice(planted)
            else:
                rows[chance.randrange(batch), i, place[2], j] = chance.choice(planted)
        # [n, i, k, l, j], summed over l: no zero but the operands' own
        truth = (rows[:, :, None].double() * weight[None].double()).sum(3)
        y = multiply(x, weight)
        y = (y.T if last else y).unflatten(1, (p.a, p.b, p.d)).double()
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            wrong = kind(y) != kind(truth)
            assert not wrong.any(), (
                f"{problem}, {hit} not finite: {int(wrong.sum())} outputs are wrong, the first at "
                f"{wrong.nonzero()[0].tolist()}: {y[wrong][0].item()} instead of "
                f"{truth[wrong][0].item()}"
            )
