"""The measurement of a row: an operator's speed, its fit, and the network's training with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ksopt.operators.base import StructuredOperator
from ksopt.operators.kronecker import KroneckerOperator
from ksopt.operators.registry import Replacement
from ksopt.patterns.size import Dims
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective
from recipes.tasks import Task
from recipes.training import learn
from rivals.network import Sizes, converted
from rivals.rows import DENSE, Row, Speed, Timed

_SWEEP_SEED = 1000  # of the sweep's batches; the results' batches have 0, 1, ...


@dataclass(frozen=True)
class _Tuned:
    """The accuracy of a network before a training, and its final loss and accuracy."""

    accuracy_before: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Bench:
    """The settings of all rows.

    Args:
        task: The task.
        dense: The trained network.
        sizes: Its layers that are replaced.
        device: Of the network.
        dtype: Of the timed products.
        steps: Of a fine-tuning.
        rates: Learning rates to choose from.
        seeds: Fine-tunings of each row.
        commit: Of ksopt.
        report: Called with a line about each training.
    """

    task: Task
    dense: nn.Module
    sizes: Sizes
    device: torch.device
    dtype: str
    steps: int
    rates: Sequence[float]
    seeds: int
    commit: str | None
    report: Callable[[str], None]

    def timed(
        self, structure: str, budget: str, operators: Mapping[Dims, StructuredOperator] | None
    ) -> Timed:
        """The times of operators for every size; of the dense network for None."""
        speeds = tuple(
            self._speed(dims, len(names), None if operators is None else operators[dims])
            for dims, names in self.sizes.names.items()
        )
        return Timed(structure, budget, speeds, self.commit)

    def row(self, timed: Timed) -> Row:
        """The row of a network trained with the operators that were timed."""
        operators = timed.operators
        name = f"{timed.structure} {timed.budget}".strip()
        model, error = (self.dense, 0.0) if operators is None else converted(self.dense, operators)
        half = max(3, self.steps // 2)
        sweep = {lr: self._tuned(model, _SWEEP_SEED, half, lr) for lr in self.rates}
        lr = min(sweep, key=lambda rate: sweep[rate].loss)
        before = sweep[lr].accuracy_before
        self.report(f"{name}: error of the fit {error:.3f}, accuracy {before:.3f}")
        ends = []
        for seed in range(self.seeds):
            ends.append(self._tuned(model, seed, self.steps, lr))
            self.report(f"{name}: lr {lr:g}, seed {seed}: accuracy {ends[-1].accuracy:.3f}")
        return Row(
            timed.structure,
            timed.budget,
            timed.speeds,
            error,
            before,
            lr,
            tuple(end.accuracy for end in ends),
            tuple(end.loss for end in ends),
            timed.commit,
        )

    def _tuned(self, model: nn.Module, seed: int, steps: int, lr: float) -> _Tuned:
        """Train a copy of a network."""
        model = copy.deepcopy(model)
        run = learn(self.task, model, model.parameters(), seed, steps, lr, self.device)
        begin, end = run.points[0], run.points[-1]
        return _Tuned(begin.accuracy, end.loss, end.accuracy)

    def _speed(self, dims: Dims, layers: int, operator: StructuredOperator | None) -> Speed:
        rows = self.sizes.rows
        if operator is None:
            dense = dims.dense_parameters
            return Speed(str(dims), layers, DENSE, dense, 2 * rows * dense, 1.0, 1.0)
        known = (str(dims), layers, str(operator), operator.nnz, operator.flops(rows))
        refusal = operator.refusal(str(self.device), self.dtype)
        if refusal is not None:
            return Speed(*known, None, None, refusal)
        request = LayerRequest(dims, batch=rows, dtype=self.dtype, device=str(self.device))
        timed: Replacement = operator
        if isinstance(operator, KroneckerOperator):
            timed = operator.chain
        outcome = Objective(request, self.device).measure(timed)
        return Speed(*known, outcome.latency.median_us, outcome.dense.median_us)
