"""Transposes within rows (csrc/cuda/transpose_bmm.cuh): l side by side for a product, and back."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from ksopt.kernels.launcher import Launcher, prepare
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_TILE_BYTES = 16 * 1024
_WIDEST = 12  # j that a thread holds at a time where d is no multiple of a chunk
_MANY_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """Template arguments of ``TransposeTile``, in its order and with its meaning."""

    element_bytes: int
    length: int
    d: int
    part: int
    group: int
    threads: int

    @property
    def shared_bytes(self) -> int:
        chunks = self.group * self.part * self.d * self.element_bytes // 16
        return -(-chunks // 8) * 8 * 16


def unsupported(dtype: str, length: int, d: int) -> str | None:
    """None if matrices of ``length`` times ``d`` can be transposed; otherwise the reason."""
    if dtype not in BYTES:
        return f"{dtype} is not one of {', '.join(BYTES)}"
    chunk = 16 // BYTES[dtype]
    if length % chunk != 0:
        return f"{length} is not a multiple of {chunk}, the elements of 16 bytes"
    if d % chunk != 0 and d > _WIDEST:
        return f"d = {d} is neither a multiple of {chunk} nor at most {_WIDEST}"
    return None


def tile_of(dtype: str, a: int, length: int, d: int) -> Tile:
    """The tile for rows of ``a`` matrices of ``length`` times ``d``."""
    element, chunk = BYTES[dtype], 16 // BYTES[dtype]
    most = max(chunk, _TILE_BYTES // (d * element))
    parts = [n for n in range(chunk, length + 1, chunk) if length % n == 0 and n <= most]
    part = max(parts)
    group = 1
    if part == length:  # several matrices, in whole rows or in equal shares of one
        fit = max(1, most // length)
        group = max(n for n in range(1, fit + 1) if a % n == 0 or n % a == 0)
    units = group * (part // chunk) * (d // (chunk if d % chunk == 0 else d))
    return Tile(element, length, d, part, group, min(256, max(32, -(-units // 32) * 32)))


def geometry(a: int, tile: Tile) -> Geometry:
    """The launch geometry of a kernel on rows of ``a`` matrices."""
    return Geometry(
        threads=tile.threads,
        shared_bytes=tile.shared_bytes,
        rows_per_tile=max(1, tile.group // a),
        tiles_per_row_tile=max(1, a // tile.group) * (tile.length // tile.part),
        max_blocks=_MANY_BLOCKS,
    )


def kernel_name(a: int, tile: Tile, to_planar: bool) -> str:
    """The kernel's name, as profilers show it."""
    way = "planar" if to_planar else "interleaved"
    return f"ksopt_to_{way}_{8 * tile.element_bytes}bit_{a}_{tile.length}_{tile.d}"


def source(a: int, tile: Tile, to_planar: bool) -> str:
    """The generated file: one instance of the template.

    Args:
        a: matrices of a row.
        tile: from `tile_of`.
        to_planar: from (length, d) to (d, length); otherwise the other way round.
    """
    way = "planar" if to_planar else "interleaved"
    return (
        '#include "transpose_bmm.cuh"\n'
        f"using Tile = TransposeTile<{', '.join(map(str, astuple(tile)))}>;\n"
        f"static_assert(Tile::SHARED_BYTES == {tile.shared_bytes}, "
        '"csrc and kernels/families/common/transpose.py disagree");\n'
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS)\n'
        f"{kernel_name(a, tile, to_planar)}(const __grid_constant__ Arguments arguments) {{\n"
        f"  to_{way}_kernel<{a}, Tile>(arguments);\n"
        "}\n"
    )


def launcher(dtype: str, a: int, length: int, d: int, to_planar: bool, device: int) -> Launcher:
    """Compile and load a transpose of rows of ``a`` matrices on CUDA device ``device``."""
    tile = tile_of(dtype, a, length, d)
    # To the launcher it is a product whose x and y are as wide as each other, without a weight.
    problem = Problem.of_factor(Pattern(a, length, length, d), dtype, batch_last=False)
    return prepare(
        problem,
        kernel_name(a, tile, to_planar),
        source(a, tile, to_planar),
        geometry(a, tile),
        device,
    )
