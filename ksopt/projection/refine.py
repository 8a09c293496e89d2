"""Refinement of all factors at once by gradients of the squared error (L-BFGS)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt.projection.products import product

# Steps remembered for the approximation of the curvature.
_HISTORY = 20


def refine(matrix: Tensor, weights: Sequence[Tensor], steps: int) -> tuple[list[Tensor], int]:
    """Reduce ||matrix - K_1 ... K_L||² from initial weights.

    Args:
        matrix: [M, N], float64.
        weights: initial ones, float64, left to right.
        steps: maximal number of steps.

    Returns:
        The weights, never worse than the initial ones, and the number of steps.
    """
    norm = matrix.norm()
    if norm == 0:
        return list(weights), 0
    goal = matrix / norm
    # Equal shares of the scale: the gradient of each factor is then of a like size.
    scale = norm ** (1 / len(weights))
    moved = [(weight / scale).contiguous().clone().requires_grad_() for weight in weights]
    optimiser = torch.optim.LBFGS(
        moved,
        max_iter=steps,
        history_size=_HISTORY,
        tolerance_grad=1e-14,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (goal - product(moved)).square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    refined = [weight.detach() * scale for weight in moved]
    steps_done = int(optimiser.state[moved[0]]["n_iter"])
    if _error(matrix, refined) < _error(matrix, weights):
        return refined, steps_done
    return list(weights), steps_done


def _error(matrix: Tensor, weights: Sequence[Tensor]) -> float:
    error = (matrix - product(weights)).norm().item()
    return error if error == error else float("inf")
