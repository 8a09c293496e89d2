"""Explanation of a chain's time: the data it moves, its operations, and which of them binds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Comparison
from ksopt.operators.base import StructuredOperator
from ksopt.operators.registry import Replacement, operator_of
from ksopt.patterns.chain import Chain, Pattern
from ksopt.report import tables
from ksopt.report.tables import Table
from ksopt.search.report import phrases
from ksopt.search.results import Finalist, LayerResult

_BINDS = {True: "memory", False: "compute"}
# Ratio below which sentences treat two efficiencies, or two amounts, as equal.
_ALIKE = 1.05


@dataclass(frozen=True)
class Work:
    """Minimal work of a product.

    Args:
        bytes_moved: Input, output and weights, each once.
        flops: A multiplication and an addition for each weight and row.
        floor_us: The roofline's floor.
        memory_bound: Whether moving the bytes takes longer than the operations.
    """

    bytes_moved: int
    flops: int
    floor_us: float
    memory_bound: bool

    @classmethod
    def of(
        cls, part: Pattern | StructuredOperator, batch: int, roofline: Roofline, passes: int = 1
    ) -> Work:
        """The work of a factor, or of an operator without factors.

        Args:
            part: The factor's pattern, or the operator.
            batch: Rows of the input.
            roofline: Of the device and dtype.
            passes: 3 for a step of training (the product, and the gradients of input and weights),
                or as many as there are siblings.

        Example:
            >>> roofline = Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "")
            >>> work = Work.of(Pattern(1, 4, 4, 1), 1000, roofline)
            >>> work.bytes_moved, work.flops, work.memory_bound
            (32064, 32000, True)
        """
        count = part.bytes if isinstance(part, Pattern) else part.bytes_moved
        moved = passes * count(batch, roofline.dtype)
        flops = passes * part.flops(batch)
        return cls(
            moved,
            flops,
            roofline.floor_us(moved, flops),
            moved / roofline.bandwidth >= flops / roofline.rate,
        )


def sentences(result: LayerResult) -> list[str]:
    """Sentences on each step's chain: its savings, its bound, and its efficiency."""
    return list(dict.fromkeys(_sentence(finalist, result) for finalist in _chosen(result)))


def table(result: LayerResult) -> Table:
    """Table of the dense layer, and of each step's chain, factor by factor."""
    rows = []
    dense = [_dense(result)]
    chosen = list(_chosen(result))
    for finalist in chosen:
        parts = _parts(finalist.facts.chain)
        several = [_work(part, result) for part in parts]
        latency = finalist.latency.median_us
        rows.append([str(finalist.facts.chain), *_cells(several), *_reached(several, latency)])
        if len(several) > 1:
            rows += [
                [f"factor {place}: {pattern}", *_cells([one]), "", ""]
                for place, (pattern, one) in enumerate(zip(parts, several, strict=True), start=1)
            ]
    if chosen:
        rows.append(["dense", *_cells(dense), *_reached(dense, chosen[0].dense.median_us)])
    heads = ("what", ">moved", ">computed", ">floor", "bound by", ">latency", ">efficiency")
    return tables.of(heads, rows)


def _chosen(result: LayerResult) -> Iterable[Finalist]:
    """The distinct chains of the answers."""
    finalists = {
        answer.chosen.facts.chain: answer.chosen
        for answer in result.recommendations
        if answer.chosen is not None
    }
    return finalists.values()


def _parts(chain: Replacement) -> Sequence[Pattern | StructuredOperator]:
    """The factors of a chain, or another operator as a whole."""
    return chain.patterns if isinstance(chain, Chain) else [operator_of(chain)]


def _work(part: Pattern | StructuredOperator, result: LayerResult) -> Work:
    batch = result.request.batch
    assert batch is not None
    passes = 3 if result.request.train else result.request.siblings
    return Work.of(part, batch, result.roofline, passes)


def _dense(result: LayerResult) -> Work:
    """The work of the dense layer."""
    size = result.request.size
    return _work(Pattern(1, size.out_features, size.in_features, 1), result)


def _sentence(finalist: Finalist, result: LayerResult) -> str:
    dense = _dense(result)
    factors = [_work(part, result) for part in _parts(finalist.facts.chain)]
    moved, flops = sum(one.bytes_moved for one in factors), sum(one.flops for one in factors)
    binding = [one.memory_bound for one in factors]
    if len(factors) == 1:
        bound = f" it is {_BINDS[binding[0]]}-bound, and the"
    elif len(set(binding)) == 1:
        bound = f" all its factors are {_BINDS[binding[0]]}-bound, and the"
    else:
        named = ", ".join(
            f"factor {place} {_BINDS[one]}-bound" for place, one in enumerate(binding, start=1)
        )
        bound = f", {named}. The"
    is_chain = isinstance(finalist.facts.chain, Chain)
    counted = ", the inputs and outputs of its factors counted" if is_chain else ""
    floor = sum(one.floor_us for one in factors)
    reached = floor / finalist.latency.median_us
    dense_reached = dense.floor_us / finalist.dense.median_us
    is_faster = finalist.versus_dense is Comparison.FASTER
    lead = _lead(floor, dense.floor_us, reached, dense_reached) if is_faster else ""
    return (
        f"{finalist.facts.chain} computes {_against(dense.flops, flops)} the dense layer. It moves "
        f"{_against(dense.bytes_moved, moved)} that layer{counted}. By "
        f"this device's roofline{bound} dense layer is "
        f"{_BINDS[dense.memory_bound]}-bound. The floors are {phrases.microseconds(floor)} and "
        f"{phrases.microseconds(dense.floor_us)}. "
        f"The {'chain' if is_chain else 'operator'} reaches an efficiency of {reached:.2f}, the "
        f"dense layer of {dense_reached:.2f}{lead}."
    )


def _lead(floor: float, dense_floor: float, reached: float, dense_reached: float) -> str:
    """Clause on what makes a chain faster: a lower floor, or a higher efficiency."""
    less_work, nearer = dense_floor / floor, reached / dense_reached
    if less_work > _ALIKE and nearer > _ALIKE:
        return f": {less_work:.1f} times less to do, done {nearer:.1f} times as well"
    if less_work > nearer:
        return ": it is fast because there is less to do"
    return ": it is fast because its kernels come nearer to what the device can do"


def _against(dense: int, chain: int) -> str:
    """Comparison of an amount with the dense layer's, to precede "the dense layer".

    Example:
        >>> _against(400, 100), _against(100, 150), _against(100, 101)
        ('4.0 times less than', '1.5 times as much as', 'as much as')
    """
    if dense > _ALIKE * chain:
        return f"{dense / chain:.1f} times less than"
    return f"{chain / dense:.1f} times as much as" if chain > _ALIKE * dense else "as much as"


def _cells(several: list[Work]) -> list[str]:
    binding = {one.memory_bound for one in several}
    return [
        f"{sum(one.bytes_moved for one in several) / 1e6:,.1f} MB",
        f"{sum(one.flops for one in several) / 1e9:,.2f} GFLOP",
        phrases.microseconds(sum(one.floor_us for one in several)),
        _BINDS[binding.pop()] if len(binding) == 1 else "both",
    ]


def _reached(several: list[Work], latency_us: float) -> list[str]:
    floor = sum(one.floor_us for one in several)
    return [phrases.microseconds(latency_us), f"{floor / latency_us:.2f}"]
