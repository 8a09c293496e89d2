"""A trained chain whose kernel packs its weights itself (csrc/cuda/common/trained_pack.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt.jit import driver
from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.common import chain_launcher, input_grad_tile, weight_packer
from ksopt.kernels.families.common.chain_launcher import Arguments, LoadedKernel, launch_of
from ksopt.kernels.families.common.chain_tile import Config, Epilogue, Shape


class FusedArguments(ctypes.Structure):
    """``FusedChainArguments`` of csrc/cuda/common/trained_pack.cuh."""

    _fields_ = [
        ("chain", Arguments),
        ("packing", weight_packer.Arguments),
        ("turns", ctypes.c_void_p),
    ]


def source(
    s: Shape, tile: Config, of_grad: input_grad_tile.Config, epilogue: Epilogue, dtype: str
) -> str:
    """The generated file: one instance of the template."""
    grad_shape = input_grad_tile.Shape(s.left, s.right, s.siblings)
    grad_pattern, grad_fields = input_grad_tile.template_arguments(grad_shape, of_grad.packing)
    text = chain_launcher.source(s, tile, epilogue, dtype)
    head, body = text.split('extern "C"')
    name = kernel_name(s, dtype, epilogue)
    body = body.replace(chain_launcher.kernel_name(s, dtype, epilogue), name)
    body = body.replace("ChainArguments", "FusedChainArguments").replace(
        "(arguments);",
        "_after(arguments.chain, [&] {\n"
        "    pack_in_turns<Tile::THREADS, Support, Tile, GradSupport, GradTile>(arguments);\n"
        "  });",
    )
    body = body.replace(
        f"<{HALF[dtype]}, Support, Tile, After>_after",
        f"_after<{HALF[dtype]}, Support, Tile, After>",
    )
    grads = (
        f"using GradSupport = InputGradPattern<{grad_pattern}>;\n"
        f"using GradTile = InputGradTile<GradSupport, {grad_fields}>;\n"
    )
    return '#include "common/trained_pack.cuh"\n' + head + grads + 'extern "C"' + body


def kernel_name(s: Shape, dtype: str, epilogue: Epilogue) -> str:
    """The kernel's name, as profilers show it."""
    return chain_launcher.kernel_name(s, dtype, epilogue) + "_packing"


class FusedChain(LoadedKernel):
    """(x, weights, bias) -> y, z and the weights packed for the gradient of x."""

    def __init__(
        self,
        s: Shape,
        tile: Config,
        of_grad: input_grad_tile.Config,
        epilogue: Epilogue,
        dtype: str,
        device_index: int,
    ) -> None:
        self._siblings, self.out_features = s.siblings, s.siblings * s.left.out_features
        self._middle = s.right.out_features
        grad_shape = input_grad_tile.Shape(s.left, s.right, s.siblings)
        self._elements = tile.packed_elements(s), of_grad.packed_elements(grad_shape)
        text = source(s, tile, of_grad, epilogue, dtype)
        name = kernel_name(s, dtype, epilogue)
        super().__init__(tile, name, text, tile.shared_bytes(s), device_index)
        self._turns = torch.zeros(4, dtype=torch.int32, device=f"cuda:{device_index}")

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.shape[0]
        y = x.new_empty(rows, self.out_features)
        planes = (self._siblings,) if self._siblings > 1 else ()
        z = x.new_empty(*planes, rows, self._middle)
        packed, of_grad = (x.new_empty(n) for n in self._elements)
        packing = weight_packer.arguments_of(weights, self._siblings, packed)
        packing.packed_of_grad = of_grad.data_ptr()
        chain = Arguments(
            *(x.data_ptr(), packed.data_ptr(), 0 if bias is None else bias.data_ptr(), 0),
            *(y.data_ptr(), rows, x.stride(0), y.stride(0), 0, 0, z.data_ptr()),
        )
        blocks, chain.rows_per_block = launch_of(self.tile, rows, self._multiprocessors)
        arguments = FusedArguments(chain, packing, self._turns.data_ptr())
        launch = (self._kernel, blocks, self.tile.threads, self._shared_bytes, arguments)
        driver.launch(*launch, self._device, early=True)
        return y, z, of_grad
