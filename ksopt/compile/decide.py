"""Is a site faster by ksopt's operator than as Inductor would run it?

Three judges, by ``options={"tune": ...}``:

- ``model``: on a CUDA device the cost models of the kernels against PyTorch's batched product, less
  what Inductor can save of it. On a CPU there is no model: the operator times PyTorch's own ways at
  its first product and takes the fastest, so the site is lowered.
- ``measure``: the chain by the operator against the chain as batched products compiled by Inductor,
  both timed on the device, once; kept on disk beside the kernels' own choices.
- ``off``: every site is lowered.

A site whose weights are trained is judged by a step: the product and its two gradients, with
weights that are prepared anew each time. The others are judged by the product alone.

Left out, it is ``model`` on a CPU, and on CUDA what ``KSOPT_TUNE`` says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ksopt import ops, settings
from ksopt.compile.sites import Decision, Site
from ksopt.errors import InvalidInputError
from ksopt.files import write_whole
from ksopt.kernels import choices, pytorch_ways
from ksopt.kernels.measure import Contender, race
from ksopt.kernels.report import ChoiceReport, choice_report
from ksopt.kernels.situation import Situation, bits_of
from ksopt.pattern import Chain

log = logging.getLogger("ksopt.compile")

Tune = Literal["model", "measure", "off"]
TUNES: tuple[str, ...] = get_args(Tune)

INDUCTOR_GAIN = 1.8
"""An assumption: how many times as fast as eager PyTorch Inductor runs a batched product with its
copies, at the most; 1.2 to 1.8 was seen on an H200 while ksopt was planned. The model grants it the
most. `ksopt bench kernels --against eager,inductor` measures it on a device."""

TIE = 1.02
"""A site is lowered unless it is slower by more than that: what timing can tell apart."""

_ROUNDS = 7
_MOST_CHAINS = 10_000
_BUDGET_S = 0.5


@dataclass(frozen=True)
class Times:
    """What a chain takes, microseconds: its product, or in training its gradients, too.

    Args:
        ksopt_us: by ksopt's operator.
        unfused_us: as batched products under Inductor.
    """

    ksopt_us: float
    unfused_us: float


Timer = Callable[[Chain, str, int, torch.device, bool], Times]
"""Times a chain: (chain, dtype, batch, device, training)."""


def decide(site: Site, device: torch.device, tune: Tune | None = None) -> Decision:
    """Whether to lower a site.

    Args:
        site: with a chain, a batch and a dtype.
        device: where it runs.
        tune: see the top of this file.

    Example:
        >>> from ksopt.compile.sites import Place, Verdict
        >>> site = Site("bmm", Place(), "bmm", Verdict.KEPT, "", Chain.parse("(4,8,8,1)"), 64)
        >>> decide(site, torch.device("cpu"), "off").lower
        True
    """
    mode = tune or _default(device)
    if site.chain is None or not site.batch:
        return Decision(True, "Its batch is empty.")
    if mode == "off":
        return Decision(True, "Every recognised site is lowered: tune is off.")
    problem = (site.chain, site.dtype, site.batch, device, site.training)
    if mode == "measure":
        return by_times(measured(*problem), True, site.training)
    if device.type == "cpu":
        return Decision(
            True, "The operator takes the fastest of PyTorch's ways, timed at its first product."
        )
    return by_times(predicted(*problem), False, site.training)


def by_times(times: Times, measured: bool, training: bool = False) -> Decision:
    """The decision that follows from times.

    Args:
        times: what both ways take.
        measured: whether they were measured; if not, they are predictions.
        training: whether they are of a step of training.

    Example:
        >>> by_times(Times(ksopt_us=10.0, unfused_us=25.0), measured=True).reason
        'Measured 10.0 us, 2.50 times as fast as 25.0 us under Inductor.'
        >>> by_times(Times(ksopt_us=30.0, unfused_us=25.0), measured=False).lower
        False
    """
    how = "Measured" if measured else "Predicted"
    ours, theirs = times.ksopt_us, times.unfused_us
    lower = ours <= TIE * theirs
    of = " with its gradients" if training else ""
    if lower:
        reason = f"{how} {ours:.1f} us{of}, {theirs / ours:.2f} times as fast as {theirs:.1f} us"
    else:
        reason = f"{how} {ours:.1f} us{of}, slower than {theirs:.1f} us"
    return Decision(lower, f"{reason} under Inductor.", ours, theirs, measured)


def predicted(
    chain: Chain, dtype: str, batch: int, device: torch.device, training: bool = False
) -> Times:
    """What the cost models say.

    A gradient with respect to an input is the product by the transposed pattern. Those with respect
    to weights are PyTorch's batched products either way, and are left out of both times.
    """
    ours = theirs = 0.0
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    for pattern in (*chain, *chain.transpose()) if training else chain:
        found: ChoiceReport = choice_report(pattern, dtype, batch, device=device, changing=training)
        problem = Situation.of(pattern, dtype, batch, False).problem
        rival = pytorch_ways.predicted_us("bmm", problem, batch, multiprocessors) / INDUCTOR_GAIN
        own = found.measured_us or found.predicted_us
        ours += rival if own is None else own
        theirs += rival
    return Times(ours, theirs)


def measured(
    chain: Chain,
    dtype: str,
    batch: int,
    device: torch.device,
    training: bool = False,
    timer: Timer | None = None,
) -> Times:
    """What was measured on this machine, now or before.

    Args:
        chain: the factors.
        dtype: torch's name of the element type.
        batch: rows; batches up to the same power of two are one case.
        device: where to multiply.
        training: whether the weights are trained.
        timer: what times; None is `by_clock`.
    """
    path = _path(chain, dtype, batch, device, training)
    known = _read(path)
    if known is None:
        known = (timer or by_clock)(chain, dtype, batch, device, training)
        _write(path, chain, dtype, batch, known)
    return known


def by_clock(
    chain: Chain, dtype: str, batch: int, device: torch.device, training: bool = False
) -> Times:
    """Time the chain both ways on random operands; Inductor compiles one of them first.

    A step of training is written out, for this runs while a model is compiled, where autograd
    cannot be compiled as well.
    """
    kind = getattr(torch, dtype)
    generator = torch.Generator(device).manual_seed(0)  # the model's own numbers stay as they are

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=kind)

    x = random(batch, chain.in_features)
    grad = random(batch, chain.out_features) if training else None
    weights = [random(*pattern.weight_shape) for pattern in chain]

    def unfused(x: Tensor, grad: Tensor | None, *weights: Tensor) -> list[Tensor]:
        return _step(x, grad, weights, _batched_product, _batched_weight_grad)

    compiled = torch.compile(unfused, backend="inductor", dynamic=False)
    ours = ops.ks_mm_changing if training else ops.ks_mm_inner
    # One function is compiled for each chain; and the model may be compiled under autocast.
    limits = torch._dynamo.config.patch(
        recompile_limit=_MOST_CHAINS, accumulated_recompile_limit=_MOST_CHAINS
    )
    with torch.no_grad(), torch.autocast(device.type, enabled=False), limits, _events_of_its_own():
        found = medians_us(
            {
                "ksopt": lambda: _step(x, grad, weights, ours, _weight_grad),
                "inductor": lambda: compiled(x, grad, *weights),
            },
            device,
        )
    return Times(found["ksopt"], found["inductor"])


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


def _step(
    x: Tensor,
    grad: Tensor | None,
    weights: Sequence[Tensor],
    multiply: Callable[[Tensor, Tensor], Tensor],
    weight_grad: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> list[Tensor]:
    """A chain's product, and where the result's gradient is given all gradients."""
    inputs = [x]
    for weight in reversed(weights):
        inputs.append(multiply(inputs[-1], weight))
    found = [inputs.pop()]
    if grad is None:
        return found
    for weight in weights:
        found.append(weight_grad(grad, inputs.pop(), weight))
        grad = multiply(grad, weight.transpose(1, 2))
    return [*found, grad]


def _batched_product(x: Tensor, weight: Tensor) -> Tensor:
    """What an author writes: y = x K^T by torch.bmm between two permutations."""
    a, b, c, d = weight.shape
    if a * d == 1:
        return F.linear(x, weight[0, :, :, 0])
    y = torch.bmm(_groups(x, a, d), weight.permute(0, 3, 2, 1).reshape(a * d, c, b))
    return y.view(a, d, -1, b).permute(2, 0, 3, 1).reshape(-1, a * b * d)


def _batched_weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of that product with respect to its weight, as autograd computes it."""
    a, b, c, d = weight.shape
    found = torch.bmm(_groups(grad, a, d).mT, _groups(x, a, d))
    return found.view(a, d, b, c).permute(0, 2, 3, 1)


def _groups(x: Tensor, a: int, d: int) -> Tensor:
    # [B, a*c*d] -> [a*d, B, c]
    return x.view(x.shape[0], a, -1, d).permute(1, 3, 0, 2).reshape(a * d, x.shape[0], -1)


def _weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = ops.ks_mm_weight_grad_inner(grad, x, weight.shape[0], weight.shape[3], False)
    return found


def medians_us(variants: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median time of each function in microseconds, the functions taking turns."""
    contenders = [Contender(name, call, frozenset({"all"})) for name, call in variants.items()]
    if device.type == "cuda":
        with torch.cuda.device(device):
            race(contenders, device, _BUDGET_S)
    else:
        _race_on_cpu(contenders)
    return {contender.name: contender.median_us for contender in contenders}


def _race_on_cpu(contenders: list[Contender]) -> None:
    end = time.perf_counter() + _BUDGET_S
    for round_ in range(_ROUNDS + 2):
        for contender in contenders:
            start = time.perf_counter()
            contender.call()
            if round_ >= 2:  # the first ones choose, compile and warm up
                contender.samples_us.append((time.perf_counter() - start) * 1e6)
        if round_ >= 2 and time.perf_counter() > end:
            break


def _default(device: torch.device) -> Tune:
    return "model" if device.type == "cpu" else settings.tuning()


def _path(chain: Chain, dtype: str, batch: int, device: torch.device, training: bool) -> Path:
    if device.type == "cuda":
        machine = choices.cuda_machine(device.index or 0)
    else:
        machine = choices.cpu_machine()
    text = str(chain).replace("*", "-").strip("()").replace(")-(", "-").replace(",", ".")
    step = "-training" if training else ""
    return choices.folder_of(machine) / "sites" / f"{text}-{dtype}-{bits_of(batch)}{step}.json"


def _read(path: Path) -> Times | None:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        times = Times(float(values["ksopt_us"]), float(values["unfused_us"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return times if times.ksopt_us > 0 and times.unfused_us > 0 else None


def _write(path: Path, chain: Chain, dtype: str, batch: int, times: Times) -> None:
    values = {
        "chain": str(chain),
        "dtype": dtype,
        "batch": batch,
        "ksopt_us": times.ksopt_us,
        "unfused_us": times.unfused_us,
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        log.warning("a measurement could not be kept in %s: %s", path.parent, error)


def checked_tune(given: object) -> Tune | None:
    """An option's value, once it is known to be right.

    Raises:
        InvalidInputError: it is none of `TUNES`.
    """
    if given is None or given in TUNES:
        return given  # type: ignore[return-value]
    raise InvalidInputError(f"options['tune'] is {given!r}: it must be one of {', '.join(TUNES)}")
