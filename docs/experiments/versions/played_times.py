"""Simulated times: a clock that only timed calls advance, equal in every version.

The time of a call follows from its name and the size of its result, so that two versions that time
the same chain read the same microseconds. Each call runs once, for its exceptions and its size.
Versions sample, summarize, stop and choose in their own ways.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, util
from typing import Any

import torch

_FIXED_US = {"copy": 13_000.0, "gemm": 330.0}
"""The times of the roofline's calls: 10 GB/s and 100 Gflop/s."""
_WAVE = (1.0, 1.01, 0.99, 1.02, 0.98)
"""The successive samples of one function, relative: close functions are indistinguishable."""
_CHAIN = re.compile(r"\([\d,]+\)(\*\([\d,]+\))*")


@dataclass(frozen=True)
class Names:
    """The names that a version has for the replaced functions.

    Attributes:
        clocks: modules that read ``time``.
        measure: the module of ``measure``.
        flush: (module, name) of the number of bytes overwritten before a sample.
        roofline: the module of its sizes on a CPU.
        products: (module, name) of the class that computes a CPU's product.
        sites: the module that times a site both ways.
    """

    clocks: tuple[str, ...]
    measure: str
    flush: tuple[str, str]
    roofline: str
    products: tuple[str, str]
    sites: str


NOW = Names(
    clocks=("ksopt.measure.timers", "ksopt.measure.interleaved"),
    measure="ksopt.measure.timing",
    flush=("ksopt.measure.timers", "flush_bytes"),
    roofline="ksopt.measure.roofline",
    products=("ksopt.kernels.backends.cpu", "_Product"),
    sites="ksopt.compile.lowering.benchmark",
)
BEFORE = Names(
    clocks=("ksopt.bench.timing", "ksopt.kernels.cpu"),
    measure="ksopt.bench.timing",
    flush=("ksopt.bench.timing", "_flush_bytes"),
    roofline="ksopt.bench.roofline",
    products=("ksopt.kernels.cpu", "_Choice"),
    sites="ksopt.compile.clock",
)


class Clock:
    """A stand-in for the module ``time``."""

    def __init__(self) -> None:
        self._now_ns = 0

    def perf_counter(self) -> float:
        """Seconds."""
        return self._now_ns / 1e9

    def perf_counter_ns(self) -> int:
        """Nanoseconds."""
        return self._now_ns

    def pass_us(self, us: float) -> None:
        """Advance the clock."""
        self._now_ns += round(us * 1e3)


def played_us(name: str, numbers: int) -> float:
    """The simulated time of a function, microseconds.

    A chain takes 0.3 to 1.8 times the dense layer's time, any other function 0.4 to 2.8 times.

    Args:
        name: of the function: a chain's text, "dense", a way to multiply.
        numbers: elements of its result.

    Example:
        >>> played_us("dense", 2_000)
        60.0
        >>> played_us("(1,8,8,1)", 2_000) == played_us("(1,8,8,1)", 2_000)
        True
    """
    if name in _FIXED_US:
        return _FIXED_US[name]
    chance = zlib.crc32(name.encode()) / 2**32
    share = 0.4 + 2.4 * chance
    if name == "dense":
        share = 1.0
    elif _CHAIN.fullmatch(name):
        share = 0.3 + 1.5 * chance
    return 10.0 + numbers / 40 * share


class Played:
    """A function whose calls advance the clock by simulated times."""

    def __init__(self, name: str, call: Callable[[], object], clock: Clock) -> None:
        self._name, self._call, self._clock = name, call, clock
        self._us: float | None = None
        self._wave = itertools.cycle(_WAVE)

    def __call__(self) -> None:
        if self._us is None:
            self._us = played_us(self._name, numbers_of(self._call()))
        self._clock.pass_us(self._us * next(self._wave))


def numbers_of(result: object) -> int:
    """The number of elements of a result.

    Example:
        >>> numbers_of((torch.ones(2, 3), [torch.ones(4)], None))
        10
    """
    if isinstance(result, torch.Tensor):
        return result.numel()
    if isinstance(result, Mapping):
        return sum(map(numbers_of, result.values()))
    return sum(map(numbers_of, result)) if isinstance(result, (tuple, list)) else 0


def install() -> None:
    """Install the simulated times in the imported version."""
    names = NOW if util.find_spec("ksopt.measure") is not None else BEFORE
    clock = Clock()
    for module in names.clocks:
        _put(module, "time", clock)
    timing = import_module(names.measure)
    measure = timing.measure

    def played_measure(variants: Mapping[str, Callable[[], object]], *args: Any, **how: Any) -> Any:
        played = {name: Played(name, call, clock) for name, call in variants.items()}
        return measure(played, *args, **how)

    _put(names.measure, "measure", played_measure)
    _put(*names.flush, lambda cache_bytes: 2**16)
    _put(names.roofline, "_CPU_SIDES", (256,))
    _play_products(*names.products, clock)
    _put(names.sites, "_both_us", _both_us)


def _play_products(module: str, name: str, clock: Clock) -> None:
    product = getattr(import_module(module), name)
    multiply = product.multiply

    def played_multiply(self: Any, x: Any, *args: Any) -> Any:
        y = multiply(self, x, *args)
        batch_last = self.batch_last if hasattr(self, "batch_last") else args[1]
        name = f"{self.baseline.name} by {self.pattern}, {x.dtype}, last: {batch_last}"
        clock.pass_us(played_us(name, y.numel()))
        return y

    product.multiply = played_multiply


def _both_us(case: Any, device: torch.device) -> dict[str, float]:
    product = getattr(case, "problem", case)  # earlier ones were of no problem
    description = f"{product.chain}, {product.dtype}, {case.batch} rows"
    kinds = ("training", "to_input", "computed", "fused")
    description += "".join(f", {kind}: {getattr(case, kind)}" for kind in kinds)
    numbers = case.batch * product.chain.out_features
    return {way: played_us(f"{way}: {description}", numbers) for way in ("ksopt", "inductor")}


def _put(module: str, name: str, value: object) -> None:
    home = import_module(module)
    getattr(home, name)  # raises if there is no such name
    setattr(home, name, value)
