"""The pattern of one Kronecker-sparse factor and its cost, without torch.

`ksopt.patterns.chain` builds on this module and exports it.

Source: Gonon, Zheng, Carrivain, Le, "Fast inference with Kronecker-sparse matrices", 2024 (the
paper).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ksopt.errors import InvalidInputError
from ksopt.patterns.validate import checked_int

_BYTES_PER_ELEMENT = {
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "bfloat16": 2,
    "bf16": 2,
    "float32": 4,
    "fp32": 4,
    "float": 4,
    "tf32": 4,  # stored as float32
    "float64": 8,
    "fp64": 8,
    "double": 8,
}
# 18 digits: more than any size, less than the limit of int().
_PATTERN_TEXT = re.compile(r"\(" + ",".join([r"\s*([+-]?[0-9]{1,18})\s*"] * 4) + r"\)")


@dataclass(frozen=True, order=True)
class Pattern:
    """The support of a Kronecker-sparse matrix K: I_a (x) 1_{b x c} (x) I_d.

    K has M = a*b*d rows (output features) and N = a*c*d columns (input features): a diagonal
    blocks, each of b x c diagonal matrices of size d x d. Its weights are a tensor of shape
    (a, b, c, d) with K[i*b*d + k*d + j, i*c*d + l*d + j] = weight[i, k, l, j].

    Args:
        a: Number of diagonal blocks.
        b: Outputs of each of the a*d dense b x c sub-matrices.
        c: Inputs of each dense sub-matrix.
        d: Stride between the rows, and between the columns, of such a sub-matrix.

    Raises:
        InvalidInputError: A size is not an integer of at least 1.

    Source: paper, Definition 2.1.

    Example:
        >>> pattern = Pattern(2, 3, 4, 5)
        >>> pattern.shape, pattern.nnz
        ((30, 40), 120)
        >>> Pattern(1, 0, 4, 2)
        Traceback (most recent call last):
        ksopt.errors.InvalidInputError: Pattern(1, 0, 4, 2): b must be at least 1, got 0
    """

    a: int
    b: int
    c: int
    d: int

    def __post_init__(self) -> None:
        sizes = (self.a, self.b, self.c, self.d)
        # Fast path: a search creates a million patterns of plain, valid integers.
        a, b, c, d = sizes
        if type(a) is type(b) is type(c) is type(d) is int and min(sizes) >= 1:
            return
        call = f"Pattern({', '.join(map(repr, sizes))})"
        for name, value in zip("abcd", sizes, strict=True):
            object.__setattr__(self, name, checked_int(value, name, call))

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern of a text; the inverse of ``str(pattern)``.

        Args:
            text: ``(a,b,c,d)``; spaces are allowed around the numbers and the parentheses.

        Raises:
            InvalidInputError: The text is not of that form, or a size is less than 1.

        Example:
            >>> Pattern.parse(" (1, 768, 192, 2)")
            Pattern(a=1, b=768, c=192, d=2)
            >>> Pattern.parse("(1,0,4,2)")
            Traceback (most recent call last):
            ksopt.errors.InvalidInputError: '(1,0,4,2)' is not a pattern: b must be at least 1, \
got 0
        """
        match = _PATTERN_TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise InvalidInputError(
                f"{text!r} is not a pattern: write (a,b,c,d) with four integers, "
                "such as (1,768,192,2)"
            )
        what = f"{text.strip()!r} is not a pattern"
        sizes = zip("abcd", map(int, match.groups()), strict=True)
        return cls(*(checked_int(size, name, what) for name, size in sizes))

    def __str__(self) -> str:
        return f"({self.a},{self.b},{self.c},{self.d})"

    @property
    def out_features(self) -> int:
        """Number of rows M = a*b*d."""
        return self.a * self.b * self.d

    @property
    def in_features(self) -> int:
        """Number of columns N = a*c*d."""
        return self.a * self.c * self.d

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N), as ``K.shape``."""
        return (self.out_features, self.in_features)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """(a, b, c, d), the shape of the canonical weight tensor."""
        return (self.a, self.b, self.c, self.d)

    @property
    def nnz(self) -> int:
        """Number of weights a*b*c*d."""
        return self.a * self.b * self.c * self.d

    @property
    def sparsity(self) -> float:
        """Share of the M x N entries that are always zero, 1 - 1/(a*d)."""
        return (self.a * self.d - 1) / (self.a * self.d)

    @property
    def rho(self) -> float:
        """The ratio (b + c)/(b*c): the larger, the larger the share of time that moves data.

        Source: paper, eq. (2).
        """
        return (self.b + self.c) / (self.b * self.c)

    @property
    def d_rho(self) -> float:
        """The paper's proxy for the energy spent on moving data: d*(b + c)/(b*c).

        Source: paper, section 5 and Figure 7.
        """
        return self.d * (self.b + self.c) / (self.b * self.c)

    def transpose(self) -> Pattern:
        """The pattern (a, c, b, d) of the transposed matrix.

        Example:
            >>> print(Pattern(1, 768, 192, 2).transpose())
            (1,192,768,2)
        """
        return Pattern(self.a, self.c, self.b, self.d)

    @property
    def T(self) -> Pattern:
        """Short for `transpose`."""
        return self.transpose()

    def flops(self, batch: int) -> int:
        """Floating-point operations of y = x K^T: a multiplication and an addition per weight.

        Args:
            batch: Number of rows of x, 0 or more.

        Example:
            >>> Pattern(1, 768, 192, 2).flops(batch=10)
            5898240
        """
        return 2 * checked_int(batch, "batch", f"flops({batch!r})", minimum=0) * self.nnz

    def bytes(self, batch: int, dtype: object) -> int:
        """The minimum of bytes that y = x K^T moves: x, y and the weights, once each.

        Args:
            batch: Number of rows of x, 0 or more.
            dtype: Type of all three: a name (``"float16"``, ``"bf16"``, ...) or a torch or NumPy
                dtype.

        Raises:
            InvalidInputError: The batch is negative or the dtype unknown.

        Example:
            >>> Pattern(1, 768, 192, 2).bytes(batch=10, dtype="fp16")
            628224
        """
        rows = checked_int(batch, "batch", f"bytes({batch!r}, {dtype!r})", minimum=0)
        elements = rows * (self.out_features + self.in_features) + self.nnz
        return elements * bytes_per_element(dtype)

    def is_chainable(self, right: Pattern) -> bool:
        """Whether a chain of this factor and ``right`` is chainable: see `Chain.is_chainable`."""
        return (
            self.in_features == right.out_features
            and right.a % self.a == 0
            and self.d % right.d == 0
            and (self.a * self.c) % right.a == 0
        )


def bytes_per_element(dtype: object) -> int:
    """The bytes of an element of a dtype: a name (``"float16"``, ``"bf16"``), torch's or NumPy's.

    Raises:
        InvalidInputError: The dtype is not known.
    """
    name = str(dtype).removeprefix("torch.").lower()
    if name not in _BYTES_PER_ELEMENT:
        raise InvalidInputError(
            f"dtype {dtype!r} is not known: use one of {', '.join(_BYTES_PER_ELEMENT)}"
        )
    return _BYTES_PER_ELEMENT[name]
