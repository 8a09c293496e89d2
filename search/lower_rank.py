"""Chains of lower rank than the default admits, if the cost model predicts that they are faster.

A search without ``min_rank`` has candidates of full rank only. This shows what that costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch

from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain
from ksopt.search.layer_request import LayerRequest
from ksopt.search.samplers.cost_model import CostModel

CLEARLY_LESS = 0.9
"""Most predicted time, over that of the fastest finalist chain, that is worth a remark."""
LEAST_SHARE_OF_FULL = 0.25
"""Least rank bound over full rank: a chain of less expresses too little to be suggested."""
# For the predictions of a layer, which take about 10 ms each: with the last below 2 seconds.
_SECONDS = 1.5
_GROUPS = (1, 2, 4)
_STEP = 16


@dataclass(frozen=True)
class LowerRank:
    """A chain of lower rank beside the fastest finalist chain, both by the same cost model.

    Args:
        chain: The chain of lower rank.
        predicted_us: Its predicted time in microseconds.
        beside: The fastest chain of the final.
        beside_us: The predicted time of that one in microseconds.
    """

    chain: Chain
    predicted_us: float
    beside: Chain
    beside_us: float

    @property
    def ratio(self) -> float:
        """Its predicted time over that of the fastest finalist chain."""
        return self.predicted_us / self.beside_us

    def to_json(self) -> dict[str, Any]:
        """The prediction as JSON values, see `from_json`."""
        return {
            "chain": str(self.chain),
            "predicted_us": self.predicted_us,
            "beside": str(self.beside),
            "beside_us": self.beside_us,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LowerRank:
        """The inverse of `to_json`.

        Raises:
            InvalidInputError: A chain's text is not valid.
        """
        chain, beside = Chain.parse(value["chain"]), Chain.parse(value["beside"])
        return cls(chain, value["predicted_us"], beside, value["beside_us"])


def faster(
    request: LayerRequest, device: torch.device, standing: Sequence[Replacement]
) -> LowerRank | None:
    """The chain of lower rank that is predicted to be fastest, if it takes clearly less time.

    None if the request has a ``min_rank`` or no chains, times steps of training, which the cost
    models do not predict, or if the device's kernels have no cost models.

    Args:
        request: Of the layer, with its batch resolved.
        device: The device.
        standing: The finalists, fastest first.

    Example:
        >>> request = LayerRequest("384x384", batch=4096)
        >>> faster(request, torch.device("cpu"), [Chain.monarch(384, 384, p=8)]) is None
        True
    """
    beside = next((chain for chain in standing if isinstance(chain, Chain)), None)
    if beside is None or request.min_rank is not None or request.train:
        return None
    model = CostModel.of(request, device)
    beside_us = None if model is None else model.predicted_us(beside)
    if model is None or beside_us is None:
        return None
    # Of few weights first: if the time is up, those are known that are probably fastest.
    lower = sorted(candidates(request), key=lambda chain: chain.nnz)
    for chain in model.fastest(lower, 1, _SECONDS):
        predicted_us = model.predicted_us(chain)
        assert isinstance(chain, Chain)
        assert predicted_us is not None
        if predicted_us <= CLEARLY_LESS * beside_us:
            return LowerRank(chain, predicted_us, beside, beside_us)
    return None


def candidates(request: LayerRequest) -> Iterator[Chain]:
    """Chains (1,out/d,m,d)*(d,m,in/d,1) of lower rank that a request admits but for their rank.

    Their rank bound is a quarter of full rank or more, and a step of the request may have them.

    Example:
        >>> request = LayerRequest("64x64", budgets=("50%",))
        >>> [str(chain) for chain in candidates(request)]
        ['(1,64,16,1)*(1,16,64,1)', '(1,32,16,2)*(2,16,32,1)']
    """
    columns, rows = request.size.in_features, request.size.out_features
    full = min(columns, rows)
    for d in _GROUPS:
        if columns % d or rows % d:
            continue
        for m in range(_STEP, ceil(full / d), _STEP):
            chain = Chain.parse(f"(1,{rows // d},{m},{d})*({d},{m},{columns // d},1)")
            rank = chain.rank_bound
            if (
                LEAST_SHARE_OF_FULL * full <= rank < full
                and chain.nnz < request.size.dense_parameters  # else one factor expresses as much
                and _is_of_a_step(chain, request)
                and replace(request, min_rank=rank).admits(chain)
            ):
                yield chain


def _is_of_a_step(chain: Chain, request: LayerRequest) -> bool:
    """Whether a chain has the weights that a step of the ladder asks for."""
    return any(
        ceil(request.min_use * step.parameters) <= chain.nnz <= step.parameters
        for step in request.steps
    )
