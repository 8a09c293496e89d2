"""The nearest product of two factors, for any two patterns that fit together, in closed form.

Let R be the features between K_1 = (a1,b1,c1,d1) and K_2 = (a2,b2,c2,d2). Feature n meets the b1
outputs of one class of K_1's rows, i1*d1 + j1 with i1 = n // (c1 d1) and j1 = n % d1, and the c2
inputs of one class of K_2's columns, i2*d2 + j2 with i2 = n // (b2 d2) and j2 = n % d2. Row classes
share no rows and column classes no columns, so what two features add to the product falls on the
same block of b1 x c2 entries or on disjoint ones. The product is therefore any matrix whose block
(row class, column class) has a rank of at most the number of features with these classes, and the
nearest one takes a truncated singular value decomposition of each block.

The patterns need no other property. For a chainable pair every block that is not zero has
r = a1 c1 / a2 features; in (1,2,3,2)*(2,3,2,1) two blocks have one and two have two.

Source: Le, Riccietti, Gribonval, "Spurious valleys, NP-hardness, and tractability of sparse matrix
factorization with fixed support", 2023 (supports of rank one that are equal or disjoint); Le,
Zheng, Riccietti, Gribonval, "Butterfly factorization with error guarantees", 2024
(arXiv 2411.04506), for chainable pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.patterns.pattern import Pattern


@dataclass(frozen=True)
class Blocks:
    """The blocks of a pair's product that have the same rank.

    Args:
        rows: [blocks], their row classes.
        columns: [blocks], their column classes.
        features: [blocks, rank], the features between the factors that each block owns.
    """

    rows: Tensor
    columns: Tensor
    features: Tensor


def blocks(left: Pattern, right: Pattern) -> list[Blocks]:
    """All blocks of a product, by rank; every feature between the factors is in exactly one.

    Example:
        >>> [group.features.shape for group in blocks(Pattern(1, 2, 3, 2), Pattern(2, 3, 2, 1))]
        [torch.Size([2, 1]), torch.Size([2, 2])]
    """
    n = torch.arange(left.in_features)
    row_class = n // (left.c * left.d) * left.d + n % left.d
    column_class = n // (right.b * right.d) * right.d + n % right.d
    classes = right.a * right.d
    pair, owner, count = torch.unique(
        row_class * classes + column_class, return_inverse=True, return_counts=True
    )
    by_block = torch.argsort(owner, stable=True)
    first = count.cumsum(0) - count
    groups = []
    for rank in count.unique().tolist():
        chosen = (count == rank).nonzero().squeeze(1)
        groups.append(
            Blocks(
                pair[chosen] // classes,
                pair[chosen] % classes,
                by_block[first[chosen].unsqueeze(1) + torch.arange(rank)],
            )
        )
    return groups


def split(
    target: Tensor, left: Pattern, right: Pattern, double: bool = True
) -> tuple[Tensor, Tensor]:
    """The nearest K_1 K_2 to each of a batch of matrices; K_1 preserves norms.

    Args:
        target: [batch, M, N], float64.
        left: pattern of K_1, with M rows.
        right: pattern of K_2, with N columns.
        double: whether to compute with float64's full accuracy. Without it the singular vectors
            come from the eigenvectors of each block's Gram matrix: exact to about 1e-8 of the
            block's norm, in half the time on a CPU, and one batched call on a GPU, where the
            singular value decomposition of many small matrices is a loop.

    Returns:
        Weights [batch, a1, b1, c1, d1] and [batch, a2, b2, c2, d2]. For every X with the support of
        K_2, ||K_1 X|| = ||X|| (Frobenius) wherever K_1's features are not more than the rank of
        their block: so a later loss in K_2 is the same loss in the product.
    """
    batch = target.shape[0]
    device = target.device
    # -> [batch, a1 d1, a2 d2, b1, c2]: one block for each row class and column class
    classes = (
        target.reshape(batch, left.a, left.b, left.d, right.a, right.c, right.d)
        .permute(0, 1, 3, 4, 6, 2, 5)
        .reshape(batch, left.a * left.d, right.a * right.d, left.b, right.c)
    )
    inner = left.in_features
    outer_rows = target.new_empty(batch, inner, left.b)
    inner_rows = target.new_empty(batch, inner, right.c)
    for group in blocks(left, right):
        outer, rest = _truncated(
            classes[:, group.rows.to(device), group.columns.to(device)],
            group.features.shape[1],
            double,
        )
        features = group.features.to(device)
        outer_rows[:, features] = outer.transpose(-1, -2)
        inner_rows[:, features] = rest
    return (
        outer_rows.reshape(batch, left.a, left.c, left.d, left.b).permute(0, 1, 4, 2, 3),
        inner_rows.reshape(batch, right.a, right.b, right.d, right.c).permute(0, 1, 2, 4, 3),
    )


def _truncated(target: Tensor, rank: int, double: bool) -> tuple[Tensor, Tensor]:
    """The best product of [..., b, rank] with orthonormal columns and [..., rank, c].

    Columns beyond the block's rank get a random direction, but weight zero on the other side: if
    both were zero, no gradient would ever reach them.
    """
    b, c = target.shape[-2:]
    effective = min(rank, b, c)
    factors = (_by_svd if double else _by_gram)(target, effective)
    if effective == rank:
        return factors
    generator = torch.Generator().manual_seed(0)
    spare = torch.randn(b, rank - effective, generator=generator, dtype=torch.float64)
    spare = (spare / spare.norm(dim=0)).to(target)
    outer = torch.cat((factors[0], spare.expand(*target.shape[:-2], -1, -1)), dim=-1)
    rest = torch.nn.functional.pad(factors[1], (0, 0, 0, rank - effective))
    return outer, rest


def _by_svd(target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(target, full_matrices=False)
    return u[..., :rank], s[..., :rank, None] * vh[..., :rank, :]


def _by_gram(target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    b, c = target.shape[-2:]
    if b <= c:
        _, vectors = torch.linalg.eigh(target @ target.mT)
        outer = vectors[..., -rank:]
    else:
        _, vectors = torch.linalg.eigh(target.mT @ target)
        # Orthonormal whatever the singular values: a division by small ones would not be.
        outer = torch.linalg.qr(target @ vectors[..., -rank:])[0]
    return outer, outer.mT @ target
