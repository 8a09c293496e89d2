"""Load compiled kernels through the CUDA driver, and launch them where the C++ launcher cannot."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from pathlib import Path
from typing import Any

import torch

from ksopt.errors import UnavailableError

# Libraries stay loaded for the life of the process: launches refer to them by raw handle.
_libraries: list[Any] = []
_lock = threading.Lock()


def load_kernel(cubin: bytes, name: str, shared_bytes: int, device: int) -> int:
    """Load a kernel and allow it its dynamic shared memory on ``device``.

    Args:
        cubin: compiled device code.
        name: the kernel's ``extern "C"`` name.
        shared_bytes: dynamic shared memory of a launch, in bytes.
        device: CUDA device index.

    Returns:
        The driver's CUkernel handle as an integer; valid on every device of the process.

    Raises:
        UnavailableError: the driver refuses; the message carries its words.
    """
    driver = _driver()
    with _lock, torch.cuda.device(device):
        torch.cuda.current_stream(device)  # makes sure that the device's context exists
        status, library = driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
        _check(driver, status, "load compiled code")
        _libraries.append(library)
        status, kernel = driver.cuLibraryGetKernel(library, name.encode())
        _check(driver, status, f"find the kernel {name}")
        if shared_bytes > 48 * 1024:  # more than this only after asking
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, device)
            _check(driver, status, f"give the kernel {shared_bytes} bytes of shared memory")
        return int(kernel)


def shared_bytes(device: int) -> int:
    """Shared memory of a multiprocessor of CUDA device ``device``, in bytes.

    Raises:
        UnavailableError: the driver or its bindings are missing.
    """
    driver = _driver()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    status, value = driver.cuDeviceGetAttribute(attribute, device)
    _check(driver, status, "tell the device's shared memory")
    return int(value)


@functools.cache
def version() -> str:
    """The driver's version, such as ``580.65.06``; else the CUDA version it supports.

    Raises:
        UnavailableError: the driver or its bindings are missing.
    """
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, flags=re.MULTILINE)
    if match is not None:
        return match[1]
    driver = _driver()
    status, number = driver.cuDriverGetVersion()
    _check(driver, status, "tell its version")
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def launch(
    kernel: int,
    blocks: int,
    threads: int,
    shared_bytes: int,
    arguments: ctypes.Structure,
    device: int,
    early: bool = False,
) -> None:
    """Launch on the current stream of ``device``; ``arguments`` is passed by value.

    Args:
        kernel: the driver's handle.
        blocks, threads, shared_bytes: of the launch; bytes are of a block.
        arguments: what the kernel takes.
        device: CUDA device index.
        early: the kernel waits for earlier ones by itself, so it may start before their end.

    Raises:
        UnavailableError: the driver refuses; the message carries its words.
    """
    driver = _driver()
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream

        def attempt() -> Any:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes, config.hStream = shared_bytes, stream
            config.attrs = [_early(driver)] if early else []
            config.numAttrs = len(config.attrs)
            function = driver.CUfunction(kernel)
            return driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0)[0]

        status = attempt()
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # A thread whose first use of CUDA is this one: it takes the context that torch has.
            status, context = driver.cuDevicePrimaryCtxRetain(device)
            _check(driver, status, "give a thread the device's context")
            driver.cuCtxSetCurrent(context)
            status = attempt()
    _check(driver, status, "launch a kernel")


def _early(driver: Any) -> Any:
    """The attribute of programmatic dependent launch (sm_90 and up)."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnavailableError(
            "The package cuda-bindings is not installed, so no kernel can be loaded. "
            "A CUDA build of torch brings it; otherwise install cuda-bindings."
        ) from error
    return driver


def _check(driver: Any, status: Any, doing: str) -> None:
    if status != driver.CUresult.CUDA_SUCCESS:
        _, words = driver.cuGetErrorString(status)
        text = words.decode() if isinstance(words, bytes) else str(words)
        raise UnavailableError(f"The CUDA driver could not {doing}: {text} ({status.name}).")
