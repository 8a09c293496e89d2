"""A graph as Dynamo captured it, with the semantics of eager mode."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils.checkpoint import checkpoint

_CHECKPOINT = "tag_activation_checkpoint"


def uncompiled(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with torch's own checkpoints.

    Dynamo replaces them by an operator that relies on a compiler to draw the same random numbers
    again, and to read values that were written behind it.

    Args:
        gm: a graph; later changes do not affect the copy.
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
    # Weights that the author's function closes over are arguments here, and torch would check that
    # they are not written.
    return checkpoint(lambda: body(*args), **{**kwargs, "use_reentrant": False})
