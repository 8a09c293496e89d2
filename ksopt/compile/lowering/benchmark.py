"""Benchmark of a chain by ksopt's operator and by batched products, as in the model.

Both are compiled by Inductor, with the surroundings of the chain in the model: where elementwise
work precedes or follows it, some does here. Inductor fuses the copies of a batched product with
such work, and ksopt's operator cannot, so that without it batched products would look slower than
they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ksopt import ops
from ksopt.compile.lowering.out_variants import plan_results
from ksopt.compile.lowering.site_times import SiteCase, Times
from ksopt.errors import UnavailableError
from ksopt.measure.benchmark_entry import BenchmarkEntry
from ksopt.measure.device_types import type_of
from ksopt.measure.interleaved import Rules, candidate_rules, race, warm_up_calls

_CPU_ROUNDS = 7
_MOST_CHAINS = 10_000
_BUDGET_S = 0.5


def measured_times(case: SiteCase, device: torch.device) -> Times:
    """Time both ways on random operands; Inductor compiles them first.

    The gradients are computed explicitly: this runs while a model is compiled, where autograd
    cannot be compiled as well.

    Raises:
        UnavailableError: one of them does not run here; the model may leave too little memory.
    """
    try:
        medians = _both_us(case, device)
    except UnavailableError:
        raise
    except RuntimeError as error:  # of torch: no memory, no compiler, an unsupported kernel
        message = (str(error).splitlines() or [""])[0]
        raise UnavailableError(f"{type(error).__name__}: {message}") from None
    return Times(medians["ksopt"], medians["inductor"])


def _both_us(case: SiteCase, device: torch.device) -> dict[str, float]:
    chain = case.problem.chain
    kind = getattr(torch, case.problem.dtype)
    generator = torch.Generator(device).manual_seed(0)  # the global random state is unchanged

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=kind)

    x = random(case.batch, chain.in_features)
    grad = random(case.batch, chain.out_features) if case.with_gradients else None
    weights = [random(*pattern.weight_shape) for pattern in chain]
    before = random(chain.in_features) if "before" in case.fused else None
    behind = random(chain.out_features) if "behind" in case.fused else None
    product = by_repacked if case.repacked else by_cached
    weight_grads = (_weight_grad, batched_weight_grad) if case.training else (None, None)

    def ours(x: Tensor, grad: Tensor | None, *weights: Tensor) -> list[Tensor]:
        return step(x, grad, weights, (before, behind), product, weight_grads[0])

    def unfused(x: Tensor, grad: Tensor | None, *weights: Tensor) -> list[Tensor]:
        return step(x, grad, weights, (before, behind), batched_product, weight_grads[1])

    plan_results()  # as in the model
    runs = {
        "ksopt": torch.compile(ours, backend="inductor", dynamic=False),
        "inductor": torch.compile(unfused, backend="inductor", dynamic=False),
    }
    # One function is compiled for each chain, which is no recompilation of the user's; and the
    # model may be compiled under autocast.
    limits = torch._dynamo.config.patch(
        recompile_limit=_MOST_CHAINS,
        accumulated_recompile_limit=_MOST_CHAINS,
        error_on_recompile=False,
    )
    calls: dict[str, Callable[[], object]] = {
        name: partial(run, x, grad, *weights) for name, run in runs.items()
    }
    with contextlib.ExitStack() as inside:
        inside.enter_context(_events_of_its_own())
        inside.enter_context(_modes_of_its_own())
        inside.enter_context(limits)
        inside.enter_context(torch.no_grad())
        inside.enter_context(torch.autocast(device.type, enabled=False))
        return medians_us(calls, device)


@contextlib.contextmanager
def _events_of_its_own() -> Iterator[None]:
    """Torch times its compiler's phases on one stack a thread, which a compilation inside another
    empties (seen with 2.11): the outer one then warns of each of its phases."""
    logger = getattr(torch._dynamo.utils, "get_chromium_event_logger", None)
    if logger is None or not hasattr(logger(), "tls"):
        yield
        return
    events = logger()
    outer, events.tls = events.tls, threading.local()
    try:
        yield
    finally:
        events.tls = outer


@contextlib.contextmanager
def _modes_of_its_own() -> Iterator[None]:
    """While Dynamo compiles it puts torch's function modes aside (``torch.set_default_device`` is
    one), in one place, which a compilation inside another empties: they would be gone for good."""
    from torch._dynamo.variables import torch_function

    aside = getattr(torch_function, "torch_function_mode_stack_state_mgr", None)
    if aside is None:
        yield
        return
    outer = aside.stack
    try:
        yield
    finally:
        aside.stack = outer


def step(
    x: Tensor,
    grad: Tensor | None,
    weights: Sequence[Tensor],
    around: tuple[Tensor | None, Tensor | None],
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
    weight_grad: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
) -> list[Tensor]:
    """A chain's product, and the gradients if the result's gradient is passed.

    Args:
        x: [batch, N].
        grad: [batch, M], or None.
        weights: of the chain, left to right.
        around: factors [N] of x and [M] of the result, elementwise; None for none.
        multiply: (x, weight, the tensor that the weight is a view of) -> y.
        weight_grad: (gradient of y, x, weight) -> gradient of the weight; None for frozen ones.

    Returns:
        The product; then the gradients of the weights, left to right, and of x.
    """
    before, behind = around
    inputs = [x if before is None else x * before]
    for weight in reversed(weights):
        inputs.append(multiply(inputs[-1], weight, weight))
    y = inputs.pop()
    results = [y if behind is None else y * behind]
    if grad is None:
        return results
    grad = grad if behind is None else grad * behind
    for weight in weights:
        if weight_grad is not None:
            results.append(weight_grad(grad, inputs.pop(), weight))
        grad = multiply(grad, weight.transpose(1, 2), weight)
    return [*results, grad if before is None else grad * before]


def by_cached(x: Tensor, weight: Tensor, owner: Tensor) -> Tensor:
    """y by ksopt's operator, the weight prepared once."""
    y: Tensor = ops.ks_mm_inner(x, weight, False, owner)
    return y


def by_repacked(x: Tensor, weight: Tensor, owner: Tensor) -> Tensor:
    """y by ksopt's operator, the weight prepared at each call."""
    y: Tensor = ops.ks_mm_repacked(x, weight, False, owner)
    return y


def batched_product(x: Tensor, weight: Tensor, owner: Tensor) -> Tensor:
    """y = x K^T by torch.bmm between two permutations, as authors write it."""
    a, b, c, d = weight.shape
    if a * d == 1:
        return F.linear(x, weight[0, :, :, 0])
    y = torch.bmm(_groups(x, a, d), weight.permute(0, 3, 2, 1).reshape(a * d, c, b))
    return y.view(a, d, -1, b).permute(2, 0, 3, 1).reshape(-1, a * b * d)


def batched_weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of that product with respect to its weight, as autograd computes it."""
    a, b, c, d = weight.shape
    grad_w = torch.bmm(_groups(grad, a, d).mT, _groups(x, a, d))
    return grad_w.view(a, d, b, c).permute(0, 2, 3, 1)


def _groups(x: Tensor, a: int, d: int) -> Tensor:
    # [B, a*c*d] -> [a*d, B, c]
    return x.view(x.shape[0], a, -1, d).permute(1, 3, 0, 2).reshape(a * d, x.shape[0], -1)


def _weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    grad_w: Tensor = ops.ks_mm_weight_grad(grad, x, weight.shape[0], weight.shape[3], False)
    return grad_w


def medians_us(variants: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median time of each function in microseconds, the functions taking turns.

    Raises:
        UnavailableError: one of them does not run (a warning has the details), or there is not
            enough memory for it.
    """
    entries = [BenchmarkEntry(name, call) for name, call in variants.items()]
    on_cpu = Rules(warm_up_calls(2), _BUDGET_S, _CPU_ROUNDS)
    rules = on_cpu if device.type == "cpu" else candidate_rules(_BUDGET_S)
    results = race(entries, type_of(device).race_timer(device), rules)
    medians = {one.entry.name: one.measurement.median_us for one in results if one.measurement}
    failed = [name for name in variants if name not in medians]
    if failed:
        raise UnavailableError(f"{' and '.join(failed)} cannot be timed on {device}")
    return medians
