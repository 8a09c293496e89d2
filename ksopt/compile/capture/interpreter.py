"""Interpreter that runs a Dynamo graph on its fake tensors under a `Tracker`.

The state of gradients, autocast and vmap is recorded for every node. Torch functions that cannot be
part of a Kronecker-sparse product are not run: their result is already known.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.amp import autocast_mode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from ksopt.compile.capture.in_place import (
    may_write,
    writes_in_place,
    writes_its_inputs,
    written_inputs,
)
from ksopt.compile.capture.index_map import NotNestedError, identity, is_identity
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.reshape_plan import plan
from ksopt.compile.capture.rule_table import follow_call, follow_call_in_vmap
from ksopt.compile.capture.rules import (
    concat,
    einsum,
    mask,
    matmul,
    movement,
    structured_weight,
    vmap,
)
from ksopt.compile.capture.rules.einsum_series import is_series, note_series
from ksopt.compile.capture.symbolic import is_marked_dynamic, is_multiple_of_a_size, plain
from ksopt.compile.capture.tracker import FixedSizeNeeded, FrozenPattern, Tracker
from ksopt.compile.capture.values import Holder, Kind, Region, Trace, View

_RULES = (concat, einsum, mask, matmul, movement, structured_weight, vmap)  # registered on import


class CannotRunError(Exception):
    """The graph cannot be followed; the text is a clause with the reason."""


_OPAQUE = {
    F.layer_norm,
    F.rms_norm,
    F.group_norm,
    F.batch_norm,
    F.gelu,
    F.silu,
    F.softmax,
    F.scaled_dot_product_attention,
    F.embedding,
    F.cross_entropy,
    torch._C._nn.gelu,
    torch._C._nn.scaled_dot_product_attention,
    torch.softmax,
    torch.tanh,
    torch.sigmoid,
    torch.exp,
    torch.cos,
    torch.sin,
    torch.rsqrt,
    torch.pow,
    operator.pow,
    operator.add,
    operator.sub,
    operator.truediv,
    operator.neg,
}
"""Functions whose result is a new tensor: neither a product nor moved elements of an operand."""

_OPAQUE_METHODS = {"pow", "mean", "rsqrt", "exp", "cos", "sin", "softmax", "tanh", "sigmoid"}

_MOST_FIXED_SIZES = 20
_SET_GRAD = torch._C._set_grad_enabled
_TRANSFORMS = ("_grad_increment_nesting", "_jvp_increment_nesting", "_func_increment_nesting")


def run(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    weights: frozenset[int],
    frozen_pattern: FrozenPattern | None = None,
) -> tuple[Trace, Tracker]:
    """Follow every tensor of a graph.

    Args:
        gm: the graph; nodes may carry fake results in ``meta["example_value"]``.
        inputs: a fake tensor or a number for each placeholder.
        weights: indices of the inputs that are parameters or buffers.
        frozen_pattern: see `ksopt.compile.capture.tracker.FrozenPattern`.

    Raises:
        CannotRunError: the graph does something that cannot be followed.
    """
    for node in gm.graph.nodes:
        if node.op == "call_module":
            raise CannotRunError(f"node {node.name} calls a module whole, whose weights are hidden")
        if getattr(node.target, "__name__", "") in _TRANSFORMS:
            raise CannotRunError(f"node {node.name} starts a torch.func transform other than vmap")
    unfixable: set[Any] = set()
    for _ in range(_MOST_FIXED_SIZES):
        try:
            return _run(gm, inputs, weights, frozen_pattern, frozenset(unfixable))
        except FixedSizeNeeded as error:
            if is_multiple_of_a_size(error.size) and not is_marked_dynamic(error.size):
                int(error.size)  # adds a guard; each turn fixes one more size
            if not isinstance(plain(error.size), int):
                unfixable.add(error.size.node.expr)
    raise CannotRunError(f"more than {_MOST_FIXED_SIZES} sizes would have to be fixed")


def _run(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    weights: frozenset[int],
    frozen_pattern: FrozenPattern | None,
    unfixable: frozenset[Any],
) -> tuple[Trace, Tracker]:
    tracker = Tracker(frozen_pattern, unfixable, _records_somewhere(gm.graph))
    runner = _Runner(gm, tracker, weights)
    fake_mode = next((i.fake_mode for i in inputs if hasattr(i, "fake_mode")), None)
    modes = (_autocast_left_as_it_is(), torch.no_grad(), enable_python_dispatcher())
    with modes[0], modes[1], modes[2], fake_mode or contextlib.nullcontext(), tracker:
        try:
            runner.run(*(_known_sizes(value) for value in inputs))
        except (CannotRunError, FixedSizeNeeded):
            raise
        except Exception as error:  # whatever a fake tensor cannot do
            name = tracker.node.name if tracker.node is not None else "its inputs"
            message = (str(error).splitlines() or [type(error).__name__])[0]
            raise CannotRunError(f"{name} does not run on fake tensors: {message}") from error
        finally:
            runner.leave()
    return tracker.trace, tracker


def _records_somewhere(graph: fx.Graph) -> bool:
    """Whether gradients are on at any node."""
    return torch.is_grad_enabled() or any(
        node.target is _SET_GRAD and bool(node.args[0]) for node in graph.nodes
    )


@contextlib.contextmanager
def _autocast_left_as_it_is() -> Iterator[None]:
    # A cached cast would give one tensor two roots.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


class _Runner(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, tracker: Tracker, weights: frozenset[int]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.tracker = tracker
        self.weights = weights
        self.device_type = "cpu"
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.outside: list[tuple[bool, bool]] = []
        self.vmap_depth = 0
        self.placeholders = 0
        self.contexts: list[Any] = []
        self.may_shorten = not writes_in_place(gm.graph)

    def leave(self) -> None:
        """Reset vmap and autocast state if the graph did not run to its end."""
        while self.vmap_depth > 0:
            self.vmap_depth -= 1
            torch._C._functorch._vmap_decrement_nesting()
        while self.contexts:
            autocast_mode._exit_autocast(self.contexts.pop())

    def run_node(self, n: fx.Node) -> Any:
        tracker, trace = self.tracker, self.tracker.trace
        trace.order[n] = len(trace.order)
        tracker.node = n
        trace.regions[n] = Region(self.grad, self.inference, self._autocast(), self.vmap_depth)
        result = self._result(n)
        if fake_result(n) is None and isinstance(result, Tensor) and not _is_wrapped(result):
            n.meta["example_value"] = result  # nodes inserted later read it
        if n.op == "placeholder":
            self._note_input(result)
        # The output node returns values of other nodes and has no value of its own.
        if isinstance(result, Tensor) and not _is_wrapped(result) and n.op != "output":
            self._note_view(n, result)
        return result

    def _result(self, n: fx.Node) -> Any:
        name = getattr(n.target, "__name__", "")
        if n.op == "call_function":
            if n.target is _SET_GRAD:
                self.grad = bool(n.args[0])
                return None
            if name == "_enter_inference_mode":
                self.outside.append((self.grad, self.inference))
                self.inference = bool(n.args[0])
                self.grad = not self.inference
                return None
            if name == "_exit_inference_mode":
                self.grad, self.inference = self.outside.pop()
                return None
            if name == "_vmap_increment_nesting":
                self.vmap_depth += 1
            elif name == "_vmap_decrement_nesting":
                self.vmap_depth -= 1
        if self.vmap_depth == 0 and self._autocast() is None and is_series(n):
            result = self._series(n)
            if result is not None:
                return result
        known = n.meta.get("example_value")
        if known is not None and self.vmap_depth == 0:
            if writes_its_inputs(n):
                self._note_writes(n)
                return self._known(n, known)
            if makes_new_tensor(n):
                return self._known(n, known)
            is_skipped = self.may_shorten and _is_no_number(known) and n.op.startswith("call_")
            if is_skipped and not self._makes_a_mask(n):
                return self._known(n, known)
            if self.may_shorten and n.op in ("call_function", "call_method"):
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                if follow_call(self.tracker, n, args, kwargs, known):
                    return known
        if self.vmap_depth == 1 and self.may_shorten and n.op == "call_function":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            result = follow_call_in_vmap(self.tracker, n, args, kwargs)
            if result is not None:
                return result
        if n.op == "get_attr" and isinstance(self.fetch_attr(str(n.target)), fx.GraphModule):
            return None
        result = super().run_node(n)
        if name == "_enter_autocast":
            self.contexts.append(result)
        elif name == "_exit_autocast":
            self.contexts.pop()
        return result

    def _makes_a_mask(self, n: fx.Node) -> bool:
        """Whether a node computes a mask from weights: where they are zero, or nonzero."""
        views = [self.tracker.trace.views.get(argument) for argument in n.all_input_nodes]
        return mask.is_followed(n) and all(v and v.root.kind is Kind.WEIGHT for v in views)

    def _series(self, n: fx.Node) -> Any:
        """The recorded result of an einsum of many operands; None: follow torch's order instead."""
        args, _ = self.fetch_args_kwargs_from_env(n)
        self.tracker.paused = True
        try:
            result = super().run_node(n)
        finally:
            self.tracker.paused = False
        return result if note_series(self.tracker, args, result) else None

    def _known(self, n: fx.Node, known: Any) -> Any:
        """Dynamo's fake result, registered as tensors that depend on the node's inputs."""
        kind = Kind.CONSTANT
        for argument in n.all_input_nodes:
            for leaf in tree_leaves(self.env.get(argument)):
                if isinstance(leaf, Tensor):
                    kind |= self.tracker.view(leaf).root.kind
        known = tree_map_only(Tensor, _known_sizes, known)
        for leaf in tree_leaves(known):
            if isinstance(leaf, Tensor):
                self.tracker.fresh(leaf, kind)
        return known

    def _note_writes(self, n: fx.Node) -> None:
        """Register the tensors that a node may write as written by it."""
        self.tracker.trace.writers.add(n)
        for argument in written_inputs(n):
            for leaf in tree_leaves(self.env.get(argument)):
                if isinstance(leaf, Tensor):
                    self.tracker.note_write(self.tracker.stamp(leaf)[0])

    def _note_input(self, value: Any) -> None:
        at, self.placeholders = self.placeholders, self.placeholders + 1
        if isinstance(value, Tensor):
            kind = Kind.WEIGHT if at in self.weights else Kind.ACTIVATION
            self.device_type = value.device.type
            self.tracker.fresh(value, kind)

    def _note_view(self, n: fx.Node, value: Tensor) -> None:
        if n.op == "get_attr" and not self.tracker.knows(value):
            self.tracker.fresh(value, Kind.WEIGHT)
        view = self.tracker.as_value_of(n, value)
        if holds_all(view):
            view.root.holders.append(Holder(n, view.map, self.tracker.trace.memory[n]))

    def _autocast(self) -> torch.dtype | None:
        if not torch.is_autocast_enabled(self.device_type):
            return None
        return torch.get_autocast_dtype(self.device_type)


def _known_sizes(value: Any) -> Any:
    """The same fake tensor, with ints for symbolic sizes that are known."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    sizes = (*value.shape, *value.stride())
    known = tuple(plain(size) for size in sizes)
    if all(one is other for one, other in zip(known, sizes, strict=True)):
        return value
    rank = value.dim()
    return torch.empty_strided(known[:rank], known[rank:], dtype=value.dtype, device=value.device)


def holds_all(view: View) -> bool:
    """Whether a view has every element of its root once."""
    if view.map.offsets:
        return False
    if is_identity(view.map, view.root.shape):
        return True
    try:
        plan(identity(view.root.shape).dims, view.map.dims)
    except NotNestedError:
        return False
    return True


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is a wrapper inside a vmap: the wrapped tensor is followed instead."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _is_no_number(value: Any) -> bool:
    """Whether a value is a tensor of masks, positions or tokens: it is no operand of a product."""
    return isinstance(value, Tensor) and not value.dtype.is_floating_point


@functools.cache
def _higher_order() -> type:
    from torch._ops import HigherOrderOperator

    return HigherOrderOperator


def makes_new_tensor(n: fx.Node) -> bool:
    """Whether a node's result is a new tensor, neither a product nor moved elements."""
    if may_write(n):  # F.silu(x, inplace=True), torch.tanh(x, out=y)
        return False
    if n.op == "call_method":
        return n.target in _OPAQUE_METHODS
    if n.op != "call_function":
        return False
    return n.target in _OPAQUE or isinstance(n.target, _higher_order())
