"""Detection of whether the author's code saves a weight for the backward pass, or a copy.

Autograd refuses a backward pass when a tensor that it saved was written since. Code that multiplies
a weight by `torch.bmm` saves the weight. Code that multiplies a copy, which `einsum`, `matmul` or
autocast creates, saves the copy, and may write the weight before the backward pass. The replacement
has to save the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode

from ksopt.compile.capture.nodes import fake_result, memory_of
from ksopt.compile.capture.values import Contraction, Root, Trace
from ksopt.compile.lowering.emit import signature

_log = logging.getLogger("ksopt")

_MOST_NODES = 100


def is_saved(trace: Trace, product: Root, owner: fx.Node, known: dict[Hashable, bool]) -> bool:
    """Whether the author's product saves memory of a weight for the gradients of its operands.

    The nodes between the weight and the product run on fake tensors with gradients on.

    Args:
        trace: of the graph.
        product: a contraction.
        owner: the parameter or buffer whose memory the weight is in.
        known: earlier results; the layers of a model repeat the same nodes.

    Returns:
        True also if those nodes cannot be run alone.
    """
    assert isinstance(product.origin, Contraction)
    nodes = _between(trace, product, owner)
    if nodes is None:
        return True
    nodes = _with_whole_vmaps(trace, nodes)
    mode = fake_result(owner).fake_mode if isinstance(fake_result(owner), FakeTensor) else None
    if mode is None:
        return True
    layer = _layer(trace, nodes, owner)
    if layer not in known:
        known[layer] = _is_saved(trace, nodes, owner, mode)
    return known[layer]


def _layer(trace: Trace, nodes: list[fx.Node], owner: fx.Node) -> Hashable:
    """A key of nodes: the functions they call, and the sizes of their tensors."""
    places = {node: at for at, node in enumerate([owner, *nodes])}

    def argument(one: fx.Node) -> Any:
        if one in places:
            return ("place", places[one])
        return (fake_result(one), _passes_gradients(trace, one))

    calls = tuple(
        (
            node.op,
            node.target,
            trace.regions[node].grad,
            trace.regions[node].autocast,
            signature(fx.node.map_arg((node.args, node.kwargs), argument)),
        )
        for node in nodes
    )
    return (*calls, signature(fake_result(owner)), _passes_gradients(trace, owner))


def _is_saved(trace: Trace, nodes: list[fx.Node], owner: fx.Node, mode: FakeTensorMode) -> bool:
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage()._cdata)
        return tensor

    values: dict[fx.Node, Any] = {}
    depth = 0
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    guards = mode.shape_env.suppress_guards() if mode.shape_env else contextlib.nullcontext()
    try:
        with mode, guards, hooks:
            # All leaves first: none can be created inside a vmap.
            read = [one for node in nodes for one in node.all_input_nodes]
            values.update((one, _leaf(trace, one)) for one in {owner, *read} - {*nodes})
            for node in nodes:
                with _in_region(trace, node, values[owner].device.type):
                    values[node] = _value(node, values)
                depth += _opens_vmaps(node)
    except Exception as error:  # any failure of a node alone on fake tensors
        _log.debug("Its weight is copied: a product cannot run on fake tensors: %s", error)
        for _ in range(depth):
            torch._C._functorch._vmap_decrement_nesting()
        return True
    return values[owner].untyped_storage()._cdata in saved


def _between(trace: Trace, product: Root, owner: fx.Node) -> list[fx.Node] | None:
    """The nodes that compute a product from its input and a weight, in their order."""
    assert isinstance(product.origin, Contraction)
    x = product.origin.x
    if product.producer is None:
        return None
    left, seen = [product.producer], {product.producer}
    while left:
        for node in left.pop().all_input_nodes:
            view = trace.views.get(node)
            # A tuple, as of chunk, has no view of its own.
            is_input = isinstance(fake_result(node), Tensor) if view is None else view.root is x
            if node in seen or is_input or node is owner or node.op == "placeholder":
                continue
            seen.add(node)
            left.append(node)
        if len(seen) > _MOST_NODES:
            return None
    return sorted(seen, key=lambda node: trace.order[node])


def _with_whole_vmaps(trace: Trace, nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes, and all others of the vmaps around them, which run as a whole."""
    inside = {node for node in nodes if trace.regions[node].vmap_depth}
    if not inside:
        return nodes
    whole: set[fx.Node] = set(nodes)
    depth, opened = 0, list[fx.Node]()
    for node in nodes[0].graph.nodes:
        opens = _opens_vmaps(node)
        depth += opens
        if depth or opens:
            opened.append(node)
        if not depth and opened:
            if not inside.isdisjoint(opened):
                whole.update(opened)
            opened = []
    return sorted(whole, key=lambda node: trace.order[node])


def _opens_vmaps(node: fx.Node) -> int:
    """Number of vmaps that a node opens; -1 if it closes one."""
    name = getattr(node.target, "__name__", "")
    return (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_method":
        own, *rest = args
        return getattr(own, str(node.target))(*rest, **kwargs)
    raise NotImplementedError(node.op)


def _leaf(trace: Trace, node: fx.Node) -> Any:
    """A fake tensor like a node's value, of memory of its own."""
    value = fake_result(node)
    if not isinstance(value, Tensor):
        return value
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return new.requires_grad_(value.is_floating_point() and _passes_gradients(trace, node))


def _passes_gradients(trace: Trace, node: fx.Node) -> bool:
    """Whether autograd follows a node's value to a tensor that requires gradients.

    Tensors created under `inference_mode` have no gradients, and under `no_grad` only views have.
    Such a view reports that it requires them, and passes none; results computed from it outside are
    followed again.
    """
    return not _is_created_without_grad(trace, node) and needs_grad(
        node, lambda one: _is_created_without_grad(trace, one) and not _is_bare_view(trace, one)
    )


def _is_created_without_grad(trace: Trace, node: fx.Node) -> bool:
    """Whether a tensor is created where no gradients are recorded."""
    if node.op == "placeholder":
        return False
    region, own = trace.regions[node], memory_of(node)
    is_view = getattr(fake_result(node), "_is_view", bool)()
    # An input that an operation returns unchanged (`contiguous`) is not created there.
    is_same = not is_view and any(memory_of(one) == own for one in node.all_input_nodes)
    return (region.inference or not region.grad) and not (own is not None and is_same)


def _is_bare_view(trace: Trace, node: fx.Node) -> bool:
    """Whether a tensor created without gradients is a view that reports to require them."""
    value = fake_result(node)
    return isinstance(value, Tensor) and value._is_view() and not trace.regions[node].inference


@contextlib.contextmanager
def _in_region(trace: Trace, node: fx.Node, device_type: str) -> Iterator[None]:
    """Context with the gradients and autocast state of a node."""
    region = trace.regions[node]
    dtype = region.autocast
    with (
        torch.set_grad_enabled(region.grad),
        torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False),
    ):
        yield


def _is_detached(node: fx.Node) -> bool:
    """Whether a node cuts a tensor off from its gradients."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name == "detach"


def needs_grad(node: fx.Node, ends: Callable[[fx.Node], bool] = lambda _: False) -> bool:
    """Whether a gradient of a node's value is recorded, as far as the graph shows.

    Args:
        node: of the graph.
        ends: whether gradients do not flow from a node to its inputs.
    """
    # Dynamo's fake results know; those computed without gradients may depend on a parameter.
    left, seen = [node], {node}
    while left:
        one = left.pop()
        known = fake_result(one)
        if isinstance(known, Tensor) and known.requires_grad:
            return True
        is_first = one.op == "placeholder" or _is_detached(one)
        before = () if is_first or ends(one) else one.all_input_nodes
        left += [other for other in before if other not in seen]
        seen.update(before)
    return False
