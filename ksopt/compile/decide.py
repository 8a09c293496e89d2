"""Is a site faster by ksopt's operator than as Inductor would run it?

Three judges, by ``options={"tune": ...}``:

- ``model``: on a CUDA device the cost models of the kernels against PyTorch's batched product, less
  what Inductor can save of it. On a CPU there is no model: the operator times PyTorch's own ways at
  its first product and takes the fastest, so the site is lowered.
- ``measure``: the chain by the operator against the chain as batched products compiled by Inductor,
  both timed on the device, once; kept on disk beside the kernels' own choices.
- ``off``: every site is lowered.

Left out, it is ``model`` on a CPU, and on CUDA what ``KSOPT_TUNE`` says.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ksopt import ops, settings
from ksopt.baselines import BASELINES
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
    """What a chain takes, microseconds.

    Args:
        ksopt_us: by ksopt's operator.
        unfused_us: as batched products under Inductor.
    """

    ksopt_us: float
    unfused_us: float


Timer = Callable[[Chain, str, int, torch.device], Times]
"""Times a chain: (chain, dtype, batch, device)."""


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
    if mode == "measure":
        return by_times(measured(site.chain, site.dtype, site.batch, device), measured=True)
    if device.type == "cpu":
        return Decision(
            True, "The operator takes the fastest of PyTorch's ways, timed at its first product."
        )
    return by_times(predicted(site.chain, site.dtype, site.batch, device), measured=False)


def by_times(times: Times, measured: bool) -> Decision:
    """The decision that follows from times.

    Example:
        >>> by_times(Times(ksopt_us=10.0, unfused_us=25.0), measured=True).reason
        'Measured 10.0 us, 2.50 times as fast as 25.0 us under Inductor.'
        >>> by_times(Times(ksopt_us=30.0, unfused_us=25.0), measured=False).lower
        False
    """
    how = "Measured" if measured else "Predicted"
    ours, theirs = times.ksopt_us, times.unfused_us
    lower = ours <= TIE * theirs
    if lower:
        reason = f"{how} {ours:.1f} us, {theirs / ours:.2f} times as fast as {theirs:.1f} us"
    else:
        reason = f"{how} {ours:.1f} us, slower than {theirs:.1f} us"
    return Decision(lower, f"{reason} under Inductor.", ours, theirs, measured)


def predicted(chain: Chain, dtype: str, batch: int, device: torch.device) -> Times:
    """What the cost models say."""
    ours = theirs = 0.0
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    for pattern in chain:
        found: ChoiceReport = choice_report(pattern, dtype, batch, device=device)
        problem = Situation.of(pattern, dtype, batch, False).problem
        rival = pytorch_ways.predicted_us("bmm", problem, batch, multiprocessors) / INDUCTOR_GAIN
        own = found.measured_us or found.predicted_us
        ours += rival if own is None else own
        theirs += rival
    return Times(ours, theirs)


def measured(
    chain: Chain, dtype: str, batch: int, device: torch.device, timer: Timer | None = None
) -> Times:
    """What was measured on this machine, now or before.

    Args:
        chain: the factors.
        dtype: torch's name of the element type.
        batch: rows; batches up to the same power of two are one case.
        device: where to multiply.
        timer: what times; None is `by_clock`.
    """
    path = _path(chain, dtype, batch, device)
    known = _read(path)
    if known is None:
        known = (timer or by_clock)(chain, dtype, batch, device)
        _write(path, chain, dtype, batch, known)
    return known


def by_clock(chain: Chain, dtype: str, batch: int, device: torch.device) -> Times:
    """Time the chain both ways on random operands; Inductor compiles one of them first."""
    kind = getattr(torch, dtype)
    generator = torch.Generator(device).manual_seed(0)  # the model's own numbers stay as they are

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=kind)

    x = random(batch, chain.in_features)
    weights = [random(*pattern.weight_shape) for pattern in chain]

    def by_operator() -> Tensor:
        y = x
        for weight in reversed(weights):
            y = ops.ks_mm_inner(y, weight, False)
        return y

    def unfused(y: Tensor, *factors: Tensor) -> Tensor:
        for pattern, weight in zip(reversed(chain.patterns), reversed(factors), strict=True):
            way = BASELINES["dense" if pattern.a * pattern.d == 1 else "bmm"]
            y = way.multiply(y, way.prepare(weight, False), pattern, False)
        return y

    compiled = torch.compile(unfused, backend="inductor", dynamic=False)
    # One function is compiled for each chain; and the model may be compiled under autocast.
    limits = torch._dynamo.config.patch(
        recompile_limit=_MOST_CHAINS, accumulated_recompile_limit=_MOST_CHAINS
    )
    with torch.no_grad(), torch.autocast(device.type, enabled=False), limits:
        found = medians_us(
            {"ksopt": by_operator, "inductor": lambda: compiled(x, *weights)}, device
        )
    return Times(found["ksopt"], found["inductor"])


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


def _path(chain: Chain, dtype: str, batch: int, device: torch.device) -> Path:
    if device.type == "cuda":
        machine = choices.cuda_machine(device.index or 0)
    else:
        machine = choices.cpu_machine()
    text = str(chain).replace("*", "-").strip("()").replace(")-(", "-").replace(",", ".")
    return choices.folder_of(machine) / "sites" / f"{text}-{dtype}-{bits_of(batch)}.json"


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
