"""Calls as a model in service makes them: captured in a CUDA graph, every weight cold.

A graph holds a call for each of several copies of the weight, whose sizes add up to more than L2
holds, and L2 is emptied before each replay: so every call reads its weight from memory, as every
layer of a model does that runs token by token, and the cost of a replay is shared by all of them.
The input is the same in all, and warm: the layer before has just written it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_FEWEST_COPIES, _MOST_COPIES = 8, 128


def copies(weight_bytes: int, device: torch.device) -> int:
    """How many copies of the weights fill L2 twice."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = math.ceil(2 * l2_bytes / max(weight_bytes, 1))
    return min(max(wanted, _FEWEST_COPIES), _MOST_COPIES)


def captured(calls: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[], None]:
    """One replay of all the calls on x, each of which has run before.

    Args:
        calls: a function of x each, with weights of its own.
        x: on a CUDA device; it must stay where it is.
    """
    side = torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        for call in calls:
            call(x)
    torch.cuda.current_stream(x.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call(x)
    return graph.replay
