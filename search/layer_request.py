"""Request of a search for one layer size: its steps, its rank, its admissible chains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.operators.registry import Replacement, name_of
from ksopt.patterns.chain import Chain
from ksopt.patterns.size import Budget, Dims
from ksopt.patterns.validate import checked_int
from ksopt.search.options import TRIALS, SearchOptions
from ksopt.search.space.alignment import Alignment
from ksopt.search.space.block_sizes import ANY_SIZE, BlockSizes
from ksopt.search.space.constraints import Constraints


@dataclass(frozen=True)
class LayerRequest(SearchOptions):
    """All settings that decide what a search measures for one layer size.

    Args:
        dims: ``INxOUT``, or a `Dims`.
        trials: Total number of chains to measure, including those of earlier runs of the study.

    The others are those of `SearchOptions`.

    Raises:
        InvalidInputError: A value is not allowed; the sentence states what is.

    Example:
        >>> LayerRequest("768x3072", budgets=("25%",)).steps
        (Budget(text='25%', parameters=589824),)
    """

    dims: Dims | str
    trials: int = field(default=TRIALS, kw_only=True)
    steps: tuple[Budget, ...] = field(init=False)

    def __post_init__(self) -> None:
        dims = self.dims if isinstance(self.dims, Dims) else Dims.parse(self.dims)
        super().__post_init__()
        checked_int(self.trials, "trials", "search", minimum=1)
        full = min(dims.in_features, dims.out_features)
        if self.min_rank is not None and self.min_rank > full:
            raise InvalidInputError(
                f"min_rank {self.min_rank}: a {dims} layer has rank at most min(in, out) = {full}"
            )
        steps = {step.parameters: step for step in (Budget.parse(b, dims) for b in self.budgets)}
        if self.max_params is not None:
            most = Budget.parse(self.max_params, dims)
            within = {count: step for count, step in steps.items() if count <= most.parameters}
            steps = within | ({} if len(within) == len(steps) else {most.parameters: most})
        object.__setattr__(self, "dims", dims)
        # Two texts for one count (25% and 0.25) are one step; steps rise.
        object.__setattr__(self, "steps", tuple(steps[count] for count in sorted(steps)))

    def to_json(self) -> dict[str, Any]:
        """The request as JSON values, see `from_json`."""
        steps = [step.text for step in self.steps]
        return super().to_json() | {
            "dims": str(self.size),
            "budgets": steps,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LayerRequest:
        """The inverse of `to_json`."""
        return cls(**value)

    @property
    def size(self) -> Dims:
        """The parsed ``dims``."""
        assert isinstance(self.dims, Dims)
        return self.dims

    @property
    def rank(self) -> int:
        """The least rank bound in force."""
        return self.min_rank or min(self.size.in_features, self.size.out_features)

    @property
    def constraints(self) -> Constraints:
        """Constraints on the chains besides budget, rank and number of factors."""
        alignment = Alignment(
            element_bytes=4 if self.dtype == "float32" else 2,
            batch_last=self.layout == "batch_last",
            train=self.train,
        )
        return Constraints(
            families=tuple(self.families),
            block_sizes=ANY_SIZE
            if self.block_sizes is None
            else BlockSizes.parse(self.block_sizes),
            chainable=self.chainable,
            alignment=alignment if self.aligned else None,
        )

    def admits(self, chain: Replacement) -> bool:
        """Whether the request admits a chain of the layer's size, whatever its weights.

        It admits an operator of another structure if it names the structure; an explicit
        ``min_rank`` holds for it, too, but not the default of full rank.

        A resumed study may hold chains of requests with a smaller rank, more factors or other
        limits.

        Example:
            >>> request = LayerRequest("64x64", max_factors=2)
            >>> low_rank, monarch = Chain.low_rank(64, 64, 16), Chain.monarch(64, 64, p=4)
            >>> request.admits(low_rank), request.admits(monarch)
            (False, True)
        """
        if name_of(chain) not in self.structures:
            return False
        if not isinstance(chain, Chain):
            return self.min_rank is None or chain.rank_bound >= self.min_rank
        if chain.rank_bound < self.rank:
            return False
        return len(chain) <= self.max_factors and self.constraints.admits(chain)
