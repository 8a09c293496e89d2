"""Check that a search fits the machine, before anything is listed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ksopt.search.layer_request import LayerRequest
from ksopt.search.report import phrases
from ksopt.system import limits


def check(requests: Sequence[LayerRequest], device: torch.device) -> None:
    """Reject layers that the device cannot hold, or more workers than the machine can.

    Args:
        requests: Of one search; with their batch.
        device: Device of the measurements.

    Raises:
        InvalidInputError: Something does not fit; the sentence states what would.
    """
    limits.check_workers(requests[0].workers)
    for request in requests:
        assert request.batch is not None
        what = f"{phrases.layer(request.size)} in {request.dtype}"
        limits.check_batch(request.batch, partial(least_bytes, request), device, what)


def least_bytes(request: LayerRequest, rows: int) -> int:
    """Minimal peak memory of measuring the dense layer for a number of rows.

    It is the largest of: the input and the weights while they are drawn, which is in float32, the
    weights scaled in a second step; the product; and the gradients, if requested.

    Example:
        >>> request = LayerRequest("8x16", budgets=("50%",))
        >>> least_bytes(request, 1), least_bytes(request, 1000)
        (1056, 96512)
    """
    size = limits.ELEMENT_BYTES[request.dtype]
    siblings = request.siblings
    x, y = rows * request.size.in_features, siblings * rows * request.size.out_features
    weights = siblings * request.size.dense_parameters
    cast = 0 if size == 4 else size  # random numbers are drawn in float32
    stages = [(4 + cast) * x, size * x + 8 * weights, size * (x + weights + y)]
    if "residual" in request.epilogue:
        stages.append(size * (x + weights + 2 * y))
    if request.train:
        stages.append(size * (2 * x + 2 * weights + 2 * y))
    return max(stages)
