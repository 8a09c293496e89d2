"""Checks of memory and processes before any work begins.

The estimates are lower bounds of the memory needed at once, so that no work that could run is
refused. Memory beyond them may still run out later.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch

from ksopt.errors import InvalidInputError

_GIB = 2**30
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# More processes than cores wait for each other: 64 on two took six minutes for a task that takes
# one process ten seconds. A few more are allowed: they work while others wait to measure.
_FEWEST_ALLOWED, _ALLOWED_PER_CPU = 8, 4
_WORKER_BYTES = 170_000_000
"""The private memory of a worker on the host, measured after its imports on Linux."""


def available_bytes(device: torch.device | str) -> int | None:
    """The memory of a device that this process can use now; None if unknown.

    On a CPU: the memory available without killing a process, swap included, within the limits of
    the process (``ulimit -v``) and of its control group. On a GPU: the free memory, and the memory
    that torch has reserved and does not use.
    """
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        free = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    limits = [_system_bytes(), _group_bytes(Path("/sys/fs/cgroup")), _process_bytes()]
    return min((limit for limit in limits if limit is not None), default=None)


def _system_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {
            name: int(rest.split()[0]) for name, _, rest in (s.partition(":") for s in lines)
        }
        return 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    except (OSError, ValueError, KeyError, IndexError):
        pass  # not Linux, or an old one
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _group_bytes(root: Path) -> int | None:
    """The remaining memory of the control group's limit (version 2), as a container sees it."""
    try:
        most = (root / "memory.max").read_text(encoding="ascii").strip()
        if most == "max":
            return None
        used = int((root / "memory.current").read_text(encoding="ascii"))
        pairs = (line.split() for line in (root / "memory.stat").read_text("ascii").splitlines())
        counts = {pair[0]: int(pair[1]) for pair in pairs}
        # The file cache counts as used, but is freed on demand.
        return int(most) - used + counts.get("inactive_file", 0) + counts.get("active_file", 0)
    except (OSError, ValueError, IndexError):
        return None


def _process_bytes() -> int | None:
    """The remaining bytes of the limit of this process's address space."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return most
    return most - pages * os.sysconf("SC_PAGE_SIZE")


def check_bytes(needed: int, device: torch.device | str, what: str, remedy: str) -> None:
    """Raise if a device has too little memory.

    Args:
        needed: The least bytes needed at once.
        device: That needs them.
        what: The work that needs them, for the message.
        remedy: The action to take, for the message.

    Raises:
        InvalidInputError: The device has less memory.
    """
    available = available_bytes(device)
    if available is not None and needed > available:
        raise InvalidInputError(
            f"{what} takes {_amount(needed)} of memory, and {device} has {_amount(available)} "
            f"available: {remedy}"
        )


def check_batch(
    batch: int, needed: Callable[[int], int], device: torch.device | str, what: str
) -> None:
    """Raise for a batch that does not fit, and name the largest batch that does.

    Args:
        batch: Rows of the input.
        needed: (rows) -> the least bytes needed at once; more rows never need less.
        device: Of the product.
        what: The matrix of the product, for the message.

    Raises:
        InvalidInputError: The device has less memory.
    """
    available = available_bytes(device)
    if available is None or needed(batch) <= available:
        return
    low, high = 0, batch  # `high` rows do not fit; `low` rows do, unless it is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= available else (low, middle)
    remedy = f"a batch of at most {low:,} fits"
    if low == 0:
        remedy = "not even a batch of 1 fits, so give a smaller layer, or a device with more memory"
    raise InvalidInputError(
        f"batch {batch:,} of {what}: input, weights and result take {_amount(needed(batch))} of "
        f"memory, and {device} has {_amount(available)} available: {remedy}"
    )


def check_product(
    features: tuple[int, int],
    weights: int,
    batch: int,
    dtype: str,
    device: torch.device | str,
    what: str,
) -> None:
    """Raise for a product whose input, weights and result do not fit at once.

    Args:
        features: In and out.
        weights: Number of weights.
        batch: Rows of the input.
        dtype: Of all three.
        device: Of the product.
        what: The matrix of the product, for the message.

    Raises:
        InvalidInputError: The device has less memory.
    """
    size = ELEMENT_BYTES[dtype]
    check_batch(batch, lambda rows: size * (rows * sum(features) + weights), device, what)


def check_workers(workers: int) -> None:
    """Raise for more processes than this machine's CPUs or memory can serve.

    Raises:
        InvalidInputError: There are too many.
    """
    cpus = os.cpu_count() or 1
    most = max(_FEWEST_ALLOWED, _ALLOWED_PER_CPU * cpus)
    if workers > most:
        raise InvalidInputError(
            f"workers {workers:,}: give at most {most:,} on this machine with {cpus:,} "
            f"CPU{'s' if cpus > 1 else ''} (there is one process for each, and those on one device "
            "measure one after the other)"
        )
    available = available_bytes("cpu")
    if workers > 1 and available is not None and workers * _WORKER_BYTES > available:
        fit = max(1, available // _WORKER_BYTES)
        raise InvalidInputError(
            f"workers {workers:,}: each is a process of about {_amount(_WORKER_BYTES)}, and "
            f"{_amount(available)} of memory are available: give at most {fit:,}"
        )


def _amount(count: int) -> str:
    """A number of bytes in readable units.

    Example:
        >>> _amount(1_500), _amount(3 * 2**29), _amount(2**70)
        ('1,500 bytes', '1.5 GiB', '1,099,511,627,776 GiB')
    """
    if count < 2**20:
        return f"{max(count, 0):,} bytes"
    if count < _GIB:
        return f"{count / 2**20:,.0f} MiB"
    return f"{count / _GIB:,.1f} GiB" if count < 100 * _GIB else f"{count // _GIB:,} GiB"
