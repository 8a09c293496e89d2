"""The options of `ksopt bench kernels` as texts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ksopt.patterns.surroundings import epilogue_option, siblings_option
from ksopt.system.option_fields import option

_WHAT = "what is measured"


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command line, one field each."""

    patterns: tuple[str, ...] = option(
        (),
        "paper (its 627), sample:N of them, random:N (patterns, chains and rows of any size), a "
        "file with a pattern a line, or patterns",
        _WHAT,
        nargs="+",
        is_replaced=True,
        metavar="PATTERN",
        is_always_shown=True,
    )
    chains: tuple[str, ...] = option(
        (),
        "chains such as (..)*(..)",
        _WHAT,
        flag="chain",
        nargs="+",
        is_replaced=True,
        metavar="CHAIN",
        is_always_shown=True,
    )
    epilogue: tuple[str, ...] = epilogue_option(_WHAT)
    """In order of computation; of every product, which is then a layer."""
    siblings: int = siblings_option(_WHAT)
    dtype: str | None = option(
        None,
        "float16 (default on a GPU), bfloat16, float32 (default on a CPU), or tf32 (on a GPU)",
        _WHAT,
        is_always_shown=True,
    )
    layout: str = option(
        "batch_first", "batch_first (default), batch_last or both", _WHAT, is_always_shown=True
    )
    batch: str | None = option(
        None,
        "rows, several between commas (25088 as in the paper, on a CPU 256; random:N has its own)",
        _WHAT,
        metavar="ROWS",
        is_always_shown=True,
    )
    device: str = option(
        "auto",
        "cpu, cuda, cuda:1; auto (default): a GPU if there is one",
        _WHAT,
        is_always_shown=True,
    )
    graph: bool = option(
        False, "time CUDA graphs, with weights that are cold in L2: small batches", _WHAT
    )
    against: str = option(
        "eager",
        "eager (default), inductor, or names: bmm, bmm_loop, expand, bmm_paper, einsum, "
        "einsum_weight_first, bmm_weight_first, conv, bsr, sparse, dense, inductor_bmm, "
        "inductor_einsum, bmm_paper_product; with commas",
        _WHAT,
        metavar="WAYS",
        is_always_shown=True,
    )
    inductor_sample: int = option(
        40,
        "products that Inductor compiles, where it is asked for (%(default)s)",
        _WHAT,
        parse=int,
        metavar="N",
        is_always_shown=True,
    )
    """Spread evenly over all products."""
    seed: int = option(
        0,
        "of the inputs, sample:N and random:N (%(default)s)",
        _WHAT,
        parse=int,
        is_always_shown=True,
    )
    every_way: bool = option(
        False, "try each way at least once, however much multiplying by zero costs it", _WHAT
    )
    plugins: tuple[str, ...] = option(
        (),
        "modules to import first, which register devices or kernel families; this runs their code",
        _WHAT,
        nargs="+",
        metavar="MODULE",
    )
    """Worker processes import them. This process has done so already."""
