"""Generation, loading and launching of the kernels of csrc/cuda/chain_mma.cuh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt.epilogue import ACTIVATIONS
from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels import weight_groups
from ksopt.kernels.families.base import ANY_TYPE
from ksopt.kernels.families.common.chain_mlp_launcher import Arguments
from ksopt.kernels.families.common.chain_mma_tile import Config, Stage
from ksopt.kernels.families.common.chain_rows import aligned
from ksopt.kernels.families.common.row_grid import grid_of
from ksopt.kernels.families.common.weight_packer import Launch, WeightPacker
from ksopt.kernels.launcher import Entry, chain_entry
from ksopt.kernels.problem import EMPTY, DeviceSpec, Problem

PACK_THREADS, PACK_BLOCKS = 256, 1056
_ALIGNED = 16


def names(problem: Problem) -> tuple[str, str]:
    """The names of the packing and of the multiplying kernel, as profilers show them."""
    sizes = "_then_".join(
        "_x_".join("_".join(map(str, p.weight_shape)) for p in chain) for chain in problem.chains
    )
    sizes += f"_x{problem.siblings}" if problem.siblings > 1 else ""
    dtype = problem.dtype if problem.exact else "tf32"
    after = "".join(f"_{name}" for layer in problem.layers() for name in layer.epilogue.names)
    return f"ksopt_chain_mma_pack_{dtype}_{sizes}", f"ksopt_chain_mma_{dtype}_{sizes}{after}"


def sources(
    problem: Problem, tile: Config, stages: Sequence[Stage], shared_bytes: int
) -> tuple[str, str]:
    """The generated files: an instance that packs, and one that multiplies."""
    several = ", ".join(f"ChainStage<{stage.arguments}>" for stage in stages)
    last = str(problem.batch_last).lower()
    fields = f"{ANY_TYPE[problem.dtype]}, {tile.bm}, {tile.warps}, {tile.blocks}"
    fields += f", {last}, {tile.groups}, {problem.siblings}, {_ahead(problem)}"
    packed = sum(stage.packed_bytes for stage in stages)
    begin = (
        '#include "chain_mma.cuh"\n'
        f"using Tile = ChainMmaTile<{fields}, {several}>;\n"
        f"static_assert(Tile::SHARED_BYTES == {shared_bytes} && Tile::PACKED_BYTES == {packed}, "
        '"csrc and kernels/families/chain_mma.py disagree");\n'
    )
    pack, multiply = names(problem)
    return (
        begin + f'extern "C" __global__ void __launch_bounds__({PACK_THREADS})\n'
        f"{pack}(const __grid_constant__ ChainPackArguments arguments) {{\n"
        "  chain_mma_pack_kernel<Tile>(arguments);\n"
        "}\n",
        begin + f"using After = ChainEpilogue<{_epilogue(problem)}>;\n"
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)\n'
        f"{multiply}(const __grid_constant__ MlpArguments arguments) {{\n"
        "  chain_mma_kernel<Tile, After>(arguments);\n"
        "}\n",
    )


def _ahead(problem: Problem) -> int:
    """Stages of the first of two layers; 0 for one layer."""
    return 0 if problem.second is None else len(problem.chain)


def _epilogue(problem: Problem) -> str:
    """The arguments of ``ChainEpilogue``."""
    after = problem.layers()[-1].epilogue
    ahead = EMPTY if problem.second is None else problem.epilogue
    activations = map(ACTIVATIONS.index, (ahead.activation, after.activation))
    extras = (int(after.bias), int(after.residual), 0, 0, int(ahead.bias))
    return ", ".join(map(str, (*activations, *extras)))


def launch_of(tile: Config, shares: int, batch: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks of a launch and rows of each.

    Args:
        tile: the tile.
        shares: blocks that have the same rows: one for each group of each sibling.
        batch: rows of x.
        multiprocessors: of the device.
    """
    return grid_of(batch, tile.bm, most_blocks(tile, shares, multiprocessors), shares)


def most_blocks(tile: Config, shares: int, multiprocessors: int) -> int:
    """Blocks of a share that run at a time."""
    return max(1, multiprocessors * tile.blocks // shares)


def rows_of(x: Tensor, batch_last: bool) -> tuple[int, int] | None:
    """The batch, and the stride of rows (batch last: of features), as the kernel takes them.

    It takes elements side by side that begin at a multiple of 16 bytes. Rows that are no multiple
    of 16 bytes must lie side by side, too.

    Returns:
        None where x lies otherwise.
    """
    features = x.shape[0] if batch_last else x.shape[-1]
    try:
        lines = x.view(features, -1) if batch_last else x.view(-1, features)
    except RuntimeError:
        return None
    count, length = lines.shape
    distance = lines.stride(0) if count > 1 else length
    if lines.data_ptr() % _ALIGNED or (length > 1 and lines.stride(1) != 1):
        return None
    if batch_last:
        return length, distance
    pieces = (length, distance) if distance != length else ()
    if any(piece * x.element_size() % _ALIGNED for piece in pieces):
        return None
    return count, distance


class _Loaded:
    """Kernels that are compiled and loaded. x that they do not take is copied first."""

    def __init__(
        self,
        problem: Problem,
        tile: Config,
        stages: Sequence[Stage],
        shared_bytes: int,
        device_index: int,
    ) -> None:
        self._problem, self._tile = problem, tile
        self._shared_bytes, self._device = shared_bytes, device_index
        self._shares = tile.groups * problem.siblings
        products = " ".join(str(stage.products) for stage in stages)
        # Tiles with the same order share it.
        self._form = f"chain_mma {products} {tile.groups} {_ahead(problem)}"
        pack_text, text = sources(problem, tile, stages, shared_bytes)
        pack_name, name = names(problem)
        elements = sum(one.packed_bytes for one in stages) * self._shares // _size(problem)
        blocks = min(PACK_BLOCKS, -(-elements // PACK_THREADS))
        chains = problem.siblings if problem.second is None else 2
        launch = Launch(PACK_THREADS, blocks, elements, chains)
        self._pack = WeightPacker(pack_name, pack_text, launch, device_index)
        code = nvrtc.cubin(text, arch.of_device(device_index)).data
        self._kernel = driver.load_kernel(code, name, shared_bytes, device_index)
        self._multiprocessors = DeviceSpec.of_device(device_index).multiprocessors

    def run(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        hidden_bias: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """The result, written into ``out`` if that is passed."""
        last, features = self._problem.batch_last, self._problem.out_features
        shape = (features, *x.shape[1:]) if last else (*x.shape[:-1], features)
        if out is not None and rows_of(out, last) is None:
            return out.copy_(self.run(x, weights, hidden_bias, bias, residual, None))
        y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        packed = weight_groups.prepared_together(weights, self._form, self._pack)
        x, (batch, x_stride) = _taken(x, last)
        if batch == 0:
            return y
        y_rows = rows_of(y, last)
        assert y_rows is not None
        residual_stride = 0
        if residual is not None:
            residual, (_, residual_stride) = _taken(residual, last)
        hidden_bias = None if hidden_bias is None else hidden_bias.contiguous()
        bias = None if bias is None else aligned(bias.contiguous())
        blocks, rows = launch_of(self._tile, self._shares, batch, self._multiprocessors)
        arguments = Arguments(
            *(x.data_ptr(), packed.data_ptr(), 0 if bias is None else bias.data_ptr()),
            *(0 if residual is None else residual.data_ptr(), y.data_ptr(), batch),
            *(x_stride, y_rows[1], residual_stride, rows),
            hidden_bias=0 if hidden_bias is None else hidden_bias.data_ptr(),
        )
        driver.launch(
            *(self._kernel, blocks, self._tile.threads, self._shared_bytes),
            *(arguments, self._device),
            early=True,
        )
        return y

    def entry(self) -> Entry | None:
        """The entry that lets the host library do the same; None where there is none."""
        p = self._problem
        shapes = [one.weight_shape for chain in p.chains for one in chain] * p.siblings
        return chain_entry(
            True,
            **self._pack.launch(),
            kernel=self._kernel,
            out_features=p.out_features,
            threads=self._tile.threads,
            shared_bytes=self._shared_bytes,
            rows_per_unit=self._tile.bm,
            most_blocks=most_blocks(self._tile, self._shares, self._multiprocessors),
            cluster=self._shares,
            form=weight_groups.number_of(self._form, shapes, p.dtype),
        )


class LaunchChain(_Loaded):
    """(x, weights, bias, residual, out) -> y: see `candidate.ChainCall`."""

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor:
        return self.run(x, weights, None, bias, residual, out)


class LaunchMlp(_Loaded):
    """(x, weights, hidden bias, bias, residual, out) -> y: see `candidate.MlpCall`."""

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
        return self.run(x, weights, hidden_bias, bias, residual, out)


def _size(problem: Problem) -> int:
    return int(getattr(torch, problem.dtype).itemsize)


def _taken(x: Tensor, batch_last: bool) -> tuple[Tensor, tuple[int, int]]:
    """The tensor that the kernel reads, copied where its layout does not fit, and its `rows_of`."""
    rows = rows_of(x, batch_last)
    if rows is None:
        x = aligned(x.contiguous())
        rows = rows_of(x, batch_last)
        assert rows is not None
    return x, rows
