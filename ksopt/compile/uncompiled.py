"""A graph as Dynamo captured it, run as eager mode runs its author's code."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils.checkpoint import checkpoint

_CHECKPOINT = "tag_activation_checkpoint"


def uncompiled(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph whose checkpoints are torch's own.

    Dynamo puts an operator in their place that leaves to a compiler what it cannot do by itself: to
    draw the same random numbers again, and to read what was written behind it.

    Args:
        gm: a graph, of which changes do not reach the copy.
    """
    original = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    original.meta.update(gm.meta)
    for name, body in gm.named_children():  # of checkpoints and other operators
        if isinstance(body, fx.GraphModule):
            setattr(original, name, uncompiled(body))
    for node in original.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and node.target.name() == _CHECKPOINT:
            node.target = _checkpointed
    original.recompile()
    return original


def _checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    context_fn = body.meta.get("_checkpoint_context_fn")
    if context_fn is not None:
        kwargs["context_fn"] = context_fn
    # Weights that the author's function closes over are arguments here, of which torch would check
    # that nobody writes to them.
    return checkpoint(lambda: body(*args), **{**kwargs, "use_reentrant": False})
