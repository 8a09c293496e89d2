"""The plan of a problem, without computing it: measured, recorded or predicted.

Calls that compute use plan_autotuner.py instead, which measures where no choice is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt import settings
from ksopt.kernels import plan_autotuner, registry
from ksopt.kernels.backends.base import BACKENDS, backend_of
from ksopt.kernels.candidate import APART
from ksopt.kernels.explain import ChoiceReport, choice_report, from_record
from ksopt.kernels.families.base import CHAIN_FAMILIES
from ksopt.kernels.operands import size_hint
from ksopt.kernels.plan import ExecutionPlan, Launch
from ksopt.kernels.problem import DeviceSpec, Problem


def plan_of(
    problem: Problem,
    batch: int,
    *,
    device: torch.device | str = "cuda",
    repacked: bool = False,
    spec: DeviceSpec | None = None,
) -> ExecutionPlan:
    """The plan of a problem with contiguous operands, as far as it is known without computing.

    Args:
        problem: what is computed.
        batch: rows of x.
        device: where.
        repacked: whether the weights change from call to call, as in training.
        spec: predict for this device, which need not be here, and look up nothing.

    Example:
        >>> from ksopt.kernels.problem import Epilogue
        >>> from ksopt.patterns.chain import Chain
        >>> h200 = DeviceSpec((9, 0), 132, 228 * 1024)
        >>> chain = Chain.parse("(1,192,48,2)*(2,48,192,1)")
        >>> problem = Problem(chain, "float16", False, epilogue=Epilogue(bias=True))
        >>> plan = plan_of(problem, 8192, spec=h200)
        >>> plan.ways, plan.behind.names
        (('chain_wgmma16',), ())
        >>> plan = plan_of(Problem(chain, "float32", False), 8192, spec=h200)
        >>> [str(launch.problem.chain) for launch in plan.launches]
        ['(2,48,192,1)', '(1,192,48,2)']
    """
    place = torch.device(device)
    whole = whole_choice(problem, batch, place, repacked, spec)
    if whole is not None and whole.way not in APART:
        return ExecutionPlan(problem, batch, (Launch(problem, whole),))
    if problem.second is not None:
        one, two = (
            plan_of(layer, batch, device=device, repacked=repacked, spec=spec)
            for layer in problem.layers()
        )
        together = (*one.launches, *two.launches)
        return ExecutionPlan(problem, batch, together, two.behind, one.behind)
    launches = [
        Launch(factor, choice_of_factor(factor, batch, place, repacked, spec))
        for factor in reversed(problem.factors())
    ]
    together = tuple(launches * problem.siblings)
    within, behind = registry.within(problem, launches[-1].choice.way)
    return ExecutionPlan(problem, batch, together, behind, within=within)


def choice_of_factor(
    factor: Problem,
    batch: int,
    device: torch.device,
    repacked: bool = False,
    spec: DeviceSpec | None = None,
) -> ChoiceReport:
    """The known or predicted choice for one factor's product.

    Args:
        factor: its problem.
        batch, device, repacked, spec: as for `plan_of`.
    """
    return choice_report(
        factor.pattern,
        factor.dtype,
        batch,
        batch_last=factor.batch_last,
        device=device,
        repacked=repacked,
        exact=factor.exact,
        spec=spec,
    )


def whole_choice(
    problem: Problem,
    batch: int,
    device: torch.device,
    repacked: bool = False,
    spec: DeviceSpec | None = None,
) -> ChoiceReport | None:
    """The known or predicted choice for a whole problem, which may be `FACTORS`.

    Args:
        problem, batch, device, repacked, spec: as for `plan_of`.

    Returns:
        None where nothing computes all of it, unless by a pair of kernels that were timed together,
        and for one factor's product alone.
    """
    mode = settings.tuning()
    if mode == "measure" and torch.are_deterministic_algorithms_enabled():
        mode = "model"
    if mode == "off" or not CHAIN_FAMILIES or problem.is_factor:
        return None
    backend = backend_of(device.type if spec is None else "cuda")
    key = backend.key(problem, batch)
    own_spec = backend.spec(device) if spec is None else spec
    is_known = spec is None and mode == "measure"
    if not plan_autotuner.has_rivals(key, own_spec) and not (
        is_known and plan_autotuner.has_pair(key, device)
    ):
        return None
    if is_known:
        known = plan_autotuner.known_record(key, device)
        if known is not None:
            return from_record(*known, repacked)
    several = registry.best_predicted(problem, batch, own_spec)
    best = next(one for one in several if not (repacked and one.takes_parameters))
    reason = f"predicted to take {best.predicted_us:.1f} us"
    return ChoiceReport(
        key, batch, best.name, best.config, best.predicted_us, None, (), "model", reason
    )


def plan_for(problem: Problem, x: Tensor, repacked: bool = False) -> ExecutionPlan | None:
    """The `plan_of` a problem with the rows of x, which may be fake; None if they are unknown."""
    batch = (size_hint(x.numel()) or 0) // problem.chain.in_features
    if problem.is_factor or batch == 0 or x.device.type not in BACKENDS:
        return None
    return plan_of(problem, batch, device=x.device, repacked=repacked)
