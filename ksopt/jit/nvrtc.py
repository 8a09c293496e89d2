"""Compile device code with NVRTC: no toolkit, no GPU needed. Sources come from ``ksopt.csrc``."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

from ksopt.errors import CompilationError, UnavailableError
from ksopt.jit.cache import Artifact, ArtifactKey, get

_FLAGS = ("--std=c++17", "--device-as-default-execution-space")


def cubin(source: str, arch: str) -> Artifact:
    """Compile ``source`` for ``arch``, or take it from the cache.

    Args:
        source: CUDA C++ that may include the headers of ``ksopt/csrc/cuda`` by name.
        arch: target such as ``sm_80`` or ``sm_90a``; ``compute_80`` returns portable PTX.

    Returns:
        The artifact whose ``data`` the driver loads.

    Raises:
        UnavailableError: NVRTC or its Python bindings are not installed.
        CompilationError: the code does not compile; carries NVRTC's log.
    """
    headers = _reachable_headers(source)
    key = _key(source, headers, arch, "kernel.cubin", _FLAGS)
    return get(key, lambda: _compile(source, headers, arch, _FLAGS)[0])


def report(source: str, arch: str, parse: Callable[[str], bytes]) -> Artifact:
    """The report of ptxas on the kernels of ``source``, compiled now or cached.

    Args:
        source, arch: as for `cubin`.
        parse: the report's text -> the text to cache.

    Raises:
        UnavailableError, CompilationError: as `cubin` does.
    """
    headers, flags = _reachable_headers(source), (*_FLAGS, "--ptxas-options=--verbose")
    key = _key(source, headers, arch, "resources.json", flags)
    return get(key, lambda: parse(_compile(source, headers, arch, flags)[1]))


def _key(
    source: str, headers: dict[str, str], arch: str, filename: str, flags: tuple[str, ...]
) -> ArtifactKey:
    parts = {
        "source": source,
        "headers": _digest(headers),
        "flags": " ".join(flags),
        "compiler": f"nvrtc {'.'.join(map(str, version()))}",
    }
    return ArtifactKey.of(arch, filename, parts)


@functools.cache
def version() -> tuple[int, int]:
    """Version of the NVRTC library in use.

    Raises:
        UnavailableError: NVRTC or its Python bindings are not installed.
    """
    nvrtc = _bindings()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise UnavailableError(
            f"NVRTC (the CUDA run-time compiler) could not be loaded: {error}. "
            "Install the package nvidia-cuda-nvrtc, or a CUDA build of torch, which brings it."
        ) from error
    _check(nvrtc, status, None)
    return int(major), int(minor)


@functools.cache
def supported_capabilities() -> tuple[int, ...]:
    """Compute capabilities that this NVRTC compiles for, as numbers such as 80 and 90."""
    nvrtc = _bindings()
    version()
    status, targets = nvrtc.nvrtcGetSupportedArchs()
    _check(nvrtc, status, None)
    return tuple(int(target) for target in targets)


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnavailableError(
            "The package cuda-bindings is not installed, so no GPU code can be compiled. "
            "A CUDA build of torch brings it; otherwise install cuda-bindings."
        ) from error
    return nvrtc


@functools.cache
def _device_headers() -> dict[str, str]:
    """The headers of csrc/cuda by the names that an include has for them: common/ptx.cuh."""
    folder = resources.files("ksopt.csrc") / "cuda"
    shared = [(f"common/{entry.name}", entry) for entry in (folder / "common").iterdir()]
    named = [*((entry.name, entry) for entry in folder.iterdir()), *shared]
    return {name: entry.read_text("utf-8") for name, entry in named if name.endswith(".cuh")}


def _reachable_headers(source: str) -> dict[str, str]:
    """The headers that ``source`` includes, directly or not; other headers are not in the key."""
    known = _device_headers()
    included: dict[str, str] = {}
    queue = [source]
    while queue:
        for name in re.findall(r'^\s*#include "([^"]+)"', queue.pop(), flags=re.MULTILINE):
            if name in known and name not in included:
                included[name] = known[name]
                queue.append(known[name])
    return included


def _digest(headers: dict[str, str]) -> str:
    text = "\0".join(f"{name}\0{body}" for name, body in sorted(headers.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _compile(
    source: str, headers: dict[str, str], arch: str, flags: tuple[str, ...]
) -> tuple[bytes, str]:
    """The code, and the compiler's log."""
    nvrtc = _bindings()
    version()  # a missing library is reported by its own sentence
    names = [name.encode() for name in headers]
    bodies = [body.encode() for body in headers.values()]
    status, program = nvrtc.nvrtcCreateProgram(
        source.encode(), b"kernel.cu", len(names), bodies, names
    )
    _check(nvrtc, status, None)
    try:
        options = [f"--gpu-architecture={arch}".encode(), *(f.encode() for f in flags)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        _check(nvrtc, status, program)
        portable = arch.startswith("compute_")
        get_size = nvrtc.nvrtcGetPTXSize if portable else nvrtc.nvrtcGetCUBINSize
        get_code = nvrtc.nvrtcGetPTX if portable else nvrtc.nvrtcGetCUBIN
        status, size = get_size(program)
        _check(nvrtc, status, program)
        data = _buffer(size)
        (status,) = get_code(program, data)
        _check(nvrtc, status, program)
        return data[:size], _log(nvrtc, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(nvrtc: Any, status: Any, program: Any) -> None:
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return
    log = "" if program is None else _log(nvrtc, program)
    raise CompilationError(f"NVRTC reports {status.name}. {log}".strip())


def _log(nvrtc: Any, program: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    buffer = _buffer(size)
    nvrtc.nvrtcGetProgramLog(program, buffer)
    return buffer[:size].decode(errors="replace").rstrip("\0 \n")


def _buffer(size: int) -> bytes:
    """Memory that NVRTC writes into: at least two bytes, as Python shares one-byte objects.

    An empty log has a size of 1; written into that object, it would change every b" ".
    """
    return b"\0" * max(size, 2)
