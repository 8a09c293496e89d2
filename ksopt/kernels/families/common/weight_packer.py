"""Kernels that pack all weights of a layer in one launch: loaded, and launched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.jit import arch, driver, nvrtc

MOST_FACTORS, MOST_SIBLINGS = 4, 4


class Arguments(ctypes.Structure):
    """``ChainPackArguments`` of csrc/cuda/common/chain_arguments.cuh."""

    _fields_ = [
        ("weights", ctypes.c_void_p * MOST_FACTORS * MOST_SIBLINGS),
        ("strides", ctypes.c_int64 * 4 * MOST_FACTORS * MOST_SIBLINGS),
        ("packed", ctypes.c_void_p),
        ("packed_of_grad", ctypes.c_void_p),
    ]


def arguments_of(weights: Sequence[Tensor], siblings: int, packed: Tensor) -> Arguments:
    """The arguments of a kernel.

    Args:
        weights: of the factors, left to right, sibling after sibling, (a, b, c, d); any strides.
        siblings: the number of chains.
        packed: where they go.
    """
    arguments = Arguments(packed=packed.data_ptr())
    factors = len(weights) // siblings
    for at, weight in enumerate(weights):
        sibling, place = at // factors, factors - 1 - at % factors
        arguments.weights[sibling][place] = weight.data_ptr()
        arguments.strides[sibling][place] = (ctypes.c_int64 * 4)(*weight.stride())
    return arguments


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel that packs.

    Attributes:
        threads, blocks: of the launch.
        elements: of the packed weights.
        siblings: the number of chains.
    """

    threads: int
    blocks: int
    elements: int
    siblings: int


class WeightPacker:
    """A loaded kernel: called with the weights of all siblings, returns them packed.

    It is right in a graph that is being captured: all that it takes is the memory of the result.
    """

    def __init__(self, name: str, text: str, launch: Launch, device_index: int) -> None:
        code = nvrtc.cubin(text, arch.of_device(device_index)).data
        self._kernel = driver.load_kernel(code, name, 0, device_index)
        self._launch, self._device = launch, device_index

    def launch(self) -> dict[str, int]:
        """The launch for the host library."""
        return {
            "pack": self._kernel,
            "pack_blocks": self._launch.blocks,
            "pack_threads": self._launch.threads,
            "packed_elements": self._launch.elements,
        }

    def __call__(self, weights: Sequence[Tensor]) -> Tensor:
        """The packed weights; ``weights`` as for `arguments_of`."""
        first = weights[0]
        packed = torch.empty(self._launch.elements, dtype=first.dtype, device=first.device)
        self.pack(weights, packed)
        return packed

    def pack(
        self, weights: Sequence[Tensor], packed: Tensor, of_grad: Tensor | None = None
    ) -> None:
        """Pack into memory of the right sizes; ``of_grad`` as by `trained_pack_launcher`."""
        weights = [weight.resolve_neg() for weight in weights]
        arguments = arguments_of(weights, self._launch.siblings, packed)
        arguments.packed_of_grad = 0 if of_grad is None else of_grad.data_ptr()
        launch = (self._kernel, self._launch.blocks, self._launch.threads, 0, arguments)
        driver.launch(*launch, self._device, early=True)
