"""The size of a linear layer, and the budget of weights of a chain that replaces it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ksopt.errors import InvalidInputError
from ksopt.patterns.validate import checked_int
from ksopt.system.plurals import counted

_DIMS = re.compile(r"\s*([0-9]+)\s*[xX×]\s*([0-9]+)\s*")
_MOST_DIGITS = 9
_NUMBER = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([%kKmMgG]?)\s*")
_LARGEST = 1e300  # a number with more digits is too large anyway, and overflows a float
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True)
class Dims:
    """The size of a layer, named as in ``torch.nn.Linear(in_features, out_features)``."""

    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features"):
            checked_int(getattr(self, name), name, f"Dims({self.in_features!r}, ...)")

    @classmethod
    def parse(cls, text: str) -> Dims:
        """The dims of a text ``INxOUT``.

        Raises:
            InvalidInputError: The text has another form, or a size is 0.

        Example:
            >>> Dims.parse("768x3072")
            Dims(in_features=768, out_features=3072)
            >>> Dims.parse("768")
            Traceback (most recent call last):
            ksopt.errors.InvalidInputError: dims '768': write INxOUT, as in nn.Linear(in, out), \
such as 768x3072
        """
        match = _DIMS.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidInputError(
                f"dims {text!r}: write INxOUT, as in nn.Linear(in, out), such as 768x3072"
            )
        if any(len(size.lstrip("0")) > _MOST_DIGITS for size in match.groups()):
            raise InvalidInputError(f"dims {text!r}: a size must be below {10**_MOST_DIGITS:,}")
        in_features, out_features = int(match[1]), int(match[2])
        if in_features < 1 or out_features < 1:
            raise InvalidInputError(f"dims {text!r}: both sizes must be at least 1")
        return cls(in_features, out_features)

    @property
    def dense_parameters(self) -> int:
        """The weights of the dense layer, bias not counted."""
        return self.in_features * self.out_features

    def __str__(self) -> str:
        return f"{self.in_features}x{self.out_features}"


@dataclass(frozen=True)
class Budget:
    """The most weights that a chain may have, and the budget's text. Bias is not counted."""

    text: str
    parameters: int

    @classmethod
    def parse(cls, text: str, dims: Dims) -> Budget:
        """The budget of a text: ``25%`` or ``0.25`` (a share), or ``600k``, ``2.4M`` (a count).

        A number without a unit is a share up to 1 if it has a decimal point, and a count otherwise.

        Raises:
            InvalidInputError: The text has another form, or the budget is below one weight or above
                the dense layer's.

        Example:
            >>> dims = Dims(768, 3072)
            >>> [Budget.parse(text, dims).parameters for text in ("25%", "0.25", "600k", "1.2M")]
            [589824, 589824, 600000, 1200000]
            >>> Budget.parse("300%", dims)
            Traceback (most recent call last):
            ksopt.errors.InvalidInputError: budget '300%' is more than the dense layer's 2,359,296 \
weights: give at most 100%
        """
        match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidInputError(
                f"budget {text!r}: write a share of the dense weights (25% or 0.25) "
                "or a count (600k, 2.4M)"
            )
        number, unit = min(float(match[1]), _LARGEST), match[2].lower()
        dense = dims.dense_parameters
        if unit == "%" or (not unit and "." in match[1]):
            share = number / 100 if unit else number
            if not unit and number > 1:
                raise InvalidInputError(
                    f"budget {text!r}: a number with a decimal point is a share of the dense "
                    f"weights, at most 1.0; for a percentage write {match[1]}%, for a count 600k"
                )
            # Rounded, so that 0.29 % of a million is 2,900 despite binary fractions.
            count = math.floor(round(share * dense, 6))
        else:
            count = math.floor(round(number * _UNITS.get(unit, 1), 6))
        if number == 0:
            raise InvalidInputError(f"budget {text!r} allows no weights: give more than 0")
        if count > dense:
            raise InvalidInputError(
                f"budget {text!r} is more than the dense layer's {counted(dense, 'weight')}: "
                "give at most 100%"
            )
        if count < 1:
            raise InvalidInputError(
                f"budget {text!r} of the dense layer's {counted(dense, 'weight')} is less "
                "than one weight"
            )
        return cls(text.strip(), count)
