"""From a kernel's source to something that can be called: compile, load, launch."""

from __future__ import annotations

import abc
import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ksopt import settings
from ksopt.batched import Matrices
from ksopt.epilogue import After
from ksopt.jit import arch, driver, host, nvrtc
from ksopt.kernels import weight_table
from ksopt.kernels.problem import Geometry, Problem


def prepare(
    problem: Problem,
    name: str,
    source: str,
    geometry: Geometry,
    device: int,
    fallback: MakeLauncher | None = None,
) -> Launcher:
    """Compile (or take from the cache) and load a kernel.

    Args:
        problem: what the kernel computes.
        name: the kernel's ``extern "C"`` name in ``source``.
        source: CUDA C++ that defines it, taking one ``Arguments`` by value.
        geometry: how it is launched.
        device: CUDA device index.
        fallback: makes the launcher that takes the calls whose operands are not fit for 16-byte
            access (strides, alignment), when the first of them comes: few ever see one, and it is
            half of what there is to compile. None if the kernel has no such need.

    Raises:
        CompilationError, UnavailableError: see :mod:`ksopt.jit`.
    """
    if geometry.early and torch.cuda.get_device_capability(device) < (9, 0):
        geometry = replace(geometry, early=False)
    code = nvrtc.cubin(source, arch.of_device(device)).data
    kernel = driver.load_kernel(code, name, geometry.shared_bytes, device)
    if host.load() is not None:
        return _PythonLauncher(problem, geometry, kernel, fallback)
    return HostLauncher(problem, geometry, kernel, fallback)


class Launcher(abc.ABC):
    """A loaded kernel: called with (x, weight), returns y, on the current stream of x's device."""

    def __init__(
        self, problem: Problem, geometry: Geometry, kernel: int, fallback: MakeLauncher | None
    ) -> None:
        self.problem = problem
        self.geometry = geometry
        self.kernel = kernel
        self.make_fallback = fallback
        self._fallback: Launcher | None = None

    @property
    def fallback(self) -> Launcher:
        """The launcher of operands that this does not take: compiled now, if it was not before."""
        # Without a lock: threads that come at once get one each, and the code is compiled once.
        if self._fallback is None:
            assert self.make_fallback is not None
            self._fallback = self.make_fallback()
        return self._fallback

    def compile_fallback(self) -> None:
        """Compile the fallback now, before the first call that needs it."""
        if self.make_fallback is not None:
            _ = self.fallback

    @abc.abstractmethod
    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """x: (*batch, N) or (N, *batch); weight: (a, b, c, d); out: as for `cuda.run`."""

    def with_epilogue(
        self, x: Tensor, weight: Tensor, after: After, out: Tensor | None = None
    ) -> Tensor | None:
        """The result of a kernel whose problem has an epilogue; None for what it does not take.

        Args:
            x, weight, out: as for a call.
            after: of the problem's epilogue.
        """
        return None

    def packed(self, weight: Tensor) -> Tensor:
        """What a kernel that packs weights makes of one, of four dims.

        Args:
            weight: (a, b, c, d), of any strides.
        """
        raise NotImplementedError

    def entry(self) -> Entry | None:
        """The entry of the host library's table (`Enterable`)."""
        return None

    def in_order(self, weight: Tensor) -> Tensor:
        """The weight with its elements in order, as kernels that read whole vectors need it.

        It is cached like prepared weights. To copy a transposed weight (every backward pass has
        one), or one stored in another order, takes little time beside x, and lets the fast kernel
        run.
        """
        if self.make_fallback is None or weight.is_contiguous():
            return weight
        return weight_table.prepared(weight, "in order", self._number_in_order, Tensor.contiguous)

    @property
    def _number_in_order(self) -> int:
        shape = self.problem.pattern.weight_shape
        return weight_table.number_of("in order", shape, self.problem.dtype)


MakeLauncher = Callable[[], Launcher]


KERNEL, TORCH = range(2)
"""Kinds of an entry: ``Kind`` of csrc/host/dispatch_table.hpp."""
MERGED_MATRIX = -3
"""Instead of a kernel's index, of a layer: ``MERGED`` of csrc/host/plan_table.hpp."""
NO_PACKING, BY_GROUPS = -1, -3
"""Instead of the index of a kernel that packs: ``NONE`` and ``BY_GROUPS`` of csrc/host."""


@dataclass(frozen=True)
class Entry:
    """The entry of a call in csrc/host/dispatch_table.hpp.

    Attributes:
        plan: index of the kernel, from ``add_plan``, of the kernel of a whole chain, from
            ``add_chain``, or of how torch multiplies, from ``add_torch``; or `MERGED_MATRIX`.
        form: the number of the prepared weight that it takes (weight_table.py); 0 where none is
            cached for it.
        kind: a kernel of ours, or a product by torch, which also takes weights that it can read in
            their own memory.
        repacks: whether a call prepares the weight itself where no prepared one is cached, and
            caches nothing. Of a kernel: it takes any weight whose elements are in order, and
            prepares others so where weights change.
        any_rows: whether it is also for rows of x that do not begin at multiples of 16 bytes.
        packing: index of the kernel, from ``add_plan``, that packs a weight that changes;
            `BY_GROUPS` where torch puts it into another order; `NO_PACKING`.
    """

    plan: int
    form: int
    kind: int = KERNEL
    repacks: bool = False
    any_rows: bool = False
    packing: int = NO_PACKING


@dataclass(frozen=True)
class RepairedEntry(Entry):
    """The entry of a layer whose product is repaired.

    Attributes:
        repair: the driver's handle of the kernel of chain_repair.py behind the product.
    """

    repair: int = 0


@runtime_checkable
class Enterable(Protocol):
    """A call that the host library may be able to run without Python."""

    def entry(self) -> Entry | None:
        """The entry of the host library's table for it; None where there is none."""


_NONE, _LATER = -1, -2  # of csrc/host/kernel_table.hpp


_WAYS = (
    "batched",
    "loop",
    "einsum",
    "einsum_weight_first",
    "bmm_weight_first",
    "conv",
)  # as ``TorchWay`` of csrc/host/torch_ops.hpp


def torch_entry(
    matrices: Matrices,
    batch_last: bool,
    form: int,
    way: str = "batched",
    *,
    by_groups: bool = False,
    before: Launcher | None = None,
    after: Launcher | None = None,
    repair: Launcher | None = None,
) -> Entry | None:
    """The entry of a product by PyTorch.

    Args:
        matrices: what it multiplies by.
        batch_last: the layout.
        form: the number of the form of the prepared weight; 0 where none is cached.
        way: one batched product, a "loop" of them, batch last, torch's "einsum" in either order,
            one with the weight on the left, batch first, or a grouped "conv", where d is 1.
        by_groups: whether x and y are laid out for the product one group after another.
        before, after: kernels that transpose x and y; None for torch's copies.
        repair: the kernel that recomputes results that the matrices' zeros made NaN; None where
            they hold none, and where the whole result is checked instead, as on a CPU.

    Returns:
        None where there is no host library, and where nothing may be compiled.
    """
    if not host.is_loaded() and (settings.tuning() == "off" or host.load() is not None):
        return None
    plans = []
    for kernel in (before, after, repair):
        if kernel is not None and not isinstance(kernel, HostLauncher):
            return None
        plans.append(_NONE if kernel is None else kernel.plan)
    shape, strides = matrices.pattern.weight_shape, matrices.strides
    add = torch.ops.ksopt_host.add_torch
    plan = add(_WAYS.index(way), shape, strides, batch_last, by_groups, *plans)
    return Entry(plan, form, TORCH, any_rows=before is None)


def chain_entry(
    takes_any_rows: bool = False, in_float32: bool = False, /, *, kernel: int, out_features: int,
    threads: int, shared_bytes: int, rows_per_unit: int, most_blocks: int, cluster: int, pack: int,
    pack_blocks: int, pack_threads: int, packed_elements: int, form: int,
) -> Entry | None:  # fmt: skip
    """The entry of a kernel that computes a layer, and takes ``ChainArguments``.

    Args:
        takes_any_rows: whether it takes rows of any length, and, batch last, another such kernel
            does; else rows of whole 16 bytes, batch first.
        in_float32: whether its results are, of operands of another type.
        kernel: the driver's handle.
        out_features: of all siblings.
        threads, shared_bytes: of a block.
        rows_per_unit: blocks, or clusters of them, take as many whole units of these rows each.
        most_blocks: that run at a time.
        cluster: blocks that share the work on their rows; 1 for none.
        pack: the driver's handle of the kernel that packs weights that change.
        pack_blocks, pack_threads: of its launch.
        packed_elements: of its result.
        form: the number of the prepared weights.

    Returns:
        None where there is no host library.
    """
    if host.load() is not None:
        return None
    launch = (kernel, out_features, threads, shared_bytes, rows_per_unit, most_blocks, cluster)
    packing = (pack, pack_blocks, pack_threads, packed_elements)
    kind = (takes_any_rows, in_float32)
    return Entry(torch.ops.ksopt_host.add_chain(*launch, *packing, *kind), form)


class HostLauncher(Launcher):
    """Through csrc/host."""

    def __init__(
        self, problem: Problem, geometry: Geometry, kernel: int, fallback: MakeLauncher | None
    ) -> None:
        super().__init__(problem, geometry, kernel, fallback)
        # The overload itself, not the packet: it saves the search for an overload on every call.
        self._launch = torch.ops.ksopt_host.launch.default
        self.plan: int = torch.ops.ksopt_host.add_plan(
            kernel,
            problem.pattern.out_features,
            problem.batch_last,
            geometry.threads,
            geometry.shared_bytes,
            geometry.rows_per_tile,
            geometry.tiles_per_row_tile,
            geometry.max_blocks,
            geometry.early,
            _NONE if fallback is None else _LATER,
            problem.epilogue.in_float32,
        )

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        try:
            weight = self.in_order(weight)
            y = self._launch(x, weight, self.plan, out)
            if y is None:
                assert isinstance(self.fallback, HostLauncher)
                torch.ops.ksopt_host.set_fallback(self.plan, self.fallback.plan)
                y = self._launch(x, weight, self.plan, out)
            return y
        except RuntimeError:
            self._raise_if_memory_is_exhausted(x)
            raise

    def with_epilogue(
        self, x: Tensor, weight: Tensor, after: After, out: Tensor | None = None
    ) -> Tensor | None:
        bias, residual = after.bias, after.residual
        if not _are_contiguous(bias, residual):
            return None
        try:
            return self._launch(x, self.in_order(weight), self.plan, out, bias, residual)
        except RuntimeError:
            self._raise_if_memory_is_exhausted(x)
            raise

    def packed(self, weight: Tensor) -> Tensor:
        try:
            packed: Tensor = torch.ops.ksopt_host.pack.default(weight, self.plan)
        except RuntimeError:
            _new_packed(weight, self.problem)
            raise
        return packed

    def _raise_if_memory_is_exhausted(self, x: Tensor) -> None:
        # torch's C interface reports only that it failed. If memory was exhausted, this
        # allocation raises the error that callers catch.
        last, features = self.problem.batch_last, self.problem.pattern.out_features
        shape = (features, *x.shape[1:]) if last else (*x.shape[:-1], features)
        x.new_empty(shape, dtype=_dtype_of_result(self.problem, x))

    def entry(self) -> Entry:
        # Other rows than the kernel takes are its fallback's, in the host library, too.
        if self.make_fallback is None:
            return Entry(self.plan, form=0, any_rows=True)
        return Entry(self.plan, self._number_in_order, repacks=True, any_rows=True)


class _Arguments(ctypes.Structure):
    """``Arguments`` of csrc/cuda/common/kernel_params.cuh."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("x_batch_stride", ctypes.c_int64),
        ("x_feature_stride", ctypes.c_int64),
        ("y_batch_stride", ctypes.c_int64),
        ("y_feature_stride", ctypes.c_int64),
        ("weight_strides", ctypes.c_int64 * 4),
        ("weight_is_settled", ctypes.c_int64),
        ("bias", ctypes.c_void_p),  # these two of ``EpilogueArguments``
        ("residual", ctypes.c_void_p),
    ]


class _PythonLauncher(Launcher):
    """The launcher in Python, for machines without a C++ compiler."""

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        y = self.with_epilogue(x, weight, After(), out)
        return self.fallback(x, weight, out) if y is None else y

    def with_epilogue(
        self, x: Tensor, weight: Tensor, after: After, out: Tensor | None = None
    ) -> Tensor | None:
        x, weight = _in_memory(x), _in_memory(weight)  # torch does this for the host library
        bias, residual = after.bias, after.residual
        summands = [_in_memory(one) for one in (bias, residual) if one is not None]
        if not _are_contiguous(*summands):
            return None
        weight = self.in_order(weight)
        last = self.problem.batch_last
        sizes = x.shape[1:] if last else x.shape[:-1]
        out_features = self.problem.pattern.out_features
        rows = math.prod(sizes)
        y_shape = (out_features, *sizes) if last else (*sizes, out_features)
        dtype = _dtype_of_result(self.problem, x)
        y = x.new_empty(y_shape, dtype=dtype) if out is None else out
        if rows == 0:
            return y
        flat = x.reshape(x.shape[0], rows) if last else x.reshape(rows, x.shape[-1])
        batch_dim, feature_dim = (1, 0) if last else (0, 1)
        arguments = _Arguments(
            x=flat.data_ptr(),
            weight=weight.data_ptr(),
            y=y.data_ptr(),
            batch=rows,
            x_batch_stride=flat.stride(batch_dim),
            x_feature_stride=flat.stride(feature_dim),
            y_batch_stride=1 if last else out_features,
            y_feature_stride=rows if last else 1,
            weight_strides=_strides(weight),
            bias=0 if bias is None else summands[0].data_ptr(),
            residual=0 if residual is None else summands[-1].data_ptr(),
        )
        if self.make_fallback is not None and not _fit_for_vectors(flat, weight, y, last):
            return None
        if any(one.data_ptr() % 16 for one in summands):
            return None
        self._launch(arguments, x.get_device())
        return y

    def packed(self, weight: Tensor) -> Tensor:
        weight = _in_memory(weight)
        packed = _new_packed(weight, self.problem)
        arguments = _Arguments(
            weight=weight.data_ptr(),
            y=packed.data_ptr(),
            batch=1,
            weight_strides=_strides(weight),
        )
        self._launch(arguments, weight.get_device())
        return packed

    def _launch(self, arguments: _Arguments, device: int) -> None:
        g = self.geometry
        tiles = -(-arguments.batch // g.rows_per_tile) * g.tiles_per_row_tile
        blocks = min(tiles, g.max_blocks)
        launch = (self.kernel, blocks, g.threads, g.shared_bytes, arguments, device)
        driver.launch(*launch, early=g.early)


def _new_packed(weight: Tensor, problem: Problem) -> Tensor:
    return weight.new_empty(1, 1, 1, problem.pattern.out_features)


def _dtype_of_result(problem: Problem, x: Tensor) -> torch.dtype:
    return torch.float32 if problem.epilogue.in_float32 else x.dtype


def _in_memory(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its values: not negated lazily, nor zeros without memory."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


def _fit_for_vectors(x: Tensor, weight: Tensor, y: Tensor, batch_last: bool) -> bool:
    """``fit_for_vectors`` of csrc/host/kernel_table.hpp; x is (rows, N) or (N, rows)."""
    is_y_aligned = not batch_last or y[0].numel() * x.element_size() % 16 == 0
    return (
        x.stride(1) == 1
        and x.stride(0) * x.element_size() % 16 == 0
        and is_y_aligned
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, y))
    )


def _are_contiguous(*summands: Tensor | None) -> bool:
    return all(one is None or one.is_contiguous() for one in summands)


def _strides(weight: Tensor) -> Any:
    return (ctypes.c_int64 * 4)(*weight.stride())
