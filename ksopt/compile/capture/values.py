"""Records of the tensors of a graph while it runs on fake tensors.

Every tensor is a `View`: an index map over a `Root`. A root is a tensor of its own; its ``origin``
is the operation that created it, if a Kronecker-sparse product can be built from that.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ksopt.compile.capture.index_map import Atom, Atoms, IndexMap
from ksopt.compile.capture.symbolic import Size
from ksopt.epilogue import parts_of_result
from ksopt.patterns.chain import Chain, Pattern


class Kind(enum.Enum):
    """The kind of values that a tensor depends on."""

    CONSTANT = "constants"
    WEIGHT = "parameters and buffers"
    ACTIVATION = "inputs of the model"

    def __or__(self, other: Kind) -> Kind:
        order = list(Kind)
        return order[max(order.index(self), order.index(other))]


@dataclass(eq=False)
class Root:
    """A tensor that others are views of.

    Attributes:
        shape: its sizes.
        dtype: its element type.
        kind: the kind of values it depends on.
        origin: the operation that created it, where that matters; else None.
        producer: the graph's node that created it.
        holders: the nodes whose values held all of it when computed, in their order.
        storage: identity of its memory, and how often that had been written before.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    kind: Kind
    producer: fx.Node | None
    origin: Origin | None = None
    holders: list[Holder] = field(default_factory=list)
    storage: tuple[int, int] | None = None

    @property
    def holder(self) -> Holder | None:
        """The first node whose value held all of the root."""
        return self.holders[0] if self.holders else None


@dataclass(frozen=True, eq=False)
class Holder:
    """A node whose value is all of a root, until its memory is written.

    Attributes:
        node: of the graph.
        map: the view of the root that the value is.
        storage: as `Root.storage`, of the node's value.
    """

    node: fx.Node
    map: IndexMap
    storage: tuple[int, int]


@dataclass(frozen=True, eq=False)
class View:
    """A tensor as an index map over a root."""

    root: Root
    map: IndexMap


@dataclass(frozen=True, eq=False)
class Variable:
    """One index of a product: out[...] = sum over the summed ones of left[...] * right[...].

    Attributes:
        size: its number of values.
        left: the same digit of the left operand; None if that does not depend on it.
        right: the same digit of the right operand.
        summed: whether it is summed over; if not, it is an index of the result.
    """

    size: Size
    left: Atom | None
    right: Atom | None
    summed: bool = False


@dataclass(frozen=True, eq=False)
class Factor:
    """A Kronecker-sparse product: y[batch, i, k, j] = sum_l x[batch, i, l, j] w[i, k, l, j].

    The variables of each group are in the order in which they make up one index, most significant
    first. In all of them left is a digit of x and right one of the weight.

    Attributes:
        pattern: (a, b, c, d).
        batch: the groups of variables that make up each batch dim.
        i, k, l, j: the variables that make up the pattern's indices.
        batch_last: whether x and y have their features first instead of last.
        direct: whether the product reads x's root without moving elements.
    """

    pattern: Pattern
    batch: tuple[tuple[Variable, ...], ...]
    i: tuple[Variable, ...]
    k: tuple[Variable, ...]
    l: tuple[Variable, ...]
    j: tuple[Variable, ...]
    batch_last: bool
    direct: bool


@dataclass(frozen=True, eq=False)
class Contraction:
    """A root that is a product by a weight; its axes are those of the factor's canonical y.

    That is, [*batch, M], or [M, *batch] when batch_last.
    """

    x: Root
    weight: Root
    factor: Factor


@dataclass(frozen=True, eq=False)
class Multiplied:
    """An elementwise product that may be summed later.

    Attributes:
        left, right: its operands.
        variables: its indices.
        dims: the variables of each dim, as indices into ``variables``.
    """

    left: Root
    right: Root
    variables: tuple[Variable, ...]
    dims: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Biased:
    """The sum of a product and a bias that is broadcast to its shape.

    Both maps have the dims of the sum; where the bias is repeated, its atoms have no axis.
    """

    product: View
    bias: View


@dataclass(frozen=True, eq=False)
class Cast:
    """A tensor with the same elements in another dtype."""

    source: Root


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of another tensor: its own dims, as a map over that tensor's root."""

    of: View


@dataclass(frozen=True, eq=False)
class Stacked:
    """Tensors of one shape side by side along a new first axis."""

    pieces: tuple[View, ...]


@dataclass(frozen=True, eq=False)
class Combined:
    """A weight computed from weights, as part of one operator: no node of the graph holds it.

    Attributes:
        equation: of the einsum that it is.
        pieces: that einsum's operands.
    """

    equation: str
    pieces: tuple[View, ...]


@dataclass(frozen=True, eq=False)
class Structured:
    """A tensor that is zero outside a support: elements are nonzero only where some digits agree.

    Attributes:
        weight: the elements on the support.
        dims: the tensor's own dims as digits of the weight. Where one digit is in two dims, an
            element is zero unless both have the same value of it: a diagonal matrix of ``n``
            elements has the dims ``[(0, n, 1)], [(0, n, 1)]``.
    """

    weight: Root
    dims: tuple[Atoms, ...]


@dataclass(frozen=True, eq=False)
class Complement:
    """A boolean tensor that is true outside a support.

    Attributes:
        weight: the elements on the support.
        dims: as those of `Structured`.
    """

    weight: Root
    dims: tuple[Atoms, ...]


@dataclass(frozen=True, eq=False)
class Applied:
    """An elementwise function of weights, on the support of one of them.

    Attributes:
        function: of torch; it is called with the pieces, then with ``more``.
        pieces: the weights, in any order of their dims.
        letters: for each piece, a letter for each of its dims; where one occurs twice, the diagonal
            is taken. A piece is repeated along the letters that it lacks.
        out: the letters of the result.
        more: further arguments.
    """

    function: Callable[..., torch.Tensor]
    pieces: tuple[View, ...]
    letters: tuple[str, ...]
    out: str
    more: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Zero:
    """A tensor of zeros."""


@dataclass(frozen=True, eq=False)
class Unfollowed:
    """A weight that could not be proved to be zero outside a support.

    Attributes:
        reason: the obstacle to the proof, a clause.
    """

    reason: str


@dataclass(frozen=True, eq=False)
class Compact:
    """The canonical weight [a, b, c, d] inside a dense matrix [M, N] with that support."""

    matrix: Root
    pattern: Pattern


@dataclass(frozen=True, eq=False)
class Native:
    """The result of ksopt's own operator, which needs no lowering."""

    x: View
    chain: Chain
    batch_last: bool
    siblings: int = 1
    activation: str = "none"

    @property
    def out_features(self) -> int:
        """Features of the result."""
        return parts_of_result(self.activation, self.siblings) * self.chain.out_features


Origin = (
    Contraction
    | Multiplied
    | Biased
    | Cast
    | Piece
    | Stacked
    | Combined
    | Structured
    | Complement
    | Applied
    | Zero
    | Unfollowed
    | Compact
    | Native
)


@dataclass(frozen=True)
class Miss:
    """A product by a weight that is not lowered.

    Attributes:
        node: its node.
        reason: why, as the end of a sentence that begins with "not recognised: ".
        pattern: the pattern that it would have, if that much is known.
    """

    node: fx.Node
    reason: str
    pattern: Pattern | None = None


@dataclass(frozen=True)
class Region:
    """State of gradients, autocast and vmap at a node.

    Attributes:
        grad: whether gradients are recorded.
        inference: whether torch.inference_mode is on.
        autocast: the dtype of autocast on the graph's device, None where it is off.
        vmap_depth: number of vmaps around the node.
    """

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    vmap_depth: int

    def records_like(self, other: Region) -> bool:
        """Whether gradients flow alike in both regions."""
        return self.grad == other.grad and self.inference == other.inference


@dataclass
class Trace:
    """Records of running a graph on fake tensors.

    Attributes:
        views: the view that each node's value is, for nodes whose value is one tensor.
        order: each node's position.
        contractions: the roots that are products, in the order of the graph.
        natives: the results of ksopt's own operator.
        misses: products by weights that cannot be lowered.
        writes: positions, as in ``order``, of the nodes that write each storage.
        writers: the nodes that write something in place.
        memory: the storage of each node's value, and how often that had been written by then.
        reshaped: the roots of nodes' values that are reshaped in place.
        regions: the region of each node.
        observed_strides: nodes whose strides another graph, a caller or a callee, observes.
        flops: of the products by weights at each node, dense ones included; where the batch is
            dynamic, those of the current batch.
    """

    views: dict[fx.Node, View] = field(default_factory=dict)
    order: dict[fx.Node, int] = field(default_factory=dict)
    contractions: list[Root] = field(default_factory=list)
    natives: list[Root] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    writes: dict[int, list[int]] = field(default_factory=dict)
    writers: set[fx.Node] = field(default_factory=set)
    memory: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    reshaped: set[Root] = field(default_factory=set)
    regions: dict[fx.Node, Region] = field(default_factory=dict)
    observed_strides: set[fx.Node] = field(default_factory=set)
    flops: dict[fx.Node, int] = field(default_factory=dict)

    def is_intact(self, memory: tuple[int, int], before: int | None = None) -> bool:
        """Whether a memory is unwritten since a version.

        Args:
            memory: a storage, and how often it had been written.
            before: position of the node before which it is read; None: at the end of the graph.
        """
        storage, version = memory
        writes = self.writes.get(storage, [])
        return version == sum(before is None or at < before for at in writes)
