"""Surroundings of each linear layer of a model, read from the graph of a call.

Dynamo captures the graph, and the layers are followed as the backend follows chains
(`ksopt.compile.lowering.fuse`): a step or a sibling is recognised if a launch of a chain in the
layer's place could compute it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ksopt.compile import inactive_dropouts
from ksopt.compile.capture.in_place import writes_in_place
from ksopt.compile.end_to_end import restored
from ksopt.compile.graph_breaks import graph_breaks
from ksopt.compile.lowering import gates, siblings
from ksopt.compile.lowering.layer import Layer, with_decomposed, with_next
from ksopt.conversion.layers import Place, find
from ksopt.conversion.model_call import ModelCall
from ksopt.kernels.problem import Epilogue, Problem, is_exact
from ksopt.patterns.chain import Chain, Pattern
from ksopt.patterns.surroundings import Surroundings
from ksopt.precision import dtype_name

_SHOWN = 4
"""Names that a sentence lists."""
_PRODUCTS: Mapping[Any, tuple[str, ...]] = {
    nn.functional.linear: ("input", "weight", "bias"),
    torch._C._nn.linear: ("input", "weight", "bias"),
    torch.addmm: ("bias", "input", "weight"),  # transformers' Conv1D
}


@dataclass(frozen=True)
class _DenseLayer(Layer):
    """A dense layer in a graph, as a `Layer` whose only factor is its matrix."""

    place: Place | None = None

    @property
    def problem(self) -> Problem:
        """The problem of a chain in its place, as far as the surroundings matter."""
        assert self.place is not None
        pattern = Pattern(1, self.place.out_features, self.place.in_features, 1)
        dtype = dtype_name(self.place.parameter.dtype)
        after = Epilogue(self.bias is not None, self.activation, self.residual is not None)
        return Problem(Chain((pattern,)), dtype, False, is_exact(dtype), after)


def surroundings_of_model(model: nn.Module, call: ModelCall) -> tuple[dict[str, Surroundings], str]:
    """Surroundings of each linear layer in a call of a model.

    As `surroundings_in_graph`, but a layer whose surroundings could not be read has only its bias.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
        >>> call = ModelCall((torch.ones(4, 8),), {}, "example")
        >>> surroundings, _ = surroundings_of_model(model, call)
        >>> [(name, around.epilogue) for name, around in surroundings.items()]
        [('0', ('bias', 'relu')), ('2', ())]
    """
    seen, note = surroundings_in_graph(model, call)
    bare = {
        place.name: Surroundings(("bias",) if place.bias is not None else ())
        for place in find(model)[0]
    }
    return bare | seen, note


def surroundings_in_graph(model: nn.Module, call: ModelCall) -> tuple[dict[str, Surroundings], str]:
    """Surroundings of the linear layers that the graph of a call of a model shows.

    The model runs once, uncompiled; its buffers and the random state are restored. Of a layer that
    is applied several times the first application counts. Layers that are not in the graph, and all
    layers of a graph that writes in place, are left out.

    Args:
        model: The model, in the mode of the call.
        call: Its inputs.

    Returns:
        Surroundings by the layer's name, and a sentence of those that could not be read; empty if
        all could.
    """
    places = find(model)[0]
    of_parameter = {id(place.parameter): place for place in places}
    seen: dict[str, Surroundings] = {}
    reason = "its graph does not show them"

    def collect(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        nonlocal reason
        if writes_in_place(gm.graph):
            reason = "its graph writes tensors in place"
            return gm.forward
        for name, around in _of_graph(gm.graph, example_inputs, of_parameter):
            seen.setdefault(name, around)
        return gm.forward

    try:
        with restored(model), graph_breaks() as breaks:
            torch.compile(_caller(model), backend=collect, dynamic=False)(*call.args, **call.named)
        if breaks:
            reason = f"its graph breaks: {breaks[0].reason}"
    except Exception as error:  # of Dynamo, or of code that it runs: the search continues without
        first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        reason = f"its graph could not be read: {type(error).__name__}: {first}"
    unseen = [place for place in places if place.name not in seen]
    return seen, _sentence([place.name for place in unseen], len(places), reason)


def _sentence(unseen: Sequence[str], count: int, reason: str) -> str:
    if not unseen:
        return ""
    more = [f"{len(unseen) - _SHOWN} more"] if len(unseen) > _SHOWN else []
    which = "all layers" if len(unseen) == count else ", ".join([*unseen[:_SHOWN], *more])
    return f"What surrounds layers in the model could not be read of {which}: {reason}."


def _caller(model: nn.Module) -> Callable[..., Any]:
    """The model as a function with a new code object: Dynamo limits compilations of each."""

    def call(*args: Any, **named: Any) -> Any:
        return model(*args, **named)

    code = call.__code__.replace()
    return types.FunctionType(code, globals(), "call", None, call.__closure__)


def _of_graph(
    graph: fx.Graph, example_inputs: Sequence[Any], of_parameter: Mapping[int, Place]
) -> Iterator[tuple[str, Surroundings]]:
    """Surroundings of the layers of a graph, by name, in the graph's order."""
    inactive_dropouts.bypass(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    places = {
        node: of_parameter[id(value)]
        for node, value in zip(placeholders, example_inputs, strict=True)
        if id(value) in of_parameter
    }
    layers: dict[fx.Node, Layer] = {}
    for node in graph.nodes:
        layer = _product(node, places) or with_next(node, layers) or layers.get(node)
        if layer is not None:
            layers[node] = layer
            layers |= dict(with_decomposed(node, layer))  # a later node's
    gated = [both for _, both in gates.pairs(graph, layers, lambda *_: True)]
    inside = {node for both in gated for node in both.inner}
    whole = dict(_largest(layers, inside))
    together = {
        node: len(group)
        for group in siblings.groups(graph, whole, lambda *_: True)
        for node in group
    }
    for both in gated:
        for layer in (both.first, both.second):
            yield _name(layer), Surroundings(both.problem.epilogue.names, siblings=2)
    for node, layer in reversed(list(whole.items())):
        yield _name(layer), Surroundings(layer.problem.epilogue.names, together.get(node, 1))


def _name(layer: Layer) -> str:
    assert isinstance(layer, _DenseLayer)
    assert layer.place is not None
    return layer.place.name


def _product(node: fx.Node, places: Mapping[fx.Node, Place]) -> _DenseLayer | None:
    """A product by a layer's weight, with its bias."""
    names = _PRODUCTS.get(node.target) if node.op == "call_function" else None
    if names is None or not isinstance(node.meta.get("example_value"), Tensor):
        return None
    arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    x, weight, bias = (arguments.get(name) for name in ("input", "weight", "bias"))
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or weight not in places:
        return None
    if bias is not None and not isinstance(bias, fx.Node):
        return None
    return _DenseLayer(x, (weight,), (weight,), bias, inner=(node,), place=places[weight])


def _largest(
    layers: Mapping[fx.Node, Layer], taken: set[fx.Node]
) -> Iterator[tuple[fx.Node, Layer]]:
    """Each product with its surroundings, of nodes not taken, the last one first."""
    done = set(taken)
    for node, layer in reversed(list(layers.items())):
        if node not in done:
            done.update(layer.inner)
            yield node, layer
