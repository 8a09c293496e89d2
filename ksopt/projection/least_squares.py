"""Least squares for one factor of a chain, with the others fixed.

||A - L K R||² is a quadratic in the weights of K. It decomposes into small ones that share no
weights, each with its own dense, symmetric equation, solved directly where it is small:

- for the first factor (L is the identity) all rows are independent, and the rows of a class, which
  have their weights in the same places, share one c x c matrix. The last factor is the first one of
  the transposed chain;
- for an inner factor, two weights interact only if their columns of L, and their rows of R, have
  entries in common. L and R are Kronecker-sparse, or treated as such (with zeros in them): their
  columns and rows form classes, and every pair of classes has its own equation. Where these are
  large, they are solved approximately by conjugate gradients with products of classes.

Source: normal equations of ||A - L K R||², (LᵀL) K (RRᵀ) = LᵀA Rᵀ on the support of K.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.patterns.pattern import Pattern
from ksopt.projection.products import on_support, times
from ksopt.reference import ks_reference, to_dense

# Added to the diagonal, relative to its mean: undetermined weights do not change, because each
# equation is one for the change.
_RIDGE = 1e-11
# Numbers of the equations in memory at a time: 64 MB.
_AT_A_TIME = 2**23
# Steps of conjugate gradients for equations that are too large to be solved directly, and the
# share of the squared residual at which they stop earlier: the next pass continues.
_STEPS, _ENOUGH = 8, 1e-4
# Approximate costs on a CPU, relative to a multiplication in a large matrix product: of one in a
# small decomposition, and of assembling a number of an equation.
_DECOMPOSED, _ASSEMBLED = 8.0, 2000.0


def first_factor(matrix: Tensor, weight: Tensor, right: Tensor, cover: Pattern) -> Tensor:
    """The weight K_1 that minimizes ||matrix - K_1 right||, from its present value.

    Args:
        matrix: [M, N], float64.
        weight: [a, b, c, d], with M = a*b*d.
        right: [a*c*d, N].
        cover: A pattern that holds the support of right.
    """
    a, b, c, d = weight.shape
    (outer, inner), features = matrix.shape, right.shape[0]
    # Multiplications by right's support, or by all of right class by class.
    if features * cover.c * (cover.b + outer) < (features + outer) * c * inner:
        after = on_support(right, cover)
        products = torch.einsum("imkj,inkj->imnj", after, after)
        gram = on_support(to_dense(products), Pattern(a, c, c, d))
        gram = gram.permute(0, 3, 1, 2).reshape(a * d, c, c)
        goals = on_support(ks_reference(matrix, after), Pattern(a, b, c, d))
        goals = goals.permute(0, 3, 1, 2).reshape(a * d, b, c)
    else:
        # -> [a*d, ...]: a class of rows of K_1 for each (i, j)
        targets = matrix.reshape(a, b, d, -1).transpose(1, 2).reshape(a * d, b, -1)
        rows = right.reshape(a, c, d, -1).transpose(1, 2).reshape(a * d, c, -1)
        gram, goals = rows @ rows.mT, targets @ rows.mT
    own = weight.permute(0, 3, 1, 2).reshape(a * d, b, c)
    change = solved(gram, (goals - own @ gram).mT).mT
    return (own + change).reshape(a, d, b, c).permute(0, 2, 3, 1)


def solved(gram: Tensor, residual: Tensor) -> Tensor:
    """The solution [..., n, m] of ``gram`` @ x = ``residual``; gram is semidefinite [..., n, n].

    It is zero where a matrix is indefinite by rounding: then the weights do not change.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = _RIDGE * diagonal.mean(-1, keepdim=True)
    ridge = ridge.where(ridge > 0, 1.0)
    lower, failed = torch.linalg.cholesky_ex(gram + torch.diag_embed(ridge.expand_as(diagonal)))
    solution = torch.cholesky_solve(residual, lower)
    return solution.where(failed[..., None, None] == 0, 0.0)


@dataclass(frozen=True)
class _Equations:
    """Equations with the same number of weights each.

    Args:
        weights: [equations, size], places in the flat weight.
        left, right: [equations], the classes of L's columns and R's rows.
        columns, rows: [equations, size], places in these classes.
    """

    weights: Tensor
    left: Tensor
    right: Tensor
    columns: Tensor
    rows: Tensor


class Between:
    """An inner factor, with others on both sides.

    Args:
        left: A pattern that contains the support of L.
        pattern: That of the factor.
        right: A pattern that contains the support of R.
        device: Device of the computation.
    """

    def __init__(
        self, left: Pattern, pattern: Pattern, right: Pattern, device: torch.device
    ) -> None:
        self._left, self._pattern, self._right = left, pattern, right
        self._device = device

    def refitted(self, matrix: Tensor, weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """A weight K that minimizes, or at least reduces, ||matrix - left K right||.

        Args:
            matrix: [M, N], float64.
            weight: [a, b, c, d], its present value.
            left: [M, a*b*d].
            right: [a*c*d, N].
        """
        before, after = on_support(left, self._left), on_support(right, self._right)
        goal = ks_reference(times(before.transpose(1, 2), matrix), after)
        goal = on_support(goal, self._pattern)
        # L's columns and R's rows, multiplied class by class: [a, c, c, d] and [a, b, b, d]
        left_gram = torch.einsum("ikmj,iknj->imnj", before, before)
        right_gram = torch.einsum("imkj,inkj->imnj", after, after)
        solve = self._directly if self._is_small else self._iteratively
        return solve(weight, goal, left_gram, right_gram)

    def _directly(
        self, weight: Tensor, goal: Tensor, left_gram: Tensor, right_gram: Tensor
    ) -> Tensor:
        # [classes, places, places]
        lefts = left_gram.permute(0, 3, 1, 2).flatten(0, 1)
        rights = right_gram.permute(0, 3, 1, 2).flatten(0, 1)
        now, towards = weight.flatten(), goal.flatten()
        updated = now.clone()
        for group in self._equations:
            count, size = group.weights.shape
            step = max(1, _AT_A_TIME // (size * size))
            for at in range(0, count, step):
                part = slice(at, at + step)
                columns, rows = group.columns[part], group.rows[part]
                gram = lefts[group.left[part, None, None], columns[:, :, None], columns[:, None]]
                gram = gram * rights[group.right[part, None, None], rows[:, :, None], rows[:, None]]
                own = now[group.weights[part]].unsqueeze(2)
                residual = towards[group.weights[part]].unsqueeze(2) - gram @ own
                updated[group.weights[part]] = (own + solved(gram, residual)).squeeze(2)
        return updated.reshape(weight.shape)

    def _iteratively(
        self, weight: Tensor, goal: Tensor, left_gram: Tensor, right_gram: Tensor
    ) -> Tensor:
        """A better weight by conjugate gradients scaled with the diagonal."""

        def curvature(direction: Tensor) -> Tensor:
            moved = ks_reference(to_dense(direction), right_gram)
            return on_support(times(left_gram, moved), self._pattern)

        a, b, c, d = self._pattern.weight_shape
        # [a, c, d] and [a, b, d] of the other patterns: features in their order
        columns = left_gram.diagonal(dim1=1, dim2=2).transpose(1, 2).reshape(a, b, 1, d)
        rows = right_gram.diagonal(dim1=1, dim2=2).transpose(1, 2).reshape(a, 1, c, d)
        scale = (columns * rows).clamp(min=torch.finfo(weight.dtype).tiny)
        residual = goal - curvature(weight)
        towards = residual / scale
        direction, now = towards, (residual * towards).sum()
        enough, rounding = _ENOUGH * now, 1e-30 * goal.square().sum()
        for _ in range(_STEPS):
            if not (now > enough and residual.square().sum() > rounding):
                break
            curved = curvature(direction)
            bend = (direction * curved).sum()
            if not bend > 0:
                break
            step = now / bend
            weight = weight + step * direction
            residual = residual - step * curved
            towards = residual / scale
            before, now = now, (residual * towards).sum()
            direction = towards + (now / before) * direction
        return weight

    @functools.cached_property
    def _is_small(self) -> bool:
        """Whether solving the equations takes no more work than conjugate gradients."""
        sizes = torch.unique(self._equation_of_weight, return_counts=True)[1].double()
        inner, features = self._pattern.shape
        steps = 2.0 * _STEPS * inner * features * (self._left.c + self._right.b)
        work = _DECOMPOSED * (sizes**3).sum() / 3 + _ASSEMBLED * (sizes**2).sum()
        return bool(work <= steps and sizes.max() ** 2 <= _AT_A_TIME)

    @functools.cached_property
    def _equation_of_weight(self) -> Tensor:
        """The pair of classes of each weight: [a*b*c*d]."""
        column, row = self._features
        left, right = self._left, self._right
        columns = column // (left.c * left.d) * left.d + column % left.d
        rows = row // (right.b * right.d) * right.d + row % right.d
        return columns * (right.a * right.d) + rows

    @property
    def _features(self) -> tuple[Tensor, Tensor]:
        """The column of L and the row of R of each weight: [a*b*c*d] each."""
        a, b, c, d = self._pattern.weight_shape
        i, k, l, j = torch.meshgrid(*map(torch.arange, (a, b, c, d)), indexing="ij")
        return (i * b * d + k * d + j).flatten(), (i * c * d + l * d + j).flatten()

    @functools.cached_property
    def _equations(self) -> list[_Equations]:
        """All equations, by size."""
        pair, owner, count = torch.unique(
            self._equation_of_weight, return_inverse=True, return_counts=True
        )
        by_owner = torch.argsort(owner, stable=True)
        first = count.cumsum(0) - count
        column, row = self._features
        classes = self._right.a * self._right.d
        groups = []
        for size in count.unique().tolist():
            chosen = (count == size).nonzero().squeeze(1)
            weights = by_owner[first[chosen].unsqueeze(1) + torch.arange(size)]
            parts = (
                weights,
                pair[chosen] // classes,
                pair[chosen] % classes,
                column[weights] // self._left.d % self._left.c,
                row[weights] // self._right.d % self._right.b,
            )
            groups.append(_Equations(*(part.to(self._device) for part in parts)))
        return groups
