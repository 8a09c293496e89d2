"""The results: regret, shares of device time, rank correlations; as CSV and markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import pandas as pd

from ksopt.bench.reproduction.statistics import rank_correlation
from ksopt.patterns.size import Budget, Dims
from ksopt.report import tables
from ksopt.search.layer_request import LayerRequest
from ksopt.search.report import phrases
from ksopt.system.atomic_files import write_whole
from regret.rows import Book, Measured, Stage

CLOSE = 0.03
"""The largest regret that counts as none: the goal of the searches."""
CHEAP = 0.10
"""The goal for a search's share of its reference's device time."""
RANKED = 0.9
"""The goal for the cost model's rank correlation."""
_FEWEST_RANKED = 5
_SEVERAL = ("factors_us", "predicted_factors_us")
_REFERENCE: tuple[Stage, ...] = ("uniform", "guided")


@dataclass(frozen=True)
class Cell:
    """The result of one size and budget.

    Args:
        dims, budget: The size and the budget.
        recommended: The search's fastest chain.
        recommended_us: Its time in the final; None until there is one.
        best: The fastest chain of the final, of any stage.
        best_us: Its time.
        best_from: The stage of the best chain: "search", "uniform" or "guided".
        regret: recommended_us / best_us - 1.
        within_noise: Whether the two are indistinguishable (each median in the other's band).
        dense_us: The dense layer's time in the final.
        searched: Number of the budget's chains that the search measured.
        reference: Number of chains that the reference measured.
        spearman_predicted: Spearman's coefficient of the cost model's prediction with the measured
            latency, over the reference's uniform half.
        spearman_rho: The coefficient of rho; an ideal heuristic, large for fast chains, has -1.
        ranked: Number of chains in both coefficients.
        spearman_factors: The coefficient of the sum of the factors' own measured times: the limit
            for a sum over a perfect model of the factors.
    """

    dims: str
    budget: str
    recommended: str | None
    recommended_us: float | None
    best: str | None
    best_us: float | None
    best_from: str | None
    regret: float | None
    within_noise: bool | None
    dense_us: float | None
    searched: int
    reference: int
    spearman_predicted: float | None
    spearman_rho: float | None
    ranked: int
    spearman_factors: float | None


@dataclass(frozen=True)
class Cost:
    """The cost of a size's search and reference.

    Args:
        dims: The size.
        search_seconds: Time that the search's trials and final held the device.
        reference_seconds: Time that the reference's chains and its last final held the device.
        share: search_seconds over reference_seconds; None without a reference.
        search_chains, reference_chains: Number of chains that each measured.
        until_report_s: From the search's start to its report; None if it was stopped in between.
        final_seconds: The final's part of search_seconds.
    """

    dims: str
    search_seconds: float
    reference_seconds: float
    share: float | None
    search_chains: int
    reference_chains: int
    until_report_s: float | None
    final_seconds: float | None


def cells(book: Book) -> list[Cell]:
    """The results of every searched size and budget."""
    return [
        _cell(book, dims, budget)
        for dims, search in book.searched.items()
        for budget in search.chosen
    ]


def costs(book: Book) -> list[Cost]:
    """The costs of every searched size."""
    result = []
    for dims, search in book.searched.items():
        rows = book.reference(dims)
        seconds = sum(row.seconds for row in [*rows, *book.final(dims)])
        result.append(
            Cost(
                dims,
                search.device_seconds,
                seconds,
                search.device_seconds / seconds if seconds else None,
                search.trials,
                len(rows),
                search.seconds,
                search.final_seconds,
            )
        )
    return result


def _cell(book: Book, dims: str, budget: str) -> Cell:
    def rows(*stages: Stage) -> list[Measured]:
        return [row for row in book.of(dims, *stages) if row.budget == budget]

    # A row names one step, and its chain may be of the next one too: 25 % is half of 50 %.
    recommended = book.searched[dims].chosen[budget] or ""
    most = Budget.parse(budget, Dims.parse(dims)).parameters
    least = ceil(LayerRequest.min_use * most)
    final = {
        row.chain: row
        for row in book.final(dims)
        if row.latency_us is not None
        and (row.budget == budget or least <= row.parameters <= most or row.chain == recommended)
    }
    chosen = final.get(recommended)
    best = min(final.values(), key=lambda row: row.latency_us or 0.0, default=None)
    stages = {row.chain: row.stage for row in book.of(dims, "guided", "uniform", "search")}
    uniform = [row for row in rows("uniform") if row.ratio is not None]
    regret = alike = None
    if chosen is not None and best is not None:
        assert chosen.latency_us is not None
        assert best.latency_us is not None
        regret = chosen.latency_us / best.latency_us - 1
        alike = not _is_faster(best, chosen)
    return Cell(
        dims=dims,
        budget=budget,
        recommended=book.searched[dims].chosen[budget],
        recommended_us=None if chosen is None else chosen.latency_us,
        best=None if best is None else best.chain,
        best_us=None if best is None else best.latency_us,
        best_from=None if best is None else stages.get(best.chain),
        regret=regret,
        within_noise=alike,
        dense_us=None if best is None else best.dense_us,
        searched=len(rows("search")),
        reference=len(rows(*_REFERENCE)),
        spearman_predicted=spearman([(row.predicted_us, row.ratio) for row in uniform]),
        spearman_rho=spearman([(row.rho, row.ratio) for row in uniform]),
        ranked=len(uniform),
        spearman_factors=spearman([(_sum_of_factors(row), row.ratio) for row in uniform]),
    )


def _sum_of_factors(row: Measured) -> float | None:
    times = [us for us in row.factors_us if us is not None]
    return sum(times) if times and len(times) == len(row.factors_us) else None


def _is_faster(this: Measured, other: Measured) -> bool:
    """Whether a measurement is faster beyond noise, as in `ksopt.measure.timing.compare`."""
    if this.latency_us is None or this.p80_us is None:
        return False
    if other.latency_us is None or other.p20_us is None:
        return False
    return this.latency_us < other.p20_us and this.p80_us < other.latency_us


def spearman(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """The rank correlation of pairs; None for fewer than five, or if one side is constant.

    Example:
        >>> spearman([(1, 10), (2, 20), (3, 30), (4, 40), (5, 35)])
        0.9
    """
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < _FEWEST_RANKED:
        return None
    coefficient = rank_correlation(known)
    return None if coefficient is None else round(coefficient, 12)


@dataclass(frozen=True)
class Ranking:
    """Spearman's coefficients with the measured latency over all budgets of a size.

    Args:
        predicted: Of the cost model.
        factors: Of the sum of the factors' own measured times.
        rho: Of the heuristic.
        chains: Number of chains of the uniform half.
    """

    predicted: float | None
    factors: float | None
    rho: float | None
    chains: int


def overall(book: Book, dims: str) -> Ranking:
    """The rank correlations over the chains of a size, of all budgets."""
    rows = [row for row in book.of(dims, "uniform") if row.ratio is not None]
    return Ranking(
        spearman([(row.predicted_us, row.ratio) for row in rows]),
        spearman([(_sum_of_factors(row), row.ratio) for row in rows]),
        spearman([(row.rho, row.ratio) for row in rows]),
        len(rows),
    )


def write(book: Book) -> list[Path]:
    """Write the tables beside the book, and return their paths."""
    stem = book.path.with_suffix("")
    texts = {
        stem.with_name(f"{stem.name}-cells.csv"): _csv([asdict(cell) for cell in cells(book)]),
        stem.with_name(f"{stem.name}-costs.csv"): _csv([asdict(cost) for cost in costs(book)]),
        stem.with_name(f"{stem.name}-chains.csv"): _csv(
            [
                {**asdict(row), **{name: _joined(getattr(row, name)) for name in _SEVERAL}}
                for row in book.measured
            ]
        ),
        stem.with_name(f"{stem.name}-ways.csv"): _csv([asdict(way) for way in book.ways]),
        stem.with_suffix(".md"): markdown(book),
    }
    for path, text in texts.items():
        write_whole(path, text)
    return list(texts)


def markdown(book: Book) -> str:
    """The summary in sentences, and the tables, for docs/searching.md."""
    rows = [
        [
            cell.dims,
            cell.budget,
            cell.recommended or "none",
            _us(cell.recommended_us),
            _us(cell.best_us),
            _regret(cell),
            cell.best_from or "",
            _us(cell.dense_us),
            _rho(cell.spearman_predicted),
            _rho(cell.spearman_rho),
            str(cell.ranked),
        ]
        for cell in cells(book)
    ]
    heads = ("size", "budget", "recommended", ">us", ">best, us", ">regret", "found by")
    more = (">dense, us", ">Spearman, cost model", ">rho", ">of chains")
    shares = []
    for cost in costs(book):
        ranking = overall(book, cost.dims)
        shares.append(
            [
                cost.dims,
                str(cost.search_chains),
                str(cost.reference_chains),
                f"{cost.search_seconds:.1f}",
                "" if cost.final_seconds is None else f"{cost.final_seconds:.1f}",
                f"{cost.reference_seconds:.1f}",
                "" if cost.share is None else phrases.percent(cost.share),
                "" if cost.until_report_s is None else f"{cost.until_report_s:.0f}",
                *map(_rho, (ranking.predicted, ranking.factors, ranking.rho)),
            ]
        )
    columns = ("size", ">trials", ">reference", ">device s", ">of it final", ">its device s")
    tail = (">share", ">s to the report", ">Spearman, cost model", ">factors", ">rho")
    both = [tables.of([*heads, *more], rows), tables.of([*columns, *tail], shares)]
    parts = [sentence + "\n" for sentence in sentences(book)]
    return "\n".join([*parts, *(f"{part.markdown()}\n" for part in both)])


def sentences(book: Book) -> list[str]:
    """The summary in sentences, which name unfinished parts."""
    known = cells(book)
    judged = [(cell.regret, cell) for cell in known if cell.regret is not None]
    lines = []
    if judged:
        near = sum(regret <= CLOSE for regret, _ in judged)
        _, where = max(judged, key=lambda pair: pair[0])
        lines.append(
            f"In {near} of {len(judged)} cases the recommended chain is within "
            f"{100 * CLOSE:.0f}% of the best chain of search and reference, timed in turns; the "
            f"largest regret is {_regret(where)}, for {where.dims} at {where.budget}."
        )
    none = [cell for cell in known if cell.recommended is None]
    waiting = list(dict.fromkeys(c.dims for c in known if c.regret is None and c not in none))
    if none:
        cases = ", ".join(f"{cell.dims} at {cell.budget}" for cell in none)
        lines.append(f"No chain was recommended for {cases}.")
    if waiting:
        lines.append(f"Of {', '.join(waiting)} the final is still to come.")
    shares = [(c.share, c.dims) for c in costs(book) if c.share is not None]
    if shares:
        near = sum(share <= CHEAP for share, _ in shares)
        share, dearest = max(shares)
        lines.append(
            f"For {near} of {len(shares)} sizes the search held the device for at most "
            f"{100 * CHEAP:.0f}% of the time that the reference, chains and final, held it for; "
            f"the largest share is {phrases.percent(share)}, for {dearest}."
        )
    rankings = [(overall(book, dims), dims) for dims in book.searched]
    known_ranks = [(one.predicted, dims) for one, dims in rankings if one.predicted is not None]
    if known_ranks:
        near = sum(rank >= RANKED for rank, _ in known_ranks)
        least, worst = min(known_ranks)
        lines.append(
            f"For {near} of {len(known_ranks)} sizes Spearman's coefficient of the cost model "
            f"with the measured latency, over chains drawn uniformly, is at least {RANKED}; the "
            f"least is {least:+.2f}, for {worst}."
        )
    for name, values in (
        ("of rho, the paper's heuristic,", [one.rho for one, _ in rankings]),
        ("of the sum of the factors' measured times", [one.factors for one, _ in rankings]),
    ):
        ranks = [value for value in values if value is not None]
        if ranks:
            lines.append(
                f"That {name} is {min(ranks):+.2f} to {max(ranks):+.2f} over the sizes."
                if known_ranks
                else f"Spearman's coefficient {name} with the measured latency is "
                f"{min(ranks):+.2f} to {max(ranks):+.2f} over the sizes."
            )
    early = [dims for dims in book.searched if _is_early(book, dims)]
    if early:
        lines.append(
            f"The reference of {', '.join(early)} has grown since its final, which was held early."
        )
    return lines


def _is_early(book: Book, dims: str) -> bool:
    final = book.final(dims)
    return bool(final) and final[0].after < len(book.reference(dims))


def _csv(rows: list[dict[str, object]]) -> str:
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n") if rows else ""


def _joined(values: Sequence[float | None]) -> str:
    """The values of several factors, left to right, in one cell."""
    return ";".join("" if value is None else f"{value:g}" for value in values)


def _us(value: float | None) -> str:
    return "" if value is None else phrases.microseconds(value).removesuffix(" us")


def _rho(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def _regret(cell: Cell) -> str:
    if cell.regret is None:
        return ""
    text = f"{100 * cell.regret:.1f}%"
    return f"{text} (within noise)" if cell.within_noise and cell.regret > 0 else text
