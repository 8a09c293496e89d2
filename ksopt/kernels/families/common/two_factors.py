"""Properties that kernels of chains of two factors share: supported chains, and registers."""

from __future__ import annotations

from ksopt.kernels.families.base import HALF
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern

_LOADER_REGISTERS = 40


def unsupported_form(left: Pattern, right: Pattern, dtype: str, device: DeviceSpec) -> str | None:
    """Why no kernel of (1,b,c,d)*(a,b,c,1) takes these factors, or None if one may."""
    if device.capability != (9, 0):
        return "it needs compute capability 9.0"
    if dtype not in HALF:
        return f"{dtype} is not one of {', '.join(HALF)}"
    if left.a != 1 or right.d != 1:
        return f"{left}*{right} is not of the form (1,b,c,d)*(a,b,c,1)"
    if left.in_features != right.out_features:
        return f"{left} takes {left.in_features} features and {right} gives {right.out_features}"
    return None


def multiplier_registers(groups: int, blocks: int) -> int:
    """Registers of a thread that multiplies, beside one warpgroup that loads.

    Args:
        groups: warpgroups of a block that multiply.
        blocks: blocks of a multiprocessor.

    Example:
        >>> multiplier_registers(groups=2, blocks=1)
        232
    """
    at_start = 65536 // (128 * (groups + 1) * blocks) // 8 * 8
    taken = (at_start * (groups + 1) - _LOADER_REGISTERS) // groups // 8 * 8
    return min(taken, 240)
