"""The pass over a graph: capture, recognise, decide, rewrite, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from ksopt import ops
from ksopt.compile import inactive_dropouts, slice_writes
from ksopt.compile.capture import frozen_weight
from ksopt.compile.capture.interpreter import CannotRunError, run
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import Contraction, Kind, Miss, Root, Trace
from ksopt.compile.checkpoint_bodies import (
    UsesByCaller,
    behind_written_calls,
    bodies_of,
    in_region,
    uses_by_caller,
)
from ksopt.compile.lowering.candidates import (
    CandidateSite,
    candidate_products,
    candidates,
    native_sites,
    unpaired_dense_products,
)
from ksopt.compile.lowering.epilogue import epilogues
from ksopt.compile.lowering.fuse import IsWhole, fuse, join_gradients, records_gradients
from ksopt.compile.lowering.memory_aliasing import (
    CopiesByStrides,
    inputs_with_observed_strides,
    writes_inputs_that_share,
)
from ksopt.compile.lowering.recomputed_activations import recompute_activations
from ksopt.compile.lowering.recomputed_roots import CannotLowerError, product_of
from ksopt.compile.lowering.rewrite import lower
from ksopt.compile.lowering.rewrite_safety import Uses, check, uses
from ksopt.compile.lowering.whole_layer import in_words, launch_times
from ksopt.compile.sites import Decision, Report, Site, Verdict, place_of, spelling_of
from ksopt.patterns.chain import Chain, Pattern

log = logging.getLogger("ksopt.compile")
"""The logger of the backend: INFO reports on a graph, DEBUG on each site."""

Judge = Callable[[Site], Decision]
"""Decides whether a site is lowered."""

_PRODUCTS = (ops.ks_mm, ops.ks_mm_once, ops.ks_mm_saving)
_SITE = "ksopt_site"
"""Key of a lowered product's meta: the node of its site."""


def rewrite_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    judge: Judge,
    frozen_values: frozen_weight.FrozenValues | None = None,
    weights: frozenset[int] | None = None,
    is_whole: IsWhole | None = None,
) -> Report:
    """Rewrite the Kronecker-sparse products of a graph, in place.

    Args:
        gm: as Dynamo or torch.export captured it, or torch.fx.symbolic_trace.
        example_inputs: a tensor or number for each placeholder; parameters themselves.
        judge: decides each site.
        frozen_values: analyzes the values of frozen weights; None does not.
        weights: which placeholders are parameters or buffers; None detects them.
        is_whole: decides whether a chain and its surroundings are computed in one launch; None
            never does.

    Returns:
        The report. A graph that cannot be followed is unchanged, and noted.
    """
    start = time.perf_counter()
    inputs = _fake_inputs(gm, example_inputs)
    if weights is None:
        weights = _weights(gm, example_inputs)
    report = Report(graphs=1)

    def timed(site: Site) -> Decision:
        decision_start = time.perf_counter()
        decision = judge(site)
        report.deciding_s += time.perf_counter() - decision_start
        return decision

    try:
        _rewrite(gm, inputs, weights, timed, frozen_values, report)
        if is_whole is not None:
            decision_start = time.perf_counter()
            _fuse(gm, is_whole, report)
            report.deciding_s += time.perf_counter() - decision_start
    except CannotRunError as error:
        note = f"a graph was left alone: {error}"
        report.notes.append(note)
        log.warning("%s", note)
    report.pass_s = time.perf_counter() - start - report.deciding_s
    return report


def _rewrite(
    gm: fx.GraphModule,
    inputs: list[Any],
    weights: frozenset[int],
    judge: Judge,
    frozen_values: frozen_weight.FrozenValues | None,
    report: Report,
    behind: UsesByCaller | None = None,
) -> set[fx.Node]:
    """Rewrite one graph, see `rewrite_graph`.

    Args:
        behind: uses of its inputs and results by the graph that calls it; None if there is none.

    Returns:
        The inputs whose strides are observable by the caller; see `CopiesByStrides`.
    """
    bypassed = inactive_dropouts.bypass(gm.graph)
    gathered = slice_writes.gather(gm.graph)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    pattern_of = None
    if frozen_values is not None:
        places = {node: at for at, node in enumerate(placeholders) if at in weights}
        pattern_of = frozen_weight.FrozenNodes(frozen_values, places)
    trace, tracker = run(gm, inputs, weights, pattern_of)
    if behind is not None:
        for storage in {trace.memory[node][0] for node in behind.written if node in trace.memory}:
            trace.writes.setdefault(storage, []).append(len(trace.order))
        trace.observed_strides |= behind.observed
    passes = report.passes
    passes["nodes_followed"] += len(trace.order)
    passes["products_recognised"] += len(trace.contractions)
    passes["frozen_patterns"] += 0 if frozen_values is None else len(frozen_values.patterns)
    _rewrite_bodies(gm, tracker, judge, report)
    observed_inputs = set() if behind is None else inputs_with_observed_strides(gm.graph, trace)
    report.linear_flops += sum(trace.flops.values())
    misses = [*trace.misses, *slice_writes.unfollowed(trace)]
    chosen = candidate_products(trace)
    passes["products_checked"] += len(chosen)
    unsafe = behind_written_calls(gm, trace)
    misses += [
        Miss(root.producer, _WRITTEN, _pattern(root))
        for root in chosen
        if root.producer is not None and root.producer in unsafe
    ]
    chosen = [root for root in chosen if root.producer not in unsafe]
    chosen, usage = _possible(gm, tracker, chosen, misses)
    misses += _unread(trace, chosen, usage)
    sites = []
    not_lowered: list[CandidateSite] = []
    possible = candidates(trace, usage, chosen)
    for candidate in possible:
        decision = judge(candidate.site)
        passes["chains_decided"] += 1
        sites.append(candidate.site.decided(decision))
        if not decision.lower:
            not_lowered.append(candidate)
    left = {root for candidate in not_lowered for root in candidate.roots}
    chosen = [root for root in chosen if root not in left]
    before = len(gm.graph.nodes)
    emitted, products = _lower(gm, tracker, chosen, misses, sites)
    followed = dict(one.product(products) for one in possible)
    steps = epilogues(gm.graph, {node: one for node, one in followed.items() if node is not None})
    sites = [replace(site, epilogue=steps.get(site.node, ())) for site in sites]
    for candidate in possible:
        for node in (products[root] for root in candidate.roots if root in products):
            node.meta[_SITE] = candidate.site.node
    passes["products_lowered"] += sum(node.target in _PRODUCTS for node in emitted)
    passes["nodes_emitted"] += len(emitted)
    passes["nodes_removed"] += before + len(emitted) - len(gm.graph.nodes)
    order = {node.name: at for node, at in trace.order.items()}
    taken = {site.node for site in sites}
    for miss in misses:
        if miss.node.name not in taken:  # the first reason for a node says the most
            sites.append(_missed(miss))
            taken.add(miss.node.name)
    sites += native_sites(trace)
    report.sites += sorted(sites, key=lambda site: order.get(site.node, 0))
    if chosen or gathered or bypassed:
        gm.graph.lint()
        gm.recompile()
    return observed_inputs


def _fuse(gm: fx.GraphModule, is_whole: IsWhole, report: Report) -> None:
    """Replace layers that one launch computes by one operator each, and note it at their sites."""
    fused = fuse(gm, is_whole)
    new = [layer for layer in fused if not layer.by_author]
    report.passes["layers_in_one_launch"] += len(new)
    gated = sum(layer.problem.epilogue.is_gated for layer in new)
    report.passes["gates_in_one_launch"] += gated // 2
    together = sum(bool(layer.beside) for layer in new)
    report.passes["mlps_in_one_launch"] += (together - gated) // 2
    for layer in fused:
        places, chain = list(map(place_of, layer.products)), layer.problem.chain
        nodes = {node.meta.get(_SITE, node.name) for node in layer.products}
        device = fake_result(layer.products[0]).device
        for at, site in enumerate(report.sites):
            if site.node in nodes and site.chain == chain and site.place in places:
                steps = layer.problem.epilogue.names
                beside = f", with {', '.join(steps)}" if steps else ""
                beside += f", and {layer.beside}" if layer.beside else ""
                batch = site.batch or 0
                how = in_words(layer.problem, batch, device, layer.weights)
                reason = f"{site.reason} {how} computes all of it{beside}."
                times = launch_times(layer.launch, batch, device, layer.weights)
                report.sites[at] = replace(
                    site, one_launch=steps, reason=reason, launch_times=times
                )
                break
    joined = join_gradients(gm)
    recomputed = recompute_activations(gm.graph) if records_gradients(gm.graph) else 0
    report.passes["activations_recomputed"] += recomputed
    if new or joined or recomputed:
        gm.graph.lint()
        gm.recompile()


def _possible(
    gm: fx.GraphModule, tracker: Tracker, chosen: list[Root], misses: list[Miss]
) -> tuple[list[Root], Uses]:
    """The products that can be rewritten, and their uses; the others are added to misses."""
    while True:
        try:
            usage = uses(gm.graph, tracker.trace, chosen)
            check(tracker, usage, chosen)
        except CannotLowerError as error:
            chosen = _without(chosen, error)
            _add_miss(misses, error)
            continue
        alone = unpaired_dense_products(usage, chosen)
        if not alone:
            return chosen, usage
        chosen = [root for root in chosen if root not in alone]


_WRITTEN = "a checkpoint's operand is written in place behind it, and may be read again"
_PARTS = "only parts or repetitions of its result are read"
_INSIDE = "no node holds its result, only what is computed from it"


def _unread(trace: Trace, chosen: list[Root], usage: Uses) -> list[Miss]:
    """Products that are not rewritten because no view of all of their result is read."""
    dead = set(usage.dead)
    held = {root for view in trace.views.values() for root in (view.root, product_of(view.root))}
    return [
        Miss(root.producer, _PARTS if root in held else _INSIDE, _pattern(root))
        for root in chosen
        if root not in usage.readers and root.producer is not None and root.producer not in dead
    ]


def _pattern(root: Root) -> Pattern | None:
    return root.origin.factor.pattern if isinstance(root.origin, Contraction) else None


def _lower(
    gm: fx.GraphModule,
    tracker: Tracker,
    chosen: list[Root],
    misses: list[Miss],
    sites: list[Site],
) -> tuple[list[fx.Node], dict[Root, fx.Node]]:
    """Lower the products that can be; return the new nodes, and the one of each product."""
    while chosen:
        chosen, usage = _possible(gm, tracker, chosen, misses)
        try:
            return lower(gm, tracker, usage, chosen)
        except CannotLowerError as error:
            chosen = _without(chosen, error)
            _add_miss(misses, error)
            producer = error.root.producer
            sites[:] = [s for s in sites if producer is None or s.node != producer.name]
    return [], {}


def _without(chosen: list[Root], error: CannotLowerError) -> list[Root]:
    """The products without the one that an error concerns; none if it concerns no product."""
    left = [root for root in chosen if root is not error.root]
    return left if len(left) < len(chosen) else []


def _add_miss(misses: list[Miss], error: CannotLowerError) -> None:
    if error.root.producer is not None:
        misses.append(Miss(error.root.producer, error.reason, _pattern(error.root)))


def _missed(miss: Miss) -> Site:
    return Site(
        node=miss.node.name,
        place=place_of(miss.node),
        spelling=spelling_of([miss.node]),
        verdict=Verdict.NOT_RECOGNISED,
        reason=f"At node {miss.node.name}: {miss.reason}.",
        chain=None if miss.pattern is None else Chain((miss.pattern,)),
    )


def _rewrite_bodies(gm: fx.GraphModule, tracker: Tracker, judge: Judge, report: Report) -> None:
    """Rewrite the graphs that checkpointing calls.

    The last one is the first: the strides it observes affect the earlier ones.
    """
    bodies = bodies_of(gm)
    if not bodies:
        return
    trace = tracker.trace
    copies = CopiesByStrides(gm.graph, trace)
    inputs_share = writes_inputs_that_share(gm.graph, trace)
    sites: list[Site] = []
    for node, body in reversed(bodies.items()):
        arguments = list(node.args[1:])
        inputs = [
            fake_result(argument) if isinstance(argument, fx.Node) else argument
            for argument in arguments
        ]
        views = [
            trace.views.get(argument) if isinstance(argument, fx.Node) else None
            for argument in arguments
        ]
        weights = frozenset(
            at
            for at, view in enumerate(views)
            if view is not None and view.root.kind is Kind.WEIGHT
        )
        placeholders = [one for one in body.graph.nodes if one.op == "placeholder"]
        region, before = trace.regions[node], len(report.sites)
        behind = uses_by_caller(
            node, body.graph, trace, copies.observed_strides_of(region), inputs_share
        )
        with in_region(region, inputs):
            observed = _rewrite(body, inputs, weights, judge, None, report, behind)
        for inside, outside in zip(placeholders, arguments, strict=True):
            if inside in observed and isinstance(outside, fx.Node):
                trace.observed_strides.add(outside)
        sites = report.sites[before:] + sites
        del report.sites[before:]
    report.sites += sites


def _fake_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """A fake tensor or number for each placeholder."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    known = [fake_result(node) for node in placeholders]
    if all(value is not None for value in known):
        return known
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return [
        mode.from_tensor(value) if isinstance(value, Tensor) else value for value in example_inputs
    ]


def _weights(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    """Indices of placeholders that are parameters, buffers or other tensors of a module."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    weights = set()
    for at, node in enumerate(placeholders):
        value = example_inputs[at] if at < len(example_inputs) else None
        owned = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
        if owned or isinstance(value, nn.Parameter):
            weights.add(at)
    return frozenset(weights)


def count(report: Report) -> None:
    """Add a report to torch's counters, ``torch._dynamo.utils.counters["ksopt"]``."""
    from torch._dynamo.utils import counters

    counters["ksopt"]["graphs"] += report.graphs
    for verdict in Verdict:
        counters["ksopt"][verdict.key] += report.count(verdict)
    for name, number in report.passes.items():
        counters["ksopt"][name] += number
