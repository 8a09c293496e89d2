"""The kernel family of two consecutive layers of 16-bit chains in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ksopt.kernels import weight_groups
from ksopt.kernels.families.base import HALF, KernelFamily, register_family
from ksopt.kernels.families.common import chain_mlp_cost, chain_mlp_launcher, chain_mlp_tile
from ksopt.kernels.families.common.chain_mlp_launcher import MlpLauncher, mlp_packer
from ksopt.kernels.families.common.chain_mlp_tile import Config
from ksopt.kernels.families.common.chain_rows import aligned, as_rows, rows_of
from ksopt.kernels.families.common.chain_tile import Epilogue, Shape
from ksopt.kernels.launcher import Entry
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern


@register_family
class ChainMlpWgmma16(KernelFamily[Config]):
    """Two chains of two factors in one launch: x is read once, y is written once."""

    name = "chain_mlp_wgmma16"
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
        if counts != [2, 2]:
            return f"it computes chains of 2 factors, and these have {counts[0]} and {counts[1]}"
        if problem.epilogue.bias != problem.second.epilogue.bias:
            return "both of its layers have a bias, or none has"
        return chain_mlp_tile.unsupported_reason(*_shapes(problem), problem.dtype, device)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        return chain_mlp_tile.configs(*_shapes(problem), device)

    def shared_bytes(self, problem: Problem, config: Config) -> int:
        return config.shared_bytes(_shapes(problem))

    def prepares_weight(self, p: Pattern) -> bool:
        return True

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        after = Epilogue.of(problem)
        return chain_mlp_cost.predicted_us(*_shapes(problem), config, batch, device, after)

    def sources(self, problem: Problem, config: Config) -> list[str]:
        shapes = _shapes(problem)
        multiply = chain_mlp_launcher.source(*shapes, config, Epilogue.of(problem), problem.dtype)
        return [chain_mlp_launcher.pack_source(*shapes, config), multiply]

    def launcher(self, problem: Problem, config: Config, device_index: int) -> LaunchMlp:
        return LaunchMlp(problem, config, device_index)


class LaunchMlp:
    """(x, weights, hidden bias, bias, residual, out) -> y of a kernel that is compiled and loaded.

    Unsupported operands, with rows that begin at other addresses than multiples of 16 bytes or
    whose elements do not lie side by side, are copied first.
    """

    def __init__(self, problem: Problem, config: Config, device_index: int) -> None:
        shapes, packing = _shapes(problem), config.packing
        self._problem = problem
        self._features = problem.out_features
        # Tiles of the same order share the packed weights, which the sizes of all name.
        orders = (packing.nk, packing.ks, packing.last_nk)
        self._form = f"chain_mlp_wgmma16 {orders}"
        self._pack = mlp_packer(*shapes, config, device_index)
        after = Epilogue.of(problem)
        self._launch = MlpLauncher(*shapes, config, after, problem.dtype, device_index)

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
        written = None if out is None else rows_of(out)
        if out is not None and written is None:
            return out.copy_(self(x, weights, hidden_bias, bias, residual))
        shape = (*x.shape[:-1], self._features)
        y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        self._launch(
            as_rows(x),
            weight_groups.prepared_together(weights, self._form, self._pack),
            None if hidden_bias is None else aligned(hidden_bias.contiguous()),
            None if bias is None else aligned(bias.contiguous()),
            None if residual is None else as_rows(residual),
            y.view(-1, self._features) if written is None else written,
        )
        return y

    def entry(self) -> Entry | None:
        """The entry that lets the host library do the same; None where there is none."""
        p = self._problem
        shapes = [one.weight_shape for chain in p.chains for one in chain]
        return self._launch.entry(weight_groups.number_of(self._form, shapes, p.dtype), self._pack)


def _shapes(problem: Problem) -> tuple[Shape, Shape]:
    first, second = problem.chains
    return Shape.of(first), Shape.of(second)
