"""The series: the work at each size. Each function prepares a size and returns the timed work.

The work returns a note. Modules that it needs are imported before timing.
"""

from __future__ import annotations

import atexit
import importlib
import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growth import models, studies

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


def dynamo(blocks: int) -> Work:
    """Dynamo's part of a compilation."""
    from growth import graphs

    model, x = models.unwritten(blocks)

    def work() -> str:
        gm, inputs = graphs.captured(model, x)
        return f"{len(gm.graph.nodes)} nodes, {sum(one.numel() for one in inputs):.3g} weights"

    return work


def capture(blocks: int) -> Work:
    """The pass over one graph of ``blocks`` blocks."""
    import torch

    from growth import graphs
    from ksopt.compile.backend import judge
    from ksopt.compile.passes import rewrite_graph

    gm, inputs = graphs.captured(*models.unwritten(blocks))

    def work() -> str:
        with torch.no_grad():
            report = rewrite_graph(gm, inputs, judge(inputs, None))
        return f"{len(report.sites)} sites, of it deciding {report.deciding_s:.3f} s"

    return work


# Features of the compiled models, whose products then take little time and memory.
_NARROW = 256


def compiling(blocks: int, backend: str = "ksopt", width: int = _NARROW) -> Work:
    """Compiling a model of KS layers for this CPU, with empty caches, by its first call."""
    import torch
    import torch._inductor.compile_fx

    import ksopt.compile.backend

    folder = _folder()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    model, x = models.unwritten(blocks, width)

    def work() -> str:
        before = _children_s()
        with torch.no_grad(), ksopt.compile.backend.collected() as reports:
            torch.compile(model, backend=backend)(x)
        sites = sum(len(one.sites) for one in reports)
        return f"{sites} sites, of it C++ compiler {_children_s() - before:.1f} s"

    return work


def deciding(blocks: int) -> Work:
    """All that backend "ksopt" does with a graph but Inductor's compilation."""
    import torch

    from growth import graphs
    from ksopt.compile import backend

    gm, inputs = graphs.captured(*models.unwritten(blocks, _NARROW))
    backend.compile_by_inductor = lambda gm, *_: gm.forward

    def work() -> str:
        with torch.no_grad(), backend.collected() as reports:
            backend.ksopt(gm, inputs)
        return f"{sum(len(one.sites) for one in reports)} sites"

    return work


def _children_s() -> float:
    """CPU seconds of this process's ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def listing(blocks: int) -> Work:
    """Building a dense model on the meta device, and listing its layers for a search."""
    from ksopt.search.model_layers import layers_of_model

    def work() -> str:
        model, _ = models.on_meta(blocks, models.dense)
        return layers_of_model(model, "the model").sentence

    return work


def searching(blocks: int) -> Work:
    """Reading a dense model for a search: its layers, and from its graph what surrounds them."""
    from ksopt.conversion.model_call import ModelCall
    from ksopt.search.model_layers import layers_of_model
    from ksopt.search.request import SearchRequest

    importlib.import_module("torch._dynamo")  # before timing

    def work() -> str:
        model, x = models.on_meta(blocks, models.dense)
        layers_of_model(model, "the model")  # `ksopt search` does so before it reads the inputs
        layers = layers_of_model(model, "the model", call=ModelCall((x,), {}, "the inputs"))
        if layers.note:
            raise RuntimeError(layers.note)
        request = SearchRequest(layers, dtype="bfloat16", device="cpu")
        return f"{layers.count} layers, {len(request.layers)} sizes"

    return work


def spaces(count: int) -> Work:
    """Building the spaces of chains of the first ``count`` sizes of Llama 70B's layers."""
    from ksopt.search.request import SearchRequest
    from ksopt.search.space import space

    request = SearchRequest(models.SIZES[:count])

    def work() -> str:
        built = [space.build(one) for one in request.layers]
        return f"{sum(len(one.candidates) for one in built)} candidates"

    return work


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


def _folder(on_disk: bool = False) -> Path:
    """A new folder with ksopt's caches, in /dev/shm if it exists, so that no disk is measured."""
    shared = Path("/dev/shm")
    where = shared if shared.is_dir() and not on_disk else None
    folder = Path(tempfile.mkdtemp(prefix="ksopt-growth-", dir=where))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["KSOPT_CACHE_DIR"] = str(folder / "cache")
    return folder


def _studied(
    kind: str, trials: int, workers: int = 1, sleep_s: float = 0.0, on_disk: bool = False
) -> Work:
    """Running a study."""
    folder = _folder(on_disk)
    urls = {"sqlite": f"sqlite:///{folder / 'study.db'}", "journal": f"journal:{folder / 'log'}"}
    return studies.of(urls[kind], trials, workers, sleep_s)


_BLOCKS = (1, 2, 5, 10, 20, 40, 80)
_WIDE_BLOCKS = 2
_TRIALS = (10, 30, 100, 300, 1000, 3000, 5000)
_WORKERS = (1, 2, 4, 8, 16, 32, 64)
_WORKER_TRIALS, _WORKER_SLEEP_S = 128, 0.1

ALL: dict[str, Series] = {
    "dynamo": Series("blocks", _BLOCKS, dynamo),
    "capture": Series("blocks", _BLOCKS, capture),
    "compile": Series("blocks", _BLOCKS, compiling),
    "compile-inductor": Series("blocks", _BLOCKS, lambda n: compiling(n, "inductor")),
    "compile-ksopt": Series("blocks", _BLOCKS, deciding),
    "compile-width": Series(
        "features", tuple(2**k for k in range(8, 14)), lambda n: compiling(_WIDE_BLOCKS, width=n)
    ),
    "search-list": Series("blocks", _BLOCKS, listing),
    "search-model": Series("blocks", _BLOCKS, searching),
    "search-spaces": Series("sizes", (1, 2, 3, 4), spaces),
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
