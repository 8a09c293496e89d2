"""The pass without the backend: for another backend, and for an exported program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ksopt import ops
from ksopt.compile.backend import judge
from ksopt.compile.lowering.decide import checked_tune
from ksopt.compile.passes import rewrite_graph
from ksopt.compile.sites import Report
from ksopt.errors import InvalidInputError


def rewrite(gm: fx.GraphModule, example_inputs: Sequence[Any], *, tune: Any = None) -> Report:
    """Rewrite the Kronecker-sparse products of a graph, in place; compile it as you like then.

    Args:
        gm: a graph from Dynamo, as a torch.compile backend receives it, or any whose
            weights are placeholders or attributes, and whose modules are not called whole.
        example_inputs: one for each placeholder: the inputs of the backend, or tensors of the
            shapes to compile for. Parameters among them are weights, as are the graph's own.
        tune: as ``options["tune"]`` of the backend "ksopt".

    Returns:
        The report: ``sites``, ``covered``, ``notes``.

    The values of frozen weights are not analyzed: nothing would notice if they changed.

    Raises:
        InvalidInputError: ``tune`` is not allowed, or gm is no graph.

    Example:
        >>> def my_backend(gm, example_inputs):
        ...     rewrite(gm, example_inputs)
        ...     return gm.forward  # or hand it to a compiler
        >>> linear = torch.compile(torch.nn.Conv1d(8, 8, 1, groups=2), backend=my_backend)
        >>> linear(torch.ones(3, 8, 5)).shape
        torch.Size([3, 8, 5])
    """
    if not isinstance(gm, fx.GraphModule):
        raise InvalidInputError(
            f"rewrite: gm is a {type(gm).__name__}: give a torch.fx.GraphModule"
        )
    return rewrite_graph(gm, example_inputs, judge(example_inputs, checked_tune(tune)))


def export_pass(program: torch.export.ExportedProgram, *, tune: Any = None) -> Any:
    """An exported program with its Kronecker-sparse products as ksopt's operator.

    Args:
        program: from torch.export.export; it is not changed.
        tune: as ``options["tune"]`` of the backend "ksopt".

    Returns:
        A new ExportedProgram, in core ATen operators and ``ksopt::ks_mm``. Whatever loads it, a
        package of AOTInductor included, must import ksopt.ops first.

    Raises:
        InvalidInputError: ``tune`` is not allowed, or the program is none.

    Example:
        >>> layer = torch.nn.Conv1d(8, 8, 1, groups=2)
        >>> program = torch.export.export(layer, (torch.ones(3, 8, 5),))
        >>> rewritten = export_pass(program)
        >>> "ks_mm" in str(rewritten.graph)
        True
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise InvalidInputError(
            f"export_pass: the program is a {type(program).__name__}: give what "
            "torch.export.export returns"
        )
    # A new program with a graph of its own; decomposing nothing leaves the operators alone.
    program = program.run_decompositions({})
    signature = program.graph_signature
    written = {*signature.buffers_to_mutate.values()}
    owned = {
        *signature.inputs_to_parameters,
        *(name for name, buffer in signature.inputs_to_buffers.items() if buffer not in written),
        *signature.inputs_to_lifted_tensor_constants,
    }
    graph = program.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    weights = frozenset(at for at, node in enumerate(placeholders) if node.name in owned)
    values = [node.meta.get("val") for node in placeholders]
    tensors = [value for value in values if isinstance(value, Tensor)]
    rewrite_graph(program.graph_module, values, judge(tensors, checked_tune(tune)), weights=weights)
    # Traced again: what was inserted becomes ATen operators, as an exported program must have.
    program = program.run_decompositions({})
    for node in program.graph.nodes:
        if node.target in (ops.ks_mm_inner, ops.ks_mm_repacked, ops.ks_mm_frozen):
            node.target = ops.ks_mm  # the program may yet be run where gradients are recorded
    program.graph_module.recompile()
    return program
