"""Timing of calls as in a served model: captured in a CUDA graph, with cold weights.

A graph holds a call for each of several copies of the weight, and L2 is emptied before each replay:
so every call reads its weight from memory, as every layer of a model does that runs token by token,
and the cost of starting a replay is shared by all of them.
The input is the same in all, and warm: the layer before has just written it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_FILLS = 8
"""How often the copies fill L2: emptying it leaves it full of data still to be written to memory,
and that cost, which is no part of a product, is shared by this many reads."""

_LEAST, _FEW, _MOST = 8, 32, 256
_MOST_BYTES = 4 << 30  # of more than the least copies


def copies(weight_bytes: int, device: torch.device) -> int:
    """The number of copies of the weights that fill L2 eight times.

    From 32, so that a replay's start hardly counts, to 256; of large weights as many as 4 GiB hold,
    but at least 8.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    size = max(weight_bytes, 1)
    count = min(max(math.ceil(_FILLS * l2_bytes / size), _FEW), _MOST)
    return max(min(count, _MOST_BYTES // size), _LEAST)


class Replay:
    """All the calls on x as one CUDA graph, replayed when called.

    Args:
        calls: a function of x each, with weights of its own, that has run before.
        x: on a CUDA device.
    """

    def __init__(self, calls: Sequence[Callable[[Tensor], object]], x: Tensor) -> None:
        # A graph knows addresses only: what is at them must live as long as it does.
        self._alive = (tuple(calls), x)
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            for call in calls:
                call(x)
        torch.cuda.current_stream(x.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                call(x)

    def __call__(self) -> None:
        self._graph.replay()
