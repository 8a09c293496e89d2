"""From a dense matrix to the weights of a chain: hierarchical factorization.

Source: Le, Zheng, Riccietti, Gribonval, "Butterfly factorization with error guarantees", 2024
(arXiv 2411.04506): a matrix that is a product of a chainable chain is recovered exactly by
splitting off one factor at a time, each split a truncated SVD of independent blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.factor import Pattern
from ksopt.pattern import Chain


def project(matrix: Tensor, chain: Chain) -> list[Tensor]:
    """Weights whose product is ``matrix`` if the chain can express it, and near it if not.

    Args:
        matrix: [out_features, in_features], floating point. Computed in float64.
        chain: a chainable chain of that shape.

    Returns:
        One float64 weight [a, b, c, d] for each factor, left to right, of equal norms. Entries of
        ``matrix`` outside the support of the chain's product are ignored.

    Raises:
        InvalidInputError: the shapes differ, the chain is not chainable, or the matrix has NaN or
            infinity in it.

    Example:
        >>> [weight.shape for weight in project(torch.ones(4, 6), Chain.low_rank(6, 4, rank=1))]
        [torch.Size([1, 4, 1, 1]), torch.Size([1, 1, 6, 1])]
    """
    if tuple(matrix.shape) != chain.shape:
        raise InvalidInputError(
            f"the matrix has shape {list(matrix.shape)}, but the chain {chain} has shape "
            f"{list(chain.shape)}"
        )
    if not matrix.isfinite().all():
        raise InvalidInputError("the matrix has NaN or infinity in it: there is nothing near it")
    if not chain.is_chainable:
        raise InvalidInputError(
            f"{chain} is not chainable, and only for chainable chains is there an exact way to "
            "split a matrix into the factors (Chain.is_chainable says what that means)"
        )
    # supports[l] is the pattern of K_l K_{l+1} ... K_L.
    supports = [chain[-1]]
    for pattern in reversed(chain.patterns[:-1]):
        supports.insert(0, _product(pattern, supports[0]))
    rest = _on_support(matrix.detach().to(torch.float64), supports[0])
    weights = []
    for pattern, right in zip(chain.patterns[:-1], supports[1:], strict=True):
        weight, rest = _split(rest, pattern, right)
        weights.append(weight)
    return _balance([*weights, rest])


def _product(left: Pattern, right: Pattern) -> Pattern:
    """The support of a chainable pair's product."""
    return Pattern(left.a, left.b * left.d // right.d, right.a * right.c // left.a, right.d)


def _on_support(matrix: Tensor, pattern: Pattern) -> Tensor:
    """The weight [a, b, c, d] that a matrix [M, N] has on the support of a pattern."""
    a, b, c, d = pattern.weight_shape
    blocks = matrix.reshape(a, b, d, a, c, d)
    # -> [b, c, a, d]: equal block row and column, equal offset inside
    return blocks.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3).permute(2, 0, 1, 3)


def _split(weight: Tensor, left: Pattern, right: Pattern) -> tuple[Tensor, Tensor]:
    """Weights of a chainable pair from the weight of its product.

    The features between the factors fall into classes of r = left.a * left.c / right.a: those of
    one class meet the same outputs and the same inputs, so they add a matrix of rank r to one
    left.b x right.c block of the product, and no other class touches that block.
    """
    p = right.a // left.a
    q = left.d // right.d
    r = left.a * left.c // right.a
    # weight: [a1, (b1 q), (p c2), d2] -> blocks [a1, p, q, d2, b1, c2]
    blocks = weight.reshape(left.a, left.b, q, p, right.c, right.d).permute(0, 3, 2, 5, 1, 4)
    u, s, vh = torch.linalg.svd(blocks, full_matrices=False)
    kept = min(r, s.shape[-1])
    root = s[..., :kept].sqrt()
    outer = u.new_zeros(*blocks.shape[:4], left.b, r)
    inner = u.new_zeros(*blocks.shape[:4], r, right.c)
    outer[..., :kept] = u[..., :kept] * root.unsqueeze(-2)
    inner[..., :kept, :] = vh[..., :kept, :] * root.unsqueeze(-1)
    # outer: [a1, p, q, d2, b1, r] -> [a1, b1, (p r), (q d2)]
    # inner: [a1, p, q, d2, r, c2] -> [(a1 p), (r q), c2, d2]
    return (
        outer.permute(0, 4, 1, 5, 2, 3).reshape(left.weight_shape),
        inner.permute(0, 1, 4, 2, 5, 3).reshape(right.weight_shape),
    )


def _balance(weights: list[Tensor]) -> list[Tensor]:
    """The same product with equal root-mean-square gains, so that no factor under- or overflows.

    A factor's gain is what it multiplies the size of random features by: c times its weights'
    mean square, under the root.
    """
    gains = [weight.square().mean().mul(weight.shape[2]).sqrt() for weight in weights]
    gain = torch.stack(gains).log().mean().exp()
    if not (gain > 0 and gain.isfinite()):
        return weights
    return [weight * (gain / own) for weight, own in zip(weights, gains, strict=True)]
