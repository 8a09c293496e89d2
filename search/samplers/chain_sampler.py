"""Optuna sampler over a list of chains: every suggestion is a chain, and none is repeated.

A chain is described to Optuna by its coordinates: the number of factors and, for each of up to
three places, log2 of b, c and d (0 where there is no such factor; a follows from the sizes). Close
coordinates are similar chains, so a model of them can learn. A proposal of the model is seldom the
coordinates of a chain; it is replaced by the nearest untried chain, and the trial records that
chain's own coordinates, so that the model learns from the measured chain.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import log2, prod
from typing import Any, Literal

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from ksopt.operators.registry import Replacement, operator_of
from ksopt.patterns.chain import Chain
from ksopt.patterns.size import Dims
from ksopt.search import metrics
from ksopt.search.layer_request import LayerRequest
from ksopt.search.options import MOST_FACTORS

# Random trials before the model is used, including enqueued ones.
_STARTUP_TRIALS = 12
# A genetic algorithm needs at least five generations of this many trials each.
_POPULATION = 40
_FEWEST_GENERATIONS = 5

Kind = Literal["exhaustive", "TPE", "NSGA-II"]


def suitable_sampler(candidates: int, request: LayerRequest) -> Kind:
    """The suitable sampler: exhaustive if the trials suffice, else a model that learns.

    TPE learns from few trials. With several objectives and trials for several generations, NSGA-II
    covers the whole front.

    Example:
        >>> suitable_sampler(30, LayerRequest("64x64", trials=40))
        'exhaustive'
        >>> suitable_sampler(3000, LayerRequest("64x64", trials=40))
        'TPE'
        >>> suitable_sampler(3000, LayerRequest("64x64", trials=400))
        'NSGA-II'
        >>> suitable_sampler(3000, LayerRequest("64x64", trials=400, objective="latency"))
        'TPE'
    """
    if candidates <= request.trials:
        return "exhaustive"
    enough = request.trials >= _POPULATION * _FEWEST_GENERATIONS
    return "NSGA-II" if len(metrics.objectives(request)) > 1 and enough else "TPE"


def distributions(dims: Dims) -> dict[str, BaseDistribution]:
    """The coordinates' ranges; they depend only on the dims, so that a study can be resumed."""
    highest = log2(max(dims.in_features, dims.out_features)) or 1.0
    names = [f"log2_{letter}{place}" for place in range(1, MOST_FACTORS + 1) for letter in "bcd"]
    return {
        "factors": FloatDistribution(1.0, float(MOST_FACTORS)),
        **{name: FloatDistribution(0.0, highest) for name in names},
    }


def coordinates(chain: Replacement) -> dict[str, float]:
    """Coordinates of a chain, or of another operator with its weights as factors without d.

    Example:
        >>> place = coordinates(Chain.parse("(1,16,8,4)*(4,8,8,1)"))
        >>> place["factors"], place["log2_b1"], place["log2_d1"], place["log2_b3"]
        (2.0, 4.0, 2.0, 0.0)
    """
    if isinstance(chain, Chain):
        sizes = [(pattern.b, pattern.c, pattern.d) for pattern in chain]
    else:
        most = max(chain.in_features, chain.out_features)  # of the coordinates' ranges
        shapes = operator_of(chain).parameter_shapes()[:MOST_FACTORS]
        sizes = [(min(most, s[0]), min(most, prod(s[1:])), 1) for s in shapes]
    where = {"factors": float(len(sizes))}
    for place in range(MOST_FACTORS):
        of_factor = sizes[place] if place < len(sizes) else (1, 1, 1)
        for letter, size in zip("bcd", of_factor, strict=True):
            where[f"log2_{letter}{place + 1}"] = log2(size)
    return where


class ChainSampler(BaseSampler):
    """Sampler of untried chains.

    Args:
        candidates: The chains.
        kind: "exhaustive" to take all, fewest weights first; "TPE" (Bergstra et al., 2011; the
            multivariate and multi-objective form of Optuna) or "NSGA-II" (Deb et al., 2002) to
            learn, after some random draws. Both respect the constraints stored in trials.
        seed: Of the draws. A resumed study should pass another seed than its first run.
    """

    def __init__(self, candidates: Sequence[Replacement], kind: Kind, seed: int) -> None:
        self._candidates = list(candidates)
        self._names = list(coordinates(candidates[0]))
        self._where = np.array([list(coordinates(chain).values()) for chain in candidates])
        spread = self._where.max(axis=0) - self._where.min(axis=0)
        self._scale = np.where(spread > 0, spread, 1.0)
        self._open = np.ones(len(candidates), dtype=bool)
        self._closed = np.zeros(len(candidates), dtype=bool)  # for good
        self._read = 0
        self._index = {chain: i for i, chain in enumerate(candidates)}
        self._rng = random.Random(seed)
        self._drawn: dict[int, Replacement] = {}
        self._model: BaseSampler | None = None
        self.name: Kind = kind
        if kind == "NSGA-II":
            self._model = NSGAIISampler(seed=seed, population_size=_POPULATION)
        elif kind == "TPE":
            with warnings.catch_warnings():
                # Optuna calls the multivariate form experimental.
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self._model = TPESampler(
                    seed=seed, multivariate=True, n_startup_trials=_STARTUP_TRIALS
                )

    @property
    def dims(self) -> Dims:
        """Size of the layer."""
        return Dims(self._candidates[0].in_features, self._candidates[0].out_features)

    @property
    def remaining(self) -> int:
        """Number of untried candidates."""
        return int(self._open.sum())

    def close(self, for_good: Collection[Replacement], now: Iterable[Replacement] = ()) -> None:
        """Exclude these chains from later draws, and no others.

        Args:
            for_good: Permanently excluded chains; it only grows at its end between calls, and only
                new entries are read.
            now: Further chains, excluded until the next call.
        """
        self._closed[self._rows(itertools.islice(for_good, self._read, None))] = True
        self._read = len(for_good)
        np.logical_not(self._closed, out=self._open)
        self._open[self._rows(now)] = False

    def _rows(self, chains: Iterable[Replacement]) -> list[int]:
        return [self._index[chain] for chain in chains if chain in self._index]

    def drawn(self, trial_number: int) -> tuple[Replacement, str] | None:
        """The chain that was drawn for a trial, and by which sampler; None if it was enqueued."""
        chain = self._drawn.get(trial_number)
        return None if chain is None else (chain, self.name)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All coordinates, always."""
        return distributions(self.dims)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The coordinates of an untried chain; empty for a trial that was enqueued with a chain."""
        if "chain" in trial.user_attrs:
            if self.name == "NSGA-II":  # it counts generations by calls
                assert self._model is not None
                self._model.sample_relative(study, trial, search_space)
            return {}
        index = self._draw(study, trial, search_space)
        self._open[index] = False
        self._drawn[trial.number] = self._candidates[index]
        return dict(zip(self._names, self._where[index].tolist(), strict=True))

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Never needed: `sample_relative` returns every coordinate."""
        raise AssertionError(f"{param_name} was not among the coordinates")

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Pass the trial to the model."""
        if self._model is not None:
            self._model.after_trial(study, trial, state, values)

    def _draw(
        self, study: optuna.Study, trial: FrozenTrial, space: dict[str, BaseDistribution]
    ) -> int:
        open_ = np.flatnonzero(self._open)
        if self._model is None:
            return int(open_[0])
        proposal: Mapping[str, Any] = self._model.sample_relative(study, trial, space)
        if not proposal:  # the model's startup
            return self._random(open_)
        # NSGA-II omits mutated coordinates, to be drawn at random.
        fill = dict(zip(self._names, self._where[self._random(open_)].tolist(), strict=True))
        proposed = np.array([proposal.get(name, fill[name]) for name in self._names])
        distance = (((self._where[open_] - proposed) / self._scale) ** 2).sum(axis=1)
        return int(open_[int(distance.argmin())])

    def _random(self, open_: np.ndarray) -> int:
        """A random chain of a random number of factors, because most chains have three."""
        lengths = self._where[open_, 0]
        length = self._rng.choice(sorted(set(lengths.tolist())))
        return int(self._rng.choice(open_[lengths == length].tolist()))
