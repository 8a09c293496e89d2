"""`ksopt bench paper`: its views from made-up rows, and a tiny run as a user makes it."""

import csv
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ksopt.bench import benchmark
from ksopt.bench import run as kernels
from ksopt.bench.benchmark import Bench
from ksopt.bench.ready import Ready
from ksopt.bench.reproduction import (
    cases,
    energy,
    energy_tables,
    figures,
    heuristic,
    model_tables,
    models,
    product_tables,
    report,
    statistics,
)
from ksopt.bench.reproduction.asked import Asked
from ksopt.bench.reproduction.catalogue import ITEMS, items
from ksopt.bench.reproduction.cells import Cell
from ksopt.bench.reproduction.energy import Energies, EnergyBench
from ksopt.bench.reproduction.measured import Measured
from ksopt.bench.reproduction.models import Case, Subject
from ksopt.bench.reproduction.options import PaperOptions
from ksopt.bench.reproduction.paper_numbers import printed
from ksopt.bench.reproduction.products import FIRST, LAST, Product
from ksopt.bench.reproduction.request import PaperRequest
from ksopt.bench.reproduction.statistics import Estimate
from ksopt.bench.request import BenchRequest
from ksopt.cli import main
from ksopt.measure.energy import PerCall
from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain, Pattern

CPU = ("--device", "cpu", "--quiet")


@pytest.fixture(autouse=True)
def quick(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up roofline and the fewest repeats, for what is tested is not the numbers."""
    made_up = Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "made up")
    monkeypatch.setattr(benchmark, "measure_roofline", lambda device, dtype: made_up)
    monkeypatch.setattr(benchmark, "_SECONDS", 0.001)
    monkeypatch.setattr(benchmark, "_FEWEST", 3)
    monkeypatch.setattr(models, "_SECONDS", 0.001)


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
    (found,) = (one for one in cells if (one.row, one.column) == (row, column))
    return None if found.ours is None else found.ours.value


# The views, of made-up rows.


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
    data = figures.boxes_of(item("figure", number), products, "float32")
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
    found = drawn(12, SLOW)
    assert {way for way, _ in found} == {"kernel", "bmm", "einsum", "bsr", "dense", "sparse"}
    assert found["kernel", "time of batch-size-first / time of batch-size-last"] == [2.0]


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
        {cases.DENSE: took(10), cases.BMM: took(9), cases.KERNEL: took(5)},
    )
    broken = Case(Subject("Linear N x N", "float32"), {}, ("out of memory",))
    found = {one.subject: one for one in (case, broken)}
    cells = model_tables.modules("Table 4", found, ("float32",), False)
    assert value(cells, "Block", "kernel") == 0.5
    (block,) = (one for one in cells if (one.row, one.column) == ("Block", "kernel"))
    assert (block.paper, block.ratio) == (0.78, pytest.approx(0.5 / 0.78))
    absent = {one.row: one.absent for one in cells if one.ours is None}
    assert absent["Linear N x N"] == "out of memory"
    assert absent["GPT-2 medium"] == "nothing was measured for it"

    vit = Case(Subject("ViT-S/16", "float32"), {cases.COMPLETE: took(8e4), cases.LINEAR: took(2e4)})
    cells = model_tables.sizes("Table 6", {vit.subject: vit}, ("float32",), False)
    assert value(cells, "ViT-S/16", "float32 share") == 25.0
    assert value(cells, "ViT-S/16", "float32 complete") == pytest.approx(0.08)


def test_the_papers_numbers_do_not_stand_beside_small_models() -> None:
    large = model_tables.modules("Table 7", {}, ("float32",), is_small=False)
    small = model_tables.modules("Table 7", {}, ("float32",), is_small=True)
    assert all(one.paper is not None for one in large)
    assert all(one.paper is None for one in small)


def test_every_number_of_the_paper_is_that_of_a_cell() -> None:
    empty = Measured({}, {}, {}, {})
    asked = Asked(ITEMS, False, (), {"products": 627, "energy": 651})
    _, cells = report.sections(empty, asked)
    shown = {(one.item, one.row, one.column) for one in cells}
    assert set(printed()) <= shown
    assert all(one.absent for one in cells)
    with_number = {(o.item, o.row, o.column) for o in cells if o.paper is not None}
    assert with_number == {key for key, one in printed().items() if one.value is not None}


def test_dtypes_that_the_paper_lacks_stand_beside_its_own_once() -> None:
    products = dict.fromkeys(("float32", "float16", "bfloat16"), (FAST, SLOW))
    measured = Measured(products, {}, {}, {})

    def settings(*numbers: int) -> dict[str, set[str]]:
        asked = Asked(items(numbers, (), False), False, (), {"products": 2, "energy": 1})
        _, cells = report.sections(measured, asked)
        return {name: {one.setting for one in cells if one.item == name}
                for name in {one.item for one in cells}}  # fmt: skip

    assert settings(3, 8) == {"Table 3": {"float32", "bfloat16"}, "Table 8": {"float16"}}
    assert settings(8) == {"Table 8": {"float16", "bfloat16"}}


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


@pytest.mark.parametrize("count", [10, 48, 300, 626])
def test_intervals_hold_the_number_and_shrink(count: int) -> None:
    found = statistics.share(count // 2, count, 627)
    assert found is not None
    assert 0 <= found.low < found.value < found.high <= 1
    fewer = statistics.share(5, 10, 627)
    assert fewer is not None
    assert found.high - found.low <= fewer.high - fewer.low
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
        if (found := statistics.share(hits, 20, 10**9)) and found.low <= 0.3 <= found.high
    )
    assert 0.93 < covered < 0.99


# What it refuses.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--table", "9"), "that can be rerun are 3, 4, 5, 6, 7, 8 (1 and 2 hold no measurement)"),
        (("--figure", "5"), "are 4, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17"),
        ((), "nothing is asked for: give --table"),
        (("--table", "3", "--dtypes", "float8"), "'float8' is unknown"),
        (("--table", "3", "--dtypes", "tf32"), "tf32 is for NVIDIA GPUs"),
        (("--table", "3", "--minutes", "0"), "it must be above 0"),
        (("--table", "3", "--sample", "0"), "sample must be at least 1"),
    ],
)
def test_what_does_not_exist_is_refused(
    words: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "paper", *words, *CPU, "--out", str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_has_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "paper", "--report", "--out", str(tmp_path)]) == 2
    assert "asked.json" in capsys.readouterr().err


def test_every_item_has_a_number_once() -> None:
    assert len({(one.kind, one.number) for one in ITEMS}) == len(ITEMS)
    assert items((), (), True) == ITEMS


# A tiny run, as a user makes it.


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns that a CPU multiplies by in no time, and two modules."""
    few = (Pattern(1, 8, 8, 2), Pattern(2, 4, 16, 3), Pattern(1, 16, 4, 1))
    from ksopt.bench import paper

    monkeypatch.setattr(paper, "patterns", lambda: few)
    monkeypatch.setattr(cases, "names", lambda kind: ("Linear N x N + bias", "Block"))


def run(out: Path, *words: str) -> int:
    return main.main(["bench", "paper", *words, *CPU, "--batch", "8", "--out", str(out)])


def numbers(out: Path) -> list[dict[str, str]]:
    with (out / "paper.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("tiny")
def test_a_run_leaves_tables_figures_and_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--table", "5", "--figure", "6", "9", "7") == 0
    told = capsys.readouterr()
    assert "Table 5: How often kernel wins, by layout" in told.out
    assert "which a CPU has not: Figure 7 is left out" in told.err
    found = numbers(tmp_path)
    assert {row["item"] for row in found} == {"Table 5", "Figure 6", "Figure 7", "Figure 9"}
    assert all(bool(row["ours"]) or bool(row["absent"]) for row in found)
    assert all(row["absent"] for row in found if row["item"] == "Figure 7")
    assert any(row["ours"] for row in found if row["item"] == "Table 5")
    text = (tmp_path / "paper.md").read_text("utf-8")
    assert "## Figure 9, float32" in text
    assert "The heuristic" in text
    assert (tmp_path / "figures" / "figure-9-float32.svg").stat().st_size > 500
    with (tmp_path / "products-float32.csv").open(encoding="utf-8", newline="") as file:
        ways = {(row["way"], row["layout"]) for row in csv.DictReader(file) if row["median_us"]}
    assert {("ksopt", FIRST), ("ksopt", LAST), ("bmm_paper_product", LAST)} <= ways

    # The report again, on a machine that knows nothing of the request.
    (tmp_path / "paper.csv").unlink()
    assert main.main(["bench", "paper", "--report", "--json", "--out", str(tmp_path)]) == 0
    assert numbers(tmp_path) == found
    assert len(json.loads(capsys.readouterr().out)["cells"]) == len(found)


@pytest.mark.usefixtures("tiny")
def test_a_run_that_is_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    real = Bench.measure

    def spied(self: Bench, subject: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(str(subject.chain))
        return real(self, subject)

    monkeypatch.setattr(Bench, "measure", spied)
    assert run(tmp_path, "--table", "3", "7") == 130
    assert "not complete: products-float32" in capsys.readouterr().err
    assert any(row["ours"] for row in numbers(tmp_path))

    measured.clear()
    monkeypatch.setattr(Bench, "measure", lambda self, s: measured.append(str(s)) or real(self, s))
    assert run(tmp_path, "--table", "3", "7") == 0
    assert len(measured) == 1
    rows = (tmp_path / "modules-float32" / "rows.jsonl").read_text("utf-8").splitlines()
    assert len(rows) == 2


@pytest.mark.usefixtures("tiny")
def test_time_that_is_up_begins_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--table", "3", "7", "--minutes", "1e-9") == 0
    told = capsys.readouterr().err
    assert "not complete: products-float32, modules-float32; the same command goes on" in told


def test_small_models_and_the_papers_do_not_share_a_folder(tmp_path: Path) -> None:
    asked = Asked(items((3,), (), False), True, ("small",), {"products": 3, "energy": 1})
    assert asked.kept(tmp_path) == asked
    more = dataclasses.replace(asked, items=items((), (6,), False), remarks=("other",))
    assert [one.name for one in more.kept(tmp_path).items] == ["Table 3", "Figure 6"]
    assert Asked.read(tmp_path).remarks == ("small", "other")
    with pytest.raises(Exception, match="holds small models, and the paper's models are asked"):
        dataclasses.replace(asked, is_small=False).kept(tmp_path)


# The modules.


@pytest.mark.parametrize("name", cases.names("modules"))
def test_the_versions_of_a_module_compute_the_same(name: str) -> None:
    built = cases.build(name, torch.float64, torch.device("cpu"), small=True)
    with torch.no_grad():
        assert models._faults(built, 1e-12) == {}
    dense = built.versions[cases.DENSE](built.inputs[cases.DENSE])
    assert dense.shape == built.versions[cases.BMM](built.inputs[cases.BMM]).shape
    weights = {
        key: sum(one.numel() for one in module.parameters())
        for key, module in built.versions.items()
    }
    assert weights[cases.KERNEL] == weights[cases.BMM] < weights[cases.DENSE]


def test_the_papers_chains_stand_in_a_vit_s_16() -> None:
    built = cases.build("Block", torch.float32, torch.device("meta"), small=False)
    kernel = built.versions[cases.KERNEL]
    chains = [str(one.chain) for one in kernel.modules() if hasattr(one, "chain")]
    assert chains.count("(1,192,48,2)*(2,48,192,1)") == 3
    assert chains.count("(1,768,192,2)*(6,64,64,1)") == 1
    assert len(chains) == 5


def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cases.by_ks_linear

    def wrong(layer: torch.nn.Module) -> torch.nn.Module:
        made = real(layer)
        made.weights[0].data[0] *= 1.01
        return made

    monkeypatch.setattr(cases, "by_ks_linear", wrong)
    request = PaperRequest.of(PaperOptions(table=(7,), device="cpu"))
    case = models.measure_case(request, Subject("Linear N x N", "float32"))
    assert set(case.times) == {cases.DENSE, cases.BMM}
    assert "relative error" in case.faults[0]


def test_a_case_is_read_as_it_was_kept() -> None:
    case = Case(Subject("Block", "float16"), {"bmm": Measurement(1.0, 0.9, 1.1, 7)}, ("a fault",))
    assert Case.of_json(json.loads(json.dumps(case.to_json()))) == case


# Energy, on a device that a test plays.


class Played:
    """A board that draws 50 W, and 250 W more while it computes: its clock moves with calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.used = 0.0

    def millijoules(self) -> float:
        self.pass_(1e-4, 50.0)  # a look takes its time
        return self.used

    def pass_(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.used += 1e3 * watts * seconds

    def synchronize(self) -> None:
        """Nothing is queued."""


def test_idle_power_is_measured_and_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Played()
    words = {"patterns": ("(1,8,8,2)",), "device": "cpu", "dtype": "float32", "batch": "8",
             "against": "bmm_paper", "layout": "both"}  # fmt: skip
    from ksopt.bench.options import BenchOptions
    from ksopt.measure import energy as meters

    request = BenchRequest.of(BenchOptions(**words))  # type: ignore[arg-type]
    real = meters.per_call, meters.idle_watts
    monkeypatch.setattr(
        meters, "idle_watts",
        lambda meter: real[1](meter, clock=lambda: board.now,
                              sleep=lambda s: board.pass_(s, 50.0)),
    )  # fmt: skip

    def per_call(calls: Any, meter: Any, seconds: float) -> dict[str, PerCall]:
        assert {name.split()[0] for name in calls} == {"kernel", "bmm"}
        for call in calls.values():
            call()
        played = {name: lambda: board.pass_(0.01, 300.0) for name in calls}
        return real[0](played, meter, 0.2, clock=lambda: board.now)

    monkeypatch.setattr(meters, "per_call", per_call)
    found = EnergyBench(request, board).measure(request.subjects[0])  # type: ignore[arg-type]
    assert found.idle_w == pytest.approx(50.0, rel=0.01)
    assert set(found.calls) == {(way, at) for way in ("kernel", "bmm") for at in (FIRST, LAST)}
    used = found.product()
    key = ("kernel", FIRST)
    assert used.energy_mj[key] == pytest.approx(3000.0, rel=0.02)
    assert used.over_idle_mj[key] == pytest.approx(2500.0, rel=0.03)
    assert Energies.of_json(json.loads(json.dumps(found.to_json()))) == found


def test_energies_are_kept_and_drawn(tmp_path: Path) -> None:
    from ksopt.bench.options import BenchOptions

    request = BenchRequest.of(
        BenchOptions(patterns=("(1,8,8,2)",), device="cpu", dtype="float32", batch="8")
    )
    one = Energies(
        request.subjects[0], 50.0,
        {("kernel", FIRST): PerCall(2.0, 1e-3), ("bmm", FIRST): PerCall(4.0, 1e-3)},
    )  # fmt: skip
    with energy.opened(tmp_path, request) as book:
        book.add(one)
    with energy.opened(tmp_path, request) as book:
        assert book.measured == {request.subjects[0]: one}
    found = one.product()
    assert found.energy_ratio(over_idle=False) == 0.5
    rows = energy_tables.by_way({"float32": [found]}).rows
    # 50 W in a millisecond are 50 mJ; of 8 rows.
    assert rows[0] == ("float32", "kernel", "1", "2", "250", "-48", "-6e+03")
    (line, _) = csv.DictReader(energy_tables.to_csv([found]).splitlines())
    assert (line["way"], float(line["uj_a_token"])) == ("kernel", 250.0)


def test_a_bench_can_be_prepared_without_being_timed() -> None:
    from ksopt.bench.options import BenchOptions

    request = BenchRequest.of(
        BenchOptions(patterns=("(1,8,8,2)",), device="cpu", dtype="float32", batch="8",
                     against="bmm_paper,bsr")
    )  # fmt: skip
    ready = Ready()
    with Bench(request).prepared(request.subjects[0], ready):
        assert ("ksopt", FIRST) in ready.calls
        assert ("bmm_paper", LAST) in ready.calls
    assert ready.calls == {}  # what they hold is freed


def test_products_go_to_workers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The parts that can be measured on several GPUs are dealt out as `bench kernels` does it."""
    seen: dict[str, Any] = {}

    def spied(request: BenchRequest, out: Path, **how: Any) -> kernels.Outcome:
        seen.update(how, dtype=request.dtype, layouts=request.layouts)
        return kernels.Outcome(out, "", 0)

    monkeypatch.setattr(kernels, "run_bench", spied)
    assert run(tmp_path, "--table", "8", "--sample", "2", "--workers", "3") == 0
    assert (seen["workers"], seen["dtype"], seen["layouts"]) == (3, "float16", (FIRST, LAST))
