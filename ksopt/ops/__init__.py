"""The torch operators of ksopt, the only entry to the kernels.

Two are public: ``ks_chain``, which computes a layer, and ``ks_mlp``, which computes two. All others
are what these are composed of, and what compiled graphs hold. Importing this module registers:

``ksopt::ks_chain(Tensor x, Tensor[] weights, Tensor? bias=None, Tensor? residual=None,
str activation="none", bool batch_last=False, int siblings=1, Tensor[]? owners=None,
bool in_float32=False) -> Tensor``
    All that a layer computes: y = act(x (K_1 ... K_L)ᵀ + bias) + residual. weights are those of
    K_1, ..., K_L, left to right; of siblings, chains of the same patterns that read one x, one
    chain's after another's: their products stand side by side in y. activation is one of
    `ksopt.epilogue.ACTIVATIONS`; bias is [siblings * M], residual of y's shape. Of two siblings it
    may be one of `ksopt.epilogue.GATES`: "silu_gate" makes silu(a) * b of their products a and b,
    bias included, and y has M features. Between two factors the tensor is rounded to x's dtype.
    owners are those of the weights, as for ``ks_mm``. in_float32: y of 16-bit operands is float32,
    not rounded to their dtype, and there is no residual.
    ``ks_chain.out`` writes y into ``out``, as `ks_mm_inner.out` does. ops/chain.py
    composes it of those below, which multiply by one factor.

``ksopt::ks_mlp(Tensor x, Tensor[] weights, Tensor[] last_weights, Tensor? hidden_bias=None, Tensor?
bias=None, Tensor? residual=None, str hidden_activation="none", str activation="none", Tensor[]?
owners=None) -> Tensor``
    Two layers, batch first: ``ks_chain`` of x by weights, hidden_bias and hidden_activation, and
    ``ks_chain`` of its result by the other arguments. owners are those of weights, then of
    last_weights.
    ``ks_mlp.out`` writes y into ``out``. ops/mlp.py composes it.

``ksopt::ks_mm(Tensor x, Tensor weight, bool batch_last=False, Tensor? owner=None) -> Tensor``
    y = x Kᵀ. x is [*batch, N] or, when batch_last, [N, *batch]; weight is [a, b, c, d], of x's
    dtype and device; y is [*batch, M] or [M, *batch], contiguous, and never shares x's memory.
    owner is for compiled graphs: the parameter or buffer that weight is a view of, which Inductor
    does not record. The weight's prepared forms are then cached with it (see
    :mod:`ksopt.kernels.weight_cache`). Where a graph is traced it need not be named, and a weight
    that the graph computes is not cached. Beside an owner the weight may be of another dtype: it
    is converted to x's, once a version. The owner's values are not read.

``ksopt::ks_mm_weight_grad(Tensor grad, Tensor x, SymInt a, SymInt d, bool batch_last) -> Tensor``
    The gradient of ks_mm with respect to its weight: the sum over the batch of
    grad[..., i, k, j] * x[..., i, l, j], as a contiguous [a, b, c, d].

``ksopt::ks_mm_once(Tensor x, Tensor weight, bool batch_last=False) -> Tensor``
    ks_mm by a weight that was computed for this product: nothing is cached of it.

``ksopt::ks_mm_saving(Tensor x, Tensor weight, Tensor saved, Tensor owner, bool batch_last=False) ->
Tensor``
    ks_mm by a frozen weight. For the gradient of x it saves ``saved``, a copy of weight in x's
    dtype, so that weight may be written before the backward pass. For compiled graphs.

All work in autograd (to any order), torch.compile, vmap, and on fake and meta tensors. They follow
autocast, like torch.nn.functional.linear: ks_chain and ks_mlp cast their operands together, and
are then what they are for such operands. ks_mm has a twin, ``ks_mm_inner``, that only
multiplies: compiled graphs call it, so that no call spends time on finding out that no gradient is
needed. ``ks_mm_repacked`` is a second twin, for weights that are trained or computed:
in compiled graphs too it runs the fastest candidate for a weight that is prepared at each call,
caches nothing, and drops the weight's cached forms. ``ks_mm_frozen`` is a third, for
weights that gradients pass through.

In compiled graphs ks_mm_weight_grad is ``ks_mm_weight_grad_inner`` where a kernel of ksopt's is
faster (:mod:`ksopt.kernels.weight_gradients`). Else it is decomposed: one ``torch.bmm``,
for d > 1 between permuting copies, which Inductor fuses with what stands beside them.
``ks_mm_weight_bias_grad_inner(Tensor grad, Tensor x, SymInt a, SymInt d) -> (Tensor, Tensor)`` is
both that, batch first, and the sum of ``grad`` over all but its last dim, the gradient of a bias.
``ks_chain_input_grad(Tensor[] grads, Tensor[] weights, Tensor? packed=None) -> (Tensor, Tensor)``
is the gradient of the input of chains of two factors, batch first, and of the values between, where
one kernel of ksopt's computes all faster (:mod:`ksopt.kernels.input_gradients`): of one chain, or
of siblings, of which each has its result's gradient. packed is all weights as the kernel reads
them, if the forward pass packed them. ``ks_chain_input_grad.activated`` computes the gradient of
the product, plus its bias, of which a chain reads an activation. ``ks_chain_weight_grads``
(ops/chain_gradients.py) is that of both factors of a chain, or of siblings. ``ks_chain_siblings``
(ops/chain.py) is a ks_chain for each of several chains on one x; the backend puts it into graphs of
training.

``ks_mm_inner.out`` and ``ks_mm_repacked.out`` write y into a tensor, ``(Tensor x,
Tensor weight, Tensor? owner=None, bool batch_last=False, *, Tensor(a!) out) -> ()``: compiled
graphs call them with memory that Inductor has planned. ``out`` has y's shape and x's dtype and
device. Nothing is copied if it is contiguous, aligned to 16 bytes, and shares no memory with x and
weight; else y is computed first. They record no gradient, and refuse operands that require one.

Compiled graphs are cached by torch with the operators' *names* in them, not with what they do. A
new kernel is picked up by an old graph, which is right. The shapes, dtypes and strides above and
the gradients below are baked into it: they are the contract of the name. Whoever changes the
contract changes the name; ``CONTRACT`` counts such changes, and those of what graphs call, and goes
into the cache key of everything that the backend "ksopt" compiles. Graphs that Inductor compiled
without it have no such key.
"""

from __future__ import annotations

from ksopt.ops import autocast_vmap, autograd, host_kernels
from ksopt.ops.chain import chain, ks_chain, ks_chain_inner, ks_chain_out, ks_chain_siblings
from ksopt.ops.eager import is_intercepted, multiply
from ksopt.ops.mlp import ks_mlp, ks_mlp_inner, ks_mlp_out
from ksopt.ops.saved_weight import ks_mm_saving
from ksopt.ops.schemas import (
    ks_mm,
    ks_mm_frozen,
    ks_mm_inner,
    ks_mm_inner_out,
    ks_mm_once,
    ks_mm_repacked,
    ks_mm_repacked_out,
    ks_mm_weight_grad,
)

CONTRACT = 14

__all__ = [
    "CONTRACT",
    "autocast_vmap",
    "autograd",
    "chain",
    "host_kernels",
    "is_intercepted",
    "ks_chain",
    "ks_chain_inner",
    "ks_chain_out",
    "ks_chain_siblings",
    "ks_mlp",
    "ks_mlp_inner",
    "ks_mlp_out",
    "ks_mm",
    "ks_mm_frozen",
    "ks_mm_inner",
    "ks_mm_inner_out",
    "ks_mm_once",
    "ks_mm_repacked",
    "ks_mm_repacked_out",
    "ks_mm_saving",
    "ks_mm_weight_grad",
    "multiply",
]
