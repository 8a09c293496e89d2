"""The kernel family of chains of two 16-bit factors with their epilogue, in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ksopt.kernels import weight_groups
from ksopt.kernels.families.base import HALF, KernelFamily, register_family
from ksopt.kernels.families.common import (
    chain_cost,
    chain_launcher,
    chain_pack_launcher,
    chain_tile,
    input_grad_tile,
)
from ksopt.kernels.families.common.chain_launcher import ChainLauncher
from ksopt.kernels.families.common.chain_pack_launcher import chain_packer
from ksopt.kernels.families.common.chain_rows import aligned, as_rows, rows_of
from ksopt.kernels.families.common.chain_tile import Config, Epilogue, Shape
from ksopt.kernels.families.common.trained_pack_launcher import TrainedPacker
from ksopt.kernels.launcher import Entry
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern


@register_family
class ChainWgmma16(KernelFamily[Config]):
    """Chains (1,b1,c1,d1)*(a2,b2,c2,1) in 16 bit: x is read once, y is written once."""

    name = "chain_wgmma16"
    dtypes = HALF
    layout = "batch_first"
    capability: ClassVar[tuple[int, int]] = (9, 0)
    capability_only = True
    packs_from_d = 1
    takes_chains = True
    takes_float32_results = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        if len(problem.chain) != 2:
            return f"it computes chains of 2 factors, and this has {len(problem.chain)}"
        return chain_tile.unsupported_reason(_shape(problem), problem.dtype, device)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        return chain_tile.configs(_shape(problem), device, problem.epilogue)

    def shared_bytes(self, problem: Problem, config: Config) -> int:
        return config.shared_bytes(_shape(problem))

    def prepares_weight(self, p: Pattern) -> bool:
        return True

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        return chain_cost.predicted_us(_shape(problem), config, batch, device)

    def with_epilogue_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        after = Epilogue.of(problem)
        return chain_cost.predicted_us(_shape(problem), config, batch, device, after)

    def sources(self, problem: Problem, config: Config) -> list[str]:
        shape = _shape(problem)
        multiply = chain_launcher.source(shape, config, Epilogue.of(problem), problem.dtype)
        return [chain_pack_launcher.source(shape, config), multiply]

    def launcher(self, problem: Problem, config: Config, device_index: int) -> LaunchChain:
        after = Epilogue.of(problem)
        return LaunchChain(_shape(problem), after, config, problem.dtype, device_index)

    def stores_intermediate(self, problem: Problem) -> bool:
        left, right = problem.chain
        after = problem.epilogue
        is_one_or_bare = problem.siblings == 1 or after.activation == "none"
        is_plain = not after.residual and not after.in_float32
        return is_one_or_bare and is_plain and right.b // left.d % 2 == 0

    def storing_launcher(
        self,
        problem: Problem,
        config: Config,
        device_index: int,
        of_grad: input_grad_tile.Config | None = None,
    ) -> LaunchKeeping:
        return LaunchKeeping(problem, config, device_index, of_grad)


class LaunchKeeping:
    """(x, weights, bias) -> y and what the backward pass reads; packs weights at each call.

    These are the values between the factors and the weights packed for the gradient of x.
    """

    def __init__(
        self,
        problem: Problem,
        config: Config,
        device_index: int,
        of_grad: input_grad_tile.Config | None,
    ) -> None:
        shape = _shape(problem)
        epilogue = replace(Epilogue.of(problem), keeps_z=True)
        self._out_features = problem.out_features
        self._planes = (problem.siblings,) if problem.siblings > 1 else ()
        self._between = shape.right.out_features
        self._pack = TrainedPacker(shape, config, of_grad, device_index)
        self._launch = ChainLauncher(shape, config, epilogue, problem.dtype, device_index)

    def launches(self) -> dict[str, int]:
        """The launch for the host library, as ``know_trained_chain`` of csrc/host takes it."""
        return {**self._pack.launch(), **self._launch.launch()}

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.empty((*x.shape[:-1], self._out_features), dtype=x.dtype, device=x.device)
        sizes = (*self._planes, *x.shape[:-1], self._between)
        z = torch.empty(sizes, dtype=x.dtype, device=x.device)
        packed, of_grad = self._pack(weights)
        self._launch(
            as_rows(x),
            packed,
            None if bias is None else aligned(bias.contiguous()),
            out=y.view(-1, self._out_features),
            z=z.view(-1, self._between),
        )
        return y, z, of_grad


class LaunchChain:
    """(x, weights, bias, residual, out) -> y of a kernel that is compiled and loaded.

    Unsupported operands, with rows that begin at other addresses than multiples of 16 bytes or
    whose elements do not lie side by side, are copied first.
    """

    def __init__(
        self,
        shape: Shape,
        epilogue: Epilogue,
        config: Config,
        dtype: str,
        device_index: int,
        are_layers: bool = False,
    ) -> None:
        """Compile and load it.

        Args:
            shape: the chains.
            epilogue: of the kernel.
            config: the tile.
            dtype: of all operands.
            device_index: of the device.
            are_layers: as for `chain_packer`.
        """
        both = (shape.left.weight_shape, shape.right.weight_shape)
        self._shapes = both[::-1] if are_layers else both * shape.siblings
        self._dtype = dtype
        # Tiles of the same order share the packed weights.
        self._form = f"chain_wgmma16 {config.packing}{' layers' if are_layers else ''}"
        self._pack = chain_packer(shape, config, device_index, are_layers)
        self._launch = ChainLauncher(shape, config, epilogue, dtype, device_index)

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor:
        features = self._launch.out_features
        shape = (*x.shape[:-1], features)
        rows = as_rows(x)
        if out is not None and rows_of(out) is None:
            return out.copy_(self(x, weights, bias, residual))
        dtype = torch.float32 if self._launch.epilogue.in_float32 else x.dtype
        y = torch.empty(shape, dtype=dtype, device=x.device) if out is None else out
        packed = weight_groups.prepared_together(weights, self._form, self._pack)
        self._launch(
            rows,
            packed,
            None if bias is None else aligned(bias.contiguous()),
            None if residual is None else as_rows(residual),
            y.view(-1, features) if out is None else rows_of(out),
        )
        return y

    def entry(self) -> Entry | None:
        """The entry that lets the host library do the same; None where there is none."""
        form = weight_groups.number_of(self._form, self._shapes, self._dtype)
        return self._launch.entry(form, self._pack)


def _shape(problem: Problem) -> Shape:
    return Shape.of(problem.chain, problem.siblings)
