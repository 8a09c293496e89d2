"""Replacements for code that Dynamo cannot trace.

Monarch implementations are often copies of two autograd.Functions, ``blockdiag_multiply`` and
``blockdiag_butterfly_multiply``, which write ``torch.bmm(..., out=)`` into a transposed tensor.
Dynamo breaks the graph there, so no backend sees the product. The functions here compute the same.
For any other function the user passes a replacement, and the two are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ksopt.errors import InvalidInputError
from ksopt.functional import ks_linear
from ksopt.measure.accuracy import fault_beyond, largest_error

Arguments = Sequence[Any]
"""The positional arguments of a call."""

_DRAWS = 2


def blockdiag_multiply(x: Tensor, weight: Tensor) -> Tensor:
    """One block-diagonal factor.

    Args:
        x: [*batch, k * p].
        weight: [k, q, p], the blocks.

    Returns:
        [*batch, k * q].

    In ksopt's terms the pattern is (k,q,p,1).

    Raises:
        InvalidInputError: shapes, dtypes or devices that do not fit together.

    Source: Dao et al. 2022, "Monarch: Expressive Structured Matrices for Efficient and Accurate
    Training"; the signature is that of its authors' code.

    Example:
        >>> blockdiag_multiply(torch.ones(3, 8), torch.ones(2, 5, 4)).shape
        torch.Size([3, 10])
    """
    return ks_linear(x, [weight.unsqueeze(-1)])


def blockdiag_butterfly_multiply(x: Tensor, w1_bfly: Tensor, w2_bfly: Tensor) -> Tensor:
    """Two block-diagonal factors with a permutation between and after them: a Monarch product.

    Args:
        x: [*batch, k * p].
        w1_bfly: [k, q, p], the blocks that meet x.
        w2_bfly: [l, s, r], with l * r = k * q.

    Returns:
        [*batch, s * l].

    In ksopt's terms the chain is (1,s,r,l)*(k,q,p,1).

    Raises:
        InvalidInputError: shapes, dtypes or devices that do not fit together.

    Source: Dao et al. 2022, "Monarch: Expressive Structured Matrices for Efficient and Accurate
    Training"; the signature is that of its authors' code.

    Example:
        >>> x, w1, w2 = torch.ones(3, 8), torch.ones(2, 3, 4), torch.ones(3, 5, 2)
        >>> blockdiag_butterfly_multiply(x, w1, w2).shape
        torch.Size([3, 15])
    """
    return ks_linear(x, [w2_bfly.permute(1, 2, 0).unsqueeze(0), w1_bfly.unsqueeze(-1)])


@dataclass(frozen=True)
class _Known:
    """A function with a built-in replacement.

    Attributes:
        replacement: computes the same.
        shapes: of the arguments of an example.
        arguments: their description.
    """

    replacement: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    arguments: str

    def examples(self) -> list[Arguments]:
        return [tuple(torch.zeros(shape) for shape in self.shapes)]


_KNOWN = {
    "blockdiag_multiply": _Known(
        blockdiag_multiply,
        ((3, 8), (2, 5, 4)),
        "x [*batch, k*p], weight [k, q, p] -> [*batch, k*q]",
    ),
    "blockdiag_butterfly_multiply": _Known(
        blockdiag_butterfly_multiply,
        ((3, 8), (2, 3, 4), (3, 5, 2)),
        "x [*batch, k*p], w1 [k, q, p], w2 [l, s, r] -> [*batch, s*l]",
    ),
}


class Patch:
    """A replaced function. ``undo()`` restores it; so does leaving `with`.

    Attributes:
        original: the replaced function.
    """

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._is_own = name in getattr(owner, "__dict__", {})
        self._as_stored = inspect.getattr_static(owner, name)  # a staticmethod as such
        self.original = original

    def undo(self) -> None:
        """Restore the original."""
        if self._is_own:
            setattr(self._owner, self._name, self._as_stored)
        elif self._name in getattr(self._owner, "__dict__", {}):
            delattr(self._owner, self._name)  # inherited

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def patch(
    owner: Any,
    name: str = "blockdiag_butterfly_multiply",
    replacement: Callable[..., Any] | None = None,
    examples: Sequence[Arguments] | None = None,
    *,
    gradients: bool = True,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-5,
) -> Patch:
    """Replace a function by an equivalent one that torch.compile can follow.

    Both are called on the examples' shapes with random numbers, and their results and gradients are
    compared, before anything is replaced.

    Args:
        owner: the module (or class, or object) where the function is looked up when it is called:
            a module that has it from ``from ... import`` has a name of its own, to be patched too.
        name: of the function there. ``blockdiag_multiply`` and ``blockdiag_butterfly_multiply`` of
            the Monarch repositories need no more than their names.
        replacement: computes the same of the same arguments, in a spelling that ksopt recognises or
            by `ksopt.ks_linear`.
        examples: arguments to compare on, a tuple for each call. Of the floating-point tensors
            among them only shape and device count; all else is passed unchanged.
        gradients: whether the gradients must agree, too. False for a function without a backward.
        dtype: in which both are called.
        tolerance: largest difference allowed, relative to the largest element.

    Returns:
        A `Patch`, to undo it.

    Raises:
        InvalidInputError: there is no such function, there are no examples, a call fails, the
            function writes its arguments, or the two differ.

    Example:
        >>> import types
        >>> def theirs(x, weight):  # a product that Dynamo could not follow
        ...     return x @ torch.block_diag(*weight).T
        >>> library = types.SimpleNamespace(multiply=theirs)
        >>> def same(x, weight):
        ...     return torch.einsum("bki,koi->bko", x.unflatten(-1, (4, 8)), weight).flatten(1)
        >>> with patch(library, "multiply", same, [(torch.ones(3, 32), torch.ones(4, 6, 8))]):
        ...     library.multiply is same
        True
        >>> library.multiply is theirs
        True
    """
    original = getattr(owner, name, None)
    if not callable(original):
        known = getattr(owner, "__name__", type(owner).__name__)
        raise InvalidInputError(f"patch: {known} has no function {name!r}")
    if replacement is None:
        known_one = _KNOWN.get(name, _KNOWN["blockdiag_butterfly_multiply"])
        what = f"{known_one.replacement.__name__} ({known_one.arguments})"
        replacement, examples = known_one.replacement, examples or known_one.examples()
    else:
        what = getattr(replacement, "__name__", "the replacement")
    if not callable(replacement):
        raise InvalidInputError(f"patch: the replacement for {name} is no function")
    if not examples:
        raise InvalidInputError(
            f"patch: give examples, a tuple of arguments of {name} for each call to compare"
        )
    if not dtype.is_floating_point or not 0 <= tolerance < 1:
        raise InvalidInputError(
            f"patch: dtype {dtype} and tolerance {tolerance}: they must be a floating-point type "
            "and a number from 0 to 1"
        )
    checked = _Comparison(name, what, original, replacement, gradients, tolerance)
    generator = torch.Generator().manual_seed(0)
    for arguments in examples:
        if not isinstance(arguments, tuple | list):
            raise InvalidInputError(
                f"patch: an example is a {type(arguments).__name__}: give a tuple of arguments"
            )
        for _ in range(_DRAWS):
            checked.on([_drawn(one, dtype, generator) for one in arguments])
    done = Patch(owner, name, original)
    own: Any = staticmethod(replacement) if isinstance(owner, type) else replacement
    setattr(owner, name, own)
    return done


def _drawn(argument: Any, dtype: torch.dtype, generator: torch.Generator) -> Any:
    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return values.to(tensor.device, dtype)

    return tree_map_only(Tensor, drawn, argument)


@dataclass(frozen=True)
class _Comparison:
    """Comparison of two functions that must compute the same."""

    name: str
    what: str
    original: Callable[..., Any]
    replacement: Callable[..., Any]
    gradients: bool
    tolerance: float

    def on(self, arguments: Sequence[Any]) -> None:
        """Compare both functions on some arguments.

        Raises:
            InvalidInputError: they differ, or the original fails or writes its arguments.
        """
        copies = tree_map_only(Tensor, torch.clone, list(arguments))
        theirs, their_grads = self._called(self.original, self.name, copies)
        if not all(
            torch.equal(one, other)
            for one, other in zip(_tensors(copies), _tensors(arguments), strict=True)
        ):
            raise InvalidInputError(
                f"patch: {self.name} writes its arguments: a replacement would have to, too, and "
                "that is not checked"
            )
        copies = tree_map_only(Tensor, torch.clone, list(arguments))
        ours, our_grads = self._called(self.replacement, self.what, copies)
        self._compare("result", theirs, ours, arguments)
        self._compare("gradient", their_grads, our_grads, arguments)

    def _called(
        self, function: Callable[..., Any], name: str, arguments: Sequence[Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The results of a call, and the gradients of its arguments."""
        inputs = [one for one in _tensors(arguments) if one.is_floating_point()]
        aliases = tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(self._needs(t)), list(arguments)
        )
        leaves = [one for one in _tensors(aliases) if one.is_floating_point()]
        try:
            with torch.set_grad_enabled(self.gradients):
                results = _tensors(function(*aliases))
            grads = self._gradients(results, leaves) if self.gradients else []
        except Exception as error:
            shapes = ", ".join(str(list(one.shape)) for one in inputs)
            advice = "; dtype=torch.float32 calls it in that type"
            advice += ", gradients=False compares results alone" if self.gradients else ""
            raise InvalidInputError(
                f"patch: {name} fails on tensors {shapes} of {leaves[0].dtype}: {error}{advice}"
                if leaves
                else f"patch: {name} fails: {error}"
            ) from error
        return [result.detach() for result in results], grads

    def _needs(self, tensor: Tensor) -> bool:
        return self.gradients and tensor.is_floating_point()

    @staticmethod
    def _gradients(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        ends = [result for result in results if result.requires_grad]
        if not ends or not leaves:
            return [torch.zeros_like(leaf) for leaf in leaves]
        weights = [
            torch.randn(end.shape, generator=generator, dtype=torch.float64).to(end) for end in ends
        ]
        grads = torch.autograd.grad(ends, leaves, weights, allow_unused=True)
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(leaves, grads, strict=True)
        ]

    def _compare(
        self, which: str, theirs: list[Tensor], ours: list[Tensor], arguments: Sequence[Any]
    ) -> None:
        shapes = [list(one.shape) for one in theirs], [list(one.shape) for one in ours]
        where = f"on tensors {', '.join(str(list(t.shape)) for t in _tensors(arguments))}"
        if shapes[0] != shapes[1]:
            raise InvalidInputError(
                f"patch: {self.name} computes something else than {self.what}: {where} the shapes "
                f"of the {which}s are {shapes[0]} and {shapes[1]}"
            )
        for one, other in zip(theirs, ours, strict=True):
            if not one.numel():
                continue
            # The user sets how much: there is no third result that both could be compared with. A
            # wrong replacement may differ in few places, so the largest difference counts.
            if fault_beyond(largest_error(other, one.double()), self.tolerance) is not None:
                difference = float((one.double() - other.double()).abs().max())
                raise InvalidInputError(
                    f"patch: {self.name} computes something else than {self.what}: {where} a "
                    f"{which} differs by {difference:.3g}"
                )


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]
