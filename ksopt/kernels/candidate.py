"""Candidates: implementations of a problem by a kernel of a family, or by PyTorch.

`registry` proposes candidates for a problem. Beside kernels and PyTorch's products there are four
names: `FACTORS`, one launch per factor and PyTorch's operations behind the last; `PAIR`, the same
of two factors by two kernels that were timed together; `MERGED`, the product by one dense matrix or
factor; and, for two layers, `LAYERS`, each layer by its own plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from ksopt.kernels import merged
from ksopt.kernels.families.base import KernelFamily
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.labels import PAIR, label_of
from ksopt.kernels.launcher import Launcher
from ksopt.kernels.problem import DeviceSpec, Problem, Rows

FACTORS = "factors"
"""The name of the candidate that computes a problem by one launch per factor."""
LAYERS = "layers"
"""The name of the candidate that computes two layers by a plan each."""
MERGED = "merged"
"""The name of the candidate that multiplies by the product of the factors (kernels/merged.py)."""
APART = frozenset({FACTORS, LAYERS})
"""The candidates whose factors or layers are computed by a choice of their own each."""


class Call(Protocol):
    """A built product: (x, weight) -> y, written into ``out`` if it is passed (`cuda.run`)."""

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None, /) -> Tensor: ...


class ChainCall(Protocol):
    """A built problem, computed in one launch: returns y.

    ``weights`` are of the chain's factors, left to right, sibling after sibling. ``bias`` and
    ``residual`` are passed where the problem's epilogue has them. ``out`` is as for `Call`.
    """

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor: ...


class MlpCall(Protocol):
    """Two built layers: returns their result.

    ``weights`` are of the first chain's factors, left to right, then of the second's.
    ``hidden_bias`` is the first layer's. The other operands are the second layer's, as for
    `ChainCall`.
    """

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        hidden_bias: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Pair:
    """The tile of a `PAIR`: the candidates of two factors, in the order in which they multiply."""

    first: Candidate
    second: Candidate


@dataclass(frozen=True)
class Candidate:
    """One implementation of a problem, not built yet.

    Attributes:
        name: a kernel family's, or that of one of PyTorch's products (a baseline), or `MERGED`, or
            `PAIR`, or of `APART`.
        problem: what it computes.
        predicted_us: for the batch that it was proposed for.
        family: of kernels; None for PyTorch's own, for `PAIR`, and for those of `APART`.
        tile: the family's configuration, or the `Pair`; None for all others.
    """

    name: str
    problem: Problem
    predicted_us: float
    family: KernelFamily[Any] | None = None
    tile: Any = None

    @property
    def config(self) -> dict[str, Any] | None:
        """The tile as a dict of plain values."""
        if isinstance(self.tile, Pair):
            several = {"first": self.tile.first, "second": self.tile.second}
            return {at: {"way": one.name, "config": one.config} for at, one in several.items()}
        return None if self.tile is None else asdict(self.tile)

    @property
    def label(self) -> str:
        """The name and the configuration, as people read them."""
        return label_of(self.name, self.config)

    @property
    def is_pytorch(self) -> bool:
        """Whether it is one of PyTorch's implementations."""
        return self.family is None and self.name not in (*APART, PAIR)

    @property
    def prepares_weight(self) -> bool:
        """Whether the weight is prepared before the product."""
        if self.name in (LAYERS, MERGED, PAIR):
            return True  # weights of a layer in one launch are always prepared
        if self.name == FACTORS:
            return any(pattern.d > 1 for pattern in self.problem.chain)
        if self.family is None:
            return pytorch_ops.prepares(self.name, self.problem)
        patterns = [pattern for chain in self.problem.chains for pattern in chain]
        return any(map(self.family.prepares_weight, patterns))

    @property
    def takes_parameters(self) -> bool:
        """Whether it is for parameters of modules only, whose prepared form it caches."""
        return self.name == MERGED

    @property
    def needs_order(self) -> bool:
        """Whether a weight whose elements are not in order is put in order before the product."""
        return self.family is not None and not self.family.is_fallback

    def with_epilogue_us(self, batch: int, device: DeviceSpec | None) -> float:
        """The predicted time with the epilogue: see `KernelFamily.with_epilogue_us`."""
        if self.family is None or device is None:
            return self.predicted_us
        return self.family.with_epilogue_us(self.problem, self.tile, batch, device)

    def sources(self) -> list[str]:
        """The generated files that `build` compiles for aligned rows."""
        if self.name == MERGED:
            return merged.sources(self.problem)
        if isinstance(self.tile, Pair):
            return [*self.tile.first.sources(), *self.tile.second.sources()]
        return [] if self.family is None else self.family.sources(self.problem, self.tile)

    def build(self, device_index: int, rows: Rows = "aligned") -> Any:
        """Compile and load it on a device: a `Call`, a `ChainCall` or an `MlpCall`.

        Args:
            device_index: of the device.
            rows: of x; the kernel for other rows is compiled when the first of them come.

        Raises:
            UnavailableError, CompilationError: see :mod:`ksopt.jit`.
        """
        if self.name == FACTORS:
            from ksopt.kernels.by_factors import ByFactors  # imported here: it imports the planner

            return ByFactors(self.problem)
        if isinstance(self.tile, Pair):
            from ksopt.kernels.autotuner import Choice  # imported here for the same reason
            from ksopt.kernels.by_factors import ByPair

            several = (self.tile.first, self.tile.second)
            return ByPair(
                self.problem,
                *(Choice(one, one.build(device_index), "measured") for one in several),
            )
        if self.name == LAYERS:
            from ksopt.kernels.by_layers import ByLayers  # imported here for the same reason

            return ByLayers(self.problem)
        if self.name == MERGED:
            return merged.Merged.on_device(self.problem, device_index)
        if self.family is None:
            return pytorch_ops.multiplier(self.name, self.problem)
        call = self.family.launcher(self.problem, self.tile, device_index)
        if rows != "aligned" and isinstance(call, Launcher):
            call.compile_fallback()
        return call
