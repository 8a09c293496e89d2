"""One model in one dtype, as it is, under Inductor and under ksopt: checked, then timed in turns.

The truth is the model in float64 (as far as its library computes in float64). What a backend
computes may be as far from it as twice the larger of the uncompiled model's and Inductor's own
error: another order of summation rounds differently, a wrong product does not stay within that.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.utils
from torch import Tensor, nn

from ksopt.compile import backend
from ksopt.compile.sites import Report, Verdict
from ksopt.measure.accuracy import allowed_error, relative_error
from ksopt.measure.timing import Measurement, measure
from models.build import Built, loss

EAGER, INDUCTOR = "uncompiled", "Inductor"
_BACKEND = "inductor"
_NOTHING = 1e-6  # of the norm of all gradients
_LEARNING_RATE = 1e-6  # a step changes the weights, as in training, and the loss hardly


@dataclass(frozen=True)
class Errors:
    """Relative errors: the norm of the difference from the truth over the truth's norm.

    Args:
        logits: of the forward pass.
        loss: of the training step.
        gradient: of all gradients together.
        gradients: of each parameter's gradient, by name, but for those that are nothing beside the
            others (in attention, a bias of the keys changes no result): they are all rounding.
    """

    logits: float
    loss: float
    gradient: float
    gradients: dict[str, float]


@dataclass
class Way:
    """A way to run the model, and what came of it.

    Args:
        name: "uncompiled", "Inductor", or ksopt with its options.
        options: of the backend "ksopt"; None for the other ways.
        forward_compile_s: the first forward pass, compilation from nothing included; None where
            another way's caches may have been used.
        step_compile_s: the same of the first training step.
        forward_report, step_report: what ksopt did to their graphs; None for the other ways.
        errors: see `Errors`.
        faults: what is wrong, in sentences; a way with a fault is not timed.
        forward: time of a forward pass without gradients.
        step: time of a training step: forward, loss, backward, plain SGD.
    """

    name: str
    options: dict[str, Any] | None = None
    forward_compile_s: float | None = None
    step_compile_s: float | None = None
    forward_report: Report | None = None
    step_report: Report | None = None
    errors: Errors | None = None
    faults: list[str] = field(default_factory=list)
    forward: Measurement | None = None
    step: Measurement | None = None

    @property
    def is_ksopt(self) -> bool:
        """Whether the backend "ksopt" compiles it."""
        return self.options is not None


Told = Callable[[str], None]


def measure_model(
    built: Built,
    ways: list[Way],
    *,
    dynamic: bool = False,
    seconds: float = 1.0,
    told: Told = lambda _: None,
) -> None:
    """Compile, check and time a model; what was found is noted in the ways.

    Args:
        built: the model and its inputs.
        ways: the first are the uncompiled model and Inductor.
        dynamic: compile for any batch and length.
        seconds: about how long to time each of forward and step.
        told: called with a phrase before each thing that takes long.
    """
    told("float64")
    truth = _truth(built)
    runs: dict[str, Callable[[Tensor], Tensor]] = {}
    with _alone(built.inputs.device):
        for group in _sharing_caches(ways):
            with _fresh_caches():
                for way in group:
                    told(f"first calls: {way.name}")
                    runs[way.name] = _compiled(built.model, way, dynamic)
                    way.errors = _errors(_first_calls(built, way, runs[way.name]), truth)
            for way in group[1:]:  # torch's caches may have spared them the compilation
                way.forward_compile_s = way.step_compile_s = None
        _judge(built, ways)
        right = [way for way in ways if not way.faults]
        told("timing")
        device = built.inputs.device
        built.model.eval()
        with torch.no_grad():
            calls = {way.name: _bound(runs[way.name], built.inputs) for way in right}
            forward = measure(calls, device, max_seconds=seconds, min_repeats=5)
        built.model.train()
        calls = {way.name: _step(built, runs[way.name]) for way in right}
        step = measure(calls, device, max_seconds=seconds, min_repeats=5)
    for way in right:
        way.forward, way.step = forward[way.name], step[way.name]


def _sharing_caches(ways: list[Way]) -> list[list[Way]]:
    """Each way has torch's caches for itself, but ksopt's ways share theirs."""
    others = [[way] for way in ways if not way.is_ksopt]
    return [*others, [way for way in ways if way.is_ksopt]]


@dataclass(frozen=True)
class _Results:
    """Logits of a forward pass, loss and gradients of a training step."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def _step_results(
    model: nn.Module, run: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor,
    logits: Tensor,
) -> _Results:  # fmt: skip
    model.train().zero_grad()
    value = loss(run(inputs), targets)
    value.backward()
    gradients = {
        name: parameter.grad.detach()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return _Results(logits.detach(), value.detach(), gradients)


def _truth(built: Built) -> _Results:
    model = copy.deepcopy(built.model).double()
    inputs = built.inputs.double() if built.inputs.is_floating_point() else built.inputs
    with torch.no_grad():
        logits = model.eval()(inputs)
    return _step_results(model, model, inputs, built.targets, logits)


def _first_calls(built: Built, way: Way, run: Callable[[Tensor], Tensor]) -> _Results:
    """The first forward pass and the first step, timed, with ksopt's reports of them."""
    with backend.collected() as reports:
        built.model.eval()
        began = time.perf_counter()
        with torch.no_grad():
            logits = run(built.inputs)
        _wait(built.inputs)
        way.forward_compile_s = time.perf_counter() - began
    with backend.collected() as step_reports:
        began = time.perf_counter()
        found = _step_results(built.model, run, built.inputs, built.targets, logits)
        _wait(built.inputs)
        way.step_compile_s = time.perf_counter() - began
    if way.is_ksopt:
        way.forward_report, way.step_report = _sum(reports), _sum(step_reports)
    return found


def _sum(reports: list[Report]) -> Report:
    total = Report()
    for report in reports:
        total.add(report)
    return total


def _errors(found: _Results, truth: _Results) -> Errors:
    norms = {name: float(gradient.norm()) for name, gradient in truth.gradients.items()}
    wrong = {
        name: float((found.gradients[name].double() - gradient).norm())
        for name, gradient in truth.gradients.items()
    }
    whole = math.hypot(*norms.values())
    return Errors(
        relative_error(found.logits, truth.logits),
        relative_error(found.loss, truth.loss),
        math.hypot(*wrong.values()) / whole,
        {name: wrong[name] / norm for name, norm in norms.items() if norm > _NOTHING * whole},
    )


def _judge(built: Built, ways: list[Way]) -> None:
    """Note what is wrong with what ksopt's ways computed or left out."""
    eps = torch.finfo(next(built.model.parameters()).dtype).eps
    known = [way.errors for way in ways if not way.is_ksopt and way.errors is not None]
    for way in ways:
        own = way.errors
        if not way.is_ksopt or own is None:
            continue
        pairs = [("logits", own.logits, [one.logits for one in known])]
        pairs += [("loss", own.loss, [one.loss for one in known])]
        pairs += [("gradients", own.gradient, [one.gradient for one in known])]
        pairs += [
            (f"gradient of {name}", error, [one.gradients[name] for one in known])
            for name, error in own.gradients.items()
        ]
        for what, error, theirs in pairs:
            allowed = allowed_error(max(theirs), eps)
            if not error <= allowed:
                way.faults.append(f"{what}: relative error {error:.2g}, allowed {allowed:.2g}")
        for what, report in (("forward", way.forward_report), ("step", way.step_report)):
            way.faults += _missing(what, report, built.layers)


def _missing(what: str, report: Report | None, layers: int) -> list[str]:
    if report is None:
        return [f"{what}: the backend saw no graph"]
    faults = [f"{what}: {note}" for note in report.notes]
    done = report.count(Verdict.LOWERED) + report.count(Verdict.KEPT)
    if done != layers:
        faults.append(f"{what}: {done} sites for {layers} Kronecker-sparse layers")
    faults += [
        f"{what}: {site.place} is not recognised: {site.reason}"
        for site in report.sites
        if site.verdict is Verdict.MISSED
    ]
    return faults


def _compiled(model: nn.Module, way: Way, dynamic: bool) -> Callable[[Tensor], Tensor]:
    if way.name == EAGER:
        return model
    name = "ksopt" if way.is_ksopt else _BACKEND
    run: Callable[[Tensor], Tensor] = torch.compile(
        model, backend=name, fullgraph=True, dynamic=dynamic, options=way.options
    )
    return run


def _bound(run: Callable[[Tensor], Tensor], inputs: Tensor) -> Callable[[], object]:
    return lambda: run(inputs)


def _step(built: Built, run: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.SGD(built.model.parameters(), lr=_LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        loss(run(built.inputs), built.targets).backward()
        optimizer.step()

    return step


def _nothing(x: Tensor) -> Tensor:
    return x.sin() + 1


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Nothing compiled before or after; and no quiet return to the uncompiled model."""
    torch._dynamo.reset()
    torch.compile(_nothing)(torch.ones(8, device=device))  # Inductor's workers start untimed
    try:
        # All ways share the model's code, which Dynamo compiles anew for each.
        with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            yield
    finally:
        torch._dynamo.reset()


@contextmanager
def _fresh_caches() -> Iterator[None]:
    """Compilation from nothing: what is found in torch's caches would take no time."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        torch._inductor.utils.fresh_cache(dir=folder),
    ):
        yield


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
