"""Candidate sites: the recognised products that may be lowered, and the chains they form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from ksopt.compile.capture.index_map import identity
from ksopt.compile.capture.symbolic import Size
from ksopt.compile.capture.values import Biased, Contraction, Native, Root, Trace
from ksopt.compile.lowering.epilogue import Product
from ksopt.compile.lowering.fusion_context import is_produced_elementwise, is_read_elementwise
from ksopt.compile.lowering.layer import product as layer_of
from ksopt.compile.lowering.rewrite_safety import Uses
from ksopt.compile.lowering.weight_lifetime import Weights
from ksopt.compile.sites import Site, Verdict, place_of, spelling_of
from ksopt.kernels.operands import size_hint
from ksopt.patterns.chain import Chain, Pattern
from ksopt.precision import dtype_name


@dataclass(frozen=True, eq=False)
class CandidateSite:
    """A chain of products, each the only reader of the one before.

    Attributes:
        roots: the products; the one that reads the input is the last, as in a chain.
        site: the description of the chain.
        exit: the author's node that holds its result, if it is a single one.
        is_biased: whether the author's product has a bias, as in addmm.
    """

    roots: tuple[Root, ...]
    site: Site
    exit: fx.Node | None = None
    is_biased: bool = False

    def product(self, lowered: Mapping[Root, fx.Node]) -> tuple[fx.Node | None, Product]:
        """The product that steps may follow, with its node; None if no launch can take any.

        Args:
            lowered: the node of each lowered product.
        """
        name, features = self.site.node, _pattern(self.roots[0]).out_features
        node = lowered.get(self.roots[0])
        if node is not None:
            return node if layer_of(node, {}) is not None else None, Product(name, features)
        return self.exit, Product(name, features, ("bias",) if self.is_biased else ())


def candidate_products(trace: Trace) -> list[Root]:
    """Products by factors that are not dense, and low-rank pairs of dense ones."""
    chosen = [root for root in trace.contractions if _pattern(root).a * _pattern(root).d > 1]
    for root in trace.contractions:
        inner = _origin(root).x
        if isinstance(inner.origin, Contraction) and _is_low_rank(_pattern(root), _pattern(inner)):
            chosen += [one for one in (inner, root) if one not in chosen]
    for root in chosen:  # grows while it is read
        inner = _origin(root).x
        if isinstance(inner.origin, Contraction) and inner.holder is None and inner not in chosen:
            chosen.append(inner)  # inside a node: it is available only if it is rewritten, too
    order = {root: at for at, root in enumerate(trace.contractions)}
    return sorted(chosen, key=order.__getitem__)


def unpaired_dense_products(usage: Uses, chosen: Collection[Root]) -> list[Root]:
    """Dense products that are no half of a low-rank pair, because something else reads them."""
    alone = []
    for root in chosen:
        if not _is_dense(_pattern(root)):
            continue
        inner, readers = _origin(root).x, usage.readers.get(root)
        if readers is None:
            if not any(_is_pair(root, one) or _is_pair(one, root) for one in chosen):
                alone.append(root)
            continue
        only_inside = root.holder is None and readers[0] in chosen
        first = (
            inner in chosen
            and usage.readers.get(inner) == [root]
            and _is_low_rank(_pattern(root), _pattern(inner))
        )
        second = (
            len(readers) == 1
            and isinstance(readers[0], Root)
            and isinstance(readers[0].origin, Contraction)
            and readers[0].origin.x is root
            and _is_low_rank(_pattern(readers[0]), _pattern(root))
        )
        if not first and not second and not only_inside:
            alone.append(root)
    return alone


def candidates(trace: Trace, usage: Uses, chosen: Collection[Root]) -> list[CandidateSite]:
    """The chains among the products that are needed, in the order of the graph."""
    following: dict[Root, Root] = {}
    for root, readers in usage.readers.items():
        reader = readers[0]
        if root not in chosen or len(readers) != 1 or not isinstance(reader, Root):
            continue
        if reader in chosen and _is_chain(reader, root):
            following[root] = reader
    weights = Weights(trace)
    sites = []
    for root in trace.contractions:
        if root not in chosen or root not in usage.readers or root in following.values():
            continue
        roots = [root]
        while roots[-1] in following:
            roots.append(following[roots[-1]])
        sites.append(_candidate(weights, usage, tuple(reversed(roots))))
    return sites


def native_sites(trace: Trace) -> list[Site]:
    """Sites that already call ksopt's operator."""
    following = {root: read for root in trace.natives if (read := _read_by(root)) is not None}
    inner = {read: root for root, read in following.items()}
    sites = []
    for root in trace.natives:
        assert isinstance(root.origin, Native)
        if root in following:
            continue
        roots = [root]
        while roots[-1] in inner:
            roots.append(inner[roots[-1]])
        natives = [one.origin for one in reversed(roots) if isinstance(one.origin, Native)]
        patterns = [pattern for native in natives for pattern in native.chain]
        node = roots[-1].producer
        if node is None:
            continue
        own = root.origin
        batch = _hint(root.shape) // own.out_features
        sites.append(
            Site(
                node=node.name,
                place=place_of(node),
                spelling=spelling_of([node]),
                verdict=Verdict.LOWERED,
                reason="It calls ksopt's operator already.",
                chain=Chain(tuple(patterns)),
                batch=batch,
                dtype=dtype_name(root.dtype),
                flops=sum(native.siblings * native.chain.flops(batch) for native in natives),
            )
        )
    return sites


def _candidate(weights: Weights, usage: Uses, roots: tuple[Root, ...]) -> CandidateSite:
    training = any(map(weights.is_trained, roots))
    patterns = tuple(_pattern(root) for root in roots)
    nodes = [root.producer for root in reversed(roots) if root.producer is not None]
    batch = _hint(roots[0].shape) // patterns[0].out_features
    exits, is_biased = _exits(usage, roots[0]), _is_biased(usage, roots[0])
    site = Site(
        node=nodes[-1].name,
        place=place_of(nodes[-1]),
        spelling=spelling_of(nodes),
        verdict=Verdict.NOT_LOWERED,
        reason="",
        chain=Chain(patterns),
        batch=batch,
        dtype=dtype_name(roots[0].dtype),
        fused=_fused(_origin(roots[-1]).x, exits, is_biased),
        flops=sum(pattern.flops(batch) for pattern in patterns),
        training=training,
        to_input=not training and weights.passes_gradients(roots[-1]),
        computed=not training and any(weights.stored(root) is None for root in roots),
    )
    return CandidateSite(roots, site, exits[0] if len(exits) == 1 else None, is_biased)


def _fused(x: Root, exits: list[fx.Node], is_biased: bool) -> tuple[str, ...]:
    before = ("before",) if is_produced_elementwise(x.producer) else ()
    behind = ("behind",) if is_biased or is_read_elementwise(exits) else ()
    return before + behind


def _exits(usage: Uses, root: Root) -> list[fx.Node]:
    exits = []
    for node, view in usage.exits.items():
        origin = view.root.origin
        product = origin.product.root if isinstance(origin, Biased) else view.root
        if product is root:
            exits.append(node)
    return exits


def _read_by(root: Root) -> Root | None:
    """The result of ksopt's operator whose rows another call of it reads unchanged, if any."""
    assert isinstance(root.origin, Native)
    x = root.origin.x
    features = 0 if root.origin.batch_last else -1
    if not isinstance(x.root.origin, Native) or x.root.origin.batch_last != root.origin.batch_last:
        return None
    unchanged = x.map.dims[features] == identity(x.root.shape).dims[features]
    return x.root if unchanged else None


def _is_biased(usage: Uses, root: Root) -> bool:
    return any(
        isinstance(reader, Root) and isinstance(reader.origin, Biased)
        for reader in usage.readers.get(root, ())
    )


def _is_chain(left: Root, right: Root) -> bool:
    """Whether a product reads all features of another one's rows, in their order.

    A permutation in between would make it another matrix, and rows may become groups of features.
    """
    one, other = _origin(left), _origin(right)
    return (
        one.x is right
        and one.factor.direct
        and one.factor.batch_last == other.factor.batch_last
        and one.factor.pattern.in_features == other.factor.pattern.out_features
    )


def _origin(root: Root) -> Contraction:
    assert isinstance(root.origin, Contraction)
    return root.origin


def _pattern(root: Root) -> Pattern:
    return _origin(root).factor.pattern


def _is_dense(pattern: Pattern) -> bool:
    return pattern.a == 1 and pattern.d == 1


def _is_pair(left: Root, right: Root) -> bool:
    return _origin(left).x is right and _is_low_rank(_pattern(left), _pattern(right))


def _is_low_rank(left: Pattern, right: Pattern) -> bool:
    """Whether two dense factors have fewer weights than their product."""
    dense = left.out_features * right.in_features
    return _is_dense(left) and _is_dense(right) and left.nnz + right.nnz < dense


def _hint(shape: tuple[Size, ...]) -> int:
    total = 1
    for size in shape:
        total *= size_hint(size) or 1
    return total
