"""The tables and figures of `ksopt bench paper`, from synthetic rows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from ksopt.bench.reproduction import (
    figures,
    heuristic,
    model_tables,
    module_cases,
    product_tables,
    report,
    statistics,
)
from ksopt.bench.reproduction.models import Case, Subject
from ksopt.bench.reproduction.paper_comparison import Cell
from ksopt.bench.reproduction.paper_numbers import printed
from ksopt.bench.reproduction.products import FIRST, LAST, Product
from ksopt.bench.reproduction.results import Results
from ksopt.bench.reproduction.saved_request import SavedRequest
from ksopt.bench.reproduction.statistics import Estimate
from ksopt.bench.reproduction.tables_and_figures import ITEMS, items
from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain


def product(
    pattern: str = "(1,64,64,4)", last: dict[str, float] | None = None, **first: float
) -> Product:
    """Times by the paper's names in both layouts: where ``last`` has none, they are equal."""
    times = {(name, FIRST): us for name, us in first.items()}
    times |= {(name, LAST): (last or {}).get(name, us) for name, us in first.items()}
    return Product(Chain.parse(pattern)[0], times, {}, {})


FAST = product(kernel=1, bmm=2, einsum=4, bsr=8, dense=3, sparse=30, product=1.5)
SLOW = product(
    "(1,512,512,1)", {"kernel": 5}, kernel=10, bmm=6, einsum=5.5, bsr=9, dense=4, sparse=60,
    product=6,
)  # fmt: skip


def value(cells: list[Cell], row: str, column: str) -> float | None:
    (cell_of_row,) = (one for one in cells if (one.row, one.column) == (row, column))
    return None if cell_of_row.ours is None else cell_of_row.ours.value


def test_table_3_counts_who_is_faster_in_the_better_layout() -> None:
    cells = product_tables.contests("Table 3", [FAST, SLOW], "float32", 2, True)
    special, bmm, kernel = product_tables.CONTESTS
    assert value(cells, special, "share") == 50  # SLOW's best is 5, its dense 4
    assert value(cells, special, "factor") == 3.0  # of FAST alone
    assert value(cells, bmm, "share") == 50
    assert value(cells, bmm, "factor") == 2.0
    assert value(cells, kernel, "share") == 50
    assert {cell.paper for cell in cells if cell.row == bmm and cell.column == "share"} == {93}


def test_table_5_stays_in_one_layout() -> None:
    turned = product(
        kernel=3, bmm=2, einsum=2, bsr=2, dense=2, sparse=2,
        last={"kernel": 1, "bmm": 2, "einsum": 2, "bsr": 2, "dense": 2, "sparse": 2},
    )  # fmt: skip
    cells = product_tables.by_layout("Table 5", [turned], "float32", 1, True)
    assert value(cells, FIRST, "share") == 0
    assert value(cells, LAST, "share") == 100
    (none,) = (cell for cell in cells if (cell.row, cell.column) == (FIRST, "factor"))
    assert none.ours is None
    assert none.absent == "no pattern is faster"
    (ours,) = (cell for cell in cells if (cell.row, cell.column) == (LAST, "factor"))
    assert ours.ratio == pytest.approx(2 / 1.39)


def test_a_way_without_a_time_is_no_rival() -> None:
    few = product(kernel=2, bmm=3)
    cells = product_tables.contests("Table 8", [few], "float16", 1, True)
    special, bmm, kernel = product_tables.CONTESTS
    assert value(cells, kernel, "factor") == 1.5
    for row in (special, bmm):
        (missing,) = (one for one in cells if (one.row, one.column) == (row, "share"))
        assert missing.ours is None
        assert missing.absent


def item(kind: str, number: int) -> Any:
    return next(one for one in ITEMS if (one.kind, one.number) == (kind, number))


def drawn(number: int, *products: Product) -> dict[tuple[str, str], list[float]]:
    data = figures.box_plot_of(item("figure", number), products, "float32")
    return {key: list(values) for key, values in data.values.items() if values}


def test_figure_4_and_9_are_the_share_of_bmm_that_is_rewriting() -> None:
    assert drawn(4, FAST) == {("0.022 to 0.032", FIRST): [0.25]}
    assert set(drawn(9, FAST)) == {("0.022 to 0.032", FIRST), ("0.022 to 0.032", LAST)}
    cells = figures.cells_of(item("figure", 9), [FAST, SLOW], "float32", 2, True)
    assert value(cells, FIRST, "largest share") == 25.0


def test_figure_6_has_those_patterns_alone_that_profit_from_their_structure() -> None:
    assert drawn(6, FAST, SLOW) == {("0.022 to 0.032", "float32"): [2.0]}


def test_figures_10_and_11_are_by_matrix_size() -> None:
    ((where, _),) = drawn(10, FAST)
    assert where == "1e4 to 1e5"  # 256 times 256 is 65,536
    assert drawn(10, FAST)[where, "float32"] == [3.0]
    assert drawn(11, SLOW)["1e5 to 1e6", "float32"] == [pytest.approx(5.5 / 6)]


def test_figure_12_has_a_box_for_each_way() -> None:
    boxes_by_way = drawn(12, SLOW)
    assert {way for way, _ in boxes_by_way} == {"kernel", "bmm", "einsum", "bsr", "dense", "sparse"}
    assert boxes_by_way["kernel", "time of batch-size-first / time of batch-size-last"] == [2.0]


def test_figures_in_half_precision_are_those_they_are_of() -> None:
    for half, whole in ((13, 6), (14, 9), (15, 10), (16, 11), (17, 12)):
        assert list(drawn(half, FAST, SLOW).values()) == list(drawn(whole, FAST, SLOW).values())


def used(pattern: str, kernel: float, bmm: float, idle: float = 1.0) -> Product:
    energies = {("kernel", FIRST): kernel, ("kernel", LAST): 2 * kernel, ("bmm", LAST): bmm}
    return Product(
        Chain.parse(pattern)[0], {}, energies, {key: mj - idle for key, mj in energies.items()}
    )


def test_figure_7_is_of_energy_with_and_without_idle_power() -> None:
    products = [used("(1,64,64,1)", 9, 10), used("(1,64,64,4)", 6, 10), used("(1,64,64,64)", 5, 10)]
    cells = figures.cells_of(item("figure", 7), products, "float32", 3, True)
    assert value(cells, "all", "median ratio") == pytest.approx(0.6)
    assert value(cells, "idle power subtracted", "median ratio") == pytest.approx(5 / 9)
    assert value(cells, "all", "share with less") == 100
    proxy = "rank correlation of d(b+c)/(bc) with the saving"
    assert value(cells, "all", proxy) == pytest.approx(1.0)
    (flat,) = (one for one in cells if one.column.startswith("rank correlation of (b")
               and one.row == "all")  # fmt: skip
    assert flat.ours is None  # (b+c)/(bc) is the same of all three
    assert len(drawn(7, *products)) == 6  # three classes, two series


def test_tables_of_modules_are_ratios_to_the_dense_version() -> None:
    def took(us: float) -> Measurement:
        return Measurement(us, us, us, 9)

    case = Case(
        Subject("Block", "float32"),
        {module_cases.DENSE: took(10), module_cases.BMM: took(9), module_cases.KERNEL: took(5)},
    )
    broken = Case(Subject("Linear N x N", "float32"), {}, ("out of memory",))
    by_subject = {one.subject: one for one in (case, broken)}
    cells = model_tables.modules("Table 4", by_subject, ("float32",), False)
    assert value(cells, "Block", "kernel") == 0.5
    (block,) = (one for one in cells if (one.row, one.column) == ("Block", "kernel"))
    assert (block.paper, block.ratio) == (0.78, pytest.approx(0.5 / 0.78))
    absent = {one.row: one.absent for one in cells if one.ours is None}
    assert absent["Linear N x N"] == "out of memory"
    assert absent["GPT-2 medium"] == "nothing was measured for it"

    vit = Case(
        Subject("ViT-S/16", "float32"),
        {module_cases.COMPLETE: took(8e4), module_cases.LINEAR: took(2e4)},
    )
    cells = model_tables.sizes("Table 6", {vit.subject: vit}, ("float32",), False)
    assert value(cells, "ViT-S/16", "float32 share") == 25.0
    assert value(cells, "ViT-S/16", "float32 complete") == pytest.approx(0.08)


def test_the_papers_numbers_do_not_stand_beside_small_models() -> None:
    large = model_tables.modules("Table 7", {}, ("float32",), is_small=False)
    small = model_tables.modules("Table 7", {}, ("float32",), is_small=True)
    assert all(one.paper is not None for one in large)
    assert all(one.paper is None for one in small)


def test_energy_that_nobody_measured_says_so() -> None:
    """No products in a dtype, and products on a device without a counter."""
    for products, words in (
        ([], "nothing was measured"),
        ([FAST, SLOW], "an NVIDIA GPU's counter"),
    ):
        cells = figures.cells_of(item("figure", 7), products, "float32", 2, True)
        assert {words in one.absent for one in cells if one.column == "median ratio"} == {True}


def test_every_number_of_the_paper_is_that_of_a_cell() -> None:
    empty = Results({}, {}, {}, {})
    saved = SavedRequest(ITEMS, False, (), {"products": 627, "energy": 651})
    _, cells = report.sections(empty, saved)
    shown = {(one.item, one.row, one.column) for one in cells}
    assert set(printed()) <= shown
    assert all(one.absent for one in cells)
    with_number = {(o.item, o.row, o.column) for o in cells if o.paper is not None}
    assert with_number == {key for key, one in printed().items() if one.value is not None}


def test_dtypes_that_the_paper_lacks_stand_beside_its_own_once() -> None:
    products = dict.fromkeys(("float32", "float16", "bfloat16"), (FAST, SLOW))
    energies = {dtype: products[dtype] for dtype in ("float16", "bfloat16")}
    results = Results(products, energies, {}, {})

    def settings(tables: Sequence[int], figures: Sequence[int] = ()) -> dict[str, set[str]]:
        saved = SavedRequest(items(tables, figures, False), False, (), {"products": 2, "energy": 1})
        _, cells = report.sections(results, saved)
        return {name: {one.setting for one in cells if one.item == name}
                for name in {one.item for one in cells}}  # fmt: skip

    every = {"float32", "float16", "bfloat16"}
    assert settings([3, 8]) == {"Table 3": {"float32", "bfloat16"}, "Table 8": {"float16"}}
    assert settings([8]) == {"Table 8": every}
    assert settings([5, 8]) == {"Table 5": every, "Table 8": every}
    # Energy has no table in float16: none of its dtypes may be measured and not shown.
    assert settings([8], [7]) == {"Table 8": every, "Figure 7": every}


def test_twins_are_each_others() -> None:
    pairs = {(one.kind, one.number, twin) for one in ITEMS for twin in one.twins}
    assert {(kind, twin, number) for kind, number, twin in pairs} == pairs
    of_half = {one.number for one in ITEMS if one.dtypes == ("float16",) and one.twins}
    assert of_half == {8, 13, 14, 15, 16, 17}


def test_the_heuristic_is_judged_by_regret() -> None:
    products = [
        product("(1,64,64,4)", kernel=1, bmm=2, dense=4),  # rho 1/32: kernel
        product("(1,128,128,2)", kernel=3, bmm=2, dense=5),  # rho 1/64: the other way
        product("(1,256,256,1)", kernel=8, bmm=2, dense=6),  # rho 1/128: the other way
    ]
    rule = heuristic.best_rule(products)
    assert 1 / 64 < rule.least <= 1 / 32
    assert rule.regrets(products) == [0, 0, 0]
    assert heuristic.Rule(0.0).regrets(products) == [0.0, 0.5, 3.0]
    assert heuristic.Rule(math.inf).regrets(products) == [0.0, 0.0, 1.0]
    rows = heuristic.decisions({"float32": products}).rows
    assert [row[3:] for row in rows] == [
        ("100%", "0.0%", "0.0%"), ("33%", "116.7%", "300.0%"), ("67%", "33.3%", "100.0%"),
    ]  # fmt: skip


def test_pairs_have_as_many_nonzeros_and_another_ratio() -> None:
    products = [
        product("(1,64,64,4)", kernel=1, dense=4),
        product("(1,128,128,1)", kernel=1, dense=2),  # 16,384 weights as well
        product("(4,64,64,1)", kernel=1, dense=9),  # of the first one's ratio
        product("(1,64,64,1)", kernel=1, dense=1),
    ]
    ((_, count, right),) = heuristic.pairs({"float32": products}).rows
    assert (count, right) == ("2", "100%")
    assert heuristic.pairs({"float32": products[:1]}).rows[0][2] == "no such pair"


def test_the_heuristics_correlation_has_the_sign_of_what_it_predicts() -> None:
    products = [
        product("(1,512,512,1)", kernel=1, bmm=1, dense=1),
        product("(1,128,128,4)", kernel=1, bmm=2, dense=2),
        product("(1,64,64,8)", kernel=1, bmm=3, dense=3),
    ]
    rows = heuristic.correlations({"float32": products}).rows
    assert {row[3] for row in rows} == {"1.00"}
    turned = [dataclasses.replace(one, pattern=other.pattern)
              for one, other in zip(products, reversed(products), strict=True)]  # fmt: skip
    assert {row[3] for row in heuristic.correlations({"float32": turned}).rows} == {"-1.00"}


def predicted(one: Product, **us: float) -> Product:
    """The product with predictions of the cost models, the same in both layouts."""
    both = {(name, layout): value for name, value in us.items() for layout in (FIRST, LAST)}
    return dataclasses.replace(one, predicted_us=both)


def test_the_cost_models_stand_beside_the_heuristic() -> None:
    bare = [
        product("(1,64,64,1)", kernel=2, bmm=1, dense=9),
        product("(1,64,64,4)", kernel=1, bmm=2, dense=9),
        product("(1,512,512,128)", kernel=1, bmm=3, dense=9),
    ]
    products = [
        predicted(one, kernel=kernel, bmm=4, einsum=5)
        for one, kernel in zip(bare, (4, 2, 1), strict=True)
    ]
    assert [one.predicted_speed_up for one in products] == [1, 2, 4]
    assert bare[0].predicted_speed_up is None
    of = {"float32": products}
    names = [row[1] for row in heuristic.correlations(of).rows]
    assert names.count(heuristic.MODELS.name) == 3
    assert heuristic.MODELS.name not in {
        row[1] for row in heuristic.correlations({"float32": bare}).rows
    }
    # (b+c)/(bc) cannot tell the first two apart; the models can.
    rules = {row[1]: row[3] for row in heuristic.decisions(of).rows}
    assert rules["kernel from speed-up by the cost models = 2 on"] == "100%"
    assert rules["always kernel"] == "67%"
    widths = heuristic.by_width(of).rows
    assert [row[1:3] for row in widths] == [("to 1,024", "2"), ("53,248 on", "1")]
    errors = {row[1]: row[4] for row in heuristic.model_errors(of).rows}
    assert errors == {"kernel": "2.00", "bmm": "2.00"}


@pytest.mark.parametrize("count", [10, 48, 300, 626])
def test_intervals_hold_the_number_and_shrink(count: int) -> None:
    estimate = statistics.share(count // 2, count, 627)
    assert estimate is not None
    assert 0 <= estimate.low < estimate.value < estimate.high <= 1
    fewer = statistics.share(5, 10, 627)
    assert fewer is not None
    assert estimate.high - estimate.low <= fewer.high - fewer.low
    values = [1 + place / count for place in range(count)]
    middle = statistics.median(values, 627)
    assert middle is not None
    assert middle.low <= middle.value <= middle.high
    assert statistics.median(values, count) == Estimate(*[middle.value] * 3, count)


def test_wilsons_interval_covers_as_often_as_it_says() -> None:
    """Of all samples of 20 with a share of 0.3, weighted by how likely they are."""
    covered = sum(
        math.comb(20, hits) * 0.3**hits * 0.7 ** (20 - hits)
        for hits in range(21)
        if (estimate := statistics.share(hits, 20, 10**9)) and estimate.low <= 0.3 <= estimate.high
    )
    assert 0.93 < covered < 0.99
