"""Records of a call's behaviour, and their comparison with another call's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Record:
    """What one call did.

    Attributes:
        error: where it failed ("before", "forward", "backward"), and how; None if it did not.
        facts: name -> a value to be compared: a tensor, or anything with an equality.
    """

    error: tuple[str, str] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tolerance:
    """The permitted differences of two runs.

    Attributes:
        rough: Tensors of 16 bits are involved.
        skips_zeros: A dense matrix has zeros that ksopt does not multiply by. Where eager mode's
            result is not finite, ksopt's may be (docs/backend.md).
    """

    rough: bool = False
    skips_zeros: bool = False


def differences(
    expected: list[Record],
    actual: list[Record],
    tolerance: Tolerance,
    disturbed: Sequence[list[Record]] = (),
) -> list[str]:
    """What two runs of a program differ in; a sentence each.

    Args:
        expected: of eager mode.
        actual: of the compiled module.
        tolerance: what is no difference.
        disturbed: runs with noise; what these differ in as much is no difference.
    """
    differences = []
    for at, (one, other) in enumerate(zip(expected, actual, strict=False)):
        noisy = [records[at] for records in disturbed if at < len(records)]
        differences += [f"call {at}: {text}" for text in _between(one, other, tolerance, noisy)]
        if one.error is not None or other.error is not None:
            break
    return differences


def not_torchs(from_eager: list[str], torchs: list[str], plain: list[Record]) -> list[str]:
    """The differences from eager mode that torch.compile alone does not have.

    Args:
        from_eager: differences of a run from eager mode.
        torchs: differences of torch.compile's own run from eager mode.
        plain: torch.compile's own run. What it did not reach says nothing.
    """
    theirs = {_subject(text) for text in torchs}
    reached = next((at for at, record in enumerate(plain) if record.error is not None), len(plain))

    def remains(text: str) -> bool:
        call, fact = _subject(text)
        at = int(call.removeprefix("call "))
        says_nothing = at > reached or (
            at == reached and fact != "error" and fact not in plain[at].facts
        )
        return (call, fact) not in theirs or says_nothing

    return [text for text in from_eager if remains(text)]


def _subject(text: str) -> tuple[str, str]:
    """The call and the fact that a sentence of `differences` is about."""
    call, fact, _ = text.split(": ", 2)
    return call, fact


def _between(
    one: Record, other: Record, tolerance: Tolerance, noisy: list[Record]
) -> Iterator[str]:
    fails_alike = (one.error or ("",))[0] == (other.error or ("",))[0]
    if not fails_alike:
        yield f"error: expected {_short(one.error)}, got {_short(other.error)}"
    for name in dict.fromkeys([*one.facts, *other.facts]):
        if name not in one.facts or name not in other.facts:
            if one.error is None and other.error is None:
                yield f"{name}: only one run has it"
            continue
        text = _unequal(one.facts[name], other.facts[name], tolerance)
        if text and not (text.startswith("off") and _is_noise(name, one, other, noisy)):
            yield f"{name}: {text}"


def _is_noise(name: str, one: Record, other: Record, noisy: list[Record]) -> bool:
    """Whether a fact is as far off where weights and inputs are changed a little."""
    a = one.facts[name].double().nan_to_num(0, 0, 0)
    far = float((a - other.facts[name].double().nan_to_num(0, 0, 0)).abs().max())
    for record in noisy:
        fact = record.facts.get(name)
        if not isinstance(fact, Tensor) or fact.shape != a.shape:
            continue
        # Ten times: each factor and each sum rounds again.
        if far <= 10 * float((a - fact.double().nan_to_num(0, 0, 0)).abs().max()):
            return True
    return False


def _short(error: tuple[str, str] | None) -> str:
    return "none" if error is None else f"{error[0]} {error[1][:600]}"


def _unequal(one: Any, other: Any, tolerance: Tolerance) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        if isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
            return f"expected {_name(one)}, got {_name(other)}"
        return ""
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"expected {one.dtype} {list(one.shape)}, got {other.dtype} {list(other.shape)}"
    if not one.numel():
        return ""
    a, b = one.double(), other.double()
    if tolerance.skips_zeros:
        b = b.where(a.isfinite(), a)
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "other elements are finite"
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    # The same sums in another order; 16 bits are rounded at every factor.
    relative, absolute = (0.15, 1e-2) if tolerance.rough else (1e-3, 1e-4)
    allowed = relative * float(a.abs().max()) + absolute
    far = float((a - b).abs().max())
    return f"off by {far:.3g} of {float(a.abs().max()):.3g}" if far > allowed else ""


def _name(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else str(value)
