"""Decompositions of small matrix products into few scalar products: Strassen's, and fitted ones.

A product Y = X B of t x t tiles is bilinear, and so a tensor T [B, Y, X] of zeros and ones. Each
dimension of T numbers the t² entries of a tile row by row. A decomposition into r terms,

    T[w, y, x] ~ sum_r weight[w, r] output[y, r] input[x, r],

computes it with r multiplications of encoded entries. Strassen's is exact with r = 7 for t = 2, and
with 7^k for t = 2^k. With fewer terms it is approximate: alternating least squares minimize the
error. They start from the largest of Strassen's terms and from the largest of the t³ products of
two entries, and the better result counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2

import torch
from torch import Tensor

_ROUNDS = 80  # of alternating least squares; more reduce the error by less than a thousandth
_RIDGE = 1e-9  # relative; bounds terms that cancel each other

# Entries 11, 12, 21, 22 of X, of B and of Y in the seven products (Strassen 1969).
_INPUT = (
    (1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (-1, 0, 1, 0),
    (0, 1, 0, -1),
)  # fmt: skip
_WEIGHT = (
    (1, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, -1), (-1, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0),
    (0, 0, 1, 1),
)  # fmt: skip
_OUTPUT = (
    (1, 0, 0, 1), (0, 0, 1, -1), (0, 1, 0, 1), (1, 0, 1, 0), (-1, 1, 0, 0), (0, 0, 0, 1),
    (1, 0, 0, 0),
)  # fmt: skip


@dataclass(frozen=True)
class Terms:
    """A decomposition of a product of tiles.

    Args:
        weight: [t², r], encodes tiles of B, or of a metric: see `nearest`.
        output: [t², r], decodes to tiles of Y.
        input: [t², r], encodes tiles of X.
        relative_error: Of the sum of the terms against T, in the Frobenius norm.
    """

    weight: Tensor
    output: Tensor
    input: Tensor
    relative_error: float


def exact_terms(tile: int) -> int:
    """The number of terms of Strassen's algorithm for tiles of a size, a power of two.

    Example:
        >>> exact_terms(2), exact_terms(4)
        (7, 49)
    """
    return int(7 ** round(log2(tile)))


def product_tensor(tile: int) -> Tensor:
    """The tensor T [t², t², t²] in float64: [B, Y, X]."""
    eye = torch.eye(tile, dtype=torch.float64)
    # Y[a, c] = sum_b X[a, b] B[b, c]
    tensor = torch.einsum("ad,be,cf->bcdfae", eye, eye, eye)
    return tensor.reshape(tile**2, tile**2, tile**2)


def by_entries(metric: Tensor, tile: int) -> Terms:
    """The t³ products of an entry of X and one of B, in a metric as of `nearest`: exact."""
    which = product_tensor(tile).nonzero().T  # [3, t³]
    eye = torch.eye(tile**2, dtype=torch.float64)
    weight, output, encoder = (eye[:, place] for place in which)
    return Terms(metric @ weight, output, encoder, 0.0)


@lru_cache(maxsize=8)
def strassen(tile: int) -> Terms:
    """Strassen's algorithm, nested for tiles larger than 2 x 2: exact."""
    seven = [torch.tensor(part, dtype=torch.float64).T for part in (_WEIGHT, _OUTPUT, _INPUT)]
    whole = seven
    side = 2
    while side < tile:
        whole = [_nested(outer, inner, side) for outer, inner in zip(whole, seven, strict=True)]
        side *= 2
    weight, output, encoder = whole
    return Terms(weight, output, encoder, 0.0)


def _nested(outer: Tensor, inner: Tensor, side: int) -> Tensor:
    """The terms for tiles of twice ``side``: a 2 x 2 tile in each entry of a tile of ``side``."""
    r, s = outer.shape[1], inner.shape[1]
    both = torch.einsum("ijr,kls->ikjlrs", outer.view(side, side, r), inner.view(2, 2, s))
    return both.reshape(4 * side**2, r * s)


def nearest(metric: Tensor, tile: int, count: int) -> Terms:
    """The terms fitted to weight tiles of a metric: exact with as many terms as Strassen's.

    Args:
        metric: [n, t²] with the Gram matrix of the tiles: R of their QR decomposition. T's first
            dimension becomes its n rows.
        tile: t, a power of two.
        count: Number of terms, at most Strassen's.

    Source: alternating least squares for the canonical polyadic decomposition, Kolda and Bader
    2009, section 3.4.
    """
    metric = metric.to("cpu", torch.float64)  # at most t⁶ numbers
    exact = strassen(tile)
    whole = Terms(metric @ exact.weight, exact.output, exact.input, 0.0)
    if count == exact_terms(tile):
        return whole
    target = torch.tensordot(metric, product_tensor(tile), 1)
    ends = [
        _alternated(target, *_largest(terms, count))
        for terms in (whole, by_entries(metric, tile))
        if count <= terms.input.shape[1]
    ]
    return min(ends, key=lambda end: end.relative_error)


def _largest(terms: Terms, count: int) -> tuple[Tensor, Tensor]:
    """The output and input parts of the largest terms."""
    parts = (terms.weight, terms.output, terms.input)
    sizes = torch.stack([part.norm(dim=0) for part in parts]).prod(0)
    chosen = sizes.topk(count).indices
    return terms.output[:, chosen].clone(), terms.input[:, chosen].clone()


def _alternated(target: Tensor, output: Tensor, encoder: Tensor) -> Terms:
    """The terms after least squares for each part in turn, with the two others fixed."""
    size = float(target.norm())
    if size == 0.0:
        zeros = target.new_zeros(target.shape[0], output.shape[1])
        return Terms(zeros, output, encoder, 0.0)
    for _ in range(_ROUNDS):
        weight = _solved(target, output, encoder)
        output = _unit(_solved(target.movedim(1, 0), weight, encoder))
        encoder = _unit(_solved(target.movedim(2, 0), weight, output))
    weight = _solved(target, output, encoder)
    missed = target - torch.einsum("wr,yr,xr->wyx", weight, output, encoder)
    return Terms(weight, output, encoder, float(missed.norm()) / size)


def _solved(target: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The least-squares solution for one part of the terms, with the two others fixed.

    Args:
        target: [n, m, k].
        first: [m, r].
        second: [k, r].

    Returns:
        [n, r].
    """
    gram = (first.T @ first) * (second.T @ second)
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    pairs = (first.unsqueeze(1) * second).flatten(0, 1)  # [m k, r]
    return torch.linalg.solve(gram, (target.flatten(1) @ pairs).T).T


def _unit(part: Tensor) -> Tensor:
    """The part with columns of norm 1; the weights carry the terms' sizes."""
    return part / part.norm(dim=0).clamp(min=1e-30)
