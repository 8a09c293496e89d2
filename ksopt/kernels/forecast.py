"""Predicted choices for a problem on any GPU, and the resources of its compiled kernels.

Times are predictions. The cost models' rates are those of a multiprocessor of an H200, on which
they were fitted: on another GPU the order of the candidates is worth more than the microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ksopt.jit import arch, nvrtc, resources
from ksopt.jit.resources import Resources
from ksopt.kernels import planner, registry
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.plan import ExecutionPlan, Launch
from ksopt.kernels.problem import RESERVED_SHARED, DeviceSpec, Problem


@dataclass(frozen=True)
class Compiled:
    """A launch's kernel as it is compiled for a GPU.

    Attributes:
        resources: of the kernel, and of the kernels that prepare its operands.
        dynamic_shared_bytes: dynamic shared memory of a block.
        blocks: blocks that a multiprocessor is meant to run at a time.
        fits: whether the shared memory of these blocks fits. (Their registers always do: ptxas
            spills values beyond them.)
    """

    resources: tuple[Resources, ...]
    dynamic_shared_bytes: int
    blocks: int
    fits: bool


@dataclass(frozen=True)
class Forecast:
    """The prediction for a problem on a GPU.

    Attributes:
        device: the GPU.
        plan: what is chosen.
        pytorch_us: the least that PyTorch's own ways are predicted to take.
        rivals: for each launch, all its candidates, best predicted first.
        behind_us: what PyTorch's operations after the last launch are predicted to take.
    """

    device: DeviceSpec
    plan: ExecutionPlan
    pytorch_us: float
    rivals: tuple[tuple[Candidate, ...], ...]
    behind_us: float


def forecast(problem: Problem, batch: int, device: DeviceSpec) -> Forecast:
    """The choice for a problem on a GPU, by the cost models alone.

    Args:
        problem: what is computed.
        batch: rows of x.
        device: the GPU.
    """
    plan = planner.plan_of(problem, batch, spec=device)
    rivals = [tuple(registry.best_predicted(one.problem, batch, device)) for one in plan.launches]
    behind = 0.0
    if not plan.behind.is_empty:
        rest = replace(problem, epilogue=plan.behind)
        behind = registry.behind_us(rest, batch, device.multiprocessors)
    return Forecast(device, plan, _pytorch_us(problem, batch, device), tuple(rivals), behind)


def _pytorch_us(problem: Problem, batch: int, device: DeviceSpec) -> float:
    us = sum(
        min(one.predicted_us for one in registry.pytorch(factor, batch, device.multiprocessors))
        for factor in problem.factors()
    )
    return us * problem.siblings + registry.behind_us(problem, batch, device.multiprocessors)


def target(device: DeviceSpec) -> str:
    """The compilation target of a GPU, such as ``sm_90a``.

    Raises:
        UnavailableError: NVRTC or its Python bindings are not installed.
    """
    return arch.for_capability(*device.capability, nvrtc.supported_capabilities())


def compiled(launch: Launch, device: DeviceSpec) -> Compiled | None:
    """The kernels of a launch, compiled for a GPU; None where PyTorch alone multiplies.

    Raises:
        UnavailableError, CompilationError: as `nvrtc.cubin` does.
    """
    choice = launch.choice
    candidate = registry.restored(launch.problem, choice.way, choice.config, choice.batch, device)
    assert candidate is not None, choice
    sources = candidate.sources()
    if not sources:
        return None
    kernels = [one for source in sources for one in resources.of_source(source, target(device))]
    family, dynamic, blocks = candidate.family, 0, 1
    if family is not None:
        dynamic = family.shared_bytes(launch.problem, candidate.tile)
        blocks = candidate.tile.blocks
    static = max(one.shared_bytes for one in kernels)
    fits = blocks * (dynamic + static + RESERVED_SHARED) <= device.shared_bytes
    return Compiled(tuple(kernels), dynamic, blocks, fits)
