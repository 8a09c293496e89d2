"""How far a pass of a model is from the same in float64, and how far it may be.

What ksopt computes may be as far from the truth as twice the larger of the uncompiled model's and
Inductor's own error: another order of summation rounds differently, a wrong product does not stay
within that. Errors are compared as those of every product are: see measure/accuracy.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ksopt.measure.accuracy import allowed_error, relative_error

_GRADIENT = "gradient of "
_NOTHING = 1e-6  # of the norm of all gradients
# PyTorch's own compiled ways may round as much worse than its uncompiled model; more is wrong.
_INDUCTORS_SHARE = 8.0
# Where Inductor's own error is not measured, it is taken for no more than so many times the other.
_WITHOUT_INDUCTOR = 2.0


@dataclass(frozen=True)
class Outputs:
    """What a call computed.

    Args:
        logits: of the model.
        loss: of a training step.
        gradients: of a training step, by parameter.
    """

    logits: Tensor
    loss: Tensor | None = None
    gradients: dict[str, Tensor] | None = None


def relative_errors(outputs: Outputs, truth: Outputs) -> dict[str, float]:
    """Relative errors: the norm of the difference from the truth over the truth's norm.

    Of each parameter's gradient, too, but for those that are nothing beside the others (in
    attention, a bias of the keys changes no result): they are all rounding.
    """
    errors = {"logits": relative_error(outputs.logits, truth.logits)}
    if truth.loss is None or outputs.loss is None:
        return errors
    errors["loss"] = relative_error(outputs.loss, truth.loss)
    mine, theirs = outputs.gradients or {}, truth.gradients or {}
    norms = {name: float(gradient.norm()) for name, gradient in theirs.items()}
    wrong = {name: float((mine[name].double() - one).norm()) for name, one in theirs.items()}
    whole = math.hypot(*norms.values())
    errors["gradients"] = math.hypot(*wrong.values()) / whole
    return errors | {
        _GRADIENT + name: wrong[name] / norm
        for name, norm in norms.items()
        if norm > _NOTHING * whole
    }


def with_worst_gradient(errors: dict[str, float]) -> dict[str, float]:
    """The errors of all, and the worst of single parameters' gradients."""
    worst = [error for what, error in errors.items() if what.startswith(_GRADIENT)]
    kept = {what: error for what, error in errors.items() if not what.startswith(_GRADIENT)}
    return kept | ({"worst gradient": max(worst)} if worst else {})


def faults_of(
    errors: dict[str, float],
    references: Sequence[dict[str, float]],
    eps: float,
    is_pytorch: bool,
) -> list[str]:
    """What is wrong with a way's results, in words.

    Args:
        errors: of the way.
        references: of the uncompiled model; and of Inductor's, where those are measured.
        eps: of the model's dtype.
        is_pytorch: whether the way is PyTorch's own.
    """
    faults = []
    for what, error in errors.items():
        theirs = max(one[what] for one in references)
        allowed = allowed_error(theirs, eps) * (_WITHOUT_INDUCTOR if len(references) == 1 else 1)
        if is_pytorch:
            allowed = _INDUCTORS_SHARE * max(references[0][what], eps)
        if not error <= allowed:
            faults.append(f"{what}: relative error {error:.2g}, allowed {allowed:.2g}")
    return faults
