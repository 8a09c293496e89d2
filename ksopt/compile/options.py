"""Options of the backend: ksopt's own, and Inductor's."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ksopt.compile.lowering.decide import Tune, checked_tune
from ksopt.errors import InvalidInputError

OPTIONS = {
    "mode": "what torch.compile's own `mode` means, for use next to other options",
    "require": "'all': fail unless every site is lowered; 'any': unless one is",
    "tune": "'measure', 'model' or 'off': how it is decided whether a site is faster lowered",
    "frozen_values": "False: do not look at the values of frozen weights",
    "frozen_tolerance": "entries of a frozen weight that count as zero, relative to its largest",
}
"""Options of ksopt's own, and what they do; all others are Inductor's."""

REQUIREMENTS = ("all", "any")


@dataclass(frozen=True)
class Options:
    """The validated options of the backend.

    Args:
        require: "all", "any" or None.
        tune: see `ksopt.compile.lowering.decide`; None is the default.
        frozen_values: whether the values of frozen weights are analyzed.
        frozen_tolerance: see `ksopt.compile.capture.frozen_weight.pattern_of`.
        inductor: settings for Inductor.
    """

    require: str | None
    tune: Tune | None
    frozen_values: bool
    frozen_tolerance: float
    inductor: dict[str, Any]

    @property
    def records_graphs(self) -> bool:
        """Whether Inductor records CUDA graphs: a mode "reduce-overhead" or "max-autotune"."""
        import torch._inductor.config as usual

        return bool(self.inductor.get("triton.cudagraphs", usual.triton.cudagraphs))


def read(mode: str | None, options: dict[str, Any] | None) -> Options:
    """Validate a mode and options.

    Raises:
        InvalidInputError: an unknown mode or option, or a value that is not allowed.

    Example:
        >>> read("default", {"require": "all"}).require
        'all'
    """
    rest = dict(options or {})
    require = rest.pop("require", None)
    if require is not None and require not in REQUIREMENTS:
        raise InvalidInputError(f"options['require'] is {require!r}: it must be 'all' or 'any'")
    tune = checked_tune(rest.pop("tune", None))
    values = rest.pop("frozen_values", True)
    if not isinstance(values, bool):
        raise InvalidInputError(f"options['frozen_values'] is {values!r}: it must be True or False")
    tolerance = rest.pop("frozen_tolerance", 0.0)
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not number or not 0.0 <= tolerance < 1.0:
        raise InvalidInputError(
            f"options['frozen_tolerance'] is {tolerance!r}: it must be a number from 0 up to, "
            "but not including, 1"
        )
    return Options(require, tune, values, float(tolerance), inductor_config(mode, rest))


def inductor_config(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Validate a mode and options, and return Inductor's settings.

    Raises:
        InvalidInputError: see `read`.
    """
    import torch._inductor

    rest = dict(options or {})
    if "mode" in rest:
        also = rest.pop("mode")
        if mode not in (None, also):
            raise InvalidInputError(
                f"mode is {mode!r} and options['mode'] is {also!r}: give one of them"
            )
        mode = also
    modes = list(torch._inductor.list_mode_options())
    if mode is not None and mode not in modes:
        raise InvalidInputError(f"mode {mode!r} is unknown: it must be one of {', '.join(modes)}")
    known = torch._inductor.list_options()
    for name in rest:
        # Inductor reads a-b as a_b.
        if not isinstance(name, str) or name.replace("-", "_") not in known:
            raise InvalidInputError(_unknown(name, known))
    try:
        wrapper = torch._TorchCompileInductorWrapper(mode, rest, None)
    except RuntimeError as error:
        raise InvalidInputError(f"options: {error}") from error
    return wrapper.config


def _unknown(name: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), [*OPTIONS, *known], n=3)
    meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    own = "; ".join(f"{option!r} ({meaning})" for option, meaning in OPTIONS.items())
    return (
        f"option {name!r} is unknown.{meant} ksopt's own options: {own}. Inductor's "
        f"{len(known)} options are accepted too: torch._inductor.list_options() lists them."
    )
