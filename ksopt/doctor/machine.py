"""The facts about this machine: packages, devices, compilers, cache.

Examining changes nothing, with one exception: it builds the host library to check that it builds
(about a second, once; the cache stores it).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

import ksopt
from ksopt import settings
from ksopt.errors import KsoptError
from ksopt.system import ownership
from ksopt.system.cpu import cpu_name, cpus_allowed

PACKAGES = {
    "torch": "everything",
    "optuna": "ksopt search",
    "pandas": "ksopt search",
    "rich": "ksopt search",
    "ninja": "building the host library",
    "triton": "torch.compile on a GPU",
    "cuda-bindings": "compiling GPU kernels",
    "nvidia-cuda-nvrtc": "compiling GPU kernels",
}


@dataclass(frozen=True)
class Package:
    """An installed package, or one that is missing (``version`` is None)."""

    name: str
    version: str | None
    used_for: str


@dataclass(frozen=True)
class Device:
    """A device that ksopt can run on, under torch's name for it (``cpu``, ``cuda:0``)."""

    id: str
    name: str
    capability: tuple[int, int] | None = None
    memory_gib: float | None = None


@dataclass(frozen=True)
class Cuda:
    """The software between torch and an NVIDIA GPU."""

    torch_runtime: str | None
    driver_installed: bool
    nvrtc: str | None
    nvrtc_problem: str | None = None


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler: its command, its path, and the first line of its version."""

    command: str
    path: str | None
    version: str | None


@dataclass(frozen=True)
class HostLibrary:
    """The C++ library that launches kernels: its file, or the reason it could not be built.

    Both are None if it was built but the cache could not store it.
    """

    path: str | None
    problem: str | None


@dataclass(frozen=True)
class Cache:
    """The cache folder; ``problem`` is the reason it cannot be used, None if it can."""

    path: str
    exists: bool
    problem: str | None


@dataclass(frozen=True)
class Facts:
    """The facts about a machine."""

    ksopt: str
    python: str
    has_python_headers: bool
    system: str
    cpus: int
    torch_threads: int | None
    torch_problem: str | None
    packages: tuple[Package, ...]
    devices: tuple[Device, ...]
    cuda: Cuda
    compiler: Compiler
    host_library: HostLibrary
    cache: Cache
    settings: dict[str, str]

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The CUDA devices."""
        return tuple(d for d in self.devices if d.capability is not None)

    def version(self, package: str) -> str | None:
        """The version of ``package``; None if it is not installed."""
        return next((p.version for p in self.packages if p.name == package), None)


def examine() -> Facts:
    """Collect the facts; a missing part never raises."""
    devices, threads, runtime, problem = _torch_facts()
    nvrtc, nvrtc_problem = _nvrtc()
    return Facts(
        ksopt=ksopt.__version__,
        python=platform.python_version(),
        has_python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        system=platform.platform(),
        cpus=cpus_allowed(),
        torch_threads=threads,
        torch_problem=problem,
        packages=tuple(Package(name, _installed(name), use) for name, use in PACKAGES.items()),
        devices=devices,
        cuda=Cuda(runtime, _driver_installed(), nvrtc, nvrtc_problem),
        compiler=_compiler(settings.cxx_compiler()),
        host_library=_host_library(),
        cache=_cache(settings.cache_dir()),
        settings=settings.in_force(),
    )


def _torch_facts() -> tuple[tuple[Device, ...], int | None, str | None, str | None]:
    """Devices, CPU threads, CUDA runtime of the build, and the error of importing torch."""
    cpu = Device("cpu", cpu_name())
    try:
        import torch
    except Exception as error:  # a broken install fails in many ways; each is a fact to report
        return (cpu,), None, None, f"{type(error).__name__}: {error}"
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        memory_gib = round(properties.total_memory / 2**30, 1)
        gpus.append(
            Device(
                f"cuda:{index}", properties.name, (properties.major, properties.minor), memory_gib
            )
        )
    return (*gpus, cpu), torch.get_num_threads(), torch.version.cuda, None


def _nvrtc() -> tuple[str | None, str | None]:
    """The version of NVRTC, or the reason there is none."""
    from ksopt.jit import nvrtc

    try:
        return ".".join(map(str, nvrtc.version())), None
    except KsoptError as error:
        return None, str(error)


def _installed(package: str) -> str | None:
    if package == "torch" and "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)  # its metadata may omit the build
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_installed() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _compiler(command: str) -> Compiler:
    path = shutil.which(command)
    if path is None:
        return Compiler(command, None, None)
    try:
        ran = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return Compiler(command, path, None)
    return Compiler(command, path, next(iter(ran.stdout.splitlines()), "unknown version"))


def _host_library() -> HostLibrary:
    try:
        from ksopt.jit import host
    except Exception as error:  # torch is broken, which is a separate fact
        return HostLibrary(None, f"it needs torch, which cannot be imported ({error})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unusable cache is a separate fact
            built = host.build()
    except (KsoptError, OSError) as error:
        return HostLibrary(None, str(error))
    return HostLibrary(None if built.path is None else str(built.path), None)


def _cache(folder: Path) -> Cache:
    """The state of the cache folder, or of the nearest existing folder above it."""
    # os.path.exists, unlike Path.exists, returns False if a folder above may not be entered.
    exists = os.path.exists(folder)  # noqa: PTH110
    above = (p for p in (folder, *folder.parents) if os.path.exists(p))  # noqa: PTH110
    place = next(above, Path("/"))
    problem = None
    if not place.is_dir():
        problem = f"{place} is not a folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = f"{place} is not writable"
    else:
        try:
            ownership.check(folder)
        except OSError as error:
            problem = str(error)
    return Cache(str(folder), exists, problem)
