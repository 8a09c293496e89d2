"""From a kernel's source to something that can be called: compile, load, launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ksopt.jit import arch, driver, host, nvrtc
from ksopt.kernels.problem import Geometry, Problem

Runnable = Callable[[Tensor, Tensor], Tensor]
"""(x, weight) -> y, on the current stream of x's device."""


def prepare(problem: Problem, name: str, source: str, geometry: Geometry, device: int) -> Runnable:
    """Compile (or take from the cache) and load a kernel.

    Args:
        problem: what the kernel computes.
        name: the kernel's ``extern "C"`` name in ``source``.
        source: CUDA C++ that defines it, taking one ``Arguments`` by value.
        geometry: how it is launched.
        device: CUDA device index.

    Raises:
        CompilationError, UnavailableError: see :mod:`ksopt.jit`.
    """
    code = nvrtc.cubin(source, arch.of_device(device)).data
    kernel = driver.load_kernel(code, name, geometry.shared_bytes, device)
    if host.load() is not None:
        return _PythonLauncher(problem, geometry, kernel)
    plan = torch.ops.ksopt_host.add_plan(
        kernel,
        problem.pattern.out_features,
        problem.batch_last,
        geometry.threads,
        geometry.shared_bytes,
        geometry.rows_per_tile,
        geometry.tiles_per_row_tile,
        geometry.max_blocks,
    )
    # The overload itself, not the packet: it saves the search for an overload on every call.
    launch = torch.ops.ksopt_host.launch.default
    return lambda x, weight: launch(x, weight, plan)


class _Arguments(ctypes.Structure):
    """``Arguments`` of csrc/cuda/problem.cuh."""

    _fields_ = [  # noqa: RUF012 (ctypes wants a plain list)
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("x_batch_stride", ctypes.c_int64),
        ("x_feature_stride", ctypes.c_int64),
        ("y_batch_stride", ctypes.c_int64),
        ("y_feature_stride", ctypes.c_int64),
        ("weight_strides", ctypes.c_int64 * 4),
    ]


class _PythonLauncher:
    """The same as csrc/host/launcher.cpp, for machines without a C++ compiler."""

    def __init__(self, problem: Problem, geometry: Geometry, kernel: int) -> None:
        self._problem = problem
        self._geometry = geometry
        self._kernel = kernel

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        last = self._problem.batch_last
        sizes = x.shape[1:] if last else x.shape[:-1]
        out_features = self._problem.pattern.out_features
        rows = math.prod(sizes)
        y = x.new_empty((out_features, *sizes) if last else (*sizes, out_features))
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
        )
        g = self._geometry
        tiles = -(-rows // g.rows_per_tile) * g.tiles_per_row_tile
        blocks = min(tiles, g.max_blocks)
        device = x.get_device()
        driver.launch(self._kernel, blocks, g.threads, g.shared_bytes, arguments, device)
        return y


def _strides(weight: Tensor) -> Any:
    return (ctypes.c_int64 * 4)(*weight.stride())
