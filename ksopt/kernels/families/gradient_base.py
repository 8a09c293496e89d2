"""Gradients that kernels compute, the base class of the kernels' families, and its registry.

A family is considered wherever it computes a gradient; which kernel is used is decided in
:mod:`ksopt.kernels.gradient_autotuner`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

from torch import Tensor

from ksopt.epilogue import Activation
from ksopt.errors import InvalidInputError
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern

Gradient = Literal["weight", "chain_weights", "chain_input"]
"""The kinds: the gradient of a factor's weight; of both weights of a chain of two factors; of the
input of such a chain, and of what is between its factors."""

KINDS: tuple[Gradient, ...] = get_args(Gradient)

LaunchT = TypeVar("LaunchT")


@dataclass(frozen=True)
class GradientProblem:
    """A gradient to compute, batch first.

    Attributes:
        gradient: the kind.
        factors: of the product, left to right; with an activation also the one below it.
        dtype: of all operands, such as "bfloat16".
        with_bias: whether the gradient of a bias added to the product, the sum of the rows of y's
            gradient, is computed beside that of a weight.
        siblings: how many chains of these factors read the same.
        activation: of "chain_input": what the chain reads is this of the last factor's product.
    """

    gradient: Gradient
    factors: tuple[Pattern, ...]
    dtype: str
    with_bias: bool = False
    siblings: int = 1
    activation: Activation = "none"

    @property
    def product(self) -> str:
        """The factors as text, with the number of siblings and what an activation is of."""
        factors = [str(p) for p in self.factors]
        times = f"{self.siblings} x " if self.siblings > 1 else ""
        below = f" of {self.activation} of {factors.pop()}" if self.activation != "none" else ""
        return f"{times}{'*'.join(factors)}{below}"

    def __str__(self) -> str:
        bias = " and bias" if self.with_bias else ""
        return f"{self.gradient}{bias} of {self.product} {self.dtype}"


@runtime_checkable
class EnterableGradient(Protocol):
    """A launcher whose kernels the host library can launch without Python.

    They take the structs that csrc/host fills for their kind: those of weight_gradient.hpp, of
    chain_gradients.cpp or of input_gradient.cpp.
    """

    def entry(self, rows: int) -> tuple[int, ...]:
        """The launches on so many rows, as numbers.

        They are those that ``know_weight_grad``, ``know_chain_grads`` or ``know_input_grad`` of
        csrc/host takes behind the operands and what they are of, in its order.
        """


@runtime_checkable
class TakesPacked(Protocol):
    """A launcher of "chain_input" that takes weights that the forward pass packed, as ``packed``.

    Their order is that of the best predicted tile, a ``Config`` of common/input_grad_tile.py: the
    forward pass packs for no other tiles.

    Attributes:
        packed_elements: of the packed weights: it is called with no others.
    """

    packed_elements: int

    def pack(self, weights: Sequence[Tensor]) -> Tensor:
        """The weights of all siblings in that order."""

    def __call__(self, *operands: Any, packed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As by `GradientFamily.launcher`; it reads ``packed``, if any, instead of the weights."""


class GradientFamily(abc.ABC, Generic[LaunchT]):
    """Kernels that compute one kind of gradient.

    Attributes:
        name: of the family.
        computes: the kind.
    """

    name: ClassVar[str]
    computes: ClassVar[Gradient]

    @abc.abstractmethod
    def unsupported_reason(self, problem: GradientProblem, device: DeviceSpec) -> str | None:
        """Why the family does not compute a gradient of its kind on a device; None if it does."""

    @abc.abstractmethod
    def launches(
        self, problem: GradientProblem, rows: int, device: DeviceSpec
    ) -> Iterable[LaunchT]:
        """The launches worth considering of a supported problem, on this many rows."""

    @abc.abstractmethod
    def predicted_us(
        self, problem: GradientProblem, launch: LaunchT, rows: int, device: DeviceSpec
    ) -> float:
        """Predicted microseconds of a launch."""

    @abc.abstractmethod
    def tile(self, launch: LaunchT) -> Any:
        """The launch's tile, a frozen dataclass of plain values: what is raced and recorded.

        Launches whose numbers of blocks differ may have the same tile: the best predicted counts.
        """

    @abc.abstractmethod
    def launcher(
        self, problem: GradientProblem, launch: LaunchT, device_index: int
    ) -> Callable[..., Any]:
        """Compile and load the kernels of a launch.

        Returns:
            Called with the operands: for "weight" (grad [rows, M], x [rows, N]) -> (the weight's
            gradient, the bias's or None); for "chain_weights" (the grad of each sibling, each
            between, each grad_between, x) -> the weights' and the biases' if any; for
            "chain_input" (grads, weights), of all siblings, -> (input's gradient, those of what is
            between the factors), with an activation (grads, weights, what the factor below read,
            optionally its bias) -> (the gradient of what is activated, the others). Rows begin at
            multiples of 16 bytes, weights have any strides, and results are contiguous. Python
            calls it each time unless it is an `EnterableGradient`; a `TakesPacked` also takes
            weights that were packed before.

        Raises:
            UnavailableError, CompilationError: see :mod:`ksopt.jit`.
        """


def entry_of(
    kernel: Callable[..., Any] | None, rows: int, without: tuple[int, ...]
) -> tuple[int, ...] | None:
    """What the host library is to know of calls with these operands.

    Args:
        kernel: the launcher that was chosen; None: the way without kernels.
        rows: of the operands.
        without: the entry of that way.

    Returns:
        None: nothing, as Python calls the launcher each time.
    """
    if kernel is None:
        return without
    return kernel.entry(rows) if isinstance(kernel, EnterableGradient) else None


_families: dict[str, GradientFamily[Any]] = {}

FamilyClass = TypeVar("FamilyClass", bound=type[GradientFamily[Any]])


def register_gradient_family(cls: FamilyClass) -> FamilyClass:
    """Class decorator that adds a family to the candidates for its kind of gradient.

    Raises:
        InvalidInputError: another family has its name.
    """
    family = cls()
    if family.name in _families:
        raise InvalidInputError(
            f"register_gradient_family: there is a family {family.name!r} already"
        )
    _families[family.name] = family
    return cls


def unregister_gradient_family(name: str) -> None:
    """Take a family out of the registry.

    Raises:
        InvalidInputError: there is no such family.
    """
    if name not in _families:
        raise InvalidInputError(f"{name!r} is not a family of gradients' kernels")
    del _families[name]


def gradient_families(gradient: Gradient) -> tuple[GradientFamily[Any], ...]:
    """The registered families that compute a kind of gradient."""
    return tuple(family for family in _families.values() if family.computes == gradient)
