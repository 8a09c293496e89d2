"""Sizes that the fast kernels support, which ``--aligned`` requires of every factor."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

# Values of d, besides the multiples of a vector of 16 bytes, for which vectors hold whole runs of
# j.
_SMALL_D = {2: (1, 2, 3, 4, 6, 12), 4: (1, 2, 3, 6)}


@dataclass(frozen=True)
class Alignment:
    """Requirements of the tiles on a pattern, by element size and layout.

    In batch_first b is a multiple of 8 (the outputs of a tensor-core instruction, so that no
    padding is computed), c*d one of 16 bytes (so the rows of x, and of each group in them, begin at
    such addresses), and d one of 16 bytes too, or one of 1, 2, 3, 4, 6 and 12 (float32: 1, 2, 3 and
    6). Patterns with another d or c*d go to `families.gather_mma`, which gathers its operands
    element by element, or to PyTorch's implementations. In batch_last every pattern has tiles,
    which compute in steps of 16 outputs and of 32 bytes along c: b and c are multiples of these, so
    that no padding is computed.

    The rules but that of b are those of ``unsupported_shape`` of `families.mma16` and
    `families.mma_tf32x3` of ksopt.kernels; a test compares them.

    Args:
        element_bytes: 2 or 4.
        batch_last: Whether the layout is batch_last.
        train: Whether the transposed pattern, whose product is the input's gradient, must conform,
        too.
    """

    element_bytes: int
    batch_last: bool = False
    train: bool = False

    def allows_d(self, d: int) -> bool:
        """Whether a factor may have this d."""
        vector = 16 // self.element_bytes
        return self.batch_last or d % vector == 0 or d in _SMALL_D[self.element_bytes]

    def row_step(self, d: int) -> int:
        """The number of which b is a multiple, in a factor with this d.

        Example:
            >>> Alignment(element_bytes=2).row_step(3), Alignment(4, batch_last=True).row_step(3)
            (8, 16)
        """
        outputs, inputs = self._steps(d)
        return lcm(outputs, inputs) if self.train else outputs

    def column_step(self, d: int) -> int:
        """The number of which c is a multiple, in a factor with this d.

        Example:
            >>> [Alignment(element_bytes=2).column_step(d) for d in (1, 2, 12, 16)]
            [8, 4, 2, 1]
        """
        outputs, inputs = self._steps(d)
        return lcm(outputs, inputs) if self.train else inputs

    def _steps(self, d: int) -> tuple[int, int]:
        """The steps of b and of c, for the product alone."""
        if self.batch_last:
            return 16, 32 // self.element_bytes
        vector = 16 // self.element_bytes
        return 8, vector // gcd(vector, d)

    @property
    def words(self) -> str:
        """The requirements as a clause."""
        outputs, inputs = self._steps(1)
        if self.batch_last:
            text = f"b is a multiple of {outputs} and c of {inputs}"
        else:
            small = ", ".join(map(str, _SMALL_D[self.element_bytes]))
            text = (
                f"b is a multiple of {outputs}, c*d of {inputs}, and d of {inputs} or one of "
                f"{small}"
            )
        return text + (", of their transposes too" if self.train else "")
