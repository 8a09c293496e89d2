"""The kernel family of two 16-bit factors with an activation between them, in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor

from ksopt.kernels.families.base import HALF, KernelFamily, register_family
from ksopt.kernels.families.chain_wgmma16 import LaunchChain
from ksopt.kernels.families.common import (
    chain_cost,
    chain_launcher,
    chain_pack_launcher,
    chain_tile,
)
from ksopt.kernels.families.common.chain_tile import Config, Epilogue, Shape
from ksopt.kernels.launcher import Entry
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern


@register_family
class ChainActivatedWgmma16(KernelFamily[Config]):
    """Layers (a2,b2,c2,1) and (1,b1,c1,d1), one behind the other, by the kernel of chain_wgmma16.

    The first layer has an activation, as in CoLA, or none, and no bias.
    """

    name = "chain_activated_wgmma16"
    dtypes = HALF
    layout = "batch_first"
    capability: ClassVar[tuple[int, int]] = (9, 0)
    capability_only = True
    packs_from_d = 1
    takes_chains = True
    takes_mlps = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        if problem.second is None:
            return "it computes two layers, and this is one"
        counts = [len(chain) for chain in problem.chains]
        if counts != [1, 1]:
            return f"it computes layers of 1 factor, and these have {counts[0]} and {counts[1]}"
        if problem.epilogue.bias:
            return "its first layer has no bias"
        return chain_tile.unsupported_reason(_shape(problem), problem.dtype, device)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        return chain_tile.configs(_shape(problem), device, Epilogue.of(problem))

    def shared_bytes(self, problem: Problem, config: Config) -> int:
        return config.shared_bytes(_shape(problem))

    def prepares_weight(self, p: Pattern) -> bool:
        return True

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        after = Epilogue.of(problem)
        return chain_cost.predicted_us(_shape(problem), config, batch, device, after)

    def sources(self, problem: Problem, config: Config) -> list[str]:
        shape = _shape(problem)
        multiply = chain_launcher.source(shape, config, Epilogue.of(problem), problem.dtype)
        return [chain_pack_launcher.source(shape, config, are_layers=True), multiply]

    def launcher(self, problem: Problem, config: Config, device_index: int) -> LaunchLayers:
        return LaunchLayers(problem, config, device_index)


class LaunchLayers:
    """(x, weights, hidden bias, bias, residual, out) -> y: see `candidate.MlpCall`."""

    def __init__(self, problem: Problem, config: Config, device_index: int) -> None:
        around = (_shape(problem), Epilogue.of(problem))
        self._launch = LaunchChain(*around, config, problem.dtype, device_index, are_layers=True)

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        hidden_bias: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor:
        assert hidden_bias is None
        return self._launch(x, weights, bias, residual, out)

    def entry(self) -> Entry | None:
        """The entry that lets the host library do the same; None where there is none."""
        return self._launch.entry()


def _shape(problem: Problem) -> Shape:
    first, second = problem.chains
    (right,), (left,) = first.patterns, second.patterns
    return Shape(left, right)
