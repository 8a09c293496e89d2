"""The growth of ksopt's costs: the fits, and each series at its least size."""

import doctest
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import how_it_grows
from growth import fitting, models, points, series
from growth.points import Point
from ksopt.search.model_layers import layers_of_model

DATA = Path(__file__).parents[2] / "docs" / "data"


def test_its_examples_are_true() -> None:
    failed, tried = doctest.testmod(fitting)
    assert tried > 1
    assert not failed


@pytest.mark.parametrize(("base", "power"), [(0.0, 1.0), (3.0, 2.0), (0.5, 0.5)])
def test_the_law_of_points_on_a_law_is_that_law(base: float, power: float) -> None:
    sizes = [1, 3, 10, 30, 100, 300]
    law = fitting.fit(sizes, [base + 2.0 * size**power for size in sizes])
    assert law is not None
    assert abs(law.power - power) <= 0.05
    assert law.error < 0.05
    assert abs(law.at(1000) / (base + 2.0 * 1000**power) - 1) < 0.15


def test_three_points_have_no_law() -> None:
    assert fitting.fit([1, 2, 3], [1.0, 2.0, 3.0]) is None


def test_points_are_stored_and_a_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def measured(what: str, size: int, limit_s: float) -> Point:
        sizes.append(size)
        state = "timeout" if size > 100 else "done"
        return Point(what, size, 0.2 * size, 0.1 * size, 1.0, state, "a, note")

    monkeypatch.setattr(points, "measured", measured)
    options = ["--what", "rows", "--out", str(tmp_path)]
    assert how_it_grows.main([*options, "--most", "10"]) == 0
    assert how_it_grows.main(options) == 0
    assert how_it_grows.main(options) == 0
    assert sizes == [1, 10, 100, 1000]  # each once, and none after one that took too long
    stored = points.read(tmp_path / "growth-rows.csv")
    assert stored[1] == Point("rows", 10, 2.0, 1.0, 1.0, "done", "a, note")
    last = capsys.readouterr().out.splitlines()[-1]
    assert "1-100" in last
    assert "1000: timeout" in last


def test_memory_has_a_law_only_where_it_grows() -> None:
    def line(mib: list[float]) -> str:
        sizes = [1, 10, 100, 1000]
        done = [Point("rows", n, 1.0, 1.0 + n, one) for n, one in zip(sizes, mib, strict=True)]
        return how_it_grows.line("rows", done)

    assert "MiB: " in line([10.0, 19.0, 109.0, 1009.0])
    assert "rows^(1.0" in line([10.0, 19.0, 109.0, 1009.0]).split("MiB: ")[1]
    assert "MiB: " not in line([0.1, 0.2, 0.4, 0.8])
    assert "MiB: " not in line([14.0, 5.0, 5.0, 5.0])


@pytest.mark.parametrize(("width", "middle"), [(256, 896), (models.WIDTH, 28_672)])
def test_a_block_has_the_shape_of_llama_70b(width: int, middle: int) -> None:
    for linear in (models.dense, models.sparse):
        model, x = models.on_meta(2, linear, width)
        with torch.no_grad():
            assert model(x).shape == x.shape
        block = model[0]
        assert isinstance(block, models.Block)
        assert (block.gate.in_features, block.gate.out_features) == (width, middle)
        assert (block.k.in_features, block.k.out_features) == (width, width // 8)


def test_the_sizes_of_the_series_of_spaces_are_those_of_a_block() -> None:
    model, _ = models.on_meta(1, models.dense)
    sizes = {str(one.dims) for one in layers_of_model(model).groups}
    assert sizes == set(models.SIZES)


@pytest.mark.slow
def test_the_least_size_of_each_series_is_measured() -> None:
    # Of studies a journal stands for both, and of the series that run Inductor one for all; workers
    # have a test of their own below.
    several = {
        what: one.sizes[0]
        for what, one in series.ALL.items()
        if not what.endswith(("-sqlite", "compile-inductor", "compile-width"))
        and "workers" not in what
    }
    # One process for all, and none of pytest's: some change what torch and ksopt do from then on.
    code = "import how_it_grows\n"
    code += f"for what, size in {several}.items(): how_it_grows.main(['--point', what, str(size)])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=points.SCRIPT.parent)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["what"] for line in lines] == list(several)
    for line in lines:
        assert line["state"] == "done", line
        assert line["seconds"] > 0
        assert line["cpu_s"] > 0


@pytest.mark.slow
def test_a_point_is_measured_in_a_process_of_its_own() -> None:
    point = points.measured("enumeration", 2, 120.0)
    assert (point.state, point.size) == ("done", 2)
    assert point.note.endswith(" chains")
    assert int(point.note.split()[0]) > 100


def test_a_point_that_takes_too_long_says_so() -> None:
    assert points.measured("enumeration", 3, 0.05) == Point(
        "enumeration", 3, 0.05, 0.0, 0.0, "timeout"
    )


@pytest.mark.slow
def test_workers_measure_each_trial_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    from growth import studies
    from ksopt.search import device_locks

    monkeypatch.setattr(device_locks, "device", device_locks.device)  # the study replaces it
    work = studies.of(f"journal:{tmp_path / 'log'}", trials=6, workers=3, sleep_s=0.01)
    assert work().startswith("6 trials of ")


def test_the_data_of_the_page_are_those_of_the_series() -> None:
    files = sorted(DATA.glob("growth-*.csv"))
    assert len(files) >= 8
    for file in files:
        what = file.stem.removeprefix("growth-")
        stored = points.read(file)
        assert {point.what for point in stored} == {what}
        assert {point.size for point in stored} <= set(series.ALL[what].sizes)
