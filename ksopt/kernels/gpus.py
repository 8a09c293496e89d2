"""Specs of GPUs by name, also of GPUs that this machine does not have.

Multiprocessors are those of NVIDIA's data sheets; shared memory of a multiprocessor is that of the
CUDA C++ Programming Guide's table of compute capabilities (164 KB at 8.0, 100 at 8.6, 8.9 and 12.0,
228 at 9.0 and 10.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ksopt.errors import InvalidInputError
from ksopt.kernels.problem import DeviceSpec
from ksopt.system.suggest import nearest

_KIB = 1024

GPUS: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        "A100": DeviceSpec((8, 0), 108, 164 * _KIB),
        "A10": DeviceSpec((8, 6), 72, 100 * _KIB),
        "RTX3090": DeviceSpec((8, 6), 82, 100 * _KIB),
        "L4": DeviceSpec((8, 9), 58, 100 * _KIB),
        "L40S": DeviceSpec((8, 9), 142, 100 * _KIB),
        "RTX4090": DeviceSpec((8, 9), 128, 100 * _KIB),
        "H100": DeviceSpec((9, 0), 132, 228 * _KIB),
        "H200": DeviceSpec((9, 0), 132, 228 * _KIB),
        "B200": DeviceSpec((10, 0), 148, 228 * _KIB),
        "RTX5090": DeviceSpec((12, 0), 170, 100 * _KIB),
    }
)
"""The spec of each GPU that has a name here."""

_NUMBERS = re.compile(r"([0-9]{1,2})\.([0-9]),([0-9]{1,4}),([0-9]{1,4})")


def spec_of(text: str) -> DeviceSpec:
    """The spec of a GPU, by its name or by numbers.

    Args:
        text: a name of `GPUS`, in any case, or compute capability, multiprocessors and KiB of
            shared memory of a multiprocessor: ``9.0,132,228``.

    Raises:
        InvalidInputError: it is neither.

    Example:
        >>> spec_of("h200") == spec_of("9.0,132,228")
        True
    """
    by_name = {name.lower(): spec for name, spec in GPUS.items()}
    spec = by_name.get(text.lower())
    if spec is not None:
        return spec
    numbers = _NUMBERS.fullmatch(text)
    if numbers is None:
        raise InvalidInputError(
            f"{text!r} is no GPU that is known by name ({', '.join(GPUS)}), nor compute "
            f"capability, multiprocessors and KiB of shared memory, such as 9.0,132,228"
            f"{nearest(text, GPUS)}"
        )
    major, minor, multiprocessors, kib = map(int, numbers.groups())
    if multiprocessors == 0:
        raise InvalidInputError(f"{text!r}: a GPU has at least 1 multiprocessor")
    return DeviceSpec((major, minor), multiprocessors, kib * _KIB)
