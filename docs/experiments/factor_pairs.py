"""Pairs of kernels for the two factors of a chain, timed together, beside those best alone.

    python docs/experiments/factor_pairs.py        # the layers below, bfloat16: two minutes
    python docs/experiments/factor_pairs.py --layers "(1,512,128,2)*(2,128,512,1)" --rows 25088 256
    python docs/experiments/factor_pairs.py --activation gelu
    python docs/experiments/factor_pairs.py --device cpu --layers "(1,8,4,2)*(2,4,8,1)" --rows 64

Each factor is tuned alone, as its first product does. The fastest kernels of each, and PyTorch's
products among them, make the pairs. A pair computes the layer with its bias: in the launch of its
second kernel, where that has epilogues, or behind it. Its result is compared with float64 before
the pairs race by the rules of a problem's candidates. The fastest pair then races once more with
that of the factors' own choices.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ksopt.errors import KsoptError
from ksopt.kernels import registry
from ksopt.kernels.autotuner import Choice, products_in_series
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.by_factors import ByPair
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.decisions import with_index
from ksopt.kernels.operands import Operands, random_operands
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.kernels.tuning_cache import Record, Timed
from ksopt.measure.accuracy import Around, checking_chain
from ksopt.measure.benchmark_entry import BenchmarkEntry
from ksopt.measure.device_types import type_of
from ksopt.measure.interleaved import EntryResult, candidate_rules, race, winner
from ksopt.patterns.chain import Chain
from tiles import compile_ahead

ROWS = 25_088
FEW_ROWS = (256, 16)
LAYERS = (
    "(1,2048,512,2)*(2,512,2048,1)",
    "(1,4096,512,1)*(1,512,4096,1)",
    "(1,1024,256,2)*(2,256,1024,1)",
    "(1,1024,512,4)*(4,512,1024,1)",
    "(1,64,64,64)*(64,64,64,1)",
    "(1,512,128,2)*(2,128,512,1)",
)
OF_FEW_ROWS = ("(1,2048,512,2)*(2,512,2048,1)", "(1,512,128,2)*(2,128,512,1)")
_MODE = "cached"
_AGAIN = 25  # rounds of the race of two


@dataclass(frozen=True)
class Result:
    """A layer's pairs, in microseconds.

    Attributes:
        layer: in words.
        own_us, best_us: of the own choices and of the fastest pair.
        best: the fastest pair.
        again_us: of both, when they raced alone.
        is_confirmed: whether that pair won then, too.
    """

    layer: str
    own_us: float
    best_us: float
    best: str
    again_us: tuple[float, float] | None
    is_confirmed: bool

    def __str__(self) -> str:
        gain = 100 * (1 - self.best_us / self.own_us)
        text = f"{self.layer}: own choices {self.own_us:.1f} us, best pair {self.best_us:.1f} us"
        if self.again_us is None:
            return f"{text}: the own choices are the best"
        own, best = self.again_us
        again = f"{own:.1f} and {best:.1f} us, {100 * (1 - best / own):.1f} %"
        words = "confirmed" if self.is_confirmed else "not confirmed"
        return f"{text}, {gain:.1f} % ({self.best}); again: {again}, {words}"


def tuned(factor: Problem, rows: int, device: torch.device, seconds: float) -> Record:
    """The times of a factor's candidates: those on disk, or of a race now."""
    backend = backend_of(device.type)
    known = backend.measured(backend.key(factor, rows), device, "measure", False)
    if known is not None:
        return known[0]
    operands = random_operands(factor, rows, device)
    return backend.tune(operands.x, operands.weights[0], False, seconds)


def fastest(record: Record, device: torch.device, count: int) -> list[Choice]:
    """So many candidates of a factor, built: its own choice, then the fastest others.

    Args:
        record: of the factor.
        device: where it was measured.
        count: how many.
    """
    # On a CPU no prepared form is cached: all of its times are of weights that change.
    other = "cached" if device.type == "cpu" else "repacked"
    own = record.timed[record.cached if other == "repacked" else record.repacked]
    usable = [one for one in record.timed if one.weight not in (other, "stored")]
    ranked = [own, *sorted(usable, key=lambda one: one.median_us)]
    spec = backend_of(device.type).spec(device)

    def restored(one: Timed) -> Candidate | None:
        return registry.restored(record.key.problem, one.way, one.config, record.batch, spec)

    several = [one for one in map(restored, ranked) if one is not None]
    built = registry.built(list(dict.fromkeys(several))[:count], device.index or 0)
    return [Choice(candidate, call, "measured", record) for candidate, call in built]


def with_epilogues(choices: Sequence[Choice], epilogue: Epilogue) -> None:
    """Compile the kernels of choices with an epilogue, where they have one."""
    sources = []
    for one in choices:
        family, problem = one.candidate.family, one.candidate.problem
        if family is not None and family.takes_epilogues:
            sources += family.sources(replace(problem, epilogue=epilogue), one.candidate.tile)
    if sources:
        compile_ahead(sources)


def timed_again(
    entries: Sequence[BenchmarkEntry], device: torch.device, seconds: float
) -> list[EntryResult]:
    """The results of a race of two, in which neither is given up."""
    rules = replace(
        candidate_rules(seconds), hopeless={}, enough_rounds=_AGAIN, most_rounds=2 * _AGAIN
    )
    return race(entries, type_of(device).race_timer(device), rules)


def time_pairs(
    chain: Chain, rows: int, dtype: str, device: torch.device, args: argparse.Namespace
) -> Result | None:
    """Print the times of a layer's pairs; None where none ran."""
    backend = backend_of(device.type)
    epilogue = Epilogue(True, args.activation)
    problem = Problem(chain, dtype, False, epilogue=epilogue)
    layer = f"{chain}, {rows} rows"
    began = time.perf_counter()
    first, second = (
        fastest(tuned(factor, rows, device, args.seconds), device, args.candidates)
        for factor in reversed(problem.factors())
    )
    with_epilogues(second, epilogue)
    operands = random_operands(problem, rows, device)
    around = Around(operands.bias, args.activation)
    check, *_ = checking_chain(operands.x, operands.weights, False, around)
    size = operands.x.element_size()
    count = products_in_series(problem.chains, backend.key(problem, rows).largest_batch, size)
    copies = [operands.copied() for _ in range(count)]
    entries = []
    for pair in (ByPair(problem, one, two) for one in first for two in second):
        wrong = check.judge(pair(*copies[0].arguments(problem)))
        if wrong is None:
            entries.append(entry_of(pair, copies))
        else:
            print(f"WRONG {layer}: {label_of(pair)}: {wrong}", flush=True)
    print(f"# {layer}: {len(entries)} pairs, tuned and checked", end=" ")
    print(f"in {time.perf_counter() - began:.1f} s", flush=True)
    rules = candidate_rules(args.seconds)
    ran = [
        one for one in race(entries, type_of(device).race_timer(device), rules) if one.samples_us
    ]
    if not ran:
        return None
    times = [median_us(one) for one in ran]
    for us, one in sorted(zip(times, ran, strict=True), key=lambda it: it[0]):
        host = f"host {one.host_us:.1f} us"
        print(f"{layer} | {one.entry.name} | {us:.1f} | {us / times[0]:.3f} | {host}", flush=True)
    at = times.index(min(times))
    name = ran[at].entry.name
    if at == 0:
        return Result(layer, times[0], times[0], name, None, False)
    both = timed_again([ran[0].entry, ran[at].entry], device, args.seconds)
    own_us, best_us = map(median_us, both)
    is_confirmed = winner(both, _MODE) == 1
    return Result(layer, times[0], times[at], name, (own_us, best_us), is_confirmed)


def label_of(pair: ByPair) -> str:
    """The kernels of a pair."""
    return f"{pair.first.candidate.label} then {pair.second.candidate.label}"


def entry_of(pair: ByPair, copies: Sequence[Operands]) -> BenchmarkEntry:
    """A pair in a race: a product by each of the copies."""

    def series() -> None:
        for one in copies:
            pair(*one.arguments(pair.problem))

    return BenchmarkEntry(label_of(pair), series, frozenset({_MODE}), len(copies))


def median_us(result: EntryResult) -> float:
    """The median time of an entry that ran."""
    assert result.measurement is not None
    return result.measurement.median_us


def layers_of(texts: Sequence[str], rows: Sequence[int]) -> list[tuple[Chain, int]]:
    """The layers to time with their rows: the usual ones where none are named."""
    if texts or rows:
        named, several = texts or LAYERS, rows or (ROWS,)
        return [(Chain.parse(text), count) for text in named for count in several]
    usual = [(text, ROWS) for text in LAYERS]
    usual += [(text, count) for text in OF_FEW_ROWS for count in FEW_ROWS]
    return [(Chain.parse(text), count) for text, count in usual]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each layer, and a line for each at the end."""
    parser = argparse.ArgumentParser(prog="python docs/experiments/factor_pairs.py")
    parser.add_argument("--layers", nargs="+", default=[], help="chains of two factors")
    parser.add_argument("--rows", type=int, nargs="+", default=[], help=f"of each layer ({ROWS})")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--activation", default="none")
    parser.add_argument("--candidates", type=int, default=4, help="of each factor (4)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a race (0.5)")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)
    device = with_index(torch.device(args.device))
    began, results = time.perf_counter(), []
    print("layer | first then second | us | of the own choices")
    with torch.no_grad():
        for chain, rows in layers_of(args.layers, args.rows):
            try:
                results.append(time_pairs(chain, rows, args.dtype, device, args))
            except (KsoptError, torch.OutOfMemoryError) as error:
                print(f"FAILED {chain}, {rows} rows: {error}", flush=True)
    print(f"# {time.perf_counter() - began:.0f} s")
    for result in results:
        if result is not None:
            print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
