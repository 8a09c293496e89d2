"""Records of a module's behaviour, and their comparison between two runs.

Values, gradients, what requires gradients, what shares memory with what, what was written, and
errors. Where torch.compile without ksopt does not do as eager mode does, ksopt is to do as that.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._pytree import tree_leaves

from ksopt.compile import backend, collected
from ksopt.compile.sites import Report

from .records import Record, Tolerance, differences, not_torchs

_NOISE = 2.0**-8
"""What bfloat16 rounds by, relative to a number."""

HAND_OVERS: dict[str, Callable[..., Any]] = {
    "eager": lambda gm, inputs, config: gm.forward,
    "aot_eager": lambda gm, inputs, config: aot_eager(gm, inputs),
    "inductor": backend.compile_by_inductor,
}
"""What runs a graph that was rewritten."""


def observe(
    namespace: dict[str, Any],
    compile_it: Callable[[nn.Module], Any] | None,
    noise: torch.Generator | None = None,
) -> list[Record]:
    """Run a program's calls, in eager mode or compiled, and record their effects.

    Args:
        namespace: of a program's source.
        compile_it: returns what is called in place of the module; None for eager mode.
        noise: draws what every weight and input is changed by, about as much as 16 bits round.
    """
    torch.manual_seed(0)
    m = namespace["M"]().train(namespace["TRAINING"])
    called = m if compile_it is None else compile_it(m)
    if noise is not None:
        _disturb([*m.parameters(), *m.buffers()], noise)
    records = []
    for at, call in enumerate(namespace["CALLS"]):
        torch.manual_seed(at + 1)
        try:
            for text in call["before"]:
                exec(text, {**namespace, "m": m})
        except RuntimeError as error:  # a parameter that the module wrote may be no leaf any more
            records.append(Record(error=("before", f"{type(error).__name__}: {error}")))
            break
        inputs = namespace["inputs"](call["batch"])
        if noise is not None:
            _disturb(inputs, noise)
        with _mode(call["mode"]):
            records.append(_one(namespace, m, called, call, inputs))
        if records[-1].error is not None:
            break
    return records


def _disturb(tensors: Iterable[Tensor], noise: torch.Generator) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() and 0 not in tensor.stride():
            tensor.data.mul_(1 + _NOISE * torch.randn(tensor.shape, generator=noise))


@contextlib.contextmanager
def _mode(name: str) -> Iterator[None]:
    modes = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    grad = torch.is_grad_enabled()
    try:
        with modes[name]():
            yield
    finally:
        torch.set_grad_enabled(grad)  # a module that failed may have left it otherwise


def _one(
    namespace: dict[str, Any], m: nn.Module, called: Any, call: dict[str, Any], inputs: list[Tensor]
) -> Record:
    record = Record()
    for value, leaf in zip(inputs, namespace["LEAVES"], strict=True):
        if leaf and call["mode"] == "grad" and value.is_floating_point():
            value.requires_grad_()
    if namespace["DYNAMIC"] == "mark":
        for value in inputs:
            torch._dynamo.mark_dynamic(value, 0)
    state = {**dict(m.named_parameters()), **dict(m.named_buffers())}
    for value in state.values():
        value.grad = None
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=call["autocast"]):
            result = called(*inputs)
    except Exception as error:
        record.error = ("forward", f"{type(error).__name__}: {error}")
        return record
    record.facts["modes"] = _modes()
    outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    inputs_by_name = {f"x{at}": value for at, value in enumerate(inputs)}
    everything = {f"out{at}": value for at, value in enumerate(outputs)} | inputs_by_name | state
    try:
        _read(record.facts, everything, len(outputs))
        loss = _loss(outputs)
        for text in call["between"]:
            exec(text, {**namespace, "m": m})
        if loss is not None:
            loss.backward()
    except Exception as error:
        record.error = ("backward", f"{type(error).__name__}: {error}")
        return record
    if loss is not None:
        for name, value in {**inputs_by_name, **state}.items():
            with _quiet():
                grad = value.grad
            record.facts[f"grad {name}"] = None if grad is None else _copy(grad)
    for text in call.get("after", ()):
        exec(text, {**namespace, "m": m})
    _write_through(record.facts, everything)
    return record


def _modes() -> tuple[Any, ...]:
    """What is switched on: a call leaves it as it was."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._functorch.maybe_current_level(),
    )


def _read(facts: dict[str, Any], everything: dict[str, Tensor], outputs: int) -> None:
    for at, (name, value) in enumerate(everything.items()):
        facts[f"value {name}"] = _copy(value)
        if at < outputs:
            facts[f"requires_grad {name}"] = value.requires_grad
    facts["aliases"] = _partition(everything)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the gradient of a tensor that is no leaf
        yield


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format)


def _partition(everything: dict[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """The names of tensors that share memory."""
    groups: dict[int, list[str]] = {}
    for name, value in everything.items():
        if value.numel():
            groups.setdefault(value.untyped_storage()._cdata, []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _loss(outputs: list[Tensor]) -> Tensor | None:
    """A number that every element of every output counts in differently."""
    total = None
    for at, value in enumerate(outputs):
        if value.requires_grad:
            own = torch.Generator().manual_seed(at)
            part = (value.double() * torch.randn(value.shape, generator=own).double()).sum()
            total = part if total is None else total + part
    return total


def _write_through(facts: dict[str, Any], everything: dict[str, Tensor]) -> None:
    """Write outputs that share memory, one after the other, and look at the others."""
    shared = {name for names in facts["aliases"] for name in names}
    for written in sorted(shared):
        value = everything[written]
        if not written.startswith("out") or 0 in value.stride():
            continue
        try:
            with torch.no_grad():
                value.detach().mul_(-1.5)
        except RuntimeError as error:  # inference tensors
            facts[f"write {written}"] = type(error).__name__
            continue
        for name in sorted(shared):
            facts[f"{name} after a write to {written}"] = _copy(everything[name])


@dataclass
class Outcome:
    """What became of one program.

    Attributes:
        differences: of ksopt from what it should do; empty if there are none.
        torchs: differences of torch.compile without ksopt from eager mode, where looked for.
        quick: whether it differed where the rewritten graph ran as it is, and not by Inductor.
        lowered: lines of the products that were lowered.
        spellings: what the author called at them.
        notes: about graphs that could not be followed.
        missed: reasons.
        failed: whether eager mode ends in an error.
    """

    differences: list[str] = field(default_factory=list)
    torchs: list[str] = field(default_factory=list)
    lowered: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    quick: bool = False
    failed: bool = False


def compare(
    run: Callable[[Callable[[], Any]], Any], namespace: dict[str, Any], tolerance: Tolerance
) -> Outcome:
    """Run a program in eager mode and compiled by ksopt.

    Args:
        run: runs a function, perhaps elsewhere: one failure must not make the next.
        namespace: of the program's source.
        tolerance: what is no difference.
    """
    expected = run(lambda: observe(namespace, None))
    actual, outcome = run(lambda: _by_ksopt(namespace))
    outcome.differences = differences(expected, actual, tolerance)
    if outcome.differences and tolerance.rough:
        disturbed = [run(functools.partial(_disturbed, namespace, seed)) for seed in range(3)]
        outcome.differences = differences(expected, actual, tolerance, disturbed)
    if outcome.differences and _is_refused(expected):
        # What eager mode refuses because of a write, ksopt may compute: as if written afterwards.
        moved = [{**call, "between": [], "after": call["between"]} for call in namespace["CALLS"]]
        later = run(lambda: observe({**namespace, "CALLS": moved}, None))
        if not differences(later, actual, tolerance):
            outcome.differences = []
    handover = namespace["HANDOVER"]
    if outcome.differences and handover == "eager" and _is_refused(actual):
        # A graph that runs unchanged saves its operators' inputs. Inductor chooses what it saves,
        # as it does for the original graph; the default configuration decides.
        handover = "inductor"
        actual, outcome = run(lambda: _by_ksopt({**namespace, "HANDOVER": handover}))
        outcome.differences = differences(expected, actual, tolerance)
        outcome.quick = not outcome.differences
    if outcome.differences:
        plain = run(lambda: _observe_compiled(namespace, handover))
        outcome.torchs = differences(expected, plain, tolerance)
        # Where torch.compile itself differs from eager mode, there is no reference.
        outcome.differences = not_torchs(outcome.differences, outcome.torchs, plain)
    outcome.failed = any(record.error is not None for record in expected)
    return outcome


def _is_refused(records: list[Record]) -> bool:
    """Whether torch refuses a backward pass because a tensor was written before it.

    Of what was saved torch says "has been modified by an inplace operation", of a view from among
    several, as of chunk(), "has been modified inplace".
    """
    stage, text = records[-1].error or ("", "")
    return stage == "backward" and ("modified by an inplace" in text or "modified inplace" in text)


def _disturbed(namespace: dict[str, Any], seed: int) -> list[Record]:
    return observe(namespace, None, torch.Generator().manual_seed(seed))


def _by_ksopt(namespace: dict[str, Any]) -> tuple[list[Record], Outcome]:
    outcome = Outcome()
    with collected() as reports:
        records = _observe_compiled(namespace, "ksopt")
    _note_sites(outcome, reports)
    return records, outcome


def _observe_compiled(namespace: dict[str, Any], name: str) -> list[Record]:
    torch._dynamo.reset()
    dynamic = namespace["DYNAMIC"]

    def compile_it(m: nn.Module) -> Any:
        # Every site that can be lowered is.
        options = {"tune": "off"} if name == "ksopt" else None
        dynamic_ = None if dynamic == "mark" else dynamic
        return torch.compile(m, backend=name, dynamic=dynamic_, options=options)

    usual = backend.compile_by_inductor
    backend.compile_by_inductor = HAND_OVERS[namespace["HANDOVER"]]
    try:
        with torch.backends.opt_einsum.flags(enabled=False):
            return observe(namespace, compile_it)
    finally:
        backend.compile_by_inductor = usual
        torch._dynamo.reset()


def _note_sites(outcome: Outcome, reports: list[Report]) -> None:
    from ksopt.compile.sites import Verdict

    for report in reports:
        outcome.notes += report.notes
        for site in report.sites:
            if site.verdict is Verdict.LOWERED:
                outcome.lowered.append(site.place.line)
            elif site.verdict is Verdict.NOT_RECOGNISED:
                outcome.missed[site.reason.partition(": ")[2]] += 1
