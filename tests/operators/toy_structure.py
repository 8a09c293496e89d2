"""A structure of a user's: a diagonal beside a matrix of low rank. A search imports it by name."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.operators.base import Fit, StructuredOperator
from ksopt.operators.registry import Structure, register_structure
from ksopt.report.document import Section
from ksopt.search import LayerResult, metrics
from ksopt.search.metrics import Metric
from ksopt.search.report.sections import section


@dataclass(frozen=True)
class DiagonalPlusLowRank(StructuredOperator):
    """W = diag(s) + U V, for as many outputs as inputs."""

    in_features: int
    out_features: int
    rank: int

    def __str__(self) -> str:
        return f"diagonal-plus({self.in_features},{self.rank})"

    @property
    def nnz(self) -> int:
        return self.in_features * (1 + 2 * self.rank)

    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        n = self.in_features
        return [(n, 1), (n, self.rank), (self.rank, n)]

    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        s, u, v = weights
        if layout == "batch_last":
            return lambda x: s * x + u @ (v @ x)
        return lambda x: x * s.T + x @ v.T @ u.T

    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        s, u, v = weights
        return x @ (torch.diag(s[:, 0]) + u @ v).T

    def nearest(self, matrix: Tensor) -> Fit:
        s = matrix.diagonal().unsqueeze(1)
        left, values, right = torch.linalg.svd(matrix - torch.diag(s[:, 0]))
        weights = [s, left[:, : self.rank] * values[: self.rank], right[: self.rank]]
        missed = self.reference(torch.eye(self.in_features, dtype=matrix.dtype), weights).T - matrix
        return Fit(weights, float(missed.norm() / matrix.norm()))


def parse(text: str) -> DiagonalPlusLowRank:
    match = re.fullmatch(r"diagonal-plus\((\d+),(\d+)\)", text)
    if match is None:
        raise InvalidInputError(f"{text!r}: write diagonal-plus(SIZE,RANK)")
    return DiagonalPlusLowRank(int(match[1]), int(match[1]), int(match[2]))


def candidates(in_features: int, out_features: int) -> Iterator[DiagonalPlusLowRank]:
    if in_features == out_features:
        for rank in (1, 2, 4, 8):
            yield DiagonalPlusLowRank(in_features, out_features, rank)


register_structure(Structure("diagonal-plus", parse, candidates))
metrics.register(
    Metric(
        "weight_tensors",
        "tensors",
        "tensors of weights",
        measure=lambda timed: float(len(getattr(timed.chain, "parameter_shapes", list)())),
        shown="{:.0f}".format,
        is_objective=lambda request: False,
        is_measured=lambda request: "toy_structure" in request.plugins,
    )
)


@section(order=75, when=lambda layer: "toy_structure" in layer.request.plugins)
def ranks(layer: LayerResult) -> Section:
    operators = [trial.facts.chain for trial in layer.trials]
    tried = sorted({one.rank for one in operators if isinstance(one, DiagonalPlusLowRank)})
    return Section("Ranks beside the diagonal", (), (f"Tried: {tried}.",))
