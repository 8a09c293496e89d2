"""Plans of two layers: one kernel for both where that is the fastest, or a plan per layer.

They are chosen and stored as those of a layer are: see plan_autotuner.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from ksopt.kernels import host_plans, plan_autotuner, planner
from ksopt.kernels.candidate import MlpCall
from ksopt.kernels.operands import Operands, has_known_weights, is_real, problem_of
from ksopt.kernels.problem import Problem, SecondLayer


@dataclass(frozen=True)
class Mlp:
    """The computation of two layers, batch first, without their operands.

    Attributes:
        factors: of the first layer's chain, whose weights come first.
        hidden_activation: the first layer's.
        activation: the second layer's.
    """

    factors: int
    hidden_activation: str = "none"
    activation: str = "none"

    def problem_of(self, operands: Operands) -> Problem:
        """The problem of operands, at torch's present precision."""
        x, weights = operands.x, operands.weights
        own, others = weights[: self.factors], weights[self.factors :]
        ahead = Operands(x, own, operands.hidden_bias)
        first = problem_of(ahead, self.hidden_activation, False, 1)
        behind = Operands(x, others, operands.bias, operands.residual)
        second = problem_of(behind, self.activation, False, 1)
        return replace(first, second=SecondLayer(second.chain, second.epilogue))


def whole_call(
    operands: Operands, mlp: Mlp, check: Callable[[], object] | None = None
) -> MlpCall | None:
    """The kernel that computes both layers in one launch; None for a plan per layer.

    Args:
        operands: of the layers.
        mlp: what they compute.
        check: as for `layer_plans.whole_call`.
    """
    make = functools.partial(mlp.problem_of, operands)
    decision, is_final = plan_autotuner.decision_of(operands, ("mlp", mlp), make, check)
    if is_final:
        how = (mlp.factors, mlp.hidden_activation, mlp.activation)
        host_plans.register_mlp(operands, *how, decision)
    call: MlpCall | None = None if decision is None else plan_autotuner.call_of(decision, operands)
    return call


def is_whole(operands: Operands, mlp: Mlp, check: Callable[[], object]) -> bool:
    """Whether a plan of one launch takes operands, which may be fake: then it is predicted.

    Args:
        operands, mlp, check: as for `whole_call`.
    """
    if is_real(operands.x):
        return whole_call(operands, mlp, check) is not None
    check()
    if not has_known_weights(operands):
        return False
    plan = planner.plan_for(mlp.problem_of(operands), operands.x)
    return plan is not None and plan.is_whole
