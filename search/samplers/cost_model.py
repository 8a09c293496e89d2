"""What the kernels' cost models predict of a chain: a prior, and shown beside what was measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.explain import choice_report
from ksopt.kernels.problem import DeviceSpec
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain, Pattern
from ksopt.search.layer_request import LayerRequest


@dataclass
class CostModel:
    """Predicts latencies for one machine, dtype, layout and batch.

    Args:
        machine: A GPU.
        dtype: Such as "float16".
        batch: Rows of the input.
        batch_last: The layout.
    """

    machine: DeviceSpec
    dtype: str
    batch: int
    batch_last: bool
    _known: dict[Pattern, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, request: LayerRequest, device: torch.device) -> CostModel | None:
        """For a request with its batch resolved; None where there is no cost model: on a CPU."""
        assert request.batch is not None
        machine = backend_of(device.type).spec(device)
        if machine is None:
            return None
        return cls(machine, request.dtype, request.batch, request.layout == "batch_last")

    @property
    def known(self) -> Mapping[Pattern, float | None]:
        """What was predicted so far, by factor."""
        return self._known

    def predicted_us(self, chain: Replacement) -> float | None:
        """Sum of the factors' predicted times; None if one has none, or it is no chain.

        Example:
            >>> h200 = DeviceSpec((9, 0), 132, 228 * 1024)
            >>> model = CostModel(h200, "float16", 8192, batch_last=False)
            >>> model.predicted_us(Chain.parse("(1,64,64,16)*(16,64,64,1)")) > 0
            True
        """
        if not isinstance(chain, Chain):
            return None
        times = [self._factor(pattern) for pattern in chain]
        return None if None in times else sum(time for time in times if time is not None)

    def fastest(
        self, chains: Sequence[Replacement], count: int, seconds: float
    ) -> list[Replacement]:
        """Those that are predicted to be fastest, of as many as there is time for, in order.

        A prediction weighs hundreds of tiles: some 10 ms for a pattern.
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
