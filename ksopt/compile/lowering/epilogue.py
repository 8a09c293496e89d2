"""Epilogues: operations behind a chain that could be computed with it.

A bias, an activation, a residual, a cast. The emitted operator computes the product alone, and
Inductor fuses the rest into one kernel behind it, unless `fuse` takes it into the launch. Sites
record what a launch could take, by the rule of `steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from ksopt.compile.lowering.in_place_epilogues import out_of_place_calls
from ksopt.compile.lowering.steps import step_of


class Product(NamedTuple):
    """A product that steps may follow.

    Attributes:
        site: the node of its site.
        features: of its result.
        steps: names of those that it computes itself.
    """

    site: str
    features: int
    steps: tuple[str, ...] = ()


def epilogues(graph: fx.Graph, products: Mapping[fx.Node, Product]) -> dict[str, tuple[str, ...]]:
    """Names of each site's steps: "bias", an activation, "residual", "to_float32".

    In their order. Nothing is behind a product where the graph must write in place: `fuse` leaves
    such a graph as it is. A sum of two products is a step of one of them.

    Args:
        graph: that is launched.
        products: by their nodes.
    """
    names = {product.site: product.steps for product in products.values()}
    calls = out_of_place_calls(graph) if products else None
    if calls is None:
        return names
    values = dict(products)
    for node in graph.nodes:
        for value in node.all_input_nodes if node not in values else ():
            before = values.get(value)
            if before is None or len(value.users) != 1:
                continue
            step = step_of(node, value, before.steps, before.features, calls.get(node))
            if step is not None:
                steps = (*before.steps, step.name) if step.name else before.steps
                values[node], names[before.site] = before._replace(steps=steps), steps
                break
    return names
