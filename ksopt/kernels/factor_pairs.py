"""Pairs of kernels for the two factors of a chain, which race as plans of the chain.

The kernels that are the fastest alone need not be the fastest together: the second reads what the
first has left in the L2 cache, and starts while the first ends. So the fastest few of each factor,
as they were measured alone, race together wherever the plans of their chain do.

Of few rows none do: launches take most of the time there, and which kernels they are is no matter.
"""

from __future__ import annotations

import itertools

import torch

from ksopt import settings
from ksopt.kernels import registry
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import Candidate, Pair
from ksopt.kernels.problem import FEW_ROWS, DeviceSpec, Problem, ProblemKey
from ksopt.kernels.tuning_cache import Record, Timed

MOST_PAIRS = 6
"""How many pairs race beside the pair of the factors' own choices."""

_OF_EACH, _FAR = 3, 1.15  # so many of a factor's candidates, within this ratio of the fastest


def may_race(problem: Problem, batch: int) -> bool:
    """Whether pairs race for a problem.

    Args:
        problem: what is computed.
        batch: rows of x.
    """
    return registry.takes_pair(problem) and batch > FEW_ROWS


def candidates(key: ProblemKey, batch: int, device: torch.device) -> list[Candidate]:
    """The pairs to time, the least sum of their kernels' times first.

    Args:
        key: of the problem, whose factors were chosen before.
        batch: rows of x.
        device: where it is computed.

    Returns:
        Pairs of other candidates than the factors' own choices; none where a factor was not
        measured.
    """
    problem = key.problem
    if not may_race(problem, batch) or key.rows != "aligned":
        return []
    backend, mode = backend_of(device.type), settings.tuning()
    spec = backend.spec(device)
    several, own = [], []
    for factor in reversed(problem.factors()):
        known = backend.measured(backend.key(factor, batch), device, mode, False)
        if known is None:
            return []
        record = known[0]
        near = _fastest(record)
        several.append([(one.median_us, _restored(record, one, spec)) for one in near])
        own.append(_restored(record, record.timed[record.cached], spec))
    pairs = [
        (one_us + two_us, Pair(one, two))
        for (one_us, one), (two_us, two) in itertools.product(*several)
        if one is not None and two is not None and [one, two] != own
    ]
    pairs.sort(key=lambda it: it[0])
    return [registry.pair(problem, pair, batch, spec) for _, pair in pairs[:MOST_PAIRS]]


def _fastest(record: Record) -> list[Timed]:
    """The fastest candidates of a factor for weights that are prepared once."""
    timed = [one for one in record.timed if one.weight in ("any", "cached")]
    timed.sort(key=lambda one: one.median_us)
    return [one for one in timed[:_OF_EACH] if one.median_us <= _FAR * timed[0].median_us]


def _restored(record: Record, one: Timed, spec: DeviceSpec | None) -> Candidate | None:
    return registry.restored(record.key.problem, one.way, one.config, record.batch, spec)
