"""The resources of a compiled kernel on a multiprocessor, by the compiler's own report."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from ksopt.errors import CompilationError
from ksopt.jit import nvrtc

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel, as ptxas reports them.

    Attributes:
        kernel: its name.
        registers: of a thread.
        spilled_bytes: of a thread's values that do not fit into registers and go to local memory.
        shared_bytes: static shared memory of a block, without the dynamic memory of a launch.
    """

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def of_source(source: str, arch: str) -> tuple[Resources, ...]:
    """The resources of the kernels of a generated file, which is compiled unless cached.

    Args:
        source, arch: as for `nvrtc.cubin`; no portable code, which the driver compiles.

    Raises:
        UnavailableError, CompilationError: as `nvrtc.cubin` does.
    """
    data = nvrtc.report(source, arch, parsed).data
    try:
        return tuple(Resources(**kernel) for kernel in json.loads(data))
    except (ValueError, TypeError) as error:
        raise CompilationError(f"the compiler's report cannot be read: {error}") from None


def parsed(log: str) -> bytes:
    """The report of ptxas, as JSON.

    Args:
        log: what ptxas prints with --verbose.

    Raises:
        CompilationError: it has no kernel, or lacks the resources of one.

    Example:
        >>> parsed(
        ...     "ptxas info : Compiling entry function 'k' for 'sm_80'\\n"
        ...     "0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\\n"
        ...     "ptxas info : Used 12 registers, used 1 barriers, 256 bytes smem"
        ... )
        b'[{"kernel": "k", "registers": 12, "spilled_bytes": 8, "shared_bytes": 256}]'
    """
    names = list(_ENTRY.finditer(log))
    ends = [*(name.start() for name in names[1:]), len(log)]
    kernels = []
    for name, end in zip(names, ends, strict=True):
        part = log[name.start() : end]
        spills, used, shared = (one.search(part) for one in (_SPILLS, _USED, _SHARED))
        if spills is None or used is None:
            raise CompilationError(f"the compiler does not say what kernel {name[1]} takes")
        size = 0 if shared is None else int(shared[1])
        kernels.append(Resources(name[1], int(used[1]), int(spills[1]), size))
    if not kernels:
        raise CompilationError("the compiler reports no kernel")
    return json.dumps([asdict(one) for one in kernels]).encode()
