"""Decision whether a site is faster by ksopt's operator than under Inductor alone.

Three methods, by ``options={"tune": ...}``:

- ``model``: on a CUDA device the cost models of the kernels against PyTorch's batched product, less
  the savings by Inductor. On a CPU there is no model: the operator times PyTorch's implementations
  at its first product and takes the fastest, so the site is lowered.
- ``measure``: the chain by the operator against the chain as batched products, both under Inductor,
  timed on the device once (`lowering.benchmark`); stored in the tuning cache (`site_times`).
  Of concurrent processes one measures, and the others wait for its result. A site that cannot be
  timed, for lack of memory for instance, is decided as by ``model``; so is every site under
  ``torch.use_deterministic_algorithms``, because two measurements may decide differently.
- ``off``: every site is lowered.

A site whose weights are trained is judged by a step: the product and its two gradients, with
weights that are prepared at each step. Where gradients go through frozen weights to the input, it
is judged by the product and that gradient, with weights that are prepared once; any other site by
the product alone, its weights prepared at each call if the graph computes them.

On CUDA the predicted times are reported beside the measured ones, whatever the method.

The default is ``model`` on a CPU, and the value of ``KSOPT_TUNE`` on CUDA.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import torch

from ksopt import settings
from ksopt.compile.lowering.benchmark import measured_times
from ksopt.compile.lowering.site_times import SiteCase, SiteRecord, Times
from ksopt.compile.sites import Decision, Site
from ksopt.errors import InvalidInputError, UnavailableError
from ksopt.kernels import tuning_cache
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.planner import plan_of
from ksopt.kernels.problem import Problem, is_exact

log = logging.getLogger("ksopt.compile")

Tune = Literal["model", "measure", "off"]
TUNES: tuple[str, ...] = get_args(Tune)

INDUCTOR_GAIN = 1.8
"""Assumed speedup of Inductor over eager PyTorch for a batched product with its copies: the largest
of 1.2 to 1.8, measured on an H200 while ksopt was planned. `ksopt bench kernels --against
eager,inductor` measures it on a device."""

Timer = Callable[[SiteCase, torch.device], Times]
"""Times a chain by both implementations."""


def decide(site: Site, device: torch.device, tune: Tune | None = None) -> Decision:
    """Whether to lower a site.

    Args:
        site: with a chain, a batch and a dtype.
        device: of the site.
        tune: see the top of this file.

    Example:
        >>> from ksopt.compile.sites import Place, Verdict
        >>> from ksopt.patterns.chain import Chain
        >>> site = Site("bmm", Place(), "bmm", Verdict.NOT_LOWERED, "", Chain.parse("(4,8,8,1)"), 9)
        >>> decide(site, torch.device("cpu"), "off").lower
        True
    """
    mode = tune or _default(device)
    if mode == "measure" and torch.are_deterministic_algorithms_enabled():
        mode = "model"
    if site.chain is None or not site.batch:
        return Decision(True, "Its batch is empty.")
    case = SiteCase(
        Problem(site.chain, site.dtype, False, is_exact(site.dtype)),
        site.batch,
        site.training,
        site.fused,
        site.to_input,
        site.computed,
    )
    if mode == "off":
        reason = "Every recognised site is lowered: tune is off."
        return Decision(True, reason, _prediction(case, device))
    if mode == "measure":
        try:
            decision = by_times(measured(case, device), True, case)
            return replace(decision, predicted=_prediction(case, device))
        except UnavailableError as error:  # the model need not fail for it
            log.warning("whether %s is faster lowered was not measured: %s", site.chain, error)
    if device.type == "cpu":
        return Decision(
            True, "The operator takes the fastest of PyTorch's ways, timed at its first product."
        )
    if device.type != "cuda":
        return Decision(True, f"Nothing predicts times on {device.type} devices.")
    return by_times(predicted(case, device), False, case)


def _prediction(case: SiteCase, device: torch.device) -> Times | None:
    """The predicted times, for the report only; None if there are none."""
    if device.type != "cuda":
        return None
    try:
        return _predicted_once(case, device)
    except Exception as error:  # a compilation must not fail for a report
        log.warning("what %s takes was not predicted: %s", case.problem.chain, error)
        return None


@functools.lru_cache(maxsize=1024)
def _predicted_once(case: SiteCase, device: torch.device) -> Times:
    """The predicted times, cached: models repeat layers, and a prediction takes milliseconds."""
    return predicted(case, device)


def by_times(times: Times, measured: bool, case: SiteCase | None = None) -> Decision:
    """The decision that follows from times.

    Args:
        times: of both implementations.
        measured: whether they were measured; if not, they are predictions.
        case: what they are of; None for a product alone.

    Example:
        >>> by_times(Times(ksopt_us=10.0, unfused_us=25.0), measured=True).reason
        'Measured 10.0 us, 2.50 times as fast as 25.0 us under Inductor.'
        >>> by_times(Times(ksopt_us=30.0, unfused_us=25.0), measured=False).lower
        False
    """
    how = "Measured" if measured else "Predicted"
    ours, theirs = times.ksopt_us, times.unfused_us
    of = ""
    if case is not None and case.with_gradients:
        of = " with its gradients" if case.training else " with the gradient of its input"
    if times.lower:
        reason = f"{how} {ours:.1f} us{of}, {theirs / ours:.2f} times as fast as {theirs:.1f} us"
    else:
        reason = f"{how} {ours:.1f} us{of}, slower than {theirs:.1f} us"
    kind = "measured" if measured else "predicted"
    return Decision(times.lower, f"{reason} under Inductor.", **{kind: times})


def predicted(case: SiteCase, device: torch.device) -> Times:
    """The times that the cost models predict.

    A gradient with respect to an input is the product by the transposed pattern. Those with respect
    to weights are PyTorch's batched products in both cases, and are left out of both times.
    """
    ours = theirs = 0.0
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    for problem in _problems(case):
        rivals = {
            factor: pytorch_ops.predicted_us("bmm", factor, case.batch, multiprocessors)
            / INDUCTOR_GAIN
            for factor in problem.factors()
        }
        theirs += sum(rivals[factor] for factor in problem.factors())
        plan = plan_of(problem, case.batch, device=device, repacked=case.repacked)
        for launch in plan.launches:
            ours += launch.us or rivals[launch.problem]
    return Times(ours, theirs)


def _problems(case: SiteCase) -> list[Problem]:
    """The problems of a case: the product, and the gradient of its input if required.

    With gradients, each factor is a launch of its own.
    """
    problem = case.problem
    if not case.with_gradients:
        return [problem]
    transposed = replace(problem, chain=problem.chain.transpose())
    return [*problem.factors(), *transposed.factors()]


def measured(case: SiteCase, device: torch.device, timer: Timer = measured_times) -> Times:
    """The times measured on this machine, now or before.

    Args:
        case: what is timed; batches up to the same power of two are one case.
        device: of the measurement.
        timer: measures the times.

    Raises:
        UnavailableError: it cannot be timed, or the device's driver cannot be queried.
    """
    fingerprint, key = backend_of(device.type).fingerprint(device), case.key
    record = tuning_cache.load(fingerprint, key, SiteRecord)
    if record is None:
        # Timings disturb each other, and one is enough.
        with tuning_cache.alone(fingerprint, key):
            record = tuning_cache.load(fingerprint, key, SiteRecord)
            if record is None:
                record = SiteRecord(key, case.batch, timer(case, device))
                tuning_cache.save(fingerprint, record)
    return record.times


def _default(device: torch.device) -> Tune:
    return "model" if device.type == "cpu" else settings.tuning()


def checked_tune(value: object) -> Tune | None:
    """The validated value of the option ``tune``.

    Raises:
        InvalidInputError: it is none of `TUNES`.
    """
    if value is None or value in TUNES:
        return value  # type: ignore[return-value]
    raise InvalidInputError(f"options['tune'] is {value!r}: it must be one of {', '.join(TUNES)}")
