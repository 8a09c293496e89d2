"""Generation, loading and launching of the kernels of csrc/cuda/chain_grads_wgmma16.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels.families import weight_grad
from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.chain_grads_wgmma16 import (
    Chain,
    Config,
    Launch,
    Tile,
    configs,
    launches_of,
    predicted_us,
    unsupported,
)
from ksopt.kernels.families.gradient_base import (
    GradientFamily,
    GradientProblem,
    register_gradient_family,
)
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern

FourRows = tuple[Tensor, Tensor, Tensor, Tensor]
"""grad, between, grad_between and x, [rows, features] of any stride."""
Gradients = tuple[Tensor, Tensor, Tensor | None]
"""The gradients of the left weight, of the right one, and of the bias if requested."""


def kernel_name(chain: Chain, dtype: str, with_bias: bool) -> str:
    """The kernel's name, as profilers show it."""
    shape = "_".join(str(size) for p in chain for size in p.weight_shape)
    return f"ksopt_chain_grads_wgmma16_{dtype}_{shape}" + ("_bias" if with_bias else "")


def adding_name(dtype: str) -> str:
    """The name of the kernel that adds shares."""
    return f"ksopt_add_chain_shares_{dtype}"


def source(chain: Chain, config: Config, dtype: str, with_bias: bool = False) -> str:
    """The generated file: the kernel of the gradients, of the bias's too if ``with_bias``."""
    left, right = chain

    def tile(name: str, p: Pattern, one: Tile, bias: bool) -> str:
        fields = (one.m_groups, one.panels, one.rows, config.stages(one), int(bias))
        return (
            f"using {name} = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
            f"using {name}Tile = ChainGradTile<{name}, Block, {', '.join(map(str, fields))}>;\n"
            f"static_assert({name}Tile::TILES == {one.count(p)}, "
            '"csrc and kernels/families/chain_grads_wgmma16.py disagree");\n'
        )

    sizes = (config.groups, config.cluster, config.blocks, config.shared_bytes(chain))
    cluster = f"__cluster_dims__({config.cluster}, 1, 1) " if config.cluster > 1 else ""
    return (
        '#include "chain_grads_wgmma16.cuh"\n'
        f"using Block = ChainGradBlock<{', '.join(map(str, sizes))}>;\n"
        + tile("Left", left, config.left, with_bias)
        + tile("Right", right, config.right, False)
        + f'extern "C" __global__ void {cluster}__launch_bounds__(Block::THREADS, Block::BLOCKS)\n'
        f"{kernel_name(chain, dtype, with_bias)}"
        "(const __grid_constant__ ChainGradsArguments arguments) {\n"
        f"  chain_grads_wgmma16_kernel<{HALF[dtype]}, Left, LeftTile, Right, RightTile>"
        "(arguments);\n"
        "}\n"
    )


def adding_source(dtype: str) -> str:
    """The generated file of the kernel that adds shares."""
    return (
        '#include "chain_grads_wgmma16.cuh"\n'
        f'extern "C" __global__ void __launch_bounds__({weight_grad.ADDING_THREADS})\n'
        f"{adding_name(dtype)}(const __grid_constant__ ChainSharesArguments arguments) {{\n"
        f"  add_chain_shares_kernel<{HALF[dtype]}>(arguments);\n"
        "}\n"
    )


class Operands(ctypes.Structure):
    """``ChainGradOperands`` of csrc/cuda/chain_grads_wgmma16.cuh."""

    _fields_ = [
        ("grad", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("grad_stride", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("rows_per_block", ctypes.c_int64),
        ("shares", ctypes.c_int64),
    ]


class Arguments(ctypes.Structure):
    """``ChainGradsArguments`` of csrc/cuda/chain_grads_wgmma16.cuh."""

    _fields_ = [
        ("left", Operands),
        ("right", Operands),
        ("bias", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
    ]


class AddingArguments(ctypes.Structure):
    """``ChainSharesArguments`` of csrc/cuda/chain_grads_wgmma16.cuh."""

    _fields_ = [
        ("left", weight_grad.SharesArguments),
        ("right", weight_grad.SharesArguments),
        ("left_blocks", ctypes.c_int64),
    ]


def share_elements(chain: Chain, launch: Launch, with_bias: bool) -> tuple[int, int]:
    """fp32 elements of all shares of each factor; none where there is one share."""
    left, right = chain
    elements = (left.nnz + (left.out_features if with_bias else 0), right.nnz)
    of_left, of_right = (
        one * shares if shares > 1 else 0
        for one, shares in zip(elements, launch.shares, strict=True)
    )
    return of_left, of_right


def arguments_of(
    rows: FourRows,
    results: Gradients,
    shares: Tensor | None,
    chain: Chain,
    launch: Launch,
) -> Arguments:
    """The arguments of the kernel.

    Args:
        rows: the operands.
        results: where the gradients go.
        shares: fp32, of `share_elements`: the left factor's, then the right one's.
        chain: the factors.
        launch: of it.
    """
    grad, between, grad_between, x = rows
    left, right, bias = results
    first = None if shares is None else shares.data_ptr()
    of_left, _ = share_elements(chain, launch, bias is not None)
    to_left = first if first is not None and launch.shares[0] > 1 else left.data_ptr()
    to_right = first + 4 * of_left if first is not None and launch.shares[1] > 1 else None
    to = (to_left, right.data_ptr() if to_right is None else to_right)
    both = [
        Operands(
            *(dy.data_ptr(), z.data_ptr(), to[at], dy.stride(0), z.stride(0)),
            *(launch.rows_per_block[at], launch.shares[at]),
        )
        for at, (dy, z) in enumerate(((grad, between), (grad_between, x)))
    ]
    return Arguments(*both, 0 if bias is None else bias.data_ptr(), grad.shape[0])


def adding_arguments(
    shares: Tensor, results: Gradients, chain: Chain, launch: Launch
) -> AddingArguments:
    """The arguments of the kernel that adds shares."""
    left, right, bias = results
    first, none = shares.data_ptr(), weight_grad.SharesArguments()
    of_left, of_right = share_elements(chain, launch, bias is not None)
    elements = left.numel() + (0 if bias is None else bias.numel())
    return AddingArguments(
        weight_grad.SharesArguments(
            *(first, left.data_ptr(), 0 if bias is None else bias.data_ptr()),
            *(launch.shares[0], elements, left.numel()),
        )
        if of_left
        else none,
        weight_grad.SharesArguments(
            *(first + 4 * of_left, right.data_ptr(), 0),
            *(launch.shares[1], right.numel(), right.numel()),
        )
        if of_right
        else none,
        weight_grad.adding_blocks(elements) if of_left else 0,
    )


def adding_blocks(chain: Chain, launch: Launch, with_bias: bool) -> int:
    """Blocks of the kernel that adds shares; none where there are none."""
    of_left, of_right = share_elements(chain, launch, with_bias)
    return sum(
        weight_grad.adding_blocks(elements // shares)
        for elements, shares in zip((of_left, of_right), launch.shares, strict=True)
    )


class ChainGradients:
    """Loaded kernels of one chain, for one number of rows: called with the rows of its operands.

    They can be captured in a CUDA graph: beside launches they only allocate memory.

    Raises:
        CompilationError, UnavailableError: see :mod:`ksopt.jit`.
    """

    def __init__(
        self, chain: Chain, dtype: str, launch: Launch, device_index: int, with_bias: bool = False
    ) -> None:
        self.chain, self.launch, self._device = chain, launch, device_index
        self._with_bias = with_bias
        self._shared = launch.config.shared_bytes(chain)
        target = arch.of_device(device_index)
        code = nvrtc.cubin(source(chain, launch.config, dtype, with_bias), target).data
        name = kernel_name(chain, dtype, with_bias)
        self._kernel = driver.load_kernel(code, name, self._shared, device_index)
        self._elements = sum(share_elements(chain, launch, with_bias))
        self._adding = 0
        if self._elements:
            code = nvrtc.cubin(adding_source(dtype), target).data
            self._adding = driver.load_kernel(code, adding_name(dtype), 0, device_index)

    @property
    def entry(self) -> tuple[int, ...]:
        """The launch for the host library, as ``know_chain_grads`` of csrc/host takes it."""
        launch, threads = self.launch, self.launch.config.threads
        return (
            *(self._kernel, self._adding, threads, self._shared, weight_grad.ADDING_THREADS),
            *(launch.blocks(self.chain), *launch.shares, *launch.rows_per_block),
            adding_blocks(self.chain, launch, self._with_bias),
        )

    def __call__(self, grad: Tensor, between: Tensor, grad_between: Tensor, x: Tensor) -> Gradients:
        """The gradients from operands [rows, features], whose rows are aligned to 16 bytes."""
        left, right = (x.new_empty(p.weight_shape) for p in self.chain)
        bias = x.new_empty(self.chain[0].out_features) if self._with_bias else None
        shares = x.new_empty(self._elements, dtype=torch.float32) if self._elements else None
        self.write((grad, between, grad_between, x), (left, right, bias), shares)
        return left, right, bias

    def write(self, rows: FourRows, results: Gradients, shares: Tensor | None) -> None:
        """Write the gradients into ``results``; ``shares`` is fp32, of `share_elements`, if any."""
        arguments = arguments_of(rows, results, shares, self.chain, self.launch)
        blocks, threads = self.launch.blocks(self.chain), self.launch.config.threads
        driver.launch(self._kernel, blocks, threads, self._shared, arguments, self._device)
        if shares is not None:
            adding = adding_arguments(shares, results, self.chain, self.launch)
            blocks = adding_blocks(self.chain, self.launch, self._with_bias)
            driver.launch(self._adding, blocks, weight_grad.ADDING_THREADS, 0, adding, self._device)


@register_gradient_family
class ChainGradsWgmma16(GradientFamily[Launch]):
    """See chain_grads_wgmma16.py."""

    name = "chain_grads_wgmma16"
    computes = "chain_weights"

    def unsupported_reason(self, problem: GradientProblem, device: DeviceSpec) -> str | None:
        return unsupported(chain_of(problem), problem.dtype, device)

    def launches(self, problem: GradientProblem, rows: int, device: DeviceSpec) -> Iterator[Launch]:
        chain = chain_of(problem)
        for config in configs(chain):
            yield from launches_of(config, chain, rows, device)

    def predicted_us(
        self, problem: GradientProblem, launch: Launch, rows: int, device: DeviceSpec
    ) -> float:
        return predicted_us(launch, chain_of(problem), rows, device)

    def tile(self, launch: Launch) -> Config:
        return launch.config

    def launcher(
        self, problem: GradientProblem, launch: Launch, device_index: int
    ) -> ChainGradients:
        chain = chain_of(problem)
        return ChainGradients(chain, problem.dtype, launch, device_index, problem.with_bias)


def chain_of(problem: GradientProblem) -> Chain:
    """The left factor and the right one."""
    left, right = problem.factors
    return left, right
