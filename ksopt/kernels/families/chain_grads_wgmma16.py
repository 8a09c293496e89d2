"""Generation, loading and launching of the kernels of csrc/cuda/chain_grads_wgmma16.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.common import weight_grad
from ksopt.kernels.families.common.chain_grads_tile import (
    MOST_SIBLINGS,
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


def kernel_name(chain: Chain, dtype: str, with_bias: bool, siblings: int = 1) -> str:
    """The kernel's name, as profilers show it."""
    shape = "_".join(str(size) for p in chain for size in p.weight_shape)
    words = [f"x{siblings}"] if siblings > 1 else []
    words += ["bias"] if with_bias else []
    return "_".join(["ksopt_chain_grads_wgmma16", dtype, shape, *words])


def adding_name(dtype: str) -> str:
    """The name of the kernel that adds shares."""
    return f"ksopt_add_chain_shares_{dtype}"


def source(
    chain: Chain, config: Config, dtype: str, with_bias: bool = False, siblings: int = 1
) -> str:
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

    sizes = (config.groups, config.cluster, config.blocks, config.shared_bytes(chain), siblings)
    cluster = f"__cluster_dims__({config.cluster}, 1, 1) " if config.cluster > 1 else ""
    return (
        '#include "chain_grads_wgmma16.cuh"\n'
        f"using Block = ChainGradBlock<{', '.join(map(str, sizes))}>;\n"
        + tile("Left", left, config.left, with_bias)
        + tile("Right", right, config.right, False)
        + f'extern "C" __global__ void {cluster}__launch_bounds__(Block::THREADS, Block::BLOCKS)\n'
        f"{kernel_name(chain, dtype, with_bias, siblings)}"
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
        ("bias", ctypes.c_void_p),
        ("grad_stride", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("rows_per_block", ctypes.c_int64),
        ("shares", ctypes.c_int64),
    ]


class Arguments(ctypes.Structure):
    """``ChainGradsArguments`` of csrc/cuda/chain_grads_wgmma16.cuh."""

    _fields_ = [
        ("left", Operands * MOST_SIBLINGS),
        ("right", Operands * MOST_SIBLINGS),
        ("batch", ctypes.c_int64),
    ]


class AddingArguments(ctypes.Structure):
    """``ChainSharesArguments`` of csrc/cuda/chain_grads_wgmma16.cuh."""

    _fields_ = [
        ("left", weight_grad.SharesArguments * MOST_SIBLINGS),
        ("right", weight_grad.SharesArguments * MOST_SIBLINGS),
        ("left_blocks", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
    ]


def share_elements(chain: Chain, launch: Launch, with_bias: bool) -> tuple[int, int]:
    """fp32 elements of all shares of each factor of a sibling; none where there is one share."""
    left, right = chain
    elements = (left.nnz + (left.out_features if with_bias else 0), right.nnz)
    of_left, of_right = (
        one * shares if shares > 1 else 0
        for one, shares in zip(elements, launch.shares, strict=True)
    )
    return of_left, of_right


@dataclass(frozen=True)
class _Part:
    """A factor of a sibling: its operands, and where its gradient goes.

    Attributes:
        grad: dY; x: what the factor was multiplied with.
        to: the weight's gradient; bias: that of the bias, of left factors if requested.
        shares: address of its shares; None where there is one.
    """

    grad: Tensor
    x: Tensor
    to: Tensor
    bias: Tensor | None
    shares: int | None

    @property
    def of_bias(self) -> int:
        """Address of the bias's gradient."""
        return 0 if self.bias is None else self.bias.data_ptr()


def _parts(
    rows: Sequence[Tensor],
    results: Sequence[Tensor],
    shares: Tensor | None,
    chain: Chain,
    launch: Launch,
) -> Iterator[tuple[_Part, _Part]]:
    """The left and the right factor of each sibling."""
    siblings = launch.siblings
    with_bias = len(results) > 2 * siblings
    of_left, of_right = share_elements(chain, launch, with_bias)
    first = 0 if shares is None else shares.data_ptr()
    for at in range(siblings):
        grad, between, grad_between = rows[at:-1:siblings]
        left, right = results[2 * at : 2 * at + 2]
        bias = results[2 * siblings + at] if with_bias else None
        own = first + 4 * at * (of_left + of_right)
        yield (
            _Part(grad, between, left, bias, own if of_left else None),
            _Part(grad_between, rows[-1], right, None, own + 4 * of_left if of_right else None),
        )


def arguments_of(
    rows: Sequence[Tensor],
    results: Sequence[Tensor],
    shares: Tensor | None,
    chain: Chain,
    launch: Launch,
) -> Arguments:
    """The arguments of the kernel.

    Args:
        rows: the operands, as of `ChainGradients`.
        results: where the gradients go, in that order.
        shares: fp32, of `share_elements` for each sibling: the left factor's, then the right one's.
        chain: the factors.
        launch: of it.
    """
    arguments = Arguments(batch=rows[-1].shape[0])
    for at, both in enumerate(_parts(rows, results, shares, chain, launch)):
        arguments.left[at], arguments.right[at] = (
            Operands(
                *(one.grad.data_ptr(), one.x.data_ptr()),
                *(one.to.data_ptr() if one.shares is None else one.shares, one.of_bias),
                *(one.grad.stride(0), one.x.stride(0), of_block, count),
            )
            for one, of_block, count in zip(both, launch.rows_per_block, launch.shares, strict=True)
        )
    return arguments


def adding_arguments(
    rows: Sequence[Tensor],
    results: Sequence[Tensor],
    shares: Tensor,
    chain: Chain,
    launch: Launch,
) -> AddingArguments:
    """The arguments of the kernel that adds shares, of those of `arguments_of`."""
    arguments = AddingArguments()
    for at, both in enumerate(_parts(rows, results, shares, chain, launch)):
        for of_factor, one, count in zip(
            (arguments.left, arguments.right), both, launch.shares, strict=True
        ):
            if one.shares is not None:
                own = one.to.numel()
                elements = own + (0 if one.bias is None else one.bias.numel())
                of_factor[at] = weight_grad.SharesArguments(
                    one.shares, one.to.data_ptr(), one.of_bias, count, elements, own
                )
    with_bias = len(results) > 2 * launch.siblings
    arguments.left_blocks, of_right = _adding_blocks(chain, launch, with_bias)
    arguments.blocks = arguments.left_blocks + of_right
    return arguments


def _adding_blocks(chain: Chain, launch: Launch, with_bias: bool) -> tuple[int, int]:
    of_left, of_right = (
        weight_grad.adding_blocks(elements // shares)
        for elements, shares in zip(
            share_elements(chain, launch, with_bias), launch.shares, strict=True
        )
    )
    return of_left, of_right


def adding_blocks(chain: Chain, launch: Launch, with_bias: bool) -> int:
    """Blocks of the kernel that adds shares; none where there are none."""
    return sum(_adding_blocks(chain, launch, with_bias)) * launch.siblings


class ChainGradients:
    """Loaded kernels of a chain or of siblings, for one number of rows: called with operands.

    These are the gradients of y of all siblings, what is between their factors, its gradients, and
    x, each [rows, features]. Calls can be captured in a CUDA graph: beside launches they only
    allocate memory.

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
        generated = source(chain, launch.config, dtype, with_bias, launch.siblings)
        code = nvrtc.cubin(generated, target).data
        name = kernel_name(chain, dtype, with_bias, launch.siblings)
        self._kernel = driver.load_kernel(code, name, self._shared, device_index)
        self._elements = launch.siblings * sum(share_elements(chain, launch, with_bias))
        self._adding = 0
        if self._elements:
            code = nvrtc.cubin(adding_source(dtype), target).data
            self._adding = driver.load_kernel(code, adding_name(dtype), 0, device_index)

    def entry(self, rows: int) -> tuple[int, ...]:
        """As for `EnterableGradient`, on the rows that it was made for."""
        launch, threads = self.launch, self.launch.config.threads
        return (
            *(self._kernel, self._adding, threads, self._shared, weight_grad.ADDING_THREADS),
            *(launch.blocks(self.chain), *launch.shares, *launch.rows_per_block),
            adding_blocks(self.chain, launch, self._with_bias),
        )

    def __call__(self, *rows: Tensor) -> list[Tensor]:
        """The gradients from operands whose rows are aligned to 16 bytes.

        Those of the weights, left to right, sibling after sibling, and then of the biases if any.
        """
        x, siblings = rows[-1], self.launch.siblings
        results = [x.new_empty(p.weight_shape) for _ in range(siblings) for p in self.chain]
        if self._with_bias:
            results += [x.new_empty(self.chain[0].out_features) for _ in range(siblings)]
        shares = x.new_empty(self._elements, dtype=torch.float32) if self._elements else None
        self.write(rows, results, shares)
        return results

    def write(
        self, rows: Sequence[Tensor], results: Sequence[Tensor], shares: Tensor | None
    ) -> None:
        """Write the gradients into ``results``; ``shares`` as of `arguments_of`, if any."""
        arguments = arguments_of(rows, results, shares, self.chain, self.launch)
        blocks, threads = self.launch.blocks(self.chain), self.launch.config.threads
        driver.launch(self._kernel, blocks, threads, self._shared, arguments, self._device)
        if shares is not None:
            adding = adding_arguments(rows, results, shares, self.chain, self.launch)
            blocks = adding_blocks(self.chain, self.launch, self._with_bias)
            driver.launch(self._adding, blocks, weight_grad.ADDING_THREADS, 0, adding, self._device)


@register_gradient_family
class ChainGradsWgmma16(GradientFamily[Launch]):
    """The family of both weight gradients of a chain (csrc/cuda/chain_grads_wgmma16.cuh)."""

    name = "chain_grads_wgmma16"
    computes = "chain_weights"

    def unsupported_reason(self, problem: GradientProblem, device: DeviceSpec) -> str | None:
        return unsupported(chain_of(problem), problem.dtype, device, problem.siblings)

    def launches(self, problem: GradientProblem, rows: int, device: DeviceSpec) -> Iterator[Launch]:
        chain = chain_of(problem)
        for config in configs(chain):
            yield from launches_of(config, chain, rows, device, problem.siblings)

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
