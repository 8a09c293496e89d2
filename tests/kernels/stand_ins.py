"""A CUDA device played by stand-ins: how long each way takes is what a test says."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from ksopt.kernels import registry, weight_cache
from ksopt.kernels.backends import cuda
from ksopt.kernels.families.base import families, family_of
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure import timers

A100 = DeviceSpec((8, 0), 108, 164 * 1024)
IDENTITY = {"device": "Stand-in", "driver": "1.2.3", "code": "abc"}


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on CUDA device 0."""

    def get_device(self) -> int:
        return 0


class Clock:
    """The device's time, and its log of calls."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.calls: list[str] = []
        self.built: list[str] = []
        self.hiccups: dict[tuple[str, int], float] = {}  # milliseconds more, of a way's nth call

    def way(self, name: str, ms: float, preparing_ms: float = 0.0):
        """A way that takes so long, and so much longer if its weight is prepared each time."""
        self.built.append(name)

        def call(x, weight):
            self.now_ms += ms + (preparing_ms if weight_cache.are_repacked(0) else 0.0)
            self.calls.append(name)
            self.now_ms += self.hiccups.get((name, self.calls.count(name)), 0.0)
            return name

        return call


class Device:
    """What the stand-in device does; tests change its tables.

    Attributes:
        ms: of every way by name; a family's tiles take theirs in the order of their ranks.
        preparing_ms: what preparing the weight adds.
        faults: what is wrong with the result of a way by its name, a family's with the tile's rank.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.ms: dict[str, Any] = {
            "mma16": [1.0],
            "transpose_bmm": [7.0],
            "naive": 9.0,
            "bmm": 3.0,
            "bmm_paper": 8.0,
            "bmm_loop": 8.0,
        }
        self.preparing_ms: dict[str, float] = {}
        self.faults: dict[str, str] = {}
        self.ranks: dict[str, list[Any]] = {}

    def kernel(self, family, problem, tile, device_index):
        name, seen = family.name, self.ranks.setdefault(family.name, [])
        if family.is_fallback:
            return self.plain(name)
        if tile not in seen:
            seen.append(tile)
        taken = self.ms.get(name, [50.0])
        rank = seen.index(tile)
        ms = taken[min(rank, len(taken) - 1)]
        return self.clock.way(f"{name} {rank}", ms, self.preparing_ms.get(name, 0.0))

    def plain(self, name):
        return self.clock.way(name, self.ms.get(name, 50.0), self.preparing_ms.get(name, 0.0))


class Judging:
    """A check that finds the faults that a test says."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def judge(self, y: str, closely: bool = False) -> str | None:
        return self._device.faults.get(y)


def set_launchers(monkeypatch, launcher) -> None:
    """Make (family, problem, tile, device index) -> call the launcher of every family."""
    for family in families():
        monkeypatch.setattr(family, "launcher", functools.partial(launcher, family))


def install(monkeypatch) -> Device:
    """Put the stand-ins in the place of the device; undone by ``monkeypatch``."""
    device = Device()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = device.clock.now_ms

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(DeviceSpec, "of_device", classmethod(lambda cls, _: A100))
    monkeypatch.setattr(cuda, "fingerprint", lambda _: dict(IDENTITY))
    monkeypatch.setattr(cuda, "checking", lambda x, weight, _: (Judging(device), x, weight))
    monkeypatch.setattr(
        timers, "spare_overwriter", lambda _: timers.Overwriter(lambda: None, 1.0, 0.0)
    )
    # Built one after another, in the order of their ranks, so that a test can tell them apart.
    monkeypatch.setattr(registry, "_COMPILERS", 1)
    monkeypatch.setattr(registry, "_warned", set())
    # Which of them is predicted to be faster is not what these tests are of.
    packed = family_of("gather_mma_packed")
    monkeypatch.setattr(packed, "unsupported_reason", lambda *_: "the stand-in has none")
    # Looked up at each call, for a test may replace it.
    set_launchers(monkeypatch, lambda *kernel: device.kernel(*kernel))
    monkeypatch.setattr(pytorch_ops, "multiplier", lambda name, _: device.plain(name))
    cuda.forget()
    return device
