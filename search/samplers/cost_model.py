"""Predictions of the kernels' cost models for chains: a prior, and shown beside measurements."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ksopt.kernels import registry
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.explain import choice_report
from ksopt.kernels.families.common.pytorch_cost import elementwise_us
from ksopt.kernels.problem import EMPTY, DeviceSpec, Epilogue, Problem, is_exact
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain, Pattern
from ksopt.search.layer_request import LayerRequest
from ksopt.search.problems import epilogue_of


@dataclass
class CostModel:
    """Predictor of latencies for one machine, dtype, layout and batch.

    Args:
        machine: A GPU.
        dtype: Such as "float16".
        batch: Rows of the input.
        batch_last: The layout.
        after: The epilogue of each layer.
        siblings: Layers on one input.
    """

    machine: DeviceSpec
    dtype: str
    batch: int
    batch_last: bool
    _known: dict[Pattern, float | None] = field(default_factory=dict)
    after: Epilogue = EMPTY
    siblings: int = 1
    _whole: dict[Chain, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, request: LayerRequest, device: torch.device) -> CostModel | None:
        """The cost model of a request with its batch resolved; None on a CPU."""
        assert request.batch is not None
        machine = backend_of(device.type).spec(device)
        if machine is None:
            return None
        return cls(
            machine,
            request.dtype,
            request.batch,
            request.layout == "batch_last",
            after=epilogue_of(request),
            siblings=request.siblings,
        )

    @property
    def known(self) -> Mapping[Pattern, float | None]:
        """The predictions so far, by factor."""
        return self._known

    def predicted_us(self, chain: Replacement) -> float | None:
        """Predicted us of the fastest plan; None if there is no prediction, or it is no chain.

        A plan is one launch for the whole chain with its epilogue, if a kernel supports it, or a
        launch per factor with one operation behind them.

        Example:
            >>> h200 = DeviceSpec((9, 0), 132, 228 * 1024)
            >>> model = CostModel(h200, "float16", 8192, batch_last=False)
            >>> model.predicted_us(Chain.parse("(1,64,64,16)*(16,64,64,1)")) > 0
            True
        """
        if not isinstance(chain, Chain):
            return None
        plans = [self.whole_us(chain), self.apart_us(chain)]
        return min((us for us in plans if us is not None), default=None)

    def apart_us(self, chain: Chain) -> float | None:
        """Predicted us of a launch per factor of all siblings, and the epilogue, if known."""
        times = [self._factor(pattern) for pattern in chain]
        if None in times:
            return None
        us = self.siblings * sum(time for time in times if time is not None)
        return us + self.behind_us(chain.out_features)

    def behind_us(self, out_features: int) -> float:
        """Predicted us behind separate launches: one kernel for the epilogue, one to put siblings
        side by side; with a gate one that multiplies them."""
        sms, us = self.machine.multiprocessors, 0.0
        of_one = getattr(torch, self.dtype).itemsize * self.batch * out_features
        if self.after.is_gated:
            return elementwise_us(of_one * (3 + self.after.residual), sms)
        size = self.siblings * of_one
        if not self.after.is_empty:
            us += elementwise_us(size * (2 + self.after.residual), sms)
        return us + (elementwise_us(2 * size, sms) if self.siblings > 1 else 0.0)

    def whole_us(self, chain: Chain) -> float | None:
        """Predicted us of one launch for a chain and its epilogue; None without a kernel."""
        if chain not in self._whole:
            exact = is_exact(self.dtype)
            problem = Problem(chain, self.dtype, self.batch_last, exact, self.after, self.siblings)
            kernels = (
                []
                if problem.is_factor
                else registry.best_kernels(problem, self.batch, self.machine, most=1)
            )
            self._whole[chain] = kernels[0].predicted_us if kernels else None
        return self._whole[chain]

    def fastest(
        self, chains: Sequence[Replacement], count: int, seconds: float
    ) -> list[Replacement]:
        """The chains that are predicted to be fastest, of as many as there is time for, in order.

        A prediction compares hundreds of tiles: about 10 ms for a pattern.
        """
        until = time.monotonic() + seconds
        fastest: list[tuple[float, int, Replacement]] = []
        for chain in chains:
            predicted = self.predicted_us(chain)
            if predicted is not None:
                fastest.append((predicted, len(fastest), chain))
            if time.monotonic() > until:
                break
        return [chain for _, _, chain in sorted(fastest)[:count]]

    def _factor(self, pattern: Pattern) -> float | None:
        if pattern not in self._known:
            self._known[pattern] = choice_report(
                pattern,
                self.dtype,
                self.batch,
                batch_last=self.batch_last,
                spec=self.machine,
            ).predicted_us
        return self._known[pattern]
