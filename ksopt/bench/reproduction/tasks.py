"""The tasks of a run, each measured by itself on one device, and the order to begin them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ksopt.bench.reproduction import module_cases
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.reproduction.tables_and_figures import ENERGY, MODELS, PRODUCTS, SIZES
from ksopt.bench.request import Subject as Product
from ksopt.patterns.chain import Chain


@dataclass(frozen=True)
class Task:
    """The product of a pattern, its energy, or a module, in one dtype.

    Attributes:
        part: the part that it belongs to.
        name: the pattern's text, or the case's name.
    """

    part: Part
    name: str

    def __str__(self) -> str:
        return f"{self.part.name}: {self.name}"

    @property
    def is_product(self) -> bool:
        """Whether it multiplies by a pattern, for its time or its energy."""
        return self.part.kind in (PRODUCTS, ENERGY)

    def product(self, request: PaperRequest) -> Product:
        """The product of a pattern, as `ksopt bench kernels` names it."""
        return Product(Chain.parse(self.name), request.batch)


def tasks_of(part: Part) -> tuple[Task, ...]:
    """All tasks of a part, in the order to measure them."""
    names = map(str, part.patterns) if part.patterns else module_cases.names(part.kind)
    return tuple(Task(part, name) for name in names)


def in_turns(request: PaperRequest, left: Iterable[Task]) -> list[Task]:
    """The tasks in the order to begin them.

    Parts in the paper's dtypes come first, those in other dtypes after them. Of both the modules
    and models come first: a table lacks the cells of those that are left out. Then products and
    energies take turns, so that at any time each part has had the same share of its sample, which
    is in random order. Their results do not decide when the time is up.

    Args:
        request: of the run.
        left: the tasks that are not measured yet, those of a part in its order.
    """
    of_parts: dict[Part, list[Task]] = {}
    for task in left:
        of_parts.setdefault(task.part, []).append(task)
    keyed = [
        (request.is_extra(part), part.kind not in (MODELS, SIZES), _turn(place, own), number, task)
        for number, (part, own) in enumerate(of_parts.items())
        for place, task in enumerate(own)
    ]
    return [task for *_, task in sorted(keyed, key=lambda one: one[:-1])]


def _turn(place: int, own: Sequence[Task]) -> float:
    """The share of a part that is measured once half of this task is."""
    return (place + 0.5) / len(own)
