"""Launchers of kernels whose weight is prepared first, once per version."""

from __future__ import annotations

import abc
from dataclasses import replace

from torch import Tensor

from ksopt.epilogue import After
from ksopt.kernels import weight_table
from ksopt.kernels.launcher import Entry, HostLauncher, Launcher, MakeLauncher
from ksopt.kernels.problem import Geometry

THREADS = 256
"""Threads of a block that packs weights."""

_BLOCKS = 1056  # 8 for each of an H200's multiprocessors


class PreparingLauncher(Launcher):
    """(x, weight) -> y: prepares the weight, or takes the cached form, and multiplies.

    Args:
        form: names the preparation, as `weight_table.prepared` takes it.
        multiply: the kernel, called with x and the prepared weight.
        fallback: makes what takes the x that the kernel does not; None if there are none.
    """

    def __init__(self, form: str, multiply: Launcher, fallback: MakeLauncher | None) -> None:
        super().__init__(multiply.problem, multiply.geometry, multiply.kernel, fallback)
        self.form = form
        self.multiply = multiply
        problem = multiply.problem
        self._number = weight_table.number_of(form, problem.pattern.weight_shape, problem.dtype)

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        launcher = self.for_rows(x)
        if launcher is not self:
            return launcher(x, weight, out)
        return self.multiply(
            x, weight_table.prepared(weight, self.form, self._number, self.pack), out
        )

    def with_epilogue(
        self, x: Tensor, weight: Tensor, after: After, out: Tensor | None = None
    ) -> Tensor | None:
        if self.make_fallback is not None and not self.takes(x):
            return None
        packed = weight_table.prepared(weight, self.form, self._number, self.pack)
        return self.multiply.with_epilogue(x, packed, after, out)

    def for_rows(self, x: Tensor) -> Launcher:
        """What multiplies x: this launcher, or its fallback."""
        return self if self.make_fallback is None or self.takes(x) else self.fallback

    def compile_fallback(self) -> None:
        super().compile_fallback()
        self.multiply.compile_fallback()

    def entry(self) -> Entry | None:
        entry = self.multiply.entry()
        if entry is None:
            return None
        takes_all = entry.any_rows and self.make_fallback is None
        return Entry(entry.plan, self._number, any_rows=takes_all)

    @abc.abstractmethod
    def pack(self, weight: Tensor) -> Tensor:
        """The weight (a, b, c, d), of any strides, as the kernel reads it, of four dims."""

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel takes x; it must take all that dispatch_table.hpp calls aligned."""
        return True


class PackedLauncher(PreparingLauncher):
    """A launcher whose weight a kernel packs too, for rows of x aligned to 16 bytes."""

    def __init__(
        self, form: str, pack: Launcher, multiply: Launcher, fallback: MakeLauncher | None
    ) -> None:
        super().__init__(form, multiply, fallback)
        self._pack = pack

    def takes(self, x: Tensor) -> bool:
        """Whether rows of x, or of a contiguous copy, begin at multiples of 16 bytes."""
        *outer, last = x.stride()
        chunk = 16 // x.element_size()
        return last == 1 and x.data_ptr() % 16 == 0 and all(stride % chunk == 0 for stride in outer)

    def entry(self) -> Entry | None:
        entry = super().entry()
        if entry is None or not isinstance(self._pack, HostLauncher):
            return entry
        return replace(entry, packing=self._pack.plan)

    def pack(self, weight: Tensor) -> Tensor:
        """The weight (a, b, c, d) as this tile reads it, from where it is stored."""
        return self._pack.packed(weight)


def geometry_of(tasks: int) -> Geometry:
    """The launch geometry of a kernel that packs weights, one task per thread."""
    return Geometry(
        threads=THREADS,
        shared_bytes=0,
        rows_per_tile=1,
        tiles_per_row_tile=-(-tasks // THREADS),
        max_blocks=_BLOCKS,
    )
