"""The launches that compute a problem: one for all of it, or one per factor and PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass

from ksopt.kernels.explain import ChoiceReport
from ksopt.kernels.problem import EMPTY, Epilogue, Problem


@dataclass(frozen=True)
class Launch:
    """One launch of a plan.

    Attributes:
        problem: what it computes, of the plan's problem.
        choice: by which kernel, or which of PyTorch's ways, and why.
    """

    problem: Problem
    choice: ChoiceReport

    @property
    def us(self) -> float | None:
        """The measured time, or the predicted time where it was not measured."""
        choice = self.choice
        return choice.predicted_us if choice.measured_us is None else choice.measured_us


@dataclass(frozen=True)
class ExecutionPlan:
    """The launches that compute a problem.

    Attributes:
        problem: what is computed.
        batch: rows of x.
        launches: in the order in which they run; those of siblings one after another.
        behind: what PyTorch's own operations do after the last launch.
        within: what the last launch of several does beside its factor's product.
        between: what they do after the first of two layers, where each has a plan of its own.
    """

    problem: Problem
    batch: int
    launches: tuple[Launch, ...]
    behind: Epilogue = EMPTY
    between: Epilogue = EMPTY
    within: Epilogue = EMPTY

    @property
    def is_whole(self) -> bool:
        """Whether one launch computes the whole problem, as a candidate of its own."""
        apart = self.within.is_empty and self.behind.is_empty
        return len(self.launches) == 1 and apart

    @property
    def is_one_operator(self) -> bool:
        """Whether a layer is best one operator in a graph: there is nothing behind its launches."""
        return self.is_whole or (self.behind.is_empty and not self.within.is_empty)

    @property
    def predicted_us(self) -> float | None:
        """The sum of the launches' predicted times; None where one has none."""
        return _sum([launch.choice.predicted_us for launch in self.launches])

    @property
    def measured_us(self) -> float | None:
        """The sum of the launches' measured times; None where one was not measured."""
        return _sum([launch.choice.measured_us for launch in self.launches])

    @property
    def ways(self) -> tuple[str, ...]:
        """The candidate of each launch: a kernel family, or one of PyTorch's implementations."""
        return tuple(launch.choice.way for launch in self.launches)


def _sum(times_us: list[float | None]) -> float | None:
    known = [us for us in times_us if us is not None]
    return sum(known) if len(known) == len(times_us) else None
