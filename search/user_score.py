"""A user's score of chains, as an objective beside latency: ``--score MODULE:FUNCTION``."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ksopt.errors import InvalidInputError, KsoptError
from ksopt.operators.registry import Replacement
from ksopt.search.metrics import TimedChain
from ksopt.search.options import SearchOptions
from ksopt.search.samplers import priors


@dataclass(frozen=True)
class Scored:
    """Argument of the user's function: a measured chain.

    Args:
        chain: The chain; ``str(chain)`` is its text, and iterating it gives its patterns. With
            ``--structures`` it may be another operator.
        in_features, out_features: Of the layer.
        parameters: Weights of the chain.
        share: Its weights over the dense layer's.
        rho: (b + c)/(b c), averaged over the factors by their weights.
        latency_us: Median latency, with ``--train`` of a training step.
        dense_us: The dense layer's, timed in turns with it.
        weight_error: Relative error of its nearest product to the trained weights; None without
        them.
        energy_mj: Energy of a call in millijoules; None without ``--energy``.
        dtype, batch, layout, device: Settings of the measurement.
    """

    chain: Replacement
    in_features: int
    out_features: int
    parameters: int
    share: float
    rho: float
    latency_us: float
    dense_us: float
    weight_error: float | None
    energy_mj: float | None
    dtype: str
    batch: int
    layout: str
    device: str

    @classmethod
    def of(cls, timed: TimedChain) -> Scored:
        """The argument for a timed chain, after its other metrics."""
        request, size, chain = timed.request, timed.request.size, timed.chain
        assert request.batch is not None
        return cls(
            chain=chain,
            in_features=size.in_features,
            out_features=size.out_features,
            parameters=chain.nnz,
            share=chain.nnz / size.dense_parameters,
            rho=priors.rhos(chain)[0],
            latency_us=timed.latency.median_us,
            dense_us=timed.dense.median_us,
            weight_error=timed.values.get("weight_error"),
            energy_mj=timed.values.get("energy_mj"),
            dtype=request.dtype,
            batch=request.batch,
            layout=request.layout,
            device=str(timed.device),
        )


class ScoreError(KsoptError, RuntimeError):
    """A user's function raised, or returned no number: the trial failed."""


@dataclass(frozen=True)
class Score:
    """A user's scoring function.

    Args:
        name: MODULE:FUNCTION.
        function: `Scored` -> a number, the lower the better.
    """

    name: str
    function: Callable[[Scored], float]

    @classmethod
    def of(cls, request: SearchOptions) -> Score | None:
        """The function that a request names; None if it names none. Its module is imported.

        Raises:
            InvalidInputError: There is no such function, or its module cannot be imported.
        """
        return None if request.score is None else _loaded(request.score)

    def __call__(self, scored: Scored) -> float:
        """The score.

        Raises:
            ScoreError: The function raised, or returned something else than a finite number.
        """
        try:
            # Its output must not mix with the lines of a result.
            with contextlib.redirect_stdout(sys.stderr):
                result = self.function(scored)
            value = float(result)
        except (Exception, SystemExit) as error:
            raise ScoreError(f"{self.name} raised {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise ScoreError(f"{self.name} returned {value}: a score must be a finite number")
        return value


@functools.cache
def _loaded(name: str) -> Score:
    from ksopt.system.user_code import load_function

    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise InvalidInputError(
            f"--score {name!r}: write MODULE:FUNCTION, such as mine:cost for the function "
            "cost(scored) of mine.py"
        )
    return Score(name, load_function("--score", name, sys.stderr))
