"""A replacement for code that Dynamo refuses to look into.

Monarch implementations are often copies of one autograd.Function, ``blockdiag_butterfly_multiply``,
which writes ``torch.bmm(..., out=)`` into a transposed tensor. Dynamo breaks the graph there, so no
backend sees the product. The function here computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.functional import ks_linear


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


class Patch:
    """A function that stands in another's place. ``undo()`` restores it; so does leaving `with`.

    Attributes:
        original: what was there.
    """

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self.original = original

    def undo(self) -> None:
        """Put the original back."""
        setattr(self._owner, self._name, self.original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def patch(owner: Any, name: str = "blockdiag_butterfly_multiply") -> Patch:
    """Replace a function ``(x, w1_bfly, w2_bfly)`` by one that torch.compile can follow.

    Args:
        owner: the module (or class, or object) where the function is looked up when it is called:
            a module that has it from ``from ... import`` has a name of its own, to be patched too.
        name: of the function there.

    Returns:
        A `Patch`, to undo it.

    Raises:
        InvalidInputError: there is no such function, or it computes something else: both are called
            once on small random tensors.

    Example:
        >>> import types
        >>> def theirs(x, w1, w2):  # what the copies compute, without their `out=`
        ...     k, q, p = w1.shape
        ...     l, s, r = w2.shape
        ...     y = torch.einsum("bkp,kqp->bkq", x.reshape(-1, k, p), w1).reshape(-1, r, l)
        ...     return torch.einsum("brl,lsr->bsl", y, w2).reshape(*x.shape[:-1], s * l)
        >>> library = types.SimpleNamespace(blockdiag_butterfly_multiply=theirs)
        >>> with patch(library) as patched:
        ...     library.blockdiag_butterfly_multiply.__module__
        'ksopt.compile.patching'
    """
    original = getattr(owner, name, None)
    if not callable(original):
        known = getattr(owner, "__name__", type(owner).__name__)
        raise InvalidInputError(f"patch: {known} has no function {name!r}")
    _check(original, name)
    setattr(owner, name, blockdiag_butterfly_multiply)
    return Patch(owner, name, original)


def _check(original: Callable[..., Any], name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 8), (2, 3, 4), (3, 5, 2))
    x, w1, w2 = (torch.randn(shape, generator=generator) for shape in shapes)
    expected = blockdiag_butterfly_multiply(x, w1, w2)
    try:
        with torch.no_grad():
            found = original(x, w1, w2)
    except Exception as error:
        raise InvalidInputError(
            f"patch: {name}(x, w1, w2) fails on x {list(x.shape)}, w1 {list(w1.shape)} and w2 "
            f"{list(w2.shape)}, which are [*batch, k*p], [k, q, p] and [l, s, r]: {error}"
        ) from error
    same = isinstance(found, Tensor) and found.shape == expected.shape
    if not same or not torch.allclose(found.float(), expected, rtol=1e-2, atol=1e-2):
        raise InvalidInputError(
            f"patch: {name} computes something else than the block-diagonal butterfly multiply "
            "(x [*batch, k*p], w1 [k, q, p], w2 [l, s, r] -> [*batch, s*l])"
        )
