"""All ways to multiply on a CUDA device: the families' tiles, the general kernel, PyTorch's own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from ksopt.errors import KsoptError, UnavailableError
from ksopt.kernels.families import naive, pytorch_ops
from ksopt.kernels.families.base import FAMILIES, Family, Machine, Tile, best_tiles
from ksopt.kernels.launcher import Launcher
from ksopt.kernels.problem import Problem
from ksopt.kernels.problem_key import Rows


class Call(Protocol):
    """What multiplies: (x, weight) -> y; written into ``out`` where that is given (`cuda.run`)."""

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor: ...


NAIVE = "naive"
_COMPILERS = 8

# The general kernel is left out where it is predicted to take this many times the best tile:
# without tensor cores it takes up to 40 times as long, and finding out would take longer than all
# else.
_NAIVE_FAR = 2.0


@dataclass(frozen=True)
class Way:
    """One way to compute a problem, not built yet.

    Attributes:
        name: a family's name, ``general``, or the name of one of PyTorch's ways (a baseline).
        problem: what it computes.
        predicted_us: for the batch that it was proposed for.
        tile: of a family; None for all else.
    """

    name: str
    problem: Problem
    predicted_us: float
    tile: Tile | None = None

    @property
    def config(self) -> dict[str, Any] | None:
        """The tile's configuration as plain values."""
        return None if self.tile is None else asdict(self.tile.config)

    @property
    def label(self) -> str:
        """Name and configuration, for a person."""
        if self.config is None:
            return self.name
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.config.items())})"

    @property
    def is_pytorch(self) -> bool:
        """Whether it is one of PyTorch's own."""
        return self.tile is None and self.name != NAIVE

    @property
    def prepares(self) -> bool:
        """Whether the weight is prepared before the product."""
        if self.tile is not None:
            return self.tile.family.prepares(self.problem.pattern)
        return self.name != NAIVE and pytorch_ops.prepares(self.name, self.problem)

    def build(self, device: int, rows: Rows = "aligned") -> Call:
        """Compile and load what it needs on CUDA device ``device``.

        Args:
            device: its index.
            rows: of x; what takes others is compiled when the first of them come.

        Raises:
            UnavailableError, CompilationError: see :mod:`ksopt.jit`.
        """
        if self.tile is not None:
            call = self.tile.launcher(device)
            if rows != "aligned" and isinstance(call, Launcher):
                call.compile_fallback()
            return call
        if self.name == NAIVE:
            return naive.launcher(self.problem, device)
        return pytorch_ops.multiplier(self.name, self.problem)


def candidates(problem: Problem, batch: int, machine: Machine | None) -> list[Way]:
    """The ways worth timing: PyTorch's first, the simplest of all first; then by predicted time.

    Args:
        problem: what is to be computed.
        batch: rows of x.
        machine: the device; None where its driver cannot be asked, which leaves PyTorch's ways.
    """
    if machine is None:
        return pytorch(problem, batch, 1)
    tiles = [
        Way(tile.family.name, problem, tile.predicted_us, tile)
        for tile in best_tiles(problem, batch, machine)
    ]
    far_us = _NAIVE_FAR * min((way.predicted_us for way in tiles), default=math.inf)
    slow = [way for way in _general(problem, batch, machine) if way.predicted_us <= far_us]
    return [*pytorch(problem, batch, machine.multiprocessors), *tiles, *slow]


def best_predicted(problem: Problem, batch: int, machine: Machine | None) -> list[Way]:
    """The ways without timing, best predicted first: the first that can be built is taken."""
    if machine is None:
        return [_pytorch("bmm", problem, batch, 1)]
    tiles = [
        Way(tile.family.name, problem, tile.predicted_us, tile)
        for tile in best_tiles(problem, batch, machine, most=2)
    ]
    plain = pytorch(problem, batch, machine.multiprocessors)
    rivals = [*plain, *tiles, *_general(problem, batch, machine)]
    return sorted(rivals, key=lambda way: way.predicted_us)


def pytorch(problem: Problem, batch: int, multiprocessors: int) -> list[Way]:
    """PyTorch's own ways that make sense, the simplest first."""
    return [
        _pytorch(name, problem, batch, multiprocessors)
        for name in pytorch_ops.names(problem, "cuda")
    ]


def rule(problem: Problem) -> Way:
    """What is taken where nothing is to be chosen: PyTorch's batched product."""
    return _pytorch("bmm", problem, 1, 1)


def restored(
    problem: Problem, name: str, config: dict[str, Any] | None, batch: int, machine: Machine | None
) -> Way | None:
    """The way that a record names, if it still exists here; otherwise None.

    Args:
        problem: what is to be computed.
        name: a way's name.
        config: its tile's configuration as plain values, None where it has none.
        batch: rows of x, for the predicted time.
        machine: the device, as for `candidates`.
    """
    if config is None:
        multiprocessors = 1 if machine is None else machine.multiprocessors
        plain = pytorch(problem, batch, multiprocessors)
        if machine is not None:
            plain += _general(problem, batch, machine)
        return next((way for way in plain if way.name == name), None)
    family = next((family for family in FAMILIES if family.name == name), None)
    if family is None or machine is None or family.refusal(problem, machine) is not None:
        return None
    tile = _tile_of(family, problem, config, batch, machine)
    return None if tile is None else Way(name, problem, tile.predicted_us, tile)


def _tile_of(
    family: Family, problem: Problem, config: dict[str, Any], batch: int, machine: Machine
) -> Tile | None:
    for known in family.module.configs(problem, machine.multiprocessors):
        if vars(known) == config:  # plain values all: a tenth of what asdict takes
            return Tile(family, problem, known, family.predicted_us(problem, known, batch, machine))
    return None


def _pytorch(name: str, problem: Problem, batch: int, multiprocessors: int) -> Way:
    us = pytorch_ops.predicted_us(name, problem, batch, multiprocessors)
    return Way(name, problem, us)


def _general(problem: Problem, batch: int, machine: Machine) -> Iterable[Way]:
    if naive.supports(problem) is None:
        us = naive.predicted_us(problem, batch, machine.multiprocessors)
        yield Way(NAIVE, problem, us)


def built(ways: Sequence[Way], device: int, rows: Rows = "aligned") -> list[tuple[Way, Call]]:
    """The ways that can be built here, compiled side by side; of the others one warning each.

    Args:
        ways: to build.
        device, rows: as for `Way.build`.
    """

    def build(way: Way) -> Call | KsoptError:
        try:
            return way.build(device, rows)
        except KsoptError as error:
            return error

    with ThreadPoolExecutor(_COMPILERS) as pool:
        results = list(pool.map(build, ways))
    found: list[tuple[Way, Call]] = []
    for way, result in zip(ways, results, strict=True):
        if isinstance(result, UnavailableError):
            warn_once(str(result))
        elif isinstance(result, KsoptError):
            warn_once(f"{way.label} for {way.problem.pattern} does not compile: {result}")
        else:
            found.append((way, result))
    return found


_warned: set[str] = set()


def warn_once(reason: str) -> None:
    """Warn that a kernel cannot be used; the same reason once in a process."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"ksopt: its CUDA kernels cannot be used, so PyTorch's slower way is taken. {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
