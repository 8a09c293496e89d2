"""The error of a model's pass against float64, and the largest allowed error.

ksopt's error may be up to twice the larger of the uncompiled model's and Inductor's own error:
another order of summation rounds differently, and a wrong product exceeds that. Errors are
compared as those of every product are: see measure/accuracy.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ksopt.measure.accuracy import allowed_error, fault_beyond, relative_error

_GRADIENT = "gradient of "
_NOTHING = 1e-6  # of the norm of all gradients
# The allowed multiples of an error: for ksopt, of the larger of the uncompiled model's and
# Inductor's, as for every product; of the uncompiled model's alone, as Inductor's may be twice as
# large; for PyTorch's compiled ways, of the uncompiled model's.
_OF_BOTH, _OF_UNCOMPILED, _OF_PYTORCHS_OWN = 2.0, 4.0, 8.0
_FAULT = "relative error {error:.2g}, allowed {allowed:.2g}"


@dataclass(frozen=True)
class Outputs:
    """The results of a call.

    Args:
        logits: of the model.
        loss: of a training step.
        gradients: of a training step, by parameter.
    """

    logits: Tensor
    loss: Tensor | None = None
    gradients: dict[str, Tensor] | None = None


def relative_errors(outputs: Outputs, truth: Outputs) -> dict[str, float]:
    """Relative errors by result: the norm of the difference from the truth over the truth's norm.

    Gradients of single parameters are included, except those that are negligible beside the others
    (in attention, a bias of the keys changes no result): those are pure rounding.
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
    """The errors with the worst one in place of those of single parameters' gradients."""
    worst = [error for what, error in errors.items() if what.startswith(_GRADIENT)]
    totals = {what: error for what, error in errors.items() if not what.startswith(_GRADIENT)}
    return totals | ({"worst gradient": max(worst)} if worst else {})


def faults_of(
    errors: dict[str, float],
    references: Sequence[dict[str, float]],
    eps: float,
    is_pytorch: bool,
) -> list[str]:
    """The faults of a way's results, in words.

    Args:
        errors: of the way.
        references: errors of the uncompiled model, and Inductor's, where they are measured.
        eps: of the model's dtype.
        is_pytorch: whether the way is PyTorch's own.
    """
    faults = []
    for what, error in errors.items():
        theirs = max(one[what] for one in references)
        allowed = allowed_error(theirs, eps, _OF_UNCOMPILED if len(references) == 1 else _OF_BOTH)
        if is_pytorch:
            allowed = allowed_error(max(references[0][what], eps), eps, _OF_PYTORCHS_OWN)
        fault = fault_beyond(error, allowed, _FAULT)
        if fault is not None:
            faults.append(f"{what}: {fault}")
    return faults
