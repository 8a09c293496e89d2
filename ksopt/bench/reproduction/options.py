"""The options of `ksopt bench paper` as texts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ksopt.system.option_fields import option, whole_number

_WHAT, _HOW = "what is measured", "how it is measured"


@dataclass(frozen=True)
class PaperOptions:
    """The options of the command line, one field each."""

    table: tuple[int, ...] = option(
        (), "tables: 3, 4, 5, 6, 7, 8", _WHAT, parse=whole_number, nargs="+", is_replaced=True,
        metavar="N",
    )  # fmt: skip
    figure: tuple[int, ...] = option(
        (), "figures: 4, 6, 7, 9 to 17", _WHAT, parse=whole_number, nargs="+", is_replaced=True,
        metavar="N",
    )  # fmt: skip
    all: bool = option(False, "all of them, in bfloat16 and TF32 too where there is a GPU", _WHAT)
    dtypes: str | None = option(
        None,
        "some of float32, tf32, float16, bfloat16, with commas, in the place of the paper's",
        _WHAT,
    )
    quick: bool = option(
        False, "a sample of the patterns, with confidence intervals, instead of all", _WHAT
    )
    sample: int | None = option(
        None, "patterns of a sample (48 with --quick)", _WHAT, parse=whole_number, metavar="N"
    )
    device: str = option(
        "auto", "cpu, cuda, cuda:1; auto (default): a GPU if there is one", _HOW,
        is_always_shown=True,
    )  # fmt: skip
    batch: int | None = option(
        None, "rows of x (the paper's 25088; on a CPU 64)", _HOW, parse=whole_number,
        metavar="ROWS",
    )  # fmt: skip
    small: bool = option(False, "small models and patterns: the default on a CPU", _HOW)
    seed: int = option(0, "of the sample and the inputs (%(default)s)", _HOW, parse=whole_number)
