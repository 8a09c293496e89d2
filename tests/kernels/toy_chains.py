"""Families that take whole chains and MLPs, and a device: all registered from outside, on a CPU.

The device is the CPU with a spec, so that kernels' families are asked. The kernels call torch, and
count their launches; how long they are predicted to take is what a test says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch

from ksopt.epilogue import in_float32, with_epilogue
from ksopt.kernels import plan_autotuner, registry
from ksopt.kernels.backends import cpu
from ksopt.kernels.backends.base import register_backend, unregister_backend
from ksopt.kernels.families.base import (
    SINGLE,
    KernelFamily,
    family_of,
    register_family,
    unregister_family,
)
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.reference import chain_reference, ks_reference

SPEC = DeviceSpec((9, 0), 1, 228 * 1024)


class ToyDevice(cpu.CpuBackend):
    """The CPU, as a device that kernels could run on."""

    device_type = "cpu"

    def spec(self, device: torch.device) -> DeviceSpec:
        return SPEC


@dataclass(frozen=True)
class ToyConfig:
    """Two tiles that differ in nothing but their number."""

    number: int
    blocks: int = 1

    def shared_bytes(self, p: Any) -> int:
        raise AssertionError("a family of chains says itself what its blocks take")


class ToyChain(KernelFamily[ToyConfig]):
    """Chains of two factors, with any epilogue and siblings, in one launch."""

    name = "toy_chain"
    dtypes = SINGLE
    takes_chains = True
    takes_float32_results = True
    launches: ClassVar[list[Problem]] = []
    stored: ClassVar[list[Problem]] = []
    us = 1e-3
    fault = 0.0

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        count = len(problem.chain)
        return None if count == 2 else f"it takes chains of 2 factors, and this has {count}"

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[ToyConfig]:
        yield from (ToyConfig(0), ToyConfig(1))

    def shared_bytes(self, problem: Problem, config: ToyConfig) -> int:
        return 1024 * len(problem.chain)

    def predicted_us(
        self, problem: Problem, config: ToyConfig, batch: int, device: DeviceSpec
    ) -> float:
        return self.us * (1 + config.number)

    def sources(self, problem: Problem, config: ToyConfig) -> list[str]:
        return []

    def launcher(self, problem: Problem, config: ToyConfig, device_index: int) -> Any:
        def launch(x, weights, bias=None, residual=None, out=None):
            ToyChain.launches.append(problem)
            length = len(problem.chain)
            parts = [
                chain_reference(x, weights[at : at + length], problem.layout)
                for at in range(0, len(weights), length)
            ]
            y = torch.cat(parts, 0 if problem.batch_last else -1)
            epilogue = problem.epilogue
            assert epilogue.bias == (bias is not None)
            assert epilogue.residual == (residual is not None)
            y = with_epilogue(y, bias, epilogue.activation, residual, problem.batch_last)
            y = (y + self.fault).contiguous()
            y = in_float32(y) if epilogue.in_float32 else y
            return y if out is None else out.copy_(y)

        return launch

    def stores_intermediate(self, problem: Problem) -> bool:
        return not problem.epilogue.residual

    def storing_launcher(
        self, problem: Problem, config: ToyConfig, device_index: int, of_grad: Any = None
    ) -> Any:
        def launch(x, weights, bias):
            ToyChain.stored.append(problem)
            between = [ks_reference(x, right) for right in weights[1::2]]
            parts = [ks_reference(*one) for one in zip(between, weights[::2], strict=True)]
            assert len(parts) == problem.siblings
            y = with_epilogue(torch.cat(parts, -1), bias, problem.epilogue.activation).contiguous()
            z = between[0] if len(parts) == 1 else torch.stack(between)
            return y, z, x.new_empty(0)

        return launch


class ToyMlp(ToyChain):
    """Two layers of chains of two factors, with any epilogue, in one launch."""

    name = "toy_mlp"
    takes_mlps = True
    takes_float32_results = False
    launches: ClassVar[list[Problem]] = []
    us = 1e-3
    fault = 0.0

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        return None if problem.second is not None else "it takes two layers, and this is one"

    def launcher(self, problem: Problem, config: ToyConfig, device_index: int) -> Any:
        first, second = problem.layers()

        def layer(one, x, weights, bias, residual=None):
            assert one.epilogue.bias == (bias is not None)
            assert one.epilogue.residual == (residual is not None)
            y = chain_reference(x, weights, problem.layout)
            return with_epilogue(y, bias, one.epilogue.activation, residual, problem.batch_last)

        def launch(x, weights, hidden_bias=None, bias=None, residual=None, out=None):
            ToyMlp.launches.append(problem)
            length = len(first.chain)
            hidden = layer(first, x, weights[:length], hidden_bias)
            y = layer(second, hidden, weights[length:], bias, residual)
            y = (y + self.fault).contiguous()
            return y if out is None else out.copy_(y)

        return launch


@contextlib.contextmanager
def with_mlps() -> Iterator[type[ToyMlp]]:
    """`registered`, and the family of MLPs."""
    with registered():
        register_family(ToyMlp)
        ToyMlp.launches.clear()
        plan_autotuner.forget()
        try:
            yield ToyMlp
        finally:
            unregister_family("toy_mlp")


@contextlib.contextmanager
def toy_device() -> Iterator[None]:
    """The toy device is the CPU inside the block, without a family that takes nearly all chains."""
    takes_all = type(family_of("chain_mma"))
    register_backend(ToyDevice)
    unregister_family("chain_mma")
    plan_autotuner.forget()
    try:
        yield
    finally:
        register_family(takes_all)
        unregister_backend("cpu")
        plan_autotuner.forget()


@contextlib.contextmanager
def registered() -> Iterator[type[ToyChain]]:
    """The toy family and its device are in their registries inside the block.

    Predictions are not stored there: tests change the toy's.
    """
    anew = registry._best_of.__wrapped__
    with toy_device(), mock.patch.object(registry, "_best_of", anew):
        register_family(ToyChain)
        ToyChain.launches.clear()
        ToyChain.stored.clear()
        plan_autotuner.forget()
        try:
            yield ToyChain
        finally:
            unregister_family("toy_chain")
