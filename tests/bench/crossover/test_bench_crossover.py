"""`ksopt bench crossover`: the order of measurement, the interpolation, and a tiny run."""

import csv
import json
from collections.abc import Mapping
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

from ksopt.bench import heat_map
from ksopt.bench.crossover import interpolation, layers, measuring, report, sampling, views
from ksopt.bench.crossover import run as runs
from ksopt.bench.crossover.interpolation import Grid
from ksopt.bench.crossover.options import CrossoverOptions
from ksopt.bench.crossover.request import CrossoverRequest, Plane, Site
from ksopt.bench.crossover.results import DENSE, DENSE_FUSED, FP8, FP8_PRODUCT, SiteResult, Timed
from ksopt.cli import main
from ksopt.measure.timing import Measurement

PLANE = Plane("float32", "inference")


@pytest.fixture(autouse=True)
def quick(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest repeats: the tests are not about the numbers."""
    monkeypatch.setattr(measuring, "_SECONDS", 0.001)
    monkeypatch.setattr(measuring, "_FEWEST", 3)


def request(**changed: Any) -> CrossoverRequest:
    defaults = {"device": "cpu", "widths": "16,32,64", "rows": "1,4,16", "budgets": "50%,25%"}
    return CrossoverRequest.of(CrossoverOptions(**{**defaults, "passes": "inference", **changed}))


def result(site: Site, us: Mapping[str, float]) -> SiteResult:
    ways = [Timed(name, "", Measurement(one, one, one, 9)) for name, one in us.items()]
    return SiteResult(site, tuple(ways))


def known(values: Mapping[tuple[int, int], float]) -> dict[Site, float]:
    return {Site(PLANE, *where): value for where, value in values.items()}


# The order of measurement, and the interpolation.

GRID = Grid((16, 32, 64, 128, 256), (1, 4, 16, 64))


def test_the_middle_and_the_corners_come_first_in_every_map() -> None:
    other = Plane("bfloat16", "training")
    sites = [Site(plane, w, r) for plane in (PLANE, other) for w in GRID.widths for r in GRID.rows]
    first = sampling.next_sites(GRID, sites, {}, 10)
    places = [(64, 16), (256, 64), (256, 1), (16, 64), (16, 1)]
    assert first == [Site(plane, *place) for place in places for plane in (PLANE, other)]
    assert len(sampling.next_sites(GRID, sites, {}, 1000)) == len(sites)


def test_then_the_site_whose_winner_is_in_doubt() -> None:
    sites = [Site(PLANE, w, r) for w in GRID.widths for r in GRID.rows]
    sure, tied = log(4.0), log(1.02)
    values = {(16, 1): sure, (16, 64): sure, (64, 16): sure, (256, 1): tied, (256, 64): tied}
    (following, *_) = sampling.next_sites(GRID, sites, known(values))
    assert following.width == 256  # between the two that are nearly equal


def test_what_is_measured_never_comes_again() -> None:
    sites = [Site(PLANE, w, r) for w in GRID.widths for r in GRID.rows]
    measured_margins: dict[Site, float] = {}
    while ahead := sampling.next_sites(GRID, sites, measured_margins, 1):
        assert ahead[0] not in measured_margins
        measured_margins[ahead[0]] = 0.1
    assert set(measured_margins) == set(sites)


def test_an_estimate_lies_between_its_inputs() -> None:
    values = known({(16, 1): 0.0, (64, 1): 1.0})
    middle = interpolation.estimate(GRID, Site(PLANE, 32, 1), values)
    assert middle == pytest.approx(0.5)
    assert interpolation.estimate(GRID, Site(PLANE, 64, 1), values) == 1.0
    near = interpolation.estimate(GRID, Site(PLANE, 64, 4), values)
    assert near is not None
    assert 0.5 < near < 1.0
    assert interpolation.estimate(GRID, Site(PLANE, 256, 64), values) is None  # too far
    other = Site(Plane("float32", "training"), 32, 1)
    assert interpolation.estimate(GRID, other, values) is None  # another map


# The views, of synthetic times.


def test_a_cell_says_which_budget_wins_and_by_how_much() -> None:
    crossover_request = request(widths="16", rows="1")
    (site,) = crossover_request.sites
    times = {DENSE: 12.0, DENSE_FUSED: 8.0, FP8: 2.0, FP8_PRODUCT: 1.0, "50%": 16.0, "25%": 4.0}
    (cell,) = views.cells(crossover_request, {site: result(site, times)})
    assert cell.speed_ups == pytest.approx({"50%": 0.5, "25%": 2.0})  # over the faster dense
    assert cell.over[FP8] == pytest.approx({"50%": 0.125, "25%": 0.5})
    assert cell.over[FP8_PRODUCT] == pytest.approx({"50%": 0.0625, "25%": 0.25})
    assert views.verdict(cell, crossover_request.budgets) == "25% x2.00"
    assert cell.largest(crossover_request.budgets, FP8) is None
    assert views.verdict(cell, crossover_request.budgets, FP8) == "none x0.50"
    faster, slower = (report.drawn(PLANE, [cell], crossover_request, one) for one in (DENSE, FP8))
    assert "x2.00" in faster.wide
    assert "x0.50" in slower.wide
    assert (faster.name, slower.name) == (
        "crossover-inference-float32", "crossover-inference-float32-over-fp8",
    )  # fmt: skip
    # As far from 1 on either side: in the middle, in logarithms.
    assert cell.crossover(crossover_request.budgets) == pytest.approx(
        exp((log(0.5) + log(0.25)) / 2)
    )


def test_cells_say_what_was_not_measured() -> None:
    crossover_request = request(widths="16,32,64,128", rows="1")
    first = crossover_request.sites[0]
    cells = views.cells(
        crossover_request, {first: result(first, {DENSE: 2.0, "50%": 1.0, "25%": 1.0})}
    )
    assert [cell.status for cell in cells] == [
        views.MEASURED, views.BETWEEN, views.BETWEEN, views.UNKNOWN,
    ]  # fmt: skip
    table = views.map_table(PLANE, cells, crossover_request)
    assert table.rows == (("1", "50% x2.00", "~50% x2.00", "~50% x2.00", "-"),)
    assert views.counts_table(cells, crossover_request).rows[0][1:6] == (
        "4",
        "1",
        "2",
        "1",
        "1 of 1",
    )
    drawing = report.drawn(PLANE, cells, crossover_request)
    assert drawing.wide.count('class="outline"') == 1
    assert drawing.wide.count('class="cell"') == 3
    assert drawing.name == "crossover-inference-float32"


def test_a_layer_that_loses_is_drawn_as_slower() -> None:
    crossover_request = request(widths="16", rows="1")
    (site,) = crossover_request.sites
    cells = views.cells(
        crossover_request, {site: result(site, {DENSE: 1.0, "50%": 2.0, "25%": 1.25})}
    )
    assert views.verdict(cells[0], crossover_request.budgets) == "none x0.80"
    drawing = report.drawn(PLANE, cells, crossover_request).wide
    assert 'class="first"' in drawing
    assert 'class="cell"' not in drawing


def test_colours_grow_with_the_ratio_and_are_alike_both_ways() -> None:
    assert heat_map.strength(1.1) < heat_map.strength(1.5) < heat_map.strength(2.9)
    assert heat_map.strength(2.0) == pytest.approx(heat_map.strength(0.5))
    assert heat_map.strength(50.0) == heat_map.strength(3.0)


def test_the_csv_has_a_line_for_each_layer_and_budget() -> None:
    crossover_request = request(widths="16,32", rows="1")
    site = crossover_request.sites[0]
    ways = [
        Timed(DENSE, "", Measurement(2.0, 2.0, 2.0, 9)),
        Timed("50%", "(1,4,4,4)*(4,4,4,1)", Measurement(1.5, 1.5, 1.5, 9)),
        Timed("50%", "(1,8,4,2)*(2,4,8,1)", Measurement(1.0, 1.0, 1.0, 9)),
    ]
    measured = {site: SiteResult(site, tuple(ways))}
    lines = list(
        csv.DictReader(
            views.to_csv(
                views.cells(crossover_request, measured), crossover_request, measured
            ).splitlines()
        )
    )
    assert len(lines) == 4
    assert lines[0]["chain"] == "(1,8,4,2)*(2,4,8,1)"  # the faster one
    assert float(lines[0]["speed_up"]) == pytest.approx(2.0)
    assert lines[1]["ks_us"] == ""
    assert lines[2]["status"] == "interpolated"


def test_a_result_is_read_as_it_was_stored() -> None:
    site = Site(PLANE, 16, 1)
    one = SiteResult(site, (Timed("25%", "(1,2,2,8)*(8,2,2,1)", None, "wrong: so"),
                            Timed(DENSE, "", Measurement(1.0, 0.9, 1.1, 7))))  # fmt: skip
    assert SiteResult.of_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.faults == [f"{site}: 25% (1,2,2,8)*(8,2,2,1): wrong: so"]


# What it refuses.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--budgets", "30%"), "'30%' is no share 2/q with a whole q"),
        (("--budgets", "0"), "'0' is no share"),
        (("--widths", "16,x"), "--widths 16,x: give whole numbers"),
        (("--rows", "0"), "--rows 0: give whole numbers of at least 1"),
        (("--precisions", "tf32"), "tf32 is for NVIDIA GPUs"),
        (("--passes", "inferense"), "did you mean 'inference'?"),
        (("--minutes", "0"), "--minutes 0: it must be above 0"),
    ],
)
def test_what_is_not_allowed_is_refused(
    words: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["bench", "crossover", "--device", "cpu", *words, "--out", str(out)]
    assert main.main(command) == 2
    assert expected in capsys.readouterr().err
    assert not out.exists()


# A tiny run, as a user makes it.


def run(out: Path, *words: str) -> int:
    small = ("--widths", "16,32", "--rows", "1,8", "--budgets", "50%,12.5%", "--device", "cpu")
    return main.main(["bench", "crossover", *small, "--quiet", *words, "--out", str(out)])


def test_a_run_leaves_a_map_and_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    output = capsys.readouterr()
    assert "inference, float32" in output.out
    assert "training, float32" in output.out
    with (tmp_path / "crossover.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 16
    for line in lines:
        assert line["status"] == "measured"
        speed_up = float(line["dense_us"]) / float(line["ks_us"])
        assert float(line["speed_up"]) == pytest.approx(speed_up)
    assert (tmp_path / "maps" / "crossover-training-float32.svg").stat().st_size > 500
    assert "## Training, float32" in (tmp_path / "crossover.md").read_text("utf-8")

    # The report again, of the maps of that request.
    before = (tmp_path / "crossover.csv").read_text("utf-8")
    command = ["bench", "crossover", "--report", "--device", "cpu", "--budgets", "50%,12.5%"]
    assert main.main([*command, "--json", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "crossover.csv").read_text("utf-8") == before
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 8


def test_a_run_that_is_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Site] = []
    real = runs.measure_site

    def spied(request: CrossoverRequest, site: Site) -> SiteResult:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(site)
        return real(request, site)

    monkeypatch.setattr(runs, "measure_site", spied)
    assert run(tmp_path) == 130
    assert "5 layers are left: the same command goes on" in capsys.readouterr().err
    sites = list(measured)
    measured.clear()
    monkeypatch.setattr(
        runs, "measure_site", lambda request, site: measured.append(site) or real(request, site)
    )
    assert run(tmp_path) == 0
    assert len(measured) == 5
    assert not set(measured) & set(sites)


def test_half_a_line_of_a_killed_run_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--passes", "inference")
    assert run(tmp_path, *words) == 0
    rows = tmp_path / "rows.jsonl"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-40])
    measured: list[Site] = []
    real = runs.measure_site
    monkeypatch.setattr(
        runs, "measure_site", lambda request, site: measured.append(site) or real(request, site)
    )
    assert run(tmp_path, *words) == 0
    assert len(measured) == 1
    assert len(rows.read_bytes().splitlines()) == len(whole.splitlines()) == 4


def test_time_that_is_up_begins_nothing_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--minutes", "1e-6") == 0
    assert "layers are left" in capsys.readouterr().err


def test_other_budgets_have_a_folder_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--minutes", "1e-6") == 0
    assert run(tmp_path, "--budgets", "25%") == 2
    assert "holds measurements of something else" in capsys.readouterr().err


def test_a_wrong_layer_gets_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = layers.ks_layer

    def wrong(*args: Any) -> Any:
        layer = real(*args)
        forward = layer.forward
        layer.forward = lambda x: forward(x) * 1.01
        return layer

    monkeypatch.setattr(layers, "ks_layer", wrong)
    assert run(tmp_path, "--passes", "inference", "--rows", "8", "--widths", "16") == 1
    assert "50% (1,4,4,4)*(4,4,4,1): wrong: relative error" in capsys.readouterr().err


def test_a_wrong_gradient_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return g * 1.01

    real = layers.ks_layer

    def wrong(*args: Any) -> Any:
        layer = real(*args)
        forward = layer.forward
        layer.forward = lambda x: Wrong.apply(forward(x))
        return layer

    crossover_request = request(passes="training", widths="16", rows="8")
    right = measuring.measure_site(crossover_request, crossover_request.sites[0])
    assert right.faults == []
    assert right.us("50%") is not None
    monkeypatch.setattr(layers, "ks_layer", wrong)
    result = measuring.measure_site(crossover_request, crossover_request.sites[0])
    assert all("gradient of x" in fault for fault in result.faults)
    assert len(result.faults) == 4  # two chains of each budget


def test_a_width_without_a_chain_is_no_fault() -> None:
    crossover_request = request(widths="18", rows="1", budgets="50%,25%")
    result = measuring.measure_site(crossover_request, crossover_request.sites[0])
    way = result.way("50%")
    assert way is not None
    assert way.reason == "no chain: 18 is no multiple of 4"
    assert result.faults == []


def test_a_budget_has_monarchs_chain_and_one_of_two_blocks() -> None:
    (budget,) = request(widths="64", rows="8", budgets="25%").budgets
    for width in (64, 24):
        chains = budget.chains(width)
        assert [chain.nnz for chain in chains] == [width * width // 4] * 2
    assert len(budget.chains(8)) == 2
    assert len(request(widths="64", rows="8", budgets="100%").budgets[0].chains(64)) == 1
    crossover_request = request(widths="16", rows="8", budgets="25%")
    result = measuring.measure_site(crossover_request, crossover_request.sites[0])
    of_budget = [way for way in result.ways if way.name == "25%"]
    assert [way.chain for way in of_budget] == ["(1,2,2,8)*(8,2,2,1)", "(1,8,2,2)*(2,2,8,1)"]
    assert result.us("25%") == min(way.time.median_us for way in of_budget if way.time)


def test_fp8_rounds_as_much_as_it_may() -> None:
    """Where torch has such a product here: one of the rounded operands, in the device's way."""
    crossover_request = request(widths="64", rows="32", precisions="bfloat16")
    result = measuring.measure_site(crossover_request, crossover_request.sites[0])
    for name in (FP8, FP8_PRODUCT):
        way = result.way(name)
        assert way is not None
        assert way.time is not None or way.reason.startswith("not there")


def test_what_fp8_may_be_off_by_is_less_than_a_wrong_scale() -> None:
    module = layers.Dense(64).to(torch.bfloat16)
    x = torch.randn(32, 64).to(torch.bfloat16)
    with torch.no_grad():
        rounded = x.to(torch.float8_e4m3fn).to(torch.bfloat16)
        assert layers.fault_of_fp8(lambda _: module(rounded), module, x) is None
        assert layers.fault_of_fp8(lambda _: module(1.2 * x), module, x) is not None
