"""Tensors that are allocated and then written slice by slice.

A loop may write the blocks of a matrix, or the pieces of a result, into zeros. Nothing reads the
tensor before its last slice is written, so it equals a concatenation of the slices, or a
block-diagonal matrix. `gather` replaces it by that before the graph is followed. The replacement
has the same values and gradients, and is as fast, even if nothing is lowered.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ksopt.compile.capture.contraction import contraction
from ksopt.compile.capture.in_place import may_write
from ksopt.compile.capture.nodes import fake_result, memory_of
from ksopt.compile.capture.rules.structured_weight import UNFOLLOWED
from ksopt.compile.capture.symbolic import plain, same_shape
from ksopt.compile.capture.values import Miss, Trace
from ksopt.compile.lowering.emit import Emitter
from ksopt.compile.lowering.in_place_epilogues import switches_state

_ZEROS = (torch.zeros, torch.zeros_like, "new_zeros")
_ALLOCATIONS = (*_ZEROS, torch.empty, torch.empty_like, "new_empty")


class _NotTogetherError(Exception):
    """The slices are not followed; the text is a clause with the reason."""


@dataclass(frozen=True)
class _Window:
    """Position of a slice along one dim: ``length`` indices from ``start``, ``step`` apart."""

    start: int
    length: int
    step: int
    is_index: bool = False


@dataclass(frozen=True)
class _Write:
    """One slice that is written.

    Attributes:
        nodes: of the graph, the last one writes.
        value: the written node.
        windows: the window in each dim; None for all of it.
    """

    nodes: tuple[fx.Node, ...]
    value: fx.Node
    windows: tuple[_Window | None, ...]


def gather(graph: fx.Graph) -> bool:
    """Replace tensors that are written slice by slice by the joined slices.

    Args:
        graph: from Dynamo; nodes carry their fake results.

    Returns:
        Whether anything is replaced.
    """
    changed = False
    for node in list(graph.nodes):
        if not _is_allocated(node):
            continue
        order = {one: at for at, one in enumerate(graph.nodes)}
        writes = _writes(node, order)
        if not writes:
            _note_seen_before(node, order)
            continue
        try:
            _gather(graph, node, writes, order)
            changed = True
        except _NotTogetherError as error:
            last = writes[-1].nodes[-1].name
            node.meta[UNFOLLOWED] = f"slices are written into {node.name} up to {last}, and {error}"
    return changed


def unfollowed(trace: Trace) -> list[Miss]:
    """Misses for products whose results are written slice by slice and not followed."""
    misses = []
    for node in trace.order:
        if UNFOLLOWED not in node.meta:
            continue
        writes = [write for user in node.users if (write := _write(node, user)) is not None]
        values = [write.value for write in writes]
        views = [trace.views.get(value) for value in values]
        if len(views) > 1 and all(view and contraction(view) is not None for view in views):
            misses.append(Miss(node, str(node.meta[UNFOLLOWED])))
    return misses


def _is_allocated(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.target not in _ALLOCATIONS:
        return False
    value = fake_result(node)
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.is_floating_point()
        and value.is_contiguous()
        and not {"out", "requires_grad", "memory_format"} & set(node.kwargs)
    )


def _note_seen_before(node: fx.Node, order: dict[fx.Node, int]) -> None:
    users = sorted(node.users, key=order.__getitem__)
    if any(_write(node, user) for user in users[1:]):
        node.meta[UNFOLLOWED] = (
            f"slices are written into {node.name}, and {users[0].name} sees it before they are "
            "written"
        )


def _writes(node: fx.Node, order: dict[fx.Node, int]) -> list[_Write]:
    """The slices that are written before any other use of a tensor."""
    writes: list[_Write] = []
    for user in sorted(node.users, key=lambda one: order.get(one, -1)):
        write = _write(node, user)
        if write is None:
            break
        writes.append(write)
    return sorted(writes, key=lambda one: order[one.nodes[-1]])


def _write(node: fx.Node, user: fx.Node) -> _Write | None:
    if user.target is operator.setitem and not user.users and not user.kwargs:
        target, index, value = user.args
        nodes: tuple[fx.Node, ...] = (user,)
    elif user.target is operator.getitem and len(user.users) == 1:
        (copy,) = user.users
        is_copy = copy.op == "call_method" and copy.target == "copy_" and len(copy.args) == 2
        if not is_copy or copy.users or copy.kwargs or copy.args[0] is not user:
            return None
        target, index = user.args
        value, nodes = copy.args[1], (user, copy)
    else:
        return None
    if target is not node or value is node or not isinstance(value, fx.Node):
        return None
    windows = _windows(fake_result(node), index)
    if windows is None or not isinstance(fake_result(value), Tensor):
        return None
    return _Write(nodes, value, windows)


def _windows(whole: Tensor, index: Any) -> tuple[_Window | None, ...] | None:
    """The window of an index in each dim; None if it has more than numbers and slices."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if parts.count(...) > 1 or len(parts) - parts.count(...) > whole.dim():
        return None
    at = parts.index(...) if ... in parts else len(parts)
    parts[at : at + 1] = [slice(None)] * (whole.dim() - len(parts) + (... in parts))
    windows: list[_Window | None] = []
    for part, size in zip(parts, map(plain, whole.shape), strict=True):
        if part == slice(None):
            windows.append(None)
        elif not isinstance(size, int):
            return None
        elif isinstance(part, int) and not isinstance(part, bool) and -size <= part < size:
            windows.append(_Window(part % size, 1, 1, is_index=True))
        elif isinstance(part, slice) and _is_plain(part):
            start, stop, step = part.indices(size)
            taken = len(range(start, stop, step))
            windows.append(None if taken == size else _Window(start, taken, step))
        else:
            return None
    return tuple(windows)


def _is_plain(part: slice) -> bool:
    ends = (part.start, part.stop, part.step)
    return all(end is None or isinstance(end, int) for end in ends)


def _gather(
    graph: fx.Graph, node: fx.Node, writes: list[_Write], order: dict[fx.Node, int]
) -> None:
    _check_order(graph, node, writes, order)
    whole = fake_result(node)
    _check_values(whole, writes)
    cut = sorted({dim for one in writes for dim, w in enumerate(one.windows) if w is not None})
    by_start = sorted(writes, key=lambda one: [w.start for w in one.windows if w is not None])
    windows = [[_window(one, dim) for dim in cut] for one in by_start]
    sizes = [int(whole.shape[dim]) for dim in cut]
    emitted: list[fx.Node] = []
    point = writes[-1].nodes[-1].next
    emit = Emitter(point, writes[-1].nodes[-1], emitted, {})
    values = [one.value for one in by_start]
    if len(cut) == 1:
        result = _side_by_side(emit, values, [w[0] for w in windows], cut[0], sizes[0])
    elif len(cut) == 2 and node.target in _ZEROS:
        result = _on_diagonal(emit, values, windows, cut, sizes, whole.dim())
    else:
        raise _NotTogetherError("they are no blocks along a diagonal of zeros")
    if fake_result(result).dtype != whole.dtype:
        result = emit.method("to", result, whole.dtype)
    if not same_shape(fake_result(result).shape, whole.shape):
        for one in reversed(emitted):
            graph.erase_node(one)
        raise _NotTogetherError("they are not all of it")
    gone = {one for write in writes for one in write.nodes}
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in gone)
    for one in sorted(gone, key=order.__getitem__, reverse=True):
        graph.erase_node(one)
    graph.erase_node(node)


def _window(write: _Write, dim: int) -> _Window:
    window = write.windows[dim]
    if window is None:
        raise _NotTogetherError(f"{write.nodes[-1].name} writes all of a dim that others cut")
    return window


def _side_by_side(
    emit: Emitter, values: list[fx.Node], windows: list[_Window], dim: int, size: int
) -> fx.Node:
    """The tensor of slices that cover one dim."""
    _check_tiling(windows, size)
    if windows[0].is_index:
        return emit.call(torch.stack, values, dim)
    if windows[0].step > 1:  # every step-th of the whole
        return emit.call(torch.flatten, emit.call(torch.stack, values, dim + 1), dim, dim + 1)
    return emit.call(torch.cat, values, dim)


def _on_diagonal(
    emit: Emitter,
    values: list[fx.Node],
    windows: list[list[_Window]],
    cut: list[int],
    sizes: list[int],
    rank: int,
) -> fx.Node:
    """The tensor of blocks along the diagonal of two dims."""
    for at in (0, 1):
        _check_tiling([pair[at] for pair in windows], sizes[at], equal=True)
    first, second = windows[0]
    if (first.is_index, first.step > 1) != (second.is_index, second.step > 1):
        raise _NotTogetherError("their two dims are cut in different ways")
    if first.is_index:
        return emit.call(torch.diag_embed, emit.call(torch.stack, values, -1), 0, *cut)
    if rank != 2:
        raise _NotTogetherError("they are blocks of more than a matrix")
    if first.step == 1:
        return emit.call(torch.block_diag, *values)
    # [b, c, d] -> [b, d, c, d] -> [b*d, c*d]
    spread = emit.call(torch.diag_embed, emit.call(torch.stack, values, -1), 0, 1, 3)
    return emit.call(torch.flatten, emit.call(torch.flatten, spread, 2, 3), 0, 1)


def _check_tiling(windows: list[_Window], size: int, equal: bool = False) -> None:
    """Reject slices, in the order of their starts, that do not cover a dim exactly once."""
    first = windows[0]
    if any((w.is_index, w.step) != (first.is_index, first.step) for w in windows):
        raise _NotTogetherError("they are cut in different ways")
    if first.step > 1:
        right = [(at, size // first.step) for at in range(first.step)]
        if size % first.step or [(w.start, w.length) for w in windows] != right:
            raise _NotTogetherError("they overlap, or are not all of it")
        return
    reached = 0
    for window in windows:
        if window.start != reached or (equal and window.length != first.length):
            raise _NotTogetherError("they overlap, are unequal or are not all of it")
        reached += window.length
    if reached != size:
        raise _NotTogetherError("they are not all of it")


def _check_values(whole: Tensor, writes: list[_Write]) -> None:
    dtypes = set()
    for write in writes:
        value = fake_result(write.value)
        shape = [
            size if window is None else window.length
            for size, window in zip(whole.shape, write.windows, strict=True)
            if window is None or not window.is_index
        ]
        name = write.nodes[-1].name
        if not same_shape(value.shape, shape):
            raise _NotTogetherError(f"{name} repeats its value")
        if value.device != whole.device or value.layout is not torch.strided:
            raise _NotTogetherError(f"{name} writes a value of another device or layout")
        dtypes.add(value.dtype)
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise _NotTogetherError("they are of several types")


def _check_order(
    graph: fx.Graph, node: fx.Node, writes: list[_Write], order: dict[fx.Node, int]
) -> None:
    """Reject slices between which a node changes something they or their values depend on."""
    own = {one for write in writes for one in write.nodes}
    written = order[writes[-1].nodes[-1]]
    for other in graph.nodes:
        if not order[node] < order[other] < written or other in own:
            continue
        if switches_state(other):
            raise _NotTogetherError(f"{other.name} changes how they are written")
        if not may_write(other):
            continue
        memories = {memory_of(argument) for argument in other.all_input_nodes}
        for write in writes:
            memory = memory_of(write.value)
            before = order[write.nodes[-1]] < order[other]
            if before and (memory is None or None in memories or memory in memories):
                raise _NotTogetherError(f"{other.name} writes one of them in between")
