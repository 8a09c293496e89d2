"""Entry point of ``torch.compile(model, backend="ksopt")``.

Kronecker-sparse products become one operator, `torch.ops.ksopt.ks_mm`; everything around them goes
to Inductor. torch finds this function through the entry-point group ``torch_dynamo_backends``.

It runs before AOTAutograd, for every graph that Dynamo captures, also when torch's caches hold what
Inductor compiled: so no pattern found in a weight's values can be stale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

import ksopt as package
from ksopt import ops
from ksopt.compile.capture.frozen_weight import FrozenValues, Watched
from ksopt.compile.explain import check_requirement
from ksopt.compile.lowering import traced_choices
from ksopt.compile.lowering.decide import decide
from ksopt.compile.lowering.out_variants import plan_results
from ksopt.compile.lowering.whole_layer import is_whole
from ksopt.compile.options import OPTIONS, Options, inductor_config, read
from ksopt.compile.passes import Judge, count, log, rewrite_graph
from ksopt.compile.sites import Decision, Report, Site, Verdict
from ksopt.compile.uncompiled import uncompiled
from ksopt.kernels.cuda_graph_weights import RecordedWeights


def ksopt(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured.

    Args:
        gm: the graph.
        example_inputs: its inputs, parameters among them.
        mode: as in torch.compile: "default", "reduce-overhead", "max-autotune", ...
        options: ksopt's own (``OPTIONS``) and Inductor's (``torch._inductor.list_options()``).
            torch.compile takes mode or options, not both: write ``options={"mode": ...}`` then.

    Returns:
        A function of the same inputs.

    Raises:
        InvalidInputError: an unknown mode or option, or a value of the wrong type. Dynamo shows it
            inside its own BackendCompilerFailed.
        RequirementError: ``options["require"]`` asks for more than was lowered.

    Example:
        >>> from ksopt.nn import KSLinear
        >>> model = torch.compile(KSLinear(8, 8, "(1,8,8,1)"), backend="ksopt")
    """
    parsed = read(mode, options)
    values = None
    if parsed.frozen_values:
        values = FrozenValues(example_inputs, parsed.frozen_tolerance)
    original = uncompiled(gm) if values is not None else None
    decides = judge(example_inputs, parsed.tune)
    report = rewrite_graph(
        gm,
        example_inputs,
        decides,
        values,
        is_whole=functools.partial(is_whole, tune=parsed.tune),
    )
    _publish(report)
    check_requirement(report, parsed.require)
    compiled = compile_by_inductor(gm, example_inputs, parsed.inductor)
    if parsed.records_graphs:
        compiled = RecordedWeights(compiled)
    if values is not None and values.patterns and original is not None:
        return Watched(compiled, original, values)
    return compiled


def judge(example_inputs: Sequence[Any], tune: Any) -> Judge:
    """The function that decides about the sites of a graph with these inputs.

    Args:
        example_inputs: of the graph; they determine the device.
        tune: as ``options["tune"]``.
    """
    devices = [value.device for value in example_inputs if isinstance(value, Tensor)]
    # A graph on a GPU may have scalars on the CPU as inputs.
    device = next((one for one in devices if one.type != "cpu"), torch.device("cpu"))

    def decided(site: Site) -> Decision:
        return decide(site, device, tune)

    return decided


def compile_by_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: dict[str, Any]
) -> Callable[..., Any]:
    """Let Inductor compile a graph. Tests of what was rewritten put a quicker compiler here.

    A graph with lazily negated inputs is not compiled: Inductor reads their memory, which holds
    the opposite of their values (seen with 2.13; Dynamo guards on their kind).
    """
    from torch._inductor.compile_fx import compile_fx

    if any(isinstance(value, Tensor) and value.is_neg() for value in example_inputs):
        forward: Callable[..., Any] = gm.forward
        return forward

    plan_results()
    # torch's on-disk caches know operators by name only: see the top of ksopt.ops.
    tag = (
        f"{torch.compiler.config.cache_key_tag}ksopt-{package.__version__}-{ops.CONTRACT}"
        f"{traced_choices.digest(gm.graph)}"
    )
    settings: Any = torch.compiler.config  # its patch() is added at run time
    with settings.patch(cache_key_tag=tag):
        compiled: Any = compile_fx(gm, example_inputs, config_patches=config)
    return compiled


@contextmanager
def collected() -> Iterator[list[Report]]:
    """The reports of all graphs that the backend compiles inside the block, in their order.

    `ksopt.explain` predicts what the backend would do; these reports state what it did, and how
    long it took. docs/backend.md has an example.
    """
    reports: list[Report] = []
    _collecting.append(reports)
    try:
        yield reports
    finally:
        _collecting[:] = [one for one in _collecting if one is not reports]


_collecting: list[list[Report]] = []


def _publish(report: Report) -> None:
    count(report)
    for reports in _collecting:
        reports.append(report)
    for site in report.sites:
        log.debug("%s: %s %s: %s", site.place, site.chain, site.verdict.value, site.reason)
    if report.sites:
        log.info(
            "%d sites lowered, %d left to PyTorch, %d not recognised; "
            "%.0f %% of the linear flops; %.0f ms",
            *(report.count(verdict) for verdict in Verdict),
            100 * report.covered,
            1e3 * report.pass_s,
        )
    elif report.linear_flops:
        log.info("no product of this graph is Kronecker-sparse: Inductor compiles it as it is")


def _reset() -> None:
    """torch._dynamo.reset() calls this: forget recorded CUDA graphs, as for Inductor itself."""
    if torch.cuda.is_initialized():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


ksopt.reset = _reset  # type: ignore[attr-defined]

__all__ = [
    "OPTIONS",
    "Options",
    "collected",
    "compile_by_inductor",
    "inductor_config",
    "judge",
    "ksopt",
]
