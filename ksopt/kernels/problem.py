"""Problems, the devices that compute them, and the keys that choices are cached under."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from ksopt import precision
from ksopt.epilogue import GATES, Activation, Gate, check_activation, parts_of_result
from ksopt.errors import InvalidInputError
from ksopt.jit import driver
from ksopt.patterns.chain import Chain, Pattern

SHARED_LIMIT = 227 * 1024
"""The most dynamic shared memory of a block on sm_90, in bytes."""

RESERVED_SHARED = 1024
"""Bytes of shared memory that the system takes for each block."""

SIXTEEN_BIT = ("float16", "bfloat16")
"""Types whose products are summed in fp32 and rounded once."""

FEW_ROWS = 128
"""Products of at most this many rows are timed in series: see measure/interleaved.py."""

_LONGEST_CHAIN = 120  # letters of a file's name, of all layers; most systems allow 255 for it

Rows = Literal["aligned", "unaligned", "scattered"]
"""The layout of the rows of x and y (batch_last: of features). "aligned": all rows begin at
multiples of 16 bytes, as the fast kernels require. "unaligned": some do not. "scattered": the
elements of a row are not contiguous."""


IN_FLOAT32 = "to_float32"
"""The name of a cast of the result."""


@dataclass(frozen=True)
class Epilogue:
    """The operations on a chain's product before it is written: act(x W^T + bias) + residual.

    The result may be cast: written in float32 where all operands are of a 16-bit type.

    Attributes:
        bias: whether a bias, one value for each feature of the product, is added.
        activation: what is applied then; a gate multiplies the products of two siblings.
        residual: whether a tensor of y's shape is added at the end.
        in_float32: whether y is of float32 instead of the operands' 16-bit type.
    """

    bias: bool = False
    activation: Activation | Gate = "none"
    residual: bool = False
    in_float32: bool = False

    def __post_init__(self) -> None:
        check_activation(self.activation, siblings=2)  # the problem knows how many there are

    @classmethod
    def of_names(cls, names: Sequence[str]) -> Epilogue:
        """The epilogue of such ``names``.

        Example:
            >>> Epilogue.of_names(("bias", "gelu")).activation
            'gelu'
        """
        steps = [name for name in names if name not in ("bias", "residual", IN_FLOAT32)]
        activation = cast(Activation | Gate, steps[0] if steps else "none")
        return cls("bias" in names, activation, "residual" in names, IN_FLOAT32 in names)

    @property
    def is_gated(self) -> bool:
        """Whether two siblings' products are multiplied."""
        return self.activation in GATES

    @property
    def is_empty(self) -> bool:
        """Whether y is the product itself."""
        return not self.names

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operations, in order.

        Example:
            >>> Epilogue(bias=True, activation="gelu").names
            ('bias', 'gelu')
        """
        bias = ("bias",) if self.bias else ()
        activation = () if self.activation == "none" else (self.activation,)
        residual = ("residual",) if self.residual else ()
        return (*bias, *activation, *residual, *((IN_FLOAT32,) if self.in_float32 else ()))

    def to_json(self) -> dict[str, Any]:
        """The epilogue as plain values: the arguments that create it."""
        values = asdict(self)
        if not self.in_float32:  # as in records from before there was one
            del values["in_float32"]
        return values


EMPTY = Epilogue()
"""The epilogue of a product alone."""


@dataclass(frozen=True)
class SecondLayer:
    """The second layer of an MLP: the only reader of the first layer's result.

    Attributes:
        chain: its factors, left to right.
        epilogue: the operations on its product.
    """

    chain: Chain
    epilogue: Epilogue = EMPTY


@dataclass(frozen=True)
class Problem:
    """A computation for any batch size: y = act(x (K_1 ... K_L)^T + bias) + residual.

    That is a layer. A second one may follow, as in an MLP: then x meets both, one after the other.
    Kernels are built for a problem, and run on every batch. The key of a choice has a range
    of batches beside it: `ProblemKey`.

    Attributes:
        chain: the supports of K_1, ..., K_L, left to right: K_L meets x first.
        dtype: torch's name of the element type of x, weights and y, such as ``float16``.
        batch_last: whether x is (N, batch) and y is (M, batch) instead of batch first.
        exact: for float32, whether to FP32 accuracy, not TF32's; True for all other types.
        epilogue: the operations on the product.
        siblings: chains of these patterns, each with weights of its own, that read one x; their
            results stand side by side in y, which has ``siblings`` times as many features. Two with
            a gate have one result, of as many features as one of them: act(a) * b.
        second: a layer that reads that y and computes the result; None for one layer.
    """

    chain: Chain
    dtype: str
    batch_last: bool
    exact: bool = True
    epilogue: Epilogue = EMPTY
    siblings: int = 1
    second: SecondLayer | None = None

    def __post_init__(self) -> None:
        if self.siblings < 1:
            raise InvalidInputError(f"siblings {self.siblings!r}: there must be at least 1")
        check_activation(self.epilogue.activation, self.siblings)
        for one in (self.epilogue, *(() if self.second is None else (self.second.epilogue,))):
            if one.in_float32 and (one.residual or self.dtype not in SIXTEEN_BIT):
                residual = ", with a residual" if one.residual else ""
                raise InvalidInputError(
                    "a result is cast to float32 where its operands are of 16 bit and it has no "
                    f"residual; this is of {self.dtype}{residual}"
                )
        if self.second is None:
            return
        first = self.epilogue
        if self.siblings > 1 or first.residual or first.in_float32:
            raise InvalidInputError(
                "the first of two layers has no siblings, no residual and no cast"
            )
        check_activation(self.second.epilogue.activation)
        reads, gives = self.second.chain.in_features, self.chain.out_features
        if reads != gives:
            raise InvalidInputError(
                f"the second of two layers reads {reads} features, but the first one gives {gives}"
            )

    @classmethod
    def of_factor(
        cls, pattern: Pattern, dtype: str, batch_last: bool, exact: bool = True
    ) -> Problem:
        """The problem of one factor's product: a chain of one factor, with an empty epilogue.

        Args:
            pattern: support of K.
            dtype, batch_last, exact: as for `Problem`.

        Example:
            >>> Problem.of_factor(Pattern(2, 3, 4, 1), "float16", False).pattern
            Pattern(a=2, b=3, c=4, d=1)
        """
        return cls(Chain((pattern,)), dtype, batch_last, exact)

    @property
    def is_factor(self) -> bool:
        """Whether it is one factor's product, without an epilogue."""
        is_one = len(self.chain) == 1 and self.epilogue.is_empty and self.siblings == 1
        return is_one and self.second is None

    @property
    def pattern(self) -> Pattern:
        """The pattern of the only factor.

        Raises:
            ValueError: there are several.
        """
        (pattern,) = self.chain.patterns
        return pattern

    @property
    def out_features(self) -> int:
        """Features of the result."""
        last = self.chain if self.second is None else self.second.chain
        return parts_of_result(self.epilogue.activation, self.siblings) * last.out_features

    @property
    def product_features(self) -> int:
        """Features of the products of all siblings, to which a bias is added."""
        return self.out_features * (self.siblings if self.epilogue.is_gated else 1)

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The chain of each layer, the first layer's first."""
        return (self.chain,) if self.second is None else (self.chain, self.second.chain)

    @property
    def has_unaligned_rows(self) -> bool:
        """Whether rows of a contiguous x cannot all begin at multiples of 16 bytes."""
        row = self.chain.in_features * getattr(torch, self.dtype).itemsize
        return not self.batch_last and row % 16 != 0

    @property
    def layout(self) -> Literal["batch_first", "batch_last"]:
        """The layout's public name."""
        return "batch_last" if self.batch_last else "batch_first"

    def ungated(self) -> Problem:
        """The problem before a gate: its products side by side."""
        return replace(self, epilogue=Epilogue(self.epilogue.bias))

    def one(self) -> Problem:
        """The problem of one of its siblings alone, before a gate."""
        return replace(self.ungated() if self.epilogue.is_gated else self, siblings=1)

    def layers(self) -> tuple[Problem, ...]:
        """The problem of each of two layers alone; of one layer, the problem itself."""
        if self.second is None:
            return (self,)
        second = replace(self, chain=self.second.chain, epilogue=self.second.epilogue, second=None)
        return replace(self, second=None), second

    def factors(self) -> tuple[Problem, ...]:
        """The problems of one layer's factors, one launch each, in the order of the chain."""
        return tuple(
            Problem.of_factor(pattern, self.dtype, self.batch_last, self.exact)
            for pattern in self.chain
        )

    def __str__(self) -> str:
        words = [str(self.chain), *self.epilogue.names]
        words += [f"{self.siblings} siblings"] if self.siblings > 1 else []
        if self.second is not None:
            words += ["then", str(self.second.chain), *self.second.epilogue.names]
        return " ".join([*words, self.dtype, self.layout, *([] if self.exact else ["tf32"])])


@dataclass(frozen=True)
class DeviceSpec:
    """The limits of a device that a kernel must fit.

    Attributes:
        capability: compute capability, such as (9, 0).
        multiprocessors: of the device.
        shared_bytes: shared memory of a multiprocessor; a block takes 1 KiB beside its own.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @classmethod
    def of_device(cls, index: int) -> DeviceSpec:
        """The spec of CUDA device ``index``.

        Raises:
            UnavailableError: the CUDA driver's bindings are missing.
        """
        properties = torch.cuda.get_device_properties(index)
        return cls(
            (properties.major, properties.minor),
            properties.multi_processor_count,
            driver.shared_bytes(index),
        )


@dataclass(frozen=True)
class Geometry:
    """The launch geometry of a kernel, for any batch.

    Attributes:
        threads: threads a block.
        shared_bytes: dynamic shared memory a block, in bytes.
        rows_per_tile: batch rows that one tile covers.
        tiles_per_row_tile: tiles that together cover all output features of those rows.
        max_blocks: blocks of the largest launch; blocks loop over the tiles beyond.
        early: whether it may be launched before the kernel ahead of it ends (programmatic dependent
            launch, sm_90 and up): then it waits by itself before it reads or writes anything. The
            Python launcher, which is slower than such a launch saves, takes no notice.
    """

    threads: int
    shared_bytes: int
    rows_per_tile: int
    tiles_per_row_tile: int
    max_blocks: int
    early: bool = False


@dataclass(frozen=True)
class ProblemKey:
    """The key of a cached choice: a problem, the layout of its rows in memory, and their number.

    Attributes:
        problem: what is computed.
        rows: how x lies in memory.
        bits: batches of more than 2 ** (bits - 1) and at most 2 ** bits rows have one key.
    """

    problem: Problem
    rows: Rows
    bits: int

    @classmethod
    def of(
        cls, pattern: Pattern, dtype: str, batch: int, batch_last: bool, exact: bool | None = None
    ) -> ProblemKey:
        """The key of one factor's product of a contiguous x which a GPU's allocator has placed.

        Args:
            pattern: support of K.
            dtype: such as "float16".
            batch: rows of x.
            batch_last: the layout.
            exact: for float32, whether to FP32 accuracy; None takes torch's setting at this moment.
        """
        problem = Problem.of_factor(pattern, dtype, batch_last, is_exact(dtype, exact))
        return cls.of_problem(problem, batch)

    @classmethod
    def of_problem(cls, problem: Problem, batch: int) -> ProblemKey:
        """The key of a problem for a contiguous x of ``batch`` rows, placed by an allocator.

        Example:
            >>> chain = Chain.parse("(1,8,4,2)*(2,4,8,1)")
            >>> print(ProblemKey.of_problem(Problem(chain, "float16", False), 100))
            (1,8,4,2)*(2,4,8,1) float16 batch_first batch<=128
        """
        size = getattr(torch, problem.dtype).itemsize
        row = batch if problem.batch_last else problem.chain.in_features
        rows: Rows = "aligned" if row * size % 16 == 0 else "unaligned"
        return cls(problem, rows, bits_of(batch))

    @property
    def largest_batch(self) -> int:
        """The most rows that have the same key."""
        return int(2**self.bits)

    @property
    def file_name(self) -> str:
        """The readable name of its file in the tuning cache, without its ending."""
        problem = self.problem
        siblings = (f"{problem.siblings}x",) if problem.siblings > 1 else ()
        kind = problem.dtype if problem.exact else "tf32"
        most = _LONGEST_CHAIN // len(problem.chains)
        layers = (_name_of(problem.chain, most), *siblings, *problem.epilogue.names)
        if problem.second is not None:
            second = problem.second
            layers += ("then", _name_of(second.chain, most), *second.epilogue.names)
        return "-".join((*layers, kind, problem.layout, self.rows, str(self.largest_batch)))

    def to_json(self) -> dict[str, Any]:
        """The key as plain values; ``pattern`` is the text of the chain, or of its only factor."""
        p = self.problem
        second = {}
        if p.second is not None:
            after = p.second.epilogue.to_json()
            second = {"second": {"pattern": str(p.second.chain), "epilogue": after}}
        return {
            "pattern": str(p.chain),
            "dtype": p.dtype,
            "layout": p.layout,
            "exact": p.exact,
            "epilogue": p.epilogue.to_json(),
            "siblings": p.siblings,
            **second,
            "rows": self.rows,
            "batch_up_to": self.largest_batch,
        }

    @classmethod
    def from_json(cls, values: Any) -> ProblemKey:
        """The key whose `to_json` gave ``values``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: they are not such values.
        """
        second = None
        if "second" in values:
            after = values["second"]
            second = SecondLayer(Chain.parse(after["pattern"]), Epilogue(**after["epilogue"]))
        problem = Problem(
            Chain.parse(values["pattern"]),
            values["dtype"],
            values["layout"] == "batch_last",
            values["exact"],
            Epilogue(**values["epilogue"]),
            values["siblings"],
            second,
        )
        key = cls(problem, values["rows"], bits_of(values["batch_up_to"]))
        if key.rows not in get_args(Rows) or key.to_json() != values:
            raise ValueError(f"not a problem's key: {values!r}")
        return key

    def __str__(self) -> str:
        words = [str(self.problem), *([] if self.rows == "aligned" else [self.rows])]
        return f"{' '.join(words)} batch<={self.largest_batch}"


def _name_of(chain: Chain, longest: int) -> str:
    name = ".".join(str(pattern).strip("()").replace(",", "_") for pattern in chain)
    if len(name) > longest:
        name = hashlib.sha256(name.encode()).hexdigest()[:32]
    return name


def is_exact(dtype: str, exact: bool | None = None) -> bool:
    """Whether a problem is computed to its type's full accuracy.

    Args:
        dtype: such as "float16".
        exact: for float32, the caller's wish; None takes torch's setting at this moment.
    """
    if dtype != "float32":
        return True
    return precision.is_exact() if exact is None else exact


def bits_of(batch: int) -> int:
    """The key's ``bits`` for this many rows.

    Example:
        >>> [bits_of(batch) for batch in (1, 2, 3, 64, 65, 25_088)]
        [0, 1, 2, 6, 7, 15]
    """
    return max(0, batch - 1).bit_length()


def rows_of(x: Tensor, batch_last: bool, batch: int) -> Rows:
    """The layout of x in memory, as the launcher will see it.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last.
        batch_last: the layout.
        batch: rows of x.
    """
    size = x.element_size()
    if x.data_ptr() % 16 != 0 or (batch_last and batch * size % 16 != 0):
        return "unaligned"  # batch last, y's rows are as long as the batch
    if x.is_contiguous():
        row = batch if batch_last else x.shape[-1]
    elif x.stride(-1) != 1:
        return "scattered"
    else:
        row = x.stride(0) if batch_last else x.stride(-2)
    return "aligned" if row * size % 16 == 0 else "unaligned"
