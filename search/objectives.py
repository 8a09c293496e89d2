"""The objective of a trial: check a chain, time it beside the dense layer, measure its metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt import settings
from ksopt.functional import ks_linear
from ksopt.kernels import dispatch, planner
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import FACTORS
from ksopt.kernels.labels import PAIR
from ksopt.kernels.tuning_cache import Record
from ksopt.measure import energy, timing
from ksopt.measure.energy import Meter
from ksopt.measure.timing import Measurement
from ksopt.operators.base import StructuredOperator
from ksopt.operators.registry import Replacement, operator_of
from ksopt.patterns.chain import Chain
from ksopt.search import timed_call
from ksopt.search.layer_pass import LayerPass
from ksopt.search.layer_request import LayerRequest
from ksopt.search.metrics import METRICS, TimedChain
from ksopt.search.problems import problem_of
from ksopt.search.product_check import ProductCheck
from ksopt.search.trained_weights import TrainedWeights

DENSE = "dense"
_TRIAL_SECONDS = 0.5
# A trial, or the final, ends earlier once all its medians have this relative precision, far below
# the differences of chains. On an idle GPU that takes about ten repeats, or fifty.
_TRIAL_PRECISION, _FINAL_PRECISION = 0.004, 0.0015
FINAL_SECONDS = 4.0
"""Approximate duration of the final."""


@dataclass(frozen=True)
class Outcome:
    """A chain and the dense layer, timed in turns.

    Args:
        latency: The chain's.
        dense: The dense layer's.
        error: Relative error (Frobenius norm) of the chain's product against float64.
        error_pytorch: That of PyTorch's batched products in the chain's dtype.
        seconds: Total duration: choosing kernels, checking, timing.
        values: The metrics of the request, by name; only some for a pruned chain.
        factors_us: Time of each factor when its kernel was chosen, None if unknown; empty on a CPU,
            and if one launch computes the whole chain.
    """

    latency: Measurement
    dense: Measurement
    error: float
    error_pytorch: float
    seconds: float
    values: Mapping[str, float]
    factors_us: tuple[float | None, ...] = ()


class Objective:
    """Measurement of chains for one layer size, batch, dtype, layout and device.

    Inputs and weights are random and new for every chain; the dense layer is
    `torch.nn.functional.linear`, or a product with the matrix on the left when batch_last. For both
    the product with the request's epilogue is timed, or with ``train`` a step of training.

    Args:
        request: With ``batch`` set.
        device: The device.
        weights: The trained weights to approximate, if any.
        seed: Of inputs and weights; None takes the request's.
        meter: Of the device, if the request measures energy; else None.
    """

    def __init__(
        self,
        request: LayerRequest,
        device: torch.device,
        weights: TrainedWeights | None = None,
        seed: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        assert request.batch is not None
        self._request = request
        self._batch = request.batch
        self._device = device
        self._trained = weights
        self._meter = meter
        self._dtype: torch.dtype = getattr(torch, request.dtype)
        self._generator = torch.Generator(device=device).manual_seed(
            request.seed if seed is None else seed
        )
        self._layer = LayerPass(request, lambda *shape: self._random(*shape).to(self._dtype))

    def measure(self, chain: Replacement, limit: float | None = None) -> Outcome:
        """Check a chain, time it in turns with the dense layer, then measure its other metrics.

        If its first repeats take more than ``limit`` times as long as the dense layer it is pruned,
        as its measurement records.

        Raises:
            WrongResultError: Its product is wrong; nothing was timed.
            KsoptError, RuntimeError: It does not run here: memory, a kernel that does not compile;
                a metric cannot be measured.
        """
        began = time.monotonic()
        operator = operator_of(chain)
        x, weights = self._input(), self._weights(operator)
        if isinstance(chain, Chain):
            self._choose_kernels(x, weights[: len(chain)])
        check = ProductCheck(operator, x, weights, self._request, self._layer)
        errors = check.errors()
        call = self._pass(self._layer.bind(operator), x, weights)
        times = self._time({str(chain): call}, x, _TRIAL_SECONDS, 10, limit, _TRIAL_PRECISION)
        latency, dense = times[str(chain)], times[DENSE]
        values = self._values(chain, latency, dense, call)
        return Outcome(
            latency,
            dense,
            errors.relative,
            check.pytorch_error,
            seconds=time.monotonic() - began,
            values=values,
            factors_us=self._factors_us(chain),
        )

    def _values(
        self,
        chain: Replacement,
        latency: Measurement,
        dense: Measurement,
        call: Callable[[], object],
    ) -> dict[str, float]:
        values: dict[str, float] = {}
        timed = TimedChain(
            chain,
            self._request,
            self._device,
            latency,
            dense,
            call,
            self._trained,
            self._meter,
            values,
        )
        for metric in METRICS.values():
            if metric.is_measured(self._request) and (metric.of_pruned or not latency.given_up):
                value = metric.measure(timed)
                if value is not None:
                    values[metric.name] = value
        return values

    def check(self, chain: Replacement) -> None:
        """Check a chain that was measured in other surroundings: other kernels compute it here.

        Raises:
            WrongResultError: Its product is wrong.
            KsoptError, RuntimeError: It does not run here.
        """
        operator = operator_of(chain)
        x, weights = self._input(), self._weights(operator)
        ProductCheck(operator, x, weights, self._request, self._layer).errors()

    def final(
        self, chains: Sequence[Replacement], seconds: float = FINAL_SECONDS
    ) -> dict[str, Measurement]:
        """Time chains against each other and the dense layer, in turns, for a number of seconds.

        Returns:
            A Measurement by the chain's text, and one under "dense".
        """
        x = self._input()
        calls = self._passes(chains, x)
        return self._time(calls, x, seconds, min_repeats=20, precision=_FINAL_PRECISION)

    def energy(self, chains: Sequence[Replacement]) -> dict[str, float]:
        """Energy in millijoules of a call of each chain, by its text, and of the dense layer.

        It requires a meter, and measures for longer than a trial.

        Raises:
            EnergyError: The counter fails.
        """
        assert self._meter is not None
        x = self._input()
        calls = {**self._passes(chains, x), DENSE: self._dense(x)}
        with torch.inference_mode(not self._request.train):
            return energy.millijoules(calls, self._meter, energy.FINAL_SECONDS)

    def _time(
        self,
        calls: Mapping[str, Callable[[], object]],
        x: Tensor,
        max_seconds: float,
        min_repeats: int,
        limit: float | None = None,
        precision: float | None = None,
    ) -> dict[str, Measurement]:
        with torch.inference_mode(not self._request.train):
            return timing.measure(
                {**calls, DENSE: self._dense(x)},
                self._device,
                max_seconds=max_seconds,
                min_repeats=min_repeats,
                precision=precision,
                hopeless=limit,
                against=DENSE,
            )

    def _passes(self, chains: Sequence[Replacement], x: Tensor) -> dict[str, Callable[[], object]]:
        passes = {}
        for chain in chains:
            operator = operator_of(chain)
            weights = self._weights(operator)
            passes[str(chain)] = self._pass(self._layer.bind(operator), x, weights)
        return passes

    def _dense(self, x: Tensor) -> Callable[[], object]:
        """The dense layer's pass."""
        # W: [out_features, in_features], scaled as nn.Linear's so that outputs stay finite.
        dims = self._request.size
        features = self._request.siblings * dims.out_features
        w = self._random(features, dims.in_features) * dims.in_features**-0.5
        return self._pass(self._layer.bind_dense, x, [w.to(self._dtype)])

    def _pass(
        self, bind: timed_call.Bind, x: Tensor, weights: Sequence[Tensor]
    ) -> Callable[[], object]:
        """The timed call of a layer."""
        if not self._request.train:
            return timed_call.forward(bind, x, weights)
        features = self._request.size.out_features
        shape = (features, self._batch) if self._is_batch_last() else (self._batch, features)
        gradient = self._random(*shape).to(self._dtype)
        return timed_call.training_step(bind, x, weights, gradient)

    def choices(self, chain: Replacement) -> tuple[Record | None, ...]:
        """Tuning records of each factor's kernel.

        Empty if no kernel is chosen for a single factor: on a CPU, for other structures than
        chains, and if one launch of the plan computes the whole chain.
        """
        if not isinstance(chain, Chain) or not self._has_cost_models:
            return ()
        problem, batch = problem_of(chain, self._request), self._batch
        whole = planner.whole_choice(problem, batch, self._device)
        if whole is not None and whole.way not in (FACTORS, PAIR):
            return ()
        backend, mode = backend_of(self._device.type), settings.tuning()
        known = [
            backend.measured(backend.key(factor, batch), self._device, mode, False)
            for factor in problem.factors()
        ]
        return tuple(None if one is None else one[0] for one in known)

    @property
    def _has_cost_models(self) -> bool:
        return backend_of(self._device.type).spec(self._device) is not None

    def _factors_us(self, chain: Replacement) -> tuple[float | None, ...]:
        return tuple(
            None if record is None else record.chosen(repacked=False).median_us
            for record in self.choices(chain)
        )

    def _choose_kernels(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Choose every factor's kernel quickly, if none was tuned."""
        if not self._has_cost_models:
            return  # the first product chooses quickly anyway
        with torch.inference_mode():
            for weight in reversed(weights):  # the last factor reads the input
                dispatch.choose_quickly(x, weight, self._is_batch_last())
                x = ks_linear(x, [weight], layout=self._request.layout)

    def _input(self) -> Tensor:
        features = self._request.size.in_features
        shape = (features, self._batch) if self._is_batch_last() else (self._batch, features)
        return self._random(*shape).to(self._dtype)

    def _weights(self, operator: StructuredOperator) -> list[Tensor]:
        """Random weights of all siblings, which preserve the variance of features."""
        shapes = list(zip(operator.parameter_shapes(), operator.terms(), strict=True))
        return [
            (self._random(*shape) * terms**-0.5).to(self._dtype)
            for shape, terms in shapes * self._request.siblings
        ]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device, generator=self._generator)

    def _is_batch_last(self) -> bool:
        return self._request.layout == "batch_last"
