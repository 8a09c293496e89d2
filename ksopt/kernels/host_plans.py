"""The host library's table of plans (csrc/host/plan_table.hpp) for layers run without Python.

A plan is looked up by the problem that it was chosen for: one launch, or a product for each factor,
by the factor's own choice or the plan's, and torch's operations behind them. It is run for plain
operands whose weights are prepared (weight_table.py), or, if they change, packed by a launch ahead.
All other calls run Python, which checks, chooses, prepares, and then registers the plan. Compiled
graphs look plans up without Python (csrc/host/layer_kernels.cpp); eager layers do here, by the same
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from ksopt import precision
from ksopt.jit import host
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.by_factors import ByPair
from ksopt.kernels.candidate import FACTORS, LAYERS
from ksopt.kernels.launcher import Enterable, RepairedEntry
from ksopt.kernels.operands import Operands
from ksopt.kernels.weight_cache import is_stored
from ksopt.kernels.weight_scopes import sync_host, thread_state

_FACTORS, _PAIR, _NONE = -2, -4, -1  # of csrc/host/plan_table.hpp
_CACHED, _REPACKED, _STORED = range(3)  # ``Weights`` there

# The overload's implementation, which saves a call of Python. None until the table has a plan.
_run_layer: Callable[..., Tensor | None] | None = None


def run(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    batch_last: bool,
    siblings: int,
    owners: Sequence[Tensor] | None = None,
    *,
    in_float32: bool = False,
    out: Tensor | None = None,
) -> Tensor | None:
    """A layer's result, where its plan is in the table and can be run; else None.

    Args:
        x, weights, bias, residual, activation, batch_last, siblings, owners, in_float32: see
            `ksopt.ops`. Nothing is assumed of them: operands that do not fit together return None.
        out: as for `ksopt.ops.implementation.chain`; None if it cannot be written straight.
    """
    if _run_layer is None:
        return None
    around = (bias, residual, activation, batch_last, siblings)
    try:
        stored = owners is not None or all(map(is_stored, weights))
        how = (in_float32, thread_state.repacked, stored)
        return _run_layer(x, weights, *around, owners, *how, out)
    except (RuntimeError, AttributeError):  # the path that checks and decides reports the error
        return None


def register(
    operands: Operands,
    activation: str,
    batch_last: bool,
    siblings: int,
    decision: Decision | None = None,
    in_float32: bool = False,
) -> None:
    """Register the plan of these operands, if the host library can run it.

    Args:
        operands, activation, batch_last, siblings, in_float32: of a layer.
        decision: what was decided; None for one launch per factor in all weight modes.
    """
    global _run_layer
    x = operands.x
    if not host.is_loaded() or not x.is_contiguous():
        return
    layer = (x, operands.weights, operands.bias, operands.residual)
    around = (activation, batch_last, siblings, in_float32)
    exact = x.dtype is not torch.float32 or precision.is_exact()
    for mode in (_CACHED, _REPACKED, _STORED):
        entry: tuple[int, int, int] = _FACTORS, 0, 0
        pair: list[int] = []
        if decision is not None:
            stored = decision.cached if decision.stored is None else decision.stored
            choice = (decision.cached, decision.repacked, stored)[mode]
            pair = _entries(choice)
            entry = (_PAIR, 0, 0) if pair else _entry(choice)
        torch.ops.ksopt_host.know_plan(*layer, *around, exact, mode, *entry, pair)
    sync_host()
    _run_layer = torch.ops.ksopt_host.run_layer.default._op


def register_mlp(
    operands: Operands,
    factors: int,
    hidden_activation: str,
    activation: str,
    decision: Decision | None,
) -> None:
    """Register the launch of two layers, if the host library can run it.

    Args:
        operands: of the layers.
        factors: of the first one's chain.
        hidden_activation, activation: the first layer's, and the second one's.
        decision: what was decided; None for one plan per layer in all weight modes.
    """
    x, weights = operands.x, operands.weights
    if not host.is_loaded() or not x.is_contiguous():
        return
    layers = (x, weights[:factors], weights[factors:])
    around = (operands.hidden_bias, operands.bias, operands.residual)
    exact = x.dtype is not torch.float32 or precision.is_exact()
    for repacked in (False, True):
        kernel, form = _NONE, 0
        if decision is not None:
            kernel, form, _ = _entry(decision.repacked if repacked else decision.cached)
        how = (hidden_activation, activation, exact, repacked, kernel, form)
        torch.ops.ksopt_host.know_mlp(*layers, *around, *how)
    sync_host()


def _entry(choice: Choice) -> tuple[int, int, int]:
    """A plan's kernel, the form of its weights, and the kernel that repairs its product, or 0."""
    if choice.name == FACTORS:
        return _FACTORS, 0, 0
    if choice.name == LAYERS:  # each layer has a plan of its own
        return _NONE, 0, 0
    entry = choice.call.entry() if isinstance(choice.call, Enterable) else None
    if entry is None:
        return _NONE, 0, 0
    return entry.plan, entry.form, entry.repair if isinstance(entry, RepairedEntry) else 0


def _entries(choice: Choice) -> list[int]:
    """The entries of a pair's kernels, one behind the other; empty if the library has not both."""
    if not isinstance(choice.call, ByPair):
        return []
    calls = (choice.call.first.call, choice.call.second.call)
    entries = [one.entry() if isinstance(one, Enterable) else None for one in calls]
    known = [entry for entry in entries if entry is not None]
    return [int(value) for one in known for value in astuple(one)] if len(known) == 2 else []


def forget() -> None:
    """Drop all plans, and the launches of trained chains."""
    if host.is_loaded():
        torch.ops.ksopt_host.forget_plans()
