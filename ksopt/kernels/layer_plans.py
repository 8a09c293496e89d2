"""Plans of a layer: one kernel for all of it where that is the fastest, or one per factor."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ksopt.kernels import host_plans
from ksopt.kernels.autotuner import Decision
from ksopt.kernels.candidate import FACTORS, Candidate, ChainCall
from ksopt.kernels.operands import Operands, has_known_weights, is_real, problem_of
from ksopt.kernels.plan import ExecutionPlan
from ksopt.kernels.plan_autotuner import call_of, decision_of
from ksopt.kernels.planner import plan_for


def whole_call(
    operands: Operands,
    activation: str,
    batch_last: bool,
    siblings: int,
    check: Callable[[], object] | None = None,
    in_float32: bool = False,
) -> ChainCall | None:
    """The kernel that computes a whole layer in one launch; None for one launch per factor.

    Args:
        operands: of the layer.
        activation: one of `ksopt.epilogue.ACTIVATIONS`; of two siblings, or of ``GATES``.
        batch_last: the layout.
        siblings: how many chains the weights are of.
        check: raises where the operands do not fit together; None where they are known to. It is
            called once for operands of such shapes, dtypes and devices.
        in_float32: whether the result of 16-bit operands is.
    """
    layer = (operands, activation, batch_last, siblings)
    decision, is_final = _decision_of_call(*layer, check, in_float32)
    if is_final:
        host_plans.register(*layer, decision, in_float32)
    call: ChainCall | None = None if decision is None else call_of(decision, operands)
    return call


def is_whole(
    operands: Operands,
    activation: str,
    batch_last: bool,
    siblings: int,
    check: Callable[[], object] | None = None,
    repacked: bool = False,
    in_float32: bool = False,
) -> bool:
    """Whether a plan of one launch takes operands, which may be fake: then it is predicted.

    Of fake ones also whether it is several launches with nothing behind them.

    Args:
        operands, activation, batch_last, siblings, check, in_float32: as for `whole_call`.
        repacked: of fake ones, whether weights will be prepared at each call.
    """
    x = operands.x
    if is_real(x):
        layer = (operands, activation, batch_last, siblings)
        decision, _ = _decision_of_call(*layer, check, in_float32)
        return decision is not None and call_of(decision, operands) is not None
    plan = plan_of_fakes(operands, activation, batch_last, siblings, repacked, in_float32)
    return plan is not None and plan.is_one_operator


def plan_of_fakes(
    operands: Operands,
    activation: str = "none",
    batch_last: bool = False,
    siblings: int = 1,
    repacked: bool = False,
    in_float32: bool = False,
) -> ExecutionPlan | None:
    """The `plan_of` the problem of operands, which may be fake; None where it is unknown."""
    if not has_known_weights(operands):
        return None
    problem = problem_of(operands, activation, batch_last, siblings, in_float32)
    return plan_for(problem, operands.x, repacked)


def chosen_for_repacked(
    operands: Operands, siblings: int, activation: str = "none"
) -> tuple[Candidate | None, bool]:
    """The kernel for a whole layer whose weights change; None for one launch per factor.

    Args:
        operands: of chains, and a bias or none.
        siblings: how many chains.
        activation: behind them.

    Returns:
        The kernel, and whether later calls may use it without another decision.
    """
    decision, is_final = _decision_of_call(operands, activation, False, siblings)
    if decision is None or decision.repacked.name == FACTORS:
        return None, is_final
    return decision.repacked.candidate, is_final


def _decision_of_call(
    operands: Operands,
    activation: str,
    batch_last: bool,
    siblings: int,
    check: Callable[[], object] | None = None,
    in_float32: bool = False,
) -> tuple[Decision | None, bool]:
    """The decision for a layer (None: one launch per factor); whether later calls may use it."""
    what = (batch_last, activation, siblings, in_float32)
    make = functools.partial(problem_of, operands, activation, batch_last, siblings, in_float32)
    return decision_of(operands, what, make, check)
