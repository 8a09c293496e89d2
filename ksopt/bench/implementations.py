"""The ways to multiply that a benchmark compares: ksopt's operator and PyTorch's, prepared.

Each is a function of x alone. PyTorch's ways get their weights prepared once, outside of what is
timed, which is the strongest that they can be; ksopt's operator is called with the canonical
weight, as a layer calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ksopt import ops
from ksopt.baselines import BASELINES, Product
from ksopt.batched import bmm_prepare
from ksopt.bench.request import INDUCTOR, PRODUCT_ONLY, Subject
from ksopt.bench.results import OURS
from ksopt.epilogue import add_epilogue_, with_epilogue
from ksopt.functional import ks_linear
from ksopt.kernels import plan_autotuner, registry
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.operands import Operands, problem_of
from ksopt.measure.accuracy import NOTHING_AROUND, Around
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import chain_to_dense, is_batch_last

Implementation = Callable[[Tensor], Tensor]

# A way that writes the zeros out is not tried where that takes more elements than this.
MOST_ELEMENTS = 2**28


def why_not(
    name: str,
    chain: Chain,
    dtype: torch.dtype,
    device_type: str,
    layout: str,
    most_elements: int = MOST_ELEMENTS,
    around: Around = NOTHING_AROUND,
) -> str:
    """Why a way cannot be tried on a chain; empty if it can.

    Args:
        name: ``ksopt``, a baseline's or an ``inductor_`` name.
        chain: what is multiplied by.
        dtype: of x and the weights.
        device_type: "cpu" or "cuda".
        layout: "batch_first" or "batch_last".
        most_elements: that a way may write out.
        around: what is computed with the product.
    """
    if name == OURS:
        return ""
    if name == PRODUCT_ONLY and not around.is_empty:
        return "it is a product alone, and what is measured is a layer"
    if name == PRODUCT_ONLY:
        return "" if len(chain) == 1 else "of a chain, each factor's input is permuted again"
    if name == "dense" and len(chain) > 1:
        elements = chain.in_features * chain.out_features
    else:
        elements = max(written_elements(name, pattern) for pattern in chain)
    if elements > most_elements:
        return f"it would write {elements:,} weights out, most of them zeros"
    plain = name.removeprefix("inductor_")
    if plain == "dense":
        return ""
    for pattern in chain:
        product = Product(pattern, dtype, device_type, is_batch_last(layout))
        support = BASELINES[plain].supports(product)
        if not support.ok:
            return support.reason
    return ""


def written_elements(name: str, pattern: Pattern) -> int:
    """Elements of the weight of a way that writes zeros out; 0 for the others."""
    written = {"dense": pattern.a**2, "expand": pattern.a}.get(name, 0)
    return written * pattern.b * pattern.c * pattern.d**2


def bind(
    name: str, weights: Sequence[Tensor], layout: str, around: Around = NOTHING_AROUND
) -> Implementation:
    """A way as a function of x, its weights prepared.

    PyTorch's ways have PyTorch's own operations behind them, in place where Inductor does not fuse
    them; siblings' products are put side by side, but those of the dense layer are one.

    Args:
        name: as for `why_not`, which must return no reason.
        weights: [a, b, c, d] of each factor, left to right, sibling after sibling.
        layout: of x and the result.
        around: what is computed with the product.

    Example:
        >>> bind("dense", [torch.ones(1, 1, 2, 2)], "batch_first")(torch.eye(4)[:1])
        tensor([[1., 0.]])
    """
    last = is_batch_last(layout)
    if name == OURS:
        factors = list(weights)
        if around.is_empty:
            return lambda x: ks_linear(x, factors, layout=layout)
        layer = (around.bias, around.residual, around.activation, last, around.siblings)
        return lambda x: ops.chain(x, factors, *layer, op="ks_linear")
    chains = chains_of(weights, around)
    if name == "dense" and not around.is_empty:
        parts = [dense_weight(one)[0, :, :, 0] for one in chains]
        return _dense_layer(torch.cat(parts), around, last)
    if name == "dense" and len(weights) > 1:
        return BASELINES["dense"].bind(dense_weight(weights), layout)
    if name not in INDUCTOR:
        bound = [_in_turn([_bound(name, w, layout) for w in reversed(one)]) for one in chains]
        return _layer(bound, around, last, add_epilogue_)
    # Dynamo counts the graphs of a function, whatever its closure, and stops compiling after a few.
    torch.compiler.reset()
    plain = [_in_turn([_plain(name, w, layout) for w in reversed(one)]) for one in chains]
    whole = _layer(plain, around, last, with_epilogue)
    compiled: Implementation = torch.compile(whole, dynamic=False, fullgraph=True)
    return compiled


def chains_of(weights: Sequence[Tensor], around: Around) -> list[Sequence[Tensor]]:
    """The weights of each sibling's chain."""
    length = len(weights) // around.siblings
    return [weights[at : at + length] for at in range(0, len(weights), length)]


def _layer(
    products: Sequence[Implementation], around: Around, last: bool, epilogue: Callable[..., Tensor]
) -> Implementation:
    """The siblings' products side by side, and the epilogue; a product alone is itself."""
    if around.is_empty:
        return products[0]
    behind = (around.bias, around.activation, around.residual)

    def way(x: Tensor) -> Tensor:
        parts = [product(x) for product in products]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 0 if last else -1)
        return epilogue(y, *behind, last)

    return way


def _dense_layer(w: Tensor, around: Around, last: bool) -> Implementation:
    """The dense layer of a matrix [siblings * M, N]; batch first, the product adds its bias."""
    bias, activation, residual = around.bias, around.activation, around.residual
    if last:
        return lambda x: add_epilogue_(torch.mm(w, x), bias, activation, residual, True)
    return lambda x: add_epilogue_(F.linear(x, w, bias), None, activation, residual)


def product_only(
    weight: Tensor, x: Tensor, layout: str
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """bmm_paper's batched product, and the same with its result permuted: line 2 of Algorithm 1.

    Args:
        weight: [a, b, c, d].
        x: [batch, N], or [N, batch]; it is permuted here, once.
        layout: of x.

    Returns:
        What is timed, and what is checked: the latter is y as every way gives it.

    Source: the paper, appendix B.2.

    Example:
        >>> call, whole = product_only(torch.ones(1, 1, 2, 2), torch.eye(4)[:1], "batch_first")
        >>> call().shape, whole()
        (torch.Size([2, 1, 1]), tensor([[1., 0.]]))
    """
    last = is_batch_last(layout)
    a, b, c, d = weight.shape
    blocks = bmm_prepare(weight, last)
    if last:
        x_perm = x.view(a, c, d, -1).transpose(1, 2).reshape(a * d, c, -1).contiguous()
        y_perm = x.new_empty(a * d, b, x.shape[1])

        def call() -> Tensor:
            return torch.bmm(blocks, x_perm, out=y_perm)

        def whole() -> Tensor:
            return call().view(a, d, b, -1).transpose(1, 2).reshape(a * b * d, -1)

    else:
        rows = x.shape[0]
        x_perm = x.view(rows, a, c, d).transpose(2, 3).reshape(rows, a * d, c).contiguous()
        x_perm = x_perm.transpose(0, 1)
        y_perm = x.new_empty(rows, a * d, b).transpose(0, 1)

        def call() -> Tensor:
            return torch.bmm(x_perm, blocks.mT, out=y_perm)

        def whole() -> Tensor:
            y = call().transpose(0, 1).reshape(rows, a, d, b)
            return y.transpose(2, 3).reshape(rows, a * b * d)

    return call, whole


def dense_weight(weights: Sequence[Tensor]) -> Tensor:
    """The dense layer that a chain stands in for, as the weight [1, M, N, 1] of one factor.

    Multiplied in float64 and rounded once.
    """
    matrix = chain_to_dense([weight.double() for weight in weights])
    return matrix.to(weights[0].dtype)[None, :, :, None].contiguous()


def _plain(name: str, weight: Tensor, layout: str) -> Implementation:
    """What an author would write for Inductor to compile: it fuses the copies itself."""
    a, b, c, d = weight.shape
    if name == "inductor_einsum":
        if is_batch_last(layout):
            return lambda x: torch.einsum("icjn,ibcj->ibjn", x.view(a, c, d, -1), weight).reshape(
                a * b * d, -1
            )
        return lambda x: torch.einsum("nicj,ibcj->nibj", x.view(-1, a, c, d), weight).reshape(
            -1, a * b * d
        )
    groups = weight.permute(0, 3, 1, 2).reshape(a * d, b, c).contiguous()
    if is_batch_last(layout):

        def last(x: Tensor) -> Tensor:
            y = torch.bmm(groups, x.view(a, c, d, -1).transpose(1, 2).reshape(a * d, c, -1))
            return y.view(a, d, b, -1).transpose(1, 2).reshape(a * b * d, -1)

        return last

    def first(x: Tensor) -> Tensor:
        columns = x.view(-1, a, c, d).permute(1, 3, 0, 2).reshape(a * d, -1, c)
        y = torch.bmm(columns, groups.mT).view(a, d, -1, b)
        return y.permute(2, 0, 3, 1).reshape(-1, a * b * d)

    return first


def _bound(name: str, weight: Tensor, layout: str) -> Implementation:
    baseline, batch_last = BASELINES[name], is_batch_last(layout)
    pattern = Pattern(*weight.shape)
    prepared = baseline.prepare(weight, batch_last)
    return lambda x: baseline.multiply(x, prepared, pattern, batch_last)


def _in_turn(ways: Sequence[Implementation]) -> Implementation:
    if len(ways) == 1:
        return ways[0]

    def way(x: Tensor) -> Tensor:
        for each in ways:
            x = each(x)
        return x

    return way


def predicted_us(
    name: str, subject: Subject, dtype: str, device: torch.device, layout: str
) -> float | None:
    """What the cost models predict for a way; None where they predict nothing, as on a CPU.

    Args:
        name: as for `why_not`. Of PyTorch's ways, products by one factor are predicted.
        subject: what is computed, and its rows.
        dtype: of x and the weights; "tf32" for float32 that is multiplied in TF32.
        device: where it is computed.
        layout: of x and the result.
    """
    spec, batch = backend_of(device.type).spec(device), subject.batch
    if spec is None:
        return None
    word = "float32" if dtype == "tf32" else dtype
    problem = subject.problem(word, is_batch_last(layout), exact=dtype != "tf32")
    if name == OURS:
        return registry.best_predicted(problem, batch, spec)[0].with_epilogue_us(batch, spec)
    if not problem.is_factor:
        return None
    several = registry.pytorch(problem, batch, spec.multiprocessors)
    return next((one.predicted_us for one in several if one.name == name), None)


def chosen(
    x: Tensor, weights: Sequence[Tensor], layout: str, around: Around = NOTHING_AROUND
) -> str:
    """What ksopt's operator chose on a GPU for all or each factor, with the times it chose by.

    Args:
        x: the input; [batch, N] or [N, batch].
        weights: of the factors, left to right, sibling after sibling.
        layout: of x.
        around: what is computed with the product.
    """
    backend = backend_of(x.device.type)
    batch_last = is_batch_last(layout)
    whole = _chosen_for_all(x, weights, batch_last, around)
    if whole is not None:
        return whole
    weights, labels = chains_of(weights, around)[0], []  # the siblings' factors are alike
    for weight in reversed(weights):
        choice = backend.choice_for(x, weight, batch_last)
        if choice is None:
            return ""
        labels.append(_with_times(choice.candidate.label, choice.times_us))
        if len(weights) > 1:
            x = ks_linear(x, [weight], layout=layout)
    return "; ".join(labels)


def _chosen_for_all(
    x: Tensor, weights: Sequence[Tensor], batch_last: bool, around: Around
) -> str | None:
    """What computes a chain in one launch, or by one matrix; None for one launch per factor."""
    operands = Operands(x, tuple(weights), around.bias, around.residual)
    what = (batch_last, around.activation, around.siblings)
    problem = problem_of(operands, around.activation, batch_last, around.siblings)
    decision, _ = plan_autotuner.decision_of(operands, what, lambda: problem)
    call = None if decision is None else plan_autotuner.call_of(decision, operands)
    if decision is None or call is None:
        return None
    choices = (decision.cached, decision.repacked, decision.stored)
    choice = next(one for one in choices if one is not None and one.call is call)
    return _with_times(choice.candidate.label, choice.times_us)


def _with_times(label: str, times_us: Sequence[tuple[str, float]]) -> str:
    best: dict[str, float] = {}
    for name, us in times_us:
        best[name] = min(us, best.get(name, us))
    times = ", ".join(f"{n} {us:.4g} us" for n, us in sorted(best.items(), key=lambda t: t[1]))
    return f"{label} ({times or 'by the rule, nothing timed'})"
