"""Fusion context of a site: elementwise work that Inductor fuses with the copies around a product.

A batched product between two permutations copies its input and its result. If a normalisation or an
activation precedes it, Inductor writes the result of that in the permuted order at no extra cost;
likewise behind it. A site must be timed with such neighbours, or the batched product looks slower
than it is in the model.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ksopt.compile.lowering.layer import has_epilogue
from ksopt.compile.lowering.operations import MOVEMENT_NAMES

_PRODUCTS = {
    *("linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "tensordot", "matvec"),
    *("conv1d", "conv2d", "conv3d", "convolution", "scaled_dot_product_attention"),
}
_OWN = ("ks_mm", "ks_chain", "ks_mlp")
"""The names of all of ksopt's operators begin so."""


def is_produced_elementwise(node: fx.Node | None) -> bool:
    """Whether a node's value comes from work that Inductor generates: no input, no product.

    The epilogue of a ksopt layer is such work, too.
    """
    while node is not None and _name(node) in MOVEMENT_NAMES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node is not None and (_is_generated(node) or has_epilogue(node))


def is_read_elementwise(exits: Iterable[fx.Node]) -> bool:
    """Whether the first operation on one of these values is work that Inductor generates."""
    left = [user for node in exits for user in node.users]
    while left:
        node = left.pop()
        if _name(node) in MOVEMENT_NAMES:
            left += node.users
        elif _is_generated(node):
            return True
    return False


def _is_generated(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and not is_product(node)


def is_product(node: fx.Node) -> bool:
    """Whether a node is a product or attention, of torch's or ksopt's."""
    name = _name(node)
    return name in _PRODUCTS or name.startswith(_OWN)


def _name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "_name", None) or getattr(node.target, "__name__", "")
    return str(name).split("::")[-1].split(".")[0]
