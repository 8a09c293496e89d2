"""The graphs that checkpointing calls, and the context of their calls."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from ksopt.compile.capture.values import Region, Trace
from ksopt.compile.lowering.output_strides import BODIES


@dataclass(frozen=True)
class UsesByCaller:
    """Uses of the inputs and results of a called graph in the graph that calls it.

    Attributes:
        written: inputs and results that may be written in place behind the call.
        observed: results whose strides have an effect that a caller can observe.
    """

    written: frozenset[fx.Node] = frozenset()
    observed: frozenset[fx.Node] = frozenset()


def bodies_of(gm: fx.GraphModule) -> dict[fx.Node, fx.GraphModule]:
    """The calls of other graphs, in the order of this one."""
    bodies = {}
    for node in gm.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator) or not node.args:
            continue
        if node.target.name() not in BODIES or not isinstance(node.args[0], fx.Node):
            continue
        body = gm.get_submodule(str(node.args[0].target))
        if isinstance(body, fx.GraphModule):
            bodies[node] = body
    return bodies


def uses_by_caller(
    call: fx.Node,
    body: fx.Graph,
    trace: Trace,
    observed_strides: Collection[fx.Node],
    inputs_share: bool,
) -> UsesByCaller:
    """Uses of a body's inputs and results behind its call.

    Args:
        call: of the body.
        body: the graph that is called.
        trace: of the graph that calls it.
        observed_strides: the nodes of that graph whose strides are observed.
        inputs_share: see `writes_inputs_that_share`.
    """
    inputs = [node for node in body.nodes if node.op == "placeholder"]
    written = {
        inside
        for inside, outside in zip(inputs, call.args[1:], strict=True)
        if isinstance(outside, fx.Node) and _is_written_behind(call, outside, trace)
    }
    (results,) = next(node for node in body.nodes if node.op == "output").args
    observed = set[fx.Node]()
    for user in call.users:
        if user.target is not operator.getitem:
            continue
        result = results[user.args[1]]
        if not isinstance(result, fx.Node):
            continue
        if inputs_share or _is_written_behind(call, user, trace):
            written.add(result)
        if user in observed_strides:
            observed.add(result)
    return UsesByCaller(frozenset(written), frozenset(observed))


def behind_written_calls(gm: fx.GraphModule, trace: Trace) -> set[fx.Node]:
    """The nodes behind a call of a graph whose operand is written in place behind the call.

    In the backward pass torch computes a checkpoint's results again, if they are saved as they are:
    from what was written. PyTorch's products often save copies of them, where ksopt's save none.
    """
    calls = [
        trace.order[call]
        for call in bodies_of(gm)
        if any(
            isinstance(operand, fx.Node) and _is_written_behind(call, operand, trace)
            for operand in call.args[1:]
        )
    ]
    return {node for node, at in trace.order.items() if calls and at > min(calls)}


def _is_written_behind(call: fx.Node, node: fx.Node, trace: Trace) -> bool:
    if node not in trace.memory:
        return False
    writes = trace.writes.get(trace.memory[node][0], ())
    return any(at > trace.order[call] for at in writes)


@contextlib.contextmanager
def in_region(region: Region, inputs: Sequence[Any]) -> Iterator[None]:
    """Context with the state of gradients and autocast in which a graph is called."""
    device = next((one.device.type for one in inputs if isinstance(one, Tensor)), "cpu")
    with contextlib.ExitStack() as opened:
        if region.inference:  # switched off it would switch gradients on
            opened.enter_context(torch.inference_mode())
        opened.enter_context(torch.set_grad_enabled(region.grad))
        enabled = region.autocast is not None
        opened.enter_context(torch.autocast(device, region.autocast, enabled=enabled))
        yield
