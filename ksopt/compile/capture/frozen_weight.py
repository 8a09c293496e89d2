"""Detection of frozen dense weights whose values are Kronecker-sparse, and of their changes.

A weight that no optimizer trains may be dense in shape only: a factor that was multiplied out, a
pruned or a padded matrix. Its nonzeros show the pattern. The product then reads the nonzeros alone,
as a strided view of the live weight, so changes inside the support need no care; `Watched` notices
at every call whether a weight has changed, and falls back to the graph as it was if something has
left the support. Writes through ``weight.data`` are undetectable: call ``ksopt.refresh()``.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from ksopt.kernels import weight_cache
from ksopt.patterns.chain import Pattern
from ksopt.patterns.divisors import divisors

log = logging.getLogger("ksopt.compile")

_SAMPLES = 256
_SMALL = 65_536
_MOST_DENSE = 0.7
"""A pattern with a*d > 1 has at most half of its entries nonzero: of 256 samples 70 % never are.
Matrices of at most so many entries are counted whole."""


def pattern_of(matrix: Tensor, tolerance: float = 0.0) -> Pattern | None:
    """The smallest pattern (a, b, c, d) with a*d > 1 that holds all nonzeros of a matrix [M, N].

    Args:
        matrix: of numbers, or true and false.
        tolerance: entries of at most that many times the largest count as zero.

    Example:
        >>> print(pattern_of(torch.block_diag(torch.ones(2, 3), torch.ones(2, 3))))
        (2,2,3,1)
        >>> pattern_of(torch.ones(4, 6)) is None
        True
    """
    rows, columns = matrix.shape
    if math.gcd(rows, columns) == 1 or _looks_dense(matrix, tolerance):
        return None
    nonzero = _nonzero(matrix, tolerance)
    places = nonzero.nonzero()
    if places.shape[0] == 0:
        return None
    # Nonzeros at (r, c) need r = c modulo d, and r and c in the same of a equal parts.
    step = math.gcd(*(places[:, 0] - places[:, 1]).unique().tolist())
    best: Pattern | None = None
    for a in divisors(math.gcd(rows, columns)):
        if not bool((places[:, 0] * a // rows == places[:, 1] * a // columns).all()):
            continue
        d = math.gcd(step, rows // a, columns // a)
        if a * d > 1 and (best is None or a * d > best.a * best.d):
            best = Pattern(a, rows // (a * d), columns // (a * d), d)
    return best


def fits(matrix: Tensor, pattern: Pattern, tolerance: float = 0.0) -> bool:
    """Whether all nonzeros of a matrix are in the support of a pattern."""
    a, b, c, d = pattern.weight_shape
    outside = _nonzero(matrix, tolerance).reshape(a, b, d, a, c, d)
    inside = outside.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3)
    return int(outside.sum()) == int(inside.sum())


class FrozenValues:
    """Patterns of the values of a graph's frozen weights.

    Args:
        inputs: the example inputs of the graph, with real parameters and buffers.
        tolerance: see `pattern_of`.

    Attributes:
        patterns: the pattern of each input that has one, of those queried so far.
    """

    def __init__(self, inputs: Sequence[Any], tolerance: float = 0.0) -> None:
        self.inputs = inputs
        self.tolerance = tolerance
        self.patterns: dict[int, Pattern] = {}
        self._seen: set[int] = set()

    def pattern(self, at: int) -> Pattern | None:
        """The pattern of the values of an input; None if there is none or it may be trained."""
        if at not in self._seen:
            self._seen.add(at)
            value = self.inputs[at] if at < len(self.inputs) else None
            if isinstance(value, Tensor) and _is_frozen(value):
                with _disable_current_modes():  # called while a graph runs on fake tensors
                    pattern = pattern_of(value.detach(), self.tolerance)
                if pattern is not None:
                    self.patterns[at] = pattern
        return self.patterns.get(at)

    def has_zeros(self, at: int) -> bool:
        """Whether an input that may not be trained has a zero: then it may be meant as a mask."""
        value = self.inputs[at] if at < len(self.inputs) else None
        if not isinstance(value, Tensor) or not _is_frozen(value):
            return False
        with _disable_current_modes():
            return not bool(_nonzero(value.detach(), self.tolerance).all())


class FrozenNodes:
    """Patterns of frozen weights by placeholder, see `ksopt.compile.capture.tracker.FrozenPattern`.

    Args:
        values: the patterns of the inputs.
        places: index of the input of each weight's placeholder.
    """

    def __init__(self, values: FrozenValues, places: Mapping[fx.Node, int]) -> None:
        self._values = values
        self._places = places

    def __call__(self, node: fx.Node) -> Pattern | None:
        """The pattern of a weight's values, if it has one."""
        return self._values.pattern(self._places[node]) if node in self._places else None

    def has_zeros(self, node: fx.Node) -> bool:
        """Whether a frozen weight has a zero."""
        return node in self._places and self._values.has_zeros(self._places[node])


class Watched:
    """A compiled graph that is valid only while some weights are untrained and keep their support.

    Dynamo of torch 2.11 does not notice when a parameter starts to require gradients.

    Args:
        compiled: the rewritten graph, compiled.
        original: the original graph.
        values: the weights and their patterns.
    """

    def __init__(
        self, compiled: Callable[..., Any], original: Callable[..., Any], values: FrozenValues
    ) -> None:
        self._compiled = compiled
        self._original = original
        self._tolerance = values.tolerance
        self._patterns = tuple(sorted(values.patterns.items()))
        self._stamps = tuple(_Stamp.of(values.inputs[at]) for at, _ in self._patterns)
        self._refreshes = weight_cache.refreshes
        self._is_valid = True

    def __call__(self, *args: Any) -> Any:
        """Run the compiled graph if it is valid for the current weights, else the original one."""
        weights = [args[at] for at, _ in self._patterns]
        unchanged = all(map(_Stamp.is_of, self._stamps, weights))
        if not unchanged or self._refreshes != weight_cache.refreshes:
            self._stamps, self._refreshes = tuple(map(_Stamp.of, weights)), weight_cache.refreshes
            self._validate(args)
        return self._compiled(*args) if self._is_valid else self._original(*args)

    def _validate(self, args: Sequence[Any]) -> None:
        was = self._is_valid
        is_trained = any(args[at].requires_grad for at, _ in self._patterns)
        self._is_valid = not is_trained and all(
            fits(args[at].detach(), pattern, self._tolerance) for at, pattern in self._patterns
        )
        if was and not self._is_valid:
            what = (
                "requires gradients now, and did not"
                if is_trained
                else "has left the pattern that its values had"
            )
            log.warning(
                "a frozen weight %s when the model was compiled: the graph runs uncompiled now. "
                "torch._dynamo.reset() compiles it anew.",
                what,
            )


@dataclass(frozen=True)
class _Stamp:
    """Identity of a weight, its version, and whether it is trained.

    Addresses are not enough: the allocator reuses the memory of a freed weight. The weak reference
    to the storage prevents the reuse of the storage's own address.
    """

    weight: weakref.ref[Tensor]
    storage: StorageWeakRef
    address: int
    version: int | None
    is_trained: bool

    @classmethod
    def of(cls, weight: Tensor) -> _Stamp:
        return cls(
            weakref.ref(weight),
            StorageWeakRef(weight.untyped_storage()),
            weight.data_ptr(),
            None if weight.is_inference() else weight._version,
            weight.requires_grad,
        )

    def is_of(self, weight: Tensor) -> bool:
        """Whether a weight is this one, unwritten. Writes to inference tensors are undetectable."""
        return (
            self.weight() is weight
            and not weight.is_inference()
            and self.version == weight._version
            and self.storage.cdata == weight.untyped_storage()._cdata
            and self.address == weight.data_ptr()
            and self.is_trained == weight.requires_grad
        )


def _is_frozen(value: Tensor) -> bool:
    return (
        not isinstance(value, FakeTensor)
        and value.dim() == 2
        and not value.is_complex()  # a mask may be of any other type
        and not value.requires_grad
        and not value.is_inference()  # its changes could not be noticed
        and value.layout is torch.strided
        and value.device.type != "meta"
    )


def _looks_dense(matrix: Tensor, tolerance: float) -> bool:
    samples = matrix
    if matrix.numel() > _SMALL:
        generator = torch.Generator().manual_seed(0)
        places = torch.randint(matrix.numel(), (_SAMPLES,), generator=generator)
        places = places.to(matrix.device)
        samples = matrix[places // matrix.shape[1], places % matrix.shape[1]]
    return float(_nonzero(samples, tolerance).float().mean()) > _MOST_DENSE


def _nonzero(values: Tensor, tolerance: float) -> Tensor:
    if tolerance == 0.0 or not values.is_floating_point():
        return values != 0
    sizes = values.abs()
    return sizes > tolerance * sizes.max()
