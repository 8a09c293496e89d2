"""Kernels of the gradient of chains' input in one launch (csrc/cuda/input_grad_wgmma16.cuh).

Of chains (1,b1,c1,d1)*(a2,b2,c2,1) in 16 bits, batch first, on Hopper. The gradients of what is
between the factors are written beside it: the right factors' own gradients need them. The
weights, which have changed since the last step, are packed by a small kernel before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.common import input_grad_tile
from ksopt.kernels.families.common.input_grad_tile import (
    Config,
    Shape,
    launch_of,
    template_arguments,
)
from ksopt.kernels.families.common.weight_packer import MOST_SIBLINGS, Launch, WeightPacker
from ksopt.kernels.families.gradient_base import (
    GradientFamily,
    GradientProblem,
    register_gradient_family,
)
from ksopt.kernels.problem import DeviceSpec

PACK_THREADS = 256


class Arguments(ctypes.Structure):
    """``InputGradArguments`` of csrc/cuda/common/input_grad_tile.cuh."""

    _fields_ = [
        ("grads", ctypes.c_void_p * MOST_SIBLINGS),
        ("weights", ctypes.c_void_p),
        ("between", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("grad_strides", ctypes.c_int64 * MOST_SIBLINGS),
        ("rows_per_block", ctypes.c_int64),
        ("below", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


def source(s: Shape, tile: Config, dtype: str) -> str:
    """The generated file: one instance of the template."""
    return _source(
        "input_grad_wgmma16",
        s,
        tile,
        f"static_assert(Tile::SHARED_BYTES == {tile.shared_bytes(s)} && "
        f"Tile::PACKED_BYTES == {2 * tile.packed_elements(s)}, ",
        "Tile::THREADS, Tile::BLOCKS",
        f"{_name(s, dtype)}(const __grid_constant__ InputGradArguments arguments) {{\n"
        f"  input_grad_wgmma16_kernel<{HALF[dtype]}, Support, Tile>(arguments);\n",
    )


def pack_source(s: Shape, tile: Config) -> str:
    """The generated file of the kernel that packs, for all tiles of the same packing."""
    s = replace(s, activation="none")
    return _source(
        "common/input_grad_pack",
        s,
        tile.packing,
        f"static_assert(Tile::PACKED_BYTES == {2 * tile.packed_elements(s)}, ",
        str(PACK_THREADS),
        f"{_pack_name(s)}(const __grid_constant__ ChainPackArguments arguments) {{\n"
        "  input_grad_pack_kernel<Support, Tile>(arguments);\n",
    )


def _source(header: str, s: Shape, tile: Config, facts: str, bounds: str, kernel: str) -> str:
    pattern, fields = template_arguments(s, tile)
    return (
        f'#include "{header}.cuh"\n'
        f"using Support = InputGradPattern<{pattern}>;\n"
        f"using Tile = InputGradTile<Support, {fields}>;\n"
        f'{facts}"csrc and kernels/families/common/input_grad_tile.py disagree");\n'
        f'extern "C" __global__ void __launch_bounds__({bounds})\n'
        f"{kernel}"
        "}\n"
    )


def _sizes(s: Shape) -> str:
    siblings = (f"x{s.siblings}",) if s.siblings > 1 else ()
    below = () if s.below is None else ("of", s.below.c, s.below.d)
    sizes = (*s.left.weight_shape[1:], *s.right.weight_shape[:3], *siblings, *below)
    return "_".join(map(str, sizes))


def _name(s: Shape, dtype: str) -> str:
    activation = f"_{s.activation}" if s.activation != "none" else ""
    return f"ksopt_input_grad_wgmma16_{dtype}_{_sizes(s)}{activation}"


def _pack_name(s: Shape) -> str:
    return f"ksopt_input_grad_pack_{_sizes(s)}"


def arguments_of(
    grads: Sequence[Tensor],
    packed: Tensor,
    between: Tensor,
    to: Tensor,
    rows_per_block: int,
    below: Tensor | None = None,
    bias: Tensor | None = None,
) -> Arguments:
    """The arguments of the kernel; rows of grads may have any stride."""
    arguments = Arguments(
        weights=packed.data_ptr(),
        between=between.data_ptr(),
        to=to.data_ptr(),
        batch=to.shape[0],
        rows_per_block=rows_per_block,
        below=0 if below is None else below.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
    )
    for at, grad in enumerate(grads):
        arguments.grads[at], arguments.grad_strides[at] = grad.data_ptr(), grad.stride(0)
    return arguments


def pack_blocks(s: Shape, tile: Config) -> int:
    """Blocks of the kernel that packs: a thread packs 8 elements."""
    return -(-tile.packed_elements(s) // (8 * PACK_THREADS))


class InputGradient:
    """Loaded kernels of chains that read the same: called with (grads, weights).

    They are right in a graph that is being captured: all that they take is memory.

    Raises:
        CompilationError, UnavailableError: see :mod:`ksopt.jit`.
    """

    def __init__(self, s: Shape, tile: Config, dtype: str, device_index: int) -> None:
        self.shape, self.tile, self._device = s, tile, device_index
        code = nvrtc.cubin(source(s, tile, dtype), arch.of_device(device_index)).data
        self._shared_bytes = tile.shared_bytes(s)
        self._kernel = driver.load_kernel(code, _name(s, dtype), self._shared_bytes, device_index)
        self.packed_elements = tile.packed_elements(s)
        launch = Launch(PACK_THREADS, pack_blocks(s, tile), self.packed_elements, s.siblings)
        self._pack = WeightPacker(_pack_name(s), pack_source(s, tile), launch, device_index)
        self._multiprocessors = DeviceSpec.of_device(device_index).multiprocessors

    def entry(self, rows: int) -> tuple[int, ...]:
        """As for `EnterableGradient`: the launch that packs, and the one that multiplies."""
        blocks, of_block = launch_of(self.tile, rows, self._multiprocessors)
        multiplying = (self._kernel, blocks, self.tile.threads, self._shared_bytes, of_block)
        return (*self._pack.launch().values(), *multiplying)

    def pack(self, weights: Sequence[Tensor]) -> Tensor:
        """The weights as the kernel reads them."""
        return self._pack(weights)

    def launch(
        self,
        grads: Sequence[Tensor],
        packed: Tensor,
        between: Tensor,
        to: Tensor,
        below: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Write both gradients, contiguous, from packed weights; others as in `__call__`."""
        blocks, of_block = launch_of(self.tile, to.shape[0], self._multiprocessors)
        arguments = arguments_of(grads, packed, between, to, of_block, below, bias)
        driver.launch(
            *(self._kernel, blocks, self.tile.threads, self._shared_bytes),
            *(arguments, self._device),
        )

    def __call__(
        self,
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        below: Tensor | None = None,
        bias: Tensor | None = None,
        packed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the chains' input, and of the values between their factors.

        Args:
            grads: [rows, b1*d1] of each chain, the elements of a row side by side, rows at
                multiples of 16 bytes.
            weights: [1,b1,c1,d1] and [a2,b2,c2,1] of each chain, of grads' dtype, any strides; with
                an activation also [1,b0,c0,d0] of the factor below.
            below: [rows, c0*d0], contiguous: what the factor below read, where there is one. The
                first gradient is then that of its product plus the bias, which is activated.
            bias: [a2*c2], at a multiple of 16 bytes, or None.
            packed: the weights by `pack`, where that was done before.

        Returns:
            [rows, a2*c2] and [rows, a2*b2], of several chains [siblings, rows, a2*b2].
        """
        rows, siblings = grads[0].shape[0], self.shape.siblings
        planes = (siblings,) if siblings > 1 else ()
        between = grads[0].new_empty(*planes, rows, self.shape.middle)
        to = grads[0].new_empty(rows, self.shape.right.in_features)
        if rows > 0:
            packed = self.pack(weights) if packed is None else packed
            self.launch(grads, packed, between, to, below, bias)
        return to, between


@dataclass(frozen=True)
class PredictedTile:
    """The best predicted tile, whichever it is: the forward pass has packed the weights for it."""


@register_gradient_family
class InputGradWgmma16(GradientFamily[Config]):
    """The family of a chain's input gradient (csrc/cuda/input_grad_wgmma16.cuh)."""

    name = "input_grad_wgmma16"
    computes = "chain_input"

    def unsupported_reason(self, problem: GradientProblem, device: DeviceSpec) -> str | None:
        return input_grad_tile.unsupported_reason(_shape(problem), problem.dtype, device)

    def launches(self, problem: GradientProblem, rows: int, device: DeviceSpec) -> Sequence[Config]:
        return input_grad_tile.best(_shape(problem), rows, device)

    def predicted_us(
        self, problem: GradientProblem, launch: Config, rows: int, device: DeviceSpec
    ) -> float:
        return input_grad_tile.predicted_us(_shape(problem), launch, rows, device)

    def tile(self, launch: Config) -> PredictedTile:
        return PredictedTile()

    def launcher(
        self, problem: GradientProblem, launch: Config, device_index: int
    ) -> InputGradient:
        return InputGradient(_shape(problem), launch, problem.dtype, device_index)


def _shape(problem: GradientProblem) -> Shape:
    left, right, *below = problem.factors
    return Shape(left, right, problem.siblings, problem.activation, *below)
