"""The options of `ksopt bench crossover` as texts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ksopt.system.option_fields import number, option, whole_number

_WHAT, _HOW = "what is measured", "how it is measured"


@dataclass(frozen=True)
class CrossoverOptions:
    """The options of the command line, one field each."""

    minutes: float = option(
        10.0, "time for all of it; the most informative layers come first (%(default)s)", _HOW,
        parse=number, is_always_shown=True,
    )  # fmt: skip
    precisions: str | None = option(
        None, "some of float32, tf32, bfloat16, float16 (the first three; on a CPU float32)", _WHAT
    )
    widths: str | None = option(
        None, "features of the layers (384 to 8192; on a CPU 64 to 512), with commas", _WHAT
    )
    rows: str | None = option(None, "rows of x (1 to 25088; on a CPU 1 to 1024)", _WHAT)
    budgets: str = option(
        "50%,25%,12.5%,6.25%", "shares of the dense layer's weights (%(default)s)", _WHAT
    )
    passes: str = option("inference,training", "inference, training, or both", _WHAT)
    device: str = option(
        "auto", "cpu, cuda, cuda:1; auto (default): a GPU if there is one", _HOW,
        is_always_shown=True,
    )  # fmt: skip
    seed: int = option(0, "of the weights and inputs (%(default)s)", _HOW, parse=whole_number)
