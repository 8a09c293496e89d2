"""The graph that Dynamo captures of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed


class _EnoughError(Exception):
    """The graph is captured; the model need not run."""


def captured(model: nn.Module, x: Tensor) -> tuple[fx.GraphModule, list[Any]]:
    """The only graph of a model without gradients, and the graph's inputs."""
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def collect(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append((gm, inputs))
        raise _EnoughError

    try:
        with torch.no_grad():
            torch.compile(model, backend=collect)(x)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _EnoughError):
            raise
    (graph,) = graphs
    return graph
