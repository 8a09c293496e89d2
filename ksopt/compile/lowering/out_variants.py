"""Out variants: products are written into buffers that Inductor plans, not into new memory.

Inductor assumes that an unknown operator returns new memory. An operator with a variant that writes
into a passed tensor takes a buffer like any of Inductor's own kernels: memory that an earlier part
of the graph has released, or part of a pool, without a call of the allocator.

torch 2.13 finds such variants by ``torch.Tag.out``. That is not used here, because it has two
faults. It passes a call's tensors before the other arguments, in whatever order the schema has them
(here the variant's schema has tensors first). And in the C++ code of AOTInductor and of
``cpp_wrapper`` it calls a C function that only torch's own operators have: in such code the
operators are left unchanged.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from ksopt import ops

log = logging.getLogger("ksopt.compile")

_WRITING = {
    ops.ks_mm_inner: ops.ks_mm_inner_out,
    ops.ks_mm_repacked: ops.ks_mm_repacked_out,
}


@functools.cache
def plan_results() -> None:
    """Register the out variants of the inference products with Inductor, once per process."""
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    for op in _WRITING:
        # As Inductor would do at the first call of an operator that it does not know.
        tag: Any = get_layout_constraint_tag(op, with_default=True)
        lowering.make_fallback(op, layout_constraint=lowering.tag_to_layout_constraint(tag))
        register: Any = lowering.register_lowering(op, type_promotion_kind=None)
        register(functools.partial(_lower, op, lowering.lowerings[op]))


def _lower(
    op: Any, returning: Any, x: Any, weight: Any, batch_last: bool = False, owner: Any = None
) -> Any:
    """Inductor's node for a product; ``returning`` creates the default node."""
    from torch._dynamo.utils import counters
    from torch._inductor.virtualized import V

    arguments = (x, weight, batch_last, owner)
    if V.graph.cpp_wrapper:
        return returning(*arguments)
    try:
        node = _writing(op, *arguments)
    except (AttributeError, TypeError) as error:  # an unknown version of Inductor
        _warn_once(f"{type(error).__name__}: {error}")
        return returning(*arguments)
    counters["ksopt"]["results_planned"] += 1
    return node


def _writing(op: Any, x: Any, weight: Any, batch_last: bool, owner: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    with V.graph.fake_mode:
        processed: Any = ir.FallbackKernel.process_kernel(op, x, weight, batch_last, owner)
    # A tuple until torch 2.13.
    y, tensors = (
        processed[:2]
        if isinstance(processed, tuple)
        else (processed.example_output, processed.tensor_args)
    )
    variant = _WRITING[op]
    node = ir.ExternKernelOut(
        layout=ir.FallbackKernel.tensor_to_layout(y),
        inputs=tensors,
        kwargs={"batch_last": True} if batch_last else {},
        python_kernel_name=f"torch.ops.{variant}",
        op_overload=variant,
    )
    return ir.TensorBox.create(node)


@functools.cache
def _warn_once(why: str) -> None:
    log.warning("products are not written into memory that Inductor has planned: %s", why)
