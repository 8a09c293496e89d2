"""A factor's product and the epilogue behind it in one launch, where the chosen kernel has both.

The choice is that of the product alone: the same kernel with the same tile, compiled once more.
Where kernels are measured its result is compared with float64 before it is used, as theirs are.
PyTorch's product by a full matrix could add a bias, too (``addmm``). But then cuBLAS may add
partial sums in 16 bit, where the batched product that was judged has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ksopt import settings
from ksopt.epilogue import ACTIVATIONS, Activation, After
from ksopt.errors import KsoptError
from ksopt.jit import host
from ksopt.kernels import registry, weight_cache, weight_scopes
from ksopt.kernels.autotuner import Choice
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.launcher import KERNEL, Enterable, Launcher
from ksopt.kernels.packing_launcher import PreparingLauncher
from ksopt.kernels.problem import Epilogue
from ksopt.measure.accuracy import Around, checking_chain

_NONE = -1  # of csrc/host/kernel_table.hpp

_launchers: dict[tuple[Candidate, Epilogue, int], Launcher | None] = {}
_registered: set[tuple[int, Epilogue]] = set()  # plans of the host library


def run(
    choice: Choice, x: Tensor, weight: Tensor, after: After, out: Tensor | None = None
) -> Tensor | None:
    """A product and what is after it in one launch; None where its kernel has no such.

    Args:
        choice: of the product.
        x, weight, out: as for `DeviceBackend.run`.
        after: not empty.
    """
    activation = cast(Activation, after.activation)
    parts = (after.bias is not None, activation, after.residual is not None, after.in_float32)
    epilogue = Epilogue(*parts)
    launcher = _launcher(choice, x, weight, after, epilogue)
    if launcher is None:
        return None
    if not weight_scopes.thread_state.repacked and choice.repacks:
        with weight_scopes.repacked():
            return launcher.with_epilogue(x, weight, after, out)
    return launcher.with_epilogue(x, weight, after, out)


def _launcher(
    choice: Choice, x: Tensor, weight: Tensor, after: After, epilogue: Epilogue
) -> Launcher | None:
    call = choice.call
    if isinstance(call, PreparingLauncher) and call.for_rows(x) is not call:
        call = call.for_rows(x)  # another family's
        _register(call, epilogue, None)
        return None
    key = (choice.candidate, epilogue, x.get_device())
    if key not in _launchers:
        has_kernel = _takes(choice.candidate, epilogue)
        if has_kernel and _is_judged() and weight_cache.is_capturing(x.get_device()):
            return None  # until a call outside of a capture has compared it
        launcher = _built(*key) if has_kernel else None
        if launcher is not None:
            wrong = _fault(launcher, x, weight, after)
            if wrong is not None:
                label = choice.candidate.label
                registry.warn_once(f"{label} for {launcher.problem} is left out: {wrong}")
                launcher = None
        _launchers[key] = launcher
    _register(call, epilogue, _launchers[key])
    return _launchers[key]


def _takes(candidate: Candidate, epilogue: Epilogue) -> bool:
    """Whether the candidate's kernel may have an epilogue."""
    return candidate.family is not None and candidate.family.takes(epilogue)


def _built(candidate: Candidate, epilogue: Epilogue, device: int) -> Launcher | None:
    family = candidate.family
    assert family is not None
    problem = replace(candidate.problem, epilogue=epilogue)
    try:
        launcher = family.launcher(problem, candidate.tile, device)
    except KsoptError as error:
        registry.warn_once(f"{candidate.label} for {problem} does not compile: {error}")
        return None
    assert isinstance(launcher, Launcher)
    return launcher


def _is_judged() -> bool:
    """Whether kernels are compared with float64 before they are used."""
    return settings.tuning() == "measure" and not torch.are_deterministic_algorithms_enabled()


def _fault(launcher: Launcher, x: Tensor, weight: Tensor, after: After) -> str | None:
    """The fault of a result, against float64, where kernels are judged; None if there is none."""
    if not _is_judged():
        return None
    around = Around(after.bias, after.activation, after.residual)
    try:
        with torch.no_grad():
            check, rows, (own,), around = checking_chain(x, [weight], False, around)
            own_after = replace(after, bias=around.bias, residual=around.residual)
            y = launcher.with_epilogue(rows, own, own_after)
            return None if y is None else check.judge(y)
    except torch.OutOfMemoryError:  # the check takes more than the product
        return None


def _register(call: Any, epilogue: Epilogue, launcher: Launcher | None) -> None:
    """Register the launch with the host library; None: there is none."""
    if not host.is_loaded() or not isinstance(call, Enterable):
        return
    entry = call.entry()
    if entry is None or entry.kind != KERNEL or (entry.plan, epilogue) in _registered:
        return
    _registered.add((entry.plan, epilogue))
    own = launcher.entry() if launcher is not None else None
    activation = ACTIVATIONS.index(epilogue.activation)
    after = (activation, epilogue.bias, epilogue.residual, epilogue.in_float32)
    torch.ops.ksopt_host.set_epilogue(entry.plan, *after, _NONE if own is None else own.plan)
