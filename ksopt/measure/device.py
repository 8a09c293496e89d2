"""The device of a measurement: chosen, named and recorded."""

from __future__ import annotations

import functools
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import ksopt
from ksopt.errors import InvalidInputError
from ksopt.measure.device_types import DEVICE_TYPES, DeviceFacts
from ksopt.system.commands import first_line_of
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
    # Of a type, such as "cuda", the first device.
    full_name = next((one for one in here if one.partition(":")[0] == name), name)
    if full_name not in here:
        raise InvalidInputError(
            f"device {name!r} is not available: this machine has {', '.join(here)} "
            f"(torch {torch.__version__}); 'auto' takes the first GPU, else the CPU"
        )
    return torch.device(full_name)


def available() -> list[str]:
    """torch's names of the devices that ksopt can measure on."""
    return [device for kind in DEVICE_TYPES.values() for device in kind.available()]


def record(device: torch.device | str) -> DeviceRecord:
    """Describe a device and the software on it. Unknown fields are None; nothing is raised."""
    device = torch.device(device)
    kind = DEVICE_TYPES.get(device.type)
    facts = DeviceFacts() if kind is None else kind.facts(device)
    processor = cpu_name() or "unknown CPU"
    return DeviceRecord(
        device=str(device),
        type=device.type,
        name=facts.name or processor,
        capability=facts.capability,
        multiprocessors=facts.multiprocessors,
        memory_gib=facts.memory_gib,
        sm_clock_mhz=facts.sm_clock_mhz,
        memory_clock_mhz=facts.memory_clock_mhz,
        driver=facts.driver,
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


@functools.cache
def _commit() -> str | None:
    """Commit of the checkout that ksopt was imported from; None from an installed package."""
    folder = Path(ksopt.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    commit = first_line_of("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = first_line_of("git", "-C", str(folder), "status", "--porcelain", "-uno")
    return f"{commit}+changes" if changed else commit
