"""A race between the plans of a problem: one launch, or the launches of its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt.kernels import factor_pairs, registry
from ksopt.kernels.autotuner import Decision, measured
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.operands import Operands
from ksopt.kernels.problem import ProblemKey
from ksopt.kernels.tuning_cache import Record
from ksopt.measure.accuracy import Ahead, Around, checking_chain


def race(
    key: ProblemKey,
    operands: Operands,
    budget_s: float,
    previous: Record | None = None,
) -> Decision:
    """Time the plans of a problem on its operands, and choose the fastest.

    Every result is compared with the float64 truth before its plan is timed.

    Args:
        key: what is decided for.
        operands: with that key.
        budget_s: seconds for the timing; compilation comes on top.
        previous: what was recorded before: its choice stays where it is not beaten.
    """
    problem, device = key.problem, operands.x.device
    ahead = None
    if problem.second is not None:
        hidden = _detached(operands.hidden_bias)
        ahead = Ahead(len(problem.chain), hidden, problem.epilogue.activation)
    around = Around(
        _detached(operands.bias),
        problem.layers()[-1].epilogue.activation,
        _detached(operands.residual),
        problem.siblings,
        ahead,
    )
    with torch.no_grad():
        check, x, weights, around = checking_chain(
            operands.x.detach(),
            [weight.detach() for weight in operands.weights],
            problem.batch_last,
            around,
        )
        hidden = None if around.ahead is None else around.ahead.bias
        own = Operands(x, weights, around.bias, around.residual, hidden)
        # The factors, or the layers' plans, are chosen before they race.
        registry.rule(problem).build(x.get_device())(*own.arguments(problem))
        spec = backend_of(device.type).spec(device)
        pairs = factor_pairs.candidates(key, x.numel() // x.shape[-1], device)
        return measured(key, own, device, spec, budget_s, check.judge, previous, pairs)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
