"""Entry point of ``torch.compile(model, backend="ksopt")``.

A product by a Kronecker-sparse factor stays one operator, `torch.ops.ksopt.ks_mm`; everything
around it goes to Inductor. torch finds this function through the entry-point group
``torch_dynamo_backends``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import ksopt as package
from ksopt import ops
from ksopt.errors import InvalidInputError

OPTIONS = {"mode": "what torch.compile's own `mode` means, for use next to other options"}
"""Options of ksopt's own, and what they do; all others are Inductor's."""


def ksopt(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured.

    Args:
        gm: the graph.
        example_inputs: its inputs, parameters among them.
        mode: as in torch.compile: "default", "reduce-overhead", "max-autotune", ...
        options: ksopt's own (``OPTIONS``) and Inductor's (``torch._inductor.list_options()``).
            torch.compile takes mode or options, not both: write ``options={"mode": ...}`` then.

    Returns:
        A function of the same inputs.

    Raises:
        InvalidInputError: an unknown mode or option, or a value of the wrong type. Dynamo shows it
            inside its own BackendCompilerFailed.

    Example:
        >>> from ksopt.nn import KSLinear
        >>> model = torch.compile(KSLinear(8, 8, "(1,8,8,1)"), backend="ksopt")
    """
    config = inductor_config(mode, options)
    from torch._inductor.compile_fx import compile_fx

    # torch's on-disk caches know operators by name only: see the top of ksopt.ops.
    tag = f"{torch.compiler.config.cache_key_tag}ksopt-{package.__version__}-{ops.CONTRACT}"
    settings: Any = torch.compiler.config  # its patch() is added at run time
    with settings.patch(cache_key_tag=tag):
        compiled: Any = compile_fx(gm, example_inputs, config_patches=config)
    return compiled


def _reset() -> None:
    """torch._dynamo.reset() calls this: forget recorded CUDA graphs, as for Inductor itself."""
    if torch.cuda.is_initialized():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


ksopt.reset = _reset  # type: ignore[attr-defined]


def inductor_config(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Inductor's settings for a mode and options, once both are known to be right.

    Raises:
        InvalidInputError: see `ksopt`.
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
