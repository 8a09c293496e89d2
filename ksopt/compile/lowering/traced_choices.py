"""The choices that ksopt's operators make while AOTAutograd traces a graph.

torch's caches on disk know a graph before it is traced. Which launches an operator becomes then
depends on what has been measured by that time, so these choices belong to a cache's key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch import fx

from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.lowering.fuse import records_gradients
from ksopt.compile.lowering.layer import Layer, product
from ksopt.kernels import planner, weight_gradients
from ksopt.kernels.backends.base import BACKENDS
from ksopt.ops import chain_gradients, input_gradient


def digest(graph: fx.Graph) -> str:
    """A digest of the choices for a rewritten graph; empty where there are none."""
    trains = records_gradients(graph)
    words = {word for node in graph.nodes for word in _choices(product(node, {}), trains)}
    return hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:16] if words else ""


def _choices(layer: Layer | None, trains: bool) -> Iterator[str]:
    if layer is None:
        return
    problem, rows, x = layer.problem, layer.rows, fake_result(layer.x)
    if x.device.type not in BACKENDS or rows == 0:
        return
    what = f"{problem} {rows}"
    whole = planner.whole_choice(problem, rows, x.device, repacked=trains)
    if whole is not None:
        yield f"{what} by {whole.way}"
    if not trains:
        return
    for p in problem.chain:
        if weight_gradients.is_by_kernel(p, layer.dtype, rows, x.device):
            yield f"{p} {layer.dtype} {rows}: gradient by a kernel"
    if len(layer.weights) == 2:
        left, right = (fake_result(one).to(layer.dtype) for one in layer.weights)
        x = x.to(layer.dtype)
        together = chain_gradients.is_faster(x, left, right, layer.bias is not None)
        one_launch = input_gradient.is_one_launch(x, left, right)
        if together or one_launch:
            yield f"{what}: gradients {together} {one_launch}"
