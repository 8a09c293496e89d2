"""Measures a crossover map into a folder: the most informative layers first, until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import exp
from pathlib import Path

import torch

from ksopt.bench import results_log
from ksopt.bench.crossover import sampling
from ksopt.bench.crossover.interpolation import Grid
from ksopt.bench.crossover.layers import ACTIVATION
from ksopt.bench.crossover.measuring import measure_site
from ksopt.bench.crossover.request import CrossoverRequest, Site
from ksopt.bench.crossover.results import LOG_FORMAT, SiteResult
from ksopt.kernels.compile_ahead import Compilers, Target
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.measure import device as devices

# Beside those of every benchmark, the modules that a time can depend on.
_CODE = ("ksopt.nn.layers", "ksopt.bench.crossover.layers", "ksopt.bench.crossover.measuring")
_LONGEST = 2.0  # times the mean of those before is what one more layer may take
_AHEAD = 2  # layers whose kernels are compiled while another one is timed

Progress = Callable[[str], None]


def run_crossover(request: CrossoverRequest, out: Path, progress: Progress = lambda _: None) -> str:
    """Measure until the time is up or every layer is measured.

    Args:
        request: what to measure, and for how long.
        out: the folder; another run of the same request in it continues, for as long again.
        progress: called with a line of text after each layer.

    Returns:
        "" if every layer is measured, else "timeout" or "interrupted". Ctrl-C loses only the layer
        being measured.

    Raises:
        InvalidInputError: the folder holds other measurements.
    """
    began = time.monotonic()
    record = devices.record(request.device)
    identity = results_log.identity(request.identity(), record, _CODE)
    grid, sites = Grid.of(request), request.sites
    with results_log.opened(out, LOG_FORMAT, identity) as results:
        if all(site in results.measured for site in sites):
            return ""
        results.begin_run(request.command, record, grid=request.grid())
        done = 0
        with Compilers(Target.of(torch.device(request.device))) as compilers:
            try:
                while True:
                    left = [site for site in sites if site not in results.measured]
                    ahead = sampling.next_sites(
                        grid, left, tie_margins(request, results.measured), _AHEAD
                    )
                    if not ahead:
                        return ""
                    spent_s = time.monotonic() - began
                    if done and spent_s + _LONGEST * spent_s / done > 60 * request.options.minutes:
                        return "timeout"
                    for site in ahead:
                        _compile(request, site, compilers)
                    result = measure_site(request, ahead[0])
                    results.add(result)
                    done += 1
                    progress(_sentence(request, result, len(results.measured), len(sites), began))
            except KeyboardInterrupt:
                return "interrupted"


def tie_margins(
    request: CrossoverRequest, measured: Mapping[Site, SiteResult]
) -> dict[Site, float]:
    """log(speed-up) of the budget nearest to a tie with dense, by layer."""
    margins = {}
    for site, result in measured.items():
        values = [
            value
            for budget in request.budgets
            if (value := result.log_speed_up(budget.text)) is not None
        ]
        if values:
            margins[site] = min(values, key=abs)
    return margins


def _compile(request: CrossoverRequest, site: Site, compilers: Compilers) -> None:
    chains = [chain for budget in request.budgets for chain in budget.chains(site.width)]
    dtype, exact = site.plane.torch_name, site.plane.precision != "tf32"
    after = Epilogue(bias=True, activation=ACTIVATION)
    layers = [Problem(chain, dtype, False, exact, after) for chain in chains]
    compilers.soon(layers, site.rows)


def _sentence(
    request: CrossoverRequest, result: SiteResult, done: int, total: int, began: float
) -> str:
    shown = [
        f"{budget.text} x{exp(value):.2f}"
        for budget in request.budgets
        if (value := result.log_speed_up(budget.text)) is not None
    ]
    spent = f"{(time.monotonic() - began) / 60:.1f} of {request.options.minutes:g} min"
    return f"{done} of {total}, {spent}: {result.site}: {', '.join(shown) or 'no times'}"
