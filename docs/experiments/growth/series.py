"""The series: the work at each size. Each function prepares a size and returns the timed work.

The work returns a note. Modules that it needs are imported before timing.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growth import studies

Work = Callable[[], str]


@dataclass(frozen=True)
class Series:
    """A series of growing sizes.

    Args:
        of: The unit of the size.
        sizes: The measured sizes.
        prepare: (size) -> the work.
    """

    of: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], Work]


def _blocks(count: int, width: int = 8192, middle: int = 28672) -> Any:
    """Blocks of Llama 70B's shape, whose weights are allocated but not written."""
    import torch
    from torch import nn

    from ksopt.nn import KSLinear

    def linear(columns: int, rows: int) -> KSLinear:
        return KSLinear(
            columns, rows, f"(1,{rows // 4},{columns // 4},4)*(4,{columns // 4},{columns // 4},1)",
            bias=False,
        )  # fmt: skip

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = linear(width, width), linear(width, width)
            self.k, self.v = linear(width, width // 8), linear(width, width // 8)
            self.gate, self.up = linear(width, middle), linear(width, middle)
            self.down = linear(middle, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                one.unflatten(-1, (-1, width // 64)).transpose(-3, -2)
                for one in (self.q(x), self.k(x), self.v(x))
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + self.o(mixed.transpose(-3, -2).flatten(-2))
            return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(count)))
    return model.to(torch.bfloat16).to_empty(device="cpu"), torch.empty(1, 16, width).bfloat16()


class _EnoughError(Exception):
    """The graph is captured; the model need not run."""


def capture(blocks: int, deciding: bool = True) -> Work:
    """The pass over one graph of ``blocks`` blocks; without ``deciding``, only Dynamo's part."""
    import torch
    from torch._dynamo.exc import BackendCompilerFailed

    from ksopt.compile.backend import judge
    from ksopt.compile.passes import rewrite_graph

    model, x = _blocks(blocks)
    graphs: list[Any] = []

    def collect(gm: Any, inputs: list[Any]) -> Any:
        graphs.append((gm, inputs))
        raise _EnoughError

    def dynamo() -> str:
        try:
            with torch.no_grad():
                torch.compile(model, backend=collect)(x)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _EnoughError):
                raise
        gm, inputs = graphs[0]
        return f"{len(gm.graph.nodes)} nodes, {sum(one.numel() for one in inputs):.3g} weights"

    if not deciding:
        return dynamo
    dynamo()
    gm, inputs = graphs[0]

    def rewritten() -> str:
        with torch.no_grad():
            report = rewrite_graph(gm, inputs, judge(inputs, None))
        return f"{len(report.sites)} sites, of it deciding {report.deciding_s:.3f} s"

    return rewritten


def width(side: int) -> Work:
    """Building the space of chains for a search of a square layer."""
    from ksopt.search.layer_request import LayerRequest
    from ksopt.search.space import space

    def work() -> str:
        built = space.build(LayerRequest(f"{side}x{side}", budgets=("25%",)))
        return f"{len(built.candidates)} candidates, {'all' if built.complete else 'a sample'}"

    return work


def _chain(factors: int, bits: int = 12) -> Any:
    """A square chain of 2 ** bits features with ``factors`` butterfly-like factors."""
    from ksopt.patterns.chain import Chain, Pattern

    each = [2 ** (bits // factors + (at < bits % factors)) for at in range(factors)]
    before, patterns = 1, []
    for side in each:
        patterns.append(Pattern(before, side, side, 2**bits // (before * side)))
        before *= side
    return Chain(tuple(patterns))


def projecting(side: int, factors: int = 2) -> Work:
    """Projecting a dense matrix onto a chain."""
    import torch

    import ksopt

    chain = _chain(factors, side.bit_length() - 1)
    matrix = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    ksopt.project(torch.randn(16, 16), _chain(2, 4))

    def work() -> str:
        return f"{chain}: error {ksopt.project(matrix, chain).relative_error:.3f}"

    return work


def planning(rows: int, factors: int = 2) -> Work:
    """Planning a chain on an H200, by the cost models."""
    from ksopt.kernels import forecast, gpus
    from ksopt.kernels.problem import Epilogue, Problem

    spec = gpus.spec_of("H200")
    forecast.forecast(Problem(_chain(2, 6), "bfloat16", False, True, Epilogue(), 1), 64, spec)
    problem = Problem(_chain(factors), "bfloat16", False, True, Epilogue(), 1)

    def work() -> str:
        plan = forecast.forecast(problem, rows, spec).plan
        return (
            f"{len(plan.launches)} launches, {sum(one.us or 0.0 for one in plan.launches):.1f} us"
        )

    return work


def enumerating(factors: int) -> Work:
    """Enumerating all chains of a 64x96 layer with ``factors`` factors."""
    from ksopt.patterns.size import Dims
    from ksopt.search.space.enumerate import Walk

    def work() -> str:
        walk = Walk(Dims(64, 96), most=3072, least_inner=64)
        return f"{sum(1 for _ in walk.factors(factors))} chains"

    return work


def _studied(
    kind: str, trials: int, workers: int = 1, sleep_s: float = 0.0, on_disk: bool = False
) -> Work:
    """Running a study, in /dev/shm if it exists, so that no disk is measured."""
    shared = Path("/dev/shm")
    where = shared if shared.is_dir() and not on_disk else None
    folder = Path(tempfile.mkdtemp(prefix="ksopt-growth-", dir=where))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["KSOPT_CACHE_DIR"] = str(folder / "cache")
    urls = {"sqlite": f"sqlite:///{folder / 'study.db'}", "journal": f"journal:{folder / 'log'}"}
    return studies.of(urls[kind], trials, workers, sleep_s)


_TRIALS = (10, 30, 100, 300, 1000, 3000, 5000)
_WORKERS = (1, 2, 4, 8, 16, 32, 64)
_WORKER_TRIALS, _WORKER_SLEEP_S = 128, 0.1

ALL: dict[str, Series] = {
    "dynamo": Series("blocks", (1, 2, 5, 10, 20, 40, 80), lambda n: capture(n, deciding=False)),
    "capture": Series("blocks", (1, 2, 5, 10, 20, 40, 80), capture),
    "width": Series("features", tuple(2**k for k in range(8, 17)), width),
    "enumeration": Series("factors", (1, 2, 3), enumerating),
    "factors-projection": Series("factors", (2, 3, 4, 5, 6), lambda n: projecting(1024, n)),
    "factors-planning": Series("factors", (2, 3, 4, 5, 6), lambda n: planning(8192, n)),
    "rows": Series("rows", tuple(10**k for k in range(8)), planning),
    "projection": Series("features", (128, 256, 512, 1024, 2048), projecting),
    "trials-sqlite": Series("trials", _TRIALS, lambda n: _studied("sqlite", n)),
    "trials-journal": Series("trials", _TRIALS, lambda n: _studied("journal", n)),
    "disk-sqlite": Series(
        "trials", (10, 20, 40, 80), lambda n: _studied("sqlite", n, on_disk=True)
    ),
    "disk-journal": Series(
        "trials", (10, 20, 40, 80), lambda n: _studied("journal", n, on_disk=True)
    ),
    "workers-sqlite": Series(
        "workers", _WORKERS, lambda n: _studied("sqlite", _WORKER_TRIALS, n, _WORKER_SLEEP_S)
    ),
    "workers-journal": Series(
        "workers", _WORKERS, lambda n: _studied("journal", _WORKER_TRIALS, n, _WORKER_SLEEP_S)
    ),
}
