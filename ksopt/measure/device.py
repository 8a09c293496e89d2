"""The device of a measurement: chosen, named and recorded."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import ksopt
from ksopt.errors import InvalidInputError
from ksopt.measure.device_types import DEVICE_TYPES, other_devices, other_type
from ksopt.system.cpu import cpu_name, cpus_allowed


@dataclass(frozen=True)
class DeviceRecord:
    """The conditions of a measurement besides the code. None where they cannot be seen.

    Args:
        device: torch's name: ``cpu``, ``cuda:0``.
        type: ``cpu``, ``cuda``, or another type that has a backend.
        name: The processor's name: the device's own, or the CPU's where that is unknown.
        capability: Compute capability of the GPU, such as ``9.0``.
        multiprocessors: Of the GPU.
        memory_gib: Of the device; on a CPU of the machine.
        sm_clock_mhz: The multiprocessors' highest clock that the driver allows.
        memory_clock_mhz: The GPU memory's highest clock.
        driver: Version of the device's driver.
        cuda: Version of the CUDA runtime that torch was built with.
        cpu: The CPU's name.
        threads: Threads that torch computes with on the CPU.
        cpus: CPUs that this process may use.
        system: Operating system.
        python: Version of Python.
        torch: Version of torch.
        ksopt: Version of ksopt.
        commit: Commit of ksopt if it runs from a checkout; ``+changes`` if files differ from it.
    """

    device: str
    type: str
    name: str
    capability: str | None
    multiprocessors: int | None
    memory_gib: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    driver: str | None
    cuda: str | None
    cpu: str
    threads: int
    cpus: int
    system: str
    python: str
    torch: str
    ksopt: str
    commit: str | None

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) of the known fields, for a table."""
        return [(key, str(value)) for key, value in asdict(self).items() if value is not None]


def resolve(name: str = "auto") -> torch.device:
    """The device that a user's text names.

    Args:
        name: "auto" for the first GPU if there is one and the CPU otherwise, or torch's own name.

    Raises:
        InvalidInputError: There is no such device here; the sentence lists those there are.

    Example:
        >>> resolve("cpu")
        device(type='cpu')
        >>> resolve("tpu")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ksopt.errors.InvalidInputError: device 'tpu' is not available: this machine has cpu...
    """
    here = available()
    if name == "auto":
        return torch.device("cuda:0" if "cuda:0" in here else "cpu")
    full_name = "cuda:0" if name == "cuda" else name
    if name in DEVICE_TYPES and name not in ("cpu", "cuda"):
        full_name = next((one for one in here if one.partition(":")[0] == name), name)
    if full_name not in here:
        raise InvalidInputError(
            f"device {name!r} is not available: this machine has {', '.join(here)} "
            f"(torch {torch.__version__}); 'auto' takes the first GPU, else the CPU"
        )
    return torch.device(full_name)


def available() -> list[str]:
    """torch's names of the devices that ksopt can measure on."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(gpus)), *other_devices()]


def record(device: torch.device | str) -> DeviceRecord:
    """Describe a device and the software on it. Unknown fields are None; nothing is raised."""
    device = torch.device(device)
    gpu = _gpu(device) if device.type == "cuda" else _other(device)
    processor = cpu_name() or "unknown CPU"
    return DeviceRecord(
        device=str(device),
        type=device.type,
        name=gpu.name or processor,
        capability=gpu.capability,
        multiprocessors=gpu.multiprocessors,
        memory_gib=_memory_gib() if device.type == "cpu" else gpu.memory_gib,
        sm_clock_mhz=gpu.sm_clock_mhz,
        memory_clock_mhz=gpu.memory_clock_mhz,
        driver=gpu.driver,
        cuda=torch.version.cuda,
        cpu=processor,
        threads=torch.get_num_threads(),
        cpus=cpus_allowed(),
        system=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        ksopt=ksopt.__version__,
        commit=_commit(),
    )


@dataclass(frozen=True)
class _Gpu:
    name: str | None = None
    capability: str | None = None
    multiprocessors: int | None = None
    memory_gib: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    driver: str | None = None


def _other(device: torch.device) -> _Gpu:
    """The facts of a device of a registered type; none of any other's."""
    kind = other_type(device)
    if kind is None:
        return _Gpu()
    facts = kind.facts(device)
    return _Gpu(name=facts.name, memory_gib=facts.memory_gib, driver=facts.driver)


def _gpu(device: torch.device) -> _Gpu:
    properties = torch.cuda.get_device_properties(device)
    # Asked by UUID: nvidia-smi's numbers are not torch's where CUDA_VISIBLE_DEVICES is set.
    answer = _first_line(
        "nvidia-smi",
        f"--id=GPU-{getattr(properties, 'uuid', '')}",
        "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem",
        "--format=csv,noheader,nounits",
    )
    driver, sm, memory = (*(answer or "").split(", "), "", "", "")[:3]
    return _Gpu(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_gib=round(properties.total_memory / 2**30, 1),
        sm_clock_mhz=int(sm) if sm.isdigit() else None,
        memory_clock_mhz=int(memory) if memory.isdigit() else None,
        driver=driver or None,
    )


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):  # not a POSIX system, or unknown to it
        return None


@functools.cache
def _commit() -> str | None:
    """Commit of the checkout that ksopt was imported from; None from an installed package."""
    folder = Path(ksopt.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    commit = _first_line("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = _first_line("git", "-C", str(folder), "status", "--porcelain", "-uno")
    return f"{commit}+changes" if changed else commit


def _first_line(*command: str) -> str | None:
    """The first line that a command prints; None if it cannot run or fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(ran.stdout.splitlines()), None)
