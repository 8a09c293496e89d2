"""Checks of integer arguments."""

from __future__ import annotations

import operator

from ksopt.errors import InvalidInputError


def checked_int(value: object, name: str, call: str, minimum: int = 1) -> int:
    """``value`` as a Python int, checked to be an integer of at least ``minimum``.

    Args:
        value: Any value with ``__index__`` (int, NumPy integers) except a bool: True as a size is
            a mistake, not a 1.
        name: The argument's name, for the message.
        call: The call as written, for the message: ``"Pattern(1, 0, 4, 2)"``.
        minimum: The smallest value allowed.

    Raises:
        InvalidInputError: The value is a bool, not an integer, or below ``minimum``.

    Example:
        >>> checked_int(0, "b", "Pattern(1, 0, 4, 2)")
        Traceback (most recent call last):
        ksopt.errors.InvalidInputError: Pattern(1, 0, 4, 2): b must be at least 1, got 0
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidInputError(
            f"{call}: {name} must be an integer, got {value!r} ({type(value).__name__})"
        ) from None
    if number < minimum:
        raise InvalidInputError(f"{call}: {name} must be at least {minimum}, got {number}")
    return number
